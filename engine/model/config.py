"""The model's configuration, read from either dialect of config.json.

DeepSeek's own files are flat (``compress_ratios``, ``num_hash_layers``, ``rope_scaling``);
transformers' save_pretrained writes ``layer_types``, ``mlp_layer_types`` and a nested
``rope_parameters``. Both give the same frozen value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsv4_tierd.engine.model.presets import config_json, parse_preset

WINDOW_ONLY, C4, C128 = 0, 4, 128

_RATIO_OF_TYPE = {
    "sliding_attention": WINDOW_ONLY,
    "compressed_sparse_attention": C4,
    "heavily_compressed_attention": C128,
}
_ONLY_SUPPORTED = {
    "model_type": "deepseek_v4",
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


class ConfigError(ValueError):
    """A config.json that this model cannot follow; the message names the key."""


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN of the compressed layers' rotary table."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """DeepSeek-V4's numbers, by their official names.

    ``compress_ratios``: 0, 4 or 128 for each hidden layer (MTP not included). ``hash_layers``:
    whether each layer's experts come from the token id. ``swiglu_limit`` 0 is off.
    """

    vocab_size: int
    hidden_size: int
    compress_ratios: tuple[int, ...]
    hash_layers: tuple[bool, ...]
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    num_nextn_predict_layers: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_hidden_layers(self) -> int:
        return len(self.compress_ratios)

    @property
    def c4_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with an indexer, in order."""
        return tuple(i for i, ratio in enumerate(self.compress_ratios) if ratio == C4)

    @property
    def c128_layers(self) -> tuple[int, ...]:
        return tuple(i for i, ratio in enumerate(self.compress_ratios) if ratio == C128)


def load_config(model: str | Path) -> ModelConfig:
    """The config.json of a folder, or a preset's (``presets.parse_preset``).

    Raises ConfigError, which names the file or the key, and PresetError.
    """
    if (seeded := parse_preset(model)) is not None:
        return parse_config(config_json(seeded.preset))
    path = Path(model) / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """A config.json's object, of either dialect. Raises ConfigError naming the key."""
    for key, only in _ONLY_SUPPORTED.items():
        if raw.get(key, only) != only:
            raise ConfigError(f"{key} is {raw[key]!r}; only {only!r} is supported")
    layer_count = _int(raw, "num_hidden_layers")
    rope_theta, compress_rope_theta, yarn = _rope(raw)
    eos = raw.get("eos_token_id")
    config = ModelConfig(
        vocab_size=_int(raw, "vocab_size"),
        hidden_size=_int(raw, "hidden_size"),
        compress_ratios=_ratios(raw, layer_count),
        hash_layers=_hash_layers(raw, layer_count),
        num_attention_heads=_int(raw, "num_attention_heads"),
        head_dim=_int(raw, "head_dim"),
        qk_rope_head_dim=_rope_dim(raw),
        q_lora_rank=_int(raw, "q_lora_rank"),
        o_groups=_int(raw, "o_groups"),
        o_lora_rank=_int(raw, "o_lora_rank"),
        sliding_window=_int(raw, "sliding_window"),
        index_n_heads=_int(raw, "index_n_heads"),
        index_head_dim=_int(raw, "index_head_dim"),
        index_topk=_int(raw, "index_topk"),
        rope_theta=rope_theta,
        compress_rope_theta=compress_rope_theta,
        yarn=yarn,
        max_position_embeddings=_int(raw, "max_position_embeddings"),
        hc_mult=_int(raw, "hc_mult"),
        hc_sinkhorn_iters=_int(raw, "hc_sinkhorn_iters"),
        hc_eps=_float(raw, "hc_eps"),
        rms_norm_eps=_float(raw, "rms_norm_eps", 1e-6),
        n_routed_experts=_int(raw, "n_routed_experts"),
        num_experts_per_tok=_int(raw, "num_experts_per_tok"),
        moe_intermediate_size=_int(raw, "moe_intermediate_size"),
        routed_scaling_factor=_float(raw, "routed_scaling_factor"),
        swiglu_limit=_float(raw, "swiglu_limit", 0.0),
        num_nextn_predict_layers=_mtp_layers(raw, layer_count),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
    )
    _check(config)
    return config


def _ratios(raw: Mapping[str, Any], layer_count: int) -> tuple[int, ...]:
    if raw.get("compress_ratios") is not None:
        key, ratios = "compress_ratios", list(raw["compress_ratios"])
    elif raw.get("layer_types") is not None:
        key = "layer_types"
        unknown = [name for name in raw[key] if name not in _RATIO_OF_TYPE]
        if unknown:
            raise ConfigError(f"layer_types has {unknown[0]!r}; known are {sorted(_RATIO_OF_TYPE)}")
        ratios = [_RATIO_OF_TYPE[name] for name in raw[key]]
        for name, rate in (raw.get("compress_rates") or {}).items():
            if _RATIO_OF_TYPE.get(name) != rate:
                raise ConfigError(f"compress_rates: {name} {rate} is not supported")
    else:
        raise ConfigError("neither compress_ratios nor layer_types is given")
    if len(ratios) < layer_count:
        raise ConfigError(f"{key} has {len(ratios)} layers, num_hidden_layers is {layer_count}")
    if bad := [r for r in ratios if r not in (WINDOW_ONLY, C4, C128)]:
        raise ConfigError(f"{key} has ratio {bad[0]!r}; supported are 0, 4 and 128")
    return tuple(ratios[:layer_count])


