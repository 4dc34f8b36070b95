"""Two daemons on one Redis: a session is suspended here, resumed there, and owned by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import redis_servers
from daemon_harness import Daemon, expected, run_daemon
from dsv4_tierd.daemon import session_record, verbs
from dsv4_tierd.daemon.sessions import SessionState
from dsv4_tierd.daemon.shared import holder_name
from proxy import Fault, Proxy

WORDS = list(range(5, 25))
RESUME = "/resume?wait=true"
SUSPEND = "/suspend?wait=true"


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


class Pair:
    """Daemons ``a`` and ``b`` on one server; ``a`` reaches it through a proxy."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self.server = redis_servers.emptied()
        self.proxy = Proxy(self.server.port)
        stack.callback(self.proxy.close)
        self.stack, self.folder = stack, folder

    async def start(self, name: str, model: str = "plain", **settings: Any) -> Daemon:
        url = self.proxy.url if name == "a" else self.server.url
        settings = {"store": f"{url}?deadline_s=1", "name": name, "drain_s": 0.5} | settings
        return await self.stack.enter_async_context(
            run_daemon(self.folder / name, model, **settings)
        )


@pytest.fixture
def pair(stack: AsyncExitStack, tmp_path: Path) -> Pair:
    return Pair(stack, tmp_path)


async def generate(daemon: Daemon, ids: list[int], count: int = 3, name: str = "s") -> Any:
    body = {"token_ids": ids, "max_tokens": count}
    return await daemon.ok("POST", f"/v1/sessions/{name}/generate", body)


async def refused(daemon: Daemon, verb: str, body: Any = None, method: str = "POST") -> Any:
    """Status, code and message of what is refused on session ``s``."""
    status, found, response = await daemon.call(method, f"/v1/sessions/s{verb}", body or {})
    assert status >= 400, found
    if status in (409, 412):
        assert response.headers["x-should-retry"] == "false"
    return status, found["error"]["code"], found["error"]["message"]


async def test_suspended_here_resumed_there_and_back(pair: Pair) -> None:
    """Words, metadata and answers go along; whoever has older words is told to resume first."""
    a, b = await pair.start("a"), await pair.start("b")
    made = {"id": "s", "metadata": {"who": "x"}, "ttl": 600, "cache_salt": "t"}
    salt = {"headers": {"X-Cache-Salt": "t"}}
    await a.ok("POST", "/v1/sessions", made)
    body = {"token_ids": WORDS, "max_tokens": 3}
    first = await a.ok("POST", "/v1/sessions/s/generate", body, **salt)
    words = WORDS + first["token_ids"]
    assert (await b.call("POST", "/v1/sessions/s" + RESUME, {}))[0] == 404, "another tenant's"
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {}, **salt)
    found = await b.ok("POST", "/v1/sessions/s" + RESUME, {}, **salt)
    assert (found["tokens"], found["metadata"], found["ttl"]) == (23, {"who": "x"}, 600)
    assert found["state"] == "idle"
    body = {"token_ids": [7], "max_tokens": 4}
    second = await b.ok("POST", "/v1/sessions/s/generate", body, **salt)
    assert second["token_ids"] == expected([*words, 7], 4)
    words += [7, *second["token_ids"]]
    status, gone, _ = await a.call("POST", "/v1/sessions/s/generate", body, **salt)
    assert (status, gone["error"]["code"]) == (409, "session_busy")
    assert b.service.shared.holder in gone["error"]["message"]
    await b.ok("POST", "/v1/sessions/s" + SUSPEND, {}, **salt)
    status, gone, _ = await a.call("POST", "/v1/sessions/s/generate", body, **salt)
    assert (status, gone["error"]["code"]) == (412, "precondition_failed")
    assert "28 tokens" in gone["error"]["message"]
    await a.ok("POST", "/v1/sessions/s" + RESUME, {}, **salt)
    third = await a.ok("POST", "/v1/sessions/s/generate", body, **salt)
    assert third["token_ids"] == expected([*words, 7], 4)


