"""Checkpoints that are whole, and every way in which one can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4_tierd.engine.model.checkpoint import Preset, Storage, make_checkpoint
from dsv4_tierd.engine.model.dense import forward_dense
from dsv4_tierd.engine.model.folder import INDEX_FILE, WeightsError
from dsv4_tierd.engine.model.transformer import Transformer

Make = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
PRESET = Preset(layers="SCH", hash_layers=1)


@pytest.fixture
def broken(checkpoint: Make, tmp_path: Path) -> Callable[..., Path]:
    """Copy a checkpoint, with its tensors changed by a function."""

    def copy(change: Callable[[Tensors], None], preset: Preset = PRESET) -> Path:
        tensors = load_file(checkpoint(preset) / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        shutil.copy(checkpoint(preset) / "config.json", tmp_path)
        return tmp_path

    return copy


NAMES = [
    "embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.1.attn.attn_sink",
    "layers.1.attn.indexer.compressor.ape", "layers.2.attn.compressor.norm.weight",
    "layers.0.ffn.gate.tid2eid", "layers.1.ffn.gate.bias", "layers.2.ffn.experts.7.w2.weight",
    "layers.2.hc_ffn_scale", "mtp.0.e_proj.weight", "mtp.0.hc_head_base",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(broken: Callable[..., Path], name: str) -> None:
    """Each kind of tensor is needed."""
    folder = broken(lambda tensors: tensors.pop(name))
    with pytest.raises(WeightsError, match=f"tensor {name} is missing"):
        Transformer.load(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_misshapen_tensor_is_named(broken: Callable[..., Path], name: str) -> None:
    """One row too many is an error with both shapes, also where broadcasting would hide it."""
    folder = broken(lambda t: t.update({name: torch.cat([t[name], t[name][:1]])}))
    with pytest.raises(WeightsError, match=rf"tensor {name} has shape \[.*\], expected \["):
        Transformer.load(folder)


@pytest.mark.parametrize(
    "name", ["layers.0.attn.compressor.ape", "layers.3.x", "mtp.1.norm.weight"]
)
def test_an_extra_tensor_is_named(broken: Callable[..., Path], name: str) -> None:
    """A tensor that the model does not use means that the checkpoint is another model's."""
    folder = broken(lambda tensors: tensors.update({name: torch.ones(3)}))
    with pytest.raises(WeightsError, match=f"tensor {name} is not part of this model"):
        Transformer.load(folder)


def test_copies_beside_the_mtp_block_are_ignored(broken: Callable[..., Path]) -> None:
    """The base models' second embedding and head are known and superfluous."""
    copies = {"mtp.0.emb.tok_emb.weight": torch.ones(2), "mtp.0.head.weight": torch.ones(2)}
    Transformer.load(broken(lambda tensors: tensors.update(copies)))


def test_a_tensor_under_two_names(broken: Callable[..., Path]) -> None:
    """Official and transformers' spelling of one tensor cannot both be there."""
    folder = broken(lambda t: t.update({"model.embed_tokens.weight": t["embed.weight"].clone()}))
    with pytest.raises(WeightsError, match=r"tensor embed\.weight is there twice"):
        Transformer.load(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("norm.weight", torch.ones(64, dtype=torch.int32), "is stored as"),
        ("layers.0.ffn.gate.tid2eid", torch.ones(512, 2), "is stored as"),
        ("layers.0.ffn.gate.tid2eid", torch.full((512, 2), 8), "names an expert outside"),
        ("layers.0.ffn.gate.tid2eid", torch.full((512, 2), -1), "names an expert outside"),
    ],
)
def test_wrong_kinds_of_numbers(
    broken: Callable[..., Path], name: str, tensor: torch.Tensor, message: str
) -> None:
    """Integers for a norm, floats for a table of ids, ids of experts that do not exist."""
    folder = broken(lambda tensors: tensors.update({name: tensor}))
    with pytest.raises(WeightsError, match=f"tensor {name} {message}"):
        Transformer.load(folder)


QUANTISED = Preset(layers="SCH", hash_layers=1, storage=Storage.QUANTISED)


@pytest.mark.parametrize("name", ["layers.1.attn.wq_b", "layers.1.ffn.experts.3.w1"])
def test_quantised_tensors_need_their_scale(broken: Callable[..., Path], name: str) -> None:
    """FP8 and MXFP4 without a scale, or with one of another shape, are errors naming the tensor."""
    folder = broken(lambda tensors: tensors.pop(name + ".scale"), QUANTISED)
    with pytest.raises(WeightsError, match=rf"tensor {name}\.weight: .* lacks a \.scale"):
        Transformer.load(folder)
    wide = {name + ".scale": torch.ones(7, 7)}
    folder = broken(lambda tensors: tensors.update(wide), QUANTISED)
    with pytest.raises(WeightsError, match=rf"tensor {name}\.weight: its \.scale has shape"):
        Transformer.load(folder)


def test_plain_tensors_have_no_scale(broken: Callable[..., Path]) -> None:
    """A scale beside a bf16 tensor means that one of them is another format's."""
    folder = broken(lambda tensors: tensors.update({"layers.1.attn_norm.scale": torch.ones(1)}))
    with pytest.raises(WeightsError, match=r"attn_norm\.weight: .* has a \.scale"):
        Transformer.load(folder)


def test_shards_are_one_checkpoint(tmp_path: Path, checkpoint: Make) -> None:
    """Spread over files with an index, the model is the same; a lost shard is named."""
    folder = make_checkpoint(tmp_path, PRESET, 0, shards=3)
    ids = torch.arange(200)
    whole = forward_dense(Transformer.load(checkpoint(PRESET, 0)), ids)
    assert torch.equal(forward_dense(Transformer.load(folder), ids), whole)
    (folder / "stray.safetensors").write_bytes(b"not in the index")
    Transformer.load(folder)
    lost = folder / "model-00002-of-00003.safetensors"
    lost.unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00003\.safetensors is in the index"):
        Transformer.load(folder)


def test_files_that_are_no_weights(tmp_path: Path, checkpoint: Make) -> None:
    """No file, a file cut short, an index that is none: each is named."""
    shutil.copy(checkpoint(PRESET) / "config.json", tmp_path)
    with pytest.raises(WeightsError, match=r"holds no \.safetensors file"):
        Transformer.load(tmp_path)
    whole = (checkpoint(PRESET) / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read"):
        Transformer.load(tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weights": {}}))
    with pytest.raises(WeightsError, match="is not an index of tensors"):
        Transformer.load(tmp_path)


def test_dtypes(checkpoint: Make) -> None:
    """bfloat16 keeps matrices in bf16 and the definitions' fp32 parts in fp32."""
    model = Transformer.load(checkpoint(PRESET), dtype=torch.bfloat16)
    layer = model.parameters.layers[1]
    assert layer.attention.wq_b.dtype is layer.moe.experts.w1.dtype is torch.bfloat16
    assert layer.attention.compressor is not None
    for tensor in (
        layer.attn_norm,
        layer.hc_attn.fn,
        layer.moe.gate,
        layer.attention.sink,
        layer.attention.compressor.wkv,
        layer.attention.compressor.pool.ape,
    ):
        assert tensor.dtype is torch.float32
    ids = torch.arange(130)
    rounded, exact = (
        forward_dense(model, ids),
        forward_dense(Transformer.load(checkpoint(PRESET)), ids),
    )
    assert rounded.dtype is torch.float32
    assert 1e-3 < float((rounded - exact).abs().mean()) < 0.2
