"""Slow readers, readers who leave, engines that die, flood, repeat themselves or stall."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from daemon_harness import FAKE_WORKER, Daemon, expected, read_events, run_daemon

GENERATE = "/v1/sessions/a/generate"


async def counter(daemon: Daemon, name: str) -> float:
    await daemon.service.worker.refresh_stats(2)
    return daemon.service.worker.counters().get(name, 0.0)


async def test_a_reader_who_stops_parks_its_session_and_nobody_else(tmp_path: Path) -> None:
    """Tokens stop at the credit, other sessions go on, and reading again gets every token."""
    async with run_daemon(tmp_path, stream_credit_tokens=16) as daemon:
        count = 12_000
        await daemon.ok("POST", "/v1/sessions", {"id": "a"})
        await daemon.ok("POST", "/v1/sessions", {"id": "b"})
        body = f'{{"token_ids":[5],"max_tokens":{count},"stream":true}}'.encode()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        port = int(daemon.url.rsplit(":", 1)[1])
        await loop.sock_connect(sock, ("127.0.0.1", port))
        head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        await loop.sock_sendall(sock, head.encode() + b"Connection: close\r\n\r\n" + body)
        session = daemon.service.sessions.get("", "a")
        await daemon.until(lambda: session.run is not None and len(session.run.generated) > 100)
        drawn = -1
        while session.run is not None and drawn != len(session.run.generated):
            drawn = len(session.run.generated)
            await asyncio.sleep(0.3)
        assert session.run is not None
        assert 16 < drawn < count / 2
        assert await counter(daemon, "parked") > 0
        other = await daemon.ok(
            "POST", "/v1/sessions/b/generate", {"token_ids": [5], "max_tokens": 50}
        )
        assert len(other["token_ids"]) == 50
        assert len(session.run.generated) == drawn  # still parked
        received = bytearray()
        while piece := await loop.sock_recv(sock, 1 << 16):
            received += piece
        sock.close()
        assert received.count(b"event: tokens") == count
        assert b"event: done" in received
        assert (await daemon.ok("GET", "/v1/sessions/a"))["tokens"] == count + 1


def _descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


async def test_a_reader_who_never_reads_is_given_up_with_its_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its session is free, its socket is not kept until it reads, and no trace is logged."""
    async with run_daemon(tmp_path, client_stall_s=0.3) as daemon:
        await daemon.ok("POST", "/v1/sessions", {"id": "a"})
        body = b'{"token_ids":[5],"max_tokens":50000,"stream":true}'
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            descriptors = _descriptors()
            await loop.sock_connect(sock, ("127.0.0.1", int(daemon.url.rsplit(":", 1)[1])))
            head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            await loop.sock_sendall(sock, head.encode() + body)
            session = daemon.service.sessions.get("", "a")
            await daemon.until(lambda: session.is_busy)
            await daemon.until(lambda: not session.is_busy)
            await daemon.until(lambda: _descriptors() == descriptors)
    assert "the client does not read" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_cancels_within_a_step_and_keeps_the_words(
    tmp_path: Path, stream: bool
) -> None:
    """A disconnect cancels the request; what was drawn stays, and the session goes on."""
    async with run_daemon(tmp_path, "delay=0.01") as daemon:
        await daemon.ok("POST", "/v1/sessions", {"id": "a"})
        body = {"token_ids": [5], "max_tokens": 10_000, "stream": stream}
        task = asyncio.create_task(daemon.call("POST", GENERATE, body))
        session = daemon.service.sessions.get("", "a")
        await daemon.until(lambda: session.run is not None and len(session.run.generated) > 5)
        drawn = len(session.run.generated)  # type: ignore[union-attr]
        task.cancel()
        await daemon.until(lambda: not session.is_busy)
        tokens = session.length
        assert drawn < tokens < drawn + 1_000, "seconds on a busy machine, not to the end"
        assert await counter(daemon, "cancelled") == 1
        answer = await daemon.ok("POST", GENERATE, {"max_tokens": 2})
        assert answer["token_ids"] == expected([5, *expected([5], tokens - 1)], 2)


