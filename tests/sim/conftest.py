"""A small model, made once a session, and worlds over it."""

from __future__ import annotations

import pytest

from dsv4_tierd.engine.model.checkpoint import Preset, make_checkpoint
from dsv4_tierd.engine.model.transformer import Transformer
from small_models import Model


@pytest.fixture(scope="session")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """All three kinds of layers, the smallest that there is; a bounded replay is 256 tokens."""
    preset = Preset(
        layers="SCHC",
        hash_layers=1,
        experts=4,
        heads=2,
        hidden_size=32,
        moe_inter=32,
        yarn_original=1024,
    )
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), preset, seed=2)
    return Model(folder, Transformer.load(folder))
