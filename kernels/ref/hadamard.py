"""The basis of index keys: an orthonormal Walsh-Hadamard transform before FP8 storage."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4_tierd.kernels.layout import RowKind


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform of the last axis, Sylvester order; its own inverse.

    x: [..., n] fp32, n a power of two. Returns the same shape.
    """
    n = x.shape[-1]
    if n & (n - 1):
        raise ValueError(f"a Hadamard transform needs a power of two, got {n}")
    y, half = x.contiguous(), 1
    while half < n:
        pairs = y.view(*y.shape[:-1], n // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack([low + high, low - high], -2).flatten(-3)
        half *= 2
    return y / math.sqrt(n)


def to_key_basis(x: Tensor, kind: RowKind) -> Tensor:
    """Index keys, and the queries that meet them, as stored rows of ``kind`` want them.

    x: [..., Di] fp32. FP8 keys are transformed, which spreads outliers and cancels in q . k;
    others are returned as they are.
    """
    return hadamard(x) if kind is RowKind.KEY_FP8 else x