def _hash_layers(raw: Mapping[str, Any], layer_count: int) -> tuple[bool, ...]:
    if raw.get("num_hash_layers") is not None:
        hashed = _int(raw, "num_hash_layers", minimum=0)
        return tuple(i < hashed for i in range(layer_count))
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        raise ConfigError("neither num_hash_layers nor mlp_layer_types is given")
    if bad := [kind for kind in kinds if kind not in ("hash_moe", "moe")]:
        raise ConfigError(f"mlp_layer_types has {bad[0]!r}; known are hash_moe and moe")
    if len(kinds) < layer_count:
        raise ConfigError(f"mlp_layer_types has {len(kinds)} layers, expected {layer_count}")
    return tuple(kind == "hash_moe" for kind in kinds[:layer_count])


def _rope_dim(raw: Mapping[str, Any]) -> int:
    if raw.get("qk_rope_head_dim") is not None:
        return _int(raw, "qk_rope_head_dim")
    nested = (raw.get("rope_parameters") or {}).get("main") or {}
    factor = raw.get("partial_rotary_factor", nested.get("partial_rotary_factor"))
    if factor is None:
        raise ConfigError("neither qk_rope_head_dim nor partial_rotary_factor is given")
    return int(_int(raw, "head_dim") * factor)


def _rope(raw: Mapping[str, Any]) -> tuple[float, float, Yarn | None]:
    """(theta of window-only layers, theta of compressed layers, their YaRN)."""
    nested = raw.get("rope_parameters") or {}
    if "main" in nested and "compress" in nested:
        main, compress = nested["main"], nested["compress"]
        theta = _float(main, "rope_theta")
        compress_theta = _float(compress, "rope_theta")
        if main.get("rope_type", "default") != "default":
            raise ConfigError(f"rope_parameters.main: rope_type {main['rope_type']!r}")
    else:
        compress = raw.get("rope_scaling") or nested
        theta, compress_theta = _float(raw, "rope_theta"), _float(raw, "compress_rope_theta")
    kind = compress.get("rope_type", compress.get("type", "default"))
    if kind == "default":
        return theta, compress_theta, None
    if kind != "yarn":
        raise ConfigError(f"rope_scaling: type {kind!r} is not supported, only 'yarn' is")
    yarn = Yarn(
        factor=_float(compress, "factor"),
        original_max_position_embeddings=_int(compress, "original_max_position_embeddings"),
        beta_fast=_float(compress, "beta_fast", 32.0),
        beta_slow=_float(compress, "beta_slow", 1.0),
    )
    return theta, compress_theta, yarn


def _mtp_layers(raw: Mapping[str, Any], layer_count: int) -> int:
    count = _int(raw, "num_nextn_predict_layers", minimum=0, default=0)
    if count > 1:
        raise ConfigError(f"num_nextn_predict_layers is {count}; at most 1 is supported")
    trailing = (raw.get("compress_ratios") or ())[layer_count:]
    if any(ratio != WINDOW_ONLY for ratio in trailing):
        raise ConfigError(f"compress_ratios: MTP has ratio {trailing[0]}; only 0 is supported")
    return count


def _check(config: ModelConfig) -> None:
    """Numbers that must fit one another."""
    rope_dim = config.qk_rope_head_dim
    if rope_dim % 2 or rope_dim > config.head_dim:
        raise ConfigError(f"qk_rope_head_dim {rope_dim} must be even and at most head_dim")
    if config.c4_layers and config.index_head_dim < config.qk_rope_head_dim:
        raise ConfigError(f"index_head_dim {config.index_head_dim} is below qk_rope_head_dim")
    if config.num_attention_heads % config.o_groups:
        raise ConfigError(f"o_groups {config.o_groups} does not divide num_attention_heads")
    if config.num_experts_per_tok > config.n_routed_experts:
        raise ConfigError(f"num_experts_per_tok exceeds n_routed_experts {config.n_routed_experts}")


def _int(raw: Mapping[str, Any], key: str, default: int | None = None, minimum: int = 1) -> int:
    value = raw.get(key, default)
    if value is None:
        raise ConfigError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{key} is {value!r}; expected an integer of at least {minimum}")
    return value


def _float(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key, default)
    if value is None:
        raise ConfigError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ConfigError(f"{key} is {value!r}; expected a number of at least 0")
    return float(value)
