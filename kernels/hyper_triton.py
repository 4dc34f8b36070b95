"""The Triton kernels of hyper-connections: mixes as partial sums, then the mix of the streams."""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: ANN201

from __future__ import annotations

from dsv4_tierd.kernels.step_triton import announce, follow, operand
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
    announce(PDL)
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

    With SPREAD the streams are first made from the previous ones and a sublayer's answer. One
    more program a token (none for HEAD) waits for the sums and makes post and comb beside it:
    its neighbours need no more than a place to run, so the wait ends.
    """
    announce(PDL)
    token = tl.program_id(1).to(tl.int64)
    split = tl.program_id(0)
    partial = partial_ptr + token * (SPLITS * PARTIAL)
    if split == SPLITS:
        follow(PDL)
        arrived = tl.atomic_add(arrivals_ptr + token, 0, sem="acquire")
        while arrived < SPLITS:
            arrived = tl.atomic_add(arrivals_ptr + token, 0, sem="acquire")
        tl.store(arrivals_ptr + token, 0)
        if not HEAD:
            sums = _sums(partial, SPLITS)
            _weights(
                sums, base_ptr, scale_ptr, norm_eps, hc_eps, post_ptr + token * N,
                comb_ptr + token * (N * N), N, DIM, ROWS, ITERS,
            )  # fmt: skip
    else:
        channel = split * CHANNELS + tl.arange(0, CHANNELS)
        here = channel < DIM
        row = tl.arange(0, PARTIAL)
        stream = tl.arange(0, N)
        flat = tl.arange(0, N * CHANNELS)
        inside = split * CHANNELS + flat % CHANNELS
        at = fn_ptr + row[:, None] * (N * DIM) + ((flat // CHANNELS) * DIM + inside)[None, :]
        # Weights do not wait for the launch before this one.
        fn = tl.load(at, mask=(row < ROWS)[:, None] & (inside < DIM)[None, :], other=0.0)
        weight = tl.load(norm_ptr + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < DIM, other=0.0)
        follow(PDL)
        streams = x_ptr + token * (N * DIM)
        if SPREAD:
            y = tl.load(y_ptr + token * y_token + channel, mask=here, other=0.0).to(tl.float32)
            mixed = tl.load(post_in_ptr + token * N + stream)[:, None] * y[None, :]
            for j in tl.static_range(N):
                x = tl.load(streams + j * DIM + channel, mask=here, other=0.0).to(tl.float32)
                mixed += tl.load(comb_in_ptr + (token * N + j) * N + stream)[:, None] * x[None, :]
            rounded = mixed.to(x_out_ptr.dtype.element_ty)
            streams = x_out_ptr + token * (N * DIM)
            target = streams + stream[:, None] * DIM + channel[None, :]
            # Out may be x: all reads of these channels come before the writes.
            tl.debug_barrier()
            tl.store(target, rounded, mask=here[None, :])
            x = rounded.to(tl.float32)
        else:
            at = streams + stream[:, None] * DIM + channel[None, :]
            x = tl.load(at, mask=here[None, :], other=0.0).to(tl.float32)
        x = tl.reshape(x, (1, N * CHANNELS))
        # The row after fn's sums the squares.
        products = tl.where((row == ROWS)[:, None], x, fn) * x
        tl.store(partial + split * PARTIAL + row, tl.sum(products, 1))
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + token, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            if HEAD:
                tl.store(arrivals_ptr + token, 0)
            _collapse(
                streams, partial, base_ptr, scale_ptr, weight, norm_eps, hc_eps,
                h_ptr + token * h_token, N, DIM, ROWS, BLOCK, SPLITS,
            )  # fmt: skip


@triton.jit
def _sums(partial_ptr, SPLITS: tl.constexpr):
    """The partials' sums [PARTIAL], in an order fixed by SPLITS."""
    row = tl.arange(0, PARTIAL)
    at = partial_ptr + tl.arange(0, SPLITS)[:, None] * PARTIAL + row[None, :]
    return tl.sum(tl.load(at, cache_modifier=".cg"), 0)


@triton.jit
def _one(values, place):
    """values[place] of [PARTIAL] as a scalar."""
    return tl.sum(tl.where(tl.arange(0, PARTIAL) == place, values, 0.0), 0)


