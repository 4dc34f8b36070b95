"""Two things at once: what a client who leaves, an engine that dies, or a second verb can meet."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from daemon_harness import Daemon, expected, run_daemon
from dsv4_tierd.daemon.bridge import Bridge, restarting
from dsv4_tierd.daemon.journal import Journal, JournalFile
from dsv4_tierd.daemon.ledger import AnyEvent, Created, Ledger
from dsv4_tierd.daemon.sessions import SessionState
from dsv4_tierd.daemon.tokenize import Piece
from dsv4_tierd.engine.messages import (
    AskStats,
    Cancel,
    Failed,
    OpenSession,
    PinSession,
    Submit,
    ToWorker,
)
from dsv4_tierd.tiering.errors import InvalidRequest, StoreUnavailable

GENERATE = "/v1/sessions/a/generate"


def created(uid: str, **more: object) -> Created:
    return Created(uid=uid, id=uid, salt="", created_s=1.0, **more)  # type: ignore[arg-type]


class SlowDisk:
    """Holds every write of the journal until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writing = threading.Event()
        self.go = threading.Event()
        write = JournalFile.write

        def slow(file: JournalFile, events: Sequence[AnyEvent]) -> None:
            self.writing.set()
            assert self.go.wait(10)
            write(file, events)

        monkeypatch.setattr(JournalFile, "write", slow)


async def test_a_session_is_not_let_go_while_facts_about_it_are_under_way(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who leaves while a rewind is written keeps the session busy; the next sees the new words."""
    await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5, 6, 7, 8]})
    session = daemon.service.sessions.get("", "a")
    disk = SlowDisk(monkeypatch)
    task = asyncio.create_task(daemon.call("POST", "/v1/sessions/a/rewind", {"to": 2}))
    await daemon.until(disk.writing.is_set)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.1)  # the daemon sees that the client is gone
    assert session.is_busy
    disk.go.set()
    await daemon.until(lambda: not session.is_busy)
    assert session.length == 2
    answer = await daemon.ok("POST", GENERATE, {"max_tokens": 3})
    assert answer["token_ids"] == expected([5, 6], 3)


async def test_who_leaves_a_fork_leaves_it_its_words(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source is cut to less meanwhile: the fork has what the source had when it was made."""
    await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5, 6]})
    await daemon.ok("POST", "/v1/sessions/a/append?wait=true", {"token_ids": [7, 8]})
    daemon.service.forget_in_worker(daemon.service.sessions.get("", "a"))
    disk = SlowDisk(monkeypatch)
    rewind = asyncio.create_task(daemon.call("POST", "/v1/sessions/a/rewind", {"to": 2}))
    await daemon.until(disk.writing.is_set)
    fork = asyncio.create_task(daemon.call("POST", "/v1/sessions/a/fork", {"id": "b"}))
    await daemon.until(lambda: daemon.service.sessions.find("", "b"))
    fork.cancel()
    await asyncio.gather(fork, return_exceptions=True)
    await asyncio.sleep(0.1)  # the daemon sees that the client is gone
    disk.go.set()
    assert (await rewind)[0] == 200
    await daemon.until(lambda: len(daemon.service.journal.ledger.records) == 2)
    answer = await daemon.ok("POST", "/v1/sessions/b/generate", {"max_tokens": 3})
    assert answer["token_ids"] == expected([5, 6, 7, 8], 3)


