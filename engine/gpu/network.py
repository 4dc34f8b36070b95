"""A model's weights as the ops take them, and what a layer does on either side of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.engine.model import matrix
from dsv4_tierd.engine.model.config import C4, C128, ModelConfig
from dsv4_tierd.engine.model.parameters import Attention, Ffn, Hyper, Joined, Layer
from dsv4_tierd.engine.model.transformer import LayerConstants, Transformer
from dsv4_tierd.kernels.experts import Experts, ExpertScratch, expert_scratch, experts
from dsv4_tierd.kernels.hyper import Mix, Mixed, hyper_head, hyper_post_pre, hyper_pre
from dsv4_tierd.kernels.index_scores import Queries
from dsv4_tierd.kernels.linear import linear
from dsv4_tierd.kernels.queries import index_queries, rotate_queries
from dsv4_tierd.kernels.route import Router, route
from dsv4_tierd.kernels.scratch import Scratch, scratch
from dsv4_tierd.kernels.weight import Weight
from dsv4_tierd.tiering.errors import UnsupportedCombination


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """One layer. rank: among the layers of its kind, as the tiers number their sections."""

    number: int
    kind: int
    rank: int
    attn: Mix
    ffn: Mix
    attention: Attention
    joined: Joined
    wo_a: Weight
    wo_b: Weight
    constants: LayerConstants
    router: Router
    routed: Experts
    shared: Experts


@dataclass(frozen=True, slots=True)
class Projected:
    """What a layer's attention works on, for T tokens.

    q: [T, H, D] raw; kv: [T, D] raw. Compressed layers: main_kv, main_gate
    [T, c*D] fp32; kind 4: index_kv, index_gate [T, 2*Di] fp32, index_q [T, Hi, Di] raw and index_g
    [T, Hi] raw, fp32. Views of wider rows.
    """

    q: Tensor
    kv: Tensor
    index_q: Tensor | None = None
    main_kv: Tensor | None = None
    main_gate: Tensor | None = None
    index_kv: Tensor | None = None
    index_gate: Tensor | None = None
    index_g: Tensor | None = None


class Network:
    """Every layer, the head, and what calls on one stream share. dtype: of activations."""

    def __init__(self, model: Transformer, tokens_max: int, dtype: torch.dtype) -> None:
        parameters, config = model.parameters, model.config
        self.config, self.dtype = config, dtype
        self.embedding = parameters.embed
        self.device = parameters.embed.device
        self.layers = tuple(
            _device_layer(layer, number, model) for number, layer in enumerate(parameters.layers)
        )
        head = parameters.head
        self.head = _mix(Hyper(head.fn, head.base, head.scale), head.norm, config)
        self.lm_head = Weight(parameters.lm_head)
        self.index_scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self.scale = config.head_dim**-0.5
        self.held: Scratch = scratch(self.device)
        self._tokens_max = tokens_max
        self._expert_scratch: ExpertScratch | None = None

    # ------------------------------------------------------------ streams
    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [T] int to streams [T, n, d] fp32, n copies of the embedding."""
        rows = self.embedding.index_select(0, ids).float()
        return rows.unsqueeze(1).repeat(1, self.config.hc_mult, 1)

    def gather(self, x: Tensor, mix: Mix) -> Mixed:
        """Streams to a sublayer's input, and how its answer will spread."""
        return hyper_pre(x, mix, out=self._mixed(x), held=self.held)

    def spread_gather(self, y: Tensor, x: Tensor, mixed: Mixed, mix: Mix) -> tuple[Tensor, Mixed]:
        """A sublayer's answer y [T, d] into the streams, and the next one's input out of them."""
        return hyper_post_pre(
            y, x, mixed.post, mixed.comb, mix, mixed=self._mixed(x), held=self.held
        )

    def logits(self, x: Tensor) -> Tensor:
        """Streams [T, n, d] to logits [T, vocab] fp32."""
        h = hyper_head(x, self.head, dtype=self.dtype, held=self.held)
        return linear(h, self.lm_head, dtype=torch.float32, held=self.held)

    def _mixed(self, x: Tensor) -> Mixed:
        tokens, n, dim = x.shape
        return Mixed(
            x.new_empty(tokens, dim, dtype=self.dtype),
            x.new_empty(tokens, n, dtype=torch.float32),
            x.new_empty(tokens, n, n, dtype=torch.float32),
        )

    # ------------------------------------------------------------ sublayers
    def project(self, layer: DeviceLayer, h: Tensor) -> Projected:
        """The projections of h [T, d], normed."""
        config, weights = self.config, layer.attention
        low, heads, dim = config.q_lora_rank, config.num_attention_heads, config.head_dim
        down = linear(h, layer.joined.down, dtype=self.dtype, held=self.held)
        up = linear(
            down[:, :low],
            layer.joined.up,
            norm=weights.q_norm,
            eps=config.rms_norm_eps,
            dtype=self.dtype,
            held=self.held,
        )
        q = up[:, : heads * dim].unflatten(1, (heads, dim))
        kv = down[:, low:]
        if layer.joined.small is None:
            return Projected(q, kv)
        small = linear(h, layer.joined.small, dtype=torch.float32, held=self.held)
        if layer.kind == C128:
            return Projected(q, kv, None, small[:, :dim], small[:, dim:])
        index = config.index_head_dim
        widths = [2 * dim, 2 * dim, 2 * index, 2 * index, config.index_n_heads]
        index_q = up[:, heads * dim :].unflatten(1, (config.index_n_heads, index))
        return Projected(q, kv, index_q, *torch.split(small, widths, 1))

    def rotated(self, layer: DeviceLayer, p: Projected, positions: Tensor) -> Tensor:
        """The queries [T, H, D], normed and rotated at positions [T] int32."""
        eps, inv_freq = self.config.rms_norm_eps, layer.attention.inv_freq
        return rotate_queries(p.q, eps, positions, inv_freq, dtype=self.dtype)

    def queries(self, layer: DeviceLayer, p: Projected, positions: Tensor) -> Queries:
        """The index scan's queries of a C4 layer."""
        assert p.index_q is not None and p.index_g is not None
        inv_freq = layer.attention.inv_freq
        return index_queries(p.index_q, p.index_g, self.index_scale, positions, inv_freq)

    def output(self, layer: DeviceLayer, o: Tensor) -> Tensor:
        """Attention's result o [T, H, D], rotated back, to the sublayer's answer [T, d]."""
        grouped = o.view(o.shape[0], layer.wo_a.shape[0], -1)
        low = linear(grouped, layer.wo_a, dtype=self.dtype, held=self.held)
        return linear(low.flatten(1), layer.wo_b, dtype=self.dtype, held=self.held)

    def experts(self, layer: DeviceLayer, h: Tensor, ids: Tensor) -> Tensor:
        """The experts' answer [T, d] for h [T, d] of tokens ids [T]."""
        chosen, shares = route(h, ids, layer.router, held=self.held)
        limit = self.config.swiglu_limit
        if self._expert_scratch is None:
            k = self.config.num_experts_per_tok
            self._expert_scratch = expert_scratch(self._tokens_max, k, layer.routed, self.device)
        return experts(
            h,
            chosen,
            shares,
            layer.routed,
            layer.shared,
            limit,
            dtype=self.dtype,
            held=self._expert_scratch,
        )


