"""One token of each of B sessions: the whole step over fixed buffers, on a GPU as one CUDA graph.

Everything that changes between steps is in one block of int32 words, filled on the host and sent
in one copy: tokens, positions, slots and page tables. The hot set's tables are read and written
inside the graph.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4_tierd.engine.gpu.network import DeviceLayer, Network, Projected
from dsv4_tierd.engine.model.config import C4, C128
from dsv4_tierd.kernels import compress as compress_op
from dsv4_tierd.kernels.compress import compress_decode
from dsv4_tierd.kernels.hyper import hyper_post
from dsv4_tierd.kernels.index_scores import ScanPlan, fill_plan, index_scores_decode, new_plan
from dsv4_tierd.kernels.layout import Rows
from dsv4_tierd.kernels.row_store import row_store
from dsv4_tierd.kernels.sparse_attention import sparse_attention
from dsv4_tierd.kernels.sparse_attention_triton import InverseRope
from dsv4_tierd.kernels.step_ids import StepIds, join_tail, leave_tail, step_ids
from dsv4_tierd.kernels.swap_in import swap_in
from dsv4_tierd.kernels.topk import MirrorRows, topk
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.hot_set import HotSet
from dsv4_tierd.tiering.manager import TierManager
from dsv4_tierd.tiering.plan import C4_ROWS_PER_PAGE, TAIL_C4_ROWS
from dsv4_tierd.tiering.sequence import Sequence

_WORDS = 5  # a session's own: token, position, tail slot, first entry in the tail, tail row


# A session's page tables as they were written: they only change with the pages and the path.
_Written = tuple[Tensor, int, int]


class Inputs:
    """What a step is told: words and two page tables a session, on the host and on the device.

    words: [5, B]; device_pages, mirror_pages: [B, P]; all int32 views of one block. Tables are
    written and sent when they change: once in 256 steps of a session.
    """

    def __init__(self, batch: int, columns: int, device: torch.device) -> None:
        size = batch * (_WORDS + 2 * columns)
        pinned = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self._block = torch.zeros(size, dtype=torch.int32, device=device)
        self.batch, self.columns = batch, columns
        words, self.device_pages, self.mirror_pages = self._views(self._block)
        self.tokens, self.positions, self.slots, self.tail_from, self.tail_rows = words.unbind(0)
        self._words, self._device, self._mirror = (view.numpy() for view in self._views(self._host))
        self._written: list[_Written | None] = [None] * batch
        self._sent = torch.cuda.Event() if pinned else None

    def _views(self, block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        table = self.batch * self.columns
        words, device, mirror = torch.split(block, [_WORDS * self.batch, table, table])
        return (
            words.view(_WORDS, self.batch),
            device.view(self.batch, self.columns),
            mirror.view(self.batch, self.columns),
        )

    def fill(self, seqs: Seq[Sequence], first_tail_row: int) -> bool:
        """Write and send the sessions' words, and the page tables if one changed: says if so.

        Places beyond the sessions repeat the first, which changes nothing.
        """
        if self._sent is not None:
            self._sent.synchronize()  # the last step's words have left
        changed = False
        for place in range(self.batch):
            seq = seqs[place] if place < len(seqs) else seqs[0]
            position, slot = seq.position, seq.tail_slot
            row = first_tail_row + slot * TAIL_C4_ROWS + position // 4 % TAIL_C4_ROWS
            token = int(seq.transcript.tokens[position])
            self._words[:, place] = (token, position, slot, seq.tail_from, row)
            changed = self._write_tables(place, seq) or changed
        size = self._host.numel() if changed else self._words.size
        self._block[:size].copy_(self._host[:size], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        return changed

    def _write_tables(self, place: int, seq: Sequence) -> bool:
        """Write a session's page tables, unless they stand there."""
        count, known = seq.page_count, self._written[place]
        # By the table itself, which is kept: another's would never be taken for it.
        if known is not None and known[0] is seq.device and known[1:] == (count, len(seq.path)):
            return False
        self._written[place] = seq.device, count, len(seq.path)
        for table, pages in ((self._device, seq.device_pages), (self._mirror, seq.mirror_pages)):
            table[place, :count] = pages.numpy()
            table[place, count:] = -1
        return True

    @property
    def host_pages(self) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        """[B, P] device pages, on the host."""
        return self._device


