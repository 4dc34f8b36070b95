"""The client against a real daemon: sessions, streams, forks, retries, typed errors."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from daemon_harness import Daemon, expected, run_daemon
from dsv4_tierd.daemon.client import AsyncTierd, Timeouts
from dsv4_tierd.daemon.client_errors import (
    BadRequestError,
    CapacityError,
    ConnectionFailedError,
    PreconditionError,
    SessionBusyError,
    SessionExistsError,
    SessionNotFoundError,
    UnavailableError,
)
from dsv4_tierd.daemon.retry import RetryPolicy


@pytest.fixture
async def tierd(daemon: Daemon) -> AsyncIterator[AsyncTierd]:
    async with AsyncTierd(daemon.url, max_retries=0) as client:
        yield client


async def test_the_readmes_story(tierd: AsyncTierd) -> None:
    """Create with messages, fork, stream an answer; leaving the fork's block suspends it."""
    base = await tierd.sessions.create(messages=[{"role": "system", "content": "code " * 300}])
    before = base.tokens
    assert before > 300
    async with tierd.fork(base) as agent:
        events = [event async for event in agent.stream("Find the race.", max_tokens=5)]
        assert events[-1].kind == "done"
        result = events[-1].result
        assert result is not None
        assert result["usage"]["prompt_tokens_details"]["cached_tokens"] == before
        assert len([i for e in events for i in e.token_ids]) == 5
        assert agent.tokens == result["tokens"]
    assert (await agent.refresh()).state == "suspended"
    assert (await base.refresh()).tokens == before
    await agent.resume()
    answer = await agent.generate(max_tokens=2)
    assert len(answer["token_ids"]) == 2


async def test_every_verb(tierd: AsyncTierd) -> None:
    """Append, rewind, pins, residency, points, lists, lookups and closing."""
    session = await tierd.sessions.create("a", token_ids=[5] * 300)
    await session.append(token_ids=[6])
    assert session.tokens == 301
    assert (await session.rewind(299)).tokens == 299
    assert repr(session) == "<Session 'a' idle, 299 tokens>"
    assert (await session.pin()).info["pin"] is not None
    assert (await session.unpin()).info["pin"] is None
    assert (await session.residency())[0]["tokens"] == 299
    assert await session.resume_points() == [256]
    assert (await session.suspend("host")).state == "suspended"
    for n in range(4):
        await tierd.sessions.create(f"b{n}")
    assert [s.id async for s in tierd.sessions.list(page=2)] == ["a", "b0", "b1", "b2", "b3"]
    assert (await tierd.prefixes.lookup(token_ids=[5] * 300))["matched_tokens"] == 256
    assert (await tierd.prefixes.warm(token_ids=[5] * 300))["host_tokens"] == 256
    octets = struct.pack("<300i", *[5] * 300)
    assert (await tierd.prefixes.lookup(token_ids=octets))["matched_tokens"] == 256
    assert (await tierd.prefixes.warm(token_ids=octets))["host_tokens"] == 256
    with pytest.raises(BadRequestError, match="int32"):
        await tierd.prefixes.lookup(token_ids=octets[:-1])
    await session.close()
    with pytest.raises(SessionNotFoundError):
        await tierd.sessions.get("a")


async def test_typed_errors(tierd: AsyncTierd) -> None:
    """Each kind of refusal is its own exception, with the code and when to come back."""
    await tierd.sessions.create("a")
    with pytest.raises(SessionExistsError):
        await tierd.sessions.create("a")
    session = await tierd.sessions.get("a")
    with pytest.raises(BadRequestError) as bad:
        await session.generate(token_ids=[5], max_tokens=-1)
    assert bad.value.param == "max_tokens"
    stale = await tierd.sessions.get("a")
    await session.append(token_ids=[5])
    with pytest.raises(PreconditionError):
        await stale.append(token_ids=[5])
    with pytest.raises(ConnectionFailedError):
        async with AsyncTierd("http://127.0.0.1:9", max_retries=0) as nobody:
            await nobody.sessions.get("a")


async def test_refusals_are_typed_and_say_when(tmp_path: Path) -> None:
    """A full queue is a CapacityError with retry_after_s, also for streams."""
    async with (
        run_daemon(tmp_path, "refuse=queue_full") as daemon,
        AsyncTierd(daemon.url, max_retries=0) as tierd,
    ):
        session = await tierd.sessions.create("a")
        with pytest.raises(CapacityError) as full:
            await session.generate(token_ids=[5])
        assert full.value.retry_after_s == 2
        with pytest.raises(CapacityError):
            async for _ in session.stream(token_ids=[5]):
                pass


