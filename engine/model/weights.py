"""Read a checkpoint folder into parameters: every tensor checked, quantised ones dequantised.

Official names are the vocabulary; the spellings that transformers' save_pretrained writes are
mapped to them. A missing, extra or misshapen tensor is an error that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsv4_tierd.engine.model.config import C4, C128, WINDOW_ONLY, ModelConfig
from dsv4_tierd.engine.model.dequantise import dequantise, stored_shape
from dsv4_tierd.engine.model.parameters import (
    Attention,
    Compressor,
    Ffn,
    Head,
    Hyper,
    Indexer,
    Layer,
    Moe,
    Mtp,
    Parameters,
)
from dsv4_tierd.engine.model.rope import inverse_frequencies
from dsv4_tierd.kernels.ref.compress import CompressParams

INDEX_FILE = "model.safetensors.index.json"
# Copies of embed and head that the base models ship beside the MTP block.
_IGNORED = re.compile(r"mtp\.0\.(emb\.tok_emb|head)\.weight$")
_RENAMES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^embed_tokens\.weight$"), "embed.weight"),
    (re.compile(r"^lm_head\.weight$"), "head.weight"),
    (re.compile(r"^hc_head\.hc_(fn|base|scale)$"), r"hc_head_\1"),
    (re.compile(r"\.attn\.norm\.weight$"), ".attn.kv_norm.weight"),
    (re.compile(r"\.weight_scale_inv$"), ".scale"),
)


class WeightsError(ValueError):
    """A checkpoint whose tensors are not the model's; the message names the tensor."""


