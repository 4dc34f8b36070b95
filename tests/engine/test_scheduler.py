"""Who runs next: bounded, in order, and never the same prefill twice at once."""

from __future__ import annotations

import time

import pytest

from dsv4_tierd.engine import messages as m
from dsv4_tierd.engine.request import State
from dsv4_tierd.tiering.errors import HostPoolExhausted, QueueFull
from engine_probe import Probe, make_hostile
from small_models import text


@pytest.fixture(scope="module")
def model(models):
    return models("SCH", 16)


@pytest.fixture
def crowded(models):
    """A world whose host memory holds one longest request and hardly more."""
    model = models("SCH", 16, yarn_original=4096)
    return model.world(max_batch=4, host_budget_bytes=2 << 20, device_budget_bytes=4 << 20)


def states(world, names: list[str]) -> list[State | None]:
    """State of each request; None: ended."""
    known = world.engine.requests
    return [known[name].state if name in known else None for name in names]


def test_admission_in_order(model) -> None:
    """No more run than the batch holds, and the others start in the order they came."""
    world = model.world(max_batch=2)
    names = [world.submit(world.open(), text(400 + i, 20 + i), 4 + 3 * i) for i in range(6)]
    started: list[str] = []
    scheduler, start = world.engine.scheduler, world.engine.scheduler.start

    def noted(request) -> None:
        start(request)
        started.append(request.id)
        assert len(scheduler.running) <= 2

    scheduler.start = noted
    world.run()
    assert started == names
    world.settle()


def test_prefills_take_turns(model) -> None:
    """Of two long prompts neither waits for the other's end: their chunks alternate."""
    world = model.world(max_batch=2, chunk_tokens=128)
    make_hostile(world, 1)
    probe = Probe(world)
    order: list[str] = []
    finish = probe.finish

    def noted(chunk, want_logits):
        order.append(probe._name(chunk.seq))
        return finish(chunk, want_logits)

    world.engine.runner.finish = noted
    names = [world.submit(world.open(), text(410 + i, 512), 1) for i in range(2)]
    world.run()
    assert order == names * 4


def test_followers_wait_for_the_same_prefix(model) -> None:
    """Of equal prompts at once, one computes; the others wait, then reuse, and answer the same."""
    world = model.world(max_batch=4)
    make_hostile(world, 2)
    words = text(420, 600)
    names = [world.submit(world.open(), words, 6) for _ in range(4)]
    stranger = world.submit(world.open(), text(421, 300), 6)
    world.step()
    assert states(world, names)[1:] == [State.QUEUED] * 3
    assert world.engine.requests[stranger].state is not State.QUEUED, "others pass"
    answers = world.run(*names)
    assert [answer.usage.computed_tokens for answer in answers] == [600, 88, 88, 88]
    assert [answer.usage.device_tokens for answer in answers] == [0, 512, 512, 512]
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    world.run()
    world.settle()


def test_followers_survive_their_leader(model) -> None:
    """If the one that computes is cancelled, the next one computes what is left."""
    world = model.world(max_batch=4, chunk_tokens=256)
    words = text(422, 900)
    names = [world.submit(world.open(), words, 4) for _ in range(3)]
    world.step()
    world.step()  # two chunks of the first
    world.verbs.handle(m.Cancel(request_id=names[0]))
    answers = world.run(*names[1:])
    assert answers[0].usage.computed_tokens == 900 - 512
    assert answers[1].usage.computed_tokens == 900 - 768
    assert answers[0].token_ids == answers[1].token_ids
    world.settle()


def test_tenants_do_not_wait_for_one_another(model) -> None:
    """Equal words under another salt are other words."""
    world = model.world(max_batch=4)
    words = text(423, 600)
    names = [world.submit(world.open(salt=salt), words, 2) for salt in ("a", "b")]
    world.step()
    assert State.QUEUED not in states(world, names)
    assert all(answer.usage.computed_tokens == 600 for answer in world.run())


