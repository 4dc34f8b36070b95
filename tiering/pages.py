"""Page numbers of one memory pool, and promises on them.

A pool hands out the lowest free numbers first, so that pages taken together lie in runs that
one strided copy moves. A reservation is a promise of pages still to be taken: admission makes
it, and whoever holds it never finds the pool empty.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class PagePool:
    """Free page numbers [0, capacity), with reservations.

    ``reclaim(n)`` is asked to free pages when none are free: it evicts what has a copy below.
    ``reclaimable()`` says how many pages it could free.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.reserved = 0
        self.reclaim: Callable[[int], int] = lambda _count: 0
        self.reclaimable: Callable[[], int] = lambda: 0
        self._free = list(range(capacity))
        self._is_free = bytearray(b"\x01" * capacity)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that a new reservation may still promise."""
        return len(self._free) + self.reclaimable() - self.reserved

    def reserve(self, count: int) -> bool:
        """Promise ``count`` pages; False, and nothing done, if they are not there."""
        assert count >= 0, count
        if count > self.available:
            return False
        self.reserved += count
        return True

    def unreserve(self, count: int) -> None:
        """Give back promises that were not taken."""
        assert 0 <= count <= self.reserved, (self.name, count, self.reserved)
        self.reserved -= count

    def take(self) -> int:
        """Take one reserved page; evicts if none is free."""
        assert self.reserved > 0, f"{self.name}: take without a reservation"
        if not self._free:
            freed = self.reclaim(1)
            assert freed > 0 and self._free, f"{self.name}: a reserved page could not be reclaimed"
        self.reserved -= 1
        page = heapq.heappop(self._free)
        self._is_free[page] = 0
        return page

    def free(self, page: int) -> None:
        """Return a page to the pool."""
        assert not self._is_free[page], f"{self.name}: page {page} is free already"
        self._is_free[page] = 1
        heapq.heappush(self._free, page)

    def is_free(self, page: int) -> bool:
        return bool(self._is_free[page])
