"""Products with stored weights and experts on the GPU against their twins.

Tolerance: operands are bf16 and weights exact, so only the order of fp32 sums differs: 1e-4. Where
a value is rounded to bf16 before a second product (x after its norm, hidden values), one in a few
hundred falls to the neighbour: 4e-3, half a bf16 step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4_tierd.kernels.experts import expert_scratch, experts
from dsv4_tierd.kernels.linear import linear
from dsv4_tierd.kernels.ref import experts as ref_experts
from dsv4_tierd.kernels.ref import linear as ref_linear
from dsv4_tierd.kernels.scratch import Scratch, scratch
from dsv4_tierd.kernels.weight import Weight, WeightKind
from step_cases import error, expert_weights, weight

Poison = Callable[[Tensor], Tensor]
DEVICE = torch.device("cuda")
pytestmark = pytest.mark.usefixtures("seed")
SUMS, ROUNDED = 1e-4, 4e-3
FP8, FP4, BF16 = WeightKind.FP8, WeightKind.FP4, WeightKind.BF16


@pytest.fixture
def held(poison: Poison) -> Scratch:
    made = scratch(DEVICE)
    poison(made.partials)
    return made


@pytest.mark.parametrize("kind", list(WeightKind))
@pytest.mark.parametrize("tokens", [0, 1, 2, 4, 5, 17, 64, 100, 129])
@pytest.mark.parametrize("shape", [(1536, 4096), (1000, 1056), (40, 8192)])
def test_linear(
    kind: WeightKind, tokens: int, shape: tuple[int, int], held: Scratch, poison: Poison
) -> None:
    """Every storage and batch; strided x and out; nothing beside out is written."""
    rows, columns = shape
    w = weight(kind, shape, DEVICE)
    x = torch.randn(tokens, columns + 64, device=DEVICE)[:, :columns]
    whole = poison(torch.empty(tokens, rows + 24, device=DEVICE))
    linear(x, w, out=whole[:, :rows], held=held)
    assert whole[:, rows:].isnan().all()
    if tokens:
        want = ref_linear.linear(x, w, dtype=torch.float32)
        assert error(whole[:, :rows], want) < SUMS
        got = linear(x, w, held=held)
        assert error(got, want) < ROUNDED
        norm = torch.rand(columns, device=DEVICE) + 0.5
        got = linear(x * 50, w, norm=norm, eps=1e-6, dtype=torch.float32, held=held)
        assert error(got, ref_linear.linear(x * 50, w, norm, 1e-6, torch.float32)) < ROUNDED
    assert not held.arrivals.any()


@pytest.mark.parametrize("kind", [FP8, FP4, BF16])
@pytest.mark.parametrize("tokens", [1, 5, 128, 300])
def test_groups(kind: WeightKind, tokens: int, held: Scratch) -> None:
    """A stack of weights, each with its own slice of x."""
    w = weight(kind, (8, 1024, 512), DEVICE)
    x = torch.randn(tokens, 8, 512, device=DEVICE).bfloat16()
    got = linear(x, w, dtype=torch.float32, held=held)
    assert error(got, ref_linear.linear(x, w, dtype=torch.float32)) < SUMS


@pytest.mark.parametrize("tokens", [1, 7])
def test_every_code_and_scale(tokens: int, held: Scratch) -> None:
    """All 256 codes of each storage; the smallest, the largest and the NaN scale."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(128, 1)
    x = torch.zeros(tokens, 256, device=DEVICE)
    x[:, ::3] = 1.0
    for byte in (0, 1, 127, 230, 255):
        scale = torch.full((1, 2), byte, dtype=torch.uint8, device=DEVICE)
        clean = torch.where(codes & 127 == 127, codes & 128, codes)
        w = Weight(clean.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))
        got = linear(x, w, dtype=torch.float32, held=held)
        want = ref_linear.linear(x, w, dtype=torch.float32)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-44, equal_nan=True)
    wide = torch.randint(0, 256, (128, 128), dtype=torch.uint8, device=DEVICE).view(torch.int8)
    for byte in (10, 127, 200, 255):
        scale = torch.full((128, 8), byte, dtype=torch.uint8, device=DEVICE)
        w = Weight(wide, scale.view(torch.float8_e8m0fnu))
        got = linear(x, w, dtype=torch.float32, held=held)
        want = ref_linear.linear(x, w, dtype=torch.float32)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-44, equal_nan=True)


