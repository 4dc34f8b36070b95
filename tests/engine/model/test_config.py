"""Both dialects of config.json, and errors that name the key."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4_tierd.engine.model.checkpoint import Preset
from dsv4_tierd.engine.model.config import ConfigError, Yarn, load_config, parse_config

Make = Callable[..., Path]


@pytest.fixture
def official(checkpoint: Make) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint(Preset()) / "config.json").read_text())
    return found


def test_both_dialects_agree(official: dict[str, Any]) -> None:
    """transformers' rendering of an official config parses to the same value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import DeepseekV4Config

        nested = DeepseekV4Config.from_dict(dict(official)).to_dict()
    assert "compress_ratios" not in nested and "main" in nested["rope_parameters"]
    assert parse_config(nested) == parse_config(official)


def test_the_released_flash_config() -> None:
    """DeepSeek-V4-Flash's own numbers: 43 layers, of which 21 have an indexer."""
    flash: dict[str, Any] = {
        "model_type": "deepseek_v4", "num_hidden_layers": 43, "hidden_size": 4096,
        "vocab_size": 129280, "num_attention_heads": 64, "num_key_value_heads": 1,
        "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8,
        "o_lora_rank": 1024, "sliding_window": 128,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "index_n_heads": 64,
        "index_head_dim": 128, "index_topk": 512, "rope_theta": 10000,
        "compress_rope_theta": 160000, "max_position_embeddings": 1048576, "hc_mult": 4,
        "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "n_routed_experts": 256,
        "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
        "norm_topk_prob": True, "num_hash_layers": 3, "swiglu_limit": 10.0,
        "num_nextn_predict_layers": 1, "bos_token_id": 0, "eos_token_id": 1,
        "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                         "original_max_position_embeddings": 65536},
    }  # fmt: skip
    config = parse_config(flash)
    assert (len(config.c4_layers), len(config.c128_layers)) == (21, 20)
    assert config.c4_layers[:2] == (2, 4) and config.c4_layers[-1] == 42
    assert config.hash_layers == (True,) * 3 + (False,) * 40
    assert config.yarn == Yarn(16.0, 65536, 32.0, 1.0)
    assert config.eos_token_ids == (1,)


REQUIRED = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
    "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window", "index_n_heads",
    "index_head_dim", "index_topk", "rope_theta", "compress_rope_theta",
    "max_position_embeddings", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "n_routed_experts",
    "num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor",
    "compress_ratios", "num_hash_layers", "qk_rope_head_dim",
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(official: dict[str, Any], key: str) -> None:
    """Nothing structural has a silent default."""
    del official[key]
    with pytest.raises(ConfigError, match=key):
        parse_config(official)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "deepseek_v3"),
        ("scoring_func", "sigmoid"),
        ("tie_word_embeddings", True),
        ("n_shared_experts", 2),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("hidden_size", 0),
        ("rms_norm_eps", -1.0),
        ("hc_eps", float("nan")),
        ("compress_ratios", [0, 4, 2, 4, 128, 0]),
        ("compress_ratios", [0, 4]),
        ("compress_ratios", [0, 128, 4, 128, 4, 0, 4]),
        ("num_nextn_predict_layers", 3),
        ("rope_scaling", {"type": "linear", "factor": 2}),
        ("qk_rope_head_dim", 15),
        ("o_groups", 3),
        ("num_experts_per_tok", 9),
        ("num_hash_layers", -1),
    ],
)
def test_an_unsupported_value_is_named(official: dict[str, Any], key: str, value: Any) -> None:
    """What this model cannot follow is refused, never approximated."""
    official[key] = value
    with pytest.raises(ConfigError, match=key):
        parse_config(official)


def test_unsupported_layer_types_are_named(official: dict[str, Any]) -> None:
    """Unknown names in transformers' lists, and other compression rates, are refused."""
    del official["compress_ratios"]
    good = ["sliding_attention", "compressed_sparse_attention"] * 3
    with pytest.raises(ConfigError, match=r"layer_types has 'full_attention'"):
        parse_config(official | {"layer_types": ["full_attention"] * 6})
    rates = {"compressed_sparse_attention": 8}
    with pytest.raises(ConfigError, match="compress_rates"):
        parse_config(official | {"layer_types": good, "compress_rates": rates})
    del official["num_hash_layers"]
    with pytest.raises(ConfigError, match=r"mlp_layer_types has 'dense'"):
        parse_config(official | {"layer_types": good, "mlp_layer_types": ["dense"] * 6})


def test_files_that_are_no_config(tmp_path: Path) -> None:
    """A folder without config.json, or with something else there, is an error naming the file."""
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json is not a JSON object"):
        load_config(tmp_path)
