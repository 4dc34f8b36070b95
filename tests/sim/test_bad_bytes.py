"""Bytes that are wrong, short or missing, or another model's, are computed again and counted."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4_tierd.engine import messages as m
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.errors import StoreUnavailable
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind
from hostile_store import HostileStore, ManualExecutor
from small_models import Model, text
from store_cases import IDENTITY, FaultyFiles, open_disk
from truth import assert_true, assert_usage_adds_up, make_world, stats
from world import World, ids_bytes

WORDS = text(7, 1100)


@pytest.fixture
def folder(micro: Model, tmp_path: Path) -> Path:
    """A store's folder with a suspended session of WORDS, and no owner."""
    store = open_disk(tmp_path)
    world = make_world(micro, store)
    session = world.open()
    world.generate(session, WORDS, 1)
    assert world.op(m.SuspendSession, session_id=session).code is None
    world.settle()
    world.tiers.coordinator.close()
    return tmp_path


def restored(micro: Model, folder: Path, files: FaultyFiles | None = None) -> World:
    return make_world(micro, open_disk(folder, files=files))


def finish(world: World) -> None:
    world.settle()
    world.tiers.coordinator.close()


def test_the_same_identity_after_a_restart_hits_fully(micro: Model, folder: Path) -> None:
    """Every whole block comes from the store, and nothing fails."""
    world = restored(micro, folder)
    session = world.open()
    answer = world.generate(session, WORDS, 3)
    assert answer.usage.store_tokens == 1024
    assert stats(world).counters["store_loads_failed"] == 0
    assert_true(micro, world, session, answer)
    finish(world)


@pytest.mark.parametrize("fault", ["short read", "EIO"])
def test_a_read_that_fails_is_recomputed_and_counted_once(
    micro: Model, folder: Path, fault: str
) -> None:
    """Short reads and I/O errors: the tokens are right, and the counter goes up by the reads."""
    files = FaultyFiles()
    world = restored(micro, folder, files)
    if fault == "EIO":
        files.errors["read"] = [5]
    else:
        files.short_by = 1
    session = world.open()
    request = world.submit(session, WORDS, 3)
    world.run_until(lambda: stats(world).counters["store_loads_failed"] > 0)
    files.short_by = 0
    [answer] = world.run(request)
    assert stats(world).counters["store_loads_failed"] >= 1
    if fault == "EIO":
        assert stats(world).counters["store_loads_failed"] == 1
    assert_true(micro, world, session, answer)
    assert_usage_adds_up(answer, 1100)
    finish(world)


def spoil(folder: Path, payload: bytes) -> None:
    """Flip one bit of a stored payload, wherever it lies."""
    for segment in (folder / "segments").iterdir():
        data = bytearray(segment.read_bytes())
        at = data.find(payload[:512])
        if at >= 0:
            data[at + 300] ^= 1
            segment.write_bytes(data)
            return
    raise AssertionError("the payload is in no segment")


def test_a_wrong_checksum_is_recomputed_and_counted_once(micro: Model, folder: Path) -> None:
    """One rotten bit in one page: one failure, right tokens, and the page is stored anew."""
    world = restored(micro, folder)
    tokens = world.engine.tiers
    session = world.open(WORDS)
    node = tokens.match(world.engine.sessions[session].transcript, "", 1024)[1]
    world.run(world.submit(session, (), 1))
    payload = tokens.memory.blob(node.mirror).numpy().tobytes()
    finish(world)
    spoil(folder, payload)
    world = restored(micro, folder)
    session = world.open()
    answer = world.generate(session, WORDS, 3)
    assert stats(world).counters["store_loads_failed"] == 1
    assert stats(world).counters["store_checksum_failures"] == 1
    assert_true(micro, world, session, answer)
    assert_usage_adds_up(answer, 1100)
    finish(world)
    world = restored(micro, folder)
    assert world.generate(world.open(), WORDS, 1).usage.store_tokens == 1024
    finish(world)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_a_truncated_index_is_refused_or_recomputed(
    micro: Model, folder: Path, keep: float
) -> None:
    """A store that opens over a cut index serves no wrong token; or it is unavailable."""
    index = folder / "index.sqlite"
    data = index.read_bytes()
    index.write_bytes(data[: int(len(data) * keep)])
    try:
        world = restored(micro, folder)
    except StoreUnavailable:
        return
    session = world.open()
    answer = world.generate(session, WORDS, 3)
    assert_true(micro, world, session, answer)
    assert_usage_adds_up(answer, 1100)
    finish(world)


