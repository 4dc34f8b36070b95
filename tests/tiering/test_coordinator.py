"""Traffic with the store: bounded, late or failed without harm, and in the right order."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from dsv4_tierd.tiering import coordinator as coordinator_module
from dsv4_tierd.tiering.begin import StaleStart
from dsv4_tierd.tiering.check import check, check_idle
from dsv4_tierd.tiering.coordinator import StoreLimits
from dsv4_tierd.tiering.manager import TierManager
from dsv4_tierd.tiering.radix import NO_PAGE
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind
from hostile_store import Clock, HostileStore, ManualExecutor
from tiny_tiers import Actor, Puppet, page_bytes, prefix_states, tiny_plan, tiny_tiers

TOKENS = np.random.default_rng(5).integers(0, 512, 1300)


@dataclass(slots=True)
class Rig:
    """A manager whose I/O runs only when told, over a store that fails when told."""

    store: HostileStore
    clock: Clock
    tiers: TierManager
    puppet: Puppet
    readers: ManualExecutor
    writer: ManualExecutor

    @classmethod
    def over(cls, store: HostileStore, clock: Clock, **plan: int) -> Rig:
        tiers = tiny_tiers(tiny_plan(**plan), store)
        io = tiers.coordinator
        io._readers.shutdown()
        io._writer.shutdown()
        readers, writer = ManualExecutor(), ManualExecutor()
        io._readers, io._writer = readers, writer  # type: ignore[assignment]
        return cls(store, clock, tiers, Puppet(tiers), readers, writer)

    def write(self) -> None:
        """Everything that waits is written."""
        for _ in range(20):
            self.tiers.coordinator.poll()
            self.writer.run_all()

    def open(self, tokens: np.ndarray = TOKENS) -> Actor:
        actor = self.puppet.actor(tokens)
        self.puppet.open(actor)
        return actor

    def key(self, block: int, kind: ObjectKind = ObjectKind.PAGE) -> ObjectKey:
        return ObjectKey(kind, "", self.puppet.actor(TOKENS).transcript.hashes[block])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(coordinator_module, "time", clock)
    return clock


@pytest.fixture
def rig(clock: Clock) -> Iterator[Rig]:
    """An empty store."""
    rig = Rig.over(HostileStore(), clock)
    yield rig
    rig.readers.run_all()
    rig.tiers.coordinator.poll()
    check(rig.tiers)


@pytest.fixture
def warm(rig: Rig, clock: Clock) -> Iterator[Rig]:
    """A restarted manager over a store that has five blocks of TOKENS and their last point."""
    actor = rig.puppet.run(TOKENS)
    rig.puppet.drop_tail(actor)
    rig.write()
    assert len(rig.store.naive.objects) == 6
    warm = Rig.over(rig.store, clock)
    yield warm
    warm.readers.run_all()
    warm.tiers.coordinator.poll()
    check(warm.tiers)


def finish(rig: Rig, actor: Actor) -> None:
    """Run a sequence to its end, and see that its content is right."""
    seq = actor.seq
    assert seq is not None
    rig.puppet.prefill(seq, len(actor.transcript))
    keys = actor.transcript.hashes
    states = prefix_states(actor.transcript.tokens)
    rig.puppet.verify([actor], {k: states[: 256 * i + 256] for i, k in enumerate(keys)}, 10)
    rig.puppet.close(actor)
    rig.puppet.drop_tail(actor)


def test_finished_pages_are_written_through_with_their_bytes(rig: Rig) -> None:
    """Each block once, whole, named by its tokens; the counter says how many."""
    rig.puppet.run(TOKENS)
    assert rig.tiers.coordinator.dirty_count == 6
    rig.write()
    assert rig.tiers.coordinator.dirty_count == 0
    assert rig.tiers.coordinator.counters.pages_written == 5
    states = prefix_states(TOKENS)
    for block in range(5):
        _, payload = rig.store.naive.objects[rig.key(block)]
        assert payload == page_bytes(states[256 * block : 256 * block + 256])


def test_a_turn_writes_only_what_is_new(rig: Rig) -> None:
    """Traffic is O(new tokens): the blocks before are not written again."""
    rig.puppet.run(TOKENS[:1030])
    rig.write()
    before = rig.store.naive.usage().bytes_written
    rig.puppet.run(TOKENS)
    rig.write()
    page, point = rig.tiers.config.pages.mirror_bytes, rig.tiers.config.tail.resume_bytes
    assert rig.store.naive.usage().bytes_written - before == page + point


def test_pages_are_restored_while_later_ones_are_read(warm: Rig) -> None:
    """Device pages fill in order as blocks land, and the point is read beside the last ones."""
    actor = warm.open()
    seq = actor.seq
    assert seq is not None and not warm.puppet.ready(actor)
    assert len(warm.readers) == 6, "five pages, and the point that hangs on the last"
    layout, states = warm.tiers.config.pages, prefix_states(TOKENS)
    for landed, index in enumerate((1, 0), start=1):  # the second first: it waits for the first
        warm.readers.run_one(index)
        warm.tiers.coordinator.poll()
        assert not warm.puppet.ready(actor)
        filled = [node.device != NO_PAGE for node in seq.path]
        assert filled == ([False] * 5 if landed == 1 else [True, True, False, False, False])
    for block in range(2):
        found = warm.tiers.memory.device[seq.path[block].device].numpy().tobytes()
        own = states[256 * block : 256 * block + 256]
        assert found == page_bytes(own)[layout.c4_bytes :]
    check(warm.tiers)
    warm.readers.run_one(-1)  # the point, before its page
    warm.tiers.coordinator.poll()
    assert not warm.puppet.ready(actor)
    warm.readers.run_all()
    warm.tiers.coordinator.poll()
    assert warm.puppet.ready(actor)
    assert warm.tiers.coordinator.counters.loads_failed == 0
    finish(warm, actor)


def test_stored_pages_come_in_and_are_right(warm: Rig) -> None:
    """A restarted manager starts at the point, computing only what is beyond it."""
    actor = warm.open()
    assert actor.seq is not None and actor.seq.reused.store == 1280
    assert not warm.puppet.ready(actor)
    warm.readers.run_all()
    warm.tiers.coordinator.poll()
    assert warm.puppet.ready(actor) and actor.seq.position == 1280
    assert warm.tiers.coordinator.counters.pages_loaded == 5
    finish(warm, actor)


def test_reads_that_end_in_any_order_all_land(warm: Rig) -> None:
    """A page whose predecessor is still being read waits for it; none is read twice."""
    actor = warm.open()
    while not warm.puppet.ready(actor):
        assert warm.readers.run_one(len(warm.readers) - 1)
        warm.tiers.coordinator.poll()
        check(warm.tiers)
    assert warm.tiers.coordinator.counters.pages_loaded == 5 == warm.store.reads - 1
    finish(warm, actor)


def test_a_read_that_another_paid_for_is_not_paid_with_pages_to_come(warm: Rig) -> None:
    """When it fails to land, the sequence is opened again and promised what it needs."""
    warm = Rig.over(warm.store, warm.clock, device_pages=14)
    first = warm.open()
    assert not warm.puppet.ready(first)
    second = warm.open()
    assert second.seq is not None and second.seq.reservation.mirror == 1
    warm.store.naive.delete([warm.key(3)])
    warm.readers.run_all()
    warm.tiers.coordinator.poll()
    with pytest.raises(StaleStart):
        warm.puppet.ready(second)
    for actor in (first, second):
        warm.puppet.close(actor)
    warm.puppet.open(second)
    assert warm.puppet.ready(second)
    finish(warm, second)


def test_reads_in_flight_are_bounded(warm: Rig) -> None:
    """No more reads than the limit are handed to the I/O threads at once."""
    warm.tiers.coordinator._limits = StoreLimits(loads_max=2)
    actor = warm.open()
    most = 0
    while not warm.puppet.ready(actor):
        most = max(most, len(warm.readers))
        warm.readers.run_one()
        warm.tiers.coordinator.poll()
    assert most == 2
    finish(warm, actor)


class SlowStore(HostileStore):
    """Reads take a while; ``most`` were under way at once."""

    def __init__(self, store: HostileStore) -> None:
        super().__init__()
        self.naive = store.naive
        self.now = self.most = 0

    def get(self, key: ObjectKey, into: memoryview) -> bool:
        self.now += 1
        self.most = max(self.most, self.now)
        time.sleep(0.03)
        self.now -= 1
        return super().get(key, into)


def test_reads_of_a_restore_overlap(warm: Rig) -> None:
    """A page is read and checked while others are, on as many threads as there may be."""
    store = SlowStore(warm.store)
    tiers = tiny_tiers(tiny_plan(), store)
    readers = tiers.coordinator._limits.readers
    puppet = Puppet(tiers)
    actor = puppet.actor(TOKENS)
    puppet.open(actor)
    while not puppet.ready(actor):
        tiers.coordinator.poll()
        time.sleep(0.001)
    assert 2 <= readers <= 4
    assert store.most == readers
    puppet.close(actor)
    tiers.coordinator.close()


def test_writes_in_flight_are_bounded(rig: Rig) -> None:
    """No more bytes than the limit wait in the writer, or one object if it alone is larger."""
    size = rig.tiers.config.pages.mirror_bytes
    for limit, at_most in ((2 * size, 2), (1, 1)):
        rig.tiers.coordinator._limits = StoreLimits(write_bytes_max=limit)
        rig.puppet.run(TOKENS + limit)
        for _ in range(12):
            rig.tiers.coordinator.poll()
            waiting = rig.tiers.coordinator._writes
            assert sum(len(write.nodes) for write in waiting) <= at_most
            rig.writer.run_one()
    rig.write()
    assert rig.tiers.coordinator.counters.pages_written == 10


def test_a_read_that_fails_is_recomputed_and_counted_once(warm: Rig) -> None:
    """Wrong bytes: the start is stale, the failure counted, and the next start is shorter."""
    warm.store.broken = 1
    actor = warm.open()
    assert not warm.puppet.ready(actor)
    warm.readers.run_all()
    warm.tiers.coordinator.poll()
    with pytest.raises(StaleStart):
        warm.puppet.ready(actor)
    assert warm.tiers.coordinator.counters.loads_failed == 1
    warm.puppet.close(actor)
    seq = warm.puppet.open(actor)
    assert seq.reused.total == 0, "the first block is gone, and what hangs on it is not asked for"
    assert warm.puppet.ready(actor)
    finish(warm, actor)
    assert warm.tiers.coordinator.counters.loads_failed == 1


def test_a_page_that_vanished_is_a_miss(warm: Rig) -> None:
    """The store says it has a page, evicts it, and the read finds nothing: recomputed."""
    actor = warm.open()
    assert not warm.puppet.ready(actor)
    warm.store.naive.delete([warm.key(2)])
    warm.readers.run_all()
    warm.tiers.coordinator.poll()
    with pytest.raises(StaleStart):
        warm.puppet.ready(actor)
    warm.puppet.close(actor)
    seq = warm.puppet.open(actor)
    assert (seq.reused.host, seq.reused.store) == (512, 0)
    assert warm.puppet.ready(actor)
    finish(warm, actor)


def test_a_late_read_is_not_waited_for_and_lands_when_it_comes(warm: Rig) -> None:
    """After the deadline the request computes; the pages land later if they are still missing."""
    actor = warm.open()
    assert not warm.puppet.ready(actor)
    warm.clock.now += 11
    warm.tiers.coordinator.poll()
    assert warm.tiers.coordinator.counters.loads_late == 6
    with pytest.raises(StaleStart):
        warm.puppet.ready(actor)
    warm.puppet.close(actor)
    assert not warm.tiers.coordinator.up
    warm.readers.run_all()
    warm.tiers.coordinator.poll()
    landed = [node.mirror != NO_PAGE for node in warm.tiers.tree.nodes.values()]
    assert sum(landed) == 5 and warm.tiers.coordinator.counters.pages_loaded == 5
    check_idle(warm.tiers)
    seq = warm.puppet.open(actor)
    assert seq.reused.host == 1280
    assert warm.puppet.ready(actor)
    finish(warm, actor)


def test_a_late_page_that_was_computed_meanwhile_is_dropped(warm: Rig) -> None:
    """The computed page stays, the late one's goes back to the pool."""
    actor = warm.open()
    assert not warm.puppet.ready(actor)
    warm.clock.now += 11
    warm.tiers.coordinator.poll()
    warm.puppet.close(actor)
    seq = warm.puppet.open(actor)
    assert seq.reused.total == 0 and warm.puppet.ready(actor)
    finish(warm, actor)
    kept = {node.mirror for node in warm.tiers.tree.nodes.values()}
    warm.readers.run_all()
    warm.tiers.coordinator.poll()
    assert warm.tiers.coordinator.counters.pages_loaded == 0
    assert {node.mirror for node in warm.tiers.tree.nodes.values()} == kept
    assert warm.tiers.mirror_pool.free_count == warm.tiers.mirror_pool.capacity - 5


