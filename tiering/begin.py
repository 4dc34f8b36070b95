"""What a sequence waits for before it computes: stored pages, device pages, its tail in a slot."""

from __future__ import annotations

import logging

import torch

from dsv4_tierd.kernels.tail_layout import TailLayout
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.coordinator import Coordinator
from dsv4_tierd.tiering.errors import TransferFailed
from dsv4_tierd.tiering.evict import Evictor
from dsv4_tierd.tiering.hot_set import C4Rows
from dsv4_tierd.tiering.idle import IdleTails
from dsv4_tierd.tiering.mirror import PageMemory
from dsv4_tierd.tiering.pages import PagePool
from dsv4_tierd.tiering.radix import NO_PAGE, RadixTree
from dsv4_tierd.tiering.resume import ResumePoints
from dsv4_tierd.tiering.sequence import Sequence
from dsv4_tierd.tiering.store.protocol import ObjectKind
from dsv4_tierd.tiering.tails import Tail, TailPool

log = logging.getLogger("dsv4_tierd.tiering")


class StaleStart(Exception):
    """What a sequence was going to start from is gone; open it again."""


class Begin:
    """Brings an opened sequence to where it may compute, and gives it pages from then on.

    pools: of mirror and of device pages.
    """

    def __init__(
        self,
        layout: TailLayout,
        tree: RadixTree,
        memory: PageMemory,
        c4: C4Rows,
        tails: TailPool,
        points: ResumePoints,
        evictor: Evictor,
        idle: IdleTails,
        coordinator: Coordinator,
        pools: tuple[PagePool, PagePool],
    ) -> None:
        self._layout, self._tree, self._memory, self._c4 = layout, tree, memory, c4
        self._tails, self._points, self._evictor, self._idle = tails, points, evictor, idle
        self._io, self._pools = coordinator, pools

    def ready(self, seq: Sequence) -> bool:
        """Bring stored pages in; True once the sequence may compute.

        Raises StaleStart if something the start relied on is gone: close and open again.
        """
        waiting = False
        for node in seq.path:
            if node.mirror != NO_PAGE:
                continue
            waiting = True
            if not self._io.in_flight(node, ObjectKind.PAGE):
                paid = seq.reservation.mirror - (len(seq.mirror) - len(seq.path))
                if not node.stored or not self._io.up or paid <= 0:
                    raise StaleStart
                if self._io.can_load:
                    seq.reservation.mirror -= 1
                    self._io.load(node, ObjectKind.PAGE, self._evictor.take_mirror())
            elif not self._io.loading(node, ObjectKind.PAGE):
                raise StaleStart  # late: it may still land, but not for us
        point_ready = self._point_ready(seq)
        self._restore(seq)
        if waiting or not point_ready:
            return False
        if seq.incoming is not None and not seq.incoming.query():
            return False
        return self._begin(seq)

    def _point_ready(self, seq: Sequence) -> bool:
        node = seq.start.point
        if node is None or node.resume != NO_PAGE:
            return True
        if not self._io.in_flight(node, ObjectKind.RESUME):
            here = node.mirror != NO_PAGE or self._io.in_flight(node, ObjectKind.PAGE)
            if not here or not self._io.can_load:
                return False  # its page first
            slot = self._points.take() if node.resume_stored and self._io.up else None
            if slot is None:
                raise StaleStart
            self._io.load(node, ObjectKind.RESUME, slot)
        elif not self._io.loading(node, ObjectKind.RESUME):
            raise StaleStart
        return False

    def _restore(self, seq: Sequence) -> None:
        """Start to fill device pages of what is in the mirror, while the rest comes in."""
        landed = seq.restored
        while landed < len(seq.path) and seq.path[landed].mirror != NO_PAGE:
            landed += 1
        if landed == seq.restored:
            return
        missing = [node for node in seq.path[seq.restored : landed] if node.device == NO_PAGE]
        for node in missing:
            seq.reservation.device -= 1
            self._tree.set_device(node, self._evictor.take_device())
        # Also with none missing: another sequence's copies of these pages may be under way.
        seq.incoming = self._memory.restore_all(
            [node.mirror for node in missing], [node.device for node in missing]
        )
        seq.restored = landed

    def _begin(self, seq: Sequence) -> bool:
        """Its pages are filled: fill the tail's slot."""
        count = seq.page_count = len(seq.path)
        seq.mirror[:count] = torch.tensor([node.mirror for node in seq.path], dtype=torch.int32)
        seq.device[:count] = torch.tensor([node.device for node in seq.path], dtype=torch.int32)
        if seq.tail is not None:
            self._begin_from_tail(seq, seq.tail)
        else:
            seq.tail_slot = self._take_tail_slot()
            self._tails.clear(seq.tail_slot)
            if seq.start.point is not None:
                point = self._points.slot(seq.start.point.resume)
                self._layout.restore(point, seq.position, self._tails.slots[seq.tail_slot])
        seq.rolling_slot = self._points.take()  # last: it may evict the point just read
        seq.tail_from = seq.page_start_entry
        return True

    def _begin_from_tail(self, seq: Sequence, tail: Tail) -> None:
        if IdleTails.lost(tail):
            raise StaleStart
        if self._idle.adopt(tail):
            assert tail.slot is not None
            seq.tail_slot, seq.tail, seq.tail_dirty = tail.slot, None, True
            if tail.mirror != NO_PAGE:
                self._add_page(seq, tail.mirror, tail.device)
                # The tail's own pages stand for one that was reserved.
                self._unreserve(seq, 1)
            return
        packed = tail.packed if tail.slot is None else None
        seq.tail_slot = self._take_tail_slot()  # may pack this very tail away
        has_page = tail.position % BLOCK_TOKENS >= 4
        if has_page:
            self.extend(seq, tail.position)
        if tail.slot is not None:
            self._copy_tail(seq, tail)
            return
        packed = packed or tail.packed
        if packed is None:
            self._tails.free(seq.tail_slot)
            seq.tail_slot = NO_PAGE
            raise StaleStart
        page = self._memory.blob(int(seq.mirror[seq.page_count - 1])) if has_page else None
        try:
            self._tails.unpack(packed, seq.tail_slot, page)
        except TransferFailed as error:
            log.warning("packed tail is not used, recomputing: %s", error)
            self._tails.free(seq.tail_slot)
            seq.tail_slot = NO_PAGE
            if not IdleTails.lost(tail):  # taking the slot may have given it up
                self._idle.lose(tail)
            raise StaleStart from error
        if has_page:
            mirror, device = (
                int(seq.mirror[seq.page_count - 1]),
                int(seq.device[seq.page_count - 1]),
            )
            self._memory.restore(mirror, device)
            self._c4.load_tail(*self._idle.unfinished(seq.tail_slot, tail.position, mirror))
        self._idle.release(tail)
        seq.tail = None

    def _copy_tail(self, seq: Sequence, tail: Tail) -> None:
        """Begin from a tail that others still refer to: slot and unfinished page, on the device."""
        assert tail.slot is not None
        self._tails.slots[seq.tail_slot].copy_(self._tails.slots[tail.slot])
        self._c4.copy_tail(tail.slot, seq.tail_slot)
        if tail.mirror != NO_PAGE:
            last = seq.page_count - 1
            self._memory.duplicate(
                (tail.mirror, tail.device), (int(seq.mirror[last]), int(seq.device[last]))
            )
        self._idle.release(tail)
        seq.tail, seq.tail_dirty = None, True

    def _take_tail_slot(self) -> int:
        while not self._tails.free_count:
            assert self._idle.spill_slot(), "more running sequences than tail slots"
        return self._tails.take()

    def extend(self, seq: Sequence, upto: int) -> None:
        """Give the sequence pages for its tokens up to ``upto``, out of its reservation."""
        while seq.page_count * BLOCK_TOKENS < upto:
            seq.reservation.mirror -= 1
            seq.reservation.device -= 1
            self._add_page(seq, self._evictor.take_mirror(), self._evictor.take_device())

    def _add_page(self, seq: Sequence, mirror: int, device: int) -> None:
        seq.mirror[seq.page_count], seq.device[seq.page_count] = mirror, device
        seq.page_count += 1

    def _unreserve(self, seq: Sequence, pages: int) -> None:
        seq.reservation.mirror -= pages
        seq.reservation.device -= pages
        self._pools[0].unreserve(pages)
        self._pools[1].unreserve(pages)
