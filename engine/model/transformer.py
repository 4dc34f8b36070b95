"""DeepSeek-V4 as the engine calls it: layer by layer, attention left to a callback."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from dsv4_tierd.engine.model import attention, hyper
from dsv4_tierd.engine.model.attention import Attend
from dsv4_tierd.engine.model.config import ModelConfig, load_config
from dsv4_tierd.engine.model.matrix import linear
from dsv4_tierd.engine.model.moe import moe
from dsv4_tierd.engine.model.parameters import Layer, Parameters
from dsv4_tierd.kernels.ref.compress import CompressParams


@dataclass(frozen=True, slots=True)
class LayerConstants:
    """What the ops of one layer need beside projections; all fp32.

    kind: 0, 4 or 128; sink: [H]; kv_norm: [D]; inv_freq: [R/2]; main, index: compressors.
    """

    kind: int
    sink: Tensor
    kv_norm: Tensor
    inv_freq: Tensor
    main: CompressParams | None
    index: CompressParams | None


class Transformer:
    """The weights and the maths around attention; keeps no state of any session."""

    def __init__(self, config: ModelConfig, parameters: Parameters) -> None:
        self.config = config
        self.parameters = parameters
        mtp = () if parameters.mtp is None else (parameters.mtp.layer,)
        # One for each hidden layer; the MTP block, if any, is number num_hidden_layers.
        self.constants = tuple(_constants(layer) for layer in (*parameters.layers, *mtp))

    @classmethod
    def load(
        cls,
        model: str | Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        keep_quantised: bool = False,
    ) -> Transformer:
        """Read a checkpoint folder, or make a ``preset:`` on the device.

        dtype: of plain matrices, and of quantised ones unless ``keep_quantised``, which keeps
        FP8, MXFP4 and the small bf16 matrices as they are stored. Raises ConfigError,
        WeightsError, PresetError, naming what is wrong.
        """
        from dsv4_tierd.engine.model.weights import load_parameters, open_tensors

        config = load_config(model)
        tensors = open_tensors(model, torch.device(device), None if keep_quantised else dtype)
        return cls(config, load_parameters(tensors, config, dtype, keep_quantised=keep_quantised))

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [T] to streams [T, n, d], n copies of the embedding."""
        rows = self.parameters.embed[ids]
        return rows.unsqueeze(1).repeat(1, self.config.hc_mult, 1)

    def layer(
        self,
        index: int,
        x: Tensor,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        decode: bool = False,
    ) -> Tensor:
        """One layer: streams x [T, n, d] of tokens ids [T] at positions [T] to the next streams.

        attend: called once with the layer's Projections. decode: each token's result depends on
        its own row alone, for a fixed T.
        """
        layer = self.parameters.layers[index]
        return block(layer, index, x, ids, positions, attend, decode, self.config)

    def logits(self, x: Tensor) -> Tensor:
        """Streams [T, n, d] to logits [T, vocab] fp32."""
        collapsed = hyper.collapse(x, self.parameters.head, self.config)
        return linear(collapsed, self.parameters.lm_head).float()


def _constants(layer: Layer) -> LayerConstants:
    weights = layer.attention
    main = None if weights.compressor is None else weights.compressor.pool
    index = None if weights.indexer is None else weights.indexer.compressor.pool
    return LayerConstants(layer.kind, weights.sink, weights.kv_norm, weights.inv_freq, main, index)


def block(
    layer: Layer,
    index: int,
    x: Tensor,
    ids: Tensor,
    positions: Tensor,
    attend: Attend,
    decode: bool,
    config: ModelConfig,
) -> Tensor:
    """Attention, then experts, each gathered from the streams and spread over them again."""
    dims, eps = x.shape[-1:], config.rms_norm_eps
    h, post, comb = hyper.gather(x, layer.hc_attn, config)
    h = functional.rms_norm(h, dims, layer.attn_norm, eps)
    projections = attention.project(h, positions, layer.attention, index, layer.kind, config)
    y = attention.output(attend(projections), positions, layer.attention)
    x = hyper.spread(y, x, post, comb)
    h, post, comb = hyper.gather(x, layer.hc_ffn, config)
    h = functional.rms_norm(h, dims, layer.ffn_norm, eps)
    return hyper.spread(moe(h, ids, layer.moe, config, decode), x, post, comb)
