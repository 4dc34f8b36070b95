"""The compressor on the GPU: entries near the twin's, rings and stored bytes free of any cut.

Tolerance: exp and sums in fp32 and the angle's sine and cosine, against the twin's in fp64:
relative error 2e-6 of an entry. Stored bytes as in test_row_store.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4_tierd.kernels import compress as op
from dsv4_tierd.kernels.layout import RowFormat, RowKind, row_pool
from dsv4_tierd.kernels.ref import compress as ref
from dsv4_tierd.kernels.ref.hadamard import to_key_basis

Poison = Callable[[Tensor], Tensor]
DEVICE = torch.device("cuda")
TOLERANCE = 2e-6
NAMES = ("c4", "index", "c128")
FORMATS = {
    "c4": RowFormat(RowKind.FP8, 512, 64),
    "index": RowFormat(RowKind.KEY_FP8, 128),
    "c128": RowFormat(RowKind.FP8, 512, 64),
}


def make_params(name: str, rng: torch.Generator) -> ref.CompressParams:
    ratio, dim, halves = {"c4": (4, 512, 2), "index": (4, 128, 2), "c128": (128, 512, 1)}[name]
    return ref.CompressParams(
        torch.randn(ratio, halves * dim, generator=rng, device=DEVICE),
        torch.rand(dim, generator=rng, device=DEVICE) + 0.5,
        1e-6,
        160000.0 ** (-torch.arange(32, device=DEVICE) / 32),
        ratio,
    )


def projections(
    tokens: int, params: ref.CompressParams, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """kv and gate as two parts of one wider product, so their rows are not contiguous."""
    width = params.ape.shape[1]
    both = torch.randn(tokens, 2 * width + 64, generator=rng, device=DEVICE) * 3
    return both[:, :width], both[:, width : 2 * width]


def make_ring(params: ref.CompressParams, poison: Poison, slots: int = 1) -> Tensor:
    return poison(torch.empty(slots, params.ring_len, params.ring_dim, device=DEVICE))


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm().clamp_min(1e-20)).item()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("start", [0, 1, 3, 4, 127, 128, 1001, 1 << 19])
def test_prefill(name: str, start: int, rng: torch.Generator, poison: Poison) -> None:
    """Any start and length; before position 0 the ring holds NaN, which reaches nothing."""
    params = make_params(name, rng)
    for tokens in (0, 1, 2, 5, 127, 128, 129, 700):
        ring = make_ring(params, poison)[0]
        for position in range(max(0, start - params.ring_len), start):
            ring[position % params.ring_len].normal_(generator=rng)
        kv, gate = projections(tokens, params, rng)
        want_ring, got_ring = ring.clone(), ring.clone()
        other_ring = poison(torch.empty_like(ring))
        want = ref.compress_prefill(kv, gate, start, ring, params, want_ring)
        got = op.compress_prefill(kv, gate, start, got_ring, params, got_ring)
        assert got is not None and got.shape == want.shape
        assert bool(got.isfinite().all()) and error(got, want) < TOLERANCE
        assert torch.equal(got_ring.view(torch.int32), want_ring.view(torch.int32))
        op.compress_prefill(kv, gate, start, ring, params, other_ring)
        held = torch.arange(max(0, start + tokens - params.ring_len), start + tokens)
        rows = held.to(DEVICE) % params.ring_len
        assert torch.equal(other_ring[rows], want_ring[rows])


@pytest.mark.parametrize("name", NAMES)
def test_stored_rows(name: str, rng: torch.Generator, poison: Poison) -> None:
    """Entries arrive encoded in the named rows; all other rows stay as they were."""
    params, fmt = make_params(name, rng), FORMATS[name]
    tokens = 70 * params.ratio
    kv, gate = projections(tokens, params, rng)
    ring = torch.zeros(params.ring_len, params.ring_dim, device=DEVICE)
    entries = ref.compress_prefill(kv, gate, 0, ring, params, ring.clone())
    got, want = (row_pool(fmt, 200, 61, DEVICE) for _ in range(2))
    for rows in (got, want):
        poison(rows.data)
        assert rows.scale is not None
        poison(rows.scale)
    ids = torch.randperm(200, generator=rng, device=DEVICE)[:70].int()
    ids[::7] = torch.tensor([-1, -(2**31), 2**31 - 1, 4000, -1] * 2, device=DEVICE).int()
    op.compress_prefill(kv, gate, 0, ring, params, ring, rows=got, ids=ids)
    kept = (ids >= 0) & (ids < 200)
    want.write(ids[kept].long(), to_key_basis(entries[kept], fmt.kind))
    assert (got.data != want.data).float().mean().item() < 1 / 200
    stored = ids[kept].long()
    assert error(got.read(stored), want.read(stored)) < 5e-3
    if fmt.kind is RowKind.FP8:
        assert got.scale is not None and want.scale is not None
        assert (got.scale != want.scale).float().mean().item() < 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spare", [1, 2])
def test_chunks_and_decode_give_the_same_bits(name: str, spare: int, rng: torch.Generator) -> None:
    """One prefill, chunks, and single tokens: equal entries and rings, drafts' room or not."""
    params = make_params(name, rng)
    tokens = 5 * params.ring_len + 3
    kv, gate = projections(tokens, params, rng)
    shape = (3, spare * params.ring_len, params.ring_dim)
    whole = torch.zeros(shape, device=DEVICE)
    want = op.compress_prefill(kv, gate, 0, whole[0], params, whole[0])
    assert want is not None
    for cuts in ([1, 2, 3, 9], [params.ring_len], [tokens - 1]):
        ring, found, start = torch.zeros(shape, device=DEVICE), [], 0
        for end in sorted({*cuts, *range(cuts[-1], tokens, cuts[-1]), tokens}):
            part = op.compress_prefill(
                kv[start:end], gate[start:end], start, ring[0], params, ring[0]
            )
            assert part is not None
            found.append(part)
            start = end
        assert torch.equal(torch.cat(found), want)
        assert torch.equal(ring[0], whole[0])
    rings, slots = torch.zeros(shape, device=DEVICE), torch.tensor([2], device=DEVICE)
    found = []
    for t in range(tokens):
        position = torch.tensor([t], device=DEVICE)
        one = op.compress_decode(kv[t : t + 1], gate[t : t + 1], position, rings, slots, params)
        assert one is not None
        if (t + 1) % params.ratio == 0:
            found.append(one)
        else:
            assert not bool(one.any())
    assert torch.equal(torch.cat(found), want)
    assert torch.equal(rings[2], whole[0])
    assert not bool(rings[:2].any())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", [1, 32, 256])
