"""Logits against transformers' DeepseekV4ForCausalLM: float32, one shot, 1,000 tokens.

Tolerance 1e-3 on every logit (deviation 1.5), as the project promises. A near tie in a top-k
may legitimately be decided differently; the seeds here have none (margins of at least 1e-6).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_reference
from dsv4_tierd.engine.model.checkpoint import Preset, Storage
from dsv4_tierd.engine.model.dense import forward_dense
from dsv4_tierd.engine.model.transformer import Transformer

TOLERANCE = 1e-3
Make = Callable[..., Path]


def token_ids(seed: int, count: int = 1000) -> torch.Tensor:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("window", [16, 128])
@pytest.mark.parametrize("layers", ["SCH", "HCS", "CSHCSH", "SHCHCS"])
def test_logits_equal(checkpoint: Make, layers: str, window: int) -> None:
    """Any order of layer kinds and either window gives transformers' logits."""
    folder = checkpoint(Preset(layers=layers, window=window), 1)
    ids = token_ids(1)
    ours = forward_dense(Transformer.load(folder), ids)
    theirs = hf_reference.hf_logits(folder, ids)
    assert 1.0 < float(ours.std()) < 2.0
    assert float((ours - theirs).abs().max()) <= TOLERANCE


def test_what_save_pretrained_writes(checkpoint: Make, tmp_path: Path) -> None:
    """A folder in transformers' dialect, names and config, is the same model, bit for bit."""
    folder = checkpoint(Preset(), 1)
    hf_reference.hf_model(folder).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "layer_types" in written and "compress_ratios" not in written
    official, other = Transformer.load(folder), Transformer.load(tmp_path)
    assert other.parameters.mtp is None and official.parameters.mtp is not None
    ids = token_ids(2, 300)
    assert torch.equal(forward_dense(other, ids), forward_dense(official, ids))


def test_quantised_storage(checkpoint: Make, tmp_path: Path) -> None:
    """FP8 blocks and MXFP4 experts mean the numbers that an independent reader gets from them."""
    folder = checkpoint(Preset(storage=Storage.QUANTISED, hidden_size=192, moe_inter=96), 1)
    stored = load_file(folder / "model.safetensors")
    kinds = {tensor.dtype for tensor in stored.values()}
    assert {torch.float8_e4m3fn, torch.int8, torch.float8_e8m0fnu} <= kinds
    save_file(plain(stored), tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"], config["expert_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = token_ids(1)
    ours = forward_dense(Transformer.load(folder), ids)
    assert torch.equal(ours, forward_dense(Transformer.load(tmp_path), ids))
    assert float((ours - hf_reference.hf_logits(tmp_path, ids)).abs().max()) <= TOLERANCE


def plain(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantised tensors as float32, element by element from their bytes."""
    found = {}
    for name, tensor in stored.items():
        if name.endswith(".scale"):
            continue
        scale = stored.get(name.removesuffix("weight") + "scale")
        if scale is None:
            found[name] = tensor
            continue
        factors = np.exp2(scale.view(torch.uint8).numpy().astype(np.float64) - 127)
        data = tensor.view(torch.uint8).numpy().astype(np.int64)
        values = from_e2m1(data) if tensor.dtype is torch.int8 else from_e4m3(data)
        tile = (1, 32) if tensor.dtype is torch.int8 else (128, 128)
        row, column = np.indices(values.shape)
        values = values * factors[row // tile[0], column // tile[1]]
        found[name] = torch.from_numpy(values.astype(np.float32))
    return found


def from_e4m3(data: np.ndarray) -> np.ndarray:
    exponent, mantissa = (data >> 3) & 15, data & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    return np.where(data >> 7 == 1, -size, size)


def from_e2m1(data: np.ndarray) -> np.ndarray:
    columns = []
    for byte in data.T:
        for code in (byte & 15, byte >> 4):
            exponent, mantissa = (code >> 1) & 3, code & 1
            size = np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
            columns.append(np.where(code >> 3 == 1, -size, size))
    return np.stack(columns, 1)
