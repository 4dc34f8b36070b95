"""Pool groups of tokens into cache entries on the GPU, through to the stored row, in one launch.

Ratio 4 (overlapping groups): one program pools, norms, rotates, encodes and stores one entry.
Ratio 128: programs share an entry by channels; the last to arrive finishes the row (a counter
says who; sums are not atomic, so bits do not depend on the order of arrival). Prefill and
decode run the same code on the same tiles: an entry has the same bits from either.

Ring rows are read before they are overwritten: only the programs of the first entries read the
ring, and they are the ones that write it.
"""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.kernels.layout import RowFormat, RowKind, Rows
from dsv4_tierd.kernels.ref import compress as ref
from dsv4_tierd.kernels.ref.compress import CompressParams
from dsv4_tierd.kernels.ref.hadamard import to_key_basis
from dsv4_tierd.kernels.triton_rows import (
    KIND_CODE,
    check_row_format,
    hadamard_row,
    rms_norm_row,
    rotate_row,
    row_arguments,
    runs_kernels,
    store_row,
    tl,
    triton,
    turn_row,
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
        _overlapped[(grid,)](*common, **kinds, **shape, num_warps=max(1, dim // 128))
        return
    blocks = max(1, dim // _CHANNELS)
    held = scratch(programs, dim, kv.device) if held is None else held
    assert held.pooled.shape[0] >= programs, (held.pooled.shape, programs)
    _shared[(blocks, programs)](
        *common,
        held.pooled,
        held.arrivals,
        **kinds,
        **shape,
        CHANNELS=min(dim, _CHANNELS),
        num_warps=4,
    )


_VARIED = ["start", "tokens", "count"]


@triton.jit
def _finish(
    x,
    row,
    weight,
    eps,
    cos,
    sin,
    data_ptr,
    scale_ptr,
    data_page,
    data_row,
    scale_page,
    scale_row,
    page_rows,
    row_count,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    KIND: tl.constexpr,
    HADAMARD: tl.constexpr,
):
    """Norm, rotate, transform, encode, store."""
    x = rotate_row(rms_norm_row(x, weight, eps, DIM), cos, sin, DIM, ROPE)
    if HADAMARD:
        x = hadamard_row(x, DIM)
    store_row(
        x,
        row,
        data_ptr,
        scale_ptr,
        data_page,
        data_row,
        scale_page,
        scale_row,
        page_rows,
        row_count,
        DIM,
        KIND,
    )


@triton.jit
def _pool(kv, logits):
    """Softmax over tokens, channel by channel: [N, C] and [N, C] to [C]."""
    weights = tl.exp(logits - tl.max(logits, 0)[None, :])
    return tl.div_rn(tl.sum(weights * kv, 0), tl.sum(weights, 0))


@triton.jit(do_not_specialize=_VARIED)
def _overlapped(
    kv_ptr,
    kv_token,
    gate_ptr,
    gate_token,
    start,
    tokens,
    count,
    position_ptr,
    slot_ptr,
    ring_ptr,
    out_ring_ptr,
    ring_slot,
    ring_row,
    length,
    ape_ptr,
    norm_ptr,
    eps,
    inv_freq_ptr,
    data_ptr,
    scale_ptr,
    data_page,
    data_row,
    scale_page,
    scale_row,
    page_rows,
    row_count,
    ids_ptr,
    KIND: tl.constexpr,
    HADAMARD: tl.constexpr,
    DECODE: tl.constexpr,
    SAME: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    RATIO: tl.constexpr,
):
    program = tl.program_id(0)
    member = tl.arange(0, 2 * RATIO)
    half = (member // RATIO) * DIM
    channel = half[:, None] + tl.arange(0, DIM)[None, :]
    base = start
    number = tl.where(program == 0, 0, program + 1)
    last = tl.where(program == 0, tl.minimum(count, 2), tl.minimum(count, program + 2))
    group = start // RATIO
    if DECODE:
        base = tl.load(position_ptr + program)
        slot = tl.load(slot_ptr + program).to(tl.int64) * ring_slot
        ring_ptr += slot
        out_ring_ptr += slot
        kv_ptr += program.to(tl.int64) * kv_token
        gate_ptr += program.to(tl.int64) * gate_token
        group = base // RATIO - program
        number = program
        last = program + (base % RATIO == RATIO - 1).to(tl.int32)
    kv_gap = (ring_ptr.to(tl.int64) - kv_ptr.to(tl.int64)) // 4
    gate_gap = (ring_ptr.to(tl.int64) - gate_ptr.to(tl.int64)) // 4 + 2 * DIM
    for entry in range(number, last):
        position = (group + entry - 1) * RATIO + member
        there = (position >= 0)[:, None]
        fresh = position >= base
        new = (position - base).to(tl.int64)
        old = (position % length).to(tl.int64) * ring_row
        kv_at = tl.multiple_of(tl.where(fresh, new * kv_token, old + kv_gap), 4)
        gate_at = tl.multiple_of(tl.where(fresh, new * gate_token, old + gate_gap), 4)
        kv = tl.load(kv_ptr + kv_at[:, None] + channel, mask=there, other=0.0)
        gate = tl.load(gate_ptr + gate_at[:, None] + channel, mask=there, other=float("-inf"))
        row = tl.load(ids_ptr + entry).to(tl.int64)
        weight = tl.load(norm_ptr + tl.arange(0, DIM)).to(tl.float32)
        cos, sin = turn_row((group + entry) * RATIO, inv_freq_ptr, ROPE)
        ape = tl.load(ape_ptr + (member % RATIO)[:, None] * (2 * DIM) + channel)
        _finish(
            _pool(kv, gate + ape),
            row,
            weight,
            eps,
            cos,
            sin,
            data_ptr,
            scale_ptr,
            data_page,
            data_row,
            scale_page,
            scale_row,
            page_rows,
            row_count,
            DIM,
            ROPE,
            KIND,
            HADAMARD,
        )
    if DECODE:
        tl.debug_barrier()
        target = out_ring_ptr + (base % length).to(tl.int64) * ring_row
        whole = tl.arange(0, 2 * DIM)
        tl.store(target + whole, tl.load(kv_ptr + whole))
        tl.store(target + 2 * DIM + whole, tl.load(gate_ptr + whole))
    elif program == 0:
        _keep_ring(
            kv_ptr,
            kv_token,
            gate_ptr,
            gate_token,
            ring_ptr,
            out_ring_ptr,
            start,
            tokens,
            ring_row,
            length,
            0,
            2 * DIM,
            2 * DIM,
            2,
            SAME,
        )


@triton.jit
def _keep_ring(
    kv_ptr,
    kv_token,
    gate_ptr,
    gate_token,
    ring_ptr,
    out_ring_ptr,
    start,
    tokens,
    ring_row,
    length,
    first,
    CHANNELS: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    SAME: tl.constexpr,
):
    """Rows of the last ``length`` tokens to out_ring, channels first .. first+CHANNELS of each.

    Runs after this program's reads of the ring, which nobody else writes in these channels. In
    place (SAME), older rows are there already.
    """
    tl.debug_barrier()
    end = start + tokens
    channel = first + tl.arange(0, CHANNELS)[None, :]
    begin = tl.maximum(start if SAME else 0, end - length)
    for block in range(begin, end, BLOCK):
        position = block + tl.arange(0, BLOCK)
        held = (position % length).to(tl.int64)[:, None] * ring_row + channel
        fresh = ((position >= start) & (position < end))[:, None]
        stale = ((position < start) & (position < end))[:, None]
        new = (position - start).to(tl.int64)[:, None]
        kv = tl.load(kv_ptr + new * kv_token + channel, mask=fresh, other=0.0)
        gate = tl.load(gate_ptr + new * gate_token + channel, mask=fresh, other=0.0)
        if not SAME:
            kv += tl.load(ring_ptr + held, mask=stale, other=0.0)
            gate += tl.load(ring_ptr + held + GATE, mask=stale, other=0.0)
        tl.store(out_ring_ptr + held, kv, mask=(position < end)[:, None])
        tl.store(out_ring_ptr + held + GATE, gate, mask=(position < end)[:, None])


@triton.jit(do_not_specialize=_VARIED)
def _shared(
    kv_ptr,
    kv_token,
    gate_ptr,
    gate_token,
    start,
    tokens,
    count,
    position_ptr,
    slot_ptr,
    ring_ptr,
    out_ring_ptr,
    ring_slot,
    ring_row,
    length,
    ape_ptr,
    norm_ptr,
    eps,
    inv_freq_ptr,
    data_ptr,
    scale_ptr,
    data_page,
    data_row,
    scale_page,
    scale_row,
    page_rows,
    row_count,
    ids_ptr,
    pooled_ptr,
    arrivals_ptr,
    KIND: tl.constexpr,
    HADAMARD: tl.constexpr,
    DECODE: tl.constexpr,
    SAME: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    RATIO: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    entry = tl.program_id(1)
    first = tl.program_id(0) * CHANNELS
    channel = first + tl.arange(0, CHANNELS)[None, :]
    base = start
    group = start // RATIO + entry
    closes = entry < count
    if DECODE:
        base = tl.load(position_ptr + entry)
        slot = tl.load(slot_ptr + entry).to(tl.int64) * ring_slot
        ring_ptr += slot
        out_ring_ptr += slot
        kv_ptr += entry.to(tl.int64) * kv_token
        gate_ptr += entry.to(tl.int64) * gate_token
        group = base // RATIO
        closes = base % RATIO == RATIO - 1
    if closes:
        member = tl.arange(0, RATIO)
        position = group * RATIO + member
        fresh = position >= base
        new = (position - base).to(tl.int64)
        old = (position % length).to(tl.int64) * ring_row
        kv_gap = (ring_ptr.to(tl.int64) - kv_ptr.to(tl.int64)) // 4
        gate_gap = (ring_ptr.to(tl.int64) - gate_ptr.to(tl.int64)) // 4 + DIM
        kv_at = tl.multiple_of(tl.where(fresh, new * kv_token, old + kv_gap), 4)
        gate_at = tl.multiple_of(tl.where(fresh, new * gate_token, old + gate_gap), 4)
        kv = tl.load(kv_ptr + kv_at[:, None] + channel)
        gate = tl.load(gate_ptr + gate_at[:, None] + channel)
        ape = tl.load(ape_ptr + member[:, None] * DIM + channel)
        row = tl.load(ids_ptr + entry).to(tl.int64)
        weight = tl.load(norm_ptr + tl.arange(0, DIM)).to(tl.float32)
        cos, sin = turn_row(group * RATIO, inv_freq_ptr, ROPE)
        pooled = _pool(kv, gate + ape)
        tl.store(pooled_ptr + entry * DIM + first + tl.arange(0, CHANNELS), pooled)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + entry, 1, sem="acq_rel")
        if arrived == tl.num_programs(0) - 1:
            tl.store(arrivals_ptr + entry, 0)
            whole = tl.load(pooled_ptr + entry * DIM + tl.arange(0, DIM), cache_modifier=".cg")
            _finish(
                whole,
                row,
                weight,
                eps,
                cos,
                sin,
                data_ptr,
                scale_ptr,
                data_page,
                data_row,
                scale_page,
                scale_row,
                page_rows,
                row_count,
                DIM,
                ROPE,
                KIND,
                HADAMARD,
            )
    if DECODE:
        tl.debug_barrier()
        one = first + tl.arange(0, CHANNELS)
        target = out_ring_ptr + (base % length).to(tl.int64) * ring_row
        tl.store(target + one, tl.load(kv_ptr + one))
        tl.store(target + DIM + one, tl.load(gate_ptr + one))
    elif entry == 0:
        _keep_ring(
            kv_ptr,
            kv_token,
            gate_ptr,
            gate_token,
            ring_ptr,
            out_ring_ptr,
            start,
            tokens,
            ring_row,
            length,
            first,
            CHANNELS,
            DIM,
            32,
            SAME,
        )
