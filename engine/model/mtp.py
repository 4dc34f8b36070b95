"""The multi-token-prediction block: a token's final streams and the next token, to one more."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from dsv4_tierd.engine.model import hyper
from dsv4_tierd.engine.model.attention import Attend
from dsv4_tierd.engine.model.matrix import linear
from dsv4_tierd.engine.model.transformer import Transformer, block


def predict(
    model: Transformer,
    x: Tensor,
    next_ids: Tensor,
    positions: Tensor,
    attend: Attend,
    decode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logits for the token after the next.

    x: [T, n, d] final streams of the tokens at positions [T], before the head; next_ids: [T], the
    tokens that follow them. The block has a window of its own: ``attend`` sees it as layer
    ``num_hidden_layers``, kind 0. Returns (logits [T, vocab] fp32, streams [T, n, d]); the streams
    are the x of the next step of a longer draft.
    """
    weights, config = model.parameters.mtp, model.config
    assert weights is not None, "this checkpoint has no MTP block"
    dims, eps = x.shape[-1:], config.rms_norm_eps
    embedded = model.parameters.embed[next_ids].float()
    embedded = functional.rms_norm(embedded, dims, weights.enorm, eps)
    hidden = functional.rms_norm(x.float(), dims, weights.hnorm, eps)
    joined = linear(embedded, weights.e_proj).unsqueeze(1) + linear(hidden, weights.h_proj)
    layer, index = weights.layer, config.num_hidden_layers
    streams = block(layer, index, joined, next_ids, positions, attend, decode, config)
    collapsed = hyper.collapse(streams, weights.head, config)
    return linear(collapsed, model.parameters.lm_head).float(), streams
