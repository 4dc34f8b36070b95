"""The Triton kernels of hyper-connections: mixes as partial sums, then the mix of the streams."""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: ANN201

from __future__ import annotations

from dsv4_tierd.kernels.step_triton import follow, operand
from dsv4_tierd.kernels.triton_rows import tl, triton

# Floats of one partial: ROWS dot products, then the sum of squares.
PARTIAL = tl.constexpr(32)


@triton.jit
def post_kernel(
    y_ptr,
    y_token,
    x_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    N: tl.constexpr,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Next streams of one token, CHANNELS of each. In place: reads come first."""
    token = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    here = channel < DIM
    stream = tl.arange(0, N)
    follow(PDL)
    y = tl.load(y_ptr + token * y_token + channel, mask=here, other=0.0).to(tl.float32)
    mixed = tl.load(post_ptr + token * N + stream)[:, None] * y[None, :]
    for j in tl.static_range(N):
        at = (token * N + j) * DIM + channel
        x = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
        mixed += tl.load(comb_ptr + (token * N + j) * N + stream)[:, None] * x[None, :]
    target = out_ptr + (token * N + stream[:, None]) * DIM + channel[None, :]
    tl.debug_barrier()
    tl.store(target, mixed.to(out_ptr.dtype.element_ty), mask=here[None, :])


@triton.jit
def mix_kernel(
    x_ptr,
    y_ptr,
    y_token,
    post_in_ptr,
    comb_in_ptr,
    x_out_ptr,
    fn_ptr,
    base_ptr,
    scale_ptr,
    norm_ptr,
    norm_eps,
    hc_eps,
    h_ptr,
    h_token,
    post_ptr,
    comb_ptr,
    partial_ptr,
    arrivals_ptr,
    N: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ITERS: tl.constexpr,
    SPREAD: tl.constexpr,
    HEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: CHANNELS of every stream a program; the last to arrive mixes the streams.

    With SPREAD the streams are first made from the previous ones and a sublayer's answer.
    """
    token = tl.program_id(1).to(tl.int64)
    split = tl.program_id(0)
    channel = split * CHANNELS + tl.arange(0, CHANNELS)
    here = channel < DIM
    row = tl.arange(0, PARTIAL)
    wanted = (row < ROWS)[:, None] & here[None, :]
    acc = tl.zeros((PARTIAL, CHANNELS), tl.float32)
    squares = tl.zeros((CHANNELS,), tl.float32)
    streams = x_ptr + token * N * DIM
    if SPREAD:
        out = x_out_ptr + token * N * DIM
    # Weights do not wait for the launch before this one.
    fn_at = fn_ptr + row[:, None] * (N * DIM) + channel[None, :]
    fn0 = tl.load(fn_at, mask=wanted, other=0.0)
    follow(PDL)
    if SPREAD:
        # All reads of these channels come before the writes: out may be x.
        y = tl.load(y_ptr + token * y_token + channel, mask=here, other=0.0).to(tl.float32)
        stream = tl.arange(0, N)
        mixed = tl.load(post_in_ptr + token * N + stream)[:, None] * y[None, :]
        for j in tl.static_range(N):
            x = tl.load(streams + j * DIM + channel, mask=here, other=0.0).to(tl.float32)
            mixed += tl.load(comb_in_ptr + (token * N + j) * N + stream)[:, None] * x[None, :]
        rounded = mixed.to(x_out_ptr.dtype.element_ty)
        target = out + stream[:, None] * DIM + channel[None, :]
        tl.debug_barrier()
        tl.store(target, rounded, mask=here[None, :])
        streams = out
        rounded = rounded.to(tl.float32)
    for k in tl.static_range(N):
        fn = fn0 if k == 0 else tl.load(fn_at + k * DIM, mask=wanted, other=0.0)
        if SPREAD:
            x = tl.sum(tl.where((tl.arange(0, N) == k)[:, None], rounded, 0.0), 0)
        else:
            x = tl.load(streams + k * DIM + channel, mask=here, other=0.0).to(tl.float32)
        squares += x * x
        acc += fn * x[None, :]
    sums = tl.where(row == ROWS, tl.sum(squares, 0), tl.sum(acc, 1))
    partial = partial_ptr + token * SPLITS * PARTIAL
    tl.store(partial + split * PARTIAL + row, sums)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + token, 1, sem="acq_rel")
    if arrived == SPLITS - 1:
        tl.store(arrivals_ptr + token, 0)
        _finish(
            streams,
            partial,
            base_ptr,
            scale_ptr,
            norm_ptr,
            norm_eps,
            hc_eps,
            h_ptr + token * h_token,
            post_ptr + token * N,
            comb_ptr + token * N * N,
            N,
            DIM,
            ROWS,
            BLOCK,
            SPLITS,
            ITERS,
            HEAD,
        )