class DecodeStep:
    """The step for up to ``batch`` sessions of up to ``columns`` pages.

    step: [1] int32, counts the steps of all. pool: graphs that never run at once share memory.
    side_streams: chains of a layer that do not need one another run beside each other.
    """

    def __init__(
        self,
        network: Network,
        tiers: TierManager,
        batch: int,
        columns: int,
        step: Tensor,
        pool: Any = None,
        side_streams: bool = True,
    ) -> None:
        device, config = network.device, network.config
        self.network, self.tiers = network, tiers
        self.inputs = Inputs(batch, columns, device)
        self.hot = tiers.c4 if isinstance(tiers.c4, HotSet) else None
        self._step = step
        self._ids = StepIds.empty(batch, config.sliding_window, columns, device)
        self._rows = torch.zeros(3, batch, config.index_topk, dtype=torch.int32, device=device)
        self._pooled = compress_op.scratch(batch, config.head_dim, device)
        self._plan: ScanPlan | None = new_plan(batch, columns, device) if batch > 1 else None
        self._pool = pool
        count = 2 if side_streams and device.type == "cuda" else 0
        self._sides = [torch.cuda.Stream(device) for _ in range(count)]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0)
        self.choices: Tensor | None = None

    def record_choices(self) -> Tensor:
        """What every later step chooses: [C4 layers, B, k] int32 entries, overwritten by each."""
        layers = len(self.network.config.c4_layers)
        if self.choices is None:
            self.choices = self._rows.new_zeros(layers, *self._rows.shape[1:])
            # Recorded without it. Its results go too: they alone may keep the pool, and no capture
            # joins one that no graph uses.
            self._logits, self._graph = torch.empty(0), None
        return self.choices

    def run(self, seqs: Seq[Sequence]) -> Tensor:
        """Compute each sequence's pending token. Returns logits [len(seqs), vocab] fp32.

        They are overwritten by the next run. The caller commits the tokens.
        """
        inputs = self.inputs
        assert 0 < len(seqs) <= inputs.batch, len(seqs)
        window = self.network.config.sliding_window
        for seq in seqs:  # decode reads whole windows: a replay has made them
            assert seq.position < inputs.columns * BLOCK_TOKENS
            assert seq.first_token(len(self.network.layers) - 1, window) <= max(
                0, seq.position - window + 1
            )
        changed = inputs.fill(seqs, 0 if self.hot is None else self.hot.hot_rows)
        if self._plan is not None and changed:
            fill_plan(self._plan, inputs.host_pages, C4_ROWS_PER_PAGE)
        if self.network.device.type != "cuda":
            self._logits = self._forward()
        elif self._graph is None:
            self._capture()
        if self._graph is not None:
            self._graph.replay()
        return self._logits[: len(seqs)]

    def _capture(self) -> None:
        """Run once to compile and load what the step needs, then record it.

        The first run computes what the replay computes again, with the same rows and bits.
        """
        stream = torch.cuda.current_stream(self.network.device)
        self._forward()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            self._logits = self._forward()
        self._graph = graph

    # ------------------------------------------------------------ the step
    def _forward(self) -> Tensor:
        network, inputs = self.network, self.inputs
        step_ids(inputs.positions, inputs.slots, inputs.device_pages, self._ids)
        self._step.add_(1)
        x = network.embed(inputs.tokens)
        mixed = network.gather(x, network.layers[0].attn)
        for layer in network.layers:
            y = self._attention(layer, mixed.h)
            x, mixed = network.spread_gather(y, x, mixed, layer.ffn)
            y = network.experts(layer, mixed.h, inputs.tokens)
            if layer is network.layers[-1]:
                x = hyper_post(y, x, mixed.post, mixed.comb)
            else:
                following = network.layers[layer.number + 1].attn
                x, mixed = network.spread_gather(y, x, mixed, following)
        return network.logits(x)

    def _attention(self, layer: DeviceLayer, h: Tensor) -> Tensor:
        network, positions = self.network, self.inputs.positions
        p = network.project(layer, h)
        extra: Rows | None = None
        extra_ids: Tensor | None = None
        # Three chains that meet in attention: what is chosen, what is stored, the queries.
        with self._beside(0):
            if layer.kind == C4:
                extra, extra_ids = self._chosen_entries(layer, p)
        with self._beside(1):
            if layer.kind == C128:
                extra, extra_ids = self._all_entries(layer, p)
            self._store_rows(layer, p)
        q = network.rotated(layer, p, positions)
        self._join()
        o = sparse_attention(
            q,
            self.tiers.tails.windows[layer.number],
            self._ids.window,
            extra,
            extra_ids,
            layer.constants.sink,
            network.scale,
            inverse=InverseRope(positions, layer.attention.inv_freq),
        )
        return network.output(layer, o)

    def _beside(self, side: int) -> AbstractContextManager[object]:
        """Queue what follows on a side stream, after what the main one has."""
        if not self._sides:
            return nullcontext()
        stream = self._sides[side]
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        return torch.cuda.stream(stream)

    def _join(self) -> None:
        """The main stream goes on after the side streams."""
        for stream in self._sides:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _store_rows(self, layer: DeviceLayer, p: Projected) -> None:
        """The token's window row, and the C4 row of a group that it closes."""
        weights, positions = layer.attention, self.inputs.positions
        row_store(
            p.kv,
            weights.kv_norm,
            self.network.config.rms_norm_eps,
            positions,
            weights.inv_freq,
            self.tiers.tails.windows[layer.number],
            self._ids.own,
        )
        if layer.kind == C4:
            assert p.main_kv is not None and p.main_gate is not None
            assert layer.constants.main is not None
            rows, own = self._c4_rows(layer)
            rings = self.tiers.tails.c4_rings[layer.rank]
            slots, params = self.inputs.slots, layer.constants.main
            compress_decode(
                p.main_kv, p.main_gate, positions, rings, slots, params, rows=rows, ids=own
            )

    def _all_entries(self, layer: DeviceLayer, p: Projected) -> tuple[Rows, Tensor]:
        rows = self.tiers.memory.c128[layer.rank]
        assert p.main_kv is not None and p.main_gate is not None
        assert layer.constants.main is not None
        compress_decode(
            p.main_kv,
            p.main_gate,
            self.inputs.positions,
            self.tiers.tails.c128_rings[layer.rank],
            self.inputs.slots,
            layer.constants.main,
            rows=rows,
            ids=self._ids.c128,
            held=self._pooled,
        )
        return rows, self._ids.c128_all

    def _chosen_entries(self, layer: DeviceLayer, p: Projected) -> tuple[Rows, Tensor]:
        positions, slots = self.inputs.positions, self.inputs.slots
        assert p.index_kv is not None and p.index_gate is not None
        assert layer.constants.index is not None
        keys = self.tiers.memory.index_keys[layer.rank]
        rings, params = self.tiers.tails.index_rings[layer.rank], layer.constants.index
        compress_decode(
            p.index_kv, p.index_gate, positions, rings, slots, params, rows=keys, ids=self._ids.c4
        )
        scores = index_scores_decode(
            self.network.queries(layer, p, positions),
            None,
            keys,
            self.inputs.device_pages,
            self._ids.visible,
            plan=self._plan,
            fill=False,
        )
        return self._c4_rows(layer)[0], self._find(layer, scores)

    def _c4_rows(self, layer: DeviceLayer) -> tuple[Rows, Tensor]:
        """Where attention reads C4 rows, and the row [B] that a group closed now gets there."""
        if self.hot is not None:
            return self.hot.rows[layer.rank], self.inputs.tail_rows
        assert self.tiers.memory.device_c4 is not None
        return self.tiers.memory.device_c4[layer.rank], self._ids.c4

    def _find(self, layer: DeviceLayer, scores: Tensor) -> Tensor:
        """The rows [B, K] of the best entries by their scores, swapped in where they must be."""
        chosen, rows, found = self._rows.unbind(0)
        inputs, visible = self.inputs, self._ids.visible
        k = chosen.shape[1]
        pages = inputs.device_pages if self.hot is None else inputs.mirror_pages
        topk(scores, visible, k, chosen, MirrorRows(pages, rows))
        if self.choices is not None:
            self.choices[layer.rank].copy_(chosen)
        if self.hot is None:
            return rows
        leave_tail(chosen, rows, inputs.tail_from)
        tables, mirror = self.hot.tables(layer.rank), self.tiers.memory.mirror_c4[layer.rank]
        swap_in(rows, tables, mirror, self._step, found, self.hot.device_counters)
        join_tail(chosen, found, inputs.tail_from, inputs.slots, self.hot.hot_rows, TAIL_C4_ROWS)
        return found
