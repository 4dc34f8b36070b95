"""The Triton kernels of the compressor: pool, norm, rotate, transform, encode, store."""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: ANN201

from __future__ import annotations

from dsv4_tierd.kernels.triton_rows import (
    hadamard_row,
    rms_norm_row,
    rotate_row,
    store_row,
    tl,
    triton,
    turn_row,
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


@triton.jit
def _rows_at(
    position,
    base,
    kv_ptr,
    kv_token,
    gate_ptr,
    gate_token,
    ring_ptr,
    ring_row,
    length,
    GATE: tl.constexpr,
):
    """Offsets of tokens' rows from kv_ptr and gate_ptr: there from ``base`` on, else in a ring."""
    fresh = position >= base
    new = (position - base).to(tl.int64)
    old = (position % length).to(tl.int64) * ring_row
    kv_gap = (ring_ptr.to(tl.int64) - kv_ptr.to(tl.int64)) // 4
    gate_gap = (ring_ptr.to(tl.int64) - gate_ptr.to(tl.int64)) // 4 + GATE
    kv_at = tl.multiple_of(tl.where(fresh, new * kv_token, old + kv_gap), 4)
    gate_at = tl.multiple_of(tl.where(fresh, new * gate_token, old + gate_gap), 4)
    return kv_at, gate_at


@triton.jit
def _keep_row(kv_ptr, gate_ptr, target, channel, GATE: tl.constexpr):
    """A token's row into its ring, after this program's reads of it."""
    tl.debug_barrier()
    tl.store(target + channel, tl.load(kv_ptr + channel))
    tl.store(target + GATE + channel, tl.load(gate_ptr + channel))


@triton.jit(do_not_specialize=_VARIED)
def overlapped_kernel(
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
    """Ratio 4: a program an entry; the first takes the two that may read the ring, writes it."""
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
    for entry in range(number, last):
        position = (group + entry - 1) * RATIO + member
        there = (position >= 0)[:, None]
        kv_at, gate_at = _rows_at(
            position,
            base,
            kv_ptr,
            kv_token,
            gate_ptr,
            gate_token,
            ring_ptr,
            ring_row,
            length,
            2 * DIM,
        )
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
        target = out_ring_ptr + (base % length).to(tl.int64) * ring_row
        _keep_row(kv_ptr, gate_ptr, target, tl.arange(0, 2 * DIM), 2 * DIM)
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
def shared_kernel(
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
    """Ratio 128: programs share an entry by channels; the last to arrive finishes its row."""
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
        kv_at, gate_at = _rows_at(
            position, base, kv_ptr, kv_token, gate_ptr, gate_token, ring_ptr, ring_row, length, DIM
        )
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
        target = out_ring_ptr + (base % length).to(tl.int64) * ring_row
        _keep_row(kv_ptr, gate_ptr, target, first + tl.arange(0, CHANNELS), DIM)
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
