"""Pins are promises with a limit; suspending writes; forgetting forgets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dsv4_tierd.tiering.check import check, check_idle
from dsv4_tierd.tiering.errors import (
    HostPoolExhausted,
    NotPinned,
    PinBudgetExhausted,
    StoreUnavailable,
)
from dsv4_tierd.tiering.manager import TierManager
from dsv4_tierd.tiering.retention import Retention, Suspension
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, StoredObject
from hostile_store import HostileStore
from tiny_tiers import Actor, Puppet, prefix_states, tiny_plan, tiny_tiers

RANDOM = np.random.default_rng(9)
STEM = RANDOM.integers(0, 512, 512)
TEXTS = [np.concatenate([STEM, RANDOM.integers(0, 512, 600)]) for _ in range(3)]


class Rig:
    """Three sessions of four blocks that share two, and pins for a number of pages."""

    def __init__(self, pin_pages: int, store: HostileStore | None = None, **plan: int) -> None:
        self.tiers: TierManager = tiny_tiers(tiny_plan(**plan), store)
        self.puppet = Puppet(self.tiers)
        self.retention = Retention(self.tiers, pin_pages)
        self.actors = [self.puppet.run(text) for text in TEXTS]

    def pin(self, number: int) -> None:
        actor = self.actors[number]
        self.retention.pin(str(number), actor.transcript, actor.tenant)

    def state(self) -> object:
        """Everything that a refused call must leave alone."""
        return (
            self.retention.pin_counts(),
            self.tiers.tree.mirror_evictable,
            self.tiers.tree.device_evictable,
            self.tiers.mirror_pool.available,
        )

    def settle(self, suspension: Suspension) -> None:
        for _ in range(10_000):
            self.tiers.coordinator.poll()
            if suspension.advance():
                return
        raise AssertionError("the suspension did not end")

    def suspend(self, actor: Actor, name: str = "name") -> Suspension:
        return self.retention.suspend_to_store(name, actor.transcript, actor.tenant, actor.tail)


def test_pins_beyond_the_budget_are_refused_and_change_nothing() -> None:
    """507 with the numbers; what is shared counts once."""
    rig = Rig(pin_pages=6)
    rig.pin(0)
    rig.pin(1)
    assert rig.retention.pinned_pages == 6
    before = rig.state()
    with pytest.raises(PinBudgetExhausted, match="2 more pages on 6 pinned") as caught:
        rig.pin(2)
    assert (caught.value.status, caught.value.code) == (507, "pin_budget_exhausted")
    assert rig.state() == before
    check(rig.tiers, rig.retention)


def test_traffic_goes_on_beside_full_pins() -> None:
    """Unpinned sessions use what is left, and evict one another, never the pinned."""
    rig = Rig(pin_pages=6, mirror_pages=16)
    rig.pin(0)
    rig.pin(1)
    pinned = {node.key for node in rig.tiers.tree.nodes.values() if node.pins}
    for _ in range(4):
        actor = rig.puppet.run(RANDOM.integers(0, 512, 1500))
        rig.puppet.drop_tail(actor)
        check(rig.tiers, rig.retention)
    assert rig.tiers.evictor.counters.mirror_evicted > 0
    assert pinned <= rig.tiers.tree.nodes.keys()


def test_releasing_a_pin_frees_exactly_its_private_pages() -> None:
    """The two shared blocks stay promised to the other session."""
    rig = Rig(pin_pages=8)
    rig.pin(0)
    rig.pin(1)
    before = rig.tiers.tree.mirror_evictable
    rig.retention.unpin("0")
    assert rig.tiers.tree.mirror_evictable == before + 2
    assert rig.retention.pinned_pages == 4
    rig.retention.unpin("1")
    assert rig.retention.pinned_pages == 0
    check(rig.tiers, rig.retention)


def test_pages_promised_to_a_running_request_are_not_pinned_away() -> None:
    """503 with the numbers; the request gets every page that it was promised."""
    rig = Rig(pin_pages=8, mirror_pages=11, device_pages=11)
    for actor in rig.actors:
        rig.puppet.drop_tail(actor)
    running = rig.puppet.actor(RANDOM.integers(0, 512, 300))
    seq = rig.puppet.open(running, more=1500)
    assert rig.puppet.ready(running)
    before = rig.state()
    with pytest.raises(HostPoolExhausted, match="pages to pin"):
        rig.pin(2)
    assert rig.state() == before
    check(rig.tiers, rig.retention)
    running.transcript.append(RANDOM.integers(0, 512, 1500).astype(np.int32))
    rig.puppet.prefill(seq, 1800)
    rig.puppet.close(running, keep_tail=False)
    check_idle(rig.tiers, rig.retention)


def test_unpinning_what_is_not_pinned_changes_nothing() -> None:
    """An error, also the second time, and no other session's pin is touched."""
    rig = Rig(pin_pages=8)
    rig.pin(0)
    before = rig.state()
    for name in ("1", "nobody"):
        with pytest.raises(NotPinned):
            rig.retention.unpin(name)
    assert rig.state() == before
    rig.retention.unpin("0")
    with pytest.raises(NotPinned):
        rig.retention.unpin("0")


