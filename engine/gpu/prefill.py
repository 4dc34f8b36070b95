"""A chunk of one sequence through one layer after another, over the tiers.

Nothing that the sequence's own tail holds is written, so a chunk can be given up between any two
layers: its new tail goes to the scratch slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.engine.gpu.network import DeviceLayer, Network, Projected
from dsv4_tierd.engine.model.config import C4, C128
from dsv4_tierd.kernels.compress import compress_prefill
from dsv4_tierd.kernels.hyper import hyper_post
from dsv4_tierd.kernels.index_scores import scores_topk
from dsv4_tierd.kernels.layout import PAGE_TOKENS, Rows, row_pool
from dsv4_tierd.kernels.ref.compress import CompressParams
from dsv4_tierd.kernels.ref.sparse_attention import Listed, Picked
from dsv4_tierd.kernels.row_store import row_store
from dsv4_tierd.kernels.sparse_attention import sparse_attention_prefill
from dsv4_tierd.kernels.sparse_attention_triton import InverseRope
from dsv4_tierd.tiering.hot_set import HotSet, page_rows
from dsv4_tierd.tiering.manager import TierManager
from dsv4_tierd.tiering.plan import C4_ROWS_PER_PAGE
from dsv4_tierd.tiering.sequence import Sequence
from dsv4_tierd.tiering.staging import Staging, Text

_C128_ROWS_PER_PAGE = PAGE_TOKENS // C128
SCORE_ROWS = 256  # queries that are scored at once: 64 KiB of scratch a page


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where a chunk's rows lie: device pages [P] int32 on the device, and its C4 rows' text."""

    seq: Sequence
    stop: int
    device_pages: Tensor
    text: Text | None