def test_a_stored_tail_of_words_that_were_taken_back_is_not_used(micro: Model) -> None:
    """Rewound while its suspension is under way, a session never continues from that tail."""
    store = HostileStore()
    world = make_world(micro, store)
    session = world.open()
    world.generate(session, WORDS, 1)
    world.settle()
    world.verbs.handle(m.SuspendSession(op_id=900, session_id=session))
    assert world.op(m.RewindSession, session_id=session, to=700).code is None
    world.run_until(lambda: 900 in world.acks)
    assert world.acks[900].tail_key is None
    answer = world.generate(session, text(8, 600), 3)
    assert_true(micro, world, session, answer)
    finish(world)


def reopened(
    micro: Model,
    world: World,
    store: HostileStore,
    session: str,
    key: bytes | None,
    **settings: object,
) -> World:
    """A new engine on the same store, which has the session and its stored tail."""
    words = ids_bytes(world.tokens(session))
    world.settle()
    new = make_world(micro, store, **settings)
    new.verbs.handle(m.OpenSession(session_id=session, token_ids=words, tail_key=key))
    return new


def test_a_deleted_session_leaves_no_older_tail_behind(micro: Model) -> None:
    """Suspended, continued, reopened by a new engine and deleted: its stored tail goes too."""
    store = HostileStore()
    world = make_world(micro, store)
    session = world.open()
    world.generate(session, WORDS, 1)
    key = world.op(m.SuspendSession, session_id=session).tail_key
    world.generate(session, text(8, 3), 2)
    world = reopened(micro, world, store, session, key)
    answer = world.generate(session, text(9, 3), 2)
    assert_true(micro, world, session, answer)
    assert world.op(m.CloseSession, session_id=session, drop_from=0).code is None
    assert not [key for key in store.naive.objects if key.kind is ObjectKind.TAIL]
    finish(world)


def test_a_refused_request_leaves_the_stored_tail_usable(micro: Model) -> None:
    """Its words are taken back; what was suspended before them is not computed again."""
    store = HostileStore()
    world = make_world(micro, store)
    session = world.open()
    world.generate(session, WORDS, 1)
    key = world.op(m.SuspendSession, session_id=session).tail_key
    world = reopened(micro, world, store, session, key, max_batch=1)
    running = world.submit(world.open(name="beside"), text(9, 20), 1000)
    world.step()
    patience, world.engine.scheduler.queue_timeout_s = world.engine.scheduler.queue_timeout_s, 0.0
    refused = world.generate(session, text(8, 3), 2).failed
    assert refused is not None and refused.code == "queue_full"
    world.engine.scheduler.queue_timeout_s = patience
    world.verbs.handle(m.Cancel(request_id=running))
    answer = world.generate(session, text(8, 3), 2)
    assert answer.usage.computed_tokens == 1 + 3
    assert_true(micro, world, session, answer)
    finish(world)


@pytest.mark.parametrize("count", [100, 600])
@pytest.mark.parametrize("written", [False, True])
def test_a_session_deleted_while_it_is_suspended_leaves_no_tail_behind(
    micro: Model, count: int, written: bool
) -> None:
    """What its suspension was about to write, or is writing, is gone when the deletion is told."""
    store = HostileStore()
    world = make_world(micro, store)
    session = world.open()
    for each in (session, world.open()):  # its blocks are another's too: they stay
        world.generate(each, text(7, count), 1)
    world.settle()
    world.tiers.coordinator._writer.shutdown()
    writer = world.tiers.coordinator._writer = ManualExecutor()  # type: ignore[assignment]
    world.verbs.handle(m.SuspendSession(op_id=900, session_id=session))
    if written:
        world.step()
        assert len(writer), "its tail is being written"
    blocks = count // BLOCK_TOKENS
    world.verbs.handle(m.CloseSession(op_id=901, session_id=session, drop_from=blocks))
    while 901 not in world.acks:
        assert writer.run_one()
        world.step()
    assert world.acks[900].code == "session_not_found"
    assert world.acks[901].code is None
    assert not [key for key in store.naive.objects if key.kind is ObjectKind.TAIL]
    world.step()
    assert not len(writer)
    finish(world)


