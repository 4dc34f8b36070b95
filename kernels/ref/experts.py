"""The chosen experts' answer, with the shared one's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dsv4_tierd.kernels.ref.linear import linear
from dsv4_tierd.kernels.weight import Weight


@dataclass(frozen=True, slots=True)
class Experts:
    """SwiGLUs. w13: [E, 2, I, d], gate then up; w2: [E, d, I]. A single one has no leading E."""

    w13: Weight
    w2: Weight


def experts(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    routed: Experts,
    shared: Experts | None,
    limit: float,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """sum_e share_e E_e(x) + S(x); E(x) = w2 (silu(min(w1 x, L)) * clip(w3 x, -L, L)).

    x: [T, d]; ids: [T, k] int, below 0 or at or past E: none; shares: [T, k] fp32; limit: L, 0
    for no limit. The hidden values are scaled by the share, then rounded to bf16. Returns [T, d]
    of ``dtype``, summed in fp32.
    """
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(routed.w2.shape[0]):
        rows, places = (ids == expert).nonzero(as_tuple=True)
        if rows.numel():
            share = shares[rows, places].unsqueeze(-1)
            y.index_add_(0, rows, _swiglu(x[rows], _one(routed, expert), limit, share))
    if shared is not None:
        y += _swiglu(x, shared, limit, None)
    return y.to(dtype)


def _one(experts: Experts, number: int) -> Experts:
    def pick(weight: Weight) -> Weight:
        scales = None if weight.scales is None else weight.scales[number]
        return Weight(weight.values[number], scales)

    return Experts(pick(experts.w13), pick(experts.w2))


def _swiglu(x: Tensor, expert: Experts, limit: float, share: Tensor | None) -> Tensor:
    both = linear(x.unsqueeze(1).expand(-1, 2, -1), expert.w13, dtype=torch.float32)
    gate, up = both.unbind(1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    hidden = functional.silu(gate) * up
    return linear(hidden if share is None else hidden * share, expert.w2, dtype=torch.float32)