async def test_words_follow_those_that_they_were_encoded_for(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request comes and goes while a text is tokenised: it is refused, and not appended."""
    await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5, 6]})
    encode, asked, go = daemon.service.text.encode, asyncio.Event(), asyncio.Event()

    async def slow(pieces: Sequence[Piece]) -> bytes:
        asked.set()
        await go.wait()
        return await encode(pieces)

    monkeypatch.setattr(daemon.service.text, "encode", slow)
    body = {"text": "hello", "expected_tokens": 2}
    late = [
        asyncio.create_task(daemon.call("POST", f"/v1/sessions/a/{verb}", body))
        for verb in ("append", "generate")
    ]
    await asked.wait()
    await daemon.ok("POST", "/v1/sessions/a/append?wait=true", {"token_ids": [7]})
    go.set()
    for status, found, _ in await asyncio.gather(*late):
        assert (status, found["error"]["code"]) == (409, "session_busy")
    assert daemon.service.sessions.get("", "a").transcript.length == 3


async def test_two_changes_at_once_are_both_kept(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the time to live, one of the metadata, which each say the other as it was."""
    await daemon.ok("POST", "/v1/sessions", {"id": "a"})
    disk = SlowDisk(monkeypatch)
    one = asyncio.create_task(daemon.ok("PATCH", "/v1/sessions/a", {"ttl": 500}))
    await daemon.until(disk.writing.is_set)
    two = asyncio.create_task(daemon.ok("PATCH", "/v1/sessions/a", {"metadata": {"k": 1}}))
    await asyncio.sleep(0.1)  # it has come
    disk.go.set()
    await asyncio.gather(one, two)
    record = daemon.service.sessions.get("", "a").record
    assert (record.ttl_s, record.metadata) == (500, {"k": 1})


async def test_what_cannot_be_written_is_its_senders_fault(tmp_path: Path) -> None:
    """The commit is refused, those beside it and after it are kept."""
    journal = Journal(tmp_path)
    task = asyncio.create_task(journal.run())
    bad = [created("big", metadata={"k": 1 << 70}), created("odd", metadata={"k": "\udcff"})]
    ends = await asyncio.gather(
        *(journal.commit([event]) for event in (created("a"), *bad, created("b"))),
        return_exceptions=True,
    )
    assert [type(end) for end in ends] == [type(None), InvalidRequest, InvalidRequest, type(None)]
    assert set(journal.ledger.records) == {"a", "b"}
    journal.close()
    await task
    journal.release()
    again = Ledger()
    JournalFile(tmp_path, again).close()
    assert set(again.records) == {"a", "b"}


async def test_nobody_waits_for_a_writer_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the daemon falls, commits under way end with an error, not never."""
    disk = SlowDisk(monkeypatch)
    journal = Journal(tmp_path)
    task = asyncio.create_task(journal.run())
    first = asyncio.create_task(journal.commit([created("a")]))
    while not disk.writing.is_set():  # noqa: ASYNC110  a thread's event
        await asyncio.sleep(0.005)
    second = asyncio.create_task(journal.commit([created("b")]))
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(60):
        ends = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(end) for end in ends] == [StoreUnavailable, StoreUnavailable]
    disk.go.set()


async def test_nothing_is_opened_for_a_session_that_is_being_closed(daemon: Daemon) -> None:
    """Pins and questions are 409 then: the engine would keep the session for ever."""
    await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5, 6]})
    session = daemon.service.sessions.get("", "a")
    with session.taken(SessionState.CLOSING):
        daemon.service.forget_in_worker(session)
        for method, verb in (("PUT", "pin"), ("GET", "residency"), ("GET", "resume_points")):
            status, found, _ = await daemon.call(method, f"/v1/sessions/a/{verb}")
            assert (status, found["error"]["code"]) == (409, "session_busy")
    await daemon.service.worker.refresh_stats(2)
    assert daemon.service.worker.gauges()["sessions_open"] == 0
    await daemon.ok("PUT", "/v1/sessions/a/pin")


@pytest.mark.parametrize("words", [0, 300])
async def test_a_session_without_words_leaves_nothing_in_the_engine(
    daemon: Daemon, words: int
) -> None:
    """Never written to or rewound to nothing, looked at or pinned: its deletion closes it."""
    ids = {"token_ids": [5] * words} if words else {}
    await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", **ids})
    await daemon.ok("PUT", "/v1/sessions/a/pin")
    await daemon.ok("POST", "/v1/sessions/a/rewind", {"to": 0})
    await daemon.ok("GET", "/v1/sessions/a/residency")
    await daemon.ok("DELETE", "/v1/sessions/a")
    await daemon.service.worker.refresh_stats(2)
    assert daemon.service.worker.gauges()["sessions_open"] == 0


async def test_leaving_while_a_session_is_told_to_the_engine_again(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is sent a second time without a reader is cancelled once it is there."""
    await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5, 6, 7]})
    bridge, session = daemon.service.bridge(), daemon.service.sessions.get("", "a")
    sent: list[ToWorker] = []
    room = asyncio.Event()
    send_soon = bridge.send_soon

    def refuse(request_id: str) -> None:
        """As an engine that has other words; its socket is full from now on."""
        monkeypatch.setattr(bridge, "_drain", room.wait)
        failed = Failed(request_id=request_id, code="session_not_found", message="")
        bridge._sinks.pop(request_id).feed(failed)

    def record(message: ToWorker) -> None:
        if not isinstance(message, AskStats):
            sent.append(message)
        if isinstance(message, Submit) and len(sent) == 1:
            asyncio.get_running_loop().call_later(0.05, refuse, message.request_id)
        else:
            send_soon(message)

    monkeypatch.setattr(bridge, "send_soon", record)
    body = {"max_tokens": 10_000, "stream": True}
    task = asyncio.create_task(daemon.call("POST", GENERATE, body))
    await daemon.until(lambda: any(isinstance(message, OpenSession) for message in sent))
    run = session.run
    assert run is not None
    task.cancel()
    await daemon.until(lambda: run.is_abandoned)
    room.set()
    await daemon.until(lambda: not session.is_busy)
    kinds = [type(message) for message in sent]
    assert kinds.count(Submit) == 2
    assert kinds[-1] is Cancel, kinds


