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
    WARPS,
    chunk_scales,
    dot_tile,
    gemv_sums,
    group_rows,
    group_vector,
    load_chunk,
    load_vector,
    put_rows,
)
from dsv4_tierd.kernels.step_triton import announce, fetch_ahead, follow
from dsv4_tierd.kernels.triton_rows import tl, triton


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
def swiglu(gate, up, LIMIT: tl.constexpr):
    """silu(min(gate, LIMIT)) * clip(up, -LIMIT, LIMIT); 0 is no limit; NaN stays."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _dot_rows(
    acc, w_ptr, s_ptr, x_ptr, rows, there, start, K: tl.constexpr, KIND: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """acc plus weight rows times a vector, values start .. start+BK, by groups."""
    w = load_chunk(w_ptr, rows, there, start, K, KIND, BK, EVEN)
    scales = chunk_scales(s_ptr, rows, there, start, K, KIND, BN, BK)
    x = group_vector(load_vector(x_ptr, start, K, BK), KIND, BK)
    return acc + gemv_sums(group_rows(w, KIND, BN, BK), scales, x, KIND)


@triton.jit
def _up_rows(
    w_ptr, s_ptr, x_ptr, number, share, hidden_ptr, first, I: tl.constexpr, D: tl.constexpr,
    KIND: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, UNROLL: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """BN hidden values of one expert for one token."""
    w1, s1 = _matrix(w_ptr, s_ptr, 2 * number, I, D, KIND)
    w3, s3 = _matrix(w_ptr, s_ptr, 2 * number + 1, I, D, KIND)
    rows = (first + tl.arange(0, BN)).to(tl.int64)
    there = rows < I
    EVEN: tl.constexpr = I % BN == 0 and D % (BK * UNROLL) == 0
    gate = tl.zeros((BN // WARPS, WARPS, 32), tl.float32)
    up = tl.zeros((BN // WARPS, WARPS, 32), tl.float32)
    for chunk in range(0, D, BK * UNROLL):
        for part in tl.static_range(UNROLL):
            start = chunk + part * BK
            gate = _dot_rows(gate, w1, s1, x_ptr, rows, there, start, D, KIND, BN, BK, EVEN)
            up = _dot_rows(up, w3, s3, x_ptr, rows, there, start, D, KIND, BN, BK, EVEN)
    hidden = share * swiglu(tl.sum(gate, 2), tl.sum(up, 2), LIMIT)
    put_rows(hidden_ptr, first, hidden, I, BN)


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
    UNROLL: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: BN hidden values of one of its experts a program. SHARED: its kind, or -1."""
    announce(PDL)
    # The shared expert comes first: its weights do not wait for the choice.
    place = tl.program_id(1) - (1 if SHARED >= 0 else 0)
    first = tl.program_id(0) * BN
    if place < 0:
        begin = shared_w_ptr.to(tl.int64)
        BYTES: tl.constexpr = D // 2 if SHARED == W_FP4 else D
        FETCH: tl.constexpr = triton.next_power_of_2(BN * BYTES)
        at = begin + first.to(tl.int64) * BYTES
        fetch_ahead(at, BN * BYTES, FETCH, begin + (I * BYTES - 128), PDL)
        fetch_ahead(at + I * BYTES, BN * BYTES, FETCH, begin + (2 * I * BYTES - 128), PDL)
        follow(PDL)
        if SHARED >= 0:
            zero = tl.zeros((), tl.int64)
            _up_rows(
                shared_w_ptr, shared_s_ptr, x_ptr, zero, 1.0, hidden_ptr + PICKS * I, first, I, D,
                SHARED, BN, BK, UNROLL, LIMIT,
            )  # fmt: skip
    else:
        follow(PDL)
        number = tl.load(ids_ptr + place).to(tl.int64)
        if (number >= 0) & (number < experts):
            share = tl.load(shares_ptr + place)
            _up_rows(
                w_ptr, s_ptr, x_ptr, number, share, hidden_ptr + place * I, first, I, D, KIND,
                BN, BK, UNROLL, LIMIT,
            )  # fmt: skip


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
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: BN outputs a program, over all of its experts in their order."""
    announce(PDL)
    first = tl.program_id(0) * BN
    rows = (first + tl.arange(0, BN)).to(tl.int64)
    there = rows < D
    EVEN: tl.constexpr = D % BN == 0 and I % (BK * UNROLL) == 0
    if SHARED >= 0:
        begin = shared_w_ptr.to(tl.int64)
        BYTES: tl.constexpr = I // 2 if SHARED == W_FP4 else I
        FETCH: tl.constexpr = triton.next_power_of_2(BN * BYTES)
        at = begin + first.to(tl.int64) * BYTES
        fetch_ahead(at, BN * BYTES, FETCH, begin + (D * BYTES - 128), PDL)
    follow(PDL)
    acc = tl.zeros((BN // WARPS, WARPS, 32), tl.float32)
    for pick in range(PICKS):
        number = tl.load(ids_ptr + pick).to(tl.int64)
        if (number >= 0) & (number < experts):
            w, s = _matrix(w_ptr, s_ptr, number, D, I, KIND)
            x = hidden_ptr + pick * I
            for chunk in range(0, I, BK * UNROLL):
                for part in tl.static_range(UNROLL):
                    start = chunk + part * BK
                    acc = _dot_rows(acc, w, s, x, rows, there, start, I, KIND, BN, BK, EVEN)
    if SHARED >= 0:
        x = hidden_ptr + PICKS * I
        for chunk in range(0, I, BK * UNROLL):
            for part in tl.static_range(UNROLL):
                start = chunk + part * BK
                acc = _dot_rows(
                    acc, shared_w_ptr, shared_s_ptr, x, rows, there, start, I, SHARED, BN, BK, EVEN
                )
    put_rows(out_ptr, first, tl.sum(acc, 2), D, BN)


@triton.jit(do_not_specialize=["pairs", "tiles", "beside"])
def plan_kernel(
    ids_ptr,
    order_ptr,
    tile_expert_ptr,
    tile_first_ptr,
    tile_end_ptr,
    pairs,
    experts,
    tiles,
    beside,
    BUCKETS: tl.constexpr,
    CHUNK: tl.constexpr,
    BT: tl.constexpr,
    ENDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pairs in the order of their experts, then of their numbers; tiles of BT of them.

    Program e writes expert e's pairs and tiles; program ``experts`` marks unused tiles (-1).
    With ENDS there are no tiles: tile_first is each pair's place in the order, tile_end where
    each expert's pairs end, then where ``beside`` more rows do.
    """
    announce(PDL)
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
        if ENDS:
            tl.store(tile_end_ptr + experts, first + beside)
        else:
            for unused in range(tile, tiles):
                tl.store(tile_expert_ptr + unused, -1)
    else:
        placed = first
        for start in range(0, pairs, CHUNK):
            at = start + tl.arange(0, CHUNK)
            mine = tl.load(ids_ptr + at, mask=at < pairs, other=-1) == expert
            rank = placed + tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(order_ptr + rank, at, mask=mine)
            if ENDS:
                tl.store(tile_first_ptr + at, rank, mask=mine)
            placed += tl.sum(mine.to(tl.int32), 0)
        if ENDS:
            tl.store(tile_end_ptr + expert, placed)
        else:
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
    return swiglu(gate, up, LIMIT)


@triton.jit(do_not_specialize=["tokens", "tiles"])
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
    announce(PDL)
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


@triton.jit(do_not_specialize=["tokens", "tiles"])
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
    announce(PDL)
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


@triton.jit(do_not_specialize=["tokens"])
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
    announce(PDL)
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
