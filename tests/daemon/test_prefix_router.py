"""The example router: to the daemon with the hottest prefix, and sessions stay where they are."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import sys
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
        self.orphans: set[str] = set()  # suspended to a store that is shared
        self.operations: set[str] = set()
        self.requests: list[str] = []
        self.ready = True
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/prefixes/lookup", self.lookup)
        app.router.add_post("/v1/sessions", self.create)
        app.router.add_get("/v1/sessions", self.all)
        app.router.add_route("*", "/v1/sessions/{id}", self.get)
        app.router.add_post("/v1/sessions/{id}/resume", self.resume)
        app.router.add_post("/v1/sessions/{id}/suspend", self.suspend)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/operations/{id}", self.operation)
        app.router.add_get("/ready", self.is_ready)
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

    async def is_ready(self, _: web.Request) -> web.Response:
        return web.json_response({"ready": self.ready}, status=200 if self.ready else 503)

    async def create(self, request: web.Request) -> web.Response:
        name = (await request.json())["id"]
        if name in self.sessions:
            return web.json_response({}, status=409)
        self.sessions.add(name)
        self.operations.add(f"op-{name}")
        made = {"id": name, "who": self.name, "operation": {"id": f"op-{name}"}}
        return web.json_response(made, status=201)

    async def all(self, request: web.Request) -> web.Response:
        names = sorted(self.sessions)
        after = request.query.get("after")
        first = names.index(after) + 1 if after else 0
        page = names[first : first + 2]  # as if the daemon's pages were small
        data = [
            {"id": n, "state": "idle", "created_at": ord(n), "used_at": ord(self.name[0])}
            for n in page
        ]
        more = names[-1:] != page[-1:]
        return web.json_response(
            {"data": data, "has_more": more, "last_id": page[-1:] and page[-1]}
        )

    async def get(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        found = name in self.sessions
        if request.method == "DELETE":
            self.sessions.discard(name)
        return web.json_response({"who": self.name}, status=200 if found else 404)

    async def resume(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        if name in self.orphans:
            self.sessions.add(name)
        return web.json_response({}, status=200 if name in self.sessions else 404)

    async def suspend(self, request: web.Request) -> web.Response:
        name = f"op-{self.name}-{request.match_info['id']}"
        self.operations.add(name)
        location = {"Location": f"/v1/operations/{name}"}
        return web.json_response({"id": name}, status=202, headers=location)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        name = (await request.json()).get("session_id") or request.headers.get("X-Session-Id")
        name = name or request.headers.get("x-claude-code-session-id")
        if name is not None:
            self.sessions.add(name)
        return await self.other(request)

    async def operation(self, request: web.Request) -> web.Response:
        found = request.match_info["id"] in self.operations
        return web.json_response({}, status=200 if found else 404)

    async def other(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.requests.append(request.path)
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


CHAT = "/v1/chat/completions"


async def chat(rig: Rig, headers: dict[str, str] | None = None, **body: Any) -> str:
    """The daemon that a chat went to."""
    status, name, _ = await rig.ask("POST", CHAT, json={"messages": [], **body}, headers=headers)
    assert status == 200
    return name


@pytest.mark.parametrize("header", ["session_id", "X-Session-Id", "x-claude-code-session-id"])
async def test_a_named_session_goes_where_it_is(rig: Rig, header: str) -> None:
    """By the body and by either header; a new one goes where its words are, and stays there."""
    one, two = rig.fakes

    async def ask(name: str) -> str:
        if header == "session_id":
            return await chat(rig, session_id=name)
        return await chat(rig, {header: name})

    one.sessions.add("ours")
    two.tiers["device"] = 4096
    assert await ask("ours") == "one"
    assert await ask("new") == "two"
    one.tiers["device"], two.tiers["device"] = 4096, 0
    assert await ask("new") == "two"
    assert await ask("other") == "one"
    assert (await rig.ask("POST", "/v1/sessions", json={"id": "new", "text": "x"}))[:2] == (
        409, "two",
    )  # fmt: skip


async def test_operations_are_asked_of_their_daemon(rig: Rig) -> None:
    """Of a 202, and of a session's making; by a fresh router too."""
    one, two = rig.fakes
    two.sessions.add("s")
    one.tiers["host"] = 256
    assert (await rig.ask("POST", "/v1/sessions/s/suspend", json={}))[:2] == (202, "two")
    assert (await rig.ask("POST", "/v1/sessions", json={"id": "t", "text": "x"}))[1] == "one"
    fresh = TestServer(prefix_router.make_app([one.url, two.url]))
    await fresh.start_server()
    for router in (rig, Rig(rig.http, fresh, one, two)):
        for name, daemon in (("op-two-s", "two"), ("op-t", "one")):
            found = await router.ask("GET", f"/v1/operations/{name}")
            assert found[:2] == (200, daemon)
        assert (await router.ask("GET", "/v1/operations/op-none"))[0] == 404
    await fresh.close()


