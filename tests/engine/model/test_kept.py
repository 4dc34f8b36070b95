"""Weights that stay as they are stored: the same numbers, the stored bytes, the ops' layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4_tierd.engine.model.checkpoint import Preset, Storage
from dsv4_tierd.engine.model.dense import forward_dense, mtp_dense
from dsv4_tierd.engine.model.folder import WeightsError
from dsv4_tierd.engine.model.moe import moe
from dsv4_tierd.engine.model.transformer import Transformer
from dsv4_tierd.kernels.weight import Weight, WeightKind

Make = Callable[..., Path]
RAGGED = Preset(layers="SCH", hash_layers=1, hidden_size=192, moe_inter=96)
WHOLE_TILES = Preset(
    layers="SCH",
    hash_layers=1,
    hidden_size=256,
    q_lora=128,
    head_dim=128,
    o_lora=128,
    moe_inter=128,
)
SHAPES = {"ragged": RAGGED, "whole tiles": WHOLE_TILES}


def stored_as(shape: str, storage: Storage) -> Preset:
    return replace(SHAPES[shape], storage=storage)


def token_ids(count: int) -> torch.Tensor:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(9))


def weights_of(model: Transformer) -> list[Weight]:
    """The matrices of a C4 layer that are kept."""
    layer = model.parameters.layers[1]
    attention, ffn, shared = layer.attention, layer.moe.experts, layer.moe.shared
    assert attention.indexer is not None
    found = [attention.wq_a, attention.wq_b, attention.wkv, attention.wo_a, attention.wo_b]
    found += [attention.indexer.wq_b, shared.w13, shared.w2, ffn.w13, ffn.w2]
    assert all(isinstance(matrix, Weight) for matrix in found)
    return found  # type: ignore[return-value]


@torch.no_grad()
@pytest.mark.parametrize("storage", list(Storage))
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_the_dequantised_ones(checkpoint: Make, shape: str, storage: Storage) -> None:
    """Kept or dequantised at load, however stored, logits and the MTP block's are bit-equal."""
    folder, ids = checkpoint(stored_as(shape, storage)), token_ids(300)
    kept, plain = Transformer.load(folder, keep_quantised=True), Transformer.load(folder)
    logits = forward_dense(kept, ids)
    assert float(logits.std()) > 0.5
    assert torch.equal(logits, forward_dense(plain, ids))
    assert torch.equal(mtp_dense(kept, ids), mtp_dense(plain, ids))


@torch.no_grad()
@pytest.mark.parametrize("storage", list(Storage))
def test_decoding_experts_are_the_dequantised_ones(checkpoint: Make, storage: Storage) -> None:
    """Experts gathered for each token come out of kept stacks bit-equal too."""
    folder, x = checkpoint(stored_as("ragged", storage)), torch.randn(20, 192)
    answers = []
    for keep in (True, False):
        model = Transformer.load(folder, keep_quantised=keep)
        weights = model.parameters.layers[2].moe
        answers.append(moe(x, token_ids(20), weights, model.config, decode=True))
    assert torch.equal(*answers)


def test_what_is_kept_is_what_is_stored(checkpoint: Make) -> None:
    """FP8 and MXFP4 bytes and scales are the file's; experts stack gate and up as the ops want."""
    folder = checkpoint(stored_as("whole tiles", Storage.QUANTISED))
    stored = load_file(folder / "model.safetensors")
    model = Transformer.load(folder, torch.bfloat16, keep_quantised=True)
    kinds = {weight.kind for weight in weights_of(model)}
    assert kinds == {WeightKind.FP8, WeightKind.FP4}
    ffn, attention = model.parameters.layers[1].moe.experts, model.parameters.layers[1].attention
    assert ffn.w13.shape == (8, 2, 128, 256) and ffn.w2.shape == (8, 256, 128)
    assert attention.wo_a.shape == (2, 128, 256)
    for index, name in ((0, "w1"), (1, "w3")):
        prefix = f"layers.1.ffn.experts.5.{name}"
        assert torch.equal(ffn.w13.values[5, index], stored[prefix + ".weight"])
        scale = ffn.w13.scales[5, index].view(torch.uint8)
        assert torch.equal(scale, stored[prefix + ".scale"].view(torch.uint8))
    wo_a = attention.wo_a.values.flatten(0, 1).view(torch.uint8)
    assert torch.equal(wo_a, stored["layers.1.attn.wo_a.weight"].view(torch.uint8))


