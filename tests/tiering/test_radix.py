"""The prefix tree: matching holds nothing, holding keeps, and what is oldest goes first."""

from __future__ import annotations

import random
import time

import pytest

from dsv4_tierd.tiering.radix import NO_PAGE, Node, RadixTree, Tier


def chain(tree: RadixTree, names: str, tenant: str = "", parent: Node | None = None) -> list[Node]:
    """Blocks named by single letters, one after the other, each with a mirror page."""
    nodes: list[Node] = []
    for name in names:
        above = nodes[-1] if nodes else parent or tree.root(tenant)
        node = tree.add(name.encode(), above)
        tree.set_mirror(node, ord(name))
        nodes.append(node)
    return nodes


def keys(names: str) -> list[bytes]:
    return [name.encode() for name in names]


def drain(tree: RadixTree, tier: Tier = Tier.HOST) -> str:
    """Names of what is evicted, in order, until nothing can be."""
    gone = ""
    while (node := tree.pop_victim(tier)) is not None:
        assert node.key is not None
        gone += node.key.decode()
        if tier is Tier.HOST:
            tree.set_mirror(node, NO_PAGE)
        else:
            tree.set_device(node, NO_PAGE)
        tree.prune(node)
    return gone


def test_a_match_is_the_longest_known_run() -> None:
    """It ends at the first block that is unknown or has no copy that could be read."""
    tree = RadixTree()
    nodes = chain(tree, "abcd")
    assert tree.match(keys("abxd")) == nodes[:2]
    nodes[3].stored = True
    tree.set_mirror(nodes[3], NO_PAGE)
    assert tree.match(keys("abcde")) == nodes
    nodes[3].stored = False
    assert tree.match(keys("abcde")) == nodes[:3]


def test_a_match_changes_nothing() -> None:
    """No count, no stamp, no clock: a lookup does not extend a life."""
    tree = RadixTree()
    nodes = chain(tree, "abc")
    before = [(node.refs, node.pins, node.stamp) for node in nodes], tree.clock
    for _ in range(100):
        tree.match(keys("abc"))
    assert ([(node.refs, node.pins, node.stamp) for node in nodes], tree.clock) == before
    assert drain(tree) == "cba"


def test_leaves_go_first_and_the_least_recently_used_of_them() -> None:
    """A branch that was used later outlives the other; the shared stem goes last."""
    tree = RadixTree()
    stem = chain(tree, "ab")
    left, right = chain(tree, "cd", parent=stem[-1]), chain(tree, "ef", parent=stem[-1])
    for leaf in (right[-1], left[-1]):
        tree.hold(leaf)
        tree.release(leaf)
    assert drain(tree) == "fedcba"


def test_what_is_held_is_never_a_victim() -> None:
    """A held path stays whole until it is released as often as it was held."""
    tree = RadixTree()
    nodes = chain(tree, "abc")
    tree.hold(nodes[1])
    tree.hold(nodes[1])
    assert drain(tree) == "c"
    tree.release(nodes[1])
    assert drain(tree) == ""
    tree.release(nodes[1])
    assert drain(tree) == "ba"


def test_pins_keep_the_mirror_and_not_the_device() -> None:
    """A pinned block's device page may go; its mirror page may not."""
    tree = RadixTree()
    nodes = chain(tree, "ab")
    for node in nodes:
        tree.set_device(node, 1)
    tree.pin(nodes[1])
    assert (tree.mirror_evictable, tree.device_evictable) == (0, 2)
    assert drain(tree, Tier.DEVICE) == "ba" and drain(tree) == ""
    tree.unpin(nodes[1])
    assert drain(tree) == "ba"


def test_counts_are_checked() -> None:
    """Releasing or unpinning more often than the inverse is a bug, and found."""
    tree = RadixTree()
    [node] = chain(tree, "a")
    with pytest.raises(AssertionError):
        tree.release(node)
    with pytest.raises(AssertionError):
        tree.unpin(node)
    with pytest.raises(AssertionError):
        tree.add(b"a", tree.root(""))


def test_pruning_takes_empty_ancestors_along() -> None:
    """A node goes with its last copy, and so do the ancestors that only it kept."""
    tree = RadixTree()
    nodes = chain(tree, "abc")
    for node in nodes[:2]:
        node.stored = True
    for node in reversed(nodes):
        tree.set_mirror(node, NO_PAGE)
    nodes[0].stored = nodes[1].stored = False
    tree.prune(nodes[2])
    assert not tree.nodes and not tree.root("").children
    assert all(node.key is None for node in nodes)


def test_a_tombstone_keeps_serving_matches() -> None:
    """A node whose resume point is gone still matches."""
    tree = RadixTree()
    nodes = chain(tree, "ab")
    nodes[1].resume = 3
    nodes[1].resume = NO_PAGE
    assert tree.match(keys("ab")) == nodes


def test_the_heap_stays_small() -> None:
    """A block used a thousand times leaves no thousand entries behind."""
    tree = RadixTree()
    nodes = chain(tree, "abcdef")
    for _ in range(1000):
        tree.hold(nodes[-1])
        tree.release(nodes[-1])
    assert len(tree._heaps[Tier.HOST]) <= 4 * len(tree.nodes) + 65
    assert drain(tree) == "fedcba"


def test_matching_a_long_session_is_quick() -> None:
    """128K tokens are 512 probes: under 5 ms."""
    tree = RadixTree()
    parent = tree.root("")
    names = [i.to_bytes(32, "little") for i in range(512)]
    for page, name in enumerate(names):
        parent = tree.add(name, parent)
        tree.set_mirror(parent, page)
    best = min(_seconds(lambda: tree.match(names)) for _ in range(20))
    assert len(tree.match(names)) == 512 and best < 0.005


def _seconds(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start


@pytest.mark.parametrize("seed", range(5))
def test_any_history_evicts_as_a_plain_search_would(seed: int) -> None:
    """Counts and the victims' order equal those found by looking at every node."""
    draw, tree, held, pinned = random.Random(seed), RadixTree(), [], []
    for serial in range(600):
        nodes = list(tree.nodes.values())
        action = draw.randrange(7)
        if action <= 1:
            parent = draw.choice([n for n in nodes if n.mirror != NO_PAGE] or [tree.root("")])
            tree.set_mirror(tree.add(serial.to_bytes(4, "little"), parent), serial)
        elif action == 2 and nodes:
            held.append(draw.choice(nodes))
            tree.hold(held[-1])
        elif action == 3 and held:
            tree.release(held.pop(draw.randrange(len(held))))
        elif action == 4 and nodes:
            pinned.append(draw.choice(nodes))
            tree.pin(pinned[-1])
        elif action == 5 and pinned:
            tree.unpin(pinned.pop(draw.randrange(len(pinned))))
        else:
            _evict_one(tree)
        loose = [n for n in tree.nodes.values() if not n.refs and not n.pins]
        assert tree.mirror_evictable == len(loose)


def _evict_one(tree: RadixTree) -> None:
    free = [n for n in tree.nodes.values() if RadixTree.can_evict(n, Tier.HOST)]
    victim = tree.pop_victim(Tier.HOST)
    if victim is None:
        assert not free
        return
    assert victim in free and victim.stamp == min(node.stamp for node in free)
    tree.set_mirror(victim, NO_PAGE)
    tree.prune(victim)
