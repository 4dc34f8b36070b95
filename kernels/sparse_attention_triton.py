"""The Triton kernels of sparse attention: for cards without the CUDA C++ one, and CI.

The same algorithm as csrc/sparse_attention.cu, in bf16; the interpreter multiplies fp32.
"""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv4_tierd.kernels.layout import Rows
from dsv4_tierd.kernels.triton_rows import row_arguments, tl, triton

BLOCK_ROWS = 64
_DIM = 512
_MERGE_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partials of one call, normalised: sums [T, splits, H, 512], logs [T, splits, H] fp32.

    Triton's sums are fp32; the CUDA C++ kernel's fp16, in its registers' order, H a multiple of 64.
    """

    sums: Tensor
    logs: Tensor
    rows_per_split: int


@dataclass(frozen=True, slots=True)
class InverseRope:
    """Rotate the result back: positions [T] int of the queries, inv_freq [32] fp32."""

    positions: Tensor
    inv_freq: Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call, checked."""

    q: Tensor
    window: Rows
    window_ids: Tensor
    extra: Rows
    extra_ids: Tensor
    extra_count: int
    sink: Tensor
    scale: float
    out: Tensor
    scratch: Workspace
    inverse: InverseRope | None


def launch_triton(call: Call, splits: int, span_blocks: int) -> None:
    """Attend to the call's spans and merge them."""
    q, out, scratch, inverse = call.q, call.out, call.scratch, call.inverse
    tokens, heads, _ = q.shape
    block_heads = 64 if heads > 16 else 16
    turn = inverse is not None
    positions = inverse.positions if inverse is not None else call.window_ids
    inv_freq = inverse.inv_freq if inverse is not None else call.sink
    held = (*scratch.sums.stride()[:2], *scratch.logs.stride()[:2])
    _attend[(splits, -(-heads // block_heads), tokens)](
        q,
        q.stride(0),
        q.stride(1),
        *row_arguments(call.window),
        call.window_ids,
        call.window_ids.stride(0),
        call.window_ids.shape[1],
        *row_arguments(call.extra),
        call.extra_ids,
        call.extra_ids.stride(0),
        call.extra_count,
        call.sink,
        positions,
        inv_freq,
        out,
        out.stride(0),
        out.stride(1),
        scratch.sums,
        scratch.logs,
        *held,
        heads,
        call.scale * 1.4426950408889634,
        span_blocks,
        WHOLE=splits == 1,
        TURN=turn,
        # The interpreter multiplies no bf16.
        OPERAND=tl.bfloat16 if q.is_cuda else tl.float32,
        BLOCK_HEADS=block_heads,
        BLOCK_ROWS=BLOCK_ROWS,
        SPAN_POWER=triton.next_power_of_2(span_blocks * BLOCK_ROWS),
        num_warps=8 if block_heads == 64 else 4,
        num_stages=2,
    )
    if splits > 1:
        _merge[(_DIM // _MERGE_COLUMNS, heads, tokens)](
            scratch.sums,
            scratch.logs,
            *held,
            splits,
            call.sink,
            positions,
            inv_freq,
            out,
            out.stride(0),
            out.stride(1),
            TURN=turn,
            COLUMNS=_MERGE_COLUMNS,
            num_warps=4,
        )


@triton.jit
def _decode(data, scales, seen, FIRST: tl.constexpr, WIDTH: tl.constexpr, OPERAND: tl.constexpr):
    """e4m3 columns FIRST.. of rows at ``data`` [N] times 2**(scale byte - 127): [N, WIDTH]."""
    GROUPS: tl.constexpr = WIDTH // 64
    group = tl.arange(0, GROUPS)
    inside = (group * 64)[:, None] + tl.arange(0, 64)[None, :]
    address = data[:, None, None] + (FIRST + inside)[None, :, :]
    codes = tl.load(address, mask=seen[:, None, None], other=0)
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    exponent = (scales[:, None] >> ((FIRST // 64 + group) * 8)[None, :]).to(tl.int32) & 255
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    return tl.reshape((values * factor[:, :, None]).to(OPERAND), (data.shape[0], WIDTH))


@triton.jit
def _load_columns(row, here, FIRST: tl.constexpr, WIDTH: tl.constexpr, OPERAND: tl.constexpr):
    column = FIRST + tl.arange(0, WIDTH)[None, :]
    return tl.load(row + column, mask=here[:, None], other=0.0).to(OPERAND)


@triton.jit
def _store_columns(row, here, values, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    column = FIRST + tl.arange(0, WIDTH)[None, :]
    tl.store(row + column, values.to(row.dtype.element_ty), mask=here[:, None])


@triton.jit
def _turn_back(x, position, inv_freq_ptr, ROWS: tl.constexpr):
    """Rotate [ROWS, 64] back by the query's position."""
    inv_freq = tl.load(inv_freq_ptr + tl.arange(0, 32))
    angle = position.to(tl.float32) * inv_freq
    cos = tl.cos(angle)[None, :]
    sin = tl.sin(angle)[None, :]
    even, odd = tl.split(tl.reshape(x, (ROWS, 32, 2)))
    return tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (ROWS, 64))


@triton.jit
def _blocks_in_use(
    window_ids,
    window_count,
    window_row_count,
    extra_ids,
    extra_count,
    extra_row_count,
    first,
    span,
    BLOCK_ROWS: tl.constexpr,
    SPAN_POWER: tl.constexpr,
):
    """Blocks of the span up to its last valid id."""
    lane = tl.arange(0, SPAN_POWER)
    slot = first + lane
    inside = lane < span
    near = tl.load(window_ids + slot, mask=inside & (slot < window_count), other=-1)
    late = slot - tl.cdiv(window_count, BLOCK_ROWS) * BLOCK_ROWS
    far = tl.load(extra_ids + late, mask=inside & (late >= 0) & (late < extra_count), other=-1)
    valid = ((near >= 0) & (near < window_row_count)) | ((far >= 0) & (far < extra_row_count))
    return (tl.max(tl.where(valid, lane, -1), 0) + BLOCK_ROWS) // BLOCK_ROWS


@triton.jit
def _attend(
    q_ptr,
    q_token,
    q_head,
    window_data,
    window_scale,
    window_data_page,
    window_data_row,
    window_scale_page,
    window_scale_row,
    window_page_rows,
    window_row_count,
    window_ids,
    window_ids_token,
    window_count,
    extra_data,
    extra_scale,
    extra_data_page,
    extra_data_row,
    extra_scale_page,
    extra_scale_row,
    extra_page_rows,
    extra_row_count,
    extra_ids,
    extra_ids_token,
    extra_count,
    sink_ptr,
    position_ptr,
    inv_freq_ptr,
    out_ptr,
    out_token,
    out_head,
    sums_ptr,
    logs_ptr,
    sums_token,
    sums_split,
    logs_token,
    logs_split,
    heads,
    scale_log2,
    span_blocks,
    WHOLE: tl.constexpr,
    TURN: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SPAN_POWER: tl.constexpr,
):
    split = tl.program_id(0)
    token = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    here = head < heads
    window_ids += token * window_ids_token
    extra_ids += token * extra_ids_token
    window_blocks = tl.cdiv(window_count, BLOCK_ROWS)
    window_slots = window_blocks * BLOCK_ROWS
    first = split * span_blocks

    # The last valid id of the span bounds the loop.
    blocks = _blocks_in_use(
        window_ids,
        window_count,
        window_row_count,
        extra_ids,
        extra_count,
        extra_row_count,
        first * BLOCK_ROWS,
        span_blocks * BLOCK_ROWS,
        BLOCK_ROWS,
        SPAN_POWER,
    )

    q_row = q_ptr + token * q_token + head[:, None] * q_head
    q_a = _load_columns(q_row, here, 0, 256, OPERAND)
    q_b = _load_columns(q_row, here, 256, 128, OPERAND)
    q_c = _load_columns(q_row, here, 384, 64, OPERAND)
    q_r = _load_columns(q_row, here, 448, 64, OPERAND)

    top = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    sum_a = tl.zeros((BLOCK_HEADS, 256), tl.float32)
    sum_b = tl.zeros((BLOCK_HEADS, 128), tl.float32)
    sum_c = tl.zeros((BLOCK_HEADS, 64), tl.float32)
    sum_r = tl.zeros((BLOCK_HEADS, 64), tl.float32)
    # Window rows are reached from the extra rows' base, so that one loop serves both.
    data_gap = window_data.to(tl.int64) - extra_data.to(tl.int64)
    scale_gap = window_scale.to(tl.int64) - extra_scale.to(tl.int64)
    lane = tl.arange(0, BLOCK_ROWS)
    for block in range(first, first + blocks):
        near = block < window_blocks
        slot = block * BLOCK_ROWS + lane
        late = slot - window_slots
        near_id = tl.load(window_ids + slot, mask=slot < window_count, other=-1)
        far_id = tl.load(extra_ids + late, mask=(late >= 0) & (late < extra_count), other=-1)
        row = tl.where(near, near_id, far_id)
        seen = (row >= 0) & (row < tl.where(near, window_row_count, extra_row_count))
        row = tl.where(seen, row, 0)
        page_rows = tl.where(near, window_page_rows, extra_page_rows)
        page = (row // page_rows).to(tl.int64)
        place = (row % page_rows).to(tl.int64)
        data_at = page * tl.where(near, window_data_page, extra_data_page)
        data_at += place * tl.where(near, window_data_row, extra_data_row)
        data_at += tl.where(near, data_gap, 0)
        scale_at = page * tl.where(near, window_scale_page, extra_scale_page)
        scale_at += place * tl.where(near, window_scale_row, extra_scale_row)
        scale_at += tl.where(near, scale_gap, 0)
        data = extra_data + tl.multiple_of(data_at, 16)
        packed = (extra_scale + tl.multiple_of(scale_at, 8)).to(tl.pointer_type(tl.int64))
        scales = tl.load(packed, mask=seen, other=0)
        rope = data.to(tl.pointer_type(tl.bfloat16))[:, None] + 224 + tl.arange(0, 64)[None, :]
        k_a = _decode(data, scales, seen, 0, 256, OPERAND)
        k_b = _decode(data, scales, seen, 256, 128, OPERAND)
        k_c = _decode(data, scales, seen, 384, 64, OPERAND)
        k_r = tl.load(rope, mask=seen[:, None], other=0.0).to(OPERAND)
        scores = tl.dot(q_a, tl.trans(k_a))
        scores = tl.dot(q_b, tl.trans(k_b), scores)
        scores = tl.dot(q_c, tl.trans(k_c), scores)
        scores = tl.dot(q_r, tl.trans(k_r), scores)
        scores = tl.where(seen[None, :], scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - anchor)
        weight = tl.exp2(scores - anchor[:, None])
        total = total * shrink + tl.sum(weight, 1)
        top = new_top
        weight = weight.to(OPERAND)
        sum_a = tl.dot(weight, k_a, sum_a * shrink[:, None])
        sum_b = tl.dot(weight, k_b, sum_b * shrink[:, None])
        sum_c = tl.dot(weight, k_c, sum_c * shrink[:, None])
        sum_r = tl.dot(weight, k_r, sum_r * shrink[:, None])

    log = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    if WHOLE:
        sink = tl.load(sink_ptr + head, mask=here, other=0.0) * 1.4426950408889634
        share = _share(log, sink)
        factor = tl.where(total > 0, share / total, 0.0)[:, None]
        row = out_ptr + token * out_token + head[:, None] * out_head
        sum_r = sum_r * factor
        if TURN:
            sum_r = _turn_back(sum_r, tl.load(position_ptr + token), inv_freq_ptr, BLOCK_HEADS)
    else:
        factor = tl.where(total > 0, 1.0 / total, 0.0)[:, None]
        tl.store(logs_ptr + token * logs_token + split * logs_split + head, log, mask=here)
        row = sums_ptr + token * sums_token + split.to(tl.int64) * sums_split + head[:, None] * 512
        sum_r = sum_r * factor
    if WHOLE or blocks > 0:
        _store_columns(row, here, sum_a * factor, 0, 256)
        _store_columns(row, here, sum_b * factor, 256, 128)
        _store_columns(row, here, sum_c * factor, 384, 64)
        _store_columns(row, here, sum_r, 448, 64)


@triton.jit
def _share(log, sink):
    """2**log / (2**log + 2**sink), for any infinities."""
    ratio = tl.where(log == float("-inf"), 0.0, 1.0 / (1.0 + tl.exp2(sink - log)))
    return tl.where(sink == float("inf"), 0.0, ratio)


@triton.jit
def _merge(
    sums_ptr,
    logs_ptr,
    sums_token,
    sums_split,
    logs_token,
    logs_split,
    splits,
    sink_ptr,
    position_ptr,
    inv_freq_ptr,
    out_ptr,
    out_token,
    out_head,
    TURN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    BLOCK: tl.constexpr = 16
    head = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    logs_ptr += token * logs_token + head
    sums_ptr += token * sums_token + head * 512
    lane = tl.arange(0, BLOCK)
    sink = tl.load(sink_ptr + head) * 1.4426950408889634
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, splits, BLOCK):
        split = start + lane
        log = tl.load(logs_ptr + split * logs_split, mask=split < splits, other=float("-inf"))
        highest = tl.maximum(highest, log)
    top = tl.max(highest, 0)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    result = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, splits, BLOCK):
        split = start + lane
        log = tl.load(logs_ptr + split * logs_split, mask=split < splits, other=float("-inf"))
        weight = tl.exp2(log - anchor)
        there = (weight > 0)[:, None]
        row = sums_ptr + split.to(tl.int64)[:, None] * sums_split + column[None, :]
        part = tl.load(row, mask=there, other=0.0)
        total += tl.sum(weight, 0)
        result += tl.sum(part * weight[:, None], 0)
    log = tl.where(total > 0, top + tl.log2(total), float("-inf"))
    result = result * tl.where(total > 0, _share(log, sink) / total, 0.0)
    if TURN:
        pair = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2) - 224
        inv_freq = tl.load(inv_freq_ptr + pair, mask=pair >= 0, other=0.0)
        angle = tl.load(position_ptr + token).to(tl.float32) * inv_freq
        cos = tl.cos(angle)
        sin = tl.sin(angle)
        even, odd = tl.split(tl.reshape(result, (COLUMNS // 2, 2)))
        result = tl.reshape(tl.join(even * cos + odd * sin, odd * cos - even * sin), (COLUMNS,))
    target = out_ptr + token * out_token + head * out_head + column
    tl.store(target, result.to(out_ptr.dtype.element_ty))
