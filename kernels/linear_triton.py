"""The Triton kernels of matrix products with stored weights.

``gemv_kernel`` multiplies rows of a weight by vectors in fp32; each warp has rows of its own, each
thread a *group* of 8 values of them, and of x, so that no thread waits for another. ``dot_tile``
multiplies by a block of tokens on the matrix units, weights decoded to bf16 in registers.
"""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: ANN201, RET505

from __future__ import annotations

from dsv4_tierd.kernels.step_triton import (
    W_BF16,
    W_FP4,
    W_FP8,
    W_FP32,
    announce,
    fetch_ahead,
    follow,
    fp4_high,
    fp4_low,
    operand,
    scale_value,
)
from dsv4_tierd.kernels.triton_rows import tl, triton

# Of a launch of rows times vectors: the layouts follow from it.
WARPS = tl.constexpr(4)

__all__ = ["W_BF16", "W_FP4", "W_FP8", "W_FP32", "dense_kernel", "dot_kernel", "gemv_kernel"]


@triton.jit
def load_rows(w_ptr, rows, row_mask, start, K: tl.constexpr, KIND: tl.constexpr, BK: tl.constexpr):
    """Stored values of weight rows [BN] (int64), columns start .. start+BK: [BN, BK (/ 2)]."""
    PACK: tl.constexpr = 2 if KIND == W_FP4 else 1
    column = start // PACK + tl.arange(0, BK // PACK)
    at = w_ptr + rows[:, None] * (K // PACK) + column[None, :]
    mask = row_mask[:, None] & (column < K // PACK)[None, :]
    return tl.load(at, mask=mask, other=0)


@triton.jit
def load_scales(s_ptr, rows, row_mask, start, K: tl.constexpr, BK: tl.constexpr):
    """Scale bytes [BN, BK / 32] of MXFP4 rows."""
    column = start // 32 + tl.arange(0, BK // 32)
    at = s_ptr + rows[:, None] * (K // 32) + column[None, :]
    return tl.load(at, mask=row_mask[:, None] & (column < K // 32)[None, :], other=127)


@triton.jit
def load_vector(x_ptr, start, K: tl.constexpr, BK: tl.constexpr):
    """x[start : start + BK] in fp32, zeros past K: [WARPS, BK], a copy a warp."""
    at = start + tl.arange(0, BK)[None, :] + tl.zeros((WARPS, 1), tl.int32)
    return tl.load(x_ptr + at, mask=at < K, other=0.0).to(tl.float32)


@triton.jit
def group_vector(x, KIND: tl.constexpr, BK: tl.constexpr):
    """x [WARPS, BK] fp32, rounded to bf16 unless the weight is fp32, as [1, WARPS, 32, group]."""
    if KIND != W_FP32:
        x = x.to(tl.bfloat16).to(tl.float32)
    return tl.reshape(x, (1, WARPS, 32, BK // 32))


@triton.jit
def load_chunk(
    w_ptr,
    rows,
    row_mask,
    start,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BK: tl.constexpr,
    EVEN: tl.constexpr,
):
    """load_rows, a group of BK / 32 values a thread whatever they are stored in. EVEN: no mask."""
    PACK: tl.constexpr = 2 if KIND == W_FP4 else 1
    column = start // PACK + tl.arange(0, BK // PACK)
    at = w_ptr + rows[:, None] * (K // PACK) + column[None, :]
    at = tl.max_contiguous(at, (1, BK // (32 * PACK)))
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=row_mask[:, None] & (column < K // PACK)[None, :], other=0)


@triton.jit
def group_rows(w, KIND: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """What load_chunk read as fp32 [BN / WARPS, WARPS, 32, group]: rows of a warp, its threads."""
    if KIND == W_FP8:
        wide = w.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif KIND == W_FP4:
        wide = tl.join(fp4_low(w), fp4_high(w))
    else:
        wide = w.to(tl.float32)
    return tl.reshape(wide, (BN // WARPS, WARPS, 32, BK // 32))


@triton.jit
def chunk_scales(
    s_ptr,
    rows,
    row_mask,
    start,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """fp32 scales of the groups of ``load_chunk``: [1, 1, 32] (FP8), [BN / WARPS, WARPS, 32]."""
    column = start + tl.arange(0, 32) * (BK // 32)
    if KIND == W_FP8:
        # Rows of one tile: one row of scales.
        at = s_ptr + (tl.min(rows, 0) // 128) * ((K + 127) // 128) + column // 128
        return tl.reshape(scale_value(tl.load(at, mask=column < K, other=127)), (1, 1, 32))
    elif KIND == W_FP4:
        at = s_ptr + rows[:, None] * (K // 32) + (column // 32)[None, :]
        bytes_ = tl.load(at, mask=row_mask[:, None] & (column < K)[None, :], other=127)
        return tl.reshape(scale_value(bytes_) * 16384.0, (BN // WARPS, WARPS, 32))
    else:
        return tl.full((1, 1, 1), 1.0, tl.float32)


@triton.jit
def gemv_sums(wide, scales, x, KIND: tl.constexpr):
    """group_rows times group_vector, a sum a group: [BN / WARPS, WARPS, 32]."""
    sums = tl.sum(wide * x, 3)
    if KIND >= W_FP8:
        return sums * scales
    else:
        return sums


@triton.jit
def _normed(x, norm_ptr, start, NORM: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """(x times the norm's weight, sums of squares of x by group)."""
    if NORM:
        squares = tl.sum(tl.reshape(x * x, (1, WARPS, 32, BK // 32)), 3)
        return x * load_vector(norm_ptr, start, K, BK), squares
    else:
        return x, tl.zeros((1, WARPS, 32), tl.float32)


@triton.jit
def put_rows(out_ptr, first, y, end, BN: tl.constexpr):
    """Store y [BN / WARPS, WARPS] as rows first .. first+BN, those before ``end``."""
    rows = first + tl.reshape(tl.arange(0, BN), (BN // WARPS, WARPS))
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=rows < end)


@triton.jit
def _put(out_ptr, first, end, acc, squares, eps, K: tl.constexpr, NORM: tl.constexpr,
         BN: tl.constexpr):  # fmt: skip
    y = tl.sum(acc, 2)
    if NORM:
        y = tl.div_rn(y, tl.sqrt_rn(tl.sum(squares, 2) / K + eps))
    put_rows(out_ptr, first, y, end, BN)


@triton.jit
def gemv_kernel(
    x_ptr,
    x_token,
    x_group,
    norm_ptr,
    eps,
    w_ptr,
    s_ptr,
    s_group,
    out_ptr,
    out_token,
    out_group,
    N,
    K: tl.constexpr,
    KIND: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    FETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One to four tokens: BN outputs a program. A warp has rows of its own: nobody waits.

    BK values of a row are 8 a thread. The weights' way into the L2 begins before x is there.
    """
    announce(PDL)
    group = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BN
    PACK: tl.constexpr = 2 if KIND == W_FP4 else 1
    w_ptr += group * N * (K // PACK)
    s_ptr += group * s_group
    x_ptr += group * x_group
    out_ptr += group * out_group
    begin = w_ptr.to(tl.int64)
    last = begin + N.to(tl.int64) * ROW_BYTES - 128
    fetch_ahead(begin + first.to(tl.int64) * ROW_BYTES, BN * ROW_BYTES, FETCH, last, PDL)
    rows = (first + tl.arange(0, BN)).to(tl.int64)
    there = rows < N
    acc0 = tl.zeros((BN // WARPS, WARPS, 32), tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    squares0 = tl.zeros((1, WARPS, 32), tl.float32)
    squares1 = squares0
    squares2 = squares0
    squares3 = squares0
    follow(PDL)
    for chunk in range(0, K, BK * UNROLL):
        for part in tl.static_range(UNROLL):
            start = chunk + part * BK
            w = load_chunk(w_ptr, rows, there, start, K, KIND, BK, EVEN)
            scales = chunk_scales(s_ptr, rows, there, start, K, KIND, BN, BK)
            wide = group_rows(w, KIND, BN, BK)
            x, squares = _normed(load_vector(x_ptr, start, K, BK), norm_ptr, start, NORM, K, BK)
            acc0 += gemv_sums(wide, scales, group_vector(x, KIND, BK), KIND)
            squares0 += squares
            if TOKENS > 1:
                x = load_vector(x_ptr + x_token, start, K, BK)
                x, squares = _normed(x, norm_ptr, start, NORM, K, BK)
                acc1 += gemv_sums(wide, scales, group_vector(x, KIND, BK), KIND)
                squares1 += squares
            if TOKENS > 2:
                x = load_vector(x_ptr + 2 * x_token, start, K, BK)
                x, squares = _normed(x, norm_ptr, start, NORM, K, BK)
                acc2 += gemv_sums(wide, scales, group_vector(x, KIND, BK), KIND)
                squares2 += squares
            if TOKENS > 3:
                x = load_vector(x_ptr + 3 * x_token, start, K, BK)
                x, squares = _normed(x, norm_ptr, start, NORM, K, BK)
                acc3 += gemv_sums(wide, scales, group_vector(x, KIND, BK), KIND)
                squares3 += squares
    _put(out_ptr, first, N, acc0, squares0, eps, K, NORM, BN)
    if TOKENS > 1:
        _put(out_ptr + out_token, first, N, acc1, squares1, eps, K, NORM, BN)
    if TOKENS > 2:
        _put(out_ptr + 2 * out_token, first, N, acc2, squares2, eps, K, NORM, BN)
    if TOKENS > 3:
        _put(out_ptr + 3 * out_token, first, N, acc3, squares3, eps, K, NORM, BN)


@triton.jit
def dot_tile(
    w_ptr,
    s_ptr,
    rows,
    row_mask,
    x_ptr,
    x_rows,
    x_mask,
    start,
    acc,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """acc [BN, BT] plus weight rows [BN] times tokens' values, columns start .. start+BK.

    rows, x_rows: int64 offsets, the latter in elements. FP8: BK is 128, one scale a tile.
    """
    w = load_rows(w_ptr, rows, row_mask, start, K, KIND, BK)
    if KIND == W_FP4:
        pair = start + 2 * tl.arange(0, BK // 2)
        at = x_ptr + pair[:, None] + x_rows[None, :]
        mask = (pair < K)[:, None] & x_mask[None, :]
        even = operand(tl.load(at, mask=mask, other=0.0))
        odd = operand(tl.load(at + 1, mask=mask, other=0.0))
        scales = scale_value(load_scales(s_ptr, rows, row_mask, start, K, BK))
        scales = tl.broadcast_to(scales[:, :, None], (BN, BK // 32, 16))
        scales = tl.reshape(scales, (BN, BK // 2))
        low = operand(fp4_low(w) * 16384.0 * scales)
        high = operand(fp4_high(w) * 16384.0 * scales)
        acc = tl.dot(low, even, tl.dot(high, odd, acc))
    else:
        column = start + tl.arange(0, BK)
        at = x_ptr + column[:, None] + x_rows[None, :]
        mask = (column < K)[:, None] & x_mask[None, :]
        x = tl.load(at, mask=mask, other=0.0)
        if KIND == W_FP8:
            wide = operand(w.to(tl.float8e4nv, bitcast=True))
            row = tl.min(rows, 0) // 128
            inside = tl.minimum(start // 128, (K - 1) // 128)  # past the end w is zeros
            scale = scale_value(tl.load(s_ptr + row * ((K + 127) // 128) + inside))
            acc += tl.dot(wide, operand(x)) * scale
        elif KIND == W_BF16:
            acc = tl.dot(operand(w), operand(x), acc)
        else:
            acc = tl.dot(w, x.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["tokens"])
def dot_kernel(
    x_ptr,
    x_token,
    x_group,
    w_ptr,
    s_ptr,
    s_group,
    out_ptr,
    out_token,
    out_group,
    partial_ptr,
    arrivals_ptr,
    tokens,
    N,
    K: tl.constexpr,
    KIND: tl.constexpr,
    SPLITS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BN outputs of BT tokens over a part of K; with SPLITS the last part to arrive adds them."""
    announce(PDL)
    group = (tl.program_id(1) // SPLITS).to(tl.int64)
    split = tl.program_id(1) % SPLITS
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    there = rows < N
    token = tl.program_id(2) * BT + tl.arange(0, BT)
    present = token < tokens
    PACK: tl.constexpr = 2 if KIND == W_FP4 else 1
    # Two tiles a turn: waiting and deciding costs as much as one of them.
    STEPS: tl.constexpr = (K + 2 * BK * SPLITS - 1) // (2 * BK * SPLITS)
    w_ptr += group * N * (K // PACK)
    s_ptr += group * s_group
    x_ptr += group * x_group
    acc = tl.zeros((BN, BT), tl.float32)
    x_rows = token.to(tl.int64) * x_token
    follow(PDL)
    for step in tl.range(split * STEPS, (split + 1) * STEPS, num_stages=STAGES):
        start = step * (2 * BK)
        acc = dot_tile(
            w_ptr, s_ptr, rows, there, x_ptr, x_rows, present, start, acc, K, KIND, BN, BK
        )
        start += BK
        acc = dot_tile(
            w_ptr, s_ptr, rows, there, x_ptr, x_rows, present, start, acc, K, KIND, BN, BK
        )
    target = out_ptr + group * out_group + token[None, :].to(tl.int64) * out_token + rows[:, None]
    mask = there[:, None] & present[None, :]
    if SPLITS == 1:
        tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tile = (tl.program_id(2) * (tl.num_programs(1) // SPLITS) + group) * tl.num_programs(0)
        tile = (tile + tl.program_id(0)).to(tl.int64)
        inside = tl.arange(0, BN)[:, None] * BT + tl.arange(0, BT)[None, :]
        place = partial_ptr + tile * (SPLITS * BN * BT) + inside
        tl.store(place + split * (BN * BT), acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            tl.store(arrivals_ptr + tile, 0)
            acc = tl.load(place, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                acc += tl.load(place + other * (BN * BT), cache_modifier=".cg")
            tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dense_kernel(w_ptr, s_ptr, out_ptr, N, K: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr):
    """[N, K] bf16 of a stored weight: BN rows by 128 columns a program; exact for FP8 tiles."""
    PACK: tl.constexpr = 2 if KIND == W_FP4 else 1
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    there = rows < N
    start = tl.program_id(1) * 128
    group = tl.program_id(2).to(tl.int64)
    w_ptr += group * N * (K // PACK)
    out_ptr += group * N * K
    w = load_rows(w_ptr, rows, there, start, K, KIND, 128)
    if KIND == W_FP4:
        s_ptr += group * N * (K // 32)
        scales = scale_value(load_scales(s_ptr, rows, there, start, K, 128))
        scales = tl.reshape(tl.broadcast_to(scales[:, :, None], (BN, 4, 16)), (BN, 64))
        both = tl.join(fp4_low(w) * 16384.0 * scales, fp4_high(w) * 16384.0 * scales)
        wide = tl.reshape(both, (BN, 128))
    else:
        s_ptr += group * ((N + 127) // 128) * ((K + 127) // 128)
        row = (tl.program_id(0) * BN) // 128
        scale = scale_value(tl.load(s_ptr + row * ((K + 127) // 128) + tl.program_id(1)))
        wide = w.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    column = start + tl.arange(0, 128)
    at = out_ptr + rows[:, None] * K + column[None, :]
    tl.store(at, wide.to(tl.bfloat16), mask=there[:, None] & (column < K)[None, :])