def test_a_read_that_hangs_for_ever_stops_no_request(warm: Rig) -> None:
    """Once the store is asked again, a block whose read still hangs is computed, not waited for."""
    actor = warm.open()
    assert not warm.puppet.ready(actor)
    warm.clock.now += 11
    warm.tiers.coordinator.poll()
    warm.puppet.close(actor)
    warm.clock.now += 6
    assert warm.tiers.coordinator.up
    seq = warm.puppet.open(actor)
    assert seq.reused.total == 0 and warm.puppet.ready(actor)
    finish(warm, actor)


def test_a_store_whose_reads_all_hang_is_away_until_one_ends(warm: Rig) -> None:
    """Late reads in every place: nothing waits for a place to get free, whatever is stored."""
    warm.tiers.coordinator._limits = StoreLimits(loads_max=2)
    actor = warm.open()
    assert not warm.puppet.ready(actor)
    assert len(warm.readers) == 2
    warm.clock.now += 11
    warm.tiers.coordinator.poll()
    warm.puppet.close(actor)
    warm.clock.now += 6
    assert not warm.tiers.coordinator.up
    seq = warm.puppet.open(actor)
    assert seq.reused.total == 0 and warm.puppet.ready(actor)
    finish(warm, actor)
    warm.readers.run_one()
    warm.tiers.coordinator.poll()
    assert warm.tiers.coordinator.up


