"""Manifold-constrained hyper-connections (mHC): n residual streams, mixed around a sublayer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dsv4_tierd.engine.model.config import ModelConfig
from dsv4_tierd.engine.model.parameters import Head, Hyper


def gather(x: Tensor, hyper: Hyper, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Streams to a sublayer's input, and how its output will be spread.

    x: [T, n, d]. Returns (h [T, d], post [T, n], comb [T, n, n] with [input, output] stream),
    all fp32, made from the streams before the sublayer.
    """
    n = config.hc_mult
    mixes = functional.linear(_flat_norm(x, config), hyper.fn)
    pre, post, comb = torch.split(mixes, [n, n, n * n], -1)
    base_pre, base_post, base_comb = torch.split(hyper.base, [n, n, n * n])
    pre = torch.sigmoid(pre * hyper.scale[0] + base_pre) + config.hc_eps
    post = 2 * torch.sigmoid(post * hyper.scale[1] + base_post)
    comb = _sinkhorn((comb * hyper.scale[2] + base_comb).view(-1, n, n), config)
    return _weigh(x, pre), post, comb


def spread(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The next streams [T, n, d]: stream k is post_k * y + sum_j comb[j, k] x_j. y: [T, d]."""
    mixed = torch.bmm(comb.transpose(1, 2), x.float())
    return (post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(x.dtype)


def collapse(x: Tensor, head: Head, config: ModelConfig) -> Tensor:
    """Streams [T, n, d] to the head's input [T, d] fp32, normed."""
    mixes = functional.linear(_flat_norm(x, config), head.fn)
    weights = torch.sigmoid(mixes * head.scale + head.base) + config.hc_eps
    return functional.rms_norm(_weigh(x, weights), x.shape[-1:], head.norm, config.rms_norm_eps)


def _flat_norm(x: Tensor, config: ModelConfig) -> Tensor:
    """All n*d values of a token, normed together."""
    flat = x.float().flatten(1)
    return functional.rms_norm(flat, flat.shape[-1:], None, config.rms_norm_eps)


def _weigh(x: Tensor, weights: Tensor) -> Tensor:
    return torch.bmm(weights.unsqueeze(1), x.float()).squeeze(1)


def _sinkhorn(logits: Tensor, config: ModelConfig) -> Tensor:
    """Nearly doubly stochastic [T, n, n]; columns are normalised last."""
    eps = config.hc_eps
    comb = torch.softmax(logits, -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb
