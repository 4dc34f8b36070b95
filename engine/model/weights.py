"""Stored tensors into parameters: every one checked, quantised ones kept or dequantised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from dsv4_tierd.engine.model import matrix
from dsv4_tierd.engine.model.config import C4, C128, WINDOW_ONLY, ModelConfig
from dsv4_tierd.engine.model.dequantise import dequantise, kept, stored_shape
from dsv4_tierd.engine.model.folder import Folder, WeightsError
from dsv4_tierd.engine.model.matrix import Matrix
from dsv4_tierd.engine.model.parameters import (
    Attention,
    Compressor,
    Ffn,
    Head,
    Hyper,
    Indexer,
    Joined,
    Layer,
    Moe,
    Mtp,
    Parameters,
)
from dsv4_tierd.engine.model.presets import parse_preset
from dsv4_tierd.engine.model.rope import inverse_frequencies
from dsv4_tierd.engine.model.seeded import Seeded
from dsv4_tierd.engine.model.shapes import weight_bytes
from dsv4_tierd.kernels.ref.compress import CompressParams
from dsv4_tierd.kernels.weight import Weight

_QUANTISED = (torch.float8_e4m3fn, torch.int8)


class StoredTensors(Protocol):
    """Where tensors come from, by official name: a folder's files, or a seed."""

    @property
    def device(self) -> torch.device: ...

    @property
    def has_mtp(self) -> bool: ...

    def read(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """The tensor as stored, and its scale if it has one, on ``device``."""

    def finish(self) -> None:
        """Called when all were read: raises WeightsError if others are there."""


def open_tensors(
    model: str | Path, device: torch.device, dtype: torch.dtype | None
) -> StoredTensors:
    """The tensors of a folder, or of a preset if there is room for it on the device.

    dtype: what its matrices will be dequantised to, None where they stay as stored. Raises
    WeightsError.
    """
    seeded = parse_preset(model)
    if seeded is None:
        return Folder(model, device)
    need = weight_bytes(seeded.preset, None if dtype is None else dtype.itemsize)
    have = free_bytes(device)
    if need > have:
        form = "stored" if dtype is None else str(dtype).removeprefix("torch.")
        raise WeightsError(
            f"{model} needs {need / 2**30:.1f} GiB as {form} on {device.type}; "
            f"{have / 2**30:.1f} are free"
        )
    return Seeded(seeded, device)


def free_bytes(device: torch.device) -> int:
    """Memory that could be allocated on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limit = Path("/sys/fs/cgroup/memory.max")
    available = int(psutil.virtual_memory().available)
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        return min(available, int(text))
    return available


def load_parameters(
    tensors: StoredTensors,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    keep_quantised: bool = False,
) -> Parameters:
    """All of a checkpoint: matrices in ``dtype``, the rest fp32. Raises WeightsError.

    keep_quantised: FP8 and MXFP4 matrices, and bf16 ones whose use is fp32 (compressors, index
    gates, routers), stay as they are stored. On the device there is never a second copy of more
    than one layer's attention.
    """
    reader = _Reader(tensors, dtype, keep_quantised)
    d, vocab = config.hidden_size, config.vocab_size
    layers = []
    for index, ratio in enumerate(config.compress_ratios):
        layers.append(_layer(reader, f"layers.{index}.", config, ratio, config.hash_layers[index]))
    parameters = Parameters(
        embed=reader.plain("embed.weight", vocab, d),
        lm_head=reader.plain("head.weight", vocab, d),
        head=_head(reader, "", config),
        layers=tuple(layers),
        mtp=_mtp(reader, config) if config.num_nextn_predict_layers and tensors.has_mtp else None,
    )
    tensors.finish()
    return parameters


class _Reader:
    """Tensors in the form that the model holds them in."""

    def __init__(self, tensors: StoredTensors, dtype: torch.dtype, keep: bool) -> None:
        self.tensors, self.dtype, self.keep = tensors, dtype, keep
        self.device = tensors.device

    def matrix(self, name: str, *shape: int) -> Matrix:
        """A matrix in the model's dtype, or as stored where it is quantised and kept."""
        tensor, scale = self._stored(name, shape, self.dtype)
        if scale is None or not self.keep or tensor.dtype not in _QUANTISED:
            return self._numbers(name, tensor, scale, self.dtype)
        try:
            return kept(tensor, scale)
        except ValueError as error:
            raise WeightsError(f"tensor {name}: {error}") from None

    def stack(self, names: Iterator[str], lead: tuple[int, ...], *shape: int) -> Matrix:
        """Matrices [*shape] in one allocation [*lead, *shape], read one after the other."""
        first = self.matrix(next(names), *shape)
        parts = matrix.parts(first)
        count = torch.Size(lead).numel()
        stacked = [part.new_empty(count, *part.shape) for part in parts]
        for index, one in enumerate(self._matrices(first, names, shape)):
            for into, part in zip(stacked, matrix.parts(one), strict=True):
                into[index].copy_(part)
        shaped = [into.view(*lead, *into.shape[1:]) for into in stacked]
        return shaped[0] if isinstance(first, Tensor) else Weight(*shaped)

    def _matrices(
        self, first: Matrix, names: Iterator[str], shape: tuple[int, ...]
    ) -> Iterator[Matrix]:
        yield first
        kind = matrix.as_weight(first).kind
        for name in names:
            one = self.matrix(name, *shape)
            if matrix.as_weight(one).kind is not kind:
                raise WeightsError(
                    f"tensor {name} is stored otherwise than its like ({kind.value})"
                )
            yield one

    def plain(self, name: str, *shape: int) -> Tensor:
        """A tensor in the model's dtype, never quantised."""
        return self._read(name, shape, self.dtype)

    def small(self, name: str, *shape: int) -> Tensor:
        """A matrix whose output is fp32 by definition: fp32, or kept in the bf16 of its storage."""
        tensor, scale = self._stored(name, shape, torch.float32)
        kept = self.keep and tensor.dtype is torch.bfloat16
        return tensor if kept else self._numbers(name, tensor, scale, torch.float32)

    def fp32(self, name: str, *shape: int) -> Tensor:
        """A tensor whose use is fp32 by definition: norms, mixes, sinks, biases."""
        return self._read(name, shape, torch.float32)

    def integers(self, name: str, *shape: int) -> Tensor:
        return self._read(name, shape, torch.int64)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._numbers(name, *self._stored(name, shape, dtype), dtype)

    def _stored(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """The tensor as stored and its scale; checked to be integers if, and only if, so wanted."""
        tensor, scale = self.tensors.read(name, shape)
        integer = not tensor.is_floating_point() and tensor.dtype is not torch.int8
        if integer != (dtype is torch.int64):
            raise WeightsError(f"tensor {name} is stored as {tensor.dtype}")
        if tuple(tensor.shape) != stored_shape(shape, tensor.dtype):
            expected = list(stored_shape(shape, tensor.dtype))
            raise WeightsError(f"tensor {name} has shape {list(tensor.shape)}, expected {expected}")
        return tensor, scale

    def _numbers(
        self, name: str, tensor: Tensor, scale: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        try:
            return dequantise(tensor, scale, dtype)
        except ValueError as error:
            raise WeightsError(f"tensor {name}: {error}") from None


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
    try:
        wo_a = matrix.grouped(wo_a, groups)
    except ValueError as error:
        raise WeightsError(f"tensor {p}wo_a.weight: {error}") from None
    attention = Attention(
        wq_a=reader.matrix(p + "wq_a.weight", low, d),
        q_norm=reader.fp32(p + "q_norm.weight", low),
        wq_b=reader.matrix(p + "wq_b.weight", width, low),
        wkv=reader.matrix(p + "wkv.weight", config.head_dim, d),
        kv_norm=reader.fp32(p + "kv_norm.weight", config.head_dim),
        wo_a=wo_a,
        wo_b=reader.matrix(p + "wo_b.weight", d, groups * config.o_lora_rank),
        sink=reader.fp32(p + "attn_sink", config.num_attention_heads),
        inv_freq=inv_freq,
        compressor=compressor,
        indexer=indexer,
    )
    return _join(attention) if reader.keep else attention


def _join(attention: Attention) -> Attention:
    """With matrices that read the same input in one piece, if they can be; see ``Joined``."""
    index_q = [] if attention.indexer is None else [attention.indexer.wq_b]
    down = matrix.joined([attention.wq_a, attention.wkv])
    up = matrix.joined([attention.wq_b, *index_q])
    if down is None or up is None:
        return attention
    small, compressor, indexer = _join_small(attention)
    if indexer is not None:
        indexer = replace(indexer, wq_b=up[1][1])
    return replace(
        attention,
        wq_a=down[1][0],
        wkv=down[1][1],
        wq_b=up[1][0],
        compressor=compressor,
        indexer=indexer,
        joined=Joined(down[0], up[0], small),
    )


def _join_small(attention: Attention) -> tuple[Weight | None, Compressor | None, Indexer | None]:
    """The matrices whose output is fp32 as one, and what holds them as views of it."""
    main, indexer = attention.compressor, attention.indexer
    if main is None:
        return None, None, None
    parts = [main.wkv, main.wgate]
    if indexer is not None:
        parts += [indexer.compressor.wkv, indexer.compressor.wgate, indexer.weights_proj]
    whole = torch.cat(parts)
    views = whole.split([part.shape[0] for part in parts])
    main = replace(main, wkv=views[0], wgate=views[1])
    if indexer is not None:
        compressor = replace(indexer.compressor, wkv=views[2], wgate=views[3])
        indexer = replace(indexer, compressor=compressor, weights_proj=views[4])
    return Weight(whole), main, indexer


def _compressor(
    reader: _Reader, p: str, config: ModelConfig, ratio: int, dim: int, inv_freq: Tensor
) -> Compressor:
    assert ratio in (C4, C128)
    width = 2 * dim if ratio == C4 else dim
    ape = reader.fp32(p + "ape", ratio, width)
    norm = reader.fp32(p + "norm.weight", dim)
    return Compressor(
        wkv=reader.small(p + "wkv.weight", width, config.hidden_size),
        wgate=reader.small(p + "wgate.weight", width, config.hidden_size),
        pool=CompressParams(ape, norm, config.rms_norm_eps, inv_freq, ratio),
    )


def _indexer(reader: _Reader, p: str, config: ModelConfig, inv_freq: Tensor) -> Indexer:
    heads, dim = config.index_n_heads, config.index_head_dim
    return Indexer(
        wq_b=reader.matrix(p + "wq_b.weight", heads * dim, config.q_lora_rank),
        weights_proj=reader.small(p + "weights_proj.weight", heads, config.hidden_size),
        compressor=_compressor(reader, p + "compressor.", config, C4, dim, inv_freq),
    )


def _moe(reader: _Reader, p: str, config: ModelConfig, hashed: bool) -> Moe:
    experts, k = config.n_routed_experts, config.num_experts_per_tok
    routed = _ffn(reader, [f"{p}experts.{i}." for i in range(experts)], (experts,), config)
    tid2eid = reader.integers(p + "gate.tid2eid", config.vocab_size, k) if hashed else None
    if tid2eid is not None and not 0 <= int(tid2eid.min()) <= int(tid2eid.max()) < experts:
        raise WeightsError(f"tensor {p}gate.tid2eid names an expert outside 0..{experts - 1}")
    return Moe(
        gate=reader.small(p + "gate.weight", experts, config.hidden_size),
        bias=None if hashed else reader.fp32(p + "gate.bias", experts),
        tid2eid=tid2eid,
        experts=routed,
        shared=_ffn(reader, [p + "shared_experts."], (), config),
    )


def _ffn(reader: _Reader, prefixes: list[str], lead: tuple[int, ...], config: ModelConfig) -> Ffn:
    d, inner = config.hidden_size, config.moe_intermediate_size
    both = (f"{p}{name}.weight" for p in prefixes for name in ("w1", "w3"))
    down = (f"{p}w2.weight" for p in prefixes)
    return Ffn(w13=reader.stack(both, (*lead, 2), inner, d), w2=reader.stack(down, lead, d, inner))


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
