"""Around attention: projections in, grouped output out. What lies between is the caller's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional

from dsv4_tierd.engine.model.config import ModelConfig
from dsv4_tierd.engine.model.matrix import dense, linear, linear_fp32
from dsv4_tierd.engine.model.parameters import Attention
from dsv4_tierd.kernels.ref.rope import rotate


@dataclass(frozen=True, slots=True)
class Projections:
    """What one layer's attention works on, for T tokens; all fp32.

    q: [T, H, D] normed and rotated; kv: [T, D] raw (row_store norms and rotates). Compressed
    layers: main_kv, main_gate [T, c*E] raw. Kind 4: index_kv, index_gate [T, 2*Di] raw, index_q
    [T, Hi, Di] rotated (not in the keys' basis), index_g [T, Hi] scaled by Di^-0.5 Hi^-0.5.
    """

    layer: int
    kind: int
    positions: Tensor
    q: Tensor
    kv: Tensor
    main_kv: Tensor | None = None
    main_gate: Tensor | None = None
    index_kv: Tensor | None = None
    index_gate: Tensor | None = None
    index_q: Tensor | None = None
    index_g: Tensor | None = None


Attend = Callable[[Projections], Tensor]
"""From projections to o [T, H, D] fp32, before the inverse rotation."""


def project(
    x: Tensor, positions: Tensor, weights: Attention, layer: int, kind: int, config: ModelConfig
) -> Projections:
    """The projections of normed, collapsed streams x: [T, d] fp32 at positions [T] int."""
    tokens, eps = x.shape[0], config.rms_norm_eps
    low = linear(x, weights.wq_a).float()
    low = functional.rms_norm(low, low.shape[-1:], weights.q_norm, eps)
    q = linear(low, weights.wq_b).float().view(tokens, config.num_attention_heads, config.head_dim)
    q = rotate(functional.rms_norm(q, q.shape[-1:], None, eps), positions, weights.inv_freq)
    kv = linear(x, weights.wkv).float()
    found = Projections(layer, kind, positions, q, kv)
    if weights.compressor is not None:
        main = weights.compressor
        kv, gate = linear_fp32(x, main.wkv), linear_fp32(x, main.wgate)
        found = replace(found, main_kv=kv, main_gate=gate)
    if weights.indexer is not None:
        index, heads, dim = weights.indexer, config.index_n_heads, config.index_head_dim
        index_q = linear(low, index.wq_b).float().view(tokens, heads, dim)
        found = replace(
            found,
            index_kv=linear_fp32(x, index.compressor.wkv),
            index_gate=linear_fp32(x, index.compressor.wgate),
            index_q=rotate(index_q, positions, weights.inv_freq),
            index_g=linear_fp32(x, index.weights_proj) * (dim**-0.5 * heads**-0.5),
        )
    return found


def output(o: Tensor, positions: Tensor, weights: Attention) -> Tensor:
    """Rotate back at the query's position, then project by head groups. o: [T, H, D] -> [T, d]."""
    o = rotate(o, positions, weights.inv_freq, inverse=True)
    wo_a = dense(weights.wo_a)
    grouped = o.reshape(o.shape[0], wo_a.shape[0], -1).transpose(0, 1).to(wo_a.dtype)
    low = grouped @ wo_a.transpose(1, 2)
    return linear(low.transpose(0, 1).flatten(1), weights.wo_b)
