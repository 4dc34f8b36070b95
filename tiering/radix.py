"""ShadowRadix: the prefix tree over blocks of virtual token slots.

Every node is one block of 256 tokens; because a block's name chains its whole prefix, an edge
is found by one dict probe and nodes never split. A node maps its block to up to three copies:
a mirror page (all groups), a device page (index keys and C128) and a stored object. Inside a
page every group's row is arithmetic on the position: the shadows.

Two lifetimes hang on a node. Its compressed pages serve every longer prefix; the window before
its end, kept as a *resume point*, lets a session start there. A node without one is a tombstone
for the window: it still serves matches, and a bounded replay makes its window again.

``refs`` counts the running sequences whose path goes through the node, ``pins`` the promises
to keep it in host memory. Both are counted on the whole path, so whatever has neither can be
evicted, leaves first: the mirrored nodes are closed under "parent of", and so are the nodes on
the device.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from enum import Enum

NO_PAGE = -1


class Tier(Enum):
    """Where a copy lies, fastest first."""

    DEVICE = "device"
    HOST = "host"
    STORE = "store"


class Node:
    """One block in the tree, or (key None) the root of one tenant."""

    __slots__ = (
        "children",
        "depth",
        "device",
        "device_children",
        "key",
        "mirror",
        "mirror_children",
        "parent",
        "pins",
        "refs",
        "resume",
        "resume_stored",
        "stamp",
        "stored",
        "tenant",
    )

    def __init__(self, key: bytes | None, parent: Node | None, tenant: str) -> None:
        self.key = key
        self.parent = parent
        self.tenant = tenant
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.mirror = NO_PAGE
        self.device = NO_PAGE
        self.stored = False
        self.resume = NO_PAGE  # slot in the pool of resume points
        self.resume_stored = False
        self.refs = 0
        self.pins = 0
        self.stamp = 0
        self.children: set[Node] = set()
        self.mirror_children = 0
        self.device_children = 0

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, deepest first, without the root."""
        node: Node | None = self
        while node is not None and node.key is not None:
            yield node
            node = node.parent


