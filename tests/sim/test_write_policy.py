"""What a session lets the store have, and when: through, on suspend, never."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_tierd.engine import messages as m
from dsv4_tierd.tiering.store.protocol import ObjectKind
from hostile_store import HostileStore
from small_models import Model, text
from tiered_cases import hostile, open_tiered
from truth import assert_true, make_world
from world import World, ids_bytes

WORDS = {"through": text(1, 700), "on_suspend": text(2, 700), "never": text(3, 700)}


def start(world: World, policy: str, words: list[int] | None = None) -> str:
    """A session of a policy, its words computed and everything that is to be written written."""
    message = m.OpenSession(session_id=policy, write_policy=policy)  # type: ignore[arg-type]
    world.verbs.handle(message)
    world.generate(policy, WORDS[policy] if words is None else words, 2)
    world.settle()
    return policy


def blocks(world: World, session: str) -> set[bytes]:
    return set(world.engine.sessions[session].transcript.hashes)


def stored(store: HostileStore) -> set[bytes]:
    return {key.digest for key in store.naive.objects if key.kind is ObjectKind.PAGE}


def tails(store: HostileStore) -> int:
    return sum(key.kind is ObjectKind.TAIL for key in store.naive.objects)


def test_one_store_is_written_as_the_policy_says(micro: Model) -> None:
    """Through at once, on suspend at the suspend and that session's own alone, never never."""
    store = HostileStore(bytes(32))
    world = make_world(micro, store)
    for policy in WORDS:
        start(world, policy)
    assert stored(store) == blocks(world, "through")
    assert len(stored(store)) == 2
    world.verbs.handle(m.OpenSession(session_id="more", write_policy="on_suspend"))
    world.generate("more", text(4, 700), 1)
    ack = world.op(m.SuspendSession, session_id="on_suspend")
    assert ack.tail_key is not None
    assert stored(store) == blocks(world, "through") | blocks(world, "on_suspend")
    assert tails(store) == 1
    refused = world.op(m.SuspendSession, session_id="never")
    assert (refused.code, tails(store)) == ("unsupported_combination", 1)
    assert world.op(m.SuspendSession, session_id="never", tier="host").code is None
    assert not blocks(world, "never") & stored(store)


def test_a_drain_stores_what_may_be_stored(micro: Model) -> None:
    """A session that is never to be stored keeps no other from it, and is not stored."""
    store = HostileStore(bytes(32))
    world = make_world(micro, store)
    for policy in WORDS:
        start(world, policy)
    assert world.op(m.Drain, deadline_s=20.0).code is None
    assert stored(store) == blocks(world, "through") | blocks(world, "on_suspend")


@pytest.mark.parametrize("kept_by", ["on_suspend", "never"])
def test_what_one_keeps_back_another_may_write(micro: Model, kept_by: str) -> None:
    """The same words in a session written through: pages that hang on kept ones bring those too."""
    store = HostileStore(bytes(32))
    world = make_world(micro, store)
    start(world, kept_by)
    assert not stored(store)
    start(world, "through", [*WORDS[kept_by], *text(9, 400)])
    assert stored(store) == blocks(world, "through")
    assert len(stored(store)) == 4
    fork = world.fork(kept_by)
    world.generate(fork, text(10, 600), 1)
    world.settle()
    assert stored(store) == blocks(world, "through"), "a fork has its source's policy"


def test_of_two_tiers_the_far_one_is_sent_what_the_policy_says(
    micro: Model, tmp_path: Path
) -> None:
    """Near has all; far has what is through, and a suspended session's own chain and tail."""
    far = hostile()
    near = open_tiered(tmp_path / "near", far)
    world = make_world(micro, near)
    for policy in WORDS:
        start(world, policy)
    assert near.flush(30.0)
    assert stored(far) == blocks(world, "through")
    known = [world.tiers.coordinator.known("", sorted_blocks(world, p)) for p in WORDS]
    assert known == [2, 2, 2]
    assert world.op(m.SuspendSession, session_id="never").tail_key is not None
    assert near.flush(30.0)
    assert (stored(far), tails(far)) == (blocks(world, "through"), 0)
    assert world.op(m.SuspendSession, session_id="on_suspend").tail_key is not None
    assert stored(far) == blocks(world, "through") | blocks(world, "on_suspend"), (
        "whoever is told that it is suspended finds it in the far tier"
    )
    assert tails(far) == 1
    other = make_world(micro, far)
    again = other.open()
    answer = other.generate(again, WORDS["on_suspend"], 2)
    assert answer.usage.store_tokens == 512
    near.close()


def sorted_blocks(world: World, session: str) -> list[bytes]:
    return list(world.engine.sessions[session].transcript.hashes)


def test_a_session_whose_tail_is_lost_still_sends_its_chain(micro: Model, tmp_path: Path) -> None:
    """Words without a tail, suspended: the far tier gets their pages all the same."""
    far = hostile()
    near = open_tiered(tmp_path / "near", far)
    world = make_world(micro, near)
    start(world, "on_suspend")
    words = world.tokens("on_suspend")
    world.verbs.handle(
        m.OpenSession(
            session_id="on_suspend", token_ids=ids_bytes(words), write_policy="on_suspend"
        )
    )
    assert world.op(m.SuspendSession, session_id="on_suspend").tail_key is None
    assert near.flush(30.0)
    assert stored(far) == blocks(world, "on_suspend")
    near.close()


def test_what_host_memory_gave_up_is_not_in_the_way_of_a_suspend(micro: Model) -> None:
    """Kept from the store, and evicted: the suspend says what is left, and the words are right."""
    store = HostileStore(bytes(32))
    world = make_world(micro, store, host_budget_bytes=10 * 58_000 + 500 * 1024, idle_tails=1)
    words = text(11, 256 * (world.plan.mirror_pages // 2) + 100)
    start(world, "on_suspend", words)
    start(world, "never", text(12, len(words) + 512))
    assert world.tiers.evictor.counters.dropped > 0
    ack = world.op(m.SuspendSession, session_id="on_suspend")
    assert ack.code is None, ack
    assert ack.stored_tokens is not None
    assert ack.stored_tokens == 256 * len(stored(store)) < len(words)
    words = world.tokens("on_suspend")
    world.settle()
    other = make_world(micro, store)
    session = other.open(words)
    answer = other.generate(session, text(13, 5), 3)
    assert answer.usage.store_tokens == ack.stored_tokens
    assert_true(micro, other, session, answer)
    for each in (world, other):
        each.tiers.coordinator.close()
