"""The k best of the visible scores, exactly, ties to the lowest position."""

from __future__ import annotations

import torch
from torch import Tensor

_INVISIBLE = torch.iinfo(torch.int32).min
_NAN = _INVISIBLE + 1


def topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Positions of the k largest among the first ``visible[t]`` scores of each row.

    scores: [T, N] fp32, any values (NaN ranks below -inf, +0 equals -0); visible: [T] int,
    0 .. N. Returns [T, k] int32, ascending, -1 padded where fewer than k are visible. Equal
    scores rank by position, lowest first. Cost: one selection over N, no sort.
    """
    columns = torch.arange(scores.shape[1], device=scores.device)
    return topk_masked(scores.masked_fill(columns >= visible.unsqueeze(-1), -torch.inf), visible, k)


def topk_masked(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """topk of scores that are -inf already wherever they are not visible; saves a copy."""
    tokens = scores.shape[0]
    ranked = torch.arange(k, dtype=torch.int32, device=scores.device).expand(tokens, k)
    ids = torch.where(ranked < visible.unsqueeze(-1), ranked, -1)
    full = (visible > k).nonzero().squeeze(-1)
    if not full.numel():
        return ids
    scores, limit = scores[full] if full.numel() < tokens else scores, visible[full]
    # One more than asked: if it equals the last one taken, the library's choice is arbitrary.
    values, chosen = torch.topk(scores, k + 1)
    edge = values[:, k - 1]
    unsure = (edge == values[:, k]) | (edge == -torch.inf) | values.isnan().any(-1)
    picked = chosen[:, :k].sort(-1).values.to(torch.int32)
    redo = unsure.nonzero().squeeze(-1)
    if redo.numel():
        picked[redo] = _topk_with_ties(scores[redo], limit[redo].unsqueeze(-1), k)
    ids[full] = picked
    return ids


def _topk_with_ties(scores: Tensor, limit: Tensor, k: int) -> Tensor:
    """Like topk, for rows with more than k visible, by an order-preserving integer key."""
    bits = (scores + 0.0).view(torch.int32)  # -0 + 0 is +0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill(scores.isnan(), _NAN)
    columns = torch.arange(scores.shape[1], device=scores.device)
    keys = keys.masked_fill(columns >= limit, _INVISIBLE)
    threshold = torch.topk(keys, k).values[:, -1:]
    above, equal = keys > threshold, keys == threshold
    spare = k - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1) <= spare))
    return taken.nonzero()[:, 1].view(-1, k).to(torch.int32)