async def test_leaving_a_stateless_chat_leaves_nothing(tmp_path: Path) -> None:
    """An abandoned stateless request is cancelled and its session is gone from the engine."""
    async with run_daemon(tmp_path, "delay=0.01") as daemon:
        body = {"prompt": [5], "max_tokens": 10_000, "stream": True, "n": 3}
        response = await daemon.http.post(daemon.url + "/v1/completions", json=body)
        await response.content.readany()
        assert len(daemon.service.running) == 3
        response.close()
        await daemon.until(lambda: not daemon.service.running)
        await daemon.service.worker.refresh_stats(2)
        assert daemon.service.worker.gauges()["sessions_open"] == 0


async def test_signs_of_life_during_a_long_prefill(tmp_path: Path) -> None:
    """Progress events come while the prompt is computed, and comments keep the line alive."""
    async with run_daemon(tmp_path, "prefill_s=1.2", keepalive_s=0.1) as daemon:
        await daemon.ok("POST", "/v1/sessions", {"id": "a"})
        body = {"token_ids": [5], "max_tokens": 1, "stream": True}
        async with daemon.http.post(daemon.url + GENERATE, json=body) as response:
            text = (await response.read()).decode()
        assert text.count("event: progress") == 4
        assert text.count(": keep-alive") >= 4
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}
        async with daemon.http.post(daemon.url + "/v1/chat/completions", json=chat) as response:
            text = (await response.read()).decode()
        assert ": progress 3/4" in text
        assert ": keep-alive" in text
        operation = await daemon.ok("POST", "/v1/sessions/a/append", {"token_ids": [6]})
        await asyncio.sleep(0.5)
        found = await daemon.ok("GET", f"/v1/operations/{operation['id']}")
        assert found["progress"]["total"] == 4


async def test_the_engine_is_killed_while_four_sessions_stream(tmp_path: Path) -> None:
    """Streams end with engine_restarting, new work is 503 until it is back, no word is lost."""
    async with run_daemon(tmp_path, "delay=0.01,load_s=0.4") as daemon:
        names = ["a", "b", "c", "d"]
        for n, name in enumerate(names):
            body = {"id": name, "token_ids": [5, n + 10]}
            await daemon.ok("POST", "/v1/sessions?wait=true", body)
        body = {"token_ids": [9], "max_tokens": 10_000, "stream": True}
        streams = [
            asyncio.create_task(read_events(daemon, f"/v1/sessions/{name}/generate", body))
            for name in names
        ]
        await daemon.until(
            lambda: (
                len(daemon.service.running) == 4
                and all(len(run.generated) > 5 for run in daemon.service.running)
            )
        )
        pid = daemon.service.worker.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for events in await asyncio.gather(*streams):
            name, data = events[-1]
            assert (name, data["error"]["code"]) == ("error", "engine_restarting")
        status, found, response = await daemon.call("POST", GENERATE, {"max_tokens": 1})
        assert (status, found["error"]["code"]) == (503, "engine_restarting")
        assert int(response.headers["Retry-After"]) >= 1
        assert (await daemon.call("GET", "/ready"))[0] == 503
        assert (await daemon.call("GET", "/health"))[0] == 200
        made = await daemon.ok("POST", "/v1/sessions/a/fork", {"id": "e"})  # needs no engine
        assert made["tokens"] == 2
        await daemon.until(lambda: daemon.service.worker.state == "ready")
        assert (await daemon.call("GET", "/ready"))[0] == 200
        for n, name in enumerate(names):
            answer = await daemon.ok(
                "POST", f"/v1/sessions/{name}/generate", {"token_ids": [9], "max_tokens": 3}
            )
            assert answer["token_ids"] == expected([5, n + 10, 9], 3)
        text = await (await daemon.http.get(daemon.url + "/metrics")).text()
        assert "tierd_engine_restarts_total 1.0" in text


async def test_pins_are_kept_over_a_restart_of_the_engine(tmp_path: Path) -> None:
    """A new engine knows pinned sessions before anyone asks for them."""
    async with run_daemon(tmp_path) as daemon:
        await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5]})
        await daemon.ok("PUT", "/v1/sessions/a/pin", {})
        os.kill(daemon.service.worker.pid or 0, signal.SIGKILL)
        await daemon.until(lambda: daemon.service.worker.restarts == 1)
        await daemon.until(lambda: daemon.service.worker.state == "ready")
        await daemon.service.worker.refresh_stats(2)
        assert daemon.service.worker.gauges()["sessions_open"] == 1


