"""Attention of one latent head over FP8 window rows and chosen FP8 rows: split-KV, then a merge.

On Hopper csrc/sparse_attention.cu runs; elsewhere the Triton kernels of this file, which are the
same algorithm. Rows are decoded in the kernel. Keys are cut into spans of ``rows_per_split``;
each program attends to one span and leaves a normalised partial and its log-sum, which a second
launch merges, with the sink, in span order. A span without a valid id costs its ids' read and
nothing else, and a partial that nobody wrote is not read. No atomics: a query's bits depend on
its q, the order of its ids and ``rows_per_split`` alone.
"""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.kernels import nvrtc
from dsv4_tierd.kernels.layout import FP8_GROUP, RowFormat, RowKind, Rows
from dsv4_tierd.kernels.ref import sparse_attention as ref
from dsv4_tierd.kernels.ref.rope import rotate
from dsv4_tierd.kernels.triton_rows import row_arguments, runs_kernels, tl, triton

ROW = RowFormat(RowKind.FP8, 512, FP8_GROUP)
_BLOCK_ROWS = 64
_MERGE_COLUMNS = 128
_SHARED_BYTES = 1024 + 227584  # sizeof(Shared) in sparse_attention.cu, and room to align it
_TARGET_PROGRAMS = 132  # multiprocessors of an H200; fixed, so that results do not follow the card


@dataclass(frozen=True, slots=True)
class Workspace:
    """Partials of one call: sums [T, splits, H, 512] fp32 normalised, logs [T, splits, H] fp32."""

    sums: Tensor
    logs: Tensor
    rows_per_split: int


@dataclass(frozen=True, slots=True)
class InverseRope:
    """Rotate the result back: positions [T] int of the queries, inv_freq [32] fp32."""

    positions: Tensor
    inv_freq: Tensor


def supports(row_format: RowFormat) -> bool:
    """Whether the kernel reads rows of this format."""
    return row_format == ROW


