"""Sequences from open to close: what they start from is theirs until they have it."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4_tierd.tiering.begin import StaleStart
from dsv4_tierd.tiering.check import check, check_idle
from dsv4_tierd.tiering.radix import NO_PAGE
from tiny_tiers import Actor, Puppet, prefix_states, tiny_plan, tiny_tiers

RANDOM = np.random.default_rng(12)
TEXTS = [RANDOM.integers(0, 512, 1300) for _ in range(3)]


def verify(puppet: Puppet, *actors: Actor) -> None:
    """Every byte that the tiers hold for these sessions, all there are, is right."""
    blocks = {}
    for actor in actors:
        states = prefix_states(actor.transcript.tokens)
        for i, key in enumerate(actor.transcript.hashes):
            blocks[key] = states[: 256 * i + 256]
    puppet.verify(list(actors), blocks, 1000)
    check(puppet.tiers)


def test_a_start_reads_its_point_before_its_own_slot_takes_it() -> None:
    """With no other slot left, the rolling slot takes the start's point, already read."""
    tiers = tiny_tiers(tiny_plan(resume_slots=2, mirror_pages=20, device_pages=20))
    tiers.points.free_slots().reverse()  # so that the point is not in slot -1 by luck
    puppet = Puppet(tiers)
    puppet.drop_tail(puppet.run(TEXTS[0]))
    assert tiers.points.used_count == 1
    other = puppet.actor(TEXTS[1][:600])
    puppet.open(other)
    assert puppet.ready(other)
    again = puppet.actor(TEXTS[0])
    seq = puppet.open(again)
    assert seq.start.point is not None
    assert puppet.ready(again)
    assert seq.start.point.resume == NO_PAGE and seq.rolling_slot is not None
    verify(puppet, other, again)
    for actor in (other, again):
        puppet.close(actor)
    verify(puppet, other, again)
    check_idle(tiers)


@pytest.mark.parametrize("decoded", [0, 3, 130, 300])
@pytest.mark.parametrize("length", [250, 256, 259, 260, 700, 1024])
def test_a_turn_continues_from_the_tail_of_the_last(length: int, decoded: int) -> None:
    """At any offset in a page, prefilled or decoded, nothing is computed twice."""
    tiers = tiny_tiers()
    puppet = Puppet(tiers)
    actor = puppet.actor(TEXTS[0][:length])
    puppet.turn(actor, decode=min(decoded, length - 1))
    actor.transcript.append(TEXTS[0][length : length + 50].astype(np.int32))
    seq = puppet.open(actor)
    assert seq.start.begin == length == seq.reused.total
    assert puppet.ready(actor)
    puppet.prefill(seq, length + 50)
    verify(puppet, actor)
    puppet.close(actor)
    check_idle(tiers)


@pytest.mark.parametrize("position", [250, 256, 259, 300, 515])
def test_a_fork_of_a_running_sequence_is_a_copy_of_now(position: int) -> None:
    """The twin goes on from the snapshot; the source is not touched by it."""
    tiers = tiny_tiers()
    puppet = Puppet(tiers)
    source = puppet.actor(TEXTS[0][:600])
    seq = puppet.open(source)
    assert puppet.ready(source)
    puppet.prefill(seq, position - 40)
    for _ in range(40):
        puppet.decode(seq)
    twin = Actor(source.transcript.fork(), "", tiers.snapshot(seq))
    assert twin.tail is not None and twin.tail.position == position
    begun = puppet.open(twin)
    assert puppet.ready(twin) and begun.position == position
    puppet.prefill(begun, 600)
    verify(puppet, source, twin)
    puppet.prefill(seq, 600)
    verify(puppet, source, twin)
    for actor in (source, twin):
        puppet.close(actor)
    check_idle(tiers)


def test_a_shared_tail_serves_each_fork_once_and_all_of_them() -> None:
    """Three forks of an idle session start from one tail, together, and differ afterwards."""
    tiers = tiny_tiers(tiny_plan(device_pages=14))
    puppet = Puppet(tiers)
    source = puppet.run(TEXTS[0][:700])
    assert source.tail is not None
    twins = [Actor(source.transcript.fork(), "", tiers.idle.share(source.tail)) for _ in range(2)]
    for number, actor in enumerate((source, *twins)):
        actor.transcript.append(np.full(40, number, np.int32))
        seq = puppet.open(actor)
        assert puppet.ready(actor) and seq.position == 700
        puppet.prefill(seq, 740)
    verify(puppet, source, *twins)
    assert not len(tiers.idle)
    for actor in (source, *twins):
        puppet.close(actor)
    check_idle(tiers)


@pytest.mark.parametrize("given_up", [False, True])
def test_a_corrupt_packed_tail_is_lost_and_not_used(given_up: bool) -> None:
    """The start is stale; the next one computes, and everything is right.

    given_up: taking its slot packs another tail, for which the corrupt one is given up.
    """
    tiers = tiny_tiers()
    puppet = Puppet(tiers)
    actor = puppet.run(TEXTS[0][:700])
    assert actor.tail is not None
    tiers.idle.pack_away(actor.tail)
    packed = bytearray(actor.tail.packed or b"")
    packed[-5] ^= 1
    actor.tail.packed = bytes(packed)
    actor.transcript.append(TEXTS[0][700:720].astype(np.int32))
    others = []
    if given_up:
        tiers.idle._packed_bytes_max = len(packed)
        while tiers.tails.free_count:
            others.append(puppet.run(TEXTS[1][:300]))
    puppet.open(actor)
    with pytest.raises(StaleStart):
        puppet.ready(actor)
    check(tiers)
    puppet.close(actor)
    assert tiers.idle.counters.lost == 1
    seq = puppet.open(actor)
    assert puppet.ready(actor) and seq.position == 512
    puppet.prefill(seq, 720)
    verify(puppet, actor, *others)
    puppet.close(actor)
    for other in others:
        puppet.drop_tail(other)
    check_idle(tiers)
