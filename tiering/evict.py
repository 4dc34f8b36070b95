"""Giving pages back: what is evicted, in which order, and what goes with it.

Device pages go first come of the least recently used leaf; the mirror has them. A mirror page
goes with its device page; if the block is stored it stays known, otherwise this was the last
copy and the block is dropped with its resume point. Idle tails give up their pages last: they
are packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv4_tierd.tiering.pages import PagePool
from dsv4_tierd.tiering.radix import NO_PAGE, Node, RadixTree, Tier

if TYPE_CHECKING:  # they hold tensors; the order of eviction does not
    from dsv4_tierd.tiering.hot_set import C4Rows
    from dsv4_tierd.tiering.resume import ResumePoints


@dataclass(slots=True)
class EvictionCounters:
    """Blocks that lost a copy; counters never go down."""

    device_evicted: int = 0
    mirror_evicted: int = 0
    dropped: int = 0


class Evictor:
    """Frees pages of both pools in agreement with the tree."""

    def __init__(
        self, tree: RadixTree, mirror: PagePool, device: PagePool, points: ResumePoints, c4: C4Rows
    ) -> None:
        self.counters = EvictionCounters()
        self.spill_idle: Callable[[], bool] = lambda: False
        self.idle_pages: Callable[[], int] = lambda: 0
        self._tree, self._mirror, self._device = tree, mirror, device
        self._points, self._c4 = points, c4
        mirror.reclaim, device.reclaim = self._reclaim_mirror, self._reclaim_device
        mirror.reclaimable = lambda: tree.mirror_evictable + self.idle_pages()
        device.reclaimable = lambda: tree.device_evictable + self.idle_pages()

    def take_mirror(self) -> int:
        """A reserved mirror page, no hot row of which names its old content any more."""
        page = self._mirror.take()
        self._c4.forget_page(page)
        return page

    def take_device(self) -> int:
        """A reserved device page."""
        return self._device.take()

    def free_pair(self, mirror: int, device: int) -> None:
        """Free a private page's two copies."""
        if mirror != NO_PAGE:
            self._mirror.free(mirror)
        if device != NO_PAGE:
            self._device.free(device)

    def evict_device(self, node: Node) -> None:
        """Give up the device copy; the mirror is the source of truth."""
        assert node.mirror != NO_PAGE, "a device page without a mirror page"
        page = node.device
        self._tree.set_device(node, NO_PAGE)
        self._device.free(page)
        self.counters.device_evicted += 1

    def evict_mirror(self, node: Node) -> None:
        """Give up the mirror copy, and the block altogether if it is not stored."""
        if node.device != NO_PAGE:
            self.evict_device(node)
        page = node.mirror
        self._tree.set_mirror(node, NO_PAGE)
        self._mirror.free(page)
        self.counters.mirror_evicted += 1
        if not node.stored:
            self.counters.dropped += 1
            if node.resume != NO_PAGE:
                self._points.drop(node)
        self._tree.prune(node)

    def drop_subtree(self, node: Node) -> list[bytes]:
        """Forget a block and everything after it, except what a sequence holds or a pin keeps.

        Returns the hashes of the blocks that were dropped, deepest first.
        """
        dropped: list[bytes] = []
        order = [node]
        for current in order:
            order.extend(current.children)
        for current in reversed(order):
            if current.refs or current.pins or current.mirror_children or current.key is None:
                continue
            dropped.append(current.key)
            current.stored = current.resume_stored = False
            if current.mirror != NO_PAGE:
                self.evict_mirror(current)
            else:
                if current.resume != NO_PAGE:
                    self._points.drop(current)
                self._tree.prune(current)
        return dropped

    def _reclaim_mirror(self, count: int) -> int:
        return self._reclaim(Tier.HOST, self.evict_mirror, count)

    def _reclaim_device(self, count: int) -> int:
        return self._reclaim(Tier.DEVICE, self.evict_device, count)

    def _reclaim(self, tier: Tier, evict: Callable[[Node], None], count: int) -> int:
        for freed in range(count):
            victim = self._tree.pop_victim(tier)
            if victim is not None:
                evict(victim)
            elif not self.spill_idle():
                return freed
        return count