def test_what_is_evicted_while_the_store_is_away_does_not_pile_up(rig: Rig) -> None:
    """Each failed write forgets what can no longer be written."""
    rig.tiers.coordinator._limits = StoreLimits(write_bytes_max=1)
    rig.store.down = True
    rig.puppet.run(TOKENS[:300] + 1)
    rig.puppet.drop_tail(rig.puppet.run(TOKENS))
    assert rig.tiers.coordinator.dirty_count == 2 + 6
    rig.tiers.evictor.drop_subtree(rig.tiers.tree.nodes[rig.key(0).digest])
    rig.clock.now += 6
    rig.write()
    assert rig.tiers.coordinator.dirty_count == 2, "a page and its point"


def test_a_cancelled_read_keeps_its_page_until_it_ends(warm: Rig) -> None:
    """Nobody else gets a page that a read may still write to."""
    actor = warm.open()
    assert not warm.puppet.ready(actor)
    warm.puppet.close(actor)
    pool = warm.tiers.mirror_pool
    loads = warm.tiers.coordinator.load_targets
    targets = {page for kind, page in loads if kind is ObjectKind.PAGE}
    assert len(targets) == 5 and not any(pool.is_free(page) for page in targets)
    assert pool.available == pool.capacity - 5
    check(warm.tiers)
    warm.readers.run_all()
    warm.tiers.coordinator.poll()
    assert pool.available == pool.capacity
    check_idle(warm.tiers)


