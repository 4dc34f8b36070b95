"""The Triton kernels of matrix products with stored weights.

``gemv_kernel`` multiplies rows of a weight by vectors in fp32: 16 bytes of a row are a *group*,
held by one thread, which is what a scale of MXFP4 covers. ``dot_tile`` multiplies by a block of
tokens on the matrix units, weights decoded to bf16 in registers.
"""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: ANN201, RET505, SIM108

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

__all__ = ["W_BF16", "W_FP4", "W_FP8", "W_FP32", "dense_kernel", "dot_kernel", "gemv_kernel"]


@triton.jit
def load_rows(w_ptr, rows, row_mask, start, K: tl.constexpr, KIND: tl.constexpr, BK: tl.constexpr):
    """Stored values of weight rows [BN] (int64), columns start .. start+BK: [BN, BK (/ 2)]."""
    PACK: tl.constexpr = 2 if KIND == W_FP4 else 1
    column = start // PACK + tl.arange(0, BK // PACK)
    at = w_ptr + rows[:, None] * (K // PACK) + column[None, :]
    mask = row_mask[:, None]
    if K % BK != 0:
        mask = mask & (column < K // PACK)[None, :]
    return tl.load(at, mask=mask, other=0)


@triton.jit
def load_scales(
    s_ptr, rows, row_mask, start, K: tl.constexpr, KIND: tl.constexpr, BK: tl.constexpr
):
    """Scale bytes of the groups of ``load_rows``: [1, BK / 16] (FP8), [BN, BK / 32] (MXFP4)."""
    if KIND == W_FP8:
        # Rows of one tile: one row of scales.
        column = start // 128 + tl.arange(0, BK // 16) // 8
        row = tl.min(rows, 0) // 128
        at = s_ptr + row * ((K + 127) // 128) + column[None, :]
        return tl.load(at, mask=(column < (K + 127) // 128)[None, :], other=127)
    elif KIND == W_FP4:
        column = start // 32 + tl.arange(0, BK // 32)
        at = s_ptr + rows[:, None] * (K // 32) + column[None, :]
        return tl.load(at, mask=row_mask[:, None] & (column < K // 32)[None, :], other=127)
    else:
        return tl.full((1, 1), 127, tl.uint8)


@triton.jit
def load_vector(x_ptr, K: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr):
    """x [BK] in fp32, rounded to bf16 unless the weight is fp32; zeros past K."""
    at = tl.arange(0, BK)
    return _rounded(tl.load(x_ptr + at, mask=at < K, other=0.0), KIND)


@triton.jit
def _rounded(x, KIND: tl.constexpr):
    if KIND == W_FP32:
        return x.to(tl.float32)
    else:
        return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def group_vector(x, scales, KIND: tl.constexpr, BK: tl.constexpr):
    """x [BK] fp32 as ``gemv_tile`` takes it, [1, groups, values]; with FP8's scales in it."""
    if KIND == W_FP8:
        return tl.reshape(x, (1, BK // 16, 16)) * scale_value(scales)[:, :, None]
    elif KIND == W_FP4:
        return tl.reshape(x, (1, BK // 32, 32))
    elif KIND == W_BF16:
        return tl.reshape(x, (1, BK // 8, 8))
    else:
        return tl.reshape(x, (1, BK // 4, 4))


@triton.jit
def group_rows(w, KIND: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """What load_rows read as fp32 [BN, groups, values]: 16 bytes of a row are a group."""
    if KIND == W_FP8:
        wide = w.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        return tl.reshape(wide, (BN, BK // 16, 16))
    elif KIND == W_FP4:
        wide = tl.join(fp4_low(w), fp4_high(w))
        return tl.reshape(wide, (BN, BK // 32, 32))
    elif KIND == W_BF16:
        return tl.reshape(w.to(tl.float32), (BN, BK // 8, 8))
    else:
        return tl.reshape(w, (BN, BK // 4, 4))


@triton.jit
def gemv_sums(wide, scales, x, KIND: tl.constexpr):
    """Rows of group_rows times group_vector, a sum a group: [BN, groups]."""
    sums = tl.sum(wide * x, 2)
    if KIND == W_FP4:
        return sums * 16384.0 * scale_value(scales)
    else:
        return sums


@triton.jit
def _normed(x, norm_ptr, KIND: tl.constexpr, NORM: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """(x times the norm's weight, sum of squares of x)."""
    if NORM:
        at = tl.arange(0, BK)
        squares = tl.sum(x * x, 0)
        x = _rounded(x * tl.load(norm_ptr + at, mask=at < K, other=0.0).to(tl.float32), KIND)
        return x, squares
    else:
        return x, 0.0


@triton.jit
def _put(out_ptr, rows, there, y, squares, eps, K: tl.constexpr, NORM: tl.constexpr):
    if NORM:
        y = tl.div_rn(y, tl.sqrt_rn(squares / K + eps))
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=there)


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
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    FETCH: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One to four tokens: ROWS outputs a program, BN at a time, tiles on their way ahead.

    The weights' way into the L2 begins before x is there.
    """
    announce(PDL)
    group = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * ROWS
    PACK: tl.constexpr = 2 if KIND == W_FP4 else 1
    w_ptr += group * N * (K // PACK)
    s_ptr += group * s_group
    x_ptr += group * x_group
    out_ptr += group * out_group
    begin = w_ptr.to(tl.int64)
    fetch_ahead(
        begin + first.to(tl.int64) * ROW_BYTES,
        ROWS * ROW_BYTES,
        FETCH,
        begin + N.to(tl.int64) * ROW_BYTES - 128,
        PDL,
    )
    scales = load_scales(s_ptr, first + tl.arange(0, BN), first + tl.arange(0, BN) < N, 0, K,
                         KIND if KIND == W_FP8 else W_FP32, BK)  # fmt: skip
    follow(PDL)
    x0, q0 = _normed(load_vector(x_ptr, K, BK, KIND), norm_ptr, KIND, NORM, K, BK)
    x0 = group_vector(x0, scales, KIND, BK)
    if TOKENS > 1:
        x1, q1 = _normed(load_vector(x_ptr + x_token, K, BK, KIND), norm_ptr, KIND, NORM, K, BK)
        x1 = group_vector(x1, scales, KIND, BK)
    if TOKENS > 2:
        x2, q2 = _normed(load_vector(x_ptr + 2 * x_token, K, BK, KIND), norm_ptr, KIND, NORM, K, BK)
        x2 = group_vector(x2, scales, KIND, BK)
    if TOKENS > 3:
        x3, q3 = _normed(load_vector(x_ptr + 3 * x_token, K, BK, KIND), norm_ptr, KIND, NORM, K, BK)
        x3 = group_vector(x3, scales, KIND, BK)
    for inside in tl.range(0, ROWS, BN, num_stages=STAGES):
        rows = (first + inside + tl.arange(0, BN)).to(tl.int64)
        there = rows < N
        w = load_rows(w_ptr, rows, there, 0, K, KIND, BK)
        if KIND == W_FP4:
            by_row = load_scales(s_ptr, rows, there, 0, K, KIND, BK)
        else:
            by_row = scales
        wide = group_rows(w, KIND, BN, BK)
        y = tl.sum(gemv_sums(wide, by_row, x0, KIND), 1)
        _put(out_ptr, rows, there, y, q0, eps, K, NORM)
        if TOKENS > 1:
            y = tl.sum(gemv_sums(wide, by_row, x1, KIND), 1)
            _put(out_ptr + out_token, rows, there, y, q1, eps, K, NORM)
        if TOKENS > 2:
            y = tl.sum(gemv_sums(wide, by_row, x2, KIND), 1)
            _put(out_ptr + 2 * out_token, rows, there, y, q2, eps, K, NORM)
        if TOKENS > 3:
            y = tl.sum(gemv_sums(wide, by_row, x3, KIND), 1)
            _put(out_ptr + 3 * out_token, rows, there, y, q3, eps, K, NORM)


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
        scales = scale_value(load_scales(s_ptr, rows, row_mask, start, K, KIND, BK))
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
            scale = scale_value(tl.load(s_ptr + row * ((K + 127) // 128) + start // 128))
            acc += tl.dot(wide, operand(x)) * scale
        elif KIND == W_BF16:
            acc = tl.dot(operand(w), operand(x), acc)
        else:
            acc = tl.dot(w, x.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
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
    STEPS: tl.constexpr = (K + BK * SPLITS - 1) // (BK * SPLITS)
    w_ptr += group * N * (K // PACK)
    s_ptr += group * s_group
    x_ptr += group * x_group
    acc = tl.zeros((BN, BT), tl.float32)
    x_rows = token.to(tl.int64) * x_token
    follow(PDL)
    for step in tl.range(split * STEPS, (split + 1) * STEPS, num_stages=STAGES):
        if K % (BK * SPLITS) == 0 or step * BK < K:
            acc = dot_tile(
                w_ptr, s_ptr, rows, there, x_ptr, x_rows, present, step * BK, acc, K, KIND, BN, BK
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
        scales = scale_value(load_scales(s_ptr, rows, there, start, K, KIND, 128))
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
