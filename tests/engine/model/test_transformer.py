"""The pieces that the engine calls: layers in decode mode, hyper-connections, the router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4_tierd.engine.model import hyper
from dsv4_tierd.engine.model.attention import Projections
from dsv4_tierd.engine.model.checkpoint import PRESETS, Preset, make_checkpoint
from dsv4_tierd.engine.model.moe import moe, route
from dsv4_tierd.engine.model.transformer import Transformer

Make = Callable[..., Path]


@pytest.fixture
def model(checkpoint: Make) -> Transformer:
    return Transformer.load(checkpoint(Preset()))


def toy_attention(p: Projections) -> torch.Tensor:
    """Stands in for attention: depends on every projection, row by row."""
    rows = p.kv.unsqueeze(1) * 0.3 + p.q
    if p.index_q is not None:
        assert p.main_kv is not None and p.index_g is not None
        rows = rows + p.main_kv[:, None, : rows.shape[-1]] + p.index_q.sum((1, 2))[:, None, None]
    return rows


def run_layers(
    model: Transformer, ids: torch.Tensor, positions: torch.Tensor, decode: bool
) -> torch.Tensor:
    x = model.embed(ids)
    for index in range(model.config.num_hidden_layers):
        x = model.layer(index, x, ids, positions, toy_attention, decode=decode)
    return model.logits(x)


@torch.no_grad()
def test_decode_rows_do_not_feel_each_other(model: Transformer) -> None:
    """In a batch of fixed size, a token's logits have the same bits beside any neighbours.

    Neither its row nor the experts that the others chose matter.
    """
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 512, (8,), generator=generator)
    positions = torch.randint(0, 4000, (8,), generator=generator)
    first = run_layers(model, ids, positions, decode=True)
    for _ in range(10):
        order = torch.randperm(8, generator=generator)
        others = torch.randint(0, 512, (8,), generator=generator)
        mixed = torch.where(torch.arange(8) < 4, ids[order], others)
        places = torch.where(torch.arange(8) < 4, positions[order], 0)
        assert torch.equal(run_layers(model, mixed, places, decode=True)[:4], first[order[:4]])


@torch.no_grad()
@pytest.mark.parametrize("index", range(6))
def test_both_expert_paths_agree(model: Transformer, index: int) -> None:
    """Grouped by expert or gathered per token, the experts' answer is the same to rounding."""
    x, ids = torch.randn(50, 64), torch.randint(0, 512, (50,))
    weights, config = model.parameters.layers[index].moe, model.config
    grouped = moe(x, ids, weights, config, decode=False)
    gathered = moe(x, ids, weights, config, decode=True)
    assert float((grouped - gathered).abs().max()) < 1e-5
    assert float(grouped.std()) > 0.1


def test_router(model: Transformer) -> None:
    """Hash layers take the table's experts, others the best by score plus bias, lowest on ties.

    Shares come from the scores alone and sum to the scaling factor.
    """
    x, ids = torch.randn(20, 64), torch.randint(0, 512, (20,))
    hashed, scored = (model.parameters.layers[i].moe for i in (0, 5))
    experts, shares = route(x, ids, hashed, model.config)
    assert hashed.tid2eid is not None and torch.equal(experts, hashed.tid2eid[ids])
    assert torch.allclose(shares.sum(-1), torch.tensor(1.5))
    bias = torch.zeros(8)
    bias[6] = 100.0
    flat = replace(scored, gate=torch.zeros(8, 64), bias=bias)
    experts, shares = route(x, ids, flat, model.config)
    assert experts.tolist() == [[6, 0]] * 20
    assert torch.allclose(shares, torch.tensor(0.75))


def test_swiglu_limit_zero_is_off(model: Transformer) -> None:
    """The clamp matters at the preset's limit, and a limit of 0 is none, not a clamp at 0."""
    x, ids = torch.randn(20, 64), torch.zeros(20, dtype=torch.int64)
    weights = model.parameters.layers[3].moe
    results = {
        limit: moe(x, ids, weights, replace(model.config, swiglu_limit=limit), False)
        for limit in (0.0, 1.5, 1e9)
    }
    assert torch.equal(results[0.0], results[1e9])
    assert float((results[0.0] - results[1.5]).abs().max()) > 0.1


def test_stream_mixes_are_doubly_stochastic(model: Transformer) -> None:
    """Columns of the mix sum to 1 within eps (normalised last), rows nearly; spread uses it."""
    x = torch.randn(9, 4, 64)
    h, post, comb = hyper.gather(x, model.parameters.layers[0].hc_attn, model.config)
    assert h.shape == (9, 64) and bool((comb > 0).all()) and bool((post > 0).all())
    assert float((comb.sum(1) - 1).abs().max()) < 1e-5
    assert float((comb.sum(2) - 1).abs().max()) < 0.05
    spread = hyper.spread(torch.zeros(9, 64), x, post, comb)
    assert torch.allclose(spread.sum(1), torch.einsum("tjk,tjd->td", comb, x), atol=1e-5)


def test_constants_reach_every_layer(model: Transformer) -> None:
    """Each layer's constants name its kind, its compressors and, last, the MTP block's."""
    kinds = [constants.kind for constants in model.constants]
    assert kinds == [0, 128, 4, 128, 4, 0, 0]
    for constants in model.constants:
        assert (constants.main is not None) == (constants.kind != 0)
        assert (constants.index is not None) == (constants.kind == 4)
        if constants.main is not None:
            assert (constants.main.entry_dim, constants.main.ratio) == (80, constants.kind)
            assert constants.main.ring_len == {4: 8, 128: 128}[constants.kind]
    assert not torch.equal(model.constants[0].inv_freq, model.constants[1].inv_freq)


def test_a_checkpoint_is_its_seed(tmp_path: Path) -> None:
    """The same preset and seed give the same bytes, another seed others."""
    made = [make_checkpoint(tmp_path / str(i), "micro", seed) for i, seed in enumerate((5, 5, 6))]
    first, again, other = ((folder / "model.safetensors").read_bytes() for folder in made)
    assert first == again != other


def test_tiny_preset(tmp_path: Path) -> None:
    """The demo's model: DeepSeek's vocabulary and context, FP8-ready rows, all layer kinds."""
    model = Transformer.load(make_checkpoint(tmp_path, "tiny"))
    config = model.config
    assert (config.vocab_size, config.max_position_embeddings) == (129280, 1 << 20)
    assert config.compress_ratios == (0, 4, 128, 4, 128)
    assert (config.head_dim - config.qk_rope_head_dim) % 64 == 0
    assert config.index_n_heads >= 16 and model.parameters.mtp is not None
    assert PRESETS["tiny"].hash_layers == sum(config.hash_layers) == 2
