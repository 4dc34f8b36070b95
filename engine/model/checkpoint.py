"""Make small random DeepSeek-V4 checkpoints in the official format.

Every tensor is random, also those that are usually initialised to a constant (sinks, position
biases, router biases, hash tables), so that a term left out shows in the logits.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4_tierd.engine.model.folder import INDEX_FILE
from dsv4_tierd.engine.model.presets import PRESETS, Preset, Storage, config_json
from dsv4_tierd.engine.model.shapes import Stored, shapes, stored_in
from dsv4_tierd.kernels.weight import E2M1, FP4_GROUP, FP8_TILE


def make_checkpoint(
    folder: str | Path, preset: str | Preset = "tiny", seed: int = 0, shards: int = 1
) -> Path:
    """Write config.json and safetensors files. The same arguments give the same bytes.

    preset: a name of PRESETS or sizes; shards: files to spread the tensors over, with an index
    if more than one. Returns the folder, made if need be.
    """
    sizes = PRESETS[preset] if isinstance(preset, str) else preset
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes(sizes):
        tensors |= _store(name, _random(name, shape, sizes, generator), sizes.storage)
    (folder / "config.json").write_text(json.dumps(config_json(sizes), indent=2) + "\n")
    _write(folder, tensors, shards)
    mode = (folder / "config.json").stat().st_mode  # safetensors writes for the owner alone
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)
    return folder


def _write(folder: Path, tensors: dict[str, Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _random(name: str, shape: tuple[int, ...], s: Preset, generator: torch.Generator) -> Tensor:
    """Values that exercise every term; logits come out with a deviation of about 1.5."""
    if name.endswith("tid2eid"):
        ranks = torch.rand(shape[0], s.experts, generator=generator)
        return ranks.argsort(1)[:, : s.experts_per_token].contiguous()
    values = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * values
    if name.endswith("_scale"):
        return 1 + 0.3 * values
    if name.endswith((".ape", "_base")):
        return 0.7 * values
    if name.endswith("gate.bias"):
        return 0.2 * values
    if name.endswith("attn_sink") or name == "embed.weight":
        return values
    gain = 1.0 if name.endswith("_fn") else 1.5
    return values * (gain / math.sqrt(shape[-1]))


# ---------------------------------------------------------------- storage
def _store(name: str, values: Tensor, storage: Storage) -> dict[str, Tensor]:
    stored = stored_in(name, storage)
    if stored in (Stored.INTEGERS, Stored.FP32):
        return {name: values}
    if stored is Stored.BF16:
        return {name: values.bfloat16()}
    data, scale = (quantise_fp8 if stored is Stored.FP8 else quantise_fp4)(values)
    return {name: data, name.removesuffix("weight") + "scale": scale}


def quantise_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] fp32 to e4m3 and its ue8m0 scales, one for a tile of 128 x 128."""
    rows, columns = values.shape
    padding = (0, -columns % FP8_TILE, 0, -rows % FP8_TILE)
    padded = torch.nn.functional.pad(values, padding)
    tiles = padded.view(padded.shape[0] // FP8_TILE, FP8_TILE, -1, FP8_TILE)
    scale = _power_of_two(tiles.abs().amax((1, 3)) / 448)
    data = (tiles / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return data.to(torch.float8_e4m3fn), scale.to(torch.float8_e8m0fnu)


def quantise_fp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] fp32 to packed e2m1 [out, in/2] int8 and ue8m0 scales [out, in/32]."""
    groups = values.view(values.shape[0], -1, FP4_GROUP)
    scale = _power_of_two(groups.abs().amax(-1) / E2M1[-1])
    scaled = (groups / scale.unsqueeze(-1)).flatten(1)
    levels = torch.tensor(E2M1)
    codes = torch.bucketize(scaled.abs(), (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
    codes |= (scaled < 0).to(torch.uint8) << 3
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed.view(torch.int8), scale.to(torch.float8_e8m0fnu)


def _power_of_two(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x (nor below 2**-126)."""
    return torch.exp2(torch.ceil(torch.log2(x.clamp_min(2.0**-126))))
