"""A daemon in this process, on a real socket, with the scripted worker as a real process."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from dsv4_tierd.daemon import app as app_module
from dsv4_tierd.daemon.config import ServeConfig
from dsv4_tierd.daemon.service import Service
from dsv4_tierd.daemon.tokenize import TextCodec
from dsv4_tierd.engine.vocabulary import find_tokenizer
from fake_worker import next_token


@functools.cache
def _read_once(file: Path, cache_bytes_max: int) -> TextCodec:
    return TextCodec(file.read_text(encoding="utf-8"), cache_bytes_max)


def _load_text(config: ServeConfig, vocab_size: int) -> TextCodec | None:
    file = find_tokenizer(config.model, vocab_size)
    return None if file is None else _read_once(file, config.token_cache_budget)


# Reading the tokenizer takes most of a second and 80 MB: once a test process is enough.
app_module.load_text = _load_text

FAKE_WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


@dataclass
class Daemon:
    """A running daemon and a plain HTTP client on it."""

    service: Service
    url: str
    http: aiohttp.ClientSession
    task: asyncio.Task[None]

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

    async def until(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110  any state of any task
                await asyncio.sleep(0.005)


@asynccontextmanager
async def run_daemon(
    state_dir: Path, model: str = "plain", *, wait: bool = True, **settings: Any
) -> AsyncIterator[Daemon]:
    """Serve until the block ends; then drain and check that it ended well."""
    settings = {"probe_s": 0.2, "drain_s": 3.0, "store": "disk:unused"} | settings
    config = ServeConfig(model=model, port=0, state_dir=state_dir, **settings)
    started: asyncio.Future[tuple[Service, int]] = asyncio.get_running_loop().create_future()

    async def listening(service: Service, port: int) -> None:
        started.set_result((service, port))

    task = asyncio.create_task(
        app_module.serve(config, command=FAKE_WORKER, on_listening=listening, signals=False)
    )
    await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    service, port = started.result()
    async with aiohttp.ClientSession() as http:
        if wait:
            async with asyncio.timeout(60):
                await service.worker.wait_ready()
        yield Daemon(service, f"http://127.0.0.1:{port}", http, task)
    service.draining = True
    service.stop_asked.set()
    async with asyncio.timeout(60):
        await task


def expected(ids: list[int], count: int) -> list[int]:
    """What the scripted worker draws after ``ids``."""
    ids = list(ids)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[-count:]


async def read_events(daemon: Daemon, path: str, body: Any) -> list[tuple[str, Any]]:
    async with daemon.http.post(daemon.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        text = (await response.read()).decode()
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line[:1] != ":")
        if "data" in fields:
            data = fields["data"]
            found.append((fields.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found
