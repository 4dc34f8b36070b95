"""Pool groups of tokens into cache entries on the GPU, through to the stored row, in one launch.

Ratio 4 (overlapping groups): one program pools, norms, rotates, encodes and stores one entry.
Ratio 128: programs share an entry by channels; the last to arrive finishes the row (a counter
says who; sums are not atomic, so bits do not depend on the order of arrival). Prefill and
decode run the same code on the same tiles: an entry has the same bits from either.

Ring rows are read before they are overwritten: only the programs of the first entries read the
ring, and they are the ones that write it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.kernels.compress_triton import overlapped_kernel, shared_kernel
from dsv4_tierd.kernels.layout import RowFormat, RowKind, Rows
from dsv4_tierd.kernels.ref import compress as ref
from dsv4_tierd.kernels.ref.compress import CompressParams
from dsv4_tierd.kernels.ref.hadamard import to_key_basis
from dsv4_tierd.kernels.triton_rows import (
    KIND_CODE,
    check_row_format,
    row_arguments,
    runs_kernels,
)

_CHANNELS = 32


@dataclass(frozen=True, slots=True)
class Scratch:
    """Of one ratio-128 call: pooled [n, E] fp32, arrivals [n] int32, 0 between calls."""

    pooled: Tensor
    arrivals: Tensor


def scratch(entry_count: int, entry_dim: int, device: torch.device) -> Scratch:
    """Scratch for up to ``entry_count`` entries (prefill) or sessions (decode) a call."""
    return Scratch(
        torch.empty(entry_count, entry_dim, dtype=torch.float32, device=device),
        torch.zeros(entry_count, dtype=torch.int32, device=device),
    )


def compress_prefill(
    kv: Tensor,
    gate: Tensor,
    start: int,
    ring: Tensor,
    params: CompressParams,
    out_ring: Tensor,
    *,
    rows: Rows | None = None,
    ids: Tensor | None = None,
    held: Scratch | None = None,
) -> Tensor | None:
    """Entries of the groups that tokens start .. start+T-1 close, and the ring after them.

    kv, gate: [T, c*E] fp32, any row stride; ring: [L, 2*c*E] fp32, L >= params.ring_len (longer:
    room for drafts), the state before ``start``; out_ring: like ring, or ring itself. With
    ``rows``: entry i is encoded (index keys after the Hadamard transform) and stored as row
    ids[i] int, absent below 0 and at or past the rows' count; returns None. Without: returns
    [n, E] fp32, n = (start+T)//ratio - start//ratio. ``held``: scratch of at least n entries,
    else allocated where ratio 128 needs it. Cost: kv and gate read once. Twin: ref/compress.py.
    """
    if not runs_kernels(kv.device):
        assert ring.shape[0] == params.ring_len, "the twin takes no longer rings"
        entries = ref.compress_prefill(kv, gate, start, ring, params, out_ring)
        if rows is None:
            return entries
        _store_plainly(entries, rows, ids)
        return None
    tokens = kv.shape[0]
    if not tokens:
        if out_ring is not ring:
            out_ring.copy_(ring)
        return None if rows is not None else kv.new_empty(0, params.entry_dim)
    count = (start + tokens) // params.ratio - start // params.ratio
    target, target_ids, made = _target(rows, ids, count, params, kv)
    call = (kv, gate, start, tokens, count, ring, out_ring, target_ids)
    _launch(False, call, (ring, ring), params, target, held, max(1, count))
    return made


def compress_decode(
    kv: Tensor,
    gate: Tensor,
    positions: Tensor,
    rings: Tensor,
    slots: Tensor,
    params: CompressParams,
    *,
    rows: Rows | None = None,
    ids: Tensor | None = None,
    held: Scratch | None = None,
) -> Tensor | None:
    """One token for each of B sessions: write ring rows, and the entries of groups that close.

    kv, gate: [B, c*E] fp32; positions: [B] int; rings: [S, L, 2*c*E] fp32, L >= params.ring_len,
    written at ``slots`` [B] int (distinct, but for padding). ``rows``, ``ids`` [B], ``held`` (B
    entries) as in compress_prefill; only closing rows are stored. Without ``rows``: returns
    [B, E] fp32, zeros where no group closes. Twin: ref/compress.py.
    """
    if not runs_kernels(kv.device):
        assert rings.shape[1] == params.ring_len, "the twin takes no longer rings"
        entries = ref.compress_decode(kv, gate, positions, rings, slots, params)
        closing = positions % params.ratio == params.ratio - 1
        if rows is None:
            return entries
        assert ids is not None
        _store_plainly(entries, rows, torch.where(closing, ids, -1))
        return None
    count = kv.shape[0]
    target, target_ids, made = _target(rows, ids, count, params, kv)
    if made is not None:
        made.zero_()
    if count:
        call = (kv, gate, 0, 1, count, rings, rings, target_ids)
        _launch(True, call, (positions, slots), params, target, held, count)
    return made


def _store_plainly(entries: Tensor, rows: Rows, ids: Tensor | None) -> None:
    assert ids is not None
    present = (ids >= 0) & (ids < rows.row_count)
    rows.write(ids[present], to_key_basis(entries[present], rows.format.kind))


def _target(
    rows: Rows | None, ids: Tensor | None, count: int, params: CompressParams, kv: Tensor
) -> tuple[Rows, Tensor, Tensor | None]:
    """Where entries go: the given rows, or a new fp32 tensor dressed as rows."""
    if rows is not None:
        check_row_format(rows.format)
        assert ids is not None and rows.format.dim == params.entry_dim
        return rows, ids, None
    entries = kv.new_empty(count, params.entry_dim)
    fmt = RowFormat(RowKind.FP32, params.entry_dim)
    numbers = torch.arange(count, dtype=torch.int32, device=kv.device)
    return Rows(fmt, entries.unsqueeze(0), None), numbers, entries


def _launch(
    decode: bool,
    call: tuple[Tensor, Tensor, int, int, int, Tensor, Tensor, Tensor],
    where: tuple[Tensor, Tensor],
    params: CompressParams,
    target: Rows,
    held: Scratch | None,
    programs: int,
) -> None:
    kv, gate, start, tokens, count, rings, out_rings, ids = call
    assert kv.stride(1) == 1 and gate.stride(1) == 1 and rings.stride(-1) == 1
    length, dim = rings.shape[-2], params.entry_dim
    assert length >= params.ring_len and out_rings.stride() == rings.stride()
    common = (
        kv,
        kv.stride(0),
        gate,
        gate.stride(0),
        start,
        tokens,
        count,
        *where,
        rings,
        out_rings,
        rings.stride(0) if decode else 0,
        rings.stride(-2),
        length,
        params.ape,
        params.norm,
        params.eps,
        params.inv_freq,
        *row_arguments(target),
        ids,
    )
    key = target.format.kind is RowKind.KEY_FP8
    kinds = {"KIND": KIND_CODE[target.format.kind], "HADAMARD": key, "DECODE": decode}
    kinds["SAME"] = rings is out_rings
    shape = {"DIM": dim, "ROPE": 2 * params.inv_freq.shape[0], "RATIO": params.ratio}
    if params.overlaps:
        # The first program pools the two entries that may read the ring, then writes it.
        grid = programs if decode else max(1, count - 1)
        overlapped_kernel[(grid,)](*common, **kinds, **shape, num_warps=max(1, dim // 128))
        return
    blocks = max(1, dim // _CHANNELS)
    held = scratch(programs, dim, kv.device) if held is None else held
    assert held.pooled.shape[0] >= programs, (held.pooled.shape, programs)
    shared_kernel[(blocks, programs)](
        *common,
        held.pooled,
        held.arrivals,
        **kinds,
        **shape,
        CHANNELS=min(dim, _CHANNELS),
        num_warps=4,
    )
