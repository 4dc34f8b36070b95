"""Root-mean-square norm of rows."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """weight * x / sqrt(mean(x ** 2) + eps) over the last axis, in fp32.

    x: [..., D] fp32 or bf16; weight: [D] fp32 or bf16. Returns [..., D] of ``dtype``.
    """
    x = x.float()
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight.float()).to(dtype)
