"""Where the attention reads C4 rows: a hot set over the mirror, or the pages themselves.

``HotSet`` is HiSparse: rows are swapped in from the mirror as the indexer chooses them, keyed
by mirror row, so sessions on one prefix share them. The last of a session's own rows, not yet
or just now in the mirror, stand in *tail rows* of the same pool, so that one index list
addresses both. ``DirectRows`` reads mirror pages where they lie: the plain twin, and what runs
when tiering is off or everything is resident.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from dsv4_tierd.kernels import swap_in as swap_in_op
from dsv4_tierd.kernels.layout import Rows, row_pool
from dsv4_tierd.kernels.ref.swap_in import plan_swap_in, swap_in
from dsv4_tierd.tiering.mirror import PageMemory
from dsv4_tierd.tiering.plan import C4_ROWS_PER_PAGE, TAIL_C4_ROWS, Plan

# A chunk of n tokens chooses nearly every row of a context shorter than n times this.
STREAM_TOKENS_PER_QUERY = 2048


@dataclass(frozen=True, slots=True)
class SwapCounters:
    """Rows asked for that were in the hot set, and rows fetched; counters never go down."""

    hits: int = 0
    misses: int = 0
    bytes_fetched: int = 0


@dataclass(frozen=True, slots=True)
class C4Place:
    """Where one sequence's C4 rows lie: its pages, and its tail's slot.

    mirror_pages, device_pages: [page_count] int32 on the host; rows from entry ``tail_from`` on
    are read from the tail.
    """

    mirror_pages: Tensor
    device_pages: Tensor
    tail_slot: int
    tail_from: int

    def mirror_rows(self, entries: Tensor) -> Tensor:
        """Flat mirror row of each entry (int64); entries must lie on the mirrored pages."""
        return page_rows(self.mirror_pages, entries)


def page_rows(pages: Tensor, entries: Tensor, per_page: int = C4_ROWS_PER_PAGE) -> Tensor:
    """Flat row (int64) of entries [...] int in pages [page_count] int32 of any device.

    per_page: entries of one page; by default C4's.
    """
    numbers = pages.to(entries.device, torch.int64)[entries // per_page]
    return numbers * per_page + entries % per_page


class C4Rows(Protocol):
    """The two ways of keeping C4 rows. ``layer``: rank among the C4 layers.

    Entries are C4 entry numbers (position // 4), -1 where there is none.
    """

    @property
    def counters(self) -> SwapCounters:
        """Rows found and fetched so far."""

    def store_decoded(
        self, layer: int, places: Seq[C4Place], entries: Tensor, rows: Tensor
    ) -> None:
        """Keep one new entry a sequence: entries [B] (-1: none closed), rows [B, dim] fp32."""

    def lookup(
        self, layer: int, places: Seq[C4Place], entries: Tensor, step: int
    ) -> tuple[Rows, Tensor]:
        """Chosen entries [B, K] to (rows, row ids [B, K]); fetches what is missing."""

    def store_prefilled(
        self, layer: int, place: C4Place, first: int, rows: Tensor, end: int
    ) -> None:
        """Keep entries [first, first + n) of a chunk that ends at entry ``end``: rows [n, dim]."""

    def prefill_lookup(
        self, layer: int, place: C4Place, chosen: Tensor, count: int
    ) -> tuple[Rows, Tensor]:
        """Chosen entries [T, K] of the first ``count`` to (rows, row ids [T, K])."""

    def flush(self, place: C4Place, first: int, end: int) -> None:
        """Make the mirror pages hold entries [first, end) of a sequence."""

    def load_tail(self, place: C4Place, first: int, end: int) -> None:
        """The inverse of ``flush``: entries [first, end) of an unfinished page to the tail."""

    def copy_tail(self, source_slot: int, target_slot: int) -> None:
        """A tail slot's rows to another's."""

    def forget_page(self, mirror_page: int) -> None:
        """The mirror page was taken and is about to get other content; said at every taking."""


class DirectRows:
    """C4 rows are read and written in the pages themselves: the device's where they hold them."""

    def __init__(self, memory: PageMemory) -> None:
        self.on_device = memory.device_c4 is not None
        self.rows = memory.mirror_c4 if memory.device_c4 is None else memory.device_c4

    @property
    def counters(self) -> SwapCounters:
        """Nothing is ever fetched."""
        return SwapCounters()

    def _row_ids(self, place: C4Place, entries: Tensor) -> Tensor:
        pages = place.device_pages if self.on_device else place.mirror_pages
        return page_rows(pages, entries)

    def store_decoded(
        self, layer: int, places: Seq[C4Place], entries: Tensor, rows: Tensor
    ) -> None:
        for i, place in enumerate(places):
            if entries[i] >= 0:
                self.rows[layer].write(self._row_ids(place, entries[i : i + 1]), rows[i : i + 1])

    def lookup(
        self, layer: int, places: Seq[C4Place], entries: Tensor, step: int
    ) -> tuple[Rows, Tensor]:
        ids = [
            torch.where(e >= 0, self._row_ids(p, e.long().clamp_min(0)), -1)
            for p, e in zip(places, entries, strict=True)
        ]
        return self.rows[layer], torch.stack(ids)

    def store_prefilled(
        self, layer: int, place: C4Place, first: int, rows: Tensor, end: int
    ) -> None:
        self.rows[layer].write(self._row_ids(place, torch.arange(first, first + len(rows))), rows)

    def prefill_lookup(
        self, layer: int, place: C4Place, chosen: Tensor, count: int
    ) -> tuple[Rows, Tensor]:
        ids = self._row_ids(place, chosen.long().clamp_min(0))
        return self.rows[layer], torch.where(chosen >= 0, ids, -1)

    def flush(self, place: C4Place, first: int, end: int) -> None:
        """Nothing: they are there already."""

    def load_tail(self, place: C4Place, first: int, end: int) -> None:
        """Nothing: the mirror page is where they are read."""

    def copy_tail(self, source_slot: int, target_slot: int) -> None:
        """Nothing: the page is where they are read."""

    def forget_page(self, mirror_page: int) -> None:
        """Nothing is kept elsewhere."""


class HotSet:
    """The C4 working set of every layer on the device, over the mirror.

    Per layer: ``residency`` [mirror rows] int32 (hot slot or -1), ``owner`` [hot rows] int32
    (mirror row or -1), ``stamp`` [hot rows] int32 (step of last use). Rows beyond the hot ones
    are the tails': TAIL_C4_ROWS a tail slot, row ``entry % TAIL_C4_ROWS``.
    """

    def __init__(self, memory: PageMemory, plan: Plan, device: torch.device) -> None:
        layers = len(memory.mirror_c4)
        self._mirror = memory.mirror_c4
        # Whole pages, so that hot rows and tail rows never share one.
        self.hot_rows = -(-plan.hot_rows // C4_ROWS_PER_PAGE) * C4_ROWS_PER_PAGE
        total = self.hot_rows + plan.tail_slots * TAIL_C4_ROWS
        fmt = memory.layout.latent
        self.rows = tuple(row_pool(fmt, total, C4_ROWS_PER_PAGE, device) for _ in range(layers))
        mirror_rows = plan.mirror_pages * C4_ROWS_PER_PAGE
        self.residency = torch.full((layers, mirror_rows), -1, dtype=torch.int32, device=device)
        # One word more than there are slots: what forgetting a row that is not resident writes.
        words = layers * self.hot_rows + 1
        self._owner = torch.full((words,), -1, dtype=torch.int32, device=device)
        self._stamp = torch.full((words,), -1, dtype=torch.int32, device=device)
        self.owner = self._owner[:-1].view(layers, self.hot_rows)
        self.stamp = self._stamp[:-1].view(layers, self.hot_rows)
        self.device_counters = torch.zeros(2, dtype=torch.int64, device=device)
        self._taken = bytearray(plan.mirror_pages)
        self._staging_rows = plan.staging_rows

    @property
    def counters(self) -> SwapCounters:
        """What was found and fetched so far; waits for the device."""
        hits, misses = (int(count) for count in self.device_counters.tolist())
        return SwapCounters(hits, misses, misses * self.rows[0].format.row_bytes)

    def store_decoded(
        self, layer: int, places: Seq[C4Place], entries: Tensor, rows: Tensor
    ) -> None:
        chosen = (entries >= 0).nonzero().flatten()
        if len(chosen):
            bases = torch.tensor(
                [self._tail_base(place.tail_slot) for place in places], device=entries.device
            )
            self.rows[layer].write(bases[chosen] + entries[chosen] % TAIL_C4_ROWS, rows[chosen])

    def lookup(
        self, layer: int, places: Seq[C4Place], entries: Tensor, step: int
    ) -> tuple[Rows, Tensor]:
        mirror_rows = torch.full_like(entries, -1, dtype=torch.int64)
        tail_ids = torch.full_like(mirror_rows, -1)
        for i, place in enumerate(places):
            chosen = entries[i].long()
            in_tail = chosen >= place.tail_from
            tail_ids[i] = torch.where(
                in_tail, self._tail_base(place.tail_slot) + chosen % TAIL_C4_ROWS, -1
            )
            in_mirror = (chosen >= 0) & ~in_tail
            mirror_rows[i, in_mirror] = place.mirror_rows(chosen[in_mirror])
        planned = plan_swap_in(
            mirror_rows, self.residency[layer], self.owner[layer], self.stamp[layer], step
        )
        swap_in(planned, self.rows[layer], self._mirror[layer])
        self.device_counters[0] += planned.hits
        self.device_counters[1] += planned.misses
        return self.rows[layer], torch.where(tail_ids >= 0, tail_ids, planned.slots.long())

    def store_prefilled(
        self, layer: int, place: C4Place, first: int, rows: Tensor, end: int
    ) -> None:
        """Written through to the mirror; what the chunk leaves unfinished, to the tail also."""
        self._mirror[layer].write(place.mirror_rows(torch.arange(first, first + len(rows))), rows)
        self._load_layer(layer, place, end - end % C4_ROWS_PER_PAGE, end)

    def prefill_lookup(
        self, layer: int, place: C4Place, chosen: Tensor, count: int
    ) -> tuple[Rows, Tensor]:
        """A long chunk streams the whole layer into staging; a short append reads its rows."""
        if len(chosen) * STREAM_TOKENS_PER_QUERY < count * 4:
            return self._read_chosen(layer, place, chosen)
        self._stream(layer, place, count)
        return self._staging[layer % 2], chosen

    def _read_chosen(self, layer: int, place: C4Place, chosen: Tensor) -> tuple[Rows, Tensor]:
        named, inverse = torch.unique(chosen, return_inverse=True)
        present = named[named >= 0]  # what is left out sorts first: ids are from 0 on
        inverse = inverse - (len(named) - len(present))
        self._staging[layer % 2].copy_from(
            torch.arange(len(present)), self._mirror[layer], place.mirror_rows(present.long())
        )
        return self._staging[layer % 2], torch.where(chosen >= 0, inverse, -1)

    @cached_property
    def _staging(self) -> list[Rows]:
        """Two layers' rows; the device's prefill has its own."""
        fmt, device = self.rows[0].format, self.owner.device
        layers = range(min(len(self.rows), 2))
        return [row_pool(fmt, self._staging_rows, C4_ROWS_PER_PAGE, device) for _ in layers]

    def _stream(self, layer: int, place: C4Place, count: int) -> None:
        staged, mirror = self._staging[layer % 2], self._mirror[layer]
        whole = count // C4_ROWS_PER_PAGE
        pages = place.mirror_pages[:whole].long()
        staged.data[:whole] = mirror.data[pages].to(staged.data.device)
        if staged.scale is not None and mirror.scale is not None:
            staged.scale[:whole] = mirror.scale[pages].to(staged.scale.device)
        rest = torch.arange(whole * C4_ROWS_PER_PAGE, count)
        if len(rest):
            staged.copy_from(rest, mirror, place.mirror_rows(rest))

    def flush(self, place: C4Place, first: int, end: int) -> None:
        entries = torch.arange(first, end)
        ids = self._tail_base(place.tail_slot) + entries % TAIL_C4_ROWS
        for layer, hot in enumerate(self.rows):
            self._mirror[layer].copy_from(place.mirror_rows(entries), hot, ids)

    def load_tail(self, place: C4Place, first: int, end: int) -> None:
        for layer in range(len(self.rows)):
            self._load_layer(layer, place, first, end)

    def copy_tail(self, source_slot: int, target_slot: int) -> None:
        source, target = (
            slice(start, start + TAIL_C4_ROWS // C4_ROWS_PER_PAGE)
            for slot in (source_slot, target_slot)
            for start in [self._tail_base(slot) // C4_ROWS_PER_PAGE]
        )
        for rows in self.rows:
            rows.data[target].copy_(rows.data[source])
            if rows.scale is not None:
                rows.scale[target].copy_(rows.scale[source])

    def fill_tail(self, layer: int, tail_slot: int, entries: Tensor, staged: Rows) -> None:
        """Tail rows of entries [n] of an unfinished page, from staging, where row e is entry e."""
        ids = self._tail_base(tail_slot) + entries % TAIL_C4_ROWS
        self.rows[layer].copy_from(ids, staged, entries)

    def _load_layer(self, layer: int, place: C4Place, first: int, end: int) -> None:
        entries = torch.arange(first, end)
        ids = self._tail_base(place.tail_slot) + entries % TAIL_C4_ROWS
        self.rows[layer].copy_from(ids, self._mirror[layer], place.mirror_rows(entries))

    def forget_page(self, mirror_page: int) -> None:
        if not self._taken[mirror_page]:
            self._taken[mirror_page] = 1  # it had no content before
            return
        first, layers = mirror_page * C4_ROWS_PER_PAGE, len(self.rows)
        page = self.residency[:, first : first + C4_ROWS_PER_PAGE]
        offsets = torch.arange(layers, device=page.device).unsqueeze(1) * self.hot_rows
        slots = torch.where(page >= 0, page + offsets, layers * self.hot_rows).flatten().long()
        self._owner.index_fill_(0, slots, -1)
        self._stamp.index_fill_(0, slots, -1)
        page.fill_(-1)

    def tables(self, layer: int) -> swap_in_op.HotSet:
        """A layer's rows and tables, as the op takes them."""
        return swap_in_op.HotSet(
            self.rows[layer], self.residency[layer], self.owner[layer], self.stamp[layer]
        )

    def _tail_base(self, tail_slot: int) -> int:
        return self.hot_rows + tail_slot * TAIL_C4_ROWS
