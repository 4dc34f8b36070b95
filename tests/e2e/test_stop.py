"""SIGTERM: requests end, sessions are written down, the process ends in time, a restart resumes."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import psutil
import pytest

from live_daemon import Live, live_daemon, until
from redis_servers import Server


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 512) for _ in range(count)]


async def test_sigterm_drains_suspends_and_the_next_daemon_resumes_from_the_store(
    tmp_path: Path, micro: Path
) -> None:
    """What ran ends or is cancelled by the deadline; all sessions come back, out of the store."""
    async with live_daemon(tmp_path, micro, drain_s=4.0) as live:
        for n, name in enumerate("abcd"):
            await live.create(name, words(n, 2000))
        engine = await live.engine_pid()
        running = asyncio.create_task(live.generate("a", [7], 20_000))
        await asyncio.sleep(0.5)
        stopping = asyncio.create_task(live.stop())
        answer = await running
        assert answer["finish_reason"] == "cancelled"
        code, seconds = await stopping
        assert code == 0
        assert seconds < 4.0 + 10.0
        assert not psutil.pid_exists(engine)
        await live.start()
        sessions = (await live.ok("GET", "/v1/sessions"))["data"]
        lengths = {session["id"]: session["tokens"] for session in sessions}
        drawn = len(answer["token_ids"])
        assert drawn > 0
        assert lengths == {"a": 2001 + drawn, "b": 2000, "c": 2000, "d": 2000}
        assert all(session["suspended_tier"] == "store" for session in sessions)
        for name, length in lengths.items():
            usage = (await live.generate(name, [9], 4))["usage"]
            assert usage["cached_tokens_details"]["store"] >= 0.99 * length
            assert usage["computed_tokens"] <= 2


async def test_sigterm_suspends_into_redis_and_another_daemon_resumes_it(
    tmp_path: Path, micro: Path
) -> None:
    """In another folder, of the words alone: their blocks come from the server."""
    with Server() as server:
        (tmp_path / "one").mkdir()
        (tmp_path / "two").mkdir()
        async with live_daemon(tmp_path / "one", micro, store=server.url) as live:
            await live.create("a", words(1, 3000))
            code, _ = await live.stop()
            assert code == 0
        async with live_daemon(tmp_path / "two", micro, store=server.url) as live:
            usage = await live.create("b", words(1, 3000))
            assert usage["cached_tokens_details"]["store"] >= 0.9 * 3000


async def test_sigterm_while_redis_hangs_ends_in_time(tmp_path: Path, micro: Path) -> None:
    """The store says nothing: the daemon ends by its deadline, and every session is there after."""
    with Server() as server:
        async with live_daemon(tmp_path, micro, store=server.url, drain_s=3.0) as live:
            for n, name in enumerate("ab"):
                await live.create(name, words(n, 2000))
            server.pause()
            code, seconds = await live.stop()
            assert code == 0
            assert seconds < 3.0 + 20.0, "the drain, and a deadline of each thread of the store"
            server.go_on()
            await live.start()
            sessions = (await live.ok("GET", "/v1/sessions"))["data"]
            assert {session["id"]: session["tokens"] for session in sessions} == {
                "a": 2000,
                "b": 2000,
            }
            answer = await live.generate("a", [7], 4)
            assert len(answer["token_ids"]) == 4


async def test_sigterm_while_the_engine_loads_ends_the_daemon(tmp_path: Path, micro: Path) -> None:
    """A daemon that never became ready ends as well as any other."""
    async with live_daemon(tmp_path, micro, start=False) as live:
        starting = asyncio.create_task(live.start())
        await until(lambda: live.process is not None)
        assert live.process is not None
        process = psutil.Process(live.process.pid)
        await until(process.children)  # its engine was started, and has not loaded
        started_s = time.monotonic()
        process.terminate()
        with pytest.raises(AssertionError):  # it never said that it is ready
            await starting
        assert time.monotonic() - started_s < 30
        assert live.process.wait(30) == 0


async def test_sigterm_while_the_engine_restarts_loses_nothing(tmp_path: Path, micro: Path) -> None:
    """With no engine there is nothing to suspend: the daemon ends at once, the words are kept."""
    async with live_daemon(tmp_path, micro) as live:
        await live.create("a", words(1, 700))
        answer = (await live.generate("a", [5], 6))["token_ids"]
        await live.ok("POST", "/v1/sessions/a/rewind", {"to": 700})
        await live.kill_engine()
        code, seconds = await live.stop()
        assert code == 0
        assert seconds < 30
        await live.start()
        assert (await live.generate("a", [5], 6))["token_ids"] == answer


async def refused(live: Live) -> tuple[int, str, str | None]:
    status, found, response = await live.call("POST", "/v1/sessions/a/generate", {"max_tokens": 1})
    return status, found["error"]["code"], response.headers.get("Retry-After")


async def test_a_draining_daemon_refuses_new_work_and_says_so(tmp_path: Path, micro: Path) -> None:
    """While it drains: /ready and new requests are 503 draining, /health answers."""
    async with live_daemon(tmp_path, micro, drain_s=6.0) as live:
        await live.create("a", words(1, 100))
        await live.create("b", words(2, 100))
        running = asyncio.create_task(live.generate("b", [7], 20_000))
        await asyncio.sleep(0.3)
        await live.ok("POST", "/admin/drain")
        status, code, after = await refused(live)
        assert (status, code) == (503, "draining")
        assert int(after or 0) >= 1
        assert (await live.call("GET", "/ready"))[0] == 503
        assert (await live.call("GET", "/health"))[0] == 200
        assert (await running)["finish_reason"] == "cancelled"
        assert live.process is not None
        assert await asyncio.to_thread(live.process.wait, 20) == 0
