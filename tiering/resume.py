"""Resume points in host memory: a budget of slots, evicted by value per byte.

All points of a model have one size, so value is what losing one would cost (the tokens that a
bounded replay would run again, fewer where another point is near) over its age.
"""

from __future__ import annotations

from torch import Tensor

from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.pinned import host_memory
from dsv4_tierd.tiering.radix import NO_PAGE, Node, RadixTree
from dsv4_tierd.tiering.replay import has_point


class ResumePoints:
    """Slots [slot_count, resume_bytes] uint8 on the host, each a node's or a sequence's.

    A running sequence owns one rolling slot (reserved at admission), which publishing hands to
    a node. ``reserved`` slots are promised to sequences and never kept by nodes.
    """

    def __init__(
        self, slot_count: int, resume_bytes: int, tree: RadixTree, replay: int, pinned: bool
    ) -> None:
        self.slots = host_memory(slot_count, max(resume_bytes, 1), pinned)
        self.evicted_total = 0
        self._free = list(range(slot_count))
        self._owners: dict[int, Node] = {}
        self._taken: set[int] = set()
        self._tree = tree
        self._replay = replay

    @property
    def capacity(self) -> int:
        return len(self.slots)

    @property
    def used_count(self) -> int:
        """Points that nodes keep."""
        return len(self._owners)

    @property
    def taken_count(self) -> int:
        """Rolling slots of running sequences and loads in flight."""
        return len(self._taken)

    @property
    def can_take(self) -> bool:
        """Whether ``take`` would find a slot."""
        return bool(self._free or self._owners)

    def slot(self, number: int) -> Tensor:
        """[resume_bytes] uint8 view."""
        return self.slots[number]

    def take(self) -> int | None:
        """A slot for a sequence or a load; evicts the least valuable point. None: all are taken."""
        if not self._free:
            victim = min(self._owners.values(), key=self._value, default=None)
            if victim is None:
                return None
            self.drop(victim)
            self.evicted_total += 1
        number = self._free.pop()
        self._taken.add(number)
        return number

    def give_back(self, number: int) -> None:
        """Return a taken slot that was not published."""
        self._taken.remove(number)
        self._free.append(number)

    def publish(self, number: int, node: Node) -> None:
        """A taken slot's content is the point at the end of ``node``."""
        if node.resume != NO_PAGE:
            self.give_back(number)
            return
        self._taken.remove(number)
        self._owners[number] = node
        node.resume = number

    def drop(self, node: Node) -> None:
        """Give up the node's point in memory."""
        assert self._owners.pop(node.resume) is node, "resume slot owned by another node"
        self._free.append(node.resume)
        node.resume = NO_PAGE
        self._tree.prune(node)

    def owners(self) -> dict[int, Node]:
        """Slot to node, for the audit."""
        return self._owners

    def free_slots(self) -> list[int]:
        return self._free

    def _value(self, node: Node) -> float:
        saved = BLOCK_TOKENS
        ancestor = node.parent
        while (
            ancestor is not None
            and ancestor.key is not None
            and saved < self._replay
            and not has_point(ancestor)
        ):
            saved, ancestor = saved + BLOCK_TOKENS, ancestor.parent
        # A node that a sequence holds gets its stamp at the end; until then it is the newest.
        age = 0 if node.refs else self._tree.clock - node.stamp + 1
        return saved / (age + 1)
