"""What the projections of queries go through before attention and the index scan."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_tierd.kernels.ref.hadamard import hadamard
from dsv4_tierd.kernels.ref.rms_norm import rms_norm
from dsv4_tierd.kernels.ref.rope import rotate


def rotate_queries(
    q: Tensor,
    eps: float,
    positions: Tensor,
    inv_freq: Tensor,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Norm each head without a weight, then rotate its last channels.

    q: [T, H, D] fp32 or bf16, raw projection; positions: [T] int; inv_freq: [R/2] fp32. Returns
    [T, H, D] of ``dtype``.
    """
    normed = rms_norm(q, None, eps, torch.float32)
    return rotate(normed, positions, inv_freq).to(dtype)


def index_queries(
    q: Tensor, g: Tensor, scale: float, positions: Tensor, inv_freq: Tensor
) -> tuple[Tensor, Tensor]:
    """Index queries in the keys' basis, and their gates: rotate, transform, scale.

    q: [T, Hi, Di] fp32 or bf16, raw projection; g: [T, Hi] raw head weights; scale: Di**-0.5 *
    Hi**-0.5. Returns ([T, Hi, Di] fp32, [T, Hi] fp32), to be encoded as index keys are.
    """
    return hadamard(rotate(q.float(), positions, inv_freq)), g.float() * scale