def test_pinning_again_moves_the_pin() -> None:
    """A session that grew pins its new blocks too, and one unpin releases all."""
    rig = Rig(pin_pages=5)
    rig.pin(0)
    actor = rig.actors[0]
    actor.transcript.append(RANDOM.integers(0, 512, 200).astype(np.int32))
    rig.puppet.turn(actor)
    rig.pin(0)
    assert rig.retention.pinned_pages == 5
    rig.retention.unpin("0")
    assert rig.retention.pinned_pages == 0 and not rig.retention.is_pinned("0")
    check(rig.tiers, rig.retention)


def test_a_suspension_is_done_when_everything_is_stored() -> None:
    """Every block, the point and the tail; packed, it holds nothing on the device."""
    store = HostileStore()
    rig = Rig(8, store)
    actor = rig.actors[0]
    suspension = rig.suspend(actor)
    rig.settle(suspension)
    kinds = [key.kind for key in store.naive.objects]
    assert kinds.count(ObjectKind.TAIL) == 1
    assert store.has([rig_key for rig_key in store.naive.objects if rig_key.kind]) and all(
        node.stored for node in rig.tiers.match(actor.transcript, "", 1024)
    )
    rig.retention.suspend_to_host(actor.tail)
    assert actor.tail is not None and actor.tail.slot is None and actor.tail.packed is not None
    words_digest_bytes = 32
    assert suspension.tail is not None
    assert len(suspension.tail.payload) == words_digest_bytes + len(actor.tail.packed)
    check_idle(rig.tiers, rig.retention)


def test_a_stored_tail_continues_a_session_exactly() -> None:
    """After a restart the tail comes from the store and nothing before it is computed."""
    store = HostileStore()
    rig = Rig(8, store)
    suspension = rig.suspend(rig.actors[0])
    rig.settle(suspension)
    tiers = tiny_tiers(store=store)
    puppet = Puppet(tiers)
    assert suspension.tail is not None
    fetch = tiers.fetch_tail("", suspension.tail.key.digest, len(suspension.tail.payload))
    assert fetch is not None
    fetch.exception()
    actor = puppet.actor(np.concatenate([TEXTS[0], [1, 2, 3]]))
    actor.tail = tiers.accept_tail(fetch, actor.transcript)
    seq = puppet.open(actor)
    assert seq.start.begin == len(TEXTS[0]) == seq.reused.total
    while not puppet.ready(actor):
        tiers.coordinator.poll()
    puppet.prefill(seq, len(actor.transcript))
    puppet.verify([actor], _blocks(actor), 10)
    puppet.close(actor)


