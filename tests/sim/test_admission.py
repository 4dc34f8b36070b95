"""Who may run: prompts for the host, crowds, full pools, look-ups that hold nothing."""

from __future__ import annotations

import pytest

from dsv4_tierd.engine import messages as m
from dsv4_tierd.engine.scheduler import Scheduler
from dsv4_tierd.tiering.errors import InvalidRequest
from dsv4_tierd.tiering.store.protocol import ObjectKind
from hostile_store import HostileStore
from small_models import Model, text
from truth import assert_true, assert_usage_adds_up, at_rest, make_world, stats, step_until
from world import ids_bytes

KIB, MIB, PAGE = 1 << 10, 1 << 20, 58_000


def test_a_prompt_for_the_host_runs_on_a_tiny_device(micro: Model) -> None:
    """A prompt of 0.9 of what the host holds is admitted, finishes, and is right."""
    world = make_world(
        micro,
        audit=False,
        max_batch=1,
        chunk_tokens=1024,
        host_budget_bytes=24 * PAGE + 500 * KIB,
        device_budget_bytes=2_450 * KIB,
        resume_budget_bytes=0,
        idle_tails=1,
    )
    room = world.plan.mirror_pages * 256
    device = sum(size for name, size in world.plan.bytes_by_pool if name == "device.hot_rows")
    assert device < 0.2 * world.plan.mirror_pages * PAGE, "the hot set is a small part of it"
    session = world.open()
    answer = world.generate(session, text(1, int(0.9 * room)), 5)
    assert_true(micro, world, session, answer)
    world.settle()


def test_two_near_maximum_requests_run_together(micro: Model) -> None:
    """With room for two, both decode at the same time; with room for one, in turn."""
    for pages, together in ((18, True), (10, False)):
        world = make_world(
            micro, max_batch=2, audit=False, resume_budget_bytes=0, idle_tails=1,
            host_budget_bytes=pages * PAGE + 500 * KIB, device_budget_bytes=8 * MIB,
        )  # fmt: skip
        sessions = [world.open(), world.open()]
        size = 7 * 256
        requests = [world.submit(s, text(i, size - 40), 30) for i, s in enumerate(sessions)]
        most = 0
        while not all(world.answers[name].ended for name in requests):
            world.step()
            most = max(most, len(world.engine.scheduler.running))
        assert (most == 2) == together
        for session, name in zip(sessions, requests, strict=True):
            assert_true(micro, world, session, world.answers[name])
        world.settle()


def test_ten_thousand_look_ups_hold_nothing(micro: Model) -> None:
    """Never followed by a request, they leave every page evictable and nothing behind."""
    store = HostileStore()
    world = make_world(micro, store, audit=False)
    world.generate(world.open(), text(1, 1100), 1)
    world.settle()
    world.tiers.coordinator.close()
    world = make_world(micro, store, audit=False)
    world.generate(world.open(), text(2, 600), 1)
    known = ids_bytes(text(2, 600)), ids_bytes(text(1, 1100)), ids_bytes(text(3, 300))
    before = stats(world).gauges
    for number in range(10_000):
        world.verbs.handle(m.LookupPrefix(op_id=10_000 + number, token_ids=known[number % 3]))
    found = [world.acks[10_000 + number].matched for number in range(3)]
    assert [each.matched_tokens for each in found if each] == [512, 1024, 0]
    after = stats(world).gauges
    assert after["blocks_known"] == before["blocks_known"] + 4, "those that the store has"
    assert {k: v for k, v in after.items() if k != "blocks_known"} == {
        k: v for k, v in before.items() if k != "blocks_known"
    }
    assert at_rest(world)
    world.settle()
    world.tiers.coordinator.close()


def test_a_full_host_makes_wait_then_refuses_and_recovers_by_itself(micro: Model) -> None:
    """Waiting ends with 503 host_pool_exhausted and Retry-After; room again, it runs."""
    world = make_world(micro, max_batch=3, host_budget_bytes=20 * PAGE + 500 * KIB, idle_tails=1)
    world.engine.scheduler.queue_timeout_s = 0.2
    holder = world.open()
    running = world.submit(holder, text(1, 300), world.plan.mirror_pages * 256 - 600)
    step_until(world, lambda: bool(world.answers[running].token_ids))
    refused = world.open()
    answer = world.generate(refused, text(2, 1000), 2)
    assert answer.failed is not None
    assert answer.failed.code == "host_pool_exhausted" and answer.failed.retry_after_s
    assert world.tokens(refused) == [], "its words are taken back"
    world.engine.scheduler.queue_timeout_s = 60.0
    waiting = world.submit(refused, text(2, 1000), 2)
    for _ in range(5):
        world.step()
    assert not world.answers[waiting].ended and len(world.engine.scheduler.queue) == 1
    world.op(m.CloseSession, session_id=holder)
    [answer] = world.run(waiting)
    assert_true(micro, world, refused, answer)
    world.settle()