async def test_late_and_doubled_messages_are_harmless(tmp_path: Path) -> None:
    """Tokens and ends that come after an end change nothing."""
    async with run_daemon(tmp_path, "double") as daemon:
        await daemon.ok("POST", "/v1/sessions", {"id": "a"})
        ids = [5]
        for _ in range(3):
            answer = await daemon.ok("POST", GENERATE, {"token_ids": [6], "max_tokens": 2})
            ids.append(6)
            assert answer["token_ids"] == expected(ids[1:], 2)
            ids += answer["token_ids"]
        assert (await daemon.ok("GET", "/v1/sessions/a"))["tokens"] == 9


async def test_an_engine_that_floods_is_cut_off(tmp_path: Path) -> None:
    """Tokens beyond the credit end the request with an error; memory does not fill."""
    async with run_daemon(tmp_path, "flood", stream_credit_tokens=4) as daemon:
        await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5]})
        reader = await daemon.http.post(
            daemon.url + GENERATE, json={"max_tokens": 5_000, "stream": True}
        )
        text = await reader.text()
        assert "internal_error" in text
        session = daemon.service.sessions.get("", "a")
        await daemon.until(lambda: not session.is_busy)
        assert session.length == 1  # a request that failed leaves its session as it was


async def test_a_stalled_loop_is_not_ready(tmp_path: Path) -> None:
    """No answer to the periodic question: /ready says stalled, /health still answers."""
    async with run_daemon(tmp_path, "stall", stall_s=0.3, probe_s=0.05) as daemon:
        await daemon.ok("POST", "/v1/sessions", {"id": "a"})
        await daemon.ok("POST", GENERATE, {"token_ids": [5], "max_tokens": 1})
        await daemon.until(lambda: daemon.service.worker.state == "stalled")
        status, found, _ = await daemon.call("GET", "/ready")
        assert (status, found["state"]) == (503, "stalled")
        assert (await daemon.call("GET", "/health"))[0] == 200


async def test_loading_is_not_ready_and_refuses_work(tmp_path: Path) -> None:
    """While the engine loads, /ready tells how far it is and work is 503."""
    async with run_daemon(tmp_path, "load_s=1.5", wait=False) as daemon:
        await daemon.until(lambda: daemon.service.worker.load is not None)
        status, found, _ = await daemon.call("GET", "/ready")
        assert (status, found["state"], found["load"]["total"]) == (503, "loading", 4)
        await daemon.ok("POST", "/v1/sessions", {"id": "a"})
        status, found, response = await daemon.call("POST", GENERATE, {"token_ids": [5]})
        assert (status, found["error"]["code"]) == (503, "engine_restarting")
        assert "Retry-After" in response.headers
        await daemon.service.worker.wait_ready()


async def test_an_engine_that_cannot_start_ends_the_daemon(tmp_path: Path) -> None:
    """A worker that dies before it was ever ready is an error, not a loop of restarts."""
    with pytest.RaisesGroup(pytest.RaisesExc(Exception, match="exit code 3")):
        async with run_daemon(tmp_path, "dead", wait=False) as daemon:
            await asyncio.wait_for(asyncio.shield(daemon.task), 10)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_answer_that_a_drain_cuts_off_is_no_answer(tmp_path: Path, path: str) -> None:
    """OpenAI's clients know no such end: 503, or in a stream an error, never `stop`."""
    words = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": [5]}
    body = words | {"max_tokens": 10_000}
    async with run_daemon(tmp_path, "delay=0.01", drain_s=0.5) as daemon:
        whole = asyncio.create_task(daemon.call("POST", path, body))
        streamed = asyncio.create_task(
            daemon.http.post(daemon.url + path, json=body | {"stream": True})
        )
        await daemon.until(lambda: sum(bool(r.generated) for r in daemon.service.running) == 2)
        await daemon.ok("POST", "/admin/drain")
        status, found, _ = await whole
        assert (status, found["error"]["code"]) == (503, "draining")
        text = await (await streamed).text()
        assert '"code":"draining"' in text
        assert '"finish_reason":"stop"' not in text
        assert "[DONE]" not in text


