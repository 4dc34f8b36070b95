"""Rotary position: interleaved pairs on the last channels."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_tierd.kernels.ref import steady


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor, inverse: bool = False) -> Tensor:
    """Rotate pairs (2i, 2i+1) of the last R channels by float32(t) * float32(inv_freq[i]).

    x: [N, ..., D] fp32; positions: [N] int; inv_freq: [R/2] fp32. Returns a new [N, ..., D] fp32;
    ``inverse`` rotates back. The fp32 product is part of the model's definition.
    """
    rope_dim = 2 * inv_freq.shape[0]
    angles = positions.to(torch.float32).unsqueeze(-1) * inv_freq
    cos, sin = steady.cos_sin(angles.view(-1, *(1,) * (x.dim() - 2), inv_freq.shape[0]))
    if inverse:
        sin = -sin
    nope, rope = x[..., :-rope_dim], x[..., -rope_dim:]
    even, odd = rope[..., 0::2], rope[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([nope, turned], -1)
