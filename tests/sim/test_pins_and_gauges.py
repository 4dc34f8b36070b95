"""Pins are promises with a limit, and every gauge is honest."""

from __future__ import annotations

import random

import pytest

from dsv4_tierd.engine import messages as m
from hostile_store import HostileStore
from small_models import Model, text
from truth import assert_true, assert_usage_adds_up, at_rest, make_world, stats
from world import World

PAGE = 58_000  # bytes of a mirror page, a little more than one

USAGE_GAUGES = (
    "requests_queued",
    "requests_running",
    "requests_decoding",
    "sessions_open",
    "host_pages_pinned",
    "host_pages_running",
    "host_pages_idle_tails",
    "device_pages_running",
    "device_pages_idle_tails",
    "tails_packed_bytes",
    "pinned_pages",
    "store_writes_pending",
)


def pin(world: World, session: str, pinned: bool = True) -> m.Ack:
    return world.op(m.PinSession, session_id=session, pinned=pinned)


def test_pins_beyond_the_budget_are_refused_and_traffic_goes_on(micro: Model) -> None:
    """Two of three fit; the third is told so at once, unpinned work is done, one release helps."""
    world = make_world(micro, pin_budget_bytes=5 * PAGE, host_budget_bytes=40 * PAGE)
    sessions = [world.open(text(seed, 513)) for seed in range(3)]
    for session in sessions:
        world.generate(session, (), 1)
    assert pin(world, sessions[0]).code is None
    assert pin(world, sessions[1]).code is None
    before = stats(world).gauges
    refused = pin(world, sessions[2])
    assert refused.code == "pin_budget_exhausted" and "2 more pages on 4" in refused.message
    assert stats(world).gauges == before
    busy = world.open()
    assert_true(micro, world, busy, world.generate(busy, text(9, 700), 3))
    assert pin(world, sessions[0], pinned=False).code is None
    gauges = stats(world).gauges
    assert gauges["pinned_pages"] == 2
    assert pin(world, sessions[2]).code is None
    world.settle()


def test_unpinning_what_is_not_pinned_is_an_error_that_changes_nothing(micro: Model) -> None:
    """not_pinned, also the second time; session_not_found for a stranger."""
    world = make_world(micro)
    session = world.open(text(1, 513))
    world.generate(session, (), 1)
    before = stats(world).gauges
    assert pin(world, session, pinned=False).code == "not_pinned"
    assert pin(world, "stranger", pinned=False).code == "session_not_found"
    assert stats(world).gauges == before
    pin(world, session)
    assert pin(world, session, pinned=False).code is None
    assert pin(world, session, pinned=False).code == "not_pinned"
    assert stats(world).gauges == before


def test_a_pin_follows_its_session(micro: Model) -> None:
    """Opened pinned by a new engine, it covers what is computed, what is added, what is left."""
    world = make_world(micro, pin_budget_bytes=5 * PAGE, host_budget_bytes=40 * PAGE)
    session = world.open(text(1, 700))
    assert pin(world, session).code is None
    assert stats(world).gauges["pinned_pages"] == 0  # nothing is in memory yet
    world.generate(session, (), 1)
    assert stats(world).gauges["pinned_pages"] == 2
    world.generate(session, text(2, 400), 1)
    assert stats(world).gauges["pinned_pages"] == 4
    world.generate(session, text(3, 600), 1)
    assert stats(world).gauges["pinned_pages"] == 4  # 6 are more than the budget
    assert world.op(m.RewindSession, session_id=session, to=600).code is None
    assert stats(world).gauges["pinned_pages"] == 2
    world.generate(session, (), 1)
    assert stats(world).gauges["pinned_pages"] == 2
    pin(world, session, pinned=False)
    world.generate(session, (), 1)
    assert stats(world).gauges["pinned_pages"] == 0
    world.settle()


def test_closing_a_pinned_session_withdraws_its_promise(micro: Model) -> None:
    """No pin outlives its session."""
    world = make_world(micro)
    session = world.open(text(1, 513))
    world.generate(session, (), 1)
    pin(world, session)
    world.op(m.CloseSession, session_id=session)
    assert stats(world).gauges["pinned_pages"] == 0
    world.settle()


def assert_partition(gauges: dict[str, float]) -> None:
    """The states of the pages of each tier sum to its capacity."""
    for tier, states in (
        ("host", ("free", "cached", "pinned", "running", "idle_tails")),
        ("device", ("free", "cached", "running", "idle_tails")),
    ):
        parts = [gauges[f"{tier}_pages_{state}"] for state in states]
        assert all(part >= 0 for part in parts)
        assert sum(parts) == gauges[f"{tier}_pages_capacity"], (tier, parts)


@pytest.mark.parametrize("has_store", [False, True])
def test_gauges_are_honest_at_any_time(micro: Model, has_store: bool) -> None:
    """Every step: page states sum to the capacity and no counter goes down. At rest: all zero."""
    draw = random.Random(5)
    store = HostileStore() if has_store else None
    world = make_world(
        micro, store, host_budget_bytes=40 * PAGE, device_budget_bytes=2_600_000, max_batch=2
    )
    sessions = [world.open() for _ in range(4)]
    before: dict[str, float] = {}
    names: dict[str, int] = {}
    for turn in range(12):
        session = draw.choice(sessions)
        if world.engine.sessions[session].request is None:
            words = text(draw.randrange(3), draw.randint(100, 900))
            if len(world.tokens(session)) < 2000:
                name = world.submit(session, words, draw.choice([0, 1, 4]))
                # An append leaves its last token to be computed.
                whole = len(world.tokens(session))
                names[name] = whole if world.engine.requests[name].max_tokens else whole - 1
        if turn == 4:
            pin(world, sessions[0])
        for _ in range(draw.randint(1, 6)):
            world.step()
            found = stats(world)
            assert_partition(found.gauges)
            for counter, value in found.counters.items():
                assert value >= before.get(counter, 0), counter
            before = found.counters
    world.run()
    for name, prompt in names.items():
        if world.answers[name].failed is None:
            assert_usage_adds_up(world.answers[name], prompt)
    for session in sessions:
        world.op(m.CloseSession, session_id=session)
    world.settle()
    gauges = stats(world).gauges
    assert {name: gauges[name] for name in USAGE_GAUGES} == dict.fromkeys(USAGE_GAUGES, 0)
    assert_partition(gauges)
    assert at_rest(world)
    world.tiers.coordinator.close()


def test_usage_adds_up_after_a_retry(micro: Model) -> None:
    """A restore that fails under way and is begun again counts no token twice."""
    store = HostileStore()
    world = make_world(micro, store)
    world.generate(world.open(), text(7, 1100), 1)
    world.settle()
    world.tiers.coordinator.close()
    other = make_world(micro, store)
    session = other.open()
    request = other.submit(session, text(7, 1100), 3)
    store.broken = 1
    [answer] = other.run(request)
    assert stats(other).counters["reopened"] == 1
    assert_usage_adds_up(answer, 1100)
    assert_true(micro, other, session, answer)
    totals = stats(other).counters
    kinds = ("device", "host", "store", "computed")
    assert sum(totals[f"tokens_{kind}"] for kind in kinds) == 1100
    other.settle()
    other.tiers.coordinator.close()
