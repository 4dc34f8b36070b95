"""The audit: every invariant of the tiers, checked from scratch. It changes nothing.

Run after every test, when the engine is idle, and on request. A failure is a bug here, never
the caller's: it raises AuditError with what does not hold.
"""

from __future__ import annotations

from collections import Counter

from dsv4_tierd.tiering.hot_set import HotSet
from dsv4_tierd.tiering.manager import TierManager
from dsv4_tierd.tiering.pages import PagePool
from dsv4_tierd.tiering.radix import NO_PAGE, Node, Tier
from dsv4_tierd.tiering.retention import Retention
from dsv4_tierd.tiering.store.protocol import ObjectKind


class AuditError(AssertionError):
    """An invariant does not hold."""


def check(manager: TierManager, retention: Retention | None = None) -> None:
    """Assert every invariant. Raises AuditError."""
    _check_tree(manager, retention)
    _check_pages(manager)
    _check_slots(manager)
    _check_reservations(manager)
    if isinstance(manager.c4, HotSet):
        _check_hot_set(manager.c4)


def check_idle(manager: TierManager, retention: Retention | None = None) -> None:
    """``check``, and that nothing runs: every page is free, cached, pinned or an idle tail's."""
    check(manager, retention)
    _require(not manager.running, "sequences still run")
    _require(not manager.coordinator.load_targets, "reads are still in flight")
    for pool in (manager.mirror_pool, manager.device_pool):
        _require(pool.reserved == 0, f"{pool.name}: {pool.reserved} pages still reserved")
    _require(manager.points.taken_count == 0, "resume slots still taken")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AuditError(message)


def _check_tree(manager: TierManager, retention: Retention | None) -> None:
    tree = manager.tree
    refs = Counter(node for seq in manager.running for node in seq.leaf.path())
    pins = retention.pin_counts() if retention is not None else None
    evictable: Counter[Tier] = Counter()
    for key, node in tree.nodes.items():
        _require(node.key == key, "node is filed under another key")
        parent = node.parent
        assert parent is not None
        _require(node in parent.children, "node is not among its parent's children")
        _require(
            node.refs == refs[node], f"refs {node.refs}, but {refs[node]} sequences run through"
        )
        if pins is not None:
            _require(node.pins == pins[node], f"pins {node.pins}, but {pins[node]} sessions pin it")
        _require(
            node.device == NO_PAGE or node.mirror != NO_PAGE, "device page without a mirror page"
        )
        if parent.key is not None:
            _require(
                node.mirror == NO_PAGE or parent.mirror != NO_PAGE,
                "mirrored under an unmirrored parent",
            )
            _require(
                node.device == NO_PAGE or parent.device != NO_PAGE,
                "on the device under a parent that is not",
            )
        _require(node.mirror_children == _with(node, "mirror"), "mirror_children is wrong")
        _require(node.device_children == _with(node, "device"), "device_children is wrong")
        evictable[Tier.HOST] += node.mirror != NO_PAGE and not node.refs and not node.pins
        evictable[Tier.DEVICE] += node.device != NO_PAGE and not node.refs
    _require(
        tree.mirror_evictable == evictable[Tier.HOST], "count of evictable mirror pages is wrong"
    )
    _require(
        tree.device_evictable == evictable[Tier.DEVICE], "count of evictable device pages is wrong"
    )


def _with(node: Node, copy: str) -> int:
    return sum(getattr(child, copy) != NO_PAGE for child in node.children)


def _check_pages(manager: TierManager) -> None:
    """Every page of both pools has exactly one owner."""
    loads = [page for kind, page in manager.coordinator.load_targets if kind is ObjectKind.PAGE]
    mirror, device = Counter(loads), Counter[int]()
    for node in manager.tree.nodes.values():
        mirror[node.mirror] += node.mirror != NO_PAGE
        device[node.device] += node.device != NO_PAGE
    for seq in manager.running:
        own = slice(len(seq.path), seq.page_count)
        mirror.update(seq.mirror[own].tolist())
        device.update(seq.device[own].tolist())
        for i, node in enumerate(seq.path[: seq.page_count]):
            _require(
                int(seq.mirror[i]) == node.mirror,
                "a sequence's mirror table disagrees with the tree",
            )
            _require(
                int(seq.device[i]) == node.device,
                "a sequence's device table disagrees with the tree",
            )
    for tail in manager.idle:
        mirror[tail.mirror] += tail.mirror != NO_PAGE
        device[tail.device] += tail.device != NO_PAGE
    _check_partition(manager.mirror_pool, mirror)
    _check_partition(manager.device_pool, device)


def _check_partition(pool: PagePool, owners: Counter[int]) -> None:
    for page in range(pool.capacity):
        count = owners[page] + pool.is_free(page)
        _require(count == 1, f"{pool.name} page {page} has {count} owners")
    free = sum(pool.is_free(page) for page in range(pool.capacity))
    _require(free == pool.free_count, f"{pool.name}: free list and map disagree")


def _check_slots(manager: TierManager) -> None:
    tails = Counter(manager.tails.free_slots())
    tails.update(seq.tail_slot for seq in manager.running if seq.tail_slot != NO_PAGE)
    tails.update(tail.slot for tail in manager.idle if tail.slot is not None)
    tails[manager.scratch_slot] += 1
    slots = len(manager.tails.slots)
    _require(tails == Counter(range(slots)), f"tail slots do not have one owner each: {tails}")
    for tail in manager.idle:
        _require(tail.refs > 0, "an idle tail that nobody refers to")
        _require(tail.slot is None or tail.packed is None, "a tail both packed and in a slot")
        _require(tail.mirror == NO_PAGE or tail.slot is not None, "a tail without a slot has pages")
    packed = sum(len(tail.packed or b"") for tail in manager.idle)
    _require(manager.idle.packed_bytes == packed, "count of packed tail bytes is wrong")
    points = Counter(manager.points.free_slots())
    points.update(manager.points.owners().keys())
    points.update(seq.rolling_slot for seq in manager.running if seq.rolling_slot is not None)
    points.update(
        slot for kind, slot in manager.coordinator.load_targets if kind is ObjectKind.RESUME
    )
    _require(
        points == Counter(range(manager.points.capacity)),
        f"resume slots do not have one owner each: {points}",
    )
    for slot, node in manager.points.owners().items():
        _require(node.resume == slot and node.key is not None, "resume slot and node disagree")


def _check_reservations(manager: TierManager) -> None:
    for pool, promised in (
        (manager.mirror_pool, sum(seq.reservation.mirror for seq in manager.running)),
        (manager.device_pool, sum(seq.reservation.device for seq in manager.running)),
    ):
        _require(
            pool.reserved == promised, f"{pool.name}: {pool.reserved} reserved, {promised} promised"
        )
        _require(pool.available >= 0, f"{pool.name}: more is promised than can be freed")


def _check_hot_set(hot: HotSet) -> None:
    """Owner and residency are inverse of one another."""
    for layer in range(len(hot.rows)):
        owner, residency = hot.owner[layer].long(), hot.residency[layer].long()
        owned = (owner >= 0).nonzero().flatten()
        _require(
            bool((residency[owner[owned]] == owned).all()),
            "a hot row's owner does not name it back",
        )
        resident = (residency >= 0).nonzero().flatten()
        _require(
            bool((owner[residency[resident]] == resident).all()),
            "a resident row's slot has another owner",
        )
