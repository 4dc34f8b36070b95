"""Official names and shapes of every tensor, and what each is stored in. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from enum import Enum

from dsv4_tierd.engine.model.presets import RATIO_OF_LETTER, Preset, Storage

_MATRIX = re.compile(
    r"(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|indexer\.wq_b|shared_experts\.w[123]|[eh]_proj)\.weight$"
)
_EXPERT = re.compile(r"ffn\.experts\.\d+\.w[123]\.weight$")
_FP32 = re.compile(r"(\.ape|attn_sink|hc_\w+|gate\.bias)$")

Named = tuple[str, tuple[int, ...]]


class Stored(Enum):
    """What one tensor is kept in."""

    INTEGERS = "integers"
    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"


def stored_in(name: str, storage: Storage) -> Stored:
    """How a checkpoint of this storage keeps the tensor of an official name."""
    if name.endswith("tid2eid"):
        return Stored.INTEGERS
    if storage is Storage.FP32 or _FP32.search(name):
        return Stored.FP32
    if storage is Storage.BF16:
        return Stored.BF16
    if _EXPERT.search(name):
        return Stored.FP4 if storage is Storage.QUANTISED else Stored.FP8
    return Stored.FP8 if _MATRIX.search(name) else Stored.BF16


def weight_bytes(preset: Preset, value_bytes: int | None = None) -> int:
    """What all tensors take as they are stored, or with ``value_bytes`` for each number."""
    return sum(
        math.prod(shape) * value_bytes
        if value_bytes is not None
        else _stored_bytes(stored_in(name, preset.storage), shape)
        for name, shape in shapes(preset)
    )


def _stored_bytes(stored: Stored, shape: tuple[int, ...]) -> int:
    count = math.prod(shape)
    if stored is Stored.FP8:
        return count + -(-shape[0] // 128) * -(-shape[1] // 128)
    if stored is Stored.FP4:
        return count // 2 + count // 32
    return count * {Stored.INTEGERS: 8, Stored.FP32: 4, Stored.BF16: 2}[stored]


def shapes(s: Preset) -> Iterator[Named]:
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
        ratio = RATIO_OF_LETTER[letter]
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
