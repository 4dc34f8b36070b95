"""Norms, queries, hyper-connections and the router on the GPU against their twins.

Tolerances: fp32 results agree to 1e-5 (order of sums, exp, the reduced angle); what is stored in
bf16 to 4e-3 (half a step); FP8 codes to 3e-2 where a value on a border of rounding falls to the
other side (a step is 6 %, few do). The mix of streams passes twenty Sinkhorn rounds: 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4_tierd.kernels import hyper
from dsv4_tierd.kernels.index_scores import Queries, encode_queries
from dsv4_tierd.kernels.queries import index_queries, layer_queries, rotate_queries
from dsv4_tierd.kernels.ref import hyper as ref_hyper
from dsv4_tierd.kernels.ref import queries as ref_queries
from dsv4_tierd.kernels.ref import rms_norm as ref_norm
from dsv4_tierd.kernels.ref import route as ref_route
from dsv4_tierd.kernels.rms_norm import rms_norm
from dsv4_tierd.kernels.route import Router, route
from dsv4_tierd.kernels.scratch import Scratch, scratch
from step_cases import error, inverse_frequencies, mix

Poison = Callable[[Tensor], Tensor]
DEVICE = torch.device("cuda")
pytestmark = pytest.mark.usefixtures("seed")
EXACT, STORED, MIXED = 1e-5, 4e-3, 1e-4
TOKENS = [0, 1, 3, 16, 17, 128, 1000]


@pytest.fixture
def held(poison: Poison) -> Scratch:
    made = scratch(DEVICE)
    poison(made.partials)
    return made


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dim", [512, 1024, 4096, 7168])
def test_norm(tokens: int, dim: int) -> None:
    """With a weight and without, strided, bf16 and fp32."""
    x = (torch.randn(tokens, 2 * dim, device=DEVICE) * 20)[:, dim:]
    w = torch.rand(dim, device=DEVICE) + 0.5
    got = rms_norm(x, w, 1e-6, dtype=torch.float32)
    assert error(got, ref_norm.rms_norm(x, w, 1e-6, torch.float32)) < EXACT
    got = rms_norm(x.bfloat16(), None, 1e-6)
    assert error(got, ref_norm.rms_norm(x.bfloat16(), None, 1e-6, torch.float32)) < STORED


@pytest.mark.parametrize("tokens", TOKENS)
def test_queries(tokens: int, poison: Poison) -> None:
    """Both kinds out of one projection's output, positions to a million."""
    freq = inverse_frequencies(64, DEVICE)
    both = torch.randn(tokens, 40960, device=DEVICE).bfloat16()
    q, qi = both[:, :32768].view(tokens, 64, 512), both[:, 32768:].view(tokens, 64, 128)
    g = torch.randn(tokens, 2624, device=DEVICE)[:, -64:]
    at = torch.randint(0, 1 << 20, (tokens,), device=DEVICE)
    want = ref_queries.rotate_queries(q, 1e-6, at, freq, torch.float32)
    assert error(rotate_queries(q, 1e-6, at, freq, dtype=torch.float32), want) < EXACT
    assert error(rotate_queries(q, 1e-6, at, freq), want) < STORED
    codes = torch.empty(tokens, 64, 128, dtype=torch.float8_e4m3fn, device=DEVICE)
    out = Queries(poison(codes), poison(torch.empty(tokens, 64, device=DEVICE)))
    index_queries(qi, g, 0.01, at, freq, out=out)
    both_q, both_index = layer_queries(q, qi, g, 1e-6, 0.01, at, freq)
    assert error(both_q, want) < STORED
    assert torch.equal(both_index.codes.view(torch.uint8), out.codes.view(torch.uint8))
    assert torch.equal(both_index.gates, out.gates)
    right = encode_queries(*ref_queries.index_queries(qi, g, 0.01, at, freq))
    assert error(out.gates, right.gates) < EXACT
    if tokens:
        assert error(out.codes, right.codes) < 3e-2
        assert (out.codes.view(torch.uint8) != right.codes.view(torch.uint8)).float().mean() < 1e-3


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [4096, 7168, 96])
def test_hyper(tokens: int, dtype: torch.dtype, dim: int, held: Scratch, poison: Poison) -> None:
    """In and out, each alone and both in one, in place too."""
    n, constants = 4, mix(4, dim, DEVICE)
    x = torch.randn(tokens, n, dim, device=DEVICE).to(dtype)
    y = torch.randn(tokens, dim, device=DEVICE).bfloat16()
    made = hyper.Mixed(
        *(poison(torch.empty(tokens, *shape, device=DEVICE)) for shape in ((dim,), (n,), (n, n)))
    )
    hyper.hyper_pre(x, constants, out=made, held=held)
    want = ref_hyper.hyper_pre(x, constants, torch.float32)
    for got, right in ((made.h, want.h), (made.post, want.post), (made.comb, want.comb)):
        assert error(got, right) < MIXED
    near = MIXED if dtype is torch.float32 else STORED
    streams = hyper.hyper_post(y, x, want.post, want.comb)
    right = ref_hyper.hyper_post(y, x.float(), want.post, want.comb)
    assert error(streams, right) < near
    target = x.clone()
    got, both = hyper.hyper_post_pre(
        y, target, want.post, want.comb, constants, out=target, mixed=made, held=held
    )
    assert got is target
    assert error(target, right) < near
    after = ref_hyper.hyper_pre(target, constants, torch.float32)
    for made_now, right_now in (
        (both.h, after.h),
        (both.post, after.post),
        (both.comb, after.comb),
    ):
        assert error(made_now, right_now) < MIXED
    top = mix(n, dim, DEVICE, head=True)
    got = hyper.hyper_head(x, top, dtype=torch.float32, held=held)
    assert error(got, ref_hyper.hyper_head(x, top, torch.float32)) < MIXED
    assert not held.arrivals.any()


