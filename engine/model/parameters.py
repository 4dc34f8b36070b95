"""The weights of a model as values, one class a part; shapes as in the checkpoint.

A ``Matrix`` is a tensor, or a ``Weight`` that is kept as it is stored (FP8, MXFP4).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv4_tierd.engine.model.matrix import Matrix, half
from dsv4_tierd.kernels.ref.compress import CompressParams
from dsv4_tierd.kernels.weight import Weight


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
    """Projections [c*E, d] fp32 or bf16 (their output is fp32), and the pooling's constants."""

    wkv: Tensor
    wgate: Tensor
    pool: CompressParams


@dataclass(frozen=True, slots=True)
class Indexer:
    """wq_b: [Hi*Di, q_lora]; weights_proj: [Hi, d] fp32 or bf16 (its output is fp32)."""

    wq_b: Matrix
    weights_proj: Tensor
    compressor: Compressor


@dataclass(frozen=True, slots=True)
class Joined:
    """Matrices that read the same input, as one: the parts elsewhere are views of its rows.

    down: [wq_a | wkv]; up: [wq_b | indexer.wq_b]; small: [compressor.wkv | wgate | indexer's wkv |
    wgate | weights_proj] as far as the layer has them, None in a window-only one.
    """

    down: Weight
    up: Weight
    small: Weight | None


@dataclass(frozen=True, slots=True)
class Attention:
    """Matrices in the model's dtype; q_norm [q_lora], kv_norm [D], sink [H], inv_freq fp32.

    joined: None where matrices are not kept as stored, or their rows do not fill whole tiles.
    """

    wq_a: Matrix
    q_norm: Tensor
    wq_b: Matrix
    wkv: Matrix
    kv_norm: Tensor
    wo_a: Matrix  # [G, o_lora, H*D/G]
    wo_b: Matrix
    sink: Tensor
    inv_freq: Tensor
    compressor: Compressor | None
    indexer: Indexer | None
    joined: Joined | None = None


@dataclass(frozen=True, slots=True)
class Ffn:
    """A SwiGLU. w13: [2, I, d], the gate's matrix w1 and the other factor's w3; w2: [d, I]."""

    w13: Matrix
    w2: Matrix

    @property
    def w1(self) -> Matrix:
        """[I, d], a view."""
        return half(self.w13, 0)

    @property
    def w3(self) -> Matrix:
        """[I, d], a view."""
        return half(self.w13, 1)


@dataclass(frozen=True, slots=True)
class Moe:
    """gate: [E, d] fp32 or bf16; bias: [E] fp32 or tid2eid: [vocab, k] int64, the other None.

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

    e_proj: Matrix
    h_proj: Matrix
    enorm: Tensor
    hnorm: Tensor
    layer: Layer
    head: Head


@dataclass(frozen=True, slots=True)
class Parameters:
    """The whole model. embed, lm_head: [vocab, d], plain."""

    embed: Tensor
    lm_head: Tensor
    head: Head
    layers: tuple[Layer, ...]
    mtp: Mtp | None
