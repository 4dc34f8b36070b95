"""The compressor, fused through to the stored row: prefill chunks and decode batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from harness import Case, Work, floor_us, set_count

from dsv4_tierd.kernels import compress as op
from dsv4_tierd.kernels.layout import RowFormat, RowKind, Rows, row_pool
from dsv4_tierd.kernels.ref import compress as ref
from dsv4_tierd.kernels.ref.hadamard import to_key_basis

LATENT = RowFormat(RowKind.FP8, 512, 64)
FORMATS = {"C4": LATENT, "index": RowFormat(RowKind.KEY_FP8, 128), "C128": LATENT}
SHAPES = {"C4": (4, 512, 2), "index": (4, 128, 2), "C128": (128, 512, 1)}
PREFILL = (
    ("C4", 8192, 20),
    ("C4", 65536, 140),
    ("C128", 8192, 10.5),
    ("C128", 65536, 64),
    ("index", 8192, None),
    ("index", 65536, None),
)
DECODE = (
    ("C4", 1, 2),
    ("C4", 32, 3),
    ("C4", 256, 5.5),
    ("C128", 1, 2.5),
    ("C128", 32, 6),
    ("C128", 256, 34),
    ("index", 32, None),
)
COPY_GBS = 4300.0


def cases(toy: bool) -> Iterator[Case]:
    """Prefill by tokens; decode by batch, every session at the end of a group."""
    if toy:
        for name in SHAPES:
            yield Case(f"{name} prefill 256 tokens", partial(_build_prefill, name, 256))
            yield Case(f"{name} decode batch=2", partial(_build_decode, name, 2))
        return
    for name, tokens, goal in PREFILL:
        floor = floor_us(_prefill_bytes(name, tokens), COPY_GBS)
        build = partial(_build_prefill, name, tokens)
        yield Case(f"{name} prefill {tokens} tokens", build, goal, floor)
    for name, batch, goal in DECODE:
        floor = floor_us(_decode_bytes(name, batch), COPY_GBS)
        yield Case(f"{name} decode batch={batch}", partial(_build_decode, name, batch), goal, floor)


def _prefill_bytes(name: str, tokens: int) -> int:
    ratio, dim, halves = SHAPES[name]
    return tokens * 2 * halves * dim * 4 + tokens // ratio * FORMATS[name].row_bytes


def _decode_bytes(name: str, batch: int) -> int:
    """A token's projections in and its ring row out; the group's halves from the ring."""
    ratio, dim, halves = SHAPES[name]
    token = 2 * halves * dim * 4
    pooled = (ratio * halves - 1) * 2 * dim * 4
    return batch * (2 * token + pooled + FORMATS[name].row_bytes)


def _params(name: str, device: torch.device) -> ref.CompressParams:
    ratio, dim, halves = SHAPES[name]
    freq = 160000.0 ** (-torch.arange(32, device=device) / 32)
    ape = torch.randn(ratio, halves * dim, device=device)
    return ref.CompressParams(ape, torch.rand(dim, device=device) + 0.5, 1e-6, freq, ratio)


def _close(rows: Rows, ids: torch.Tensor, entries: torch.Tensor) -> None:
    got, want = rows.read(ids), to_key_basis(entries, rows.format.kind)
    error = ((got - want).norm() / want.norm()).item()
    assert error < 5e-2, f"relative error {error:.2e}, fp8 rounding alone is 2.7e-2"


def _build_prefill(name: str, tokens: int, device: torch.device) -> Work:
    params, fmt = _params(name, device), FORMATS[name]
    width, count = params.ape.shape[1], tokens // params.ratio
    ring = torch.randn(params.ring_len, params.ring_dim, device=device)
    rows = row_pool(fmt, count, 64, device)
    ids = torch.arange(count, dtype=torch.int32, device=device)
    held = op.scratch(count, params.entry_dim, device)
    most = set_count(_prefill_bytes(name, tokens), most=12) if device.type == "cuda" else 1
    sets = [torch.randn(tokens, 2, width, device=device).unbind(1) for _ in range(most)]
    start = 1 << 19

    def run(kv: torch.Tensor, gate: torch.Tensor) -> None:
        op.compress_prefill(kv, gate, start, ring, params, ring, rows=rows, ids=ids, held=held)

    def check() -> None:
        entries = ref.compress_prefill(*sets[0], start, ring.clone(), params, ring.clone())
        run(*sets[0])
        _close(rows, ids, entries)

    runs = [partial(run, *one) for one in sets]
    return Work(runs, check, _prefill_bytes(name, tokens), result=lambda: [rows.data])


def _build_decode(name: str, batch: int, device: torch.device) -> Work:
    params, fmt = _params(name, device), FORMATS[name]
    most = set_count(batch * params.ring_len * params.ring_dim * 4, most=24)
    most = most if device.type == "cuda" else 1
    rings = torch.randn(most, batch, params.ring_len, params.ring_dim, device=device)
    width = params.ape.shape[1]
    kv, gate = torch.randn(batch, 2, width, device=device).unbind(1)
    slots = torch.arange(batch, device=device)
    positions = torch.arange(1, batch + 1, device=device) * 1024 - 1
    rows = row_pool(fmt, batch, 64, device)
    ids = torch.arange(batch, dtype=torch.int32, device=device)
    held = op.scratch(batch, params.entry_dim, device)

    def run(some: torch.Tensor) -> None:
        op.compress_decode(kv, gate, positions, some, slots, params, rows=rows, ids=ids, held=held)

    def check() -> None:
        entries = ref.compress_decode(kv, gate, positions, rings[0].clone(), slots, params)
        run(rings[0])
        _close(rows, ids, entries)

    runs = [partial(run, some) for some in rings]
    return Work(runs, check, _decode_bytes(name, batch), result=lambda: [rows.data])
