"""Arithmetic whose bits depend on the values alone.

A library's vector kernels may treat the last few elements of a tensor differently from the
others, and choose the order of a sum by the tensor's shape. The cache must not notice: an entry
has the same bytes whether it was computed in a chunk of a thousand tokens or in a decode step.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fold_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over ``dim`` in an order fixed by its length alone: halves are added until one is left.

    x: [..., n, ...] fp32, n >= 1. Returns x without ``dim``. Costs log2(n) element-wise additions.
    """
    while (n := x.shape[dim]) > 1:
        half = n // 2
        folded = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat([folded, x.narrow(dim, 2 * half, 1)], dim) if n % 2 else folded
    return x.squeeze(dim)


def exp(x: Tensor) -> Tensor:
    """e ** x in fp32, evaluated in fp64 and rounded once.

    The fp64 kernels differ between element positions by an fp64 ulp at most, which rounding hides.
    """
    return x.double().exp().float()


def cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) of fp32 angles, each evaluated in fp64 and rounded once; see ``exp``."""
    wide = angles.double()
    return wide.cos().float(), wide.sin().float()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x ** 2) + eps) over the last axis. x: [..., D] fp32."""
    mean = fold_sum(x * x, -1) / x.shape[-1]
    normed = x / torch.sqrt(mean + eps).unsqueeze(-1)
    return normed if weight is None else normed * weight
