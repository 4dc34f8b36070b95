"""The rest of a decode step: linears, experts, hyper-connections, router, queries, their chain."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from harness import Case, Work, floor_us, set_count, tensor_bytes
from torch import Tensor

from dsv4_tierd.kernels import hyper
from dsv4_tierd.kernels.experts import expert_scratch, experts
from dsv4_tierd.kernels.linear import linear
from dsv4_tierd.kernels.queries import index_queries, layer_queries
from dsv4_tierd.kernels.ref import experts as ref_experts
from dsv4_tierd.kernels.ref import hyper as ref_hyper
from dsv4_tierd.kernels.ref import linear as ref_linear
from dsv4_tierd.kernels.ref import queries as ref_queries
from dsv4_tierd.kernels.ref import route as ref_route
from dsv4_tierd.kernels.ref.experts import Experts
from dsv4_tierd.kernels.route import Router, route
from dsv4_tierd.kernels.scratch import scratch
from dsv4_tierd.kernels.weight import Weight, WeightKind

sys.path.append(
    str(Path(__file__).parents[2] / "tests" / "support")
)  # inputs shared with the tests

from step_cases import error, expert_weights, inverse_frequencies, mix, weight

FP8, FP4, BF16 = WeightKind.FP8, WeightKind.FP4, WeightKind.BF16
# Name, storage, shape of the weights of V4-Flash that are read for every token.
LINEARS = (
    ("wq_a, wkv", FP8, (1536, 4096)),
    ("wq_b, index wq_b", FP8, (40960, 1024)),
    ("wo_a", FP8, (8, 1024, 4096)),
    ("wo_b", FP8, (4096, 8192)),
    ("compressors, index weights", BF16, (2624, 4096)),
)


class Dims(NamedTuple):
    """What the cases are built of: V4-Flash, or a toy of it."""

    d: int = 4096
    heads: int = 64
    head: int = 512
    low: int = 1024
    groups: int = 8
    inner: int = 2048
    picks: int = 6
    index_heads: int = 64


FLASH, TOY = Dims(), Dims(128, 4, 64, 32, 2, 64, 2, 2)


META = torch.device("meta")


def cases(toy: bool) -> Iterator[Case]:
    """Decode batches of each op, prefill chunks of the large ones, and one layer's chain."""
    dims = TOY if toy else FLASH
    for name, kind, shape in LINEARS:
        size = tuple(max(32, n // 32) for n in shape) if toy else shape
        for tokens in (1, 3) if toy else (1, 2, 8, 128, 8192):
            floor = _floor(tokens, _bytes(weight(kind, size, META)))
            build = partial(_linear, kind, size, tokens)
            yield Case(f"linear {name}, batch={tokens}", build, floor=floor)
    picked = ((4, FP8, (1, 3)),) if toy else ((16, FP8, (1, 2, 8, 128, 8192)),)
    picked += () if toy else ((16, FP4, (1, 8, 128)),)
    for number, kind, batches in picked:
        one = expert_weights(kind, (), dims.inner, dims.d, META)
        shared = expert_weights(FP8, (), dims.inner, dims.d, META)
        for tokens in batches:
            # What random choices are expected to meet.
            chosen = number * (1 - (1 - dims.picks / number) ** tokens)
            moved = int(chosen * _bytes(one.w13, one.w2)) + _bytes(shared.w13, shared.w2)
            name = f"experts {kind.value}, {number}, batch={tokens}"
            build = partial(_experts, dims, kind, number, tokens)
            yield Case(name, build, floor=_floor(tokens, moved))
    for tokens in (2,) if toy else (1, 8, 128, 8192):
        yield Case(f"hyper post and pre, batch={tokens}", partial(_hyper, dims, tokens))
        yield Case(f"router, 256, batch={tokens}", partial(_route, dims, tokens))
        yield Case(f"queries, batch={tokens}", partial(_queries, dims, tokens))
    for tokens in (1,) if toy else (1, 2, 8):
        floor = _floor(tokens, _Layer(dims, tokens, META).bytes())
        name = f"a C4 layer but its attention, batch={tokens}"
        yield Case(name, partial(_chain, dims, tokens), floor=floor)


def _floor(tokens: int, weight_bytes: int) -> float | None:
    """Where bytes are the limit."""
    return floor_us(weight_bytes) if tokens <= 128 else None


def _bytes(*weights: Weight) -> int:
    return sum(
        tensor_bytes(w.values) + (0 if w.scales is None else tensor_bytes(w.scales))
        for w in weights
    )


def _linear(kind: WeightKind, shape: tuple[int, ...], tokens: int, device: torch.device) -> Work:
    first = weight(kind, shape, device)
    weights = [first, *(weight(kind, shape, device) for _ in range(set_count(_bytes(first)) - 1))]
    weights = weights[:8]
    x = torch.randn(tokens, *shape[:-2], shape[-1], device=device).bfloat16()
    outs = [torch.empty(tokens, *shape[:-1], device=device).bfloat16() for _ in weights]
    held = scratch(device)
    runs = [partial(linear, x, w, out=out, held=held) for w, out in zip(weights, outs, strict=True)]

    def check() -> None:
        rows = slice(0, min(tokens, 128))
        runs[0]()
        assert error(outs[0][rows], ref_linear.linear(x[rows], weights[0])) < 5e-3

    return Work(runs, check, _bytes(first) + tensor_bytes(x, outs[0]), lambda: outs[:1])


def _experts(dims: Dims, kind: WeightKind, number: int, tokens: int, device: torch.device) -> Work:
    sets = 4 if number < 64 else 2
    stacks = [expert_weights(kind, (number,), dims.inner, dims.d, device) for _ in range(sets)]
    shared = [expert_weights(FP8, (), dims.inner, dims.d, device) for _ in range(sets)]
    x = torch.randn(tokens, dims.d, device=device).bfloat16()
    out = torch.empty(tokens, dims.d, device=device).bfloat16()
    ids = torch.rand(tokens, number, device=device).argsort(-1)[:, : dims.picks].int().contiguous()
    shares = torch.rand(tokens, dims.picks, device=device)
    held = expert_scratch(tokens, dims.picks, stacks[0], device)

    def run(routed: Experts, one: Experts) -> None:
        experts(x, ids, shares, routed, one, 10.0, out=out, held=held)

    def check() -> None:
        rows = slice(0, min(tokens, 128))
        run(stacks[0], shared[0])
        want = ref_experts.experts(x[rows], ids[rows], shares[rows], stacks[0], shared[0], 10.0)
        assert error(out[rows], want) < 1e-2

    used = ids.unique().numel() / number
    moved = int(used * _bytes(stacks[0].w13, stacks[0].w2)) + _bytes(shared[0].w13, shared[0].w2)
    runs = [partial(run, *pair) for pair in zip(stacks, shared, strict=True)]
    return Work(runs, check, moved + tensor_bytes(x, out), lambda: [out])


def _hyper(dims: Dims, tokens: int, device: torch.device) -> Work:
    constants = [mix(4, dims.d, device) for _ in range(48)]
    x = torch.randn(tokens, 4, dims.d, device=device).bfloat16()
    y = torch.randn(tokens, dims.d, device=device).bfloat16()
    held, made = scratch(device), hyper.hyper_pre(x, constants[0])
    post, comb, out = made.post.clone(), made.comb.clone(), torch.empty_like(x)

    def run(one: hyper.Mix) -> None:
        hyper.hyper_post_pre(y, x, post, comb, one, out=out, mixed=made, held=held)

    def check() -> None:
        run(constants[0])
        want = ref_hyper.hyper_pre(ref_hyper.hyper_post(y, x, post, comb), constants[0])
        assert error(made.h, want.h) < 1e-2
        assert error(made.comb, want.comb) < 1e-2

    moved = tensor_bytes(constants[0].fn, x, y, out, made.h)
    return Work([partial(run, one) for one in constants], check, moved, lambda: [made.h])


def _route(dims: Dims, tokens: int, device: torch.device) -> Work:
    x = torch.randn(tokens, dims.d, device=device).bfloat16()
    held = scratch(device)
    routers = [
        Router(
            (torch.randn(256, dims.d, device=device) / 16).bfloat16(),
            torch.randn(256, device=device),
            None,
            dims.picks,
            1.5,
        )
        for _ in range(48)
    ]
    picked = torch.empty(tokens, dims.picks, dtype=torch.int32, device=device)
    shares = torch.empty(tokens, dims.picks, device=device)
    runs = [partial(route, x, None, r, experts=picked, shares=shares, held=held) for r in routers]

    def check() -> None:
        runs[0]()
        same = (picked == ref_route.route(x, None, routers[0])[0]).all(-1).float().mean().item()
        assert same > 0.98, f"{same:.1%} of the tokens have the twin's experts"

    return Work(runs, check, tensor_bytes(x, routers[0].gate), lambda: [picked])


def _queries(dims: Dims, tokens: int, device: torch.device) -> Work:
    wide = dims.heads * dims.head
    both = torch.randn(tokens, wide + dims.index_heads * 128, device=device).bfloat16()
    q = both[:, :wide].view(tokens, dims.heads, dims.head)
    qi = both[:, wide:].view(tokens, dims.index_heads, 128)
    g = torch.randn(tokens, dims.index_heads, device=device)
    at = torch.randint(0, 1 << 20, (tokens,), device=device)
    freq = inverse_frequencies(32 if dims is TOY else 64, device)
    out, made = torch.empty_like(q), index_queries(qi, g, 0.01, at, freq)

    def run() -> None:
        layer_queries(q, qi, g, 1e-6, 0.01, at, freq, out=out, index_out=made)

    def check() -> None:
        run()
        assert error(out, ref_queries.rotate_queries(q, 1e-6, at, freq)) < 5e-3
        want, gates = ref_queries.index_queries(qi, g, 0.01, at, freq)
        assert error(made.codes.float() * made.gates[..., None], want * gates[..., None]) < 0.1

    return Work([run] * 24, check, tensor_bytes(both, out, made.codes), lambda: [out])


class _Layer:
    """The weights of one C4 layer, and its step between what attention does."""

    def __init__(self, dims: Dims, tokens: int, device: torch.device) -> None:
        d, wide, index = dims.d, dims.heads * dims.head, dims.index_heads * 128
        self.dims, self.tokens = dims, tokens
        self.mixes = mix(4, d, device), mix(4, d, device)
        self.a = weight(FP8, (dims.low + dims.head, d), device)
        self.compressors = weight(BF16, (2624 if dims is FLASH else 64, d), device)
        self.b = weight(FP8, (wide + index, dims.low), device)
        self.wo_a = weight(FP8, (dims.groups, dims.low, wide // dims.groups), device)
        self.wo_b = weight(FP8, (d, dims.groups * dims.low), device)
        self.routed = expert_weights(FP8, (16,), dims.inner, d, device)
        self.shared = expert_weights(FP8, (), dims.inner, d, device)
        gate = torch.randn(16, d, device=device).bfloat16()
        self.router = Router(gate, torch.randn(16, device=device), None, dims.picks, 1.5)
        self.norm = torch.ones(dims.low, device=device)
        self.freq = inverse_frequencies(64 if dims is FLASH else 32, device)
        self.at = torch.full((tokens,), 4096, device=device)
        self.held = scratch(device)
        self.tiles = expert_scratch(tokens, dims.picks, self.routed, device)

    def bytes(self) -> int:
        """What a step with ``picks`` experts a token reads, each once."""
        picks = min(16, self.dims.picks * self.tokens) / 16
        return (
            _bytes(self.a, self.compressors, self.b, self.wo_a, self.wo_b)
            + int(_bytes(self.routed.w13, self.routed.w2) * picks)
            + _bytes(self.shared.w13, self.shared.w2)
            + tensor_bytes(self.router.gate, *(m.fn for m in self.mixes))
        )

    def __call__(self, x: Tensor, y: Tensor, made: hyper.Mixed) -> tuple[Tensor, hyper.Mixed]:
        """One step: y is the last sublayer's answer; x is written. Returns the next of both."""
        dims, tokens, held = self.dims, self.tokens, self.held
        _, made = hyper.hyper_post_pre(y, x, made.post, made.comb, self.mixes[0], out=x, held=held)
        low = linear(made.h, self.a, held=held)
        gates = linear(made.h, self.compressors, dtype=torch.float32, held=held)
        both = linear(low[:, : dims.low], self.b, norm=self.norm, eps=1e-6, held=held)
        wide = dims.heads * dims.head
        q = both[:, :wide].view(tokens, dims.heads, dims.head)
        qi = both[:, wide:].view(tokens, dims.index_heads, 128)
        g = gates[:, -dims.index_heads :]
        q, _ = layer_queries(q, qi, g, 1e-6, 0.01, self.at, self.freq)
        o = linear(q.view(tokens, dims.groups, -1), self.wo_a, held=held)
        y = linear(o.flatten(1), self.wo_b, held=held)
        _, made = hyper.hyper_post_pre(y, x, made.post, made.comb, self.mixes[1], out=x, held=held)
        picked, shares = route(made.h, None, self.router, held=held)
        y = experts(made.h, picked, shares, self.routed, self.shared, 10.0, held=self.tiles)
        return y, made


def _chain(dims: Dims, tokens: int, device: torch.device) -> Work:
    layers = [_Layer(dims, tokens, device) for _ in range(2 if dims is TOY else 8)]
    x = torch.randn(tokens, 4, dims.d, device=device).bfloat16()
    state = [torch.randn(tokens, dims.d, device=device).bfloat16()]
    made = hyper.hyper_pre(x, layers[0].mixes[0])

    def run(layer: _Layer) -> None:
        state[0] = layer(x, state[0], made)[0]

    def check() -> None:
        run(layers[0])
        assert state[0].isfinite().all() and state[0].any()

    runs = [partial(run, layer) for layer in layers]
    return Work(runs, check, layers[0].bytes(), lambda: state, reset=x.normal_)