async def test_draining_ends_requests_suspends_and_stops(tmp_path: Path) -> None:
    """Drain: new work is refused, what runs is cancelled in time, sessions are written down."""
    async with run_daemon(tmp_path, "delay=0.01", drain_s=1.0) as daemon:
        await daemon.ok("POST", "/v1/sessions", {"id": "a"})
        running = asyncio.create_task(
            daemon.ok("POST", GENERATE, {"token_ids": [5], "max_tokens": 10_000})
        )
        session = daemon.service.sessions.get("", "a")
        await daemon.until(lambda: session.run is not None and len(session.run.generated) > 3)
        started_s = time.monotonic()
        await daemon.ok("POST", "/admin/drain")
        status, found, _ = await daemon.call("POST", "/v1/completions", {"prompt": [5]})
        assert (status, found["error"]["code"]) == (503, "draining")
        answer = await running
        assert answer["finish_reason"] == "cancelled"
        await daemon.task
        assert time.monotonic() - started_s < 3
        assert session.record.suspended_tier == "store"
        assert session.length == 1 + len(answer["token_ids"])


SERVE = """
import asyncio, sys
from pathlib import Path
from dsv4_tierd.daemon.app import serve
from dsv4_tierd.daemon.config import ServeConfig
config = ServeConfig(model="plain", port=int(sys.argv[1]), state_dir=Path(sys.argv[2]))
asyncio.run(serve(config, command=sys.argv[3:]))
"""


async def test_kill_minus_nine_of_the_daemon(tmp_path: Path) -> None:
    """What was acknowledged before kill -9 is there after it; its worker has gone with it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    async def start() -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SERVE, str(port), str(tmp_path), *FAKE_WORKER
        )
        async with asyncio.timeout(60), aiohttp.ClientSession() as http:
            while True:
                try:
                    async with http.get(url + "/ready") as response:
                        if response.status == 200:
                            return process
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)

    async def post(http: aiohttp.ClientSession, path: str, body: Any) -> Any:
        async with http.post(url + path, json=body) as response:
            assert response.status < 300, await response.text()
            return await response.json()

    process = await start()
    async with aiohttp.ClientSession() as http:
        await post(http, "/v1/sessions?wait=true", {"id": "a", "token_ids": [5, 6]})
        drawn = (await post(http, GENERATE, {"max_tokens": 7}))["token_ids"]
        await post(http, "/v1/sessions/a/fork", {"id": "b", "at": 3})
        async with http.get(url + "/ready") as response:
            worker_pid = (await response.json())["engine_pid"]
    process.kill()
    await process.wait()
    async with asyncio.timeout(60):
        while _state(worker_pid) != "Z":  # noqa: ASYNC110  another process, no event
            await asyncio.sleep(0.02)
    process = await start()
    async with aiohttp.ClientSession() as http:
        a = await post(http, GENERATE, {"max_tokens": 2})
        assert a["token_ids"] == expected([5, 6, *drawn], 2)
        b = await post(http, "/v1/sessions/b/generate", {"max_tokens": 2})
        assert b["token_ids"] == expected([5, 6, *drawn][:3], 2)
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 20) == 0


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


async def test_leaving_while_the_request_is_being_sent_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client who goes while the engine's socket is full: the request ends, the words stay."""
    async with run_daemon(tmp_path, stream_credit_tokens=16) as daemon:
        await daemon.ok("POST", "/v1/sessions", {"id": "a"})
        await daemon.ok("POST", GENERATE, {"token_ids": [5], "max_tokens": 1})
        session = daemon.service.sessions.get("", "a")
        room = asyncio.Event()
        monkeypatch.setattr(daemon.service.bridge(), "_drain", room.wait)
        body = {"token_ids": [6], "max_tokens": 10_000, "stream": True}
        task = asyncio.create_task(daemon.call("POST", GENERATE, body))
        await daemon.until(lambda: session.run is not None)
        task.cancel()
        await daemon.until(lambda: not session.is_busy)
        room.set()
        await daemon.until(lambda: daemon.service.bridge().requests == 0)
        assert await counter(daemon, "cancelled") == 1
        answer = await daemon.ok("POST", GENERATE, {"max_tokens": 2})
        assert answer["token_ids"] == expected([5, *expected([5], 1)], 2)


async def test_leaving_before_the_choices_begin_leaves_nothing(tmp_path: Path) -> None:
    """The prompt of several choices is cancelled, and its session is gone from the engine."""
    async with run_daemon(tmp_path, "prefill_s=1") as daemon:
        body = {"prompt": [5], "max_tokens": 10, "n": 3}
        task = asyncio.create_task(daemon.call("POST", "/v1/completions", body))
        await daemon.until(lambda: daemon.service.running)
        task.cancel()
        await daemon.until(lambda: not daemon.service.running)
        await daemon.service.worker.refresh_stats(2)
        assert daemon.service.worker.gauges()["sessions_open"] == 0
