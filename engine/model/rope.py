"""Tables of inverse frequencies. Neither cos nor sin is scaled anywhere (no mscale)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4_tierd.engine.model.config import WINDOW_ONLY, ModelConfig, Yarn


def inverse_frequencies(config: ModelConfig, ratio: int) -> Tensor:
    """The table of a layer: plain where it only has a window, else YaRN. [R/2] fp32."""
    dim = config.qk_rope_head_dim
    if ratio == WINDOW_ONLY:
        return _plain(dim, config.rope_theta)
    table = _plain(dim, config.compress_rope_theta)
    if config.yarn is None:
        return table
    kept = 1 - _ramp(dim, config.compress_rope_theta, config.yarn)
    # In this order of operations, the reference's bits.
    stretched = 1.0 / (config.yarn.factor * _powers(dim, config.compress_rope_theta))
    return stretched * (1 - kept) + table * kept


def _powers(dim: int, theta: float) -> Tensor:
    return torch.tensor(theta) ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _plain(dim: int, theta: float) -> Tensor:
    return 1.0 / _powers(dim, theta)


def _ramp(dim: int, theta: float, yarn: Yarn) -> Tensor:
    """0 for pairs that turn fast (kept), 1 for slow ones (stretched by the factor)."""
    low = max(math.floor(_pair_of(yarn.beta_fast, dim, theta, yarn)), 0)
    high = min(math.ceil(_pair_of(yarn.beta_slow, dim, theta, yarn)), dim - 1)
    width = (high - low) or 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def _pair_of(turns: float, dim: int, theta: float, yarn: Yarn) -> float:
    """Pair index that makes ``turns`` rotations within the original context."""
    span = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
    return dim * math.log(span) / (2 * math.log(theta))