def test_a_token_depends_on_itself_alone(held: Scratch) -> None:
    """NaN and infinities in other rows of the batch change no bit of a row."""
    w = weight(FP8, (1024, 4096), DEVICE)
    x = torch.randn(8, 4096, device=DEVICE).bfloat16()
    clean = linear(x, w, held=held)
    x[1], x[5, 7] = torch.nan, torch.inf
    again = linear(x, w, held=held)
    assert torch.equal(clean[[0, 2, 3, 4, 6, 7]], again[[0, 2, 3, 4, 6, 7]])
    assert again[1].isnan().all()


@pytest.mark.parametrize(("kind", "other"), [(FP8, FP8), (FP4, FP8), (FP8, None)])
@pytest.mark.parametrize("tokens", [0, 1, 2, 8, 33, 128, 700])
def test_experts(kind: WeightKind, other: WeightKind | None, tokens: int, poison: Poison) -> None:
    """Any batch, absent experts, a clamp that bites; scratch may hold anything."""
    number, inner, dim = 16, 512, 1024
    routed = expert_weights(kind, (number,), inner, dim, DEVICE)
    shared = None if other is None else expert_weights(other, (), inner, dim, DEVICE)
    ids = torch.rand(tokens, number, device=DEVICE).argsort(-1)[:, :6].int().contiguous()
    ids[::3, 2], ids[1::5, 0], ids[2::7, 5] = -1, number, -(2**31)
    x = torch.randn(tokens, dim + 8, device=DEVICE).bfloat16()[:, :dim]
    shares = torch.rand(tokens, 6, device=DEVICE)
    made = expert_scratch(max(1, tokens), 6, routed, DEVICE)
    for tensor in (made.hidden, made.answers, made.order, made.tiles):
        poison(tensor)
    out = poison(torch.empty(tokens, dim, device=DEVICE))
    experts(x, ids, shares, routed, shared, 0.7, out=out, held=made)
    if tokens:
        want = ref_experts.experts(x, ids, shares, routed, shared, 0.7, torch.float32)
        assert error(out, want) < ROUNDED * (1 if tokens <= 128 else 2)


@pytest.mark.parametrize("tokens", [1, 24])
def test_all_of_the_models_experts(tokens: int) -> None:
    """256 experts of the real size: offsets past 2^31 bytes; experts nobody chose may be NaN."""
    routed = expert_weights(FP8, (256,), 2048, 4096, DEVICE)
    ids = torch.rand(tokens, 256, device=DEVICE).argsort(-1)[:, :6].int().contiguous()
    ids[0, :2] = torch.tensor([255, 254])
    idle = torch.ones(256, dtype=torch.bool, device=DEVICE)
    idle[ids.flatten().long()] = False
    routed.w13.values.view(torch.uint8)[idle] = 127
    routed.w2.values.view(torch.uint8)[idle] = 127
    x, shares = torch.randn(tokens, 4096, device=DEVICE), torch.rand(tokens, 6, device=DEVICE)
    got = experts(x, ids, shares, routed, None, 10.0, dtype=torch.float32)
    assert error(got, ref_experts.experts(x, ids, shares, routed, None, 10.0, torch.float32)) < (
        ROUNDED
    )


@pytest.mark.parametrize("tokens", [1, 8])
def test_capture(tokens: int, held: Scratch) -> None:
    """A graph replays with the inputs of its day; the chain's overlapped launches keep order."""
    w, w2 = weight(FP8, (2048, 4096), DEVICE), weight(FP8, (4096, 2048), DEVICE)
    routed = expert_weights(FP8, (16,), 512, 4096, DEVICE)
    ids, shares = (
        torch.zeros(tokens, 6, dtype=torch.int32, device=DEVICE),
        torch.ones(tokens, 6, device=DEVICE),
    )
    made = expert_scratch(tokens, 6, routed, DEVICE)
    x, out = (torch.randn(tokens, 4096, device=DEVICE).bfloat16() for _ in range(2))
    middle, y = (torch.empty(tokens, n, device=DEVICE).bfloat16() for n in (2048, 4096))

    def run() -> None:
        linear(x, w, out=middle, held=held)
        linear(middle, w2, out=y, held=held)
        experts(y, ids, shares, routed, None, 10.0, out=out, held=made)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            run()
            x.copy_(out)
    for _ in range(3):
        start = torch.randn(tokens, 4096, device=DEVICE).bfloat16()
        ids.copy_(torch.rand(tokens, 16, device=DEVICE).argsort(-1)[:, :6])
        x.copy_(start)
        for _ in range(3):
            run()
            torch.cuda.synchronize()
            x.copy_(out)
        want = out.clone()
        x.copy_(start)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)