def test_decode_batches(name: str, batch: int, rng: torch.Generator, poison: Poison) -> None:
    """Each session by its own position and ring; only closing ones store; scratch is reusable."""
    params, fmt = make_params(name, rng), FORMATS[name]
    rings = torch.randn(batch + 3, params.ring_len, params.ring_dim, generator=rng, device=DEVICE)
    slots = torch.randperm(batch + 3, generator=rng, device=DEVICE)[:batch]
    positions = torch.randint(0, 1 << 20, (batch,), generator=rng, device=DEVICE)
    positions[::2] = positions[::2] // params.ratio * params.ratio + params.ratio - 1
    positions[0] = params.ratio - 1
    kv, gate = projections(batch, params, rng)
    want_rings = rings.clone()
    want = ref.compress_decode(kv, gate, positions, want_rings, slots, params)
    held = op.scratch(batch, params.entry_dim, DEVICE)
    poison(held.pooled)
    for _ in range(2):
        again = rings.clone()
        got = op.compress_decode(kv, gate, positions, again, slots, params, held=held)
        assert got is not None and error(got, want) < TOLERANCE
        assert torch.equal(again, want_rings)
    rows = row_pool(fmt, batch, 64, DEVICE)
    poison(rows.data)
    before = rows.data.clone()
    ids = torch.arange(batch, device=DEVICE, dtype=torch.int32)
    op.compress_decode(
        kv, gate, positions, rings.clone(), slots, params, rows=rows, ids=ids, held=held
    )
    closing = (positions % params.ratio == params.ratio - 1).nonzero().squeeze(-1)
    plain = to_key_basis(want[closing], fmt.kind)
    assert error(rows.read(closing), plain) < 5e-2
    opened = (positions % params.ratio != params.ratio - 1).nonzero().squeeze(-1)
    page, slot = opened // 64, opened % 64
    assert torch.equal(rows.data[page, slot], before[page, slot])


def test_a_graph_replays(rng: torch.Generator) -> None:
    """Captured once, decode follows its positions; arrivals are left at zero."""
    params, fmt = make_params("c128", rng), FORMATS["c128"]
    rings = torch.randn(2, params.ring_len, params.ring_dim, generator=rng, device=DEVICE)
    slots, positions = torch.arange(2, device=DEVICE), torch.tensor([127, 5], device=DEVICE)
    kv, gate = projections(2, params, rng)
    rows, held = row_pool(fmt, 2, 2, DEVICE), op.scratch(2, 512, DEVICE)
    ids = torch.arange(2, device=DEVICE, dtype=torch.int32)

    def run() -> None:
        op.compress_decode(kv, gate, positions, rings, slots, params, rows=rows, ids=ids, held=held)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    positions.copy_(torch.tensor([200, 255], device=DEVICE))
    want = ref.compress_decode(kv, gate, positions, rings.clone(), slots, params)
    graph.replay()
    assert error(rows.read(ids[1:]), want[1:]) < 5e-2
    assert not bool(held.arrivals.any())
