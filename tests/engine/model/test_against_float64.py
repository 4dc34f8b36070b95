"""What transformers does not have, against an independent float64 model: MTP and FP8 rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4_tierd.engine.model.checkpoint import Preset
from dsv4_tierd.engine.model.dense import forward_dense, mtp_dense
from dsv4_tierd.engine.model.transformer import Transformer
from dsv4_tierd.kernels.layout import RowKind
from naive_model import NaiveModel, fp8_key, fp8_row

Make = Callable[..., Path]
TOLERANCE = 1e-4  # fp32 against fp64, logits of deviation 1.5


def token_ids(seed: int, count: int) -> torch.Tensor:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed))


def test_main_model(checkpoint: Make) -> None:
    """The float64 model is the arbiter: its logits are ours, and its margins say why."""
    folder, ids = checkpoint(Preset(layers="SCHCS"), 1), token_ids(3, 400)
    naive = NaiveModel(folder)
    expected = naive.logits(ids.numpy())
    assert naive.margin.min() > 1e-6
    ours = forward_dense(Transformer.load(folder), ids).numpy()
    assert np.abs(ours - expected).max() <= TOLERANCE


def test_mtp_block(checkpoint: Make) -> None:
    """The MTP block's logits, from final streams and the next token, follow its formula."""
    folder, ids = checkpoint(Preset(layers="SCH"), 1), token_ids(4, 200)
    naive = NaiveModel(folder)
    expected = naive.mtp_logits(ids.numpy())
    assert naive.margin.min() > 1e-6
    ours = mtp_dense(Transformer.load(folder), ids).numpy()
    assert ours.shape == (199, 512)
    assert np.abs(ours - expected).max() <= TOLERANCE


def test_fp8_rows(checkpoint: Make) -> None:
    """With FP8 rows the logits are those of a reference with the same quantiser.

    Nothing is chosen by rank here (every entry, every expert), so that a value on the border of
    two FP8 codes, which fp32 and fp64 may round apart, moves a logit by little: at most a
    twentieth of what the quantisation itself moves it by.
    """
    preset = Preset(layers="SCHC", index_topk=1 << 14, experts=2)
    folder, ids = checkpoint(preset, 1), token_ids(5, 300)
    exact = NaiveModel(folder).logits(ids.numpy())
    expected = NaiveModel(folder, row=fp8_row(16)).logits(ids.numpy())
    ours = forward_dense(Transformer.load(folder), ids, RowKind.FP8).numpy()
    effect = np.sqrt(((expected - exact) ** 2).mean())
    assert effect > 0.02
    assert np.sqrt(((ours - expected) ** 2).mean()) < effect / 20


def test_fp8_index_keys(checkpoint: Make) -> None:
    """With FP8 index keys the same entries are chosen as by a reference with the same quantiser."""
    folder, ids = checkpoint(Preset(layers="SCS"), 1), token_ids(6, 300)
    exact = NaiveModel(folder).logits(ids.numpy())
    expected = NaiveModel(folder, key=fp8_key).logits(ids.numpy())
    ours = forward_dense(Transformer.load(folder), ids, key=RowKind.KEY_FP8).numpy()
    changed = np.abs(expected - exact).max(1) > 1e-3
    assert changed.mean() > 0.05, "the quantiser must matter for this test to mean anything"
    assert (np.abs(ours - expected).max(1) > 1e-3).mean() < changed.mean() / 10


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 127, 128, 129])
def test_short_texts(checkpoint: Make, count: int) -> None:
    """Texts around the borders of groups, down to a single token."""
    folder, ids = checkpoint(Preset(layers="CHS"), 1), token_ids(7, count)
    expected = NaiveModel(folder).logits(ids.numpy())
    ours = forward_dense(Transformer.load(folder), ids).numpy()
    assert np.abs(ours - expected).max() <= TOLERANCE
