"""Experts on the GPU: grouped products with stored weights, the shared expert among them.

One token: two launches, rows times a vector. More: pairs of (token, expert) are grouped into
tiles on the device, so that each chosen expert's weights are read once for a tile, and nothing
depends on the host. Prefill chunks: experts_wide.py. A token's sum is in the order of its picks,
whatever its neighbours chose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.kernels.experts_triton import (
    down_kernel,
    one_down_kernel,
    one_up_kernel,
    plan_kernel,
    sum_kernel,
    up_kernel,
)
from dsv4_tierd.kernels.experts_wide import experts_wide, is_wide
from dsv4_tierd.kernels.linear import vector_shape
from dsv4_tierd.kernels.ref import experts as ref
from dsv4_tierd.kernels.ref.experts import Experts
from dsv4_tierd.kernels.step_triton import WEIGHT_CODE, launch_order, output, weight_arguments
from dsv4_tierd.kernels.triton_rows import runs_kernels, triton
from dsv4_tierd.kernels.weight import WeightKind

__all__ = ["ExpertScratch", "Experts", "expert_scratch", "experts"]

_PRECISE_TOKENS_MAX = 128
# Rows, stages and warps of a tile of 128 pairs, and of fewer.
_WIDE, _NARROW = (128, 3, 8), (64, 3, 4)


@dataclass(frozen=True, slots=True)
class ExpertScratch:
    """Of one stream. P = tokens * (k + 1) pairs, the shared expert's last.

    hidden: [P * I] bf16; answers: [P * d] fp32 (bf16 above 128 tokens); order: pairs by expert;
    tiles: [3, tiles] int32, expert, first and end in ``order``.
    """

    hidden: Tensor
    answers: Tensor
    order: Tensor
    tiles: Tensor


def expert_scratch(tokens_max: int, k: int, routed: Experts, device: torch.device) -> ExpertScratch:
    """Scratch for calls of up to ``tokens_max`` tokens. 8,192 tokens of Flash: 0.7 GB."""
    number, dim, inner = routed.w2.shape
    pairs = tokens_max * (k + 1)
    precise = torch.float32 if tokens_max <= _PRECISE_TOKENS_MAX else torch.bfloat16
    # Fewer tokens may need more tiles: smaller ones.
    tiles = max((_tile_count(t, k, number) for t in range(1, tokens_max + 1)), default=0)
    return ExpertScratch(
        torch.empty(pairs * inner, dtype=torch.bfloat16, device=device),
        torch.empty(pairs * dim, dtype=precise, device=device),
        torch.empty(tokens_max * k, dtype=torch.int32, device=device),
        torch.empty(3, tiles, dtype=torch.int32, device=device),
    )


def experts(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    routed: Experts,
    shared: Experts | None,
    limit: float,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    held: ExpertScratch | None = None,
) -> Tensor:
    """sum_e share_e E_e(x) + S(x), SwiGLU with its clamp fused; see the twin in ref/.

    x: [T, d] fp32 or bf16, read as bf16; ids: [T, k] int32, below 0 or at or past E: none;
    shares: [T, k] fp32; both contiguous. routed: FP8 or MXFP4; shared: FP8 or MXFP4, or None.
    ``out``: [T, d] fp32 or bf16, else allocated in ``dtype``; ``held``: for at least T tokens,
    else allocated. Raises ValueError for other weights. Cost: the chosen experts' bytes, once for
    one token, once a tile of up to 128 pairs above.
    """
    tokens = x.shape[0]
    out = output(x, tuple(x.shape), out, dtype)
    _check(x, ids, shares, routed, shared)
    if not runs_kernels(x.device):
        return out.copy_(ref.experts(x, ids, shares, routed, shared, limit, out.dtype))
    if tokens > _PRECISE_TOKENS_MAX and is_wide(tokens, ids.shape[1], routed):
        experts_wide(x, ids, shares, routed, shared, limit, out)
    elif tokens:
        if held is None:
            held = expert_scratch(tokens, ids.shape[1], routed, x.device)
        run = _one if tokens == 1 else _many
        run(x, ids, shares, routed, shared, limit, out, held)
    return out


def _check(x: Tensor, ids: Tensor, shares: Tensor, routed: Experts, shared: Experts | None) -> None:
    number, dim, inner = routed.w2.shape
    assert x.shape[1] == dim and x.stride(1) == 1 and ids.is_contiguous() and shares.is_contiguous()
    assert ids.shape == shares.shape and ids.shape[0] == x.shape[0], (ids.shape, shares.shape)
    for one, lead in ((routed, (number,)), (shared, ())):
        if one is None:
            continue
        kinds = {one.w13.kind, one.w2.kind}
        if len(kinds) > 1 or kinds & {WeightKind.FP32, WeightKind.BF16}:
            raise ValueError(f"experts of {[k.value for k in kinds]}: FP8 or MXFP4 is needed")
        if one.w13.shape != (*lead, 2, inner, dim) or one.w2.shape != (*lead, dim, inner):
            raise ValueError(f"experts of {one.w13.shape} and {one.w2.shape}")
    if dim % 32 or inner % 32:
        raise ValueError(f"experts of {dim} and {inner} values: multiples of 32 are needed")


def _pointers(routed: Experts, shared: Experts | None) -> tuple[tuple[Tensor, ...], ...]:
    """(values, scales, shared values, shared scales) of w13 and of w2."""
    last = routed if shared is None else shared
    return (
        (*weight_arguments(routed.w13), *weight_arguments(last.w13)),
        (*weight_arguments(routed.w2), *weight_arguments(last.w2)),
    )


def _constants(ids: Tensor, routed: Experts, shared: Experts | None) -> dict[str, int]:
    _, dim, inner = routed.w2.shape
    other = -1 if shared is None else WEIGHT_CODE[shared.w13.kind]
    kind = WEIGHT_CODE[routed.w13.kind]
    return {"PICKS": ids.shape[1], "I": inner, "D": dim, "KIND": kind, "SHARED": other}


def _one(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    routed: Experts,
    shared: Experts | None,
    limit: float,
    out: Tensor,
    held: ExpertScratch,
) -> None:
    number, dim, inner = routed.w2.shape
    up, down = _pointers(routed, shared)
    constants, order = _constants(ids, routed, shared), launch_order(x.device)
    places = ids.shape[1] + (shared is not None)
    shape = vector_shape(routed.w13, inner * places, 2)
    one_up_kernel[(triton.cdiv(inner, shape["BN"]), places)](
        x, ids, shares, *up, held.hidden, number, LIMIT=limit, **shape, **constants, **order
    )
    shape = vector_shape(routed.w2, dim)
    one_down_kernel[(triton.cdiv(dim, shape["BN"]),)](
        held.hidden, ids, *down, out, number, **shape, **constants, **order
    )


def _many(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    routed: Experts,
    shared: Experts | None,
    limit: float,
    out: Tensor,
    held: ExpertScratch,
) -> None:
    tokens, k = ids.shape
    number, dim, inner = routed.w2.shape
    up, down = _pointers(routed, shared)
    constants, order = _constants(ids, routed, shared), launch_order(x.device)
    block_t = _block_tokens(tokens, k, number)
    tiles = _tile_count(tokens, k, number)
    assert held.order.shape[0] >= tokens * k and held.tiles.shape[1] >= tiles, held.tiles.shape
    plan = (held.order, *held.tiles)
    plan_kernel[(number + 1,)](
        ids,
        *plan,
        tokens * k,
        number,
        tiles,
        0,
        BUCKETS=triton.next_power_of_2(number + 1),
        CHUNK=min(1024, max(16, triton.next_power_of_2(tokens * k))),
        BT=block_t,
        ENDS=False,
        num_warps=4,
        **order,
    )
    rest = 0 if shared is None else triton.cdiv(tokens, block_t)
    block = {"BT": block_t, **_tile_shape(block_t), **constants, **order}
    rows = block["BN"]
    up_kernel[(triton.cdiv(inner, rows), tiles + rest)](
        x, x.stride(0), *plan, shares, *up, held.hidden, tokens, tiles, LIMIT=limit, **block
    )
    down_kernel[(triton.cdiv(dim, rows), tiles + rest)](
        held.hidden, *plan, *down, held.answers, tokens, tiles, **block
    )
    columns = min(1024, triton.next_power_of_2(dim))
    sum_kernel[(triton.cdiv(dim, columns), tokens)](
        held.answers,
        ids,
        out,
        out.stride(0),
        tokens,
        number,
        PICKS=k,
        D=dim,
        SHARED=constants["SHARED"],
        BN=columns,
        num_warps=4,
        **order,
    )


def _tile_shape(block_t: int) -> dict[str, int]:
    """Rows of a tile, stages of its pipeline, warps."""
    if block_t == 128:
        return {"BN": _WIDE[0], "STAGES": _WIDE[1], "num_warps": _WIDE[2]}
    return {"BN": _NARROW[0], "STAGES": _NARROW[1], "num_warps": _NARROW[2]}


def _block_tokens(tokens: int, k: int, number: int) -> int:
    """Pairs of a tile: what an expert gets on average, rounded up."""
    average = -(-tokens * k // number)
    return min(128, max(16, 1 << (average - 1).bit_length()))


def _tile_count(tokens: int, k: int, number: int) -> int:
    """Tiles that the pairs may need, however they fall."""
    pairs = tokens * k
    return min(pairs, number + pairs // _block_tokens(tokens, k, number))