async def test_sessions_of_all_daemons_are_listed(rig: Rig) -> None:
    """In pages, in order of creation, each once; who does not answer is named."""
    one, two = rig.fakes
    one.sessions, two.sessions = set("acefg"), set("bdeh")

    async def page(query: str = "") -> tuple[str, bool]:
        status, _, text = await rig.ask("GET", f"/v1/sessions{query}")
        assert status == 200
        found = json.loads(text)
        assert found["last_id"] == found["data"][-1]["id"]
        return "".join(session["id"] for session in found["data"]), found["has_more"]

    assert await page() == ("abcdefgh", False)
    assert await page("?limit=3") == ("abc", True)
    assert await page("?limit=3&after=e") == ("fgh", False)
    assert (await rig.ask("GET", "/v1/sessions?limit=x"))[0] == 400
    assert (await rig.ask("GET", "/v1/sessions?after=nobody"))[0] == 400
    await two.server.close()
    async with rig.http.get(rig.router.make_url("/v1/sessions")) as answer:
        assert answer.headers["X-Unreached"] == two.url
        assert [session["id"] for session in (await answer.json())["data"]] == list("acefg")


async def test_a_dead_home_is_forgotten(rig: Rig) -> None:
    """A session that was suspended to a shared store is resumed on another, and then lives there.

    So is one that its daemon no longer has.
    """
    one, two = rig.fakes
    for name in "st":
        two.sessions.add(name)
        one.orphans.add(name)
        assert (await rig.ask("GET", f"/v1/sessions/{name}"))[:2] == (200, "two")
    two.sessions.discard("s")
    one.sessions.add("s")
    assert (await rig.ask("GET", "/v1/sessions/s"))[:2] == (200, "one")
    await two.server.close()
    assert (await rig.ask("GET", "/v1/sessions/t"))[:2] == (404, "one")
    assert (await rig.ask("POST", "/v1/sessions/t/resume", json={}))[:2] == (200, "one")
    assert (await rig.ask("GET", "/v1/sessions/t"))[:2] == (200, "one")


