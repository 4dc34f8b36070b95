"""Small models and what transformers says of them, made once a session each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_reference
from dsv4_tierd.engine.model.checkpoint import Preset, make_checkpoint
from dsv4_tierd.engine.model.transformer import Transformer
from small_models import Model

Models = Callable[..., Model]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Call with layers, window, seed, other sizes: the same arguments give the same model."""
    made: dict[tuple[Preset, int], Model] = {}

    def get(layers: str = "SCH", window: int = 16, seed: int = 1, **sizes: object) -> Model:
        preset = Preset(layers=layers, window=window, **sizes)  # type: ignore[arg-type]
        if (preset, seed) not in made:
            folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), preset, seed)
            made[preset, seed] = Model(folder, Transformer.load(folder))
        return made[preset, seed]

    return get


@pytest.fixture(scope="session")
def hf_logits() -> Callable[[Model, list[int]], Tensor]:
    """Call with model, tokens: [T, vocab] fp32 from transformers, one shot, remembered."""
    loaded: dict[Path, Any] = {}
    known: dict[tuple[Path, tuple[int, ...]], Tensor] = {}

    def get(model: Model, tokens: list[int]) -> Tensor:
        key = model.folder, tuple(tokens)
        if key not in known:
            if model.folder not in loaded:
                loaded[model.folder] = hf_reference.hf_model(model.folder)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # transformers' own deprecations
                ids = torch.tensor([tokens])
                known[key] = loaded[model.folder](ids, use_cache=False).logits[0]
        return known[key]

    return get