def test_queue_is_bounded(model) -> None:
    """One request more than the queue holds is refused at once, and changes nothing."""
    world = model.world(max_batch=1, queue_max=2)
    sessions = [world.open(text(430 + i, 5)) for i in range(3)]
    names = [world.submit(session, [7], 3) for session in sessions]
    refused = world.answers[names[2]].failed
    assert refused is not None and refused.code == QueueFull.code
    assert world.tokens(sessions[2]) == text(432, 5), "its words were not added"
    world.run(*names[:2])
    assert world.generate(sessions[2], [7], 3).done is not None
    world.settle()


def test_waiting_has_an_end(crowded) -> None:
    """A request that found no room in time fails with host_pool_exhausted and a time to retry."""
    world, room = crowded, crowded.plan.context_tokens
    engine = world.engine
    engine.scheduler.queue_timeout_s = 0.0
    first = world.submit(world.open(), text(440, 10), room - 10)
    world.step()
    assert world.engine.requests[first].state is State.DECODE
    waiting = world.open(text(441, 5))
    late = world.submit(waiting, text(442, 5), room - 10)
    world.step()
    failed = world.answers[late].failed
    assert failed is not None and failed.code == HostPoolExhausted.code
    assert failed.retry_after_s is not None
    assert world.tokens(waiting) == text(441, 5), "what it had added is taken back"
    world.verbs.handle(m.Cancel(request_id=first))
    engine.scheduler.queue_timeout_s = 60.0
    assert world.generate(waiting, text(442, 5), 3).done is not None, "there is room again"
    world.settle()


def test_who_waits_for_one_that_waits_for_room_has_waited_too(crowded) -> None:
    """Equal prompts that find no room are refused together, not one after the other."""
    world, room = crowded, crowded.plan.context_tokens
    first = world.submit(world.open(), text(440, 10), room - 10)
    world.step()
    late = [world.submit(world.open(), text(446, 300), room - 300) for _ in range(3)]
    for name in late:
        world.engine.requests[name].queued_at -= 2 * world.engine.scheduler.queue_timeout_s
    world.step()
    refused = [world.answers[name].failed for name in late]
    assert [each and each.code for each in refused] == [HostPoolExhausted.code] * 3
    world.verbs.handle(m.Cancel(request_id=first))
    world.settle()


def test_the_first_in_line_is_not_overtaken(crowded) -> None:
    """A large request that must wait for room is not starved by small ones behind it."""
    world, room = crowded, crowded.plan.context_tokens
    first = world.submit(world.open(), text(443, 10), room - 300)
    world.step()
    large = world.submit(world.open(), text(444, 10), room - 10)
    small = world.submit(world.open(), text(445, 10), 2)
    for _ in range(5):
        world.step()
    assert states(world, [large, small]) == [State.QUEUED, State.QUEUED]
    world.verbs.handle(m.Cancel(request_id=first))
    world.step()
    assert states(world, [large])[0] is not State.QUEUED
    world.verbs.handle(m.Cancel(request_id=large))
    world.run(small)
    world.settle()


def test_a_full_batch_says_so(model) -> None:
    """Who waited only for others to end is told queue_full, not that memory is short."""
    world = model.world(max_batch=1)
    world.engine.scheduler.queue_timeout_s = 0.0
    first = world.submit(world.open(), text(443, 10), 50)
    world.step()
    late = world.submit(world.open(), text(444, 5), 5)
    world.step()
    failed = world.answers[late].failed
    assert failed is not None and failed.code == QueueFull.code
    assert failed.retry_after_s is not None
    world.run(first)
    world.settle()


def test_waiting_for_room_does_not_slow_the_others(models, monkeypatch) -> None:
    """Room for a long text is looked for now and then: to find none takes as long as a step."""
    world = models("C", 16).world()
    calls = []

    def full(*_: object) -> None:
        calls.append(time.sleep(0.01))
        raise HostPoolExhausted("full", retry_after_s=1.0)

    with monkeypatch.context() as patch:
        patch.setattr(world.tiers, "open", full)
        waiting = world.submit(world.open(), text(1, 300), 4)
        began = time.monotonic()
        while time.monotonic() < began + 0.1:
            world.step()
        assert len(calls) == 1
    world.run(waiting)
    assert len(world.answers[waiting].token_ids) == 4
