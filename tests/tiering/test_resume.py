"""Resume points: a budget of slots, and the least valuable goes."""

from __future__ import annotations

import pytest

from dsv4_tierd.tiering.radix import NO_PAGE, Node, RadixTree
from dsv4_tierd.tiering.resume import ResumePoints


def make(slots: int = 3, blocks: int = 12) -> tuple[RadixTree, ResumePoints, list[Node]]:
    """Points of four blocks' replay over one chain of mirrored blocks."""
    tree = RadixTree()
    points = ResumePoints(slots, 16, tree, 4 * 256, pinned=False)
    nodes: list[Node] = []
    for i in range(blocks):
        node = tree.add(bytes([i]), nodes[-1] if nodes else tree.root(""))
        tree.set_mirror(node, i)
        nodes.append(node)
    return tree, points, nodes


def keep(points: ResumePoints, node: Node) -> None:
    """Publish a point at the end of a block."""
    slot = points.take()
    assert slot is not None
    points.publish(slot, node)


def use(tree: RadixTree, node: Node) -> None:
    tree.hold(node)
    tree.release(node)


def test_slots_are_free_taken_or_owned() -> None:
    """The three always sum to the capacity."""
    _, points, nodes = make()
    slot = points.take()
    assert slot is not None
    assert (points.used_count, points.taken_count, len(points.free_slots())) == (0, 1, 2)
    points.publish(slot, nodes[3])
    assert (points.used_count, points.taken_count, nodes[3].resume) == (1, 0, slot)
    points.drop(nodes[3])
    assert (points.used_count, len(points.free_slots()), nodes[3].resume) == (0, 3, NO_PAGE)


def test_a_full_budget_evicts_the_oldest_of_equals() -> None:
    """Of points that would cost the same to make again, the longest unused goes."""
    tree, points, nodes = make(slots=2, blocks=5)
    other = nodes[0]
    for i in range(4):  # a branch as long as the first
        other = tree.add(bytes([100 + i]), other)
    for node in (other, nodes[4]):
        keep(points, node)
        use(tree, node)
    use(tree, other)
    keep(points, nodes[0])
    assert nodes[4].resume == NO_PAGE and other.resume != NO_PAGE
    assert points.evicted_total == 1


def test_a_point_near_another_is_worth_less() -> None:
    """Between two points of one age, the one that a neighbour can replace goes first."""
    tree, points, nodes = make(slots=3)
    for node in (nodes[3], nodes[10], nodes[11]):
        keep(points, node)
    use(tree, nodes[11])
    assert points.take() is not None
    assert nodes[11].resume == NO_PAGE
    assert nodes[3].resume != NO_PAGE and nodes[10].resume != NO_PAGE


def test_taken_slots_are_never_evicted() -> None:
    """When sequences and reads have them all, there is none to give."""
    _, points, nodes = make(slots=2)
    keep(points, nodes[0])
    assert points.take() is not None and points.take() is not None
    assert points.take() is None and not points.can_take
    assert points.used_count == 0


def test_a_second_point_of_a_block_is_given_back() -> None:
    """Publishing where one is already frees the newcomer."""
    _, points, nodes = make()
    keep(points, nodes[0])
    first = nodes[0].resume
    keep(points, nodes[0])
    assert nodes[0].resume == first and points.taken_count == 0


def test_dropping_the_last_copy_prunes_the_node() -> None:
    """A node that had only its point left leaves the tree."""
    tree, points, nodes = make(blocks=1)
    keep(points, nodes[0])
    tree.set_mirror(nodes[0], NO_PAGE)
    points.drop(nodes[0])
    assert not tree.nodes


def test_a_slot_is_given_back_once() -> None:
    """Giving back what is not taken is a bug, and found."""
    _, points, _ = make()
    with pytest.raises(KeyError):
        points.give_back(0)


def test_slots_hold_their_own_bytes() -> None:
    """Views of two slots do not overlap."""
    _, points, _ = make()
    points.slot(0).fill_(1)
    points.slot(1).fill_(2)
    assert set(points.slot(0).tolist()) == {1} and set(points.slot(1).tolist()) == {2}
