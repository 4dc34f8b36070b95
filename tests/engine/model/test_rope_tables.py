"""Tables of inverse frequencies, against transformers' bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4_tierd.engine.model.checkpoint import Preset
from dsv4_tierd.engine.model.config import load_config
from dsv4_tierd.engine.model.rope import inverse_frequencies

Make = Callable[..., Path]


def theirs(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import DeepseekV4Config
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

        return DeepseekV4RotaryEmbedding(DeepseekV4Config.from_pretrained(folder))


REAL = Preset(head_dim=512, rope_dim=64, index_dim=128, yarn_original=65536)


@pytest.mark.parametrize("preset", [Preset(), Preset(yarn_original=65536), REAL])
def test_bits_are_transformers(checkpoint: Make, preset: Preset) -> None:
    """Plain and YaRN tables are bit-equal, for the tiny models' and the real one's sizes."""
    folder = checkpoint(preset)
    config, other = load_config(folder), theirs(folder)
    assert torch.equal(inverse_frequencies(config, 0), other.main_inv_freq)
    for ratio in (4, 128):
        assert torch.equal(inverse_frequencies(config, ratio), other.compress_inv_freq)


def test_without_yarn(checkpoint: Make) -> None:
    """Compressed layers of a model without YaRN have the plain table of their own theta."""
    config = replace(load_config(checkpoint(Preset())), yarn=None)
    expected = 160000.0 ** (-torch.arange(0, 16, 2).double() / 16)
    assert torch.allclose(inverse_frequencies(config, 4).double(), expected, rtol=1e-6)
    assert not torch.equal(inverse_frequencies(config, 0), inverse_frequencies(config, 4))