def test_what_can_never_fit_is_refused_at_once(micro: Model) -> None:
    """400 exceeds_capacity with the numbers, however empty the pools are."""
    world = make_world(micro, host_budget_bytes=12 * PAGE + 500 * KIB)
    answer = world.generate(world.open(), text(1, 300), world.plan.context_tokens)
    assert answer.failed is not None and answer.failed.code == "exceeds_capacity"
    assert str(world.plan.context_tokens) in answer.failed.message
    world.settle()


def test_a_full_queue_is_refused_at_once(micro: Model) -> None:
    """429 queue_full; those in the queue are served."""
    world = make_world(micro, max_batch=1, queue_max=2)
    sessions = [world.open() for _ in range(4)]
    requests = [world.submit(s, text(i, 50), 2) for i, s in enumerate(sessions)]
    failed = [world.answers[name].failed for name in requests]
    assert [each is not None for each in failed] == [False, False, True, True]
    assert failed[3] is not None and failed[3].code == "queue_full"
    world.run(*requests[:2])
    world.settle()


@pytest.mark.parametrize("count", [2, 4])
def test_identical_prompts_at_once_are_computed_once(micro: Model, count: int) -> None:
    """Followers wait for the first's pages, never read pages not yet written, and are right."""
    world = make_world(micro, max_batch=4)
    words = text(11, 1300)
    sessions = [world.open() for _ in range(count)]
    requests = [world.submit(session, words, 4) for session in sessions]
    answers = world.run(*requests)
    for session, answer in zip(sessions, answers, strict=True):
        assert_true(micro, world, session, answer)
        assert_usage_adds_up(answer, 1300)
    computed = sorted(answer.usage.computed_tokens for answer in answers)
    assert computed == [20] * (count - 1) + [1300]
    assert isinstance(world.engine.scheduler, Scheduler) and not world.engine.scheduler.queue
    world.settle()


def test_followers_go_on_when_the_first_is_cancelled(micro: Model) -> None:
    """The pages that it finished are reused, the rest is computed by the next."""
    world = make_world(micro, max_batch=4)
    words = text(12, 1300)
    sessions = [world.open() for _ in range(3)]
    requests = [world.submit(session, words, 4) for session in sessions]
    for _ in range(3):
        world.step()
    world.verbs.handle(m.Cancel(request_id=requests[0]))
    for session, name in zip(sessions[1:], requests[1:], strict=True):
        [answer] = world.run(name)
        assert_true(micro, world, session, answer)
        assert answer.usage.computed_tokens < 1300
    world.settle()


def test_a_page_being_read_is_never_reused(micro: Model) -> None:
    """While a slow read is under way, others fill the pool many times around its pages."""
    store = HostileStore()
    world = make_world(micro, store)
    world.generate(world.open(), text(7, 1100), 1)
    world.settle()
    world.tiers.coordinator.close()
    store.gate.clear()
    world = make_world(micro, store, host_budget_bytes=16 * PAGE + 500 * KIB, idle_tails=1)
    session = world.open()
    slow = world.submit(session, text(7, 1100), 3)
    world.step()
    loads = world.tiers.coordinator.load_targets
    targets = {page for kind, page in loads if kind is ObjectKind.PAGE}
    assert len(targets) == 4
    world.verbs.handle(m.Cancel(request_id=slow))
    for seed in range(4):
        other = world.open()
        answer = world.generate(other, text(20 + seed, 1500), 2)
        assert_true(micro, world, other, answer)
        used = {node.mirror for node in world.tiers.tree.nodes.values()}
        assert not used & targets
        assert not any(world.tiers.mirror_pool.is_free(page) for page in targets)
        world.op(m.CloseSession, session_id=other)
    assert world.tiers.evictor.counters.mirror_evicted >= 8
    store.gate.set()
    world.run_until(lambda: not world.tiers.coordinator.load_targets)
    answer = world.generate(session, (), 3)
    assert_true(micro, world, session, answer)
    world.settle()
    world.tiers.coordinator.close()


def test_a_look_up_does_not_extend_a_life(micro: Model) -> None:
    """The text that was only asked about goes before the one that was used later."""
    world = make_world(micro, host_budget_bytes=10 * PAGE + 500 * KIB, idle_tails=1)
    assert world.plan.mirror_pages == 12
    old, new = text(1, 1030), text(2, 1030)
    for words in (old, new):
        session = world.open()
        world.generate(session, words, 1)
        world.op(m.CloseSession, session_id=session)
    for _ in range(50):
        assert world.op(m.LookupPrefix, token_ids=ids_bytes(old)).matched.matched_tokens == 1024  # type: ignore[union-attr]
    world.generate(world.open(), text(3, 1200), 1)
    left = [world.op(m.LookupPrefix, token_ids=ids_bytes(words)).matched for words in (old, new)]
    assert left[0] and left[1] and left[0].matched_tokens < left[1].matched_tokens == 1024


@pytest.mark.parametrize("chunk_tokens", [0, -1, 65_536])
def test_a_chunk_that_no_kernel_takes_is_refused(micro: Model, chunk_tokens: int) -> None:
    """Before anything is allocated, with the bounds."""
    with pytest.raises(InvalidRequest, match=r"not in 1\.\.65535"):
        make_world(micro, chunk_tokens=chunk_tokens)
