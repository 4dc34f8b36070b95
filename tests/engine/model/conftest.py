"""Small checkpoints, made once a session each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4_tierd.engine.model.checkpoint import Preset, make_checkpoint

Make = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """make(preset, seed) -> folder; the same arguments give the same folder. Do not write there."""
    made: dict[tuple[Preset, int], Path] = {}

    def make(preset: Preset, seed: int = 0) -> Path:
        if (preset, seed) not in made:
            folder = tmp_path_factory.mktemp("checkpoint")
            made[preset, seed] = make_checkpoint(folder, preset, seed)
        return made[preset, seed]

    return make
