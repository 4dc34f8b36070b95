"""The weights of a model as values, one class a part; shapes as in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv4_tierd.kernels.ref.compress import CompressParams


@dataclass(frozen=True, slots=True)
class Hyper:
    """One hyper-connection. fn: [(2+n)*n, n*d], base: [(2+n)*n], scale: [3]; all fp32."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class Head:
    """Streams to logits. fn: [n, n*d], base: [n], scale: [1], norm: [d]; all fp32."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class Compressor:
    """Projections [c*E, d] fp32 (their output must be), and the pooling's constants."""

    wkv: Tensor
    wgate: Tensor
    pool: CompressParams


@dataclass(frozen=True, slots=True)
class Indexer:
    """wq_b: [Hi*Di, q_lora]; weights_proj: [Hi, d] fp32."""

    wq_b: Tensor
    weights_proj: Tensor
    compressor: Compressor


@dataclass(frozen=True, slots=True)
class Attention:
    """Matrices in the model's dtype; q_norm [q_lora], kv_norm [D], sink [H], inv_freq fp32."""

    wq_a: Tensor
    q_norm: Tensor
    wq_b: Tensor
    wkv: Tensor
    kv_norm: Tensor
    wo_a: Tensor  # [G, o_lora, H*D/G]
    wo_b: Tensor
    sink: Tensor
    inv_freq: Tensor
    compressor: Compressor | None
    indexer: Indexer | None


@dataclass(frozen=True, slots=True)
class Ffn:
    """A SwiGLU. w1, w3: [I, d], w2: [d, I]."""

    w1: Tensor
    w2: Tensor
    w3: Tensor


@dataclass(frozen=True, slots=True)
class Moe:
    """gate: [E, d] fp32; bias: [E] fp32 or None; tid2eid: [vocab, k] int64 or None (one of both).

    experts: like Ffn with a leading axis of experts.
    """

    gate: Tensor
    bias: Tensor | None
    tid2eid: Tensor | None
    experts: Ffn
    shared: Ffn


@dataclass(frozen=True, slots=True)
class Layer:
    """A block of attention and experts, each behind a norm [d] fp32 and a hyper-connection."""

    kind: int
    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: Hyper
    hc_ffn: Hyper
    attention: Attention
    moe: Moe


@dataclass(frozen=True, slots=True)
class Mtp:
    """The multi-token-prediction block. e_proj, h_proj: [d, d]; enorm, hnorm: [d] fp32."""

    e_proj: Tensor
    h_proj: Tensor
    enorm: Tensor
    hnorm: Tensor
    layer: Layer
    head: Head


@dataclass(frozen=True, slots=True)
class Parameters:
    """The whole model. embed, lm_head: [vocab, d]."""

    embed: Tensor
    lm_head: Tensor
    head: Head
    layers: tuple[Layer, ...]
    mtp: Mtp | None