def test_a_borrowed_tail_stays_when_a_fork_is_suspended_or_deleted(micro: Model) -> None:
    """A new engine knows that a fork's stored tail is its source's, which starts from it yet."""
    store = HostileStore()
    world = make_world(micro, store)
    source = world.open()
    world.generate(source, WORDS, 1)
    key = world.op(m.SuspendSession, session_id=source).tail_key
    assert key is not None
    words = ids_bytes(world.tokens(source))
    world = reopened(micro, world, store, source, key)
    for fork in ("suspended", "deleted"):
        opening = m.OpenSession(session_id=fork, token_ids=words, tail_key=key, tail_borrowed=True)
        world.verbs.handle(opening)
    world.generate("suspended", text(8, 3), 2)
    assert world.op(m.SuspendSession, session_id="suspended").tail_key not in (None, key)
    assert world.op(m.CloseSession, session_id="deleted", drop_from=len(words) // 1024).code is None
    world.settle()
    assert ObjectKey(ObjectKind.TAIL, "", key[:32]) in store.naive.objects
    answer = world.generate(source, text(9, 3), 2)
    assert_true(micro, world, source, answer)
    assert answer.usage.computed_tokens == 4  # the pending token and three new ones
    finish(world)


@pytest.mark.parametrize("forked", [False, True])
def test_a_tail_lost_in_memory_comes_back_from_the_store(micro: Model, forked: bool) -> None:
    """A suspended session whose packed tail was given up computes only its new tokens."""
    world = make_world(micro, HostileStore())
    session = world.open()
    world.generate(session, WORDS, 1)
    assert world.op(m.SuspendSession, session_id=session).code is None
    tail = world.engine.sessions[session].tail
    assert tail is not None
    world.tiers.idle.lose(tail)
    if forked:
        session = world.fork(session)
    answer = world.generate(session, text(8, 3), 2)
    assert answer.usage.computed_tokens == 1 + 3
    assert answer.usage.store_tokens == 1100 - 1024
    assert_true(micro, world, session, answer)
    finish(world)


def test_a_tail_lost_while_its_session_starts_comes_back_from_the_store(micro: Model) -> None:
    """Given up between admission and the start, it is fetched, and the request waits for it."""
    store = HostileStore()
    world = make_world(micro, store)
    session = world.open()
    world.generate(session, WORDS, 1)
    assert world.op(m.SuspendSession, session_id=session).code is None
    for node in reversed(list(world.tiers.tree.nodes.values())):
        world.tiers.evictor.evict_mirror(node)
    tail = world.engine.sessions[session].tail
    assert tail is not None
    store.gate.clear()
    request = world.submit(session, text(8, 3), 2)
    world.step()
    world.tiers.idle.lose(tail)
    store.gate.set()
    [answer] = world.run(request)
    assert answer.usage.computed_tokens == 1 + 3
    assert_true(micro, world, session, answer)
    finish(world)


def test_a_suspension_ends_when_the_store_goes_away(micro: Model) -> None:
    """503 within the store's own bounds, not never; the session goes on."""
    store = HostileStore()
    world = make_world(micro, store)
    session = world.open()
    request = world.submit(session, WORDS, 1)
    world.run_until(lambda: world.answers[request].ended)
    store.down = True
    ack = world.op(m.SuspendSession, session_id=session)
    assert ack.code == "store_unavailable"
    assert_true(micro, world, session, world.generate(session, (), 3))
    store.down = False
    world.tiers.coordinator.close()


def test_a_dead_store_stops_no_request(micro: Model, caplog: pytest.LogCaptureFixture) -> None:
    """Down from the start, or between two turns: answers are right, and the gauge says so."""
    store = HostileStore()
    world = make_world(micro, store)
    session = world.open()
    world.generate(session, WORDS, 1)
    world.settle()
    store.down = True
    answer = world.generate(session, text(3, 400), 3)
    assert_true(micro, world, session, answer)
    other = world.open()
    assert_true(micro, world, other, world.generate(other, text(4, 900), 3))
    assert stats(world).gauges["store_up"] == 0
    assert sum("left alone" in record.message for record in caplog.records) == 1
    world.tiers.coordinator.close()


FIELDS = {
    "weights_digest": "00" * 32,
    "model_config_digest": "11" * 32,
    "row_format": "bf16",
    "key_format": "bf16",
    "compute_dtype": "float32",
    "state_dtype": "bfloat16",
    "layout_version": 2,
    "page_tokens": 128,
}


@pytest.mark.parametrize("name", FIELDS)
def test_any_other_identity_hits_nothing_and_the_log_names_why(
    micro: Model, folder: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """One changed field: 0 tokens from the store, and a line that names the field."""
    other = replace(IDENTITY, **{name: FIELDS[name]})
    with caplog.at_level(logging.INFO):
        world = make_world(micro, open_disk(folder, other))
    assert any(name in record.getMessage() for record in caplog.records)
    session = world.open()
    answer = world.generate(session, WORDS[:600], 1)
    assert answer.usage.computed_tokens == 600
    assert answer.usage.miss_reason == "nothing_cached"
    finish(world)


def test_another_salt_hits_nothing(micro: Model, folder: Path) -> None:
    """A tenant never meets another's blocks, in memory or in the store."""
    world = restored(micro, folder)
    mine, theirs = world.open(), world.open(salt="other")
    assert world.generate(mine, WORDS, 1).usage.store_tokens == 1024
    assert world.generate(theirs, WORDS, 1).usage.computed_tokens == 1100
    finish(world)
