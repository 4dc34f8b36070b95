"""Manifold-constrained hyper-connections (mHC): n residual streams, mixed around a sublayer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dsv4_tierd.kernels.ref.rms_norm import rms_norm


@dataclass(frozen=True, slots=True)
class Mix:
    """The constants of one hyper-connection, all tensors fp32.

    fn: [(2+n)*n, n*d], base: [(2+n)*n], scale: [3]; of the model's head: [n, n*d], [n], [1].
    norm: [d], of the sublayer that follows. iters: Sinkhorn rounds.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor
    norm_eps: float = 1e-6
    hc_eps: float = 1e-6
    iters: int = 20


@dataclass(frozen=True, slots=True)
class Mixed:
    """What a sublayer takes and how its answer spreads.

    h: [T, d] normed, bf16 or fp32; post: [T, n] fp32; comb: [T, n, n] fp32, [input, output].
    """

    h: Tensor
    post: Tensor
    comb: Tensor


def hyper_pre(x: Tensor, mix: Mix, dtype: torch.dtype = torch.bfloat16) -> Mixed:
    """Streams x [T, n, d] to the sublayer's normed input, and the mix of what comes after it."""
    n = x.shape[1]
    m = _mixes(x, mix)
    pre = torch.sigmoid(m[:, :n] * mix.scale[0] + mix.base[:n]) + mix.hc_eps
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * mix.scale[1] + mix.base[n : 2 * n])
    comb = (m[:, 2 * n :] * mix.scale[2] + mix.base[2 * n :]).view(-1, n, n)
    h = rms_norm(_weigh(x, pre), mix.norm, mix.norm_eps, dtype)
    return Mixed(h, post, _sinkhorn(comb, mix))


def hyper_post(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The next streams [T, n, d] like x: stream k is post_k * y + sum_j comb[j, k] x_j."""
    mixed = torch.einsum("tjk,tjd->tkd", comb, x.float())
    return (post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(x.dtype)


def hyper_head(x: Tensor, mix: Mix, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Streams x [T, n, d] to the language head's normed input [T, d]."""
    weights = torch.sigmoid(_mixes(x, mix) * mix.scale + mix.base) + mix.hc_eps
    return rms_norm(_weigh(x, weights), mix.norm, mix.norm_eps, dtype)


def _mixes(x: Tensor, mix: Mix) -> Tensor:
    flat = rms_norm(x.flatten(1), None, mix.norm_eps, torch.float32)
    return functional.linear(flat, mix.fn)


def _weigh(x: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("tj,tjd->td", weights, x.float())


def _sinkhorn(logits: Tensor, mix: Mix) -> Tensor:
    """Nearly doubly stochastic [T, n, n]; columns are normalised last."""
    eps = mix.hc_eps
    comb = torch.softmax(logits, -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(mix.iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb
