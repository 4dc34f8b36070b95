"""The step ops' Triton kernels, interpreted at small shapes, equal their twins.

The interpreter cuts bf16 where hardware rounds it, so what is stored as bf16 (hidden values, x of a
product) may differ by 2^-8; fp32 paths agree to a few ulp.
"""

from __future__ import annotations

import pytest

from interpreted import needs_triton, run_interpreted

HEAD = """
import sys
sys.path.insert(0, {support!r})
import torch
from step_cases import error, expert_weights, inverse_frequencies, mix, weight
from dsv4_tierd.kernels.scratch import scratch
from dsv4_tierd.kernels.weight import WeightKind
CPU = torch.device("cpu")
torch.manual_seed({seed})
held = scratch(CPU)
"""
SMALL = """
from dsv4_tierd.kernels import queries, rms_norm
from dsv4_tierd.kernels.ref import queries as ref_queries, rms_norm as ref_norm
x = torch.randn(3, 200)[:, :96]
for w in (None, torch.rand(96)):
    got = rms_norm.rms_norm(x, w, 1e-6, dtype=torch.float32)
    assert error(got, ref_norm.rms_norm(x, w, 1e-6, torch.float32)) < 1e-6
freq, at = inverse_frequencies(64, CPU), torch.tensor([5, 1_048_575])
q = torch.randn(2, 1024)[:, :512].view(2, 4, 128)
got = queries.rotate_queries(q, 1e-6, at, freq, dtype=torch.float32)
assert error(got, ref_queries.rotate_queries(q, 1e-6, at, freq, torch.float32)) < 1e-6
g = torch.randn(2, 9)[:, :4]
both = queries.layer_queries(q, q, g, 1e-6, 0.01, at, freq)
got = queries.index_queries(q, g, 0.01, at, freq)
assert torch.equal(both[1].gates, got.gates)
assert error(both[0], ref_queries.rotate_queries(q, 1e-6, at, freq, torch.float32)) < 1e-2
want, gates = ref_queries.index_queries(q, g, 0.01, at, freq)
assert error(got.codes.float() * got.gates[..., None], want * gates[..., None]) < 0.1
"""
HYPER = """
from dsv4_tierd.kernels import hyper
from dsv4_tierd.kernels.ref import hyper as ref
for n, d, tokens in ((4, 96, 3), (4, 32, 17)):
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        x, y = torch.randn(tokens, n, d).to(dtype), torch.randn(tokens, d)
        constants = mix(n, d, CPU)
        made = hyper.Mixed(*(torch.empty(tokens, *s) for s in ((d,), (n,), (n, n))))
        hyper.hyper_pre(x, constants, out=made, held=held)
        want = ref.hyper_pre(x, constants, torch.float32)
        for got, right in ((made.h, want.h), (made.post, want.post), (made.comb, want.comb)):
            assert error(got, right) < 1e-5, (n, d, tokens, dtype)
        streams = ref.hyper_post(y, x, want.post, want.comb)
        assert error(hyper.hyper_post(y, x, want.post, want.comb), streams) < near
        after = ref.hyper_pre(streams, constants, torch.float32)
        target = x.clone()
        got, both = hyper.hyper_post_pre(
            y, target, want.post, want.comb, constants, out=target, mixed=made, held=held
        )
        assert got is target and error(target, streams) < near
        assert error(both.h, after.h) < near and error(both.comb, after.comb) < near
        top = mix(n, d, CPU, head=True)
        got = hyper.hyper_head(x, top, dtype=torch.float32, held=held)
        assert error(got, ref.hyper_head(x, top, torch.float32)) < 1e-5
        assert not held.arrivals.any()
"""
LINEAR = """
from dsv4_tierd.kernels.linear import linear
from dsv4_tierd.kernels.ref import linear as ref
for kind in WeightKind:
    near = 1e-5 if kind is WeightKind.FP32 else 1e-2
    for tokens in (1, 6, 129):
        for rows, columns in ((72, 160), (8, 256))[: 1 if tokens > 6 else 2]:
            w, x = weight(kind, (rows, columns), CPU), torch.randn(tokens, columns)
            norm = torch.rand(columns)
            out = torch.full((tokens, rows + 5), torch.nan)[:, :rows]
            linear(x, w, out=out, held=held)
            assert error(out, ref.linear(x, w, dtype=torch.float32)) < near, (kind, tokens, rows)
            got = linear(x, w, norm=norm, eps=1e-6, dtype=torch.float32, held=held)
            assert error(got, ref.linear(x, w, norm, 1e-6, torch.float32)) < near
        w, x = weight(kind, (3, 24, 96), CPU), torch.randn(tokens, 3, 96)
        got = linear(x, w, dtype=torch.float32, held=held)
        assert error(got, ref.linear(x, w, dtype=torch.float32)) < near
    assert not held.arrivals.any()
"""
ROUTE = """
from dsv4_tierd.kernels.ref import route as ref
from dsv4_tierd.kernels.route import Router, route
for number, tokens, k in ((20, 3, 4), (96, 17, 6), (16, 1, 6)):
    router = Router(torch.randn(number, 96), torch.randn(number), None, k, 2.5)
    x = torch.randn(tokens, 96)
    x[0] = 0  # equal scores: the bias alone decides
    router.bias[3:9] = 3.0
    for got, want in zip(route(x, None, router, held=held), ref.route(x, None, router)):
        assert error(got, want) < 1e-6
    assert not held.arrivals.any()
    table = torch.randint(0, number, (50, k))
    router, ids = Router(router.gate, None, table, k, 2.5), torch.randint(0, 50, (tokens,))
    ids[0] = -1
    for got, want in zip(route(x, ids, router), ref.route(x, ids, router)):
        assert error(got, want) < 1e-6
"""
EXPERTS = """
from dsv4_tierd.kernels.experts import experts
from dsv4_tierd.kernels.ref import experts as ref
FP8, FP4 = WeightKind.FP8, WeightKind.FP4
for kind, other in ((FP8, None), (FP4, FP8)):
    for tokens in (1, 5, 130):
        routed = expert_weights(kind, (6,), 64, 160, CPU)
        shared = None if other is None else expert_weights(other, (), 64, 160, CPU)
        ids = torch.stack([torch.randperm(6)[:3] for _ in range(tokens)]).int()
        ids[-1, 1], ids[0, 0] = -1, 77
        x, shares = torch.randn(tokens, 160).bfloat16(), torch.rand(tokens, 3)
        got = experts(x, ids, shares, routed, shared, 0.5, dtype=torch.float32)
        assert error(got, ref.experts(x, ids, shares, routed, shared, 0.5, torch.float32)) < 1e-2
"""
PARTS = {"small": SMALL, "hyper": HYPER, "linear": LINEAR, "route": ROUTE, "experts": EXPERTS}


@needs_triton
@pytest.mark.parametrize("part", PARTS)
def test_kernels_equal_their_twins(part: str, support: str, seed: int) -> None:
    """Odd shapes, strided and in-place outputs, equal scores, absent experts; counters end at 0."""
    run_interpreted(HEAD.format(support=support, seed=seed) + PARTS[part])


@pytest.fixture
def support() -> str:
    """Where the shared helpers stand."""
    from pathlib import Path

    return str(Path(__file__).parents[1] / "support")


@pytest.fixture
def seed() -> int:
    """Fresh data each run; the child prints its error with it."""
    import os

    value = int(os.environ.get("STEP_SEED") or int.from_bytes(os.urandom(3), "little"))
    print(f"STEP_SEED={value}")
    return value