async def test_draining_outlives_an_engine_that_dies_meanwhile(tmp_path: Path) -> None:
    """To end the requests of an engine whose socket has just closed is no error."""
    async with run_daemon(tmp_path, "delay=0.01") as daemon:
        await daemon.ok("POST", "/v1/sessions", {"id": "a"})
        body = {"token_ids": [5], "max_tokens": 10_000}
        task = asyncio.create_task(daemon.call("POST", GENERATE, body))
        await daemon.until(lambda: daemon.service.running)
        os.kill(daemon.service.worker.pid or 0, signal.SIGKILL)
        bridge = daemon.service.bridge()
        bridge.fail_all(restarting())
        assert daemon.service.running  # their ends are not read yet
        daemon.service.cancel_all()
        status, found, _ = await task
        assert (status, found["error"]["code"]) == (503, "engine_restarting")


@pytest.mark.parametrize("late", [True, False])
async def test_unpinning_while_an_engine_comes_up(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """What the new one pins because the journal said so is not pinned for ever."""
    await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5, 6]})
    await daemon.ok("PUT", "/v1/sessions/a/pin", {})
    worker, said = daemon.service.worker, list[bool]()
    on_ready, told, go = worker.on_ready, asyncio.Event(), asyncio.Event()
    assert on_ready is not None

    async def slow(bridge: Bridge) -> None:
        send = bridge.send_soon

        def noted(message: ToWorker) -> None:
            if isinstance(message, PinSession):
                said.append(message.pinned)
            send(message)

        monkeypatch.setattr(bridge, "send_soon", noted)
        if not late:
            told.set()
            await asyncio.sleep(0.1)  # the withdrawal is being written
        await on_ready(bridge)
        told.set()
        disk.go.set()
        await go.wait()

    disk = SlowDisk(monkeypatch)
    monkeypatch.setattr(worker, "on_ready", slow)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    await told.wait()
    await daemon.ok("DELETE", "/v1/sessions/a/pin")
    go.set()
    await daemon.until(lambda: worker.is_up)
    assert said == [True, False]
    assert daemon.service.sessions.get("", "a").record.pinned_tier is None