class Prefill:
    """The layers of a chunk. workspace: fp32 scores of a tile of queries, on the device."""

    def __init__(self, network: Network, tiers: TierManager, workspace: Tensor) -> None:
        self.network, self.tiers = network, tiers
        self._workspace = workspace
        self.staging: Staging | None = None
        if isinstance(tiers.c4, HotSet) and tiers.c4.rows:
            rows, device = tiers.config.plan.staging_rows, network.device
            self.staging = Staging(tiers.memory, rows, device)

    def begin(self, seq: Sequence, stop: int) -> ChunkPlace:
        """Start a chunk of tokens [seq.position, stop); its pages are there."""
        text: Text | None = None
        if self.staging is not None:
            known = min(max(seq.position, seq.emit_from), stop) // C4
            tokens = stop - seq.position
            text = self.staging.begin(seq.mirror_pages, known, stop // C4, tokens)
        return ChunkPlace(seq, stop, seq.device_pages.to(self.network.device), text)

    def layer(
        self, number: int, place: ChunkPlace, x: Tensor, ids: Tensor, positions: Tensor
    ) -> Tensor:
        """Streams x [T, n, d] of tokens ids [T] at positions [T] int32 to the next streams."""
        network = self.network
        layer = network.layers[number]
        mixed = network.gather(x, layer.attn)
        y = self._attention(layer, place, mixed.h, positions)
        x, mixed = network.spread_gather(y, x, mixed, layer.ffn)
        y = network.experts(layer, mixed.h, ids)
        return hyper_post(y, x, mixed.post, mixed.comb, out=x)

    def skip(self, number: int, place: ChunkPlace) -> None:
        """A layer that no token of the chunk passes (a bounded replay)."""
        self._done(self.network.layers[number], place)

    def _done(self, layer: DeviceLayer, place: ChunkPlace) -> None:
        """The layer's readers of staged rows are queued, if it has any."""
        if layer.kind == C4 and self.staging is not None and place.text is not None:
            self.staging.done(layer.rank, place.text)

    # ------------------------------------------------------------ attention
    def _attention(
        self, layer: DeviceLayer, place: ChunkPlace, h: Tensor, positions: Tensor
    ) -> Tensor:
        network = self.network
        p = network.project(layer, h)
        first = place.stop - len(h)
        window, seen = self._window(layer, place, p, first, positions)
        scope: Listed | Picked | None = None
        if layer.kind == C128:
            scope = self._all_entries(layer, place, p, first, positions)
        elif layer.kind == C4:
            scope = self._chosen_entries(layer, place, p, first, positions)
        o = sparse_attention_prefill(
            network.rotated(layer, p, positions),
            window,
            seen,
            scope,
            layer.constants.sink,
            network.scale,
            network.config.sliding_window,
            inverse=InverseRope(positions, layer.attention.inv_freq),
        )
        self._done(layer, place)
        return network.output(layer, o)

    def _window(
        self, layer: DeviceLayer, place: ChunkPlace, p: Projected, first: int, positions: Tensor
    ) -> tuple[Rows, Tensor]:
        """The rows before and of the chunk in token order, and how many each query sees."""
        config, seq, device = self.network.config, place.seq, positions.device
        size, count = config.sliding_window, len(positions)
        lowest = seq.first_token(layer.number, size)
        tails = self.tiers.tails.windows[layer.number]
        rows = row_pool(tails.format, size - 1 + count, size - 1 + count, device)
        old = torch.arange(max(lowest, first - size + 1), first, device=device)
        rows.copy_from(size - 1 - (first - old), tails, seq.tail_slot * size + old % size)
        own = torch.arange(size - 1, size - 1 + count, device=device, dtype=torch.int32)
        norm, inv_freq = layer.attention.kv_norm, layer.attention.inv_freq
        row_store(p.kv, norm, config.rms_norm_eps, positions, inv_freq, rows, own)
        kept = torch.arange(max(lowest, place.stop - size), place.stop, device=device)
        slot = self.tiers.scratch_slot
        tails.copy_from(slot * size + kept % size, rows, size - 1 + kept - first)
        return rows, (positions - lowest + 1).clamp_max(size)

    def _all_entries(
        self, layer: DeviceLayer, place: ChunkPlace, p: Projected, first: int, positions: Tensor
    ) -> Listed:
        rows, rings = self.tiers.memory.c128[layer.rank], self.tiers.tails.c128_rings[layer.rank]
        numbers = torch.arange(place.stop // C128, device=positions.device)
        ids = page_rows(place.device_pages, numbers, _C128_ROWS_PER_PAGE).int()
        assert p.main_kv is not None and p.main_gate is not None
        assert layer.constants.main is not None
        params = layer.constants.main
        self._emit(place, first, p.main_kv, p.main_gate, rings, params, rows, ids)
        return Listed(rows, ids, (positions + 1) // C128)

    def _chosen_entries(
        self, layer: DeviceLayer, place: ChunkPlace, p: Projected, first: int, positions: Tensor
    ) -> Picked:
        tiers, network = self.tiers, self.network
        keys, end = tiers.memory.index_keys[layer.rank], place.stop // C4
        numbers = torch.arange(end, device=positions.device)
        ids = page_rows(place.device_pages, numbers).int()
        assert p.index_kv is not None and p.index_gate is not None
        assert p.main_kv is not None and p.main_gate is not None
        assert layer.constants.index is not None and layer.constants.main is not None
        rings, params = tiers.tails.index_rings[layer.rank], layer.constants.index
        self._emit(place, first, p.index_kv, p.index_gate, rings, params, keys, ids)
        rings, params = tiers.tails.c4_rings[layer.rank], layer.constants.main
        if self.staging is None or place.text is None:
            assert tiers.memory.device_c4 is not None
            rows = tiers.memory.device_c4[layer.rank]
            self._emit(place, first, p.main_kv, p.main_gate, rings, params, rows, ids)
        else:
            rows = self.staging.rows(layer.rank, place.text)
            own = numbers.int()
            self._emit(place, first, p.main_kv, p.main_gate, rings, params, rows, own)
        queries = network.queries(layer, p, positions)
        pages = place.device_pages
        tile = max(1, min(SCORE_ROWS, self._workspace.numel() // (len(pages) * C4_ROWS_PER_PAGE)))
        chosen = scores_topk(
            queries,
            None,
            keys,
            pages,
            (positions + 1) // C4,
            network.config.index_topk,
            tile_rows=tile,
            scratch=self._workspace[: tile * len(pages) * C4_ROWS_PER_PAGE].view(tile, -1),
        )
        return self._picked(layer, place, rows, chosen)

    def _picked(self, layer: DeviceLayer, place: ChunkPlace, rows: Rows, chosen: Tensor) -> Picked:
        if self.staging is None or place.text is None:
            found = page_rows(place.device_pages, chosen.clamp_min(0)).int()
            return Picked(rows, torch.where(chosen >= 0, found, -1))
        self.staging.fetch(layer.rank, place.text, chosen)
        # What the chunk leaves unfinished is read from the tail in decode.
        hot, end = self.tiers.c4, place.stop // C4
        assert isinstance(hot, HotSet)
        unfinished = torch.arange(end - end % C4_ROWS_PER_PAGE, end, device=chosen.device)
        hot.fill_tail(layer.rank, self.tiers.scratch_slot, unfinished, rows)
        return Picked(rows, chosen)

    def _emit(
        self,
        place: ChunkPlace,
        first: int,
        kv: Tensor,
        gate: Tensor,
        rings: Tensor,
        params: CompressParams,
        rows: Rows,
        ids: Tensor,
    ) -> None:
        """Feed a compressor; entries that have no page yet are stored at ``ids`` of their number.

        The new ring goes to the scratch slot. A replay emits no entry.
        """
        seq, ratio = place.seq, params.ratio
        begin, end = first // ratio, place.stop // ratio
        fresh = max(begin, min(end, seq.emit_from // ratio))
        own = ids[begin:end]
        if fresh > begin:
            own = own.clone()
            own[: fresh - begin] = -1
        ring, new_ring = rings[seq.tail_slot], rings[self.tiers.scratch_slot]
        compress_prefill(kv, gate, first, ring, params, new_ring, rows=rows, ids=own)
