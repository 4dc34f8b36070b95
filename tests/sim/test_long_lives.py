"""Sessions that come back: many in turn, one for long, short prefixes, and any order of ends."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dsv4_tierd.engine import messages as m
from small_models import Model, text
from store_cases import open_disk
from truth import assert_true, assert_usage_adds_up, make_world, stats

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("where", ["host", "store"])
def test_many_huge_sessions_in_turn(micro: Model, tmp_path: Path, where: str) -> None:
    """Five sessions visited round-robin: every revisit reuses >= 99 % of its tokens.

    Only three tails fit in slots and one session's pages on the device; with a store, not even
    two sessions fit in the host.
    """
    store = open_disk(tmp_path) if where == "store" else None
    world = make_world(
        micro,
        store,
        audit=False,
        max_batch=1,
        device_budget_bytes=2_500 * KIB,
        host_budget_bytes=(8 if where == "host" else 2) * MIB,
        resume_budget_bytes=256 * KIB,
        idle_tails=1,
    )
    sessions = [world.open(text(seed, 2051)) for seed in range(5)]
    for visit in range(4):
        for session in sessions:
            known = len(world.tokens(session))
            world.audit = visit == 1
            answer = world.generate(session, text(visit, 255) if visit else (), 1)
            assert_usage_adds_up(answer, known + 255 * bool(visit))
            if visit:
                usage = answer.usage
                found = usage.device_tokens + usage.host_tokens + usage.store_tokens
                gauges = stats(world).gauges
                full = gauges["resume_points_used"] == gauges["resume_points_limit"]
                assert found >= 0.99 * known or (full and usage.miss_reason == "no_resume_point")
                assert usage.replayed_tokens <= world.tiers.replay
            world.run_until(lambda: not world.tiers.coordinator.dirty_count)
    for session in sessions[:2]:
        assert_true(micro, world, session, world.generate(session, (), 2))
    counters = stats(world).counters
    assert counters["device_pages_evicted"] > 20
    assert counters["tokens_store"] > 10_000 or where == "host"
    world.settle()
    world.tiers.coordinator.close()


def test_a_long_agent_session_keeps_all_but_a_block(micro: Model) -> None:
    """12K tokens, then 20 turns of 100: cached >= the previous length less one block, each time."""
    world = make_world(micro, audit=False, chunk_tokens=1024)
    session = world.open()
    world.generate(session, text(1, 12_000), 1)
    for turn in range(20):
        before = len(world.tokens(session))
        answer = world.generate(session, text(turn, 100), 1)
        assert_usage_adds_up(answer, before + 100)
        cached = before + 100 - answer.usage.computed_tokens
        assert cached >= before - 256
        assert answer.usage.replayed_tokens == 0
    assert_true(micro, world, session, answer)
    world.settle()


def test_a_short_prefix_counts_too(micro: Model) -> None:
    """1,024 tokens sent again by another session hit at least 768."""
    world = make_world(micro)
    prefix = text(3, 1024)
    world.generate(world.open(), prefix, 1)
    answer = world.generate(world.open(), prefix, 2)
    usage = answer.usage
    assert usage.device_tokens + usage.host_tokens >= 768
    assert_usage_adds_up(answer, 1024)
    world.settle()


@pytest.mark.parametrize("seed", [1, 2])
def test_after_random_appends_every_pool_returns_to_zero(micro: Model, seed: int) -> None:
    """Lengths at random, sessions deleted in random order: no page, slot or point stays behind."""
    draw = random.Random(seed)
    world = make_world(micro, max_batch=3)
    sessions = [world.open() for _ in range(6)]
    requests = []
    for turn in range(3):
        for session in draw.sample(sessions, len(sessions)):
            words = text(draw.randrange(4), draw.randint(1, 500))
            requests.append(world.submit(session, words, draw.choice([0, 1, 5])))
        world.run(*requests)
        assert not any(world.answers[name].failed for name in requests), turn
    for session in draw.sample(sessions, len(sessions)):
        assert world.op(m.CloseSession, session_id=session, drop_from=0).code is None
    world.settle()
    tiers = world.tiers
    assert tiers.mirror_pool.free_count == tiers.mirror_pool.capacity
    assert tiers.device_pool.free_count == tiers.device_pool.capacity
    assert tiers.points.used_count == tiers.points.taken_count == 0
    assert tiers.tails.free_count == len(tiers.tails.slots) - 1, "all but the scratch slot"
    assert not len(tiers.idle) and not tiers.idle.packed_bytes and not tiers.tree.nodes