def test_a_dead_store_costs_one_refusal_and_not_one_a_page(warm: Rig) -> None:
    """After one failed call it is left alone; requests compute; later it is asked again."""
    warm.store.down = True
    actor = warm.open()
    assert actor.seq is not None and actor.seq.reused.total == 0
    assert not warm.tiers.coordinator.up
    assert warm.puppet.ready(actor)
    finish(warm, actor)
    assert warm.store.reads == 0
    warm.store.down = False
    warm.clock.now += 6
    other = Rig.over(warm.store, warm.clock).open()
    assert other.seq is not None and other.seq.reused.store == 1280


def test_a_store_that_dies_with_a_needed_point_is_not_waited_for(warm: Rig) -> None:
    """The pages are in memory, the point is not, and cannot be: a replay takes its place."""
    actor = warm.open()
    assert not warm.puppet.ready(actor)
    warm.readers.run_all()
    warm.tiers.coordinator.poll()
    assert warm.puppet.ready(actor)
    warm.puppet.close(actor, keep_tail=False)
    node = warm.tiers.tree.nodes[warm.key(4).digest]
    warm.tiers.points.drop(node)
    assert node.resume_stored
    warm.store.down = True
    warm.puppet.open(actor)
    assert not warm.puppet.ready(actor)
    warm.readers.run_all()
    warm.tiers.coordinator.poll()
    with pytest.raises(StaleStart):
        warm.puppet.ready(actor)
    warm.puppet.close(actor)
    seq = warm.puppet.open(actor)
    assert seq.start.point is None and seq.start.triangle
    assert warm.puppet.ready(actor)
    finish(warm, actor)