def _device_layer(layer: Layer, number: int, model: Transformer) -> DeviceLayer:
    config, weights = model.config, layer.attention
    of_kind = {C4: config.c4_layers, C128: config.c128_layers}.get(layer.kind, (number,))
    moe = layer.moe
    return DeviceLayer(
        number=number,
        kind=layer.kind,
        rank=of_kind.index(number),
        attn=_mix(layer.hc_attn, layer.attn_norm, config),
        ffn=_mix(layer.hc_ffn, layer.ffn_norm, config),
        attention=weights,
        joined=weights.joined or _join(weights),
        wo_a=matrix.as_weight(weights.wo_a),
        wo_b=matrix.as_weight(weights.wo_b),
        constants=model.constants[number],
        router=Router(
            moe.gate,
            moe.bias,
            moe.tid2eid,
            config.num_experts_per_tok,
            config.routed_scaling_factor,
        ),
        routed=_experts(moe.experts),
        shared=_experts(moe.shared),
    )


def _mix(hyper: Hyper, norm: Tensor, config: ModelConfig) -> Mix:
    return Mix(
        hyper.fn,
        hyper.base,
        hyper.scale,
        norm,
        config.rms_norm_eps,
        config.hc_eps,
        config.hc_sinkhorn_iters,
    )


def _experts(ffn: Ffn) -> Experts:
    return Experts(matrix.as_weight(ffn.w13), matrix.as_weight(ffn.w2))


def _join(weights: Attention) -> Joined:
    """Copies where the checkpoint's matrices did not come joined. Raises UnsupportedCombination."""
    main, index = weights.compressor, weights.indexer
    small = [] if main is None else [main.wkv, main.wgate]
    if index is not None:
        small += [index.compressor.wkv, index.compressor.wgate, index.weights_proj]
    down = matrix.joined([weights.wq_a, weights.wkv])
    up = matrix.joined([weights.wq_b, *([] if index is None else [index.wq_b])])
    little = matrix.joined(list(small)) if small else None
    if down is None or up is None or (small and little is None):
        raise UnsupportedCombination(
            "the model's projections are stored in different ways, or not in tiles of 128 rows",
            param="model",
        )
    return Joined(down[0], up[0], None if little is None else little[0])