def load_parameters(
    folder: str | Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Parameters:
    """All of a checkpoint: matrices in ``dtype``, the rest fp32. Raises WeightsError."""
    reader = _Reader(Path(folder), dtype, device)
    d, vocab = config.hidden_size, config.vocab_size
    layers = []
    for index, ratio in enumerate(config.compress_ratios):
        layers.append(_layer(reader, f"layers.{index}.", config, ratio, config.hash_layers[index]))
    parameters = Parameters(
        embed=reader.matrix("embed.weight", vocab, d),
        lm_head=reader.matrix("head.weight", vocab, d),
        head=_head(reader, "", config),
        layers=tuple(layers),
        mtp=_mtp(reader, config) if _has_mtp(reader, config) else None,
    )
    reader.finish()
    return parameters


def safetensor_files(folder: Path) -> list[Path]:
    """The checkpoint's files, sorted: those of its index, or all. Raises WeightsError."""
    index = folder / INDEX_FILE
    if index.exists():
        try:
            names: Iterable[str] = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise WeightsError(f"{index} is not an index of tensors: {error!r}") from None
        files = [folder / name for name in sorted(names)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{folder} holds no .safetensors file")
    if missing := [file for file in files if not file.exists()]:
        raise WeightsError(f"{missing[0]} is in the index but does not exist")
    return files


class _Reader:
    """Tensors of a folder by official name; remembers which were taken."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.folder, self.dtype, self.device = folder, dtype, device
        self.where: dict[str, tuple[Any, str]] = {}
        self.taken: set[str] = set()
        for path in safetensor_files(folder):
            try:
                file = safe_open(path, "pt")
            except SafetensorError as error:
                raise WeightsError(f"{path} cannot be read: {error}") from None
            for stored in _names(file):
                name = _official_name(stored)
                if name in self.where:
                    raise WeightsError(f"tensor {name} is there twice, again as {stored} in {path}")
                self.where[name] = (file, stored)
        # transformers keeps the MTP block out of what it saves, but not out of the config.
        names = [stored for _, stored in self.where.values()]
        self.from_transformers = any(stored.startswith("model.") for stored in names)

    def matrix(self, name: str, *shape: int) -> Tensor:
        """A tensor in the model's dtype."""
        return self._read(name, shape, self.dtype)

    def fp32(self, name: str, *shape: int) -> Tensor:
        """A tensor whose use is fp32 by definition: norms, mixes, routers, compressors."""
        return self._read(name, shape, torch.float32)

    def integers(self, name: str, *shape: int) -> Tensor:
        return self._read(name, shape, torch.int64)

    def finish(self) -> None:
        """Every tensor was taken, or is known to be superfluous."""
        extra = sorted(name for name in self.where.keys() - self.taken if not _IGNORED.match(name))
        if extra:
            more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
            raise WeightsError(f"tensor {extra[0]}{more} is not part of this model")

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor, scale = self._get(name), None
        scale_name = name.removesuffix("weight") + "scale"
        if name.endswith("weight") and scale_name in self.where:
            scale = self._get(scale_name)
        integer = not tensor.is_floating_point() and tensor.dtype is not torch.int8
        if integer != (dtype is torch.int64):
            raise WeightsError(f"tensor {name} is stored as {tensor.dtype}")
        if tuple(tensor.shape) != stored_shape(shape, tensor.dtype):
            expected = list(stored_shape(shape, tensor.dtype))
            raise WeightsError(f"tensor {name} has shape {list(tensor.shape)}, expected {expected}")
        try:
            values = dequantise(tensor, scale, dtype)
        except ValueError as error:
            raise WeightsError(f"tensor {name}: {error}") from None
        return values.to(self.device)

    def _get(self, name: str) -> Tensor:
        if name not in self.where:
            raise WeightsError(f"tensor {name} is missing from {self.folder}")
        self.taken.add(name)
        file, stored = self.where[name]
        tensor: Tensor = file.get_tensor(stored)
        return tensor


def _names(file: Any) -> list[str]:
    return list(file.keys())


def _official_name(stored: str) -> str:
    for pattern, name in _RENAMES:
        stored = pattern.sub(name, stored)
    return stored


def _layer(reader: _Reader, p: str, config: ModelConfig, ratio: int, hashed: bool) -> Layer:
    d = config.hidden_size
    return Layer(
        kind=ratio,
        attn_norm=reader.fp32(p + "attn_norm.weight", d),
        ffn_norm=reader.fp32(p + "ffn_norm.weight", d),
        hc_attn=_hyper(reader, p + "hc_attn_", config),
        hc_ffn=_hyper(reader, p + "hc_ffn_", config),
        attention=_attention(reader, p + "attn.", config, ratio),
        moe=_moe(reader, p + "ffn.", config, hashed),
    )


def _hyper(reader: _Reader, p: str, config: ModelConfig) -> Hyper:
    n = config.hc_mult
    rows = (2 + n) * n
    return Hyper(
        fn=reader.fp32(p + "fn", rows, n * config.hidden_size),
        base=reader.fp32(p + "base", rows),
        scale=reader.fp32(p + "scale", 3),
    )


def _head(reader: _Reader, p: str, config: ModelConfig) -> Head:
    n, d = config.hc_mult, config.hidden_size
    return Head(
        fn=reader.fp32(p + "hc_head_fn", n, n * d),
        base=reader.fp32(p + "hc_head_base", n),
        scale=reader.fp32(p + "hc_head_scale", 1),
        norm=reader.fp32(p + "norm.weight", d),
    )


def _attention(reader: _Reader, p: str, config: ModelConfig, ratio: int) -> Attention:
    d, low, groups = config.hidden_size, config.q_lora_rank, config.o_groups
    width = config.num_attention_heads * config.head_dim
    inv_freq = inverse_frequencies(config, ratio).to(reader.device)
    wo_a = reader.matrix(p + "wo_a.weight", groups * config.o_lora_rank, width // groups)
    compressor = indexer = None
    if ratio != WINDOW_ONLY:
        name, dim = p + "compressor.", config.head_dim
        compressor = _compressor(reader, name, config, ratio, dim, inv_freq)
    if ratio == C4:
        indexer = _indexer(reader, p + "indexer.", config, inv_freq)
    return Attention(
        wq_a=reader.matrix(p + "wq_a.weight", low, d),
        q_norm=reader.fp32(p + "q_norm.weight", low),
        wq_b=reader.matrix(p + "wq_b.weight", width, low),
        wkv=reader.matrix(p + "wkv.weight", config.head_dim, d),
        kv_norm=reader.fp32(p + "kv_norm.weight", config.head_dim),
        wo_a=wo_a.view(groups, config.o_lora_rank, -1),
        wo_b=reader.matrix(p + "wo_b.weight", d, groups * config.o_lora_rank),
        sink=reader.fp32(p + "attn_sink", config.num_attention_heads),
        inv_freq=inv_freq,
        compressor=compressor,
        indexer=indexer,
    )


def _compressor(
    reader: _Reader, p: str, config: ModelConfig, ratio: int, dim: int, inv_freq: Tensor
) -> Compressor:
    assert ratio in (C4, C128)
    width = 2 * dim if ratio == C4 else dim
    ape = reader.fp32(p + "ape", ratio, width)
    norm = reader.fp32(p + "norm.weight", dim)
    return Compressor(
        wkv=reader.fp32(p + "wkv.weight", width, config.hidden_size),
        wgate=reader.fp32(p + "wgate.weight", width, config.hidden_size),
        pool=CompressParams(ape, norm, config.rms_norm_eps, inv_freq, ratio),
    )


def _indexer(reader: _Reader, p: str, config: ModelConfig, inv_freq: Tensor) -> Indexer:
    heads, dim = config.index_n_heads, config.index_head_dim
    return Indexer(
        wq_b=reader.matrix(p + "wq_b.weight", heads * dim, config.q_lora_rank),
        weights_proj=reader.fp32(p + "weights_proj.weight", heads, config.hidden_size),
        compressor=_compressor(reader, p + "compressor.", config, C4, dim, inv_freq),
    )


def _moe(reader: _Reader, p: str, config: ModelConfig, hashed: bool) -> Moe:
    experts, k = config.n_routed_experts, config.num_experts_per_tok
    picked = [_ffn(reader, f"{p}experts.{i}.", config) for i in range(experts)]
    tid2eid = reader.integers(p + "gate.tid2eid", config.vocab_size, k) if hashed else None
    if tid2eid is not None and not 0 <= int(tid2eid.min()) <= int(tid2eid.max()) < experts:
        raise WeightsError(f"tensor {p}gate.tid2eid names an expert outside 0..{experts - 1}")
    return Moe(
        gate=reader.fp32(p + "gate.weight", experts, config.hidden_size),
        bias=None if hashed else reader.fp32(p + "gate.bias", experts),
        tid2eid=tid2eid,
        experts=Ffn(
            w1=torch.stack([expert.w1 for expert in picked]),
            w2=torch.stack([expert.w2 for expert in picked]),
            w3=torch.stack([expert.w3 for expert in picked]),
        ),
        shared=_ffn(reader, p + "shared_experts.", config),
    )


def _ffn(reader: _Reader, p: str, config: ModelConfig) -> Ffn:
    d, inner = config.hidden_size, config.moe_intermediate_size
    return Ffn(
        w1=reader.matrix(p + "w1.weight", inner, d),
        w2=reader.matrix(p + "w2.weight", d, inner),
        w3=reader.matrix(p + "w3.weight", inner, d),
    )


def _has_mtp(reader: _Reader, config: ModelConfig) -> bool:
    if not config.num_nextn_predict_layers:
        return False
    return not reader.from_transformers or any(name.startswith("mtp.") for name in reader.where)


def _mtp(reader: _Reader, config: ModelConfig) -> Mtp:
    p, d = "mtp.0.", config.hidden_size
    return Mtp(
        e_proj=reader.matrix(p + "e_proj.weight", d, d),
        h_proj=reader.matrix(p + "h_proj.weight", d, d),
        enorm=reader.fp32(p + "enorm.weight", d),
        hnorm=reader.fp32(p + "hnorm.weight", d),
        layer=_layer(reader, p, config, WINDOW_ONLY, hashed=False),
        head=_head(reader, p, config),
    )
