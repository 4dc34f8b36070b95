"""The Triton kernels of experts: pairs of (token, expert) grouped into tiles, two products, a sum.

Pair p = token * k + place is a row of the hidden values; the shared expert's rows follow them.
"""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: ANN201, RET505, E741

from __future__ import annotations

from dsv4_tierd.kernels.linear_triton import (
    W_FP4,
    W_FP8,
    dot_tile,
    gemv_tile,
    load_rows,
    load_scales,
    load_vector,
)
from dsv4_tierd.kernels.step_triton import follow
from dsv4_tierd.kernels.triton_rows import tl, triton


@triton.jit
def _scale_rows(N: tl.constexpr, KIND: tl.constexpr):
    """Rows of scales of a weight with N rows."""
    return (N + 127) // 128 if KIND == W_FP8 else N


@triton.jit
def _matrix(w_ptr, s_ptr, number, N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr):
    """Where matrix ``number`` (int64) of a stack starts: values, scales."""
    PACK: tl.constexpr = 2 if KIND == W_FP4 else 1
    w = w_ptr + number * (N * (K // PACK))
    if KIND == W_FP8:
        return w, s_ptr + number * (((N + 127) // 128) * ((K + 127) // 128))
    else:
        return w, s_ptr + number * (N * (K // 32))


@triton.jit
def _swiglu(gate, up, LIMIT: tl.constexpr):
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _gemv(w_ptr, s_ptr, x_ptr, rows, there, K: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr,
          BK: tl.constexpr):  # fmt: skip
    """Weight rows [BN] times a vector: [BN] fp32."""
    acc = tl.zeros((BN, BK // (32 if KIND == W_FP4 else 16)), tl.float32)
    for start in tl.static_range(0, K, BK):
        w = load_rows(w_ptr, rows, there, start, K, KIND, BK)
        s = load_scales(s_ptr, rows, there, start, K, KIND, BN, BK)
        x = load_vector(x_ptr, start, K, BK).to(tl.bfloat16).to(tl.float32)
        acc += gemv_tile(w, s, x, KIND, BN, BK)
    return tl.sum(acc, 1)


@triton.jit
def _one_up(
    w_ptr, s_ptr, x_ptr, number, rows, there, I: tl.constexpr, D: tl.constexpr,
    KIND: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    w, s = _matrix(w_ptr, s_ptr, 2 * number, I, D, KIND)
    gate = _gemv(w, s, x_ptr, rows, there, D, KIND, BN, BK)
    w, s = _matrix(w_ptr, s_ptr, 2 * number + 1, I, D, KIND)
    return _swiglu(gate, _gemv(w, s, x_ptr, rows, there, D, KIND, BN, BK), LIMIT)


@triton.jit
def one_up_kernel(
    x_ptr,
    ids_ptr,
    shares_ptr,
    w_ptr,
    s_ptr,
    shared_w_ptr,
    shared_s_ptr,
    hidden_ptr,
    experts,
    PICKS: tl.constexpr,
    I: tl.constexpr,
    D: tl.constexpr,
    KIND: tl.constexpr,
    SHARED: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: BN hidden values of one of its experts a program. SHARED: its kind, or -1."""
    place = tl.program_id(1)
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    there = rows < I
    follow(PDL)
    if place < PICKS:
        number = tl.load(ids_ptr + place).to(tl.int64)
        if (number >= 0) & (number < experts):
            share = tl.load(shares_ptr + place)
            hidden = share * _one_up(
                w_ptr, s_ptr, x_ptr, number, rows, there, I, D, KIND, BN, BK, LIMIT
            )
            tl.store(hidden_ptr + place * I + rows, hidden.to(tl.bfloat16), mask=there)
    elif SHARED >= 0:
        zero = tl.zeros((), tl.int64)
        hidden = _one_up(
            shared_w_ptr, shared_s_ptr, x_ptr, zero, rows, there, I, D, SHARED, BN, BK, LIMIT
        )
        tl.store(hidden_ptr + PICKS * I + rows, hidden.to(tl.bfloat16), mask=there)


@triton.jit
def one_down_kernel(
    hidden_ptr,
    ids_ptr,
    w_ptr,
    s_ptr,
    shared_w_ptr,
    shared_s_ptr,
    out_ptr,
    experts,
    PICKS: tl.constexpr,
    I: tl.constexpr,
    D: tl.constexpr,
    KIND: tl.constexpr,
    SHARED: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: BN outputs a program, over all of its experts in their order."""
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    there = rows < D
    follow(PDL)
    y = tl.zeros((BN,), tl.float32)
    for place in range(PICKS):
        number = tl.load(ids_ptr + place).to(tl.int64)
        if (number >= 0) & (number < experts):
            w, s = _matrix(w_ptr, s_ptr, number, D, I, KIND)
            y += _gemv(w, s, hidden_ptr + place * I, rows, there, I, KIND, BN, BK)
    if SHARED >= 0:
        x = hidden_ptr + PICKS * I
        y += _gemv(shared_w_ptr, shared_s_ptr, x, rows, there, I, SHARED, BN, BK)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def plan_kernel(
    ids_ptr,
    order_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    tile_end_ptr,
    pairs,
    experts,
    tiles,
    BUCKETS: tl.constexpr,
    CHUNK: tl.constexpr,
    BT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pairs in the order of their experts, then of their numbers; tiles of BT of them.

    Program e writes expert e's pairs and tiles; program ``experts`` marks unused tiles (-1).
    """
    expert = tl.program_id(0)
    bucket = tl.arange(0, BUCKETS)
    follow(PDL)
    counts = tl.zeros((BUCKETS,), tl.int32)
    for start in range(0, pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + at, mask=at < pairs, other=-1)
        ids = tl.where((ids >= 0) & (ids < experts), ids, BUCKETS - 1)
        counts += tl.histogram(ids, BUCKETS)
    counts = tl.where(bucket < experts, counts, 0)
    before = bucket < expert
    first = tl.sum(tl.where(before, counts, 0), 0)
    own = tl.sum(tl.where(bucket == expert, counts, 0), 0)
    tile = tl.sum(tl.where(before, (counts + BT - 1) // BT, 0), 0)
    if expert == experts:
        for unused in range(tile, tiles):
            tl.store(tile_expert_ptr + unused, -1)
    else:
        placed = first
        for start in range(0, pairs, CHUNK):
            at = start + tl.arange(0, CHUNK)
            mine = tl.load(ids_ptr + at, mask=at < pairs, other=-1) == expert
            rank = tl.cumsum(mine.to(tl.int32), 0)
            tl.store(order_ptr + placed + rank - 1, at, mask=mine)
            placed += tl.sum(mine.to(tl.int32), 0)
        for part in range((own + BT - 1) // BT):
            tl.store(tile_expert_ptr + tile + part, expert)
            tl.store(tile_first_ptr + tile + part, first + part * BT)
            tl.store(tile_end_ptr + tile + part, first + own)


@triton.jit
def _up_tile(
    x_ptr, x_rows, present, w_ptr, s_ptr, number, rows, there, I: tl.constexpr, D: tl.constexpr,
    KIND: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, LIMIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    gate = tl.zeros((BN, BT), tl.float32)
    up = tl.zeros((BN, BT), tl.float32)
    w1, s1 = _matrix(w_ptr, s_ptr, 2 * number, I, D, KIND)
    w3, s3 = _matrix(w_ptr, s_ptr, 2 * number + 1, I, D, KIND)
    for start in tl.range(0, D, 128, num_stages=STAGES):
        gate = dot_tile(w1, s1, rows, there, x_ptr, x_rows, present, start, gate, D, KIND, BN, 128)
        up = dot_tile(w3, s3, rows, there, x_ptr, x_rows, present, start, up, D, KIND, BN, 128)
    return _swiglu(gate, up, LIMIT)


@triton.jit
def up_kernel(
    x_ptr,
    x_token,
    order_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    tile_end_ptr,
    shares_ptr,
    w_ptr,
    s_ptr,
    shared_w_ptr,
    shared_s_ptr,
    hidden_ptr,
    tokens,
    tiles,
    PICKS: tl.constexpr,
    I: tl.constexpr,
    D: tl.constexpr,
    KIND: tl.constexpr,
    SHARED: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    LIMIT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BN hidden values of a tile of pairs; tiles from ``tiles`` on are the shared expert's."""
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    there = rows < I
    tile = tl.program_id(1)
    member = tl.arange(0, BT)
    follow(PDL)
    if tile < tiles:
        number = tl.load(tile_expert_ptr + tile).to(tl.int64)
        if number >= 0:
            place = tl.load(tile_first_ptr + tile) + member
            present = place < tl.load(tile_end_ptr + tile)
            pair = tl.load(order_ptr + place, mask=present, other=0).to(tl.int64)
            x_rows = (pair // PICKS) * x_token
            hidden = _up_tile(
                x_ptr, x_rows, present, w_ptr, s_ptr, number, rows, there, I, D, KIND, BN, BT,
                LIMIT, STAGES,
            )  # fmt: skip
            hidden *= tl.load(shares_ptr + pair, mask=present, other=0.0)[None, :]
            at = hidden_ptr + pair[None, :] * I + rows[:, None]
            tl.store(at, hidden.to(tl.bfloat16), mask=there[:, None] & present[None, :])
    elif SHARED >= 0:
        token = ((tile - tiles) * BT + member).to(tl.int64)
        present = token < tokens
        zero = tl.zeros((), tl.int64)
        hidden = _up_tile(
            x_ptr, token * x_token, present, shared_w_ptr, shared_s_ptr, zero, rows, there, I, D,
            SHARED, BN, BT, LIMIT, STAGES,
        )  # fmt: skip
        at = hidden_ptr + (tokens * PICKS + token)[None, :] * I + rows[:, None]
        tl.store(at, hidden.to(tl.bfloat16), mask=there[:, None] & present[None, :])


@triton.jit
def _down_tile(
    hidden_ptr, pair, present, w_ptr, s_ptr, number, rows, there, I: tl.constexpr,
    D: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BN, BT), tl.float32)
    w, s = _matrix(w_ptr, s_ptr, number, D, I, KIND)
    for start in tl.range(0, I, 128, num_stages=STAGES):
        acc = dot_tile(
            w, s, rows, there, hidden_ptr, pair * I, present, start, acc, I, KIND, BN, 128
        )
    return acc


@triton.jit
def down_kernel(
    hidden_ptr,
    order_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    tile_end_ptr,
    w_ptr,
    s_ptr,
    shared_w_ptr,
    shared_s_ptr,
    answers_ptr,
    tokens,
    tiles,
    PICKS: tl.constexpr,
    I: tl.constexpr,
    D: tl.constexpr,
    KIND: tl.constexpr,
    SHARED: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """BN outputs of a tile of pairs, each pair's to its row of ``answers``."""
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    there = rows < D
    tile = tl.program_id(1)
    member = tl.arange(0, BT)
    follow(PDL)
    if tile < tiles:
        number = tl.load(tile_expert_ptr + tile).to(tl.int64)
        if number >= 0:
            place = tl.load(tile_first_ptr + tile) + member
            present = place < tl.load(tile_end_ptr + tile)
            pair = tl.load(order_ptr + place, mask=present, other=0).to(tl.int64)
            acc = _down_tile(
                hidden_ptr, pair, present, w_ptr, s_ptr, number, rows, there, I, D, KIND, BN, BT,
                STAGES,
            )  # fmt: skip
            at = answers_ptr + pair[None, :] * D + rows[:, None]
            acc = acc.to(answers_ptr.dtype.element_ty)
            tl.store(at, acc, mask=there[:, None] & present[None, :])
    elif SHARED >= 0:
        token = ((tile - tiles) * BT + member).to(tl.int64)
        present = token < tokens
        pair = tokens * PICKS + token
        zero = tl.zeros((), tl.int64)
        acc = _down_tile(
            hidden_ptr, pair, present, shared_w_ptr, shared_s_ptr, zero, rows, there, I, D, SHARED,
            BN, BT, STAGES,
        )  # fmt: skip
        at = answers_ptr + pair[None, :] * D + rows[:, None]
        acc = acc.to(answers_ptr.dtype.element_ty)
        tl.store(at, acc, mask=there[:, None] & present[None, :])


@triton.jit
def sum_kernel(
    answers_ptr,
    ids_ptr,
    out_ptr,
    out_token,
    tokens,
    experts,
    PICKS: tl.constexpr,
    D: tl.constexpr,
    SHARED: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token's answers added in the order of its picks; absent ones are not read."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    here = column < D
    follow(PDL)
    y = tl.zeros((BN,), tl.float32)
    for place in tl.static_range(PICKS):
        number = tl.load(ids_ptr + token * PICKS + place)
        # As a number: the interpreter cannot spread a scalar truth over a tensor.
        chosen = column < tl.where((number >= 0) & (number < experts), D, 0)
        at = answers_ptr + (token * PICKS + place) * D + column
        y += tl.load(at, mask=chosen, other=0.0).to(tl.float32)
    if SHARED >= 0:
        at = answers_ptr + (tokens * PICKS + token) * D + column
        y += tl.load(at, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * out_token + column, y.to(out_ptr.dtype.element_ty), mask=here)
