"""A daemon as users run it: its own process, the real engine worker, real sockets and files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from dsv4_tierd.daemon.client import AsyncTierd

READY_S = 120.0
STOP_S = 60.0
CLI = (sys.executable, "-c", "from dsv4_tierd.daemon.cli import main; main()")
# One thread each: tests run side by side, and a spinning pool starves its neighbours.
ENVIRON = os.environ | {"OMP_NUM_THREADS": "1"}
SMALL = {
    "device_budget": "32MiB",
    "host_budget": "64MiB",
    "store_budget": "1GiB",
    "chunk_tokens": 256,
    "max_batch": 4,
}


@dataclass
class Live:
    """One daemon process after another on one state folder; ``http`` is a plain client."""

    folder: Path
    model: Path
    settings: dict[str, Any]
    http: aiohttp.ClientSession
    url: str = ""
    process: subprocess.Popen[bytes] | None = None
    pids: list[int] = field(default_factory=list)  # every process that was ever started

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def log(self) -> str:
        return (self.folder / "daemon.log").read_text(errors="replace")

    async def start(self) -> None:
        """Start a process and wait for its address."""
        self.process = self._spawn()
        self.pids.append(self.process.pid)
        assert self.process.stdout is not None
        read = asyncio.to_thread(self.process.stdout.readline)
        line = await asyncio.wait_for(read, READY_S)
        assert line, self.log
        self.url = json.loads(line)["url"]
        await self.engine_pid()

    def _spawn(self) -> subprocess.Popen[bytes]:
        assert self.process is None
        config = self.folder / "config.toml"
        given = {"store": f"disk:{self.store}"} | self.settings
        config.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in given.items()))
        command = [*CLI, "serve", "--json", "--model", str(self.model), "--port", "0",
                   "--state-dir", str(self.folder / "state"), "--config", str(config)]  # fmt: skip
        with (self.folder / "daemon.log").open("ab") as log:
            return subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env=ENVIRON, stdin=subprocess.DEVNULL
            )

    async def engine_pid(self) -> int:
        pid = int((await self.ok("GET", "/ready"))["engine_pid"])
        if pid not in self.pids:
            self.pids.append(pid)
        return pid

    async def kill_engine(self) -> int:
        """SIGKILL; the dead one's pid."""
        pid = await self.engine_pid()
        os.kill(pid, signal.SIGKILL)
        return pid

    async def engine_back(self, dead_pid: int) -> None:
        async with self.tierd() as tierd:
            await tierd.wait_ready(READY_S, not_pid=dead_pid)
        await self.engine_pid()

    async def kill(self, engine_pid: int | None = None) -> None:
        """SIGKILL to the daemon; its engine must follow by itself."""
        assert self.process is not None
        if engine_pid is None:
            engine_pid = await self.engine_pid()
        self.process.kill()
        self._reap()
        await until(lambda: not is_alive(engine_pid), 20)

    async def stop(self) -> tuple[int, float]:
        """SIGTERM; the exit code and the seconds that it took."""
        assert self.process is not None
        started_s = time.monotonic()
        self.process.terminate()
        code = await asyncio.to_thread(self.process.wait, STOP_S)
        self._reap()
        return code, time.monotonic() - started_s

    def _reap(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        self.process.wait(STOP_S)
        self.process.stdout.close()
        self.process = None

    def end(self) -> None:
        """Whatever happened: no process stays."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
            self._reap()

    def tierd(self, **options: Any) -> AsyncTierd:
        return AsyncTierd(self.url, **options)

    async def call(
        self, method: str, path: str, body: Any = None, **more: Any
    ) -> tuple[int, Any, aiohttp.ClientResponse]:
        if body is not None:
            more["json"] = body
        async with self.http.request(method, self.url + path, **more) as response:
            return response.status, await response.json(), response

    async def ok(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        status, found, _ = await self.call(method, path, body, **more)
        assert 200 <= status < 300, found
        return found

    async def create(self, name: str, ids: Sequence[int], **more: Any) -> Any:
        """A session whose tokens are computed when this returns; its usage."""
        body = {"id": name, "token_ids": list(ids), **more}
        made = await self.ok("POST", "/v1/sessions?wait=true", body)
        return made["operation"]["result"]["usage"]

    async def generate(
        self, name: str, ids: Sequence[int] = (), max_tokens: int = 8, **more: Any
    ) -> Any:
        body = {"max_tokens": max_tokens, "ignore_eos": True, **more}
        if ids:
            body["token_ids"] = list(ids)
        return await self.ok("POST", f"/v1/sessions/{name}/generate", body)

    async def events(
        self, name: str, ids: Sequence[int] = (), max_tokens: int = 8, **more: Any
    ) -> AsyncIterator[tuple[str, Any]]:
        """Events of a streamed generate; a comment is ("", its text)."""
        body = {"max_tokens": max_tokens, "ignore_eos": True, "stream": True, **more}
        if ids:
            body["token_ids"] = list(ids)
        async with self.http.post(f"{self.url}/v1/sessions/{name}/generate", json=body) as response:
            assert response.status == 200, await response.text()
            block: dict[str, str] = {}
            async for raw in response.content:
                line = raw.decode().rstrip("\n")
                if line.startswith(":"):
                    yield "", line[2:]
                elif line:
                    key, _, value = line.partition(": ")
                    block[key] = value
                elif block:
                    yield block.get("event", ""), json.loads(block["data"])
                    block = {}

    async def gauges(self) -> dict[str, float]:
        found: dict[str, float] = (await self.ok("GET", "/v1/tiers"))["gauges"]
        return found

    async def counters(self) -> dict[str, float]:
        found: dict[str, float] = (await self.ok("GET", "/v1/tiers"))["counters"]
        return found

    async def metrics(self) -> dict[str, float]:
        """/metrics: name with labels → value."""
        async with self.http.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
        return {name: float(value) for name, value in pairs}

    async def at_rest(self, timeout_s: float = 60.0) -> dict[str, float]:
        """Wait until nothing runs, loads or is being written; the gauges then."""
        async with asyncio.timeout(timeout_s):
            while True:
                gauges = await self.gauges()
                moving = ("requests_queued", "requests_running", "store_writes_pending",
                          "host_pages_running", "device_pages_running")  # fmt: skip
                if not any(gauges[name] for name in moving):
                    return gauges
                await asyncio.sleep(0.02)


@asynccontextmanager
async def live_daemon(
    folder: Path, model: Path, *, start: bool = True, read_s: float = 240.0, **settings: Any
) -> AsyncIterator[Live]:
    """A started daemon with small budgets; ended by its pid whatever happens.

    ``read_s``: how long its answers are waited for.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_read=read_s)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        live = Live(folder, model, SMALL | settings, http)
        try:
            if start:
                await live.start()
            yield live
        finally:
            live.end()


def is_alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  any state of any process
            await asyncio.sleep(0.01)


class Reader:
    """A raw HTTP client that reads only when told to."""

    def __init__(self, url: str, path: str, body: bytes) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._sock = socket.socket()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._sock.connect((host, int(port)))
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        self._sock.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)

    def pieces(self) -> Iterator[bytes]:
        while piece := self._sock.recv(1 << 16):
            yield piece

    def close(self) -> None:
        self._sock.close()