def rows_per_split(tokens: int, heads: int, capacity: int) -> int:
    """Rows that one program attends to, from the capacities of a call alone.

    tokens: queries; capacity: window and extra ids of a query, -1 ones too. As many spans as
    fill the card once; never below one block of 64.
    """
    blocks = max(1, -(-capacity // _BLOCK_ROWS))
    if blocks <= 2 and tokens * -(-heads // 64) >= 32:  # a second block costs less than a merge
        return _BLOCK_ROWS * blocks
    programs = max(1, _TARGET_PROGRAMS // (tokens * -(-heads // 64)))
    return _BLOCK_ROWS * -(-blocks // min(programs, blocks))


def workspace(
    tokens: int, heads: int, capacity: int, device: torch.device, split: int | None = None
) -> Workspace:
    """Scratch of ``sparse_attention`` for up to ``capacity`` ids a query; reusable across calls.

    split: rows_per_split; fix it where bits must be the same at different batch sizes. One span
    needs no scratch.
    """
    span = rows_per_split(tokens, heads, capacity) if split is None else split
    splits = triton.cdiv(triton.cdiv(capacity, _BLOCK_ROWS) * _BLOCK_ROWS, span)
    held = tokens if splits > 1 else 0
    return Workspace(
        torch.empty(held, splits, heads, ROW.dim, dtype=torch.float32, device=device),
        torch.empty(held, splits, heads, dtype=torch.float32, device=device),
        span,
    )


def sparse_attention(
    q: Tensor,
    window: Rows,
    window_ids: Tensor,
    extra: Rows | None,
    extra_ids: Tensor | None,
    sink: Tensor,
    scale: float,
    *,
    out: Tensor | None = None,
    scratch: Workspace | None = None,
    inverse: InverseRope | None = None,
) -> Tensor:
    """Attention of T independent queries over rows that ids name; see the twin in ref/.

    q: [T, H, 512] fp32 or bf16, rotated (read as bf16); window_ids: [T, W] and extra_ids: [T, K]
    int32 rows; an id below 0, or at or past the rows' count, is absent; sink: [H] fp32,
    infinities allowed; scale: 512**-0.5. ``out``: [T, H, 512], else allocated like q;
    ``scratch`` as ``workspace`` makes it for these capacities, else allocated; ``inverse``
    rotates the result back. Returns out; zeros where nothing is visible. Raises ValueError for
    rows that are not fp8 of (512, 64). Cost: the rows' bytes, 262,144 * H operations a row.
    """
    if not runs_kernels(q.device):
        result = _plainly(q, window, window_ids, extra, extra_ids, sink, scale, inverse)
        return result.to(q.dtype) if out is None else out.copy_(result)
    used = window if extra is None else extra
    for rows in (window, used):
        if not supports(rows.format):
            raise ValueError(f"sparse_attention reads fp8 rows of (512, 64), got {rows.format}")
    tokens, heads, dim = q.shape
    picked = window_ids if extra_ids is None else extra_ids
    extra_count = 0 if extra_ids is None else extra_ids.shape[1]
    assert dim == ROW.dim and q.stride(2) == 1, (q.shape, q.stride())
    assert window_ids.stride(1) == 1 and picked.stride(1) == 1, "ids must be contiguous in a query"
    blocks = -(-window_ids.shape[1] // _BLOCK_ROWS) + -(-extra_count // _BLOCK_ROWS)
    if out is None:
        out = torch.empty_like(q)
    if not tokens:
        return out
    if scratch is None:
        scratch = workspace(tokens, heads, blocks * _BLOCK_ROWS, q.device)
    span_blocks = scratch.rows_per_split // _BLOCK_ROWS
    splits = max(1, -(-blocks // span_blocks))
    held = scratch.sums.shape
    assert splits == 1 or (held[0] >= tokens and held[1] >= splits and held[2] == heads), held
    call = _Call(
        q, window, window_ids, used, picked, extra_count, sink, scale, out, scratch, inverse
    )
    if _hopper(q.device):
        _launch_hopper(call, splits, span_blocks)
    else:
        _launch_triton(call, splits, span_blocks)
    return out


@dataclass(frozen=True, slots=True)
class _Call:
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


def _hopper(device: torch.device) -> bool:
    """Whether csrc/sparse_attention.cu runs here: it is written for compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _launch_hopper(call: _Call, splits: int, span_blocks: int) -> None:
    q, out, scratch, inverse = call.q, call.out, call.scratch, call.inverse
    tokens, heads, _ = q.shape
    head_blocks = -(-heads // 64)
    check_rows_16(call.window)
    check_rows_16(call.extra)
    held = (*scratch.sums.stride()[:2], *scratch.logs.stride()[:2])
    turn = (
        None if inverse is None else inverse.positions,
        int(inverse is not None and inverse.positions.dtype is torch.int64),
        None if inverse is None else inverse.inv_freq,
    )
    to = (out, _wide(out), out.stride(0), out.stride(1))
    kernel = nvrtc.load("sparse_attention.cu", "sparse_attention", q.device)
    kernel.launch(
        nvrtc.Shape(splits * head_blocks * tokens, 512, 1, _SHARED_BYTES),
        q,
        _wide(q),
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
        *turn,
        *to,
        scratch.sums,
        scratch.logs,
        *held,
        heads,
        head_blocks,
        splits,
        span_blocks,
        struct.unpack("I", struct.pack("f", call.scale))[0],
    )
    if splits > 1:
        teams = 8 if splits > 8 else 1
        nvrtc.load("sparse_attention.cu", "sparse_attention_merge", q.device).launch(
            nvrtc.Shape(tokens * heads, 128 * teams),
            scratch.sums,
            scratch.logs,
            *held,
            splits,
            call.sink,
            *turn,
            *to,
            heads,
        )


def _wide(x: Tensor) -> int:
    """1 for fp32, 0 for bf16; raises ValueError for others."""
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"queries and results are fp32 or bf16, got {x.dtype}")
    return int(x.dtype is torch.float32)


def _launch_triton(call: _Call, splits: int, span_blocks: int) -> None:
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
        BLOCK_ROWS=_BLOCK_ROWS,
        SPAN_POWER=triton.next_power_of_2(span_blocks * _BLOCK_ROWS),
        num_warps=8 if block_heads == 64 else 4,
        num_stages=2,
    )
    if splits > 1:
        _merge[(ROW.dim // _MERGE_COLUMNS, heads, tokens)](
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


def check_rows_16(rows: Rows) -> None:
    """Raise ValueError unless every row starts at 16 bytes and its scales at 8."""
    data, scale, data_page, data_row, scale_page, scale_row, *_ = row_arguments(rows)
    if data.data_ptr() % 16 or data_page % 16 or data_row % 16:
        raise ValueError("row data must start at multiples of 16 bytes")
    if scale.data_ptr() % 8 or scale_page % 8 or scale_row % 8:
        raise ValueError("row scales must start at multiples of 8 bytes")


def _plainly(
    q: Tensor,
    window: Rows,
    window_ids: Tensor,
    extra: Rows | None,
    extra_ids: Tensor | None,
    sink: Tensor,
    scale: float,
    inverse: InverseRope | None,
) -> Tensor:
    near = _present(window, window_ids)
    far = None if extra is None or extra_ids is None else _present(extra, extra_ids)
    result = ref.sparse_attention(q.float(), window, near, extra, far, sink, scale)
    if inverse is None:
        return result
    return rotate(result, inverse.positions, inverse.inv_freq, inverse=True)


def _present(rows: Rows, ids: Tensor) -> Tensor:
    return torch.where((ids >= 0) & (ids < rows.row_count), ids, -1)


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
    column = tl.arange(0, 256)[None, :]
    q_a = tl.load(q_row + column, mask=here[:, None], other=0.0).to(OPERAND)
    column = tl.arange(0, 128)[None, :]
    q_b = tl.load(q_row + 256 + column, mask=here[:, None], other=0.0).to(OPERAND)
    column = tl.arange(0, 64)[None, :]
    q_c = tl.load(q_row + 384 + column, mask=here[:, None], other=0.0).to(OPERAND)
    q_r = tl.load(q_row + 448 + column, mask=here[:, None], other=0.0).to(OPERAND)

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
        kept = here[:, None]
        KIND: tl.constexpr = row.dtype.element_ty
        column = tl.arange(0, 256)[None, :]
        tl.store(row + column, (sum_a * factor).to(KIND), mask=kept)
        column = tl.arange(0, 128)[None, :]
        tl.store(row + 256 + column, (sum_b * factor).to(KIND), mask=kept)
        column = tl.arange(0, 64)[None, :]
        tl.store(row + 384 + column, (sum_c * factor).to(KIND), mask=kept)
        tl.store(row + 448 + column, sum_r.to(KIND), mask=kept)


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