def test_a_stored_tail_of_other_words_is_refused() -> None:
    """A tail whose words are not the transcript's is never continued from."""
    store = HostileStore()
    rig = Rig(8, store)
    suspension = rig.suspend(rig.actors[0])
    rig.settle(suspension)
    tiers = tiny_tiers(store=store)
    assert suspension.tail_key is not None
    fetch = tiers.fetch_tail("", suspension.tail_key, len(suspension.tail.payload))
    assert fetch is not None
    fetch.exception()
    words = np.concatenate([TEXTS[0], [1, 2, 3]])
    words[5] += 1
    assert tiers.accept_tail(fetch, Puppet(tiers).actor(words).transcript) is None
    assert tiers.coordinator.counters.loads_failed == 1


def _blocks(actor: Actor) -> dict[bytes, np.ndarray]:
    states = prefix_states(actor.transcript.tokens)
    return {key: states[: 256 * i + 256] for i, key in enumerate(actor.transcript.hashes)}


def lose_all(rig: Rig, store: HostileStore) -> None:
    """The store gives up what it has of the first session, without telling."""
    keys = [ObjectKey(ObjectKind.PAGE, "", key) for key in rig.actors[0].transcript.hashes]
    store.naive.delete([*keys, *store.naive.objects])


def assert_stored(rig: Rig, store: HostileStore, suspension: Suspension) -> None:
    """The first session's four blocks are there, and its tail."""
    keys = [ObjectKey(ObjectKind.PAGE, "", key) for key in rig.actors[0].transcript.hashes]
    assert len(keys) == 4
    assert suspension.tail_key is not None
    assert all(store.naive.has([*keys, ObjectKey(ObjectKind.TAIL, "", suspension.tail_key)]))
    assert suspension.stored_tokens == len(STEM) + 600
    check(rig.tiers, rig.retention)


def test_what_the_store_gave_up_is_written_again() -> None:
    """Deleted by another daemon, or evicted: the next suspend has everything there again."""
    store = HostileStore()
    rig = Rig(8, store)
    rig.settle(rig.suspend(rig.actors[0]))
    lose_all(rig, store)
    suspension = rig.suspend(rig.actors[0])
    rig.settle(suspension)
    assert_stored(rig, store, suspension)


def test_what_the_store_gives_up_meanwhile_is_written_again() -> None:
    """Gone between the last block and the tail that hangs on it: both are there in the end."""
    store = HostileStore()
    rig = Rig(8, store)
    suspension = rig.suspend(rig.actors[0])
    while not all(node.stored for node in suspension.path):
        rig.tiers.coordinator.poll()
    lose_all(rig, store)
    rig.settle(suspension)
    assert_stored(rig, store, suspension)


def test_a_store_that_keeps_nothing_is_an_error() -> None:
    """What is written is gone each time: 503 after a few turns, not for ever."""
    store = HostileStore()
    rig = Rig(8, store)
    plain = store.put

    def put(objects: Sequence[StoredObject]) -> None:
        if objects[0].key.kind is ObjectKind.TAIL:
            lose_all(rig, store)
        plain(objects)

    store.put = put  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="as soon as they are written"):
        rig.settle(rig.suspend(rig.actors[0]))
    check(rig.tiers, rig.retention)


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
def test_blocks_that_were_given_up_are_left_out(moment: str) -> None:
    """The third of four blocks is in no tier any more: two are stored, without the tail."""
    store = HostileStore()
    store.down = True
    rig = Rig(8, store)
    store.down = False
    rig.tiers.coordinator._retry_at = 0.0
    actor = rig.actors[0]
    path = rig.tiers.match(actor.transcript, "", len(actor.transcript))
    assert len(path) == 4
    suspension = None
    if moment == "meanwhile":
        suspension = rig.suspend(actor)
    for node in reversed(path[2:]):
        rig.tiers.evictor.evict_mirror(node)
    suspension = suspension or rig.suspend(actor)
    rig.settle(suspension)
    assert (suspension.stored_tokens, suspension.tail_key) == (512, None)
    keys = [ObjectKey(ObjectKind.PAGE, "", key) for key in actor.transcript.hashes]
    assert store.naive.has(keys) == [True, True, False, False]
    check(rig.tiers, rig.retention)


def test_suspending_without_a_store_is_refused() -> None:
    """503, and the session is as it was."""
    rig = Rig(8)
    with pytest.raises(StoreUnavailable):
        rig.suspend(rig.actors[0])
    check_idle(rig.tiers, rig.retention)


