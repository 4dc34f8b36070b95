"""The Triton kernels of the router: scores, the best k, their shares."""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: ANN201

from __future__ import annotations

from dsv4_tierd.kernels.step_triton import announce, follow
from dsv4_tierd.kernels.triton_rows import tl, triton


@triton.jit
def _score(logits):
    """sqrt(softplus(logits)), as torch has it: the identity above 20."""
    exact = tl.where(logits > 20.0, logits, _log1p(tl.exp(tl.minimum(logits, 20.0))))
    return tl.sqrt_rn(exact)


@triton.jit
def _log1p(x):
    """log(1 + x), x >= 0: the rounding of 1 + x is made good."""
    wide = 1.0 + x
    return tl.where(wide == 1.0, x, tl.log(wide) * tl.div_rn(x, wide - 1.0))


@triton.jit
def _key(value, number):
    """int64 that orders fp32 (NaN last), then lower numbers first; the number stands low."""
    # NaN fails every comparison.
    value = tl.where(value > float("-inf"), value, float("-inf"))
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 is 0.0
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return ordered * 65536 + (65535 - number)


@triton.jit
def _store(experts_ptr, shares_ptr, chosen, scores, scaling, PICKS: tl.constexpr, K2: tl.constexpr):
    """chosen [K2] int32, scores [K2] fp32, the first PICKS of them."""
    place = tl.arange(0, K2)
    kept = place < PICKS
    total = tl.sum(tl.where(kept, scores, 0.0), 0) + 1e-20
    tl.store(experts_ptr + place, chosen, mask=kept)
    tl.store(shares_ptr + place, tl.div_rn(scores, total) * scaling, mask=kept)


@triton.jit
def _pick(
    logits_ptr, bias_ptr, experts_ptr, shares_ptr, scaling, E: tl.constexpr, E2: tl.constexpr,
    PICKS: tl.constexpr, K2: tl.constexpr,
):  # fmt: skip
    """The best PICKS of one token's logits [E]."""
    number = tl.arange(0, E2)
    here = number < E
    logits = tl.load(logits_ptr + number, mask=here, other=0.0, cache_modifier=".cg")
    scores = _score(logits.to(tl.float32))
    ranks = scores + tl.load(bias_ptr + number, mask=here, other=0.0)
    low = tl.full((E2,), -(2**62), tl.int64)
    keys = tl.where(here, _key(ranks, number), low)
    place = tl.arange(0, K2)
    chosen = tl.zeros((K2,), tl.int32)
    picked = tl.zeros((K2,), tl.float32)
    for turn in tl.static_range(PICKS):
        best = (65535 - (tl.max(keys, 0) & 65535)).to(tl.int32)
        keys = tl.where(number == best, low, keys)
        score = tl.sum(tl.where(number == best, scores, 0.0), 0)
        chosen = tl.where(place == turn, best, chosen)
        picked = tl.where(place == turn, score, picked)
    _store(experts_ptr, shares_ptr, chosen, picked, scaling, PICKS, K2)


@triton.jit
def scored_kernel(
    x_ptr,
    x_token,
    gate_ptr,
    bias_ptr,
    experts_ptr,
    shares_ptr,
    scaling,
    logits_ptr,
    arrivals_ptr,
    E: tl.constexpr,
    E2: tl.constexpr,
    DIM: tl.constexpr,
    BE: tl.constexpr,
    BK: tl.constexpr,
    PICKS: tl.constexpr,
    K2: tl.constexpr,
    PDL: tl.constexpr,
):
    """BE experts' logits of one token a program; the last to arrive picks."""
    announce(PDL)
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BE + tl.arange(0, BE)
    there = rows < E
    at = tl.arange(0, BK)
    mask = there[:, None] & (at < DIM)[None, :]
    # The gate's rows do not wait for the launch before this one.
    gate = tl.load(gate_ptr + rows[:, None] * DIM + at[None, :], mask=mask, other=0.0)
    follow(PDL)
    x = tl.load(x_ptr + token * x_token + at, mask=at < DIM, other=0.0).to(tl.float32)
    sums = tl.sum(gate.to(tl.float32) * x[None, :], 1)
    logits = logits_ptr + token * E
    tl.store(logits + rows, sums, mask=there)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + token, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1:
        tl.store(arrivals_ptr + token, 0)
        place = token * PICKS
        _pick(logits, bias_ptr, experts_ptr + place, shares_ptr + place, scaling, E, E2, PICKS, K2)


@triton.jit
def pick_kernel(
    logits_ptr,
    bias_ptr,
    experts_ptr,
    shares_ptr,
    scaling,
    E: tl.constexpr,
    E2: tl.constexpr,
    PICKS: tl.constexpr,
    K2: tl.constexpr,
    PDL: tl.constexpr,
):
    """The best of logits that are there already: one token a program."""
    announce(PDL)
    token = tl.program_id(0).to(tl.int64)
    follow(PDL)
    place = token * PICKS
    _pick(
        logits_ptr + token * E, bias_ptr, experts_ptr + place, shares_ptr + place, scaling, E, E2,
        PICKS, K2,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def hashed_kernel(
    x_ptr,
    x_token,
    gate_ptr,
    table_ptr,
    ids_ptr,
    experts_ptr,
    shares_ptr,
    scaling,
    vocab,
    E: tl.constexpr,
    DIM: tl.constexpr,
    BK: tl.constexpr,
    PICKS: tl.constexpr,
    K2: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token a program: its id's experts, and their logits alone."""
    announce(PDL)
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, K2)
    follow(PDL)
    name = tl.load(ids_ptr + token).to(tl.int64)
    # As a number: the interpreter cannot spread a scalar truth over a tensor.
    known = place < tl.where((name >= 0) & (name < vocab), PICKS, 0)
    chosen = tl.load(table_ptr + name * PICKS + place, mask=known, other=-1).to(tl.int32)
    there = (chosen >= 0) & (chosen < E)
    acc = tl.zeros((K2, BK), tl.float32)
    for start in tl.static_range(0, DIM, BK):
        at = start + tl.arange(0, BK)
        mask = there[:, None] & (at < DIM)[None, :]
        gate = tl.load(gate_ptr + chosen[:, None] * DIM + at[None, :], mask=mask, other=0.0)
        x = tl.load(x_ptr + token * x_token + at, mask=at < DIM, other=0.0).to(tl.float32)
        acc += gate.to(tl.float32) * x[None, :]
    scores = tl.where(there, _score(tl.sum(acc, 1)), 0.0)
    _store(
        experts_ptr + token * PICKS, shares_ptr + token * PICKS, chosen, scores, scaling, PICKS, K2
    )