def test_streams_of_one_token_stay_its_own(held: Scratch) -> None:
    """A NaN token, as a padding row may hold, leaves its neighbours' bits alone."""
    constants = mix(4, 4096, DEVICE)
    x = torch.randn(4, 4, 4096, device=DEVICE).bfloat16()
    clean = hyper.hyper_pre(x, constants, held=held)
    x[2] = torch.nan
    again = hyper.hyper_pre(x, constants, held=held)
    assert torch.equal(clean.h[[0, 1, 3]], again.h[[0, 1, 3]])
    assert torch.equal(clean.comb[[0, 1, 3]], again.comb[[0, 1, 3]])


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("number", [16, 256, 384])
def test_route(tokens: int, number: int, held: Scratch) -> None:
    """Scored and hashed; the same experts wherever scores are not within a rounding."""
    gate = torch.randn(number, 4096, device=DEVICE).mul_(1 / 16).bfloat16()
    x = torch.randn(tokens, 4096, device=DEVICE).bfloat16()
    router = Router(gate, torch.randn(number, device=DEVICE), None, 6, 1.5)
    picked, shares = route(x, None, router, held=held)
    chosen, want = ref_route.route(x, None, router)
    same = (picked == chosen).all(-1)
    assert same.float().mean().item() > 0.99 or tokens == 0
    assert error(shares[same], want[same]) < EXACT
    assert not held.arrivals.any()
    table = torch.randint(0, number, (1000, 6), device=DEVICE)
    router = Router(gate, None, table, 6, 1.5)
    ids = torch.randint(0, 1000, (tokens,), device=DEVICE)
    ids[::9], ids[4::9] = -1, 1000
    for got, right in zip(route(x, ids, router), ref_route.route(x, ids, router), strict=True):
        assert error(got, right) < EXACT


@pytest.mark.parametrize("tokens", [2, 40])
def test_equal_and_extreme_scores(tokens: int, held: Scratch) -> None:
    """Ties go to the lowest expert, NaN last; shares of scores that all underflow are 0."""
    x = torch.zeros(tokens, 64, device=DEVICE).bfloat16()
    gate = torch.zeros(32, 64, device=DEVICE).bfloat16()
    bias = torch.zeros(32, device=DEVICE)
    bias[20], bias[3], bias[5] = 1.0, torch.nan, -torch.inf
    picked, shares = route(x, None, Router(gate, bias, None, 6, 1.5), held=held)
    assert picked.tolist() == [[20, 0, 1, 2, 4, 6]] * tokens
    assert error(shares, torch.full_like(shares, 0.25)) < EXACT
    x += 1
    gate -= 100
    picked, shares = route(x, None, Router(gate, bias, None, 6, 1.5), held=held)
    assert picked[0].tolist() == [20, 0, 1, 2, 4, 6]
    assert not shares.any()