def test_a_suspension_knows_when_its_words_were_taken_back() -> None:
    """A tail of tokens that were rewound and replaced is not the session's any more."""
    rig = Rig(8, HostileStore())
    actor = rig.actors[0]
    suspension = rig.suspend(actor)
    assert suspension.is_of("name", actor.transcript)
    actor.transcript.truncate(900)
    assert not suspension.is_of("name", actor.transcript)
    actor.transcript.append(np.full(400, 3, np.int32))
    assert not suspension.is_of("name", actor.transcript)
    rig.settle(suspension)


def test_a_session_at_a_block_border_is_suspended_without_its_tail() -> None:
    """512 tokens, the last still to be computed: one block is all there is to store."""
    store = HostileStore()
    tiers = tiny_tiers(store=store)
    puppet, retention = Puppet(tiers), Retention(tiers, 4)
    actor = puppet.actor(STEM)
    seq = puppet.open(actor)
    assert puppet.ready(actor)
    puppet.prefill(seq, 511)
    puppet.close(actor, keep_tail=False)
    suspension = retention.suspend_to_store("name", actor.transcript, "", None)
    for _ in range(10_000):
        tiers.coordinator.poll()
        if suspension.advance():
            break
    assert suspension.blocks == 1 and suspension.advance()


def test_dropping_forgets_private_blocks_in_every_tier() -> None:
    """The shared stem stays, in memory and in the store; the rest leaves both."""
    store = HostileStore()
    rig = Rig(8, store)
    rig.settle(rig.suspend(rig.actors[0]))
    rig.settle(rig.suspend(rig.actors[1], "other"))
    actor = rig.actors[0]
    rig.puppet.drop_tail(actor)
    future = rig.retention.drop(actor.transcript, "", 2)
    assert future is not None
    future.result(timeout=60)
    hashes = actor.transcript.hashes
    assert [key in rig.tiers.tree.nodes for key in hashes] == [True, True, False, False]
    pages = {key.digest for key in store.naive.objects if key.kind is ObjectKind.PAGE}
    assert [key in pages for key in hashes] == [True, True, False, False]
    assert set(rig.actors[1].transcript.hashes) <= pages
    check_idle(rig.tiers, rig.retention)


def test_dropping_leaves_what_a_running_sequence_holds() -> None:
    """Its blocks stay, stored and known as stored; the blocks behind them go."""
    store = HostileStore()
    rig = Rig(8, store)
    actor = rig.actors[0]
    rig.settle(rig.suspend(actor))
    running = rig.puppet.actor(TEXTS[0][:800])
    rig.puppet.open(running)
    rig.puppet.drop_tail(actor)
    future = rig.retention.drop(actor.transcript, "", 2)
    assert future is not None
    future.result(timeout=60)
    pages = {key.digest for key in store.naive.objects if key.kind is ObjectKind.PAGE}
    hashes = actor.transcript.hashes
    assert [key in pages for key in hashes] == [True, True, True, False]
    nodes = [rig.tiers.tree.nodes.get(key) for key in hashes]
    assert [node is not None and node.stored for node in nodes] == [True, True, True, False]
    rig.puppet.close(running)
    check(rig.tiers, rig.retention)


def test_purging_a_tenant_leaves_the_others() -> None:
    """Every stored byte of the tenant goes, no byte of another does."""
    store = HostileStore()
    rig = Rig(8, store, mirror_pages=24, device_pages=24)
    other = rig.puppet.run(TEXTS[0], tenant="b")
    rig.settle(rig.suspend(rig.actors[0]))
    rig.settle(rig.suspend(other, "other"))
    rig.puppet.drop_tail(other)
    future = rig.retention.purge("b")
    assert future is not None
    future.result(timeout=60)
    assert {key.tenant for key in store.naive.objects} == {""}
    assert {node.tenant for node in rig.tiers.tree.nodes.values()} == {""}
    check_idle(rig.tiers, rig.retention)
