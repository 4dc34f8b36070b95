"""Memory that ops need beside their tensors: partial sums, and counters, 0 between calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PARTIALS_MAX = 1 << 22
ARRIVALS_MAX = 1 << 13


@dataclass(frozen=True, slots=True)
class Scratch:
    """partials: fp32, whatever they held; arrivals: int32, 0 between calls.

    Calls that follow each other on one stream may share one; side streams need their own.
    """

    partials: Tensor
    arrivals: Tensor


def scratch(device: torch.device) -> Scratch:
    """Scratch of any step op on ``device``: 16 MiB of partial sums."""
    return Scratch(
        torch.empty(PARTIALS_MAX, dtype=torch.float32, device=device),
        torch.zeros(ARRIVALS_MAX, dtype=torch.int32, device=device),
    )
