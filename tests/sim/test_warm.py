"""Warm-up: what the store has of a prefix is in host memory before anybody asks for it."""

from __future__ import annotations

import pytest

from dsv4_tierd.engine import messages as m
from dsv4_tierd.tiering.coordinator import StoreLimits
from hostile_store import HostileStore
from small_models import Model, text
from truth import assert_true, make_world
from world import World, ids_bytes

PAGE = 58_000  # bytes of a mirror page, a little more than one
WORDS = text(21, 2100)  # eight blocks, and a rest


@pytest.fixture
def store(micro: Model) -> HostileStore:
    """Another engine has computed WORDS, and is gone."""
    store = HostileStore(bytes(32))
    world = make_world(micro, store)
    world.generate(world.open(), WORDS, 1)
    world.settle()
    return store


def warm(world: World, words: list[int] = WORDS, salt: str = "") -> m.Warmed:
    ack = world.op(m.WarmPrefix, token_ids=ids_bytes(words), salt=salt)
    assert ack.warmed is not None, ack.message
    return ack.warmed


def ask(micro: Model, world: World) -> m.Usage:
    session = world.open()
    answer = world.generate(session, WORDS, 3)
    assert_true(micro, world, session, answer)
    return answer.usage


def test_a_warmed_prefix_is_hit_from_host_memory(micro: Model, store: HostileStore) -> None:
    """All of it comes from the host, nothing from the store, no window is replayed."""
    world = make_world(micro, store)
    assert warm(world) == m.Warmed(host_tokens=2048, loaded_tokens=2048)
    world.settle()
    assert all(node.device < 0 for node in world.tiers.tree.nodes.values())
    reads = store.reads
    usage = ask(micro, world)
    assert (usage.host_tokens, usage.store_tokens, usage.replayed_tokens) == (2048, 0, 0)
    assert usage.computed_tokens == len(WORDS) - 2048
    assert store.reads == reads
    assert warm(world) == m.Warmed(host_tokens=2048, loaded_tokens=0), "it is there already"
    world.settle()


def test_only_what_is_stored_for_the_tenant_comes(micro: Model, store: HostileStore) -> None:
    """Other words and another tenant's are nothing; a common beginning is as much as it is."""
    world = make_world(micro, store)
    assert warm(world, text(22, 600)).host_tokens == 0
    assert warm(world, salt="else").host_tokens == 0
    assert warm(world, [*WORDS[:600], *text(23, 600)]).host_tokens == 512
    assert warm(world, WORDS[:100]).host_tokens == 0
    world.settle()


def test_as_much_comes_as_fits_from_the_beginning(micro: Model, store: HostileStore) -> None:
    """What is pinned stays, the rest of the room is filled, and can be given up again."""
    world = make_world(micro, store, host_budget_bytes=40 * PAGE)
    capacity = world.plan.mirror_pages
    assert 10 < capacity < 40
    world.engine.retention.pin_pages_max = capacity
    pinned = world.open()
    world.generate(pinned, text(24, 256 * (capacity - 5) + 1), 1)
    assert world.op(m.PinSession, session_id=pinned, pinned=True).code is None
    room = world.tiers.mirror_pool.available
    assert 0 < room < 8
    assert warm(world).host_tokens == 256 * room
    world.op(m.PinSession, session_id=pinned, pinned=False)
    world.settle()
    assert ask(micro, world).computed_tokens == len(WORDS) - 2048
    world.settle()


@pytest.mark.parametrize("fault", ["away", "hung", "corrupt"])
def test_a_store_that_misbehaves_ends_a_warm_up(
    micro: Model, store: HostileStore, fault: str
) -> None:
    """What came is kept, the rest is computed; nothing is held, nothing hangs, nothing is wrong."""
    world = make_world(micro, store)
    world.tiers.coordinator._limits = StoreLimits(deadline_s=0.3, retry_after_s=0.2, loads_max=2)
    world.verbs.handle(m.WarmPrefix(op_id=999, token_ids=ids_bytes(WORDS)))
    world.run_until(lambda: world.tiers.coordinator.counters.pages_loaded >= 3)
    store.down = fault == "away"
    store.broken = 1 if fault == "corrupt" else 0
    if fault == "hung":
        store.gate.clear()
    world.run_until(lambda: 999 in world.acks)
    warmed = world.acks[999].warmed
    assert warmed is not None
    assert 768 <= warmed.host_tokens < 2048
    store.down = False
    store.gate.set()
    world.run_until(lambda: not world.tiers.coordinator.load_targets)
    ask(micro, world)
    world.settle()


def test_without_a_store_that_answers_it_is_refused(micro: Model, store: HostileStore) -> None:
    """503 with the reason, while the store is left alone; nothing has changed."""
    world = make_world(micro, store)
    world.tiers.coordinator._back_off("tests")
    ack = world.op(m.WarmPrefix, token_ids=ids_bytes(WORDS))
    assert (ack.code, "tests" in ack.message) == ("store_unavailable", True)
    world.settle()
