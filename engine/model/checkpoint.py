"""Make small random DeepSeek-V4 checkpoints in the official format.

Every tensor is random, also those that are usually initialised to a constant (sinks, position
biases, router biases, hash tables), so that a term left out shows in the logits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dsv4_tierd.engine.model.folder import INDEX_FILE
from dsv4_tierd.kernels.weight import E2M1, FP4_GROUP, FP8_TILE

_RATIO_OF_LETTER = {"S": 0, "C": 4, "H": 128}
_FP8 = re.compile(
    r"(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|indexer\.wq_b|shared_experts\.w[123]|[eh]_proj)\.weight$"
)
_FP4 = re.compile(r"ffn\.experts\.\d+\.w[123]\.weight$")
_FP32 = re.compile(r"(\.ape|attn_sink|hc_\w+|gate\.bias)$")


Named = tuple[str, tuple[int, ...]]


class Storage(Enum):
    """How matrices are kept: as released (FP8 blocks, MXFP4 experts), or plain."""

    FP32 = "float32"
    BF16 = "bfloat16"
    QUANTISED = "quantised"


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a checkpoint. ``layers``: S (window only), C (ratio 4), H (ratio 128) each."""

    layers: str = "SHCHCS"
    hash_layers: int = 2
    mtp: bool = True
    vocab_size: int = 512
    hidden_size: int = 64
    heads: int = 4
    head_dim: int = 80
    rope_dim: int = 16
    q_lora: int = 32
    o_groups: int = 2
    o_lora: int = 16
    window: int = 16
    index_heads: int = 16
    index_dim: int = 32
    index_topk: int = 16
    experts: int = 8
    experts_per_token: int = 2
    moe_inter: int = 64
    swiglu_limit: float = 1.5
    routed_scaling: float = 1.5
    yarn_factor: float = 16.0
    yarn_original: int = 256
    storage: Storage = Storage.BF16


PRESETS = {
    # DeepSeek's vocabulary and context length, small enough for two CPU cores.
    "tiny": Preset(
        layers="SCHCH", vocab_size=129280, window=128, index_topk=64, yarn_original=65536
    ),
    "micro": Preset(),
}


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
    for name, shape in _shapes(sizes):
        tensors |= _store(name, _random(name, shape, sizes, generator), sizes.storage)
    (folder / "config.json").write_text(json.dumps(_config(sizes), indent=2) + "\n")
    _write(folder, tensors, shards)
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


# ---------------------------------------------------------------- shapes and values
def _shapes(s: Preset) -> Iterator[Named]:
    """Official name and shape of every tensor, in a fixed order."""
    d = s.hidden_size
    yield "embed.weight", (s.vocab_size, d)
    yield "head.weight", (s.vocab_size, d)
    yield from _head_shapes("", s)
    for index, letter in enumerate(s.layers):
        yield from _block_shapes(f"layers.{index}.", letter, index < s.hash_layers, s)
    if s.mtp:
        yield from _block_shapes("mtp.0.", "S", False, s)
        yield from _head_shapes("mtp.0.", s)
        for name in ("e_proj", "h_proj"):
            yield f"mtp.0.{name}.weight", (d, d)
        for name in ("enorm", "hnorm"):
            yield f"mtp.0.{name}.weight", (d,)


def _head_shapes(p: str, s: Preset) -> Iterator[Named]:
    yield p + "norm.weight", (s.hidden_size,)
    yield p + "hc_head_fn", (4, 4 * s.hidden_size)
    yield p + "hc_head_base", (4,)
    yield p + "hc_head_scale", (1,)


