"""Warm-up: a prefix from the store into host memory, before anybody asks for its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4_tierd.tiering.blocks import BLOCK_TOKENS, Transcript
from dsv4_tierd.tiering.manager import TierManager
from dsv4_tierd.tiering.radix import NO_PAGE, Node
from dsv4_tierd.tiering.store.protocol import ObjectKind


@dataclass(slots=True)
class Warming:
    """Blocks on their way up, pinned until they are there; then they are the newest to be evicted.

    As much of the path as fits beside what is promised to running requests, from its beginning.
    ``loaded_tokens``: what was read for this; ``host_tokens``: what is in host memory at the end.
    """

    manager: TierManager
    path: list[Node]
    leaf: Node
    loaded_tokens: int = 0
    host_tokens: int = 0
    point_asked: bool = False
    ended: bool = False

    @classmethod
    def begin(cls, manager: TierManager, transcript: Transcript, tenant: str) -> Warming:
        """Pin what is there and will be; nothing is read yet."""
        path = manager.match(transcript, tenant, len(transcript))
        room = manager.mirror_pool.available
        for i, node in enumerate(path):
            is_there = node.mirror != NO_PAGE
            is_paid = manager.coordinator.in_flight(node, ObjectKind.PAGE)
            room -= not (node.refs or node.pins) if is_there else not is_paid
            if room < 0:
                path = path[:i]
                break
        leaf = path[-1] if path else manager.tree.root(tenant)
        manager.tree.pin(leaf)
        return cls(manager, path, leaf)

    def advance(self) -> bool:
        """Read more; True once everything that can come has come. Call after coordinator.poll."""
        if self.ended:
            return True
        io = self.manager.coordinator
        waiting = False
        for node in self.path:
            if node.mirror != NO_PAGE:
                continue
            if io.loading(node, ObjectKind.PAGE):
                waiting = True
            elif io.in_flight(node, ObjectKind.PAGE):
                break  # late: what comes after it could not be kept
            elif io.can_load and io.up and node.stored and self.manager.mirror_pool.reserve(1):
                self.loaded_tokens += BLOCK_TOKENS
                io.load(node, ObjectKind.PAGE, self.manager.evictor.take_mirror())
                waiting = True
            else:
                waiting = waiting or (node.stored and io.up and not io.can_load)
                break
        if waiting or self._point_waits():
            return False
        self.end()
        return True

    def _point_waits(self) -> bool:
        """Bring the deepest resume point too; True: it is on its way."""
        manager = self.manager
        there = [node for node in self.path if node.mirror != NO_PAGE]
        for node in reversed(there[-(manager.replay // 2 // BLOCK_TOKENS + 1) :]):
            if node.resume != NO_PAGE:
                return False
            if manager.coordinator.in_flight(node, ObjectKind.RESUME):
                return manager.coordinator.loading(node, ObjectKind.RESUME)
            if self.point_asked:
                return False  # it did not come
            if node.resume_stored or manager.coordinator.has_point(node):
                self.point_asked = True
                slot = manager.points.take() if manager.coordinator.up else None
                if slot is None:
                    return False
                node.resume_stored = True
                manager.coordinator.load(node, ObjectKind.RESUME, slot)
                return True
        return False

    def end(self) -> None:
        """Let go of the path, as just used."""
        for node in self.path:
            if node.mirror == NO_PAGE:
                break
            self.host_tokens += BLOCK_TOKENS
        tree = self.manager.tree
        tree.hold(self.leaf)
        tree.unpin(self.leaf)
        tree.release(self.leaf)
        for node in reversed(self.path):
            tree.prune(node)
        self.ended = True