async def test_what_one_holds_no_other_touches(pair: Pair) -> None:
    """While A holds it, B can neither resume, create nor delete it, and is told whose it is."""
    a, b = await pair.start("a"), await pair.start("b")
    await a.ok("POST", "/v1/sessions", {"id": "s"})
    await generate(a, WORDS)
    for verb in (RESUME, RESUME):
        status, code, message = await refused(b, verb)
        assert (status, code) == (409, "session_busy")
        assert a.service.shared.holder in message
    status, found, _ = await b.call("POST", "/v1/sessions", {"id": "s"})
    assert (status, found["error"]["code"]) == (409, "session_exists")
    assert a.service.shared.holder in found["error"]["message"]
    assert (await b.ok("GET", "/v1/sessions"))["data"] == []
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    status, found, _ = await b.call("POST", "/v1/sessions", {"id": "s"})
    assert (status, found["error"]["code"]) == (409, "session_exists")
    await b.ok("POST", "/v1/sessions/s" + RESUME, {})
    for method, verb in (("DELETE", ""), ("POST", "/rewind"), ("POST", SUSPEND), ("POST", RESUME)):
        body = {"to": 1} if verb == "/rewind" else {}
        status, code, message = await refused(a, verb, body, method)
        assert (status, code) == (409, "session_busy"), verb
        assert b.service.shared.holder in message
    assert (await a.ok("GET", "/v1/sessions/s"))["state"] == "suspended"


async def test_one_of_many_who_resume_at_once_gets_it(pair: Pair) -> None:
    """Ten requests on two daemons: it runs at one of them, whole, and nowhere else."""
    a, b, c = [await pair.start(name) for name in "abc"]
    await a.ok("POST", "/v1/sessions", {"id": "s"})
    words = WORDS + (await generate(a, WORDS))["token_ids"]
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    calls = [one.call("POST", "/v1/sessions/s" + RESUME, {}) for one in (b, c) * 5]
    statuses = [status for status, _, _ in await asyncio.gather(*calls)]
    assert statuses.count(200) >= 1
    assert set(statuses) <= {200, 409}
    owners = [one for one in (a, b, c) if one.service.sessions.find("", "s") and _owned(one, "s")]
    assert len(owners) == 1
    assert (await generate(owners[0], [7]))["token_ids"] == expected([*words, 7], 3)
    [other] = [one for one in (b, c) if one is not owners[0]]
    assert (await other.ok("GET", "/v1/sessions"))["data"] == []


async def test_a_deleted_session_is_deleted_for_all(pair: Pair) -> None:
    """Nothing of it is left to be resumed, and its name is free."""
    a, b = await pair.start("a"), await pair.start("b")
    await a.ok("POST", "/v1/sessions", {"id": "s"})
    await generate(a, WORDS)
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    await a.ok("DELETE", "/v1/sessions/s")
    assert (await refused(b, RESUME))[:2] == (404, "session_not_found")
    with pair.server.client as client:
        [record] = client.keys("tierd:1:lease:*record")
        left, _ = session_record.decode(client.get(record))
        assert (left.deleted, left.token_ids, left.metadata) == (True, b"", {})
        assert 6 * 86_400 < client.ttl(record) <= 7 * 86_400
        assert not client.keys("tierd:1:lease:*by")
    await b.ok("POST", "/v1/sessions", {"id": "s"})
    await generate(b, WORDS)
    await b.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    await a.ok("POST", "/v1/sessions/s" + RESUME, {})
    assert (await a.ok("GET", "/v1/sessions/s"))["tokens"] == len(WORDS) + 3


@pytest.mark.parametrize("verb", ["resume", "generate", "rewind", "append"])
async def test_older_words_of_a_deleted_session_are_not_used(pair: Pair, verb: str) -> None:
    """B suspended it, A went on and deleted it: B says who did, and forgets its own words."""
    a, b = await pair.start("a"), await pair.start("b")
    await b.ok("POST", "/v1/sessions", {"id": "s"})
    await generate(b, WORDS)
    await b.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    await a.ok("POST", "/v1/sessions/s" + RESUME, {})
    await generate(a, [7])
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    await a.ok("DELETE", "/v1/sessions/s")
    body: Any = {"rewind": {"to": 1}, "generate": {"token_ids": [5], "max_tokens": 1}}.get(verb, {})
    body = {"token_ids": [5]} if verb == "append" else body
    status, code, message = await refused(b, f"/{verb}?wait=true", body)
    assert (status, code) == (404, "session_not_found")
    assert a.service.shared.holder in message
    await b.until(lambda: not b.service.journal.ledger.records)
    assert (await refused(b, "", None, "GET"))[:2] == (404, "session_not_found")
    assert not b.service.shared.deleted_elsewhere
    await b.ok("POST", "/v1/sessions", {"id": "s"})


