"""Experts of a prefill chunk: pairs in their experts' order, then the library's grouped product.

The weights are decoded into bf16 first (exact), in memory of the caching allocator: for Flash with
16 experts and 8,192 tokens about 2 GB for the length of the call.
"""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: E741

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from dsv4_tierd.kernels.experts_triton import plan_kernel, swiglu
from dsv4_tierd.kernels.linear import dense_bf16
from dsv4_tierd.kernels.ref.experts import Experts
from dsv4_tierd.kernels.triton_rows import tl, triton
from dsv4_tierd.kernels.weight import Weight

_DENSE_BYTES_MAX = 4 << 30
_ROWS_PER_EXPERT_MIN = 32


def is_wide(tokens: int, k: int, routed: Experts) -> bool:
    """Whether a chunk is worth decoding all experts for, and they fit."""
    number, dim, inner = routed.w2.shape
    dense = 4 * (number + 1) * dim * inner
    return tokens * k >= _ROWS_PER_EXPERT_MIN * number and dense <= _DENSE_BYTES_MAX


def experts_wide(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    routed: Experts,
    shared: Experts | None,
    limit: float,
    out: Tensor,
) -> None:
    """Write experts(...) of experts.py to ``out``; gate and up are rounded to bf16 on the way."""
    (tokens, k), (number, dim, inner) = ids.shape, routed.w2.shape
    beside = 0 if shared is None else tokens
    rows = tokens * k + beside
    order, place = torch.empty(2, tokens * k, dtype=torch.int32, device=x.device)
    ends = torch.empty(number + 1, dtype=torch.int32, device=x.device)
    plan_kernel[(number + 1,)](
        ids,
        order,
        order,
        place,
        ends,
        tokens * k,
        number,
        0,
        beside,
        BUCKETS=triton.next_power_of_2(number + 1),
        CHUNK=1024,
        BT=1,
        ENDS=True,
        PDL=False,
        num_warps=4,
    )
    offsets = ends if shared is not None else ends[:number]
    taken = torch.empty(rows, dim, dtype=torch.bfloat16, device=x.device)
    _take[(rows,)](
        x, x.stride(0), order, ends, taken, number, beside,
        PICKS=k, D=dim, BLOCK=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    weights = torch.empty(offsets.shape[0] * 2 * inner * dim, dtype=torch.bfloat16, device=x.device)
    stack = _decoded(routed.w13, None if shared is None else shared.w13, weights)
    both = functional.grouped_mm(taken, stack.view(-1, 2 * inner, dim).mT, offs=offsets)
    hidden = torch.empty(rows, inner, dtype=torch.bfloat16, device=x.device)
    _activate[(rows,)](
        both, shares, order, ends, hidden, number, beside,
        I=inner, BLOCK=triton.next_power_of_2(inner), LIMIT=limit, num_warps=4,
    )  # fmt: skip
    stack = _decoded(routed.w2, None if shared is None else shared.w2, weights)
    answers = functional.grouped_mm(hidden, stack.view(-1, dim, inner).mT, offs=offsets)
    _add[(tokens,)](
        answers, ids, place, ends, out, out.stride(0), number,
        PICKS=k, D=dim, BLOCK=triton.next_power_of_2(dim), SHARED=shared is not None, num_warps=4,
    )  # fmt: skip


def _decoded(routed: Weight, shared: Weight | None, memory: Tensor) -> Tensor:
    """bf16 of all experts, the shared one last, in ``memory``."""
    size = math.prod(routed.shape[1:])
    number = routed.shape[0]
    dense_bf16(routed, memory[: number * size].view(routed.shape))
    if shared is None:
        return memory[: number * size]
    dense_bf16(shared, memory[number * size : (number + 1) * size].view(shared.shape))
    return memory[: (number + 1) * size]


@triton.jit(do_not_specialize=["beside"])
def _take(
    x_ptr,
    x_token,
    order_ptr,
    ends_ptr,
    out_ptr,
    experts,
    beside,
    PICKS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row of x for each pair in order, then (``beside`` of them) one for each token."""
    row = tl.program_id(0)
    pairs = tl.load(ends_ptr + experts - 1)
    if row < pairs + beside:
        value = tl.arange(0, BLOCK)
        pair = tl.load(order_ptr + row, mask=row < pairs, other=0)
        token = tl.where(row < pairs, pair // PICKS, row - pairs).to(tl.int64)
        x = tl.load(x_ptr + token * x_token + value, mask=value < D, other=0.0)
        tl.store(out_ptr + row.to(tl.int64) * D + value, x.to(tl.bfloat16), mask=value < D)


@triton.jit(do_not_specialize=["beside"])
def _activate(
    both_ptr,
    shares_ptr,
    order_ptr,
    ends_ptr,
    hidden_ptr,
    experts,
    beside,
    I: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Hidden values of a row, times its share."""
    row = tl.program_id(0)
    pairs = tl.load(ends_ptr + experts - 1)
    if row < pairs + beside:
        value = tl.arange(0, BLOCK)
        pair = tl.load(order_ptr + row, mask=row < pairs, other=0)
        share = tl.load(shares_ptr + pair, mask=row < pairs, other=1.0)
        at = both_ptr + row.to(tl.int64) * (2 * I) + value
        gate = tl.load(at, mask=value < I, other=0.0).to(tl.float32)
        up = tl.load(at + I, mask=value < I, other=0.0).to(tl.float32)
        hidden = swiglu(gate, up, LIMIT) * share
        at = hidden_ptr + row.to(tl.int64) * I + value
        tl.store(at, hidden.to(tl.bfloat16), mask=value < I)


@triton.jit
def _add(
    answers_ptr,
    ids_ptr,
    place_ptr,
    ends_ptr,
    out_ptr,
    out_token,
    experts,
    PICKS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):
    """A token's answers added in the order of its picks; absent ones are not read."""
    token = tl.program_id(0).to(tl.int64)
    value = tl.arange(0, BLOCK)
    y = tl.zeros((BLOCK,), tl.float32)
    for pick in tl.static_range(PICKS):
        number = tl.load(ids_ptr + token * PICKS + pick)
        # As a number: the interpreter cannot spread a scalar truth over a tensor.
        end = tl.where((number >= 0) & (number < experts), D, 0)
        row = tl.load(place_ptr + token * PICKS + pick).to(tl.int64)
        row = tl.where(end > 0, row, 0)
        y += tl.load(answers_ptr + row * D + value, mask=value < end, other=0.0).to(tl.float32)
    if SHARED:
        row = tl.load(ends_ptr + experts - 1).to(tl.int64) + token
        y += tl.load(answers_ptr + row * D + value, mask=value < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * out_token + value, y.to(out_ptr.dtype.element_ty), mask=value < D)