@triton.jit
def _finish(
    x_ptr,
    partial_ptr,
    base_ptr,
    scale_ptr,
    norm_ptr,
    norm_eps,
    hc_eps,
    h_ptr,
    post_ptr,
    comb_ptr,
    N: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ITERS: tl.constexpr,
    HEAD: tl.constexpr,
):
    """From the partial sums of one token to h, post and comb (HEAD: h alone)."""
    value = tl.arange(0, BLOCK)
    here = value < DIM
    stream = tl.arange(0, N)
    split = tl.arange(0, SPLITS) * PARTIAL
    weight = tl.load(norm_ptr + value, mask=here, other=0.0)
    squares = tl.sum(tl.load(partial_ptr + split + ROWS, cache_modifier=".cg"), 0)
    rms = tl.sqrt_rn(squares / (N * DIM) + norm_eps)
    mixed = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(N):
        dot = tl.sum(tl.load(partial_ptr + split + j, cache_modifier=".cg"), 0)
        logit = tl.div_rn(dot, rms) * tl.load(scale_ptr) + tl.load(base_ptr + j)
        x = tl.load(x_ptr + j * DIM + value, mask=here, other=0.0, cache_modifier=".cg")
        mixed += (tl.sigmoid(logit) + hc_eps) * x.to(tl.float32)
    normed = tl.div_rn(mixed, tl.sqrt_rn(tl.sum(mixed * mixed, 0) / DIM + norm_eps)) * weight
    tl.store(h_ptr + value, normed.to(h_ptr.dtype.element_ty), mask=here)
    if not HEAD:
        at = partial_ptr + split[:, None] + N + stream[None, :]
        dots = tl.div_rn(tl.sum(tl.load(at, cache_modifier=".cg"), 0), rms)
        logits = dots * tl.load(scale_ptr + 1) + tl.load(base_ptr + N + stream)
        tl.store(post_ptr + stream, 2 * tl.sigmoid(logits))
        pair = tl.arange(0, N * N)
        at = partial_ptr + split[:, None] + 2 * N + pair[None, :]
        dots = tl.div_rn(tl.sum(tl.load(at, cache_modifier=".cg"), 0), rms)
        logits = dots * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * N + pair)
        comb = _sinkhorn(tl.reshape(logits, (N, N)), hc_eps, ITERS)
        tl.store(comb_ptr + stream[:, None] * N + stream[None, :], comb)


@triton.jit
def _sinkhorn(logits, eps, ITERS: tl.constexpr):
    """Nearly doubly stochastic [N, N]; columns are normalised last."""
    comb = tl.exp(logits - tl.max(logits, 1)[:, None])
    comb = comb / tl.sum(comb, 1)[:, None] + eps
    comb = comb / (tl.sum(comb, 0) + eps)[None, :]
    for _ in range(ITERS - 1):
        comb = comb / (tl.sum(comb, 1) + eps)[:, None]
        comb = comb / (tl.sum(comb, 0) + eps)[None, :]
    return comb


@triton.jit
def mix_many_kernel(
    x_ptr,
    fn_ptr,
    partial_ptr,
    tokens,
    N: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPLITS: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Partial sums of TOKENS tokens over one of SPLITS parts of the N * DIM values.

    Not EXACT: x is bf16, fn goes in as three bf16 parts, so that products are exact all the same.
    """
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    there = token < tokens
    row = tl.arange(0, PARTIAL)
    first = tl.program_id(0) * (N * DIM // SPLITS)
    acc = tl.zeros((TOKENS, PARTIAL), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    follow(PDL)
    for start in range(0, N * DIM // SPLITS, CHANNELS):
        inside = start + tl.arange(0, CHANNELS)
        here = inside < N * DIM // SPLITS
        value = first + inside
        at = x_ptr + token[:, None] * (N * DIM) + value[None, :]
        x = tl.load(at, mask=there[:, None] & here[None, :], other=0.0)
        at = fn_ptr + row[None, :] * (N * DIM) + value[:, None]
        fn = tl.load(at, mask=(row < ROWS)[None, :] & here[:, None], other=0.0)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        if EXACT:
            acc = tl.dot(wide, fn, acc, input_precision="ieee")
        else:
            high = operand(fn)
            rest = fn - high.to(tl.float32)
            middle = operand(rest)
            low = operand(rest - middle.to(tl.float32))
            x = operand(x)
            acc = tl.dot(x, high, tl.dot(x, middle, tl.dot(x, low, acc)))
    sums = tl.where((row == ROWS)[None, :], squares[:, None], acc)
    place = (token * SPLITS + tl.program_id(0)) * PARTIAL
    tl.store(partial_ptr + place[:, None] + row[None, :], sums, mask=there[:, None])


@triton.jit
def finish_kernel(
    x_ptr,
    base_ptr,
    scale_ptr,
    norm_ptr,
    norm_eps,
    hc_eps,
    h_ptr,
    h_token,
    post_ptr,
    comb_ptr,
    partial_ptr,
    N: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ITERS: tl.constexpr,
    HEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """After mix_many_kernel: one token a program."""
    token = tl.program_id(0).to(tl.int64)
    follow(PDL)
    _finish(
        x_ptr + token * N * DIM,
        partial_ptr + token * SPLITS * PARTIAL,
        base_ptr,
        scale_ptr,
        norm_ptr,
        norm_eps,
        hc_eps,
        h_ptr + token * h_token,
        post_ptr + token * N,
        comb_ptr + token * N * N,
        N,
        DIM,
        ROWS,
        BLOCK,
        SPLITS,
        ITERS,
        HEAD,
    )
