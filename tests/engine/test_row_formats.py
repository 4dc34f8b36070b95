"""FP8 and BF16 rows through the tiers, against whole-text runs with the same formats.

Where nothing is chosen by rank (every entry, every expert), a value that lands on the border of
two codes, which sums in another order may round apart, moves a logit by little: the error is
held against what the quantisation itself moves.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4_tierd.engine.model.dense import forward_dense
from dsv4_tierd.kernels.layout import RowKind
from engine_probe import Probe, make_hostile
from naive_model import NaiveModel, fp8_key, fp8_row, round_bf16
from small_models import Model, text

TOKENS, PROMPT_TOKENS = 560, 540
KINDS = {"fp8": (RowKind.FP8, RowKind.KEY_FP8), "bf16": (RowKind.BF16, RowKind.BF16)}
NAIVE = {"fp8": (fp8_row(16), fp8_key), "bf16": (round_bf16, round_bf16)}


@pytest.fixture(scope="module")
def model(models) -> Model:
    """Chooses every entry and every expert."""
    return models("SCHC", 16, index_topk=256, experts=2)


def run(model: Model, tokens: list[int], prompt: int, **settings: object) -> Tensor:
    """[len(tokens), vocab]: prefill ``prompt`` of these tokens, then decode the others."""
    world = model.world(max_batch=2, chunk_tokens=192, **settings)
    make_hostile(world, 31)
    probe, session = Probe(world), world.open()
    append = world.engine._append

    def forced(request, token_id: int) -> None:
        at = len(request.session.transcript)
        append(request, tokens[at] if at < len(tokens) else token_id)

    world.engine._append = forced
    name = world.submit(session, tokens[:prompt], len(tokens) - prompt + 1)
    world.run(name)
    return probe.table(name, 0, len(tokens))


def rms(difference: Tensor) -> float:
    return float(difference.double().square().mean().sqrt())


@pytest.mark.parametrize("tiering", ["hisparse", "resident", "off"])
@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
def test_against_one_shot(model, kv_dtype, tiering) -> None:
    """Chunks, decode steps and tiers add nothing to what the row format itself costs."""
    tokens = text(500, TOKENS)
    ids = torch.tensor(tokens)
    exact = forward_dense(model.transformer, ids)
    expected = forward_dense(model.transformer, ids, *KINDS[kv_dtype])
    effect = rms(expected - exact)
    assert effect > (0.02 if kv_dtype == "fp8" else 0.002)
    ours = run(model, tokens, PROMPT_TOKENS, kv_dtype=kv_dtype, tiering=tiering)
    assert rms(ours - expected) < effect / 20


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
def test_against_float64(model, kv_dtype) -> None:
    """An independent float64 model with the same quantisers agrees with the engine."""
    tokens = text(501, 300)
    ids = torch.tensor(tokens).numpy()
    row, key = NAIVE[kv_dtype]
    exact = torch.from_numpy(NaiveModel(model.folder).logits(ids))
    expected = torch.from_numpy(NaiveModel(model.folder, row=row, key=key).logits(ids))
    ours = run(model, tokens, 280, kv_dtype=kv_dtype)
    effect = rms(expected - exact)
    assert rms(ours - expected) < effect / 20


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
def test_choices_with_quantised_keys(models, kv_dtype) -> None:
    """Entries are chosen by the keys as they are stored: hardly a row of logits is off.

    One value that rounds apart may change a choice. With keys of another format a good part of
    all rows would be off.
    """
    model, tokens = models("SCS", 16), text(502, TOKENS)
    ids, (latent, key) = torch.tensor(tokens), KINDS[kv_dtype]
    expected = forward_dense(model.transformer, ids, latent, key)
    other_keys = forward_dense(model.transformer, ids, latent, RowKind.FP32)
    ours = run(model, tokens, PROMPT_TOKENS, kv_dtype=kv_dtype)
    assert off_share(other_keys - expected) > 0.2
    assert off_share(ours - expected) < 0.02


def off_share(difference: Tensor) -> float:
    return float((difference.abs().amax(1) > 1e-2).float().mean())


def test_one_chunk_has_the_one_shot_bits(models) -> None:
    """A prompt in a single chunk is the same arithmetic as one shot: every bit is equal."""
    model, tokens = models("SHCHCS", 16), text(503, 255)
    for kv_dtype, kinds in KINDS.items():
        world = model.world(kv_dtype=kv_dtype)
        make_hostile(world, 32)
        probe = Probe(world)
        name = world.submit(world.open(), tokens, 1)
        world.run(name)
        expected = forward_dense(model.transformer, torch.tensor(tokens), *kinds)
        assert torch.equal(probe.table(name, 0, 254), expected[:254])


def test_quantisers_agree_with_the_layout(model) -> None:
    """The float64 model's quantisers, on their own, are those of the stored rows."""
    layout = model.world(kv_dtype="fp8").tiers.config.pages.latent
    values = torch.randn(50, layout.dim, generator=torch.Generator().manual_seed(1))
    stored = layout.decode(*layout.encode(values)).double().numpy()
    assert np.array_equal(stored, fp8_row(16)(values.double().numpy()))