def test_dtypes_beside_the_kept(checkpoint: Make) -> None:
    """Embedding and head in the model's dtype, compressors and routers as stored, norms fp32."""
    folder = checkpoint(stored_as("whole tiles", Storage.QUANTISED))
    parameters = Transformer.load(folder, torch.bfloat16, keep_quantised=True).parameters
    layer = parameters.layers[1]
    compressor, indexer = layer.attention.compressor, layer.attention.indexer
    assert compressor is not None and indexer is not None
    narrow = [parameters.embed, parameters.lm_head, compressor.wkv, compressor.wgate]
    narrow += [indexer.weights_proj, indexer.compressor.wkv, layer.moe.gate]
    assert {tensor.dtype for tensor in narrow} == {torch.bfloat16}
    wide = [layer.attn_norm, layer.attention.q_norm, layer.attention.sink, layer.hc_ffn.fn]
    wide += [compressor.pool.ape, compressor.pool.norm, layer.moe.bias, parameters.head.norm]
    assert {tensor.dtype for tensor in wide} == {torch.float32}


def test_matrices_of_one_input_are_one(checkpoint: Make) -> None:
    """What reads the same input lies in one piece, of which the parts are views: no second copy."""
    folder = checkpoint(stored_as("whole tiles", Storage.QUANTISED))
    parameters = Transformer.load(folder, keep_quantised=True).parameters
    window, c4, c128 = (layer.attention for layer in parameters.layers)
    assert window.joined is not None and c4.joined is not None and c128.joined is not None
    assert c4.indexer is not None and c4.compressor is not None
    assert window.joined.small is None and window.joined.up.shape == (512, 128)
    assert c4.joined.down.shape == (256, 256) and c4.joined.up.shape == (1024, 128)
    assert c4.joined.small is not None and c128.joined.small is not None
    assert c4.joined.small.shape == (512 + 128 + 16, 256)
    assert c128.joined.small.shape == (2 * 128, 256)
    for whole, parts in (
        (c4.joined.down.values, (c4.wq_a.values, c4.wkv.values)),
        (c4.joined.down.scales, (c4.wq_a.scales, c4.wkv.scales)),
        (c4.joined.up.values, (c4.wq_b.values, c4.indexer.wq_b.values)),
        (
            c4.joined.small.values,
            (
                c4.compressor.wkv,
                c4.compressor.wgate,
                c4.indexer.compressor.wkv,
                c4.indexer.compressor.wgate,
                c4.indexer.weights_proj,
            ),
        ),
    ):
        pointers = [part.data_ptr() for part in parts]
        assert pointers[0] == whole.data_ptr() and pointers == sorted(set(pointers))
        assert sum(part.nbytes for part in parts) == whole.nbytes
        assert {part.untyped_storage().data_ptr() for part in parts} == {pointers[0]}
    ragged = checkpoint(stored_as("ragged", Storage.QUANTISED))
    for layer in Transformer.load(ragged, keep_quantised=True).parameters.layers:
        assert layer.attention.joined is None, "rows that share a tile cannot be joined"


def changed(folder: Path, to: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(load_file(folder / "model.safetensors") | tensors, to / "model.safetensors")
    (to / "config.json").write_bytes((folder / "config.json").read_bytes())
    return to


def test_scales_of_another_dtype(checkpoint: Make, tmp_path: Path) -> None:
    """Powers of two in fp32 are kept exactly; other factors are dequantised, or refused if kept."""
    folder = checkpoint(stored_as("ragged", Storage.QUANTISED))
    name = "layers.1.ffn.shared_experts.w2.scale"
    scale, ids = load_file(folder / "model.safetensors")[name].float(), token_ids(40)
    same = changed(folder, tmp_path, {name: scale})
    expected = forward_dense(Transformer.load(folder), ids)
    assert torch.equal(forward_dense(Transformer.load(same, keep_quantised=True), ids), expected)
    other = changed(folder, tmp_path, {name: scale * 1.25})
    logits = forward_dense(Transformer.load(other), ids)
    assert float((logits - expected).abs().max()) > 1e-3
    with pytest.raises(WeightsError, match=r"w2\.weight: .* no powers of two"):
        Transformer.load(other, keep_quantised=True)


def test_experts_stored_differently(checkpoint: Make, tmp_path: Path) -> None:
    """One expert in bf16 among MXFP4 ones cannot be stacked as stored; the tensor is named."""
    folder = checkpoint(stored_as("ragged", Storage.QUANTISED))
    tensors = load_file(folder / "model.safetensors")
    name = "layers.2.ffn.experts.3.w2"
    del tensors[name + ".scale"]
    tensors[name + ".weight"] = torch.ones(192, 96, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    Transformer.load(tmp_path)
    with pytest.raises(WeightsError, match=rf"tensor {name}\.weight is stored otherwise"):
        Transformer.load(tmp_path, keep_quantised=True)


def test_groups_across_tiles(checkpoint: Make) -> None:
    """Groups of wo_a that begin inside a tile of scales cannot be kept apart; said by name."""
    folder = checkpoint(Preset(layers="S", mtp=False, o_lora=96, storage=Storage.QUANTISED))
    Transformer.load(folder)
    with pytest.raises(WeightsError, match=r"layers\.0\.attn\.wo_a\.weight: groups of 96 rows"):
        Transformer.load(folder, keep_quantised=True)