def _block_shapes(p: str, letter: str, hashed: bool, s: Preset) -> Iterator[Named]:
    d = s.hidden_size
    for part in ("attn", "ffn"):
        yield f"{p}{part}_norm.weight", (d,)
        yield f"{p}hc_{part}_fn", (24, 4 * d)
        yield f"{p}hc_{part}_base", (24,)
        yield f"{p}hc_{part}_scale", (3,)
    yield p + "attn.attn_sink", (s.heads,)
    yield p + "attn.wq_a.weight", (s.q_lora, d)
    yield p + "attn.q_norm.weight", (s.q_lora,)
    yield p + "attn.wq_b.weight", (s.heads * s.head_dim, s.q_lora)
    yield p + "attn.wkv.weight", (s.head_dim, d)
    yield p + "attn.kv_norm.weight", (s.head_dim,)
    yield p + "attn.wo_a.weight", (s.o_groups * s.o_lora, s.heads * s.head_dim // s.o_groups)
    yield p + "attn.wo_b.weight", (d, s.o_groups * s.o_lora)
    if letter != "S":
        ratio = _RATIO_OF_LETTER[letter]
        yield from _compressor_shapes(p + "attn.compressor.", ratio, s.head_dim, d)
    if letter == "C":
        yield p + "attn.indexer.wq_b.weight", (s.index_heads * s.index_dim, s.q_lora)
        yield p + "attn.indexer.weights_proj.weight", (s.index_heads, d)
        yield from _compressor_shapes(p + "attn.indexer.compressor.", 4, s.index_dim, d)
    yield p + "ffn.gate.weight", (s.experts, d)
    if hashed:
        yield p + "ffn.gate.tid2eid", (s.vocab_size, s.experts_per_token)
    else:
        yield p + "ffn.gate.bias", (s.experts,)
    for expert in ("shared_experts", *(f"experts.{i}" for i in range(s.experts))):
        yield f"{p}ffn.{expert}.w1.weight", (s.moe_inter, d)
        yield f"{p}ffn.{expert}.w2.weight", (d, s.moe_inter)
        yield f"{p}ffn.{expert}.w3.weight", (s.moe_inter, d)


def _compressor_shapes(p: str, ratio: int, dim: int, d: int) -> Iterator[Named]:
    width = 2 * dim if ratio == 4 else dim
    yield p + "wkv.weight", (width, d)
    yield p + "wgate.weight", (width, d)
    yield p + "ape", (ratio, width)
    yield p + "norm.weight", (dim,)


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
    if not values.is_floating_point() or storage is Storage.FP32 or _FP32.search(name):
        return {name: values}
    if storage is Storage.QUANTISED and _FP8.search(name):
        data, scale = quantise_fp8(values)
        return {name: data, name.removesuffix("weight") + "scale": scale}
    if storage is Storage.QUANTISED and _FP4.search(name):
        data, scale = quantise_fp4(values)
        return {name: data, name.removesuffix("weight") + "scale": scale}
    return {name: values.bfloat16()}


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


def _config(s: Preset) -> dict[str, Any]:
    """config.json as DeepSeek ships it."""
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden_size,
        "index_head_dim": s.index_dim,
        "index_n_heads": s.index_heads,
        "index_topk": s.index_topk,
        "max_position_embeddings": int(s.yarn_original * s.yarn_factor),
        "moe_intermediate_size": s.moe_inter,
        "n_routed_experts": s.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": s.heads,
        "num_experts_per_tok": s.experts_per_token,
        "num_hidden_layers": len(s.layers),
        "num_hash_layers": s.hash_layers,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": int(s.mtp),
        "o_groups": s.o_groups,
        "o_lora_rank": s.o_lora,
        "q_lora_rank": s.q_lora,
        "qk_rope_head_dim": s.rope_dim,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "type": "yarn",
            "factor": s.yarn_factor,
            "original_max_position_embeddings": s.yarn_original,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "compress_ratios": [_RATIO_OF_LETTER[letter] for letter in s.layers] + [0] * int(s.mtp),
        "routed_scaling_factor": s.routed_scaling,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": s.window,
        "swiglu_limit": s.swiglu_limit,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "float32" if s.storage is Storage.FP32 else "bfloat16",
        "vocab_size": s.vocab_size,
    }
    if s.storage is Storage.QUANTISED:
        config["expert_dtype"] = "fp4"
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [FP8_TILE, FP8_TILE],
        }
    return config