async def test_a_restart_of_the_engine_is_ridden_out_by_retries(tmp_path: Path) -> None:
    """While the engine restarts the client waits and repeats; words are never doubled."""
    async with (
        run_daemon(tmp_path, "load_s=0.3,delay=0.01") as daemon,
        AsyncTierd(daemon.url, max_retries=6) as tierd,
    ):
        session = await tierd.sessions.create("a", token_ids=[5, 6])
        streaming = asyncio.create_task(collect(session.stream(max_tokens=500)))
        inner = daemon.service.sessions.get("", "a")
        await daemon.until(lambda: inner.run is not None and len(inner.run.generated) > 3)
        with pytest.raises(SessionBusyError):
            await session.generate(max_tokens=1)
        os.kill(daemon.service.worker.pid or 0, signal.SIGKILL)
        with pytest.raises(UnavailableError):
            await streaming
        answer = await session.generate(token_ids=[7], max_tokens=3)
        assert answer["token_ids"] == expected([5, 6, 7], 3)
        assert answer["tokens"] == 6


async def test_a_stream_that_is_left_early_delays_the_end_of_its_block(tmp_path: Path) -> None:
    """Leaving the block suspends the session, once its cancelled request has ended."""
    async with (
        run_daemon(tmp_path, "delay=0.01") as daemon,
        AsyncTierd(daemon.url, max_retries=0) as tierd,
    ):
        base = await tierd.sessions.create(token_ids=[5] * 10)
        async with tierd.fork(base) as agent:
            async for event in agent.stream(token_ids=[6], max_tokens=5000):
                if event.kind == "tokens":
                    break
        assert agent.state == "suspended"
        assert agent.tokens < 1000
        async with tierd.fork(base) as gone:
            await gone.close()  # nothing is left to suspend


async def test_sessions_that_are_deleted_while_they_are_listed(tierd: AsyncTierd) -> None:
    """The next page follows one that is gone, and nothing comes twice."""
    names = [f"a{n}" for n in range(6)]
    for name in names:
        await tierd.sessions.create(name)
    seen = []
    async for session in tierd.sessions.list(page=2):
        seen.append(session.id)
        if session.id != "a2":
            await session.close()
    assert seen == names


async def test_what_gateways_say_is_waited_for_and_deletes_are_done_once() -> None:
    """A 503 without the envelope says when to come back; an unpin whose answer was lost is done."""
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        asked.append(f"{request.method} {request.path}")
        if request.path == "/ready" and len(asked) == 1:
            return web.Response(status=503, text="nobody there", headers={"Retry-After": "3"})
        if request.method == "DELETE" and asked.count(asked[-1]) == 1:
            assert request.transport is not None
            request.transport.abort()
        if request.method == "DELETE":
            return web.json_response({"error": {"code": "not_pinned"}}, status=409)
        return web.json_response({"id": "a", "pin": None, "ready": True, "engine_pid": 1})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with (
        TestServer(app) as server,
        AsyncTierd(str(server.make_url("")).rstrip("/")) as tierd,
    ):
        with pytest.raises(UnavailableError) as refused:
            await tierd.ready()
        assert (refused.value.status, refused.value.retry_after_s) == (503, 3)
        asked.clear()
        await tierd.wait_ready(10)
        assert asked == ["GET /ready"] * 2
        session = await tierd.sessions.get("a")
        assert (await session.unpin()).info["pin"] is None
        assert asked[3:] == ["DELETE /v1/sessions/a/pin"] * 2 + ["GET /v1/sessions/a"]


async def collect(stream: AsyncIterator[object]) -> list[object]:
    return [event async for event in stream]


async def test_openai_bound_to_a_session(tierd: AsyncTierd) -> None:
    """client.openai(session) chats inside the session."""
    session = await tierd.sessions.create("a")
    async with tierd.openai(session) as client:
        await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=2
        )
    assert (await session.refresh()).tokens > 2


def test_retry_policy() -> None:
    """Refusals are repeated, broken connections only where that is safe, never for ever."""
    policy = RetryPolicy(max_retries=2)
    assert policy.allows(0, status=503, forbidden=False, repeatable=False)
    assert policy.allows(1, status=429, forbidden=False, repeatable=False)
    assert not policy.allows(2, status=503, forbidden=False, repeatable=True)
    assert not policy.allows(0, status=503, forbidden=True, repeatable=True)
    assert not policy.allows(0, status=500, forbidden=False, repeatable=True)
    assert policy.allows(0, status=None, forbidden=False, repeatable=True)
    assert not policy.allows(0, status=None, forbidden=False, repeatable=False)
    assert policy.pause_s(0, 3.0) == 3.0
    assert 0 < policy.pause_s(10, None) <= policy.max_s


@pytest.mark.parametrize("module", ["client", "app", "cli"])
def test_nothing_in_the_daemon_imports_torch(module: str) -> None:
    """The daemon and its client start without torch."""
    code = f"import dsv4_tierd.daemon.{module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_long_work_is_waited_for_and_done_once(tmp_path: Path) -> None:
    """A prompt that takes longer than the bound on silence is computed once, not given up."""
    async with (
        run_daemon(tmp_path, "prefill_s=1") as daemon,
        AsyncTierd(daemon.url, timeout=Timeouts(silence_s=0.3)) as tierd,
    ):
        session = await tierd.sessions.create(token_ids=[5, 6])
        await session.append(token_ids=[7])
        answer = await session.generate(max_tokens=2)
        assert answer["token_ids"] == expected([5, 6, 7], 2)
        assert len(daemon.service.sessions) == 1
