"""Logits to a token. Noise is a function of (seed, position), so any run can be repeated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsv4_tierd.engine.messages import Sampling, TokenLogprob


@dataclass(frozen=True, slots=True)
class Draw:
    """A drawn token, and its log probability if asked for."""

    token_id: int
    logprob: TokenLogprob | None


def draw(logits: Tensor, sampling: Sampling, position: int, best: int | None = None) -> Draw:
    """Draw the token at ``position``. logits: [vocab] fp32. Ties go to the lowest id.

    best: argmax of the logits, if it is known.
    """
    if sampling.temperature != 0:
        token = _sample(logits, sampling, position)
    else:
        token = int(logits.argmax()) if best is None else best
    return Draw(token, _logprob(logits, token, sampling.logprobs))


def _sample(logits: Tensor, sampling: Sampling, position: int) -> int:
    """Inverse of the cumulative distribution, in order of falling probability."""
    # Relative to the best, so that no temperature makes it infinite.
    scaled = (logits.double() - float(logits.max())) / sampling.temperature
    order = torch.argsort(scaled, descending=True, stable=True)
    probabilities = torch.softmax(scaled[order], 0)
    if sampling.top_k > 0:
        probabilities[sampling.top_k :] = 0
    if sampling.top_p < 1:
        # A token stays while those before it hold less than top_p; the first always stays.
        before = probabilities.cumsum(0) - probabilities
        probabilities[1:][before[1:] >= sampling.top_p * probabilities.sum()] = 0
    cumulative = probabilities.cumsum(0)
    target = uniform(sampling.seed, position) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, target, right=True))
    return int(order[min(index, int((probabilities > 0).sum()) - 1)])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else (Philox 4x64, key seed, counter position)."""
    bits = np.random.Philox(key=seed % (1 << 64), counter=position)
    return float(np.random.Generator(bits).random())


def _logprob(logits: Tensor, token: int, top: int | None) -> TokenLogprob | None:
    if top is None:
        return None
    logprobs = torch.log_softmax(logits, 0)
    best = torch.topk(logprobs, top) if top else None
    alternatives = (
        tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)) if best else ()
    )
    return TokenLogprob(token, float(logprobs[token]), alternatives)
