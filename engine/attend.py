"""One layer's attention over the tiers: what a prefill chunk and a decode step do with projections.

Both follow one order: write the window row, feed the compressors (every 4th or 128th token
emits an entry), score the index, choose, find the chosen rows, attend.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.engine.model.attention import Projections
from dsv4_tierd.engine.model.config import C4, C128
from dsv4_tierd.engine.model.transformer import LayerConstants, Transformer
from dsv4_tierd.kernels.layout import PAGE_TOKENS, Rows, row_pool
from dsv4_tierd.kernels.ref.compress import CompressParams, compress_decode, compress_prefill
from dsv4_tierd.kernels.ref.hadamard import to_key_basis
from dsv4_tierd.kernels.ref.index_scores import index_scores_decode, scores_topk
from dsv4_tierd.kernels.ref.row_store import row_store
from dsv4_tierd.kernels.ref.sparse_attention import (
    Listed,
    Picked,
    sparse_attention,
    sparse_attention_prefill,
)
from dsv4_tierd.kernels.ref.topk import topk
from dsv4_tierd.tiering.hot_set import C4Place, page_rows
from dsv4_tierd.tiering.manager import TierManager
from dsv4_tierd.tiering.sequence import Sequence

C128_ROWS_PER_PAGE = PAGE_TOKENS // C128


class LayerRanks:
    """A layer's rank among those of its kind: how the tiers number their sections."""

    def __init__(self, model: Transformer) -> None:
        self.of = {layer: rank for rank, layer in enumerate(model.config.c4_layers)}
        self.of |= {layer: rank for rank, layer in enumerate(model.config.c128_layers)}


