"""Scratch of the experts, made once for the largest chunk, holds what any smaller one needs."""

from __future__ import annotations

import pytest
import torch

from dsv4_tierd.kernels import experts as module
from dsv4_tierd.kernels.experts import Experts, expert_scratch
from dsv4_tierd.kernels.weight import Weight

META = torch.device("meta")


@pytest.mark.parametrize("tokens_max", [0, 8, 128, 200, 1024, 2048, 8192])
@pytest.mark.parametrize("number", [16, 256, 384])
def test_scratch_of_the_largest_chunk_holds_every_smaller_one(number: int, tokens_max: int) -> None:
    """Tiles are smaller where there are fewer pairs, so that there may be more of them."""
    routed = Experts(
        Weight(torch.empty(number, 2, 32, 32, device=META)),
        Weight(torch.empty(number, 32, 32, device=META)),
    )
    held = expert_scratch(tokens_max, 6, routed, META)
    for tokens in range(1, tokens_max + 1):
        assert held.order.shape[0] >= tokens * 6
        assert held.tiles.shape[1] >= module._tile_count(tokens, 6, number), tokens
