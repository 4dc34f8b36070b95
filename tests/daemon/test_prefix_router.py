"""The example router: to the daemon with the hottest prefix, and sessions stay where they are."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from daemon_harness import run_daemon

FILE = Path(__file__).parents[2] / "examples" / "prefix_router.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prefix_router", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


prefix_router = load()


class FakeDaemon:
    """Says what it is told to hold, and answers everything else with its own name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tiers = {"device": 0, "host": 0, "store": 0}
        self.delay_s = 0.0
        self.lookups: list[Any] = []
        self.sessions: set[str] = set()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/prefixes/lookup", self.lookup)
        app.router.add_post("/v1/sessions", self.create)
        app.router.add_get("/v1/sessions/{id}", self.get)
        app.router.add_route("*", "/{path:.*}", self.other)
        self.server = TestServer(app)

    async def start(self) -> None:
        await self.server.start_server()
        self.url = str(self.server.make_url("")).rstrip("/")

    async def lookup(self, request: web.Request) -> web.Response:
        data = await request.read()
        octets = request.content_type == "application/octet-stream"
        self.lookups.append(data if octets else json.loads(data))
        await asyncio.sleep(self.delay_s)
        return web.json_response({"matched_tokens": sum(self.tiers.values()), "tiers": self.tiers})

    async def create(self, request: web.Request) -> web.Response:
        name = (await request.json())["id"]
        self.sessions.add(name)
        return web.json_response({"id": name, "who": self.name}, status=201)

    async def get(self, request: web.Request) -> web.Response:
        found = request.match_info["id"] in self.sessions
        return web.json_response({"who": self.name}, status=200 if found else 404)

    async def other(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for part in (self.name, request.method, request.path_qs):
            await response.write(f"data: {part}\n\n".encode())
        return response


class Rig:
    """Two daemons and a router in front of them."""

    def __init__(self, http: aiohttp.ClientSession, router: TestServer, *fakes: FakeDaemon) -> None:
        self.http, self.router, self.fakes = http, router, fakes

    async def ask(self, method: str, path: str, **sent: Any) -> tuple[int, str, str]:
        """Status, the daemon that it went to, and the text."""
        async with self.http.request(method, self.router.make_url(path), **sent) as answer:
            routed = answer.headers.get("X-Routed-To", "")
            name = next((fake.name for fake in self.fakes if fake.url == routed), "")
            return answer.status, name, await answer.text()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    fakes = [FakeDaemon("one"), FakeDaemon("two")]
    for fake in fakes:
        await fake.start()
    router = TestServer(prefix_router.make_app([fake.url for fake in fakes]))
    await router.start_server()
    async with aiohttp.ClientSession() as http:
        yield Rig(http, router, *fakes)
    await router.close()
    for fake in fakes:
        await fake.server.close()


async def test_a_request_goes_where_its_prefix_is_hottest(rig: Rig) -> None:
    """By tokens held, and for the same number by how near they lie; the ids travel as octets."""
    one, two = rig.fakes
    body = {"prompt": [1, 2, 3, 1 << 20], "max_tokens": 1}
    for ours, theirs, expected in [
        ({"host": 512}, {"host": 768}, "two"),
        ({"host": 512}, {"store": 768}, "one"),
        ({"device": 512}, {"host": 512}, "one"),
        ({"store": 2560}, {"device": 512}, "one"),
    ]:
        one.tiers = {"device": 0, "host": 0, "store": 0} | ours
        two.tiers = {"device": 0, "host": 0, "store": 0} | theirs
        status, went_to, text = await rig.ask("POST", "/v1/completions?x=1", json=body)
        assert (status, went_to) == (200, expected)
        assert text == f"data: {expected}\n\ndata: POST\n\ndata: /v1/completions?x=1\n\n"
    assert one.lookups[0] == np.array(body["prompt"], "<i4").tobytes()
    await rig.ask("POST", "/v1/chat/completions", json={"messages": [{"role": "user"}], "n": 1})
    assert two.lookups[-1] == {"messages": [{"role": "user"}]}


async def test_octets_are_passed_through(rig: Rig) -> None:
    """A body of int32 is looked up and forwarded as it is."""
    rig.fakes[1].tiers["host"] = 256
    data = np.arange(300_000, dtype="<i4").tobytes()
    octets = {"Content-Type": "application/octet-stream"}
    status, went_to, _ = await rig.ask(
        "POST", "/v1/anything", data=io.BytesIO(data), headers=octets
    )
    assert (status, went_to) == (200, "two")
    assert rig.fakes[0].lookups == rig.fakes[1].lookups == [data]


async def test_equals_share_by_beginning(rig: Rig) -> None:
    """Cold prompts are spread, and each beginning always goes to the same daemon."""
    seen: dict[int, set[str]] = {}
    for beginning in range(24):
        for end in range(2):
            prompt = [beginning] * 1024 + [end]
            _, went_to, _ = await rig.ask("POST", "/v1/completions", json={"prompt": prompt})
            seen.setdefault(beginning, set()).add(went_to)
    assert all(len(names) == 1 for names in seen.values())
    assert set.union(*seen.values()) == {"one", "two"}


async def test_sessions_stay_where_they_were_made(rig: Rig) -> None:
    """Whatever is hotter later, and found again by a router that has just started."""
    one, two = rig.fakes
    two.tiers["host"] = 256
    made = await rig.ask("POST", "/v1/sessions", json={"id": "s", "token_ids": [1]})
    assert (made[0], made[1]) == (201, "two")
    one.tiers["device"] = 100_000
    assert (await rig.ask("POST", "/v1/sessions/s/generate", json={"token_ids": [2]}))[1] == "two"
    fresh = TestServer(prefix_router.make_app([one.url, two.url]))
    await fresh.start_server()
    again = Rig(rig.http, fresh, *rig.fakes)
    assert (await again.ask("POST", "/v1/sessions/s/generate", json={"token_ids": [2]}))[1] == "two"
    assert (await again.ask("GET", "/v1/sessions/none"))[0] == 404
    await fresh.close()


async def test_slow_and_dead_daemons_are_passed_over(rig: Rig) -> None:
    """One that does not say in time is not waited for; without any it is a 503."""
    one, two = rig.fakes
    two.tiers["device"] = 4096
    two.delay_s = 2.0
    status, went_to, _ = await rig.ask("POST", "/v1/completions", json={"prompt": [1]})
    assert (status, went_to) == (200, "one")
    await one.server.close()
    status, _, text = await rig.ask("POST", "/v1/completions", json={"prompt": [1]})
    assert (status, text) == (503, "no daemon answers")
    assert (await rig.ask("POST", "/v1/completions", data=b"{not json"))[0] == 503


async def test_with_real_daemons(tmp_path: Path) -> None:
    """The daemon's own lookup is understood: a completion comes back through the router."""
    async with run_daemon(tmp_path / "a") as a, run_daemon(tmp_path / "b") as b:
        router = TestServer(prefix_router.make_app([a.url, b.url]))
        await router.start_server()
        async with aiohttp.ClientSession() as http:
            body = {"model": "fake", "prompt": [5] * 600, "max_tokens": 3}
            async with http.post(router.make_url("/v1/completions"), json=body) as answer:
                assert answer.status == 200, await answer.text()
                assert answer.headers["X-Routed-To"] in (a.url, b.url)
                assert (await answer.json())["usage"]["completion_tokens"] == 3
        await router.close()
