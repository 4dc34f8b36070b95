"""Idle tails: shared by counting, taken over by whoever runs next, packed under pressure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.evict import Evictor
from dsv4_tierd.tiering.hot_set import C4Place, C4Rows
from dsv4_tierd.tiering.mirror import PageMemory
from dsv4_tierd.tiering.plan import C4_ROWS_PER_PAGE
from dsv4_tierd.tiering.radix import NO_PAGE
from dsv4_tierd.tiering.sequence import page_table
from dsv4_tierd.tiering.tails import Tail, TailPool


@dataclass(slots=True)
class TailCounters:
    """Counters never go down."""

    packed: int = 0
    lost: int = 0


class IdleTails:
    """Every idle tail, least recently idle first, within a budget of packed bytes."""

    def __init__(
        self,
        pool: TailPool,
        memory: PageMemory,
        c4: C4Rows,
        evictor: Evictor,
        packed_bytes_max: int,
    ) -> None:
        self.counters = TailCounters()
        self.packed_bytes = 0
        self._pool, self._memory, self._c4, self._evictor = pool, memory, c4, evictor
        self._packed_bytes_max = packed_bytes_max
        self._tails: dict[int, Tail] = {}  # by id(): a Tail is an identity, not a value
        self._page_count = 0
        evictor.spill_idle = self.spill_pages
        evictor.idle_pages = lambda: self._page_count

    def __iter__(self) -> Iterator[Tail]:
        return iter(self._tails.values())

    def __len__(self) -> int:
        return len(self._tails)

    # ------------------------------------------------------------ lives
    def add(self, tail: Tail) -> Tail:
        """A sequence ended and leaves this tail."""
        self._tails[id(tail)] = tail
        self._page_count += tail.mirror != NO_PAGE
        self.packed_bytes += len(tail.packed or b"")
        self._trim_packed()
        return tail

    def share(self, tail: Tail) -> Tail:
        """A fork refers to the same tail."""
        tail.refs += 1
        return tail

    def release(self, tail: Tail) -> None:
        """One session less refers to it; the last one frees it."""
        assert tail.refs > 0, "tail released more often than shared"
        tail.refs -= 1
        if tail.refs == 0:
            self._remove(tail)
            self._free_slot(tail)

    def adopt(self, tail: Tail) -> bool:
        """Take a tail in a slot over, slot and pages; False if others still refer to it."""
        if tail.refs != 1 or tail.slot is None:
            return False
        self._remove(tail)
        tail.refs = 0
        return True

    @staticmethod
    def lost(tail: Tail) -> bool:
        """Whether its bytes were given up under pressure."""
        return tail.slot is None and tail.packed is None

    # ------------------------------------------------------------ pressure
    def spill_pages(self) -> bool:
        """Pack the tail with a page that has been idle longest; False if there is none."""
        return self._spill(lambda tail: tail.mirror != NO_PAGE)

    def spill_slot(self) -> bool:
        """Pack the tail in a slot that has been idle longest; False if there is none."""
        return self._spill(lambda tail: tail.slot is not None)

    def pack(self, tail: Tail) -> bytes:
        """The tail's bytes, packed; it stays where it is."""
        assert not self.lost(tail)
        if tail.packed is not None:
            return tail.packed
        assert tail.slot is not None
        return self.pack_slot(tail.slot, tail.position, tail.mirror, tail.device)

    def pack_slot(
        self, slot: int, position: int, mirror: int, device: int, dirty: bool = True
    ) -> bytes:
        """Pack a tail slot with the unfinished page in these pages (NO_PAGE: it has none)."""
        if mirror == NO_PAGE:
            return self._pool.pack(slot, position, None)
        place, first, end = self.unfinished(slot, position, mirror)
        if dirty:
            self._c4.flush(place, first, end)
        self._memory.write_back(device, mirror)
        return self._pool.pack(
            slot, position, self._memory.blob_until(mirror, position % BLOCK_TOKENS)
        )

    def unfinished(self, slot: int, position: int, mirror: int) -> tuple[C4Place, int, int]:
        """The place, first and end entry of the unfinished page at ``position``."""
        page = position // (4 * C4_ROWS_PER_PAGE)
        table = page_table(page + 1)
        table[page] = mirror
        first = page * C4_ROWS_PER_PAGE
        return C4Place(table, page_table(0), slot, first), first, position // 4

    # ------------------------------------------------------------ details
    def _spill(self, wanted: Callable[[Tail], bool]) -> bool:
        tail = next((tail for tail in self._tails.values() if wanted(tail)), None)
        if tail is None:
            return False
        self.pack_away(tail)
        return True

    def pack_away(self, tail: Tail) -> None:
        """Pack a tail that is in a slot, and free slot and pages."""
        packed = self.pack(tail)
        self._page_count -= tail.mirror != NO_PAGE
        self._free_slot(tail)
        tail.packed = packed
        self.packed_bytes += len(packed)
        self.counters.packed += 1
        self._trim_packed()

    def _trim_packed(self) -> None:
        for tail in list(self._tails.values()):
            if self.packed_bytes <= self._packed_bytes_max:
                return
            if tail.packed is not None:
                self.lose(tail)

    def lose(self, tail: Tail) -> None:
        """Give up a packed tail's bytes; its sessions compute it again."""
        assert tail.packed is not None
        self.packed_bytes -= len(tail.packed)
        tail.packed = None
        self.counters.lost += 1

    def _remove(self, tail: Tail) -> None:
        del self._tails[id(tail)]
        self._page_count -= tail.mirror != NO_PAGE
        self.packed_bytes -= len(tail.packed or b"")

    def _free_slot(self, tail: Tail) -> None:
        if tail.slot is not None:
            self._pool.free(tail.slot)
        self._evictor.free_pair(tail.mirror, tail.device)
        tail.slot, tail.mirror, tail.device = None, NO_PAGE, NO_PAGE
        tail.packed = None
