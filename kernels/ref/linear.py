"""Matrix products with stored weights."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_tierd.kernels.ref.rms_norm import rms_norm
from dsv4_tierd.kernels.weight import Weight, WeightKind


def linear(
    x: Tensor,
    weight: Weight,
    norm: Tensor | None = None,
    eps: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """weight x, x normed first where ``norm`` [K] is given; sums in fp32.

    x: [T, K] with weight [N, K], or [T, G, K] with [G, N, K]. x is rounded to bf16 (after the
    norm) unless the weight is fp32. Returns [T, N] or [T, G, N] of ``dtype``.
    """
    x = x.float() if norm is None else rms_norm(x, norm, eps, torch.float32)
    if weight.kind is not WeightKind.FP32:
        x = x.bfloat16().float()
    return torch.einsum("...k,...nk->...n", x, weight.dense()).to(dtype)
