"""Mixture of experts: a router by token id or by score, k experts a token, one shared expert."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dsv4_tierd.engine.model.config import ModelConfig
from dsv4_tierd.engine.model.matrix import dense, linear, linear_fp32, pick
from dsv4_tierd.engine.model.parameters import Ffn, Moe


def moe(x: Tensor, ids: Tensor, weights: Moe, config: ModelConfig, decode: bool) -> Tensor:
    """The experts' answer for x: [T, d] fp32 of tokens ids [T]; [T, d] fp32.

    ``decode`` gathers the chosen experts' weights for each token, so that a token's result does
    not depend on which experts its neighbours chose; otherwise tokens are grouped by expert.
    """
    experts, shares = route(x, ids, weights, config)
    routed = _per_token if decode else _per_expert
    y = routed(x, experts, shares, weights.experts, config.swiglu_limit)
    return y + _ffn(x, weights.shared, config.swiglu_limit)


def route(x: Tensor, ids: Tensor, weights: Moe, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """(experts [T, k] int64, shares [T, k] fp32). Equal scores go to the lowest expert."""
    scores = functional.softplus(linear_fp32(x, weights.gate)).sqrt()
    if weights.tid2eid is not None:
        experts = weights.tid2eid[ids]
    else:
        assert weights.bias is not None
        ranked = torch.argsort(scores + weights.bias, dim=-1, descending=True, stable=True)
        experts = ranked[:, : config.num_experts_per_tok]
    chosen = scores.gather(1, experts)
    # The floor keeps a token whose scores all underflow at 0 instead of NaN.
    shares = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor
    return experts, shares


def _swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, L)) * clip(up, -L, L) in fp32; L = 0 is no limit."""
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return functional.silu(gate) * up


def _ffn(x: Tensor, ffn: Ffn, limit: float, share: Tensor | None = None) -> Tensor:
    hidden = _swiglu(linear(x, ffn.w1), linear(x, ffn.w3), limit)
    return linear(hidden if share is None else hidden * share, ffn.w2).float()


def _per_expert(x: Tensor, experts: Tensor, shares: Tensor, ffn: Ffn, limit: float) -> Tensor:
    """Tokens grouped by expert; contributions are added in the order of expert numbers."""
    y = torch.zeros_like(x)
    order = torch.argsort(experts.flatten(), stable=True)
    counts = torch.bincount(experts.flatten(), minlength=ffn.w2.shape[0]).tolist()
    for expert, picks in enumerate(torch.split(order, counts)):
        if picks.numel():
            rows = picks // experts.shape[1]
            one = Ffn(pick(ffn.w13, expert), pick(ffn.w2, expert))
            y.index_add_(0, rows, _ffn(x[rows], one, limit, shares.flatten()[picks].unsqueeze(-1)))
    return y


def _per_token(x: Tensor, experts: Tensor, shares: Tensor, ffn: Ffn, limit: float) -> Tensor:
    """One small product a token and expert: [T*k, I, d] gathered weights."""
    picks, k = experts.flatten(), experts.shape[1]
    w1, w2, w3 = (dense(pick(matrix, picks)) for matrix in (ffn.w1, ffn.w2, ffn.w3))
    rows = x.to(w1.dtype).repeat_interleave(k, 0).unsqueeze(-1)
    hidden = _swiglu(torch.bmm(w1, rows), torch.bmm(w3, rows), limit) * shares.reshape(-1, 1, 1)
    y = torch.bmm(w2, hidden.to(w2.dtype)).float()
    return y.view(x.shape[0], k, -1).sum(1)