async def test_older_words_of_a_deleted_session_may_be_deleted(pair: Pair) -> None:
    """Whoever still has some may delete it too, or make it anew elsewhere first."""
    a, b = await pair.start("a"), await pair.start("b")
    await b.ok("POST", "/v1/sessions", {"id": "s"})
    await generate(b, WORDS)
    await b.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    await a.ok("POST", "/v1/sessions/s" + RESUME, {})
    await a.ok("DELETE", "/v1/sessions/s")
    await b.ok("DELETE", "/v1/sessions/s")
    assert (await refused(a, RESUME))[:2] == (404, "session_not_found")
    await a.ok("POST", "/v1/sessions", {"id": "s"})


async def test_a_daemon_that_starts_again_has_its_claims(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, it need not wait for its leases, nor be asked first; its words are what it had."""
    monkeypatch.setattr(verbs, "_suspend_all", _nothing)  # as if killed
    settings = {"name": "a", "store": pair.server.url, "lease_s": 1.5}
    b = await pair.start("b", lease_s=1.5)
    async with run_daemon(pair.folder / "a", **settings) as a:
        await a.ok("POST", "/v1/sessions", {"id": "s"})
        await generate(a, WORDS)
        await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
        words = (await generate(a, [6]))["token_ids"]
        assert a.service.shared.count == 1
    assert (await refused(b, RESUME))[:2] == (409, "session_busy")
    async with run_daemon(pair.folder / "a", **settings) as a:
        await a.until(lambda: _owned(a, "s"))
        await asyncio.sleep(2.0)
        assert (await refused(b, RESUME))[:2] == (409, "session_busy")
        async with a.http.get(a.url + "/metrics") as response:
            assert "tierd_session_leases 1.0" in await response.text()
        words = [*WORDS, *expected(WORDS, 3), 6, *words]
        assert (await generate(a, [7]))["token_ids"] == expected([*words, 7], 3)


async def test_the_same_words_again_are_gone_on_from(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another resumed and suspended it without a word: what came here since is not older."""
    monkeypatch.setattr(verbs, "_suspend_all", _nothing)  # as if killed
    b = await pair.start("b")
    settings = {"name": "a", "store": pair.server.url}
    async with run_daemon(pair.folder / "a", **settings) as a:
        await a.ok("POST", "/v1/sessions", {"id": "s"})
        words = WORDS + (await generate(a, WORDS))["token_ids"]
        for daemon, verb in (a, SUSPEND), (b, RESUME), (b, SUSPEND):
            await daemon.ok("POST", "/v1/sessions/s" + verb, {})
        words += [6, *(await generate(a, [6]))["token_ids"]]
    async with run_daemon(pair.folder / "a", **settings) as a:
        assert (await generate(a, [7]))["token_ids"] == expected([*words, 7], 3)


async def test_a_request_that_is_refused_keeps_no_suspended_session(pair: Pair) -> None:
    """What one daemon did not begin with is still there for the other."""
    a, b = await pair.start("a"), await pair.start("b")
    await a.ok("POST", "/v1/sessions", {"id": "s"})
    await generate(a, WORDS)
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    too_many = {"token_ids": [5], "max_tokens": 1 << 24}
    assert (await refused(a, "/generate", too_many))[:2] == (400, "context_length_exceeded")
    assert a.service.shared.count == 1
    await a.until(lambda: not a.service.shared.count)
    await b.ok("POST", "/v1/sessions/s" + RESUME, {})


def test_an_empty_name_of_a_holder_is_drawn_anew(tmp_path: Path) -> None:
    """A power cut may leave the file empty, on two machines of one name."""
    (tmp_path / "holder").touch()
    drawn = holder_name(tmp_path, "host")
    assert len(drawn) > len("host-")
    assert holder_name(tmp_path, "host") == drawn


async def _nothing(*_: object) -> None:
    return


async def test_a_drained_daemon_leaves_its_sessions_to_others(pair: Pair) -> None:
    """SIGTERM suspends every session to the shared store: another goes on at once."""
    b = await pair.start("b")
    async with run_daemon(pair.folder / "a", name="a", store=pair.server.url) as a:
        await a.ok("POST", "/v1/sessions", {"id": "s"})
        words = WORDS + (await generate(a, WORDS))["token_ids"]
    await b.ok("POST", "/v1/sessions/s" + RESUME, {})
    assert (await generate(b, [7]))["token_ids"] == expected([*words, 7], 3)


async def test_an_owner_that_is_cut_off_loses_it_and_is_fenced(pair: Pair) -> None:
    """Past its lease another goes on from the last record; what the first had under way fails."""
    a = await pair.start("a", "delay=0.02", lease_s=0.6)
    b = await pair.start("b", lease_s=0.6)
    await a.ok("POST", "/v1/sessions", {"id": "s"})
    words = WORDS + (await generate(a, WORDS))["token_ids"]
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    await a.ok("POST", "/v1/sessions/s" + RESUME, {})
    running = asyncio.create_task(refused(a, "/generate", {"max_tokens": 5000}))
    await a.until(lambda: a.service.running)
    assert (await refused(b, RESUME))[:2] == (409, "session_busy")
    pair.proxy.stop()
    async with asyncio.timeout(60):
        while (await b.call("POST", "/v1/sessions/s" + RESUME, {}))[0] != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    answer = await generate(b, [7])
    assert answer["token_ids"] == expected([*words, 7], 3)
    assert a.service.running, "nobody has told it yet"
    pair.proxy.go()
    status, code, message = await running
    assert (status, code) == (409, "session_busy")
    assert b.service.shared.holder in message
    assert (await a.ok("GET", "/v1/sessions/s"))["tokens"] == len(words), "none of it is kept"
    words += [7, *answer["token_ids"]]
    await b.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    await a.ok("POST", "/v1/sessions/s" + RESUME, {})
    assert (await generate(a, [7], 2))["token_ids"] == expected([*words, 7], 2)


async def test_while_the_server_is_away_a_daemon_uses_what_it_holds(pair: Pair) -> None:
    """What it holds it goes on with; what it gave up it refuses, and says why; both come back."""
    a = await pair.start("a", lease_s=0.6)
    for name in ("s", "held"):
        await a.ok("POST", "/v1/sessions", {"id": name})
        await generate(a, WORDS, name=name)
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    pair.proxy.stop()
    status, code, message = await refused(a, "/generate", {"max_tokens": 1})
    assert (status, code) == (503, "store_unavailable")
    assert "shared store" in message
    await generate(a, [7], name="held")
    await a.until(lambda: a.service.shared.adrift() or not _owned(a, "held"))
    await generate(a, [7], name="held")
    await a.ok("POST", "/v1/sessions", {"id": "new"})
    await generate(a, [7], name="new")
    pair.proxy.go()
    await a.until(lambda: _owned(a, "held"))
    await generate(a, [7])


def _owned(daemon: Daemon, id: str) -> bool:
    found = daemon.service.sessions.find("", id)
    return found is not None and daemon.service.shared.owns(found)


async def test_a_server_that_comes_back_empty_costs_no_words(pair: Pair) -> None:
    """Claims and records are gone: the holder claims anew, and the next suspend makes a record."""
    a, b = await pair.start("a", lease_s=0.6), await pair.start("b")
    await a.ok("POST", "/v1/sessions", {"id": "s"})
    words = WORDS + (await generate(a, WORDS))["token_ids"]
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    words += [7, *(await generate(a, [7]))["token_ids"]]
    with pair.server.client as client:
        client.flushall()
        async with asyncio.timeout(60):
            while not client.keys("tierd:1:lease:*:by"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    assert (await refused(b, RESUME))[:2] == (409, "session_busy")
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    await b.ok("POST", "/v1/sessions/s" + RESUME, {})
    assert (await generate(b, [7]))["token_ids"] == expected([*words, 7], 3)


@pytest.mark.parametrize("fault", [Fault.CUT_BEFORE, Fault.CUT_AFTER])
async def test_cut_at_every_command_of_a_hand_over(pair: Pair, fault: Fault) -> None:
    """Whatever is cut, every answer is right or says 503, and the session goes over at last."""
    pair.proxy.quiet = frozenset()
    a, b = await pair.start("a"), await pair.start("b")
    await a.ok("POST", "/v1/sessions", {"id": "s"})
    words = WORDS + (await generate(a, WORDS))["token_ids"]
    for n in range(1, 30):
        await a.until(lambda: a.service.shared.up)
        pair.proxy.arm(fault, n)
        for verb, body in ((SUSPEND, {}), (RESUME, {}), ("/generate", {"max_tokens": 1})):
            status, found, _ = await a.call("POST", "/v1/sessions/s" + verb, body)
            assert status in (200, 503), (n, verb, found)
            if verb == "/generate" and status == 200:
                assert found["token_ids"] == expected(words, 1)
                words += found["token_ids"]
        reached = len(pair.proxy.commands) >= n
        pair.proxy.arm()
        await a.until(lambda: a.service.shared.up)
        await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
        assert (await b.ok("POST", "/v1/sessions/s" + RESUME, {}))["tokens"] == len(words)
        words += [7, *(await generate(b, [7], 1))["token_ids"]]
        assert words[-1] == expected(words[:-1], 1)[0]
        await b.ok("POST", "/v1/sessions/s" + SUSPEND, {})
        assert (await a.ok("POST", "/v1/sessions/s" + RESUME, {}))["tokens"] == len(words)
        if not reached:
            break
    assert 6 < n < 29, "each of six commands was cut once"


async def test_what_is_changed_while_suspended_goes_along(pair: Pair) -> None:
    """Metadata and time to live of a suspended session are those that others get."""
    a, b = await pair.start("a"), await pair.start("b")
    await a.ok("POST", "/v1/sessions", {"id": "s"})
    await generate(a, WORDS)
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    await a.ok("PATCH", "/v1/sessions/s", {"metadata": {"n": 1}, "ttl": 50})
    found = await b.ok("POST", "/v1/sessions/s" + RESUME, {})
    assert (found["metadata"], found["ttl"]) == ({"n": 1}, 50)


async def test_expiry_here_leaves_what_went_on_there(pair: Pair) -> None:
    """A's copy expires and goes; B, who used it since, keeps the session."""
    a, b = await pair.start("a"), await pair.start("b")
    await a.ok("POST", "/v1/sessions", {"id": "s", "ttl": 600})
    words = WORDS + (await generate(a, WORDS))["token_ids"]
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    await b.ok("POST", "/v1/sessions/s" + RESUME, {})
    session = a.service.sessions.get("", "s")
    await verbs.close(a.service, session, expired=True)
    assert (await a.call("GET", "/v1/sessions/s"))[0] == 410
    assert (await generate(b, [7]))["token_ids"] == expected([*words, 7], 3)
    words += [7, *expected([*words, 7], 3)]
    await b.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    found = await a.ok("POST", "/v1/sessions/s" + RESUME, {})
    assert found["tokens"] == len(words)


async def test_chats_go_on_wherever_they_arrive(pair: Pair) -> None:
    """A chat brings its whole prompt: it is answered at A, then at B, then at A again."""
    a, b = await pair.start("a"), await pair.start("b")
    chat = {"messages": [{"role": "user", "content": "u"}], "max_tokens": 2, "temperature": 0}
    head = {"headers": {"X-Session-Id": "s"}}
    first = await a.ok("POST", "/v1/chat/completions", chat, **head)
    status, found, _ = await b.call("POST", "/v1/chat/completions", chat, **head)
    assert (status, found["error"]["code"]) == (409, "session_busy")
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    again = await b.ok("POST", "/v1/chat/completions", chat, **head)
    assert again["choices"][0]["message"] == first["choices"][0]["message"]
    await b.ok("POST", "/v1/sessions/s/generate", {"token_ids": [7], "max_tokens": 1})
    await b.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    third = await a.ok("POST", "/v1/chat/completions", chat, **head)
    assert third["choices"][0]["message"] == first["choices"][0]["message"]


async def test_a_damaged_record_is_refused(pair: Pair) -> None:
    """Words that fail their check are nobody's: an error, and no session is made of them."""
    a, b = await pair.start("a"), await pair.start("b")
    await a.ok("POST", "/v1/sessions", {"id": "s"})
    await generate(a, WORDS)
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    with pair.server.client as client:
        [key] = client.keys("tierd:1:lease:*record")
        data = bytearray(client.get(key))
        data[-1] ^= 1
        client.set(key, bytes(data))
    assert (await refused(b, RESUME))[:2] == (500, "transfer_failed")
    assert (await b.ok("GET", "/v1/sessions"))["data"] == []
    await generate(a, [7])  # whoever has the words goes on, and its next record is whole
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    await b.ok("POST", "/v1/sessions/s" + RESUME, {})


async def test_a_record_lasts_no_longer_than_its_session(pair: Pair) -> None:
    """A time to live bounds the record at the server too; one that ran out is 410 elsewhere."""
    a, b = await pair.start("a"), await pair.start("b")
    await a.ok("POST", "/v1/sessions", {"id": "s", "ttl": 0.6})
    await generate(a, WORDS)
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    with pair.server.client as client:
        [key] = client.keys("tierd:1:lease:*record")
        assert 3500_000 < client.pttl(key) < 3601_000
        a.service.draining = True
    session = a.service.sessions.get("", "s")
    with session.taken(SessionState.ACTIVE):  # A does not sweep it away meanwhile
        await asyncio.sleep(0.7)
        assert (await refused(b, RESUME))[:2] == (410, "session_expired")


async def test_sharing_can_be_switched_off(pair: Pair) -> None:
    """A daemon alone on its Redis claims and records nothing."""
    a = await pair.start("a", share_sessions=False)
    await a.ok("POST", "/v1/sessions", {"id": "s"})
    await generate(a, WORDS)
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    with pair.server.client as client:
        assert not client.keys("tierd:1:lease:*")


async def test_a_session_that_is_never_to_be_stored_stays_here(pair: Pair) -> None:
    """Its words are in no record, and a suspend means host memory."""
    a, b = await pair.start("a"), await pair.start("b")
    made = await a.ok("POST", "/v1/sessions", {"id": "s", "write_policy": "never"})
    assert made["write_policy"] == "never"
    await generate(a, WORDS)
    found = await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    assert found["suspended_tier"] == "host"
    assert (await refused(b, RESUME))[:2] == (404, "session_not_found")
    with pair.server.client as client:
        assert not client.keys("tierd:1:lease:*record")
    fork = await a.ok("POST", "/v1/sessions/s/fork", {"id": "f"})
    assert fork["write_policy"] == "never"


async def test_a_write_policy_goes_along_and_outlives_a_restart(pair: Pair, tmp_path: Path) -> None:
    """It is the session's, wherever it runs; the daemon's default is for those that say none."""
    b = await pair.start("b")
    a = await pair.start("a", write_policy="on_suspend")
    status, found, _ = await a.call("POST", "/v1/sessions", {"write_policy": "sometimes"})
    assert (status, found["error"]["param"]) == (400, "write_policy")
    await a.ok("POST", "/v1/sessions", {"id": "s"})
    await generate(a, WORDS)
    await a.ok("POST", "/v1/sessions/s" + SUSPEND, {})
    assert (await b.ok("POST", "/v1/sessions/s" + RESUME, {}))["write_policy"] == "on_suspend"
    async with run_daemon(tmp_path / "c", write_policy="never") as c:
        await c.ok("POST", "/v1/sessions", {"id": "n"})
        await c.ok("POST", "/v1/sessions", {"id": "t", "write_policy": "through"})
    async with run_daemon(tmp_path / "c") as c:
        found = [(await c.ok("GET", f"/v1/sessions/{id}"))["write_policy"] for id in "nt"]
    assert found == ["never", "through"]