def test_a_failed_write_is_tried_again_parents_first(rig: Rig) -> None:
    """While the store is away everything waits; then it is written in the order of the chain."""
    rig.puppet.run(TOKENS)
    rig.store.down = True
    rig.write()
    assert rig.tiers.coordinator.counters.writes_failed == 1, "left alone after the first"
    assert rig.tiers.coordinator.dirty_count == 6
    rig.store.down = False
    rig.clock.now += 6
    rig.write()
    assert rig.tiers.coordinator.dirty_count == 0
    assert len(rig.store.naive.objects) == 6


def test_pages_whose_parent_the_store_gave_up_are_written_with_it(rig: Rig) -> None:
    """The store evicts an idle session's pages; the next turn's go out with those before them."""
    rig.puppet.run(TOKENS[:600])
    rig.write()
    rig.store.naive.delete([rig.key(0)])
    assert not [key for key in rig.store.naive.objects if key.kind is ObjectKind.PAGE]
    rig.puppet.run(TOKENS)
    rig.write()
    assert rig.tiers.coordinator.up, "it answered: no reason to leave it alone"
    assert rig.tiers.coordinator.dirty_count == 0
    assert rig.store.has([rig.key(block) for block in range(5)]) == [True] * 5


def test_a_block_dropped_and_computed_again_is_written(rig: Rig) -> None:
    """What waited under the same name before does not stand in its way."""
    actor = rig.puppet.run(TOKENS)
    rig.puppet.drop_tail(actor)
    rig.tiers.evictor.drop_subtree(rig.tiers.tree.nodes[rig.key(0).digest])
    assert not rig.tiers.tree.nodes and rig.tiers.coordinator.dirty_count == 6
    rig.puppet.run(TOKENS)
    rig.write()
    assert rig.store.has([rig.key(block) for block in range(5)]) == [True] * 5


def test_no_store_is_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    """Without one nothing is queued, nothing is known, and nothing is said."""
    tiers = tiny_tiers()
    with caplog.at_level(logging.INFO):
        Puppet(tiers).run(TOKENS)
        tiers.coordinator.poll()
    assert not tiers.coordinator.up and not tiers.coordinator.dirty_count
    assert not caplog.records


def test_draining_writes_everything_or_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """True when nothing waits any more; False when the deadline came first."""
    rig.puppet.run(TOKENS)
    assert not rig.tiers.coordinator.drain(1.0)
    poll = rig.tiers.coordinator.poll
    monkeypatch.setattr(rig.tiers.coordinator, "poll", lambda: (rig.writer.run_all(), poll()))
    assert rig.tiers.coordinator.drain(1.0)
    assert len(rig.store.naive.objects) == 6
