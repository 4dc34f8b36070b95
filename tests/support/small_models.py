"""Small models to run engines over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4_tierd.engine.model.transformer import Transformer
from world import MIB, World


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint folder and the model loaded from it. Neither is to be written to."""

    folder: Path
    transformer: Transformer

    def world(self, **settings: object) -> World:
        """A new engine over this model; its pools hold some 30,000 tokens."""
        budgets = {"host_budget_bytes": 16 * MIB, "device_budget_bytes": 24 * MIB}
        given = budgets | {"identity": bytes(32)} | settings
        return World(self.transformer, self.folder, **given)  # type: ignore[arg-type]


def text(seed: int, count: int, vocab: int = 512) -> list[int]:
    """Random token ids; eos (1) is as likely as any other."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()