class RadixTree:
    """Nodes by block hash, with what can be evicted kept in order of last use."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.mirror_evictable = 0
        self.device_evictable = 0
        self.clock = 0  # counts releases: the unit of recency
        self._roots: dict[str, Node] = {}
        self._heaps: dict[Tier, list[tuple[int, int, Node]]] = {Tier.DEVICE: [], Tier.HOST: []}
        self._sequence = 0

    # ------------------------------------------------------------ reading
    def match(self, hashes: Sequence[bytes]) -> list[Node]:
        """The deepest known run of ``hashes`` from the start. Changes nothing, holds nothing."""
        found: list[Node] = []
        for key in hashes:
            node = self.nodes.get(key)
            if node is None or (node.mirror == NO_PAGE and not node.stored):
                break
            found.append(node)
        return found

    def root(self, tenant: str) -> Node:
        """The parent of a tenant's first blocks."""
        return self._roots.setdefault(tenant, Node(None, None, tenant))

    # ------------------------------------------------------------ nodes
    def add(self, key: bytes, parent: Node) -> Node:
        """A new node with no copies yet; ``parent`` is a node or a root."""
        assert key not in self.nodes, "block is in the tree already"
        node = Node(key, parent, parent.tenant)
        self.nodes[key] = node
        parent.children.add(node)
        return node

    def prune(self, node: Node) -> None:
        """Remove the node, and then its ancestors, while nothing is left in them."""
        current: Node | None = node
        while current is not None and current.key is not None and self._is_empty(current):
            del self.nodes[current.key]
            assert current.parent is not None
            current.parent.children.discard(current)
            current.key, current = None, current.parent

    @staticmethod
    def _is_empty(node: Node) -> bool:
        copies = (
            node.mirror != NO_PAGE
            or node.device != NO_PAGE
            or node.stored
            or node.resume != NO_PAGE
        )
        return not (copies or node.refs or node.pins or node.children)

    # ------------------------------------------------------------ holding
    def hold(self, leaf: Node) -> None:
        """A sequence runs on this path: nothing of it is evicted until released. O(depth)."""
        for node in leaf.path():
            self.hold_node(node)

    def hold_node(self, node: Node) -> None:
        """Hold one more node at the end of a path that is held already."""
        if node.refs == 0:
            self._count(node, -1)
        node.refs += 1

    def release(self, leaf: Node) -> None:
        """The inverse of ``hold``; the path becomes the most recently used."""
        self.clock += 1
        for node in leaf.path():
            assert node.refs > 0, "released more often than held"
            node.refs -= 1
            node.stamp = self.clock
            if node.refs == 0:
                self._count(node, +1)
                self._offer(node)

    def pin(self, leaf: Node) -> None:
        """Promise to keep the path's mirror pages. O(depth)."""
        for node in leaf.path():
            if node.pins == 0 and node.refs == 0 and node.mirror != NO_PAGE:
                self.mirror_evictable -= 1
            node.pins += 1

    def unpin(self, leaf: Node) -> None:
        """Withdraw a promise made by ``pin``."""
        for node in leaf.path():
            assert node.pins > 0, "unpinned more often than pinned"
            node.pins -= 1
            if node.pins == 0 and node.refs == 0 and node.mirror != NO_PAGE:
                self.mirror_evictable += 1
                self._offer(node)

    def _count(self, node: Node, sign: int) -> None:
        if node.mirror != NO_PAGE and node.pins == 0:
            self.mirror_evictable += sign
        if node.device != NO_PAGE:
            self.device_evictable += sign

    # ------------------------------------------------------------ copies
    def set_mirror(self, node: Node, page: int) -> None:
        """The block has this mirror page from now on, or none (NO_PAGE)."""
        assert (node.mirror == NO_PAGE) != (page == NO_PAGE), (node.mirror, page)
        gained = 1 if page != NO_PAGE else -1
        node.mirror = page
        assert node.parent is not None
        node.parent.mirror_children += gained
        if node.refs == 0 and node.pins == 0:
            self.mirror_evictable += gained
        self._offer(node if gained > 0 else node.parent)

    def set_device(self, node: Node, page: int) -> None:
        """The block has this device page from now on, or none (NO_PAGE)."""
        assert (node.device == NO_PAGE) != (page == NO_PAGE), (node.device, page)
        gained = 1 if page != NO_PAGE else -1
        node.device = page
        assert node.parent is not None
        node.parent.device_children += gained
        if node.refs == 0:
            self.device_evictable += gained
        self._offer(node if gained > 0 else node.parent)

    # ------------------------------------------------------------ eviction
    def pop_victim(self, tier: Tier) -> Node | None:
        """The least recently used leaf of a tier that nothing holds; None if there is none."""
        heap = self._heaps[tier]
        while heap:
            stamp, _, node = heapq.heappop(heap)
            if self.can_evict(node, tier):
                if stamp == node.stamp:
                    return node
                self._push(tier, node)
        return None

    @staticmethod
    def can_evict(node: Node, tier: Tier) -> bool:
        """Whether this tier's copy is a leaf that nothing holds."""
        if node.key is None or node.refs:
            return False
        if tier is Tier.DEVICE:
            return node.device != NO_PAGE and node.device_children == 0
        return node.mirror != NO_PAGE and node.mirror_children == 0 and not node.pins

    def _offer(self, node: Node) -> None:
        """Put a node where ``pop_victim`` will find it, if it can go now."""
        for tier in self._heaps:
            if self.can_evict(node, tier):
                self._push(tier, node)

    def _push(self, tier: Tier, node: Node) -> None:
        heap = self._heaps[tier]
        if len(heap) > 4 * len(self.nodes) + 64:  # mostly entries that a later use made stale
            live = {entry[2] for entry in heap if self.can_evict(entry[2], tier)}
            heap[:] = [(live_node.stamp, i, live_node) for i, live_node in enumerate(live)]
            heapq.heapify(heap)
        self._sequence += 1
        heapq.heappush(heap, (node.stamp, self._sequence, node))