@triton.jit
def _collapse(
    x_ptr, partial_ptr, base_ptr, scale_ptr, weight, norm_eps, hc_eps, h_ptr, N: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """h of one token from the partial sums and its streams."""
    value = tl.arange(0, BLOCK)
    here = value < DIM
    row = tl.arange(0, PARTIAL)
    x0 = tl.load(x_ptr + value, mask=here, other=0.0, cache_modifier=".cg")
    x1 = tl.load(x_ptr + DIM + value, mask=here, other=0.0, cache_modifier=".cg")
    x2 = tl.load(x_ptr + 2 * DIM + value, mask=here, other=0.0, cache_modifier=".cg")
    x3 = tl.load(x_ptr + 3 * DIM + value, mask=here, other=0.0, cache_modifier=".cg")
    base = tl.load(base_ptr + row, mask=row < N, other=0.0)
    scale = tl.load(scale_ptr)
    sums = _sums(partial_ptr, SPLITS)
    rms = tl.sqrt_rn(_one(sums, ROWS) / (N * DIM) + norm_eps)
    pre = tl.sigmoid(tl.div_rn(sums, rms) * scale + base) + hc_eps
    mixed = _one(pre, 0) * x0.to(tl.float32) + _one(pre, 1) * x1.to(tl.float32)
    mixed += _one(pre, 2) * x2.to(tl.float32) + _one(pre, 3) * x3.to(tl.float32)
    normed = tl.div_rn(mixed, tl.sqrt_rn(tl.sum(mixed * mixed, 0) / DIM + norm_eps)) * weight
    tl.store(h_ptr + value, normed.to(h_ptr.dtype.element_ty), mask=here)


@triton.jit
def _weights(
    sums, base_ptr, scale_ptr, norm_eps, hc_eps, post_ptr, comb_ptr, N: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, ITERS: tl.constexpr,
):  # fmt: skip
    """post and comb of one token from its sums."""
    row = tl.arange(0, PARTIAL)
    base = tl.load(base_ptr + row, mask=row < ROWS, other=0.0)
    rms = tl.sqrt_rn(_one(sums, ROWS) / (N * DIM) + norm_eps)
    dots = tl.div_rn(sums, rms)
    post = 2 * tl.sigmoid(dots * tl.load(scale_ptr + 1) + base)
    tl.store(post_ptr + row - N, post, mask=(row >= N) & (row < 2 * N))
    _store_comb(dots * tl.load(scale_ptr + 2) + base, comb_ptr, hc_eps, ITERS)


@triton.jit
def _softmax(a, b, c, d, eps):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    a, b, c, d = tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top)
    total = (a + b) + (c + d)
    return a / total + eps, b / total + eps, c / total + eps, d / total + eps


@triton.jit
def _share(a, b, c, d, eps):
    scale = 1.0 / ((a + b) + (c + d) + eps)
    return a * scale, b * scale, c * scale, d * scale


@triton.jit
def _store_comb(logits, comb_ptr, eps, ITERS: tl.constexpr):
    """Nearly doubly stochastic 4 x 4 of logits[8:24]; columns are normalised last.

    In scalars, one copy a thread: 40 normalisations in a chain leave no time for shuffles.
    """
    a0, a1, a2, a3 = _softmax(
        _one(logits, 8), _one(logits, 9), _one(logits, 10), _one(logits, 11), eps
    )
    b0, b1, b2, b3 = _softmax(
        _one(logits, 12), _one(logits, 13), _one(logits, 14), _one(logits, 15), eps
    )
    c0, c1, c2, c3 = _softmax(
        _one(logits, 16), _one(logits, 17), _one(logits, 18), _one(logits, 19), eps
    )
    d0, d1, d2, d3 = _softmax(
        _one(logits, 20), _one(logits, 21), _one(logits, 22), _one(logits, 23), eps
    )
    a0, b0, c0, d0 = _share(a0, b0, c0, d0, eps)
    a1, b1, c1, d1 = _share(a1, b1, c1, d1, eps)
    a2, b2, c2, d2 = _share(a2, b2, c2, d2, eps)
    a3, b3, c3, d3 = _share(a3, b3, c3, d3, eps)
    for _ in range(ITERS - 1):
        a0, a1, a2, a3 = _share(a0, a1, a2, a3, eps)
        b0, b1, b2, b3 = _share(b0, b1, b2, b3, eps)
        c0, c1, c2, c3 = _share(c0, c1, c2, c3, eps)
        d0, d1, d2, d3 = _share(d0, d1, d2, d3, eps)
        a0, b0, c0, d0 = _share(a0, b0, c0, d0, eps)
        a1, b1, c1, d1 = _share(a1, b1, c1, d1, eps)
        a2, b2, c2, d2 = _share(a2, b2, c2, d2, eps)
        a3, b3, c3, d3 = _share(a3, b3, c3, d3, eps)
    _store_row(comb_ptr, a0, a1, a2, a3)
    _store_row(comb_ptr + 4, b0, b1, b2, b3)
    _store_row(comb_ptr + 8, c0, c1, c2, c3)
    _store_row(comb_ptr + 12, d0, d1, d2, d3)


@triton.jit
def _store_row(at, a, b, c, d):
    tl.store(at, a)
    tl.store(at + 1, b)
    tl.store(at + 2, c)
    tl.store(at + 3, d)


@triton.jit(do_not_specialize=["tokens"])
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
    announce(PDL)
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
    announce(PDL)
    token = tl.program_id(0).to(tl.int64)
    value = tl.arange(0, BLOCK)
    weight = tl.load(norm_ptr + value, mask=value < DIM, other=0.0)
    partial = partial_ptr + token * (SPLITS * PARTIAL)
    follow(PDL)
    _collapse(
        x_ptr + token * (N * DIM), partial, base_ptr, scale_ptr, weight, norm_eps, hc_eps,
        h_ptr + token * h_token, N, DIM, ROWS, BLOCK, SPLITS,
    )  # fmt: skip
    if not HEAD:
        _weights(
            _sums(partial, SPLITS), base_ptr, scale_ptr, norm_eps, hc_eps, post_ptr + token * N,
            comb_ptr + token * (N * N), N, DIM, ROWS, ITERS,
        )  # fmt: skip
