"""Which experts a token takes, and their shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Router:
    """gate: [E, d] fp32 or bf16; bias: [E] fp32, or tid2eid: [vocab, k] int; scaling of shares."""

    gate: Tensor
    bias: Tensor | None
    tid2eid: Tensor | None
    k: int
    scaling: float


def route(x: Tensor, ids: Tensor | None, router: Router) -> tuple[Tensor, Tensor]:
    """(experts [T, k] int32, shares [T, k] fp32) of x [T, d], tokens ids [T] (hash layers).

    The k largest of sqrt(softplus(gate x)) + bias in falling order, equal ones by rising number,
    NaN last; or the token's row of tid2eid. Shares are the scores without bias, summing to
    ``scaling``; all zero where every score underflows. An id outside the table: -1 and zeros.
    """
    scores = functional.softplus(functional.linear(x.float(), router.gate.float())).sqrt()
    if router.tid2eid is not None:
        assert ids is not None
        known = (ids >= 0) & (ids < router.tid2eid.shape[0])
        experts = router.tid2eid[torch.where(known, ids, 0).long()].long()
        experts = torch.where(known.unsqueeze(-1), experts, -1)
    else:
        assert router.bias is not None
        ranks = (scores + router.bias).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        experts = torch.argsort(ranks, dim=-1, descending=True, stable=True)[:, : router.k]
    chosen = scores.gather(1, experts.clamp_min(0)) * (experts >= 0)
    shares = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * router.scaling
    return experts.int(), shares