async def test_what_is_remembered_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The homes used last; nothing of unknown and of deleted sessions."""
    monkeypatch.setattr(prefix_router, "HOMES_MAX", 3)
    homes = rig.router.app[prefix_router.ROUTER]._homes
    assert (await rig.ask("GET", "/v1/sessions/unknown"))[0] == 404
    assert not homes
    rig.fakes[1].sessions |= set("abcde")
    for name in "abcad":
        assert (await rig.ask("GET", f"/v1/sessions/{name}"))[1] == "two"
    assert [place for _, place in homes] == [f"/v1/sessions/{name}" for name in "cad"]
    assert (await rig.ask("DELETE", "/v1/sessions/a"))[0] == 200
    assert [place for _, place in homes] == [f"/v1/sessions/{name}" for name in "cd"]


async def test_slow_and_dead_daemons_are_passed_over(rig: Rig) -> None:
    """One that does not say in time is not waited for, and gets what no other can take."""
    one, two = rig.fakes
    two.tiers["device"] = 4096
    two.delay_s = 2.0
    status, went_to, _ = await rig.ask("POST", "/v1/completions", json={"prompt": [1]})
    assert (status, went_to) == (200, "one")
    one.delay_s = 2.0  # both answer requests, and no lookup in time: in turns
    turns = [await chat(rig) for _ in range(4)]
    assert turns == ["two", "one", "two", "one"]
    one.ready = False
    assert [await chat(rig) for _ in range(2)] == ["two", "two"]
    await two.server.close()
    assert await chat(rig) == "one"
    await one.server.close()
    status, _, text = await rig.ask("POST", "/v1/completions", json={"prompt": [1]})
    assert (status, text) == (503, "no daemon can be reached")
    assert (await rig.ask("POST", "/v1/completions", data=b"{not json"))[0] == 503


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"session_id": "\\ud800"}'])
async def test_a_strange_body_is_for_the_daemon_to_refuse(rig: Rig, body: bytes) -> None:
    """What is nested too deeply and a name that is no text are passed on."""
    headers = {"Content-Type": "application/json"}
    status, went_to, _ = await rig.ask("POST", "/v1/x", data=body, headers=headers)
    assert (status, went_to) == (200, "one")


async def test_a_header_that_is_no_text_is_refused(rig: Rig) -> None:
    """It would arrive empty: a tenant of a bad name would be none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.router.port)
    writer.write(b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Cache-Salt: \xff\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()
    assert not rig.fakes[0].requests


async def test_any_number_of_streams_leave_room_for_one_more(tmp_path: Path) -> None:
    """More of them than a client's pool has connections by default."""
    async with run_daemon(tmp_path) as daemon:
        router = TestServer(prefix_router.make_app([daemon.url]))
        await router.start_server()
        many = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=many) as http, asyncio.timeout(60):
            for name in "abcdefgh":
                await daemon.ok("POST", "/v1/sessions", {"id": name})
                for _ in range(13):
                    answer = await http.get(router.make_url(f"/v1/sessions/{name}/events"))
                    assert answer.status == 200
            async with http.get(router.make_url("/health")) as answer:
                assert answer.status == 200
        await router.close()


async def test_who_leaves_is_left_at_the_daemon_too(tmp_path: Path, unused_tcp_port: int) -> None:
    """A request whose client has gone is cancelled, also one that is not streamed."""
    async with run_daemon(tmp_path, "delay=0.01") as daemon:
        listen = f"--listen={unused_tcp_port}"
        router = await asyncio.create_subprocess_exec(
            sys.executable, str(FILE), listen, daemon.url, stdout=asyncio.subprocess.PIPE
        )
        assert router.stdout is not None
        await router.stdout.readline()
        await daemon.ok("POST", "/v1/sessions", {"id": "a"})
        url = f"http://127.0.0.1:{unused_tcp_port}/v1/sessions/a/generate"
        body = {"token_ids": [5], "max_tokens": 100_000}
        asking = asyncio.create_task(daemon.http.post(url, json=body))
        await daemon.until(lambda: daemon.service.running)
        asking.cancel()
        await daemon.until(lambda: not daemon.service.running)
        router.terminate()
        await router.wait()


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
            body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 2}
            homes = set()
            for _ in range(2):
                named = body | {"session_id": "chat"}
                async with http.post(router.make_url(CHAT), json=named) as answer:
                    assert answer.status == 200, await answer.text()
                    homes.add(answer.headers["X-Routed-To"])
            assert len(homes) == 1
            made = {"id": "made", "token_ids": [7] * 600}
            async with http.post(router.make_url("/v1/sessions"), json=made) as answer:
                operation = (await answer.json())["operation"]["id"]
                homes = {answer.headers["X-Routed-To"]}
            async with http.get(router.make_url(f"/v1/operations/{operation}")) as answer:
                assert (answer.status, {answer.headers["X-Routed-To"]}) == (200, homes)
            for path in ("/v1/models", "/metrics", "/v1/tiers"):  # none says a Content-Type
                async with http.get(router.make_url(path)) as answer:
                    assert answer.status == 200, await answer.text()
            untyped = {"data": b'{"token_ids": [5, 6]}', "skip_auto_headers": ["Content-Type"]}
            async with http.post(router.make_url("/v1/prefixes/lookup"), **untyped) as answer:
                assert (await answer.json())["prompt_tokens"] == 2
            async with http.get(router.make_url("/v1/nothing")) as answer:
                assert (answer.status, answer.headers["X-Routed-To"] != "") == (404, True)
            async with http.post(router.make_url("/v1/completions"), json={"prompt": 1}) as answer:
                assert answer.status == 400
            async with http.get(router.make_url("/v1/sessions?limit=9")) as answer:
                assert [each["id"] for each in (await answer.json())["data"]] == ["chat", "made"]
        await router.close()