@dataclass(frozen=True, slots=True)
class PrefillAttend:
    """Attention of tokens of one sequence up to ``stop``; its new tail goes to the scratch slot.

    Nothing that the sequence's own tail holds is written, so a chunk can be given up between
    any two layers.
    """

    model: Transformer
    tiers: TierManager
    ranks: LayerRanks
    seq: Sequence
    stop: int

    def __call__(self, p: Projections) -> Tensor:
        config, constants = self.model.config, self.model.constants[p.layer]
        window, seen = self._window(p, constants)
        scope: Listed | Picked | None = None
        if p.kind == C128:
            scope = self._all_entries(p, constants)
        elif p.kind == C4:
            scope = self._chosen_entries(p, constants)
        scale = config.head_dim**-0.5
        return sparse_attention_prefill(
            p.q, window, seen, scope, constants.sink, scale, config.sliding_window
        )

    def _window(self, p: Projections, constants: LayerConstants) -> tuple[Rows, Tensor]:
        """The rows before and of the chunk in token order, and how many each query sees."""
        size, seq = self.model.config.sliding_window, self.seq
        first, count = int(p.positions[0]), len(p.positions)
        lowest = seq.first_token(p.layer, size)
        tails = self.tiers.tails.windows[p.layer]
        rows = row_pool(tails.format, size - 1 + count, size - 1 + count, p.q.device)
        device = p.q.device
        old = torch.arange(max(lowest, first - size + 1), first, device=device)
        rows.copy_from(size - 1 - (first - old), tails, seq.tail_slot * size + old % size)
        own = torch.arange(size - 1, size - 1 + count, device=device)
        row_store(
            p.kv,
            constants.kv_norm,
            self.model.config.rms_norm_eps,
            p.positions,
            constants.inv_freq,
            rows,
            own,
        )
        kept = torch.arange(max(lowest, self.stop - size), self.stop, device=device)
        tails.copy_from(self.tiers.scratch_slot * size + kept % size, rows, size - 1 + kept - first)
        return rows, (p.positions - lowest + 1).clamp_max(size)

    def _all_entries(self, p: Projections, constants: LayerConstants) -> Listed:
        rank = self.ranks.of[p.layer]
        rings, rows = self.tiers.tails.c128_rings[rank], self.tiers.memory.c128[rank]
        numbers, entries = self._emit(p, p.main_kv, p.main_gate, rings, constants.main)
        pages = self.seq.device_pages
        rows.write(page_rows(pages, numbers, C128_ROWS_PER_PAGE), entries)
        known = torch.arange(self.stop // C128, device=p.q.device)
        return Listed(rows, page_rows(pages, known, C128_ROWS_PER_PAGE), (p.positions + 1) // C128)

    def _chosen_entries(self, p: Projections, constants: LayerConstants) -> Picked:
        tiers, rank, end = self.tiers, self.ranks.of[p.layer], self.stop // C4
        rings, keys = tiers.tails.index_rings[rank], tiers.memory.index_keys[rank]
        numbers, entries = self._emit(p, p.index_kv, p.index_gate, rings, constants.index)
        ids = page_rows(self.seq.device_pages, numbers)
        keys.write(ids, to_key_basis(entries, keys.format.kind))
        rings = tiers.tails.c4_rings[rank]
        numbers, entries = self._emit(p, p.main_kv, p.main_gate, rings, constants.main)
        place = C4Place(self.seq.mirror_pages, self.seq.device_pages, tiers.scratch_slot, end)
        first = int(numbers[0]) if len(numbers) else end
        tiers.c4.store_prefilled(rank, place, first, entries, end)
        return Picked(*tiers.c4.prefill_lookup(rank, place, self._choose(p), end))

    def _choose(self, p: Projections) -> Tensor:
        assert p.index_q is not None and p.index_g is not None
        keys = self.tiers.memory.index_keys[self.ranks.of[p.layer]]
        q = to_key_basis(p.index_q, keys.format.kind)
        visible, k = (p.positions + 1) // C4, self.model.config.index_topk
        pages = self.seq.device_pages.to(q.device)
        return scores_topk(q, p.index_g, keys, pages, visible, k)

    def _emit(
        self,
        p: Projections,
        kv: Tensor | None,
        gate: Tensor | None,
        rings: Tensor,
        params: CompressParams | None,
    ) -> tuple[Tensor, Tensor]:
        """Feed a compressor; numbers and values of the entries that have no page yet.

        The new ring goes to the scratch slot. A replay emits no entry.
        """
        assert kv is not None and gate is not None and params is not None
        first, tiers = int(p.positions[0]), self.tiers
        entries = compress_prefill(
            kv, gate, first, rings[self.seq.tail_slot], params, rings[tiers.scratch_slot]
        )
        begin = first // params.ratio
        numbers = torch.arange(begin, begin + len(entries), device=entries.device)
        fresh = numbers >= self.seq.emit_from // params.ratio
        return numbers[fresh], entries[fresh]


@dataclass(frozen=True, slots=True)
class DecodeAttend:
    """Attention of one token each of several sequences, in place. Rows beyond them are padding.

    positions: [B] int64 of the sequences; the batch has more rows so that a token's matrix
    products never depend on how many sessions run.
    """

    model: Transformer
    tiers: TierManager
    ranks: LayerRanks
    seqs: Seq[Sequence]
    places: Seq[C4Place]
    positions: Tensor
    slots: Tensor
    device_pages: Tensor
    step: int

    @classmethod
    def of(
        cls,
        model: Transformer,
        tiers: TierManager,
        ranks: LayerRanks,
        seqs: Seq[Sequence],
        step: int,
    ) -> DecodeAttend:
        """Gather what all layers share. Every sequence has a page for its next token."""
        device = tiers.config.device
        widest = max(seq.page_count for seq in seqs)
        pages = torch.full((len(seqs), widest), -1, dtype=torch.int64)
        for row, seq in zip(pages, seqs, strict=True):
            row[: seq.page_count] = seq.device_pages
        return cls(
            model=model,
            tiers=tiers,
            ranks=ranks,
            seqs=seqs,
            places=[seq.place for seq in seqs],
            positions=torch.tensor([seq.position for seq in seqs], device=device),
            slots=torch.tensor([seq.tail_slot for seq in seqs], device=device),
            device_pages=pages.to(device),
            step=step,
        )

    def __call__(self, p: Projections) -> Tensor:
        config, constants, count = self.model.config, self.model.constants[p.layer], len(self.seqs)
        window, window_ids = self._window(p, constants)
        extra: Rows | None = None
        extra_ids: Tensor | None = None
        if p.kind == C128:
            extra, extra_ids = self._all_entries(p, constants)
        elif p.kind == C4:
            extra, extra_ids = self._chosen_entries(p, constants)
        out = torch.zeros_like(p.q)
        out[:count] = sparse_attention(
            p.q[:count], window, window_ids, extra, extra_ids, constants.sink, config.head_dim**-0.5
        )
        return out

    def _window(self, p: Projections, constants: LayerConstants) -> tuple[Rows, Tensor]:
        size = self.model.config.sliding_window
        rows, count = self.tiers.tails.windows[p.layer], len(self.seqs)
        own = self.slots * size + self.positions % size
        row_store(
            p.kv[:count],
            constants.kv_norm,
            self.model.config.rms_norm_eps,
            self.positions,
            constants.inv_freq,
            rows,
            own,
        )
        device = self.positions.device
        lowest = torch.tensor(
            [seq.first_token(p.layer, size) for seq in self.seqs], device=device
        ).unsqueeze(1)
        reached = self.positions.unsqueeze(1) - torch.arange(size - 1, -1, -1, device=device)
        ids = self.slots.unsqueeze(1) * size + reached % size
        return rows, torch.where(reached >= lowest.clamp_min(0), ids, -1)

    def _all_entries(self, p: Projections, constants: LayerConstants) -> tuple[Rows, Tensor]:
        rank = self.ranks.of[p.layer]
        rings, rows = self.tiers.tails.c128_rings[rank], self.tiers.memory.c128[rank]
        self._store(rows, self._pool(p.main_kv, p.main_gate, rings, constants.main), C128)
        visible = (self.positions + 1) // C128
        numbers = torch.arange(int(visible.max()), device=visible.device)
        pages = self.device_pages[:, numbers // C128_ROWS_PER_PAGE]
        ids = pages * C128_ROWS_PER_PAGE + numbers % C128_ROWS_PER_PAGE
        return rows, torch.where(numbers < visible.unsqueeze(1), ids, -1)

    def _chosen_entries(self, p: Projections, constants: LayerConstants) -> tuple[Rows, Tensor]:
        rank, c4 = self.ranks.of[p.layer], self.tiers.c4
        rings = self.tiers.tails.c4_rings[rank]
        entries = self._pool(p.main_kv, p.main_gate, rings, constants.main)
        closed = torch.where(self.positions % C4 == C4 - 1, self.positions // C4, -1)
        c4.store_decoded(rank, self.places, closed, entries)
        return c4.lookup(rank, self.places, self._choose(p, constants), self.step)

    def _choose(self, p: Projections, constants: LayerConstants) -> Tensor:
        assert p.index_q is not None and p.index_g is not None
        rank, count = self.ranks.of[p.layer], len(self.seqs)
        rings, keys = self.tiers.tails.index_rings[rank], self.tiers.memory.index_keys[rank]
        entries = self._pool(p.index_kv, p.index_gate, rings, constants.index)
        self._store(keys, to_key_basis(entries, keys.format.kind), C4)
        q = to_key_basis(p.index_q[:count], keys.format.kind)
        visible = (self.positions + 1) // C4
        scores = index_scores_decode(q, p.index_g[:count], keys, self.device_pages, visible)
        return topk(scores, visible, self.model.config.index_topk)

    def _pool(
        self,
        kv: Tensor | None,
        gate: Tensor | None,
        rings: Tensor,
        params: CompressParams | None,
    ) -> Tensor:
        """Feed a compressor one token a sequence: [B, dim], an entry where a group closes."""
        assert kv is not None and gate is not None and params is not None
        count = len(self.seqs)
        return compress_decode(kv[:count], gate[:count], self.positions, rings, self.slots, params)

    def _store(self, rows: Rows, entries: Tensor, ratio: int) -> None:
        """Keep the entries of the groups that closed, in each sequence's last device page."""
        closing = (self.positions % ratio == ratio - 1).nonzero().flatten()
        if not len(closing):
            return
        positions, per_page = self.positions[closing], PAGE_TOKENS // ratio
        pages = self.device_pages[closing, positions // PAGE_TOKENS]
        rows.write(pages * per_page + positions // ratio % per_page, entries[closing])
