"""Sizes of models that are made here: small ones for files, a large one straight on the device.

``preset:NAME`` in place of a folder names the latter. No torch: the daemon reads it too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import parse_qsl

PREFIX = "preset:"
RATIO_OF_LETTER = {"S": 0, "C": 4, "H": 128}


class PresetError(ValueError):
    """A ``preset:`` that does not exist, or sizes that it cannot have; the message names it."""


class Storage(Enum):
    """How matrices are kept: as released (FP8 blocks, with MXFP4 or FP8 experts), or plain."""

    FP32 = "float32"
    BF16 = "bfloat16"
    FP8 = "fp8"
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

# DeepSeek-V4-Flash in every layer, but for its number of routed experts (256).
SEEDED = {
    "flash-mini": Preset(
        layers="SS" + "CH" * 20 + "C",
        hash_layers=3,
        vocab_size=129280,
        hidden_size=4096,
        heads=64,
        head_dim=512,
        rope_dim=64,
        q_lora=1024,
        o_groups=8,
        o_lora=1024,
        window=128,
        index_heads=64,
        index_dim=128,
        index_topk=512,
        experts=16,
        experts_per_token=6,
        moe_inter=2048,
        swiglu_limit=10.0,
        routed_scaling=1.5,
        yarn_original=65536,
        storage=Storage.FP8,
    )
}


@dataclass(frozen=True, slots=True)
class SeededModel:
    """A model that is made of a seed when it is loaded."""

    name: str
    preset: Preset
    seed: int


def parse_preset(model: str | Path) -> SeededModel | None:
    """What ``preset:NAME`` or ``preset:NAME?layers=SCH&experts=4&seed=1`` names.

    Keys are the fields of Preset, and ``seed``. None: the model is a folder. Raises PresetError.
    """
    text = str(model)
    if not text.startswith(PREFIX):
        return None
    name, _, query = text.removeprefix(PREFIX).partition("?")
    if name not in SEEDED:
        raise PresetError(f"{PREFIX}{name} does not exist; there is {PREFIX}{', '.join(SEEDED)}")
    changes: dict[str, Any] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in _KINDS:
            raise PresetError(f"{text}: {key} is none of {', '.join(_KINDS)}")
        changes[key] = _convert(key, value, text)
    seed = changes.pop("seed", 0)
    preset = replace(SEEDED[name], **changes)
    if not preset.layers or set(preset.layers) - RATIO_OF_LETTER.keys():
        raise PresetError(f"{text}: layers are letters of {''.join(RATIO_OF_LETTER)}")
    return SeededModel(name, preset, seed)


def model_name(model: str | Path) -> str:
    """What a model is called where nobody named it: the preset's name, or the folder's."""
    seeded = parse_preset(model)
    return Path(model).resolve().name if seeded is None else seeded.name


def describe(seeded: SeededModel) -> dict[str, Any]:
    """All that the weights depend on, as JSON's types."""
    sizes = asdict(seeded.preset) | {"storage": seeded.preset.storage.value}
    return {"preset": sizes, "seed": seeded.seed}


_KINDS: dict[str, type] = {
    **{field.name: get_type_hints(Preset)[field.name] for field in fields(Preset)},
    "seed": int,
}


def _convert(key: str, value: str, text: str) -> Any:
    kind = _KINDS[key]
    try:
        if kind is bool:
            return {"true": True, "false": False}[value.lower()]
        converted = kind(value)
    except (KeyError, ValueError):
        raise PresetError(f"{text}: {key} cannot be {value!r}") from None
    if kind in (int, float) and not 0 <= converted < 1 << 40:
        raise PresetError(f"{text}: {key} cannot be {value!r}")
    return converted


def config_json(s: Preset) -> dict[str, Any]:
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
        "compress_ratios": [RATIO_OF_LETTER[letter] for letter in s.layers] + [0] * int(s.mtp),
        "routed_scaling_factor": s.routed_scaling,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": s.window,
        "swiglu_limit": s.swiglu_limit,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "float32" if s.storage is Storage.FP32 else "bfloat16",
        "vocab_size": s.vocab_size,
    }
    if s.storage in (Storage.FP8, Storage.QUANTISED):
        config["expert_dtype"] = "fp4" if s.storage is Storage.QUANTISED else "fp8"
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        }
    return config
