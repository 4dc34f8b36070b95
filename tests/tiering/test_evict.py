"""Giving pages back: the right ones, in the right order, with what belongs to them."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4_tierd.tiering.check import check, check_idle
from dsv4_tierd.tiering.errors import ExceedsCapacity, HostPoolExhausted
from dsv4_tierd.tiering.manager import TierManager
from dsv4_tierd.tiering.radix import NO_PAGE, Node
from tiny_tiers import Puppet, prefix_states, tiny_plan, tiny_tiers

RANDOM = np.random.default_rng(8)
TEXTS = [RANDOM.integers(0, 512, 2048) for _ in range(6)]


def nodes_of(tiers: TierManager, text: np.ndarray, blocks: int) -> list[Node | None]:
    hashes = Puppet(tiers).actor(text[: blocks * 256]).transcript.hashes
    return [tiers.tree.nodes.get(key) for key in hashes]


def test_device_pages_go_before_mirror_pages() -> None:
    """With more room on the host, a block loses its device page and stays known."""
    tiers = tiny_tiers(tiny_plan(mirror_pages=14, device_pages=6))
    puppet = Puppet(tiers)
    for text in TEXTS[:2]:
        puppet.drop_tail(puppet.run(text[:1025]))
    counters = tiers.evictor.counters
    assert counters.device_evicted > 0 and counters.mirror_evicted == 0
    assert all(node is not None for node in nodes_of(tiers, TEXTS[0], 4))
    assert puppet.turn(puppet.actor(TEXTS[0][:1100])).reused.host > 0
    check_idle(tiers)


def test_the_least_recently_used_session_goes_first_from_its_end() -> None:
    """Under pressure the deepest blocks of the oldest text are dropped, the others stay."""
    tiers = tiny_tiers(tiny_plan(mirror_pages=12, device_pages=12))
    puppet = Puppet(tiers)
    for text in TEXTS[:3]:
        puppet.drop_tail(puppet.run(text[:1024]))
    puppet.drop_tail(puppet.run(TEXTS[3][:600]))
    there = [[node is not None for node in nodes_of(tiers, text, 3)] for text in TEXTS[:3]]
    assert there[0][-1] is False and there[2] == [True] * 3
    assert tiers.evictor.counters.dropped == tiers.evictor.counters.mirror_evicted
    check_idle(tiers)


def test_the_last_copy_takes_its_resume_point_along() -> None:
    """No point stands at the end of a block that is gone."""
    tiers = tiny_tiers(tiny_plan(mirror_pages=8, device_pages=8))
    puppet = Puppet(tiers)
    puppet.drop_tail(puppet.run(TEXTS[0][:1025]))
    assert tiers.points.used_count == 1
    puppet.drop_tail(puppet.run(TEXTS[1][:2000]))
    assert all(node.key is not None for node in tiers.points.owners().values())
    assert nodes_of(tiers, TEXTS[0], 4)[3] is None
    check_idle(tiers)


def test_idle_tails_give_up_their_pages_last_and_lose_nothing() -> None:
    """A tail is packed when nothing else can go, and its session continues from it."""
    tiers = tiny_tiers(tiny_plan(mirror_pages=8, device_pages=8))
    puppet = Puppet(tiers)
    first = puppet.run(TEXTS[0][:700])
    assert first.tail is not None and first.tail.mirror != NO_PAGE
    puppet.drop_tail(puppet.run(TEXTS[1][:2000]))
    assert first.tail.packed is not None and first.tail.mirror == NO_PAGE
    assert tiers.idle.counters.packed == 1 and tiers.idle.counters.lost == 0
    assert tiers.idle.packed_bytes == len(first.tail.packed)
    check_idle(tiers)


def test_a_reused_mirror_page_leaves_no_hot_row_behind() -> None:
    """Rows read under the page's old content are not found under its new content."""
    tiers = tiny_tiers(tiny_plan(mirror_pages=4, device_pages=4, hot_rows=512))
    puppet = Puppet(tiers)
    for step, text in enumerate(TEXTS[:4]):
        actor = puppet.actor(text[:1024])
        seq = puppet.open(actor)
        assert puppet.ready(actor)
        puppet.prefill(seq, 1024)
        states = prefix_states(actor.transcript.tokens)
        keys = enumerate(actor.transcript.hashes)
        puppet.verify([actor], {key: states[: 256 * i + 256] for i, key in keys}, 100 * step)
        puppet.close(actor, keep_tail=False)
    assert tiers.evictor.counters.mirror_evicted == 12
    check_idle(tiers)


def test_what_runs_keeps_all_its_pages_under_pressure() -> None:
    """A request that does not fit beside a running one is refused, with numbers; then it fits."""
    tiers = tiny_tiers(tiny_plan(mirror_pages=8, device_pages=8))
    puppet = Puppet(tiers)
    first = puppet.actor(TEXTS[0][:1025])
    puppet.open(first)
    assert puppet.ready(first)
    puppet.prefill(first.seq, 1025)  # type: ignore[arg-type]
    with pytest.raises(HostPoolExhausted, match="7 host and 7 device pages are needed, 3 and 3"):
        puppet.open(puppet.actor(TEXTS[1][:1700]))
    check(tiers)
    puppet.close(first)
    puppet.drop_tail(puppet.run(TEXTS[1][:1700]))
    check(tiers)


def test_what_can_never_fit_is_refused_for_good() -> None:
    """Beyond the plan's context there is no waiting."""
    puppet = Puppet(tiny_tiers())
    with pytest.raises(ExceedsCapacity, match="2049 tokens"):
        puppet.open(puppet.actor(TEXTS[0]), more=1)


def test_dropping_spares_what_is_held_or_pinned() -> None:
    """A subtree goes except for the path that a sequence runs on, or that a pin keeps."""
    tiers = tiny_tiers()
    puppet = Puppet(tiers)
    fork = np.concatenate([TEXTS[0][:512], TEXTS[1][:512]])
    puppet.drop_tail(puppet.run(TEXTS[0][:1024]))
    running = puppet.actor(fork)
    puppet.open(running)
    assert puppet.ready(running)
    top = nodes_of(tiers, TEXTS[0], 1)[0]
    assert top is not None
    gone = tiers.evictor.drop_subtree(top)
    assert len(gone) == 2, "the two blocks that only the first had"
    check(tiers)
    puppet.close(running, keep_tail=False)
    assert len(tiers.evictor.drop_subtree(top)) == 2 and not tiers.tree.nodes
    check_idle(tiers)
    assert tiers.mirror_pool.free_count == tiers.mirror_pool.capacity
