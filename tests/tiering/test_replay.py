"""Where a session starts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_tierd.tiering.radix import Node, RadixTree
from dsv4_tierd.tiering.replay import Start, choose_start, has_point, replay_tokens


def path_of(length: int, points: set[int], stored: set[int] = frozenset()) -> list[Node]:  # type: ignore[assignment]
    """A chain of blocks; those at these depths have a resume point, in memory or stored."""
    tree = RadixTree()
    nodes: list[Node] = []
    for depth in range(1, length + 1):
        parent = nodes[-1] if nodes else tree.root("")
        node = tree.add(bytes([depth]), parent)
        node.resume = depth if depth in points else -1
        node.resume_stored = depth in stored
        nodes.append(node)
    return nodes


@pytest.mark.parametrize(
    ("window", "layers", "tokens"), [(128, 44, 5632), (128, 62, 7936), (16, 7, 256), (16, 18, 512)]
)
def test_replay_length_is_the_known_one(window: int, layers: int, tokens: int) -> None:
    """Flash 5,632 and Pro 7,936: (window - 1) x layers + 1, up to whole blocks."""
    assert replay_tokens(window, layers) == tokens


@given(window=st.integers(2, 256), layers=st.integers(1, 100))
def test_replay_covers_every_layers_window(window: int, layers: int) -> None:
    """It is enough for the last layer's oldest row, in whole blocks, and no block too long."""
    tokens = replay_tokens(window, layers)
    assert tokens % 256 == 0 and 0 <= tokens - ((window - 1) * layers + 1) < 256


def test_nothing_matched_starts_at_nothing() -> None:
    """An empty match reuses nothing and replays nothing."""
    assert choose_start([], 512) == Start(0, 0, None, triangle=False)


def test_a_point_at_the_end_costs_nothing() -> None:
    """Memory or store, a point at the match's end leaves nothing to replay."""
    for nodes in (path_of(6, {3, 6}), path_of(6, {3}, {6})):
        start = choose_start(nodes, 512)
        assert (start.reused, start.replayed, start.point) == (1536, 0, nodes[-1])


def test_the_cheaper_of_point_and_replay_is_taken() -> None:
    """Half a replay's tokens from a point cost what a triangle costs: the point up to there."""
    near, far = path_of(20, {16}), path_of(20, {15})
    assert choose_start(near, 2048) == Start(5120, 4096, near[15], triangle=False)
    assert choose_start(far, 2048) == Start(5120, 3072, None, triangle=True)


def test_a_short_match_without_points_is_run_from_its_start() -> None:
    """A replay as long as the match would be the match itself, whole."""
    assert choose_start(path_of(4, set()), 1024) == Start(1024, 0, None, triangle=False)
    assert choose_start(path_of(5, set()), 1024) == Start(1280, 256, None, triangle=True)


def test_a_point_that_cannot_be_had_is_not_counted_on() -> None:
    """With the store away, a stored point is as none."""
    nodes = path_of(6, {2}, {6})
    start = choose_start(nodes, 2048, lambda node: node.resume >= 0)
    assert start.point is nodes[1]


@given(
    length=st.integers(0, 30),
    points=st.sets(st.integers(1, 30)),
    replay=st.integers(1, 10).map(lambda blocks: blocks * 256),
)
def test_no_start_replays_more_than_it_must(length: int, points: set[int], replay: int) -> None:
    """Never more than R, never what lies before a point that is nearer than half of R."""
    nodes = path_of(length, points)
    start = choose_start(nodes, replay)
    assert start.reused == length * 256
    assert 0 <= start.begin <= start.reused
    assert start.replayed <= replay
    nearest = max((p for p in points if p <= length), default=None)
    if nearest is not None and (length - nearest) * 256 <= replay // 2:
        assert start.point is nodes[nearest - 1] and start.begin == nearest * 256
    if start.point is None and not start.triangle:
        assert start.begin == 0
    if start.point is not None:
        assert has_point(start.point) and start.begin == start.point.depth * 256
