"""The plain twin of the whole engine: all tokens at once, no cache, no tiers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.engine.model import mtp
from dsv4_tierd.engine.model.attention import Projections
from dsv4_tierd.engine.model.config import C4
from dsv4_tierd.engine.model.transformer import Transformer
from dsv4_tierd.kernels.layout import PAGE_TOKENS, RowFormat, RowKind, Rows, row_pool
from dsv4_tierd.kernels.ref.compress import CompressParams, compress_prefill
from dsv4_tierd.kernels.ref.hadamard import to_key_basis
from dsv4_tierd.kernels.ref.index_scores import scores_topk
from dsv4_tierd.kernels.ref.row_store import row_store
from dsv4_tierd.kernels.ref.sparse_attention import Listed, Picked, sparse_attention_prefill

_PAGE_ROWS = PAGE_TOKENS // C4


@dataclass(frozen=True, slots=True)
class DenseAttend:
    """Attention of a whole text, positions 0 .. T-1. Rows pass through the given formats."""

    model: Transformer
    latent: RowKind = RowKind.FP32
    key: RowKind = RowKind.FP32

    def __call__(self, p: Projections) -> Tensor:
        config, constants = self.model.config, self.model.constants[p.layer]
        window, tokens = config.sliding_window, p.q.shape[0]
        rows = self._pool(self._latent_format(), window - 1 + tokens)
        own = torch.arange(window - 1, window - 1 + tokens, device=p.q.device)
        norm, eps = constants.kv_norm, config.rms_norm_eps
        row_store(p.kv, norm, eps, p.positions, constants.inv_freq, rows, own)
        seen = (p.positions + 1).clamp_max(window)
        scope = None if constants.main is None else self._scope(p)
        scale = config.head_dim**-0.5
        return sparse_attention_prefill(p.q, rows, seen, scope, constants.sink, scale, window)

    def _scope(self, p: Projections) -> Picked | Listed:
        constants = self.model.constants[p.layer]
        assert constants.main is not None and p.main_kv is not None and p.main_gate is not None
        entries = self._compress(p.main_kv, p.main_gate, constants.main, self._latent_format())
        visible = (p.positions + 1) // p.kind
        if p.kind == C4:
            return Picked(entries, self._select(p, visible))
        count = p.q.shape[0] // p.kind
        return Listed(entries, torch.arange(count, device=p.q.device), visible)

    def _select(self, p: Projections, visible: Tensor) -> Tensor:
        config, index = self.model.config, self.model.constants[p.layer].index
        assert index is not None and p.index_kv is not None and p.index_gate is not None
        assert p.index_q is not None and p.index_g is not None
        fmt = RowFormat(self.key, config.index_head_dim, config.qk_rope_head_dim)
        keys = self._compress(p.index_kv, p.index_gate, index, fmt)
        pages = torch.arange(keys.data.shape[0], device=p.q.device)
        q = to_key_basis(p.index_q, self.key)
        return scores_topk(q, p.index_g, keys, pages, visible, config.index_topk)

    def _compress(self, kv: Tensor, gate: Tensor, params: CompressParams, fmt: RowFormat) -> Rows:
        ring = kv.new_zeros(params.ring_len, params.ring_dim)
        entries = to_key_basis(compress_prefill(kv, gate, 0, ring, params, ring), fmt.kind)
        rows = self._pool(fmt, max(1, entries.shape[0]))
        rows.write(torch.arange(entries.shape[0], device=kv.device), entries)
        return rows

    def _latent_format(self) -> RowFormat:
        config = self.model.config
        return RowFormat(self.latent, config.head_dim, config.qk_rope_head_dim)

    def _pool(self, fmt: RowFormat, rows: int) -> Rows:
        return row_pool(fmt, rows, _PAGE_ROWS, self.model.parameters.embed.device)


@torch.no_grad()
def forward_dense(
    model: Transformer, ids: Tensor, latent: RowKind = RowKind.FP32, key: RowKind = RowKind.FP32
) -> Tensor:
    """Logits of a whole text. ids: [T] int64, T >= 1. Returns [T, vocab] fp32."""
    return model.logits(streams_dense(model, ids, latent, key))


@torch.no_grad()
def streams_dense(
    model: Transformer, ids: Tensor, latent: RowKind = RowKind.FP32, key: RowKind = RowKind.FP32
) -> Tensor:
    """Final streams [T, n, d] of a whole text, for ``model.logits`` of a few of them."""
    attend = DenseAttend(model, latent, key)
    x, positions = model.embed(ids), torch.arange(ids.shape[0], device=ids.device)
    for index in range(model.config.num_hidden_layers):
        x = model.layer(index, x, ids, positions, attend)
    return x


@torch.no_grad()
def mtp_dense(model: Transformer, ids: Tensor) -> Tensor:
    """MTP logits [T-1, vocab] fp32: row t, from tokens 0 .. t+1, is for token t+2."""
    x, positions = streams_dense(model, ids), torch.arange(ids.shape[0] - 1, device=ids.device)
    logits, _ = mtp.predict(model, x[:-1], ids[1:], positions, DenseAttend(model))
    return logits
