"""Checkpoints to serve, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_tierd.engine.model.checkpoint import Preset, make_checkpoint


@pytest.fixture(scope="session")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """512 token ids, no tokenizer, 65,536 tokens of context: fast, served by token ids alone."""
    sizes = Preset(layers="SCHC", vocab_size=512, yarn_original=4096)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "micro", sizes, 3)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek's vocabulary, so it has text; a million tokens of context."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", "tiny", 0)
