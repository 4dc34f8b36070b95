"""Lives of sessions over the tiers, step by step, with faults, and what must be so after each.

The naive model is the tokens themselves: every row that anything names must follow from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsv4_tierd.tiering import coordinator as coordinator_module
from dsv4_tierd.tiering.begin import StaleStart
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.check import check, check_idle
from dsv4_tierd.tiering.errors import HostPoolExhausted, NotPinned, PinBudgetExhausted, TierError
from dsv4_tierd.tiering.manager import TierManager
from dsv4_tierd.tiering.retention import Retention, Suspension
from hostile_store import Clock, HostileStore, ManualExecutor
from tiny_tiers import Actor, Puppet, page_bytes, prefix_states, tiny_plan, tiny_tiers

RUNNING_MAX = 2
SESSIONS_MAX = 6
PICK = st.integers(0, SESSIONS_MAX - 1)
# Two stems of 8 blocks that part at block 2.
_random = np.random.default_rng(7)
_STEM = _random.integers(0, 512, 8 * BLOCK_TOKENS)
_OTHER = np.concatenate([_STEM[: 2 * BLOCK_TOKENS], _random.integers(0, 512, 6 * BLOCK_TOKENS)])
STEMS = (_STEM, _OTHER)
LENGTHS = st.integers(1, 1500) | st.sampled_from([255, 256, 257, 511, 512, 513, 768, 1024, 1025])


@dataclass(slots=True)
class Saved:
    """A suspension under way, and the actor that asked."""

    actor: Actor
    suspension: Suspension


class Lives(RuleBasedStateMachine):
    """Sessions of two tenants, one store, a clock that stands still, I/O that waits to be let."""

    @initialize(
        tiered=st.booleans(),
        has_store=st.booleans(),
        lengths=st.lists(st.tuples(st.sampled_from([0, 1]), LENGTHS), min_size=2, max_size=4),
    )
    def begin(self, tiered: bool, has_store: bool, lengths: list[tuple[int, int]]) -> None:
        self.clock = Clock()
        self.real_time = coordinator_module.time
        coordinator_module.time = self.clock  # type: ignore[assignment]
        self.tiered = tiered
        self.store = HostileStore() if has_store else None
        self.blocks: dict[bytes, np.ndarray] = {}
        self.step = 1
        self.pins: dict[str, Actor] = {}
        self.actors: list[Actor] = []
        self.saved: list[Saved] = []
        self._start()
        for stem, length in lengths:
            self.create(stem, length, "")

    def _start(self) -> None:
        self.tiers: TierManager = tiny_tiers(tiny_plan(), self.store, self.tiered)
        io, old = self.tiers.coordinator, self.tiers.coordinator
        old._readers.shutdown()
        old._writer.shutdown()
        self.readers, self.writer = ManualExecutor(), ManualExecutor()
        io._readers, io._writer = self.readers, self.writer  # type: ignore[assignment]
        self.puppet = Puppet(self.tiers)
        self.retention = Retention(self.tiers, pin_pages_max=5)

    def teardown(self) -> None:
        if hasattr(self, "real_time"):
            self._end()
            coordinator_module.time = self.real_time

    def _end(self) -> None:
        """Everything that was held is given back, whatever happened."""
        for actor in self.actors:
            if actor.seq is not None:
                self.puppet.close(actor)
            self.puppet.drop_tail(actor)
        for name in self.pins:
            self.retention.unpin(name)
        self.readers.run_all()
        self.writer.run_all()
        self.tiers.coordinator.poll()
        check_idle(self.tiers, self.retention)
        for pool in (self.tiers.mirror_pool, self.tiers.device_pool):
            assert pool.available == pool.capacity, "something was not given back"
        assert not len(self.tiers.idle)

    # ------------------------------------------------------------ choosing
    def _idle(self, pick: int) -> Actor | None:
        idle = [actor for actor in self.actors if actor.seq is None]
        return idle[pick % len(idle)] if idle else None

    def _running(self, pick: int, began: bool | None = None) -> Actor | None:
        found = [
            actor
            for actor in self.actors
            if actor.seq is not None and (began is None or actor.seq.began == began)
        ]
        return found[pick % len(found)] if found else None

    def _know(self, actor: Actor) -> None:
        tokens = actor.transcript.tokens
        for i, key in enumerate(actor.transcript.hashes):
            if key not in self.blocks:
                self.blocks[key] = prefix_states(tokens[: (i + 1) * BLOCK_TOKENS])

    # ------------------------------------------------------------ sessions
    @precondition(lambda self: len(self.actors) < SESSIONS_MAX)
    @rule(stem=st.sampled_from([0, 1]), length=LENGTHS, tenant=st.sampled_from(["", "", "b"]))
    def create(self, stem: int, length: int, tenant: str) -> None:
        actor = self.puppet.actor(STEMS[stem][:length], tenant)
        self.actors.append(actor)
        self._know(actor)

    @precondition(lambda self: 0 < len(self.actors) < SESSIONS_MAX)
    @rule(pick=PICK, share=st.floats(0, 1), whole=st.booleans())
    def fork(self, pick: int, share: float, whole: bool) -> None:
        source = self.actors[pick % len(self.actors)]
        at = len(source.transcript) if whole else int(share * len(source.transcript))
        twin = Actor(source.transcript.fork(at), source.tenant)
        if source.seq is not None and source.seq.began:
            twin.tail = self.tiers.snapshot(source.seq)
        elif source.tail is not None:
            twin.tail = self.tiers.idle.share(source.tail)
        if twin.tail is not None and twin.tail.position >= len(twin.transcript):
            self.puppet.drop_tail(twin)
        self.actors.append(twin)

    def _append(self, actor: Actor, count: int, pick: int) -> None:
        """Mostly what another session says there too, so that blocks meet."""
        length = len(actor.transcript)
        new = STEMS[pick % 2][length : length + count].astype(np.int32)
        if not len(actor.transcript) + len(new):
            new = STEMS[0][:1].astype(np.int32)
        actor.transcript.append(new)
        self._know(actor)

    @rule(pick=PICK, share=st.floats(0, 1))
    def rewind(self, pick: int, share: float) -> None:
        actor = self._idle(pick)
        if actor is None:
            return
        length = int(share * len(actor.transcript))
        actor.transcript.truncate(length)
        if actor.tail is not None and actor.tail.position >= length:
            self.puppet.drop_tail(actor)

    @rule(pick=PICK)
    def forget(self, pick: int) -> None:
        actor = self._idle(pick)
        if actor is not None:
            self.puppet.drop_tail(actor)
            self.actors.remove(actor)

    # ------------------------------------------------------------ requests
    def _turn(self, pick: int, count: int, decoded: int, keep: bool) -> None:
        """A whole request; what the store does not bring in time is computed."""
        actor = self._idle(pick)
        if actor is None or self._running_count() == RUNNING_MAX:
            return
        self._append(actor, count, pick)
        if self._begin(actor) and actor.seq is not None:
            # As in the engine, the last token is left for the next turn.
            seq, last = actor.seq, len(actor.transcript) - 1
            stop = last - decoded
            if seq.position < stop:
                self.puppet.prefill(seq, stop)
            if seq.position >= seq.emit_from:
                for _ in range(last - seq.position):
                    self.puppet.decode(seq)
            self._verify()  # reads every row, as steps would
            if keep:
                self.puppet.close(actor)

    # Most of a life is turns.
    @rule(pick=PICK)
    def first_turn(self, pick: int) -> None:
        self._turn(pick, 0, 0, keep=True)

    @rule(pick=PICK, count=st.integers(1, 20), decoded=st.integers(0, 40))
    def short_turn(self, pick: int, count: int, decoded: int) -> None:
        self._turn(pick, count, decoded, keep=True)

    @rule(pick=PICK, count=st.integers(100, 700), decoded=st.integers(0, 40))
    def long_turn(self, pick: int, count: int, decoded: int) -> None:
        self._turn(pick, count, decoded, keep=True)

    @rule(pick=PICK, count=st.integers(0, 300), decoded=st.integers(0, 40))
    def turn_without_end(self, pick: int, count: int, decoded: int) -> None:
        self._turn(pick, count, decoded, keep=False)

    def _begin(self, actor: Actor) -> bool:
        """Open and bring everything in. False: no room."""
        for _ in range(4):
            try:
                self.puppet.open(actor)
                while not self.puppet.ready(actor):
                    assert self.readers.run_one(), "it waits for nothing"
                    self.tiers.coordinator.poll()
                return True
            except StaleStart:
                self.puppet.close(actor)
            except HostPoolExhausted:
                return False
        raise AssertionError("a request would be opened again for ever")

    def _running_count(self) -> int:
        return sum(actor.seq is not None for actor in self.actors)

    @precondition(lambda self: self._running_count() < RUNNING_MAX)
    @rule(pick=PICK, more=st.integers(0, 300))
    def open(self, pick: int, more: int) -> None:
        actor = self._idle(pick)
        if actor is None or not len(actor.transcript):
            return
        more = min(more, 8 * BLOCK_TOKENS - len(actor.transcript))
        try:
            self.puppet.open(actor, more)
        except HostPoolExhausted:
            assert actor.seq is None

    @rule(pick=PICK)
    def ready(self, pick: int) -> None:
        actor = self._running(pick, began=False)
        if actor is not None:
            try:
                self.puppet.ready(actor)
            except StaleStart:
                self.puppet.close(actor)

    @rule(pick=PICK, count=st.integers(1, 600), commit=st.booleans())
    def prefill(self, pick: int, count: int, commit: bool) -> None:
        actor = self._running(pick, began=True)
        if actor is not None and actor.seq is not None:
            stop = min(len(actor.transcript), actor.seq.position + count)
            if stop > actor.seq.position:
                self.puppet.prefill(actor.seq, stop, commit)

    @rule(pick=PICK, count=st.integers(1, 140))
    def decode(self, pick: int, count: int) -> None:
        actor = self._running(pick, began=True)
        if actor is None or actor.seq is None or actor.seq.position < actor.seq.emit_from:
            return
        for _ in range(min(count, len(actor.transcript) - actor.seq.position)):
            self.puppet.decode(actor.seq)

    @rule(pick=PICK, keep=st.sampled_from([True, True, False]))
    def close(self, pick: int, keep: bool) -> None:
        actor = self._running(pick)
        if actor is not None:
            self.puppet.close(actor, keep)

    @rule(pick=PICK)
    def publish(self, pick: int) -> None:
        actor = self._running(pick, began=True)
        if actor is not None and actor.seq is not None:
            self.tiers.publish(actor.seq)

    # ------------------------------------------------------------ keeping
    @rule(pick=PICK)
    def pin(self, pick: int) -> None:
        if not self.actors:
            return
        actor = self.actors[pick % len(self.actors)]
        name = str(pick % 3)
        before = self.retention.pin_counts()
        try:
            self.retention.pin(name, actor.transcript, actor.tenant)
            self.pins[name] = actor
        except (PinBudgetExhausted, HostPoolExhausted):
            assert self.retention.pin_counts() == before

    @rule(name=st.sampled_from("012"))
    def unpin(self, name: str) -> None:
        try:
            self.retention.unpin(name)
            assert self.pins.pop(name)
        except NotPinned:
            assert name not in self.pins

    @rule(pick=PICK)
    def suspend_to_host(self, pick: int) -> None:
        actor = self._idle(pick)
        if actor is not None:
            self.retention.suspend_to_host(actor.tail)

    @precondition(lambda self: self.store is not None)
    @rule(pick=PICK)
    def suspend_to_store(self, pick: int) -> None:
        actor = self._idle(pick)
        if actor is not None and self.tiers.coordinator.up:
            args = (actor.transcript, actor.tenant, actor.tail)
            self.saved.append(Saved(actor, self.retention.suspend_to_store("name", *args)))

    @rule(pick=PICK, block=st.integers(0, 5))
    def drop(self, pick: int, block: int) -> None:
        actor = self._idle(pick)
        if actor is not None:
            self.puppet.drop_tail(actor)
            self.actors.remove(actor)
            self.retention.drop(actor.transcript, actor.tenant, block)

    @rule()
    def purge(self) -> None:
        self.retention.purge("b")

    @rule(pick=PICK)
    def look_up(self, pick: int) -> None:
        if self.actors:
            actor = self.actors[pick % len(self.actors)]
            held = {id(node): (node.refs, node.pins, node.stamp) for node in self._nodes()}
            self.tiers.lookup(actor.transcript, actor.tenant)
            for node in self._nodes():
                assert held.get(id(node), (0, 0, 0)) == (node.refs, node.pins, node.stamp)

    def _nodes(self) -> list[object]:
        return list(self.tiers.tree.nodes.values())

    # ------------------------------------------------------------ the store
    @precondition(lambda self: self.store is not None)
    @rule(index=st.integers(0, 3), poll=st.booleans())
    def read_one(self, index: int, poll: bool) -> None:
        self.readers.run_one(index)
        if poll:
            self.tiers.coordinator.poll()

    @precondition(lambda self: self.store is not None)
    @rule()
    def write_all(self) -> None:
        self.tiers.coordinator.poll()
        self.writer.run_all()
        self.tiers.coordinator.poll()

    @precondition(lambda self: self.store is not None)
    @rule(what=st.sampled_from(["down", "up", "broken", "wait 1", "wait 6", "wait 11"]))
    def trouble(self, what: str) -> None:
        assert self.store is not None
        if what.startswith("wait"):
            self.clock.now += int(what[5:])
            self.tiers.coordinator.poll()
        elif what == "broken":
            self.store.broken = 1
        else:
            self.store.down = what == "down"

    @precondition(lambda self: self.store is not None and self.store.naive.objects)
    @rule(choice=st.integers(0, 100))
    def store_evicts(self, choice: int) -> None:
        """The store gives up a page, and all that hangs on it, without telling."""
        assert self.store is not None
        keys = list(self.store.naive.objects)
        self.store.naive.delete([keys[choice % len(keys)]])

    @precondition(lambda self: self.store is not None)
    @rule()
    def restart(self) -> None:
        """The worker dies: caches are gone, transcripts and what the store has are not."""
        tokens = [(actor.transcript.tokens.copy(), actor.tenant) for actor in self.actors]
        self._start()
        self.pins, self.saved = {}, []
        self.actors = [self.puppet.actor(*each) for each in tokens]

    # ------------------------------------------------------------ what must be so
    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "tiers"):
            self._verify()

    def _verify(self) -> None:
        check(self.tiers, self.retention)
        self.step += 100
        self.puppet.verify(self.actors, self.blocks, self.step)
        check(self.tiers, self.retention)

    @invariant()
    def the_store_holds_what_its_names_say(self) -> None:
        if getattr(self, "store", None) is None:
            return
        assert self.store is not None
        for key, (_, payload) in self.store.naive.objects.items():
            if key.kind.name == "PAGE":
                assert payload == page_bytes(self.blocks[key.digest][-BLOCK_TOKENS:])

    @invariant()
    def what_is_acknowledged_as_stored_is(self) -> None:
        """When a suspension is done, every block is stored, unless the store itself lost it."""
        for saved in list(getattr(self, "saved", [])):
            try:
                done = saved.suspension.advance()
            except TierError:
                self.saved.remove(saved)
                continue
            if done:
                self.saved.remove(saved)
                assert all(node.stored for node in saved.suspension.path)
                assert len(saved.suspension.path) == saved.suspension.blocks
