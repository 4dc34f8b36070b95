"""Cancelled anywhere, a request leaves nothing behind and nothing behind it is touched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsv4_tierd.engine import messages as m
from dsv4_tierd.engine.loop import _Pace
from hostile_store import HostileStore
from small_models import Model, text
from truth import assert_true, at_rest, make_world, poison_free_pages, step_until
from world import World

POINTS = (0, 1, 2, 3, 4, 5, 7, 9, 12, 16, 20, 25)


@pytest.fixture
def one_layer_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another request decodes, a prefill chunk advances by single layers."""
    monkeypatch.setattr(_Pace, "layers", lambda _pace, _count: 1)


def cancel(world: World, request: str) -> None:
    """Cancel and see that the request is over in the same step, and counted nowhere."""
    world.verbs.handle(m.Cancel(request_id=request))
    assert world.answers[request].ended and request not in world.engine.requests
    assert all(other.id != request for other in world.engine.scheduler.running)


@pytest.mark.usefixtures("one_layer_a_step")
def test_cancelled_at_any_layer_of_a_prefill_and_any_step_of_a_decode(micro: Model) -> None:
    """Pages come back, no freed page is written to, the neighbour and the next request are true."""
    world = make_world(micro, max_batch=2, host_budget_bytes=4 << 20, device_budget_bytes=6 << 20)
    beside = world.open()
    running = world.submit(beside, text(100, 40), 1500)
    step_until(world, lambda: bool(world.answers[running].token_ids))
    pools = world.tiers.mirror_pool, world.tiers.device_pool
    free_before = [pool.available for pool in pools]
    for point in POINTS:
        session = world.open()
        request = world.submit(session, text(point, 520), 30)
        for _ in range(point):
            world.step()
        cancel(world, request)
        untouched = poison_free_pages(world)
        for _ in range(3):
            world.step()
            untouched()
        assert world.op(m.CloseSession, session_id=session, drop_from=0).code is None
        step_until(world, lambda: bool(world.answers[running].token_ids))
        assert [pool.available for pool in pools] == free_before
    assert not world.answers[running].ended, "it ran beside all of them"
    cancel(world, running)
    assert_true(micro, world, beside, world.answers[running])
    again = world.open()
    assert_true(micro, world, again, world.generate(again, text(0, 520), 3))
    world.settle()
    assert at_rest(world)


@pytest.fixture
def stored(micro: Model) -> Iterator[HostileStore]:
    """A store that holds a 1,100-token session."""
    store = HostileStore()
    world = make_world(micro, store)
    world.generate(world.open(), text(7, 1100), 1)
    world.settle()
    world.tiers.coordinator.close()
    yield store
    store.gate.set()


@pytest.mark.parametrize("point", range(8))
def test_cancelled_at_any_step_of_a_restore(micro: Model, stored: HostileStore, point: int) -> None:
    """Reads under way keep their pages until they end; then everything is as at the start."""
    world = make_world(micro, stored)
    stored.gate.clear()
    session = world.open()
    request = world.submit(session, text(7, 1100), 3)
    for step in range(point):
        if step == 3:
            stored.gate.set()  # from here on the reads end, and swap-in and decode begin
        world.step()
    cancel(world, request)
    untouched = poison_free_pages(world)
    world.step()
    untouched()
    stored.gate.set()
    world.run_until(lambda: not world.tiers.coordinator.load_targets)
    world.settle()
    assert at_rest(world)
    again = world.open()
    assert_true(micro, world, again, world.generate(again, text(7, 1100), 3))
    world.tiers.coordinator.close()


def test_cancelled_while_its_pages_are_written_through(micro: Model) -> None:
    """What the store gets of a cancelled request is whole and right: another one reads it."""
    store = HostileStore()
    world = make_world(micro, store)
    request = world.submit(world.open(), text(9, 1500), 5)
    step_until(world, lambda: len(world.tiers.tree.nodes) >= 3)
    cancel(world, request)
    world.settle()
    world.tiers.coordinator.close()
    other = make_world(micro, store)
    session = other.open()
    answer = other.generate(session, text(9, 1500), 4)
    assert answer.usage.store_tokens >= 512
    assert_true(micro, other, session, answer)
    other.settle()
    other.tiers.coordinator.close()


def test_a_cancelled_request_waiting_in_the_queue_was_never_there(micro: Model) -> None:
    """It holds nothing, and those behind it move up."""
    world = make_world(micro, max_batch=1)
    first = world.submit(world.open(), text(1, 300), 20)
    queued = world.submit(world.open(), text(2, 300), 5)
    session = world.open()
    third = world.submit(session, text(3, 300), 5)
    world.step()
    cancel(world, queued)
    world.run(first, third)
    assert_true(micro, world, session, world.answers[third])
    world.settle()


def test_opening_a_running_session_anew_leaves_no_tail_behind(micro: Model) -> None:
    """The old request ends as cancelled, and everything that it had can be taken again."""
    world = make_world(micro)
    session = world.open(text(5, 300))
    request = world.submit(session, text(6, 20), 50)
    step_until(world, lambda: bool(world.answers[request].token_ids))
    world.open(text(5, 300), name=session)
    assert world.answers[request].done is not None
    world.settle()
    assert not len(world.tiers.idle)
    assert_true(micro, world, session, world.generate(session, (), 3))
