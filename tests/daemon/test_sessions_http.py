"""Session routes over a real socket: every verb, and words that are never lost or wrong."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from daemon_harness import Daemon, expected, read_events, run_daemon
from dsv4_tierd.daemon import middleware
from fake_worker import text_of


async def test_create_append_generate_and_read_back(daemon: Daemon) -> None:
    """A session takes ids, draws what the engine draws, and says how long it is."""
    made = await daemon.ok("POST", "/v1/sessions", {"id": "a", "metadata": {"who": "x"}})
    assert (made["state"], made["tokens"], made["metadata"]) == ("open", 0, {"who": "x"})
    done = await daemon.ok("POST", "/v1/sessions/a/append?wait=true", {"token_ids": [5, 6, 7]})
    assert (done["tokens"], done["usage"]["prompt_tokens"]) == (3, 3)
    body = {"token_ids": [8], "max_tokens": 4}
    answer = await daemon.ok("POST", "/v1/sessions/a/generate", body)
    want = expected([5, 6, 7, 8], 4)
    assert answer["token_ids"] == want
    assert answer["text"] == "".join(map(text_of, want))
    assert answer["tokens"] == 8
    assert answer["finish_reason"] == "length"
    usage = answer["usage"]
    details = usage["cached_tokens_details"]
    assert sum(details.values()) + usage["computed_tokens"] == usage["prompt_tokens"] == 4
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_cache_hit_tokens"] == 3
    found = await daemon.ok("GET", "/v1/sessions/a")
    assert (found["state"], found["tokens"]) == ("idle", 8)
    more = await daemon.ok("POST", "/v1/sessions/a/generate", {"max_tokens": 2})
    assert more["token_ids"] == expected([5, 6, 7, 8, *want], 2)


async def test_ids_as_octets_and_text_and_messages(daemon: Daemon) -> None:
    """int32 bytes, text and messages are taken as well as a JSON list."""
    octets = {"Content-Type": "application/octet-stream"}
    await daemon.ok("POST", "/v1/sessions", {"id": "o"})
    body = struct.pack("<3i", 5, 6, 7)
    done = await daemon.ok("POST", "/v1/sessions/o/append?wait=true", data=body, headers=octets)
    assert done["tokens"] == 3
    answer = await daemon.ok(
        "POST", "/v1/sessions/o/generate?max_tokens=2", data=struct.pack("<i", 8), headers=octets
    )
    assert answer["token_ids"] == expected([5, 6, 7, 8], 2)
    text = await daemon.ok("POST", "/v1/sessions?wait=true", {"text": "hello world"})
    ids = (await daemon.ok("POST", "/tokenize", {"text": "hello world"}))["token_ids"]
    assert text["tokens"] == len(ids)
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    made = await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "c", "messages": chat})
    whole = (await daemon.ok("POST", "/tokenize", {"messages": chat}))["token_ids"]
    assert made["tokens"] == len(whole) - 2  # the answer's header comes with generate
    answer = await daemon.ok("POST", "/v1/sessions/c/generate", {"max_tokens": 3})
    assert answer["token_ids"] == expected(whole, 3)


async def test_streamed_generation(daemon: Daemon) -> None:
    """The stream has every token in order and ends with usage."""
    await daemon.ok("POST", "/v1/sessions", {"id": "a"})
    body = {"token_ids": [5], "max_tokens": 600, "stream": True}
    events = await read_events(daemon, "/v1/sessions/a/generate", body)
    tokens = [t for name, data in events if name == "tokens" for t in data["token_ids"]]
    assert tokens == expected([5], 600)
    name, data = events[-1]
    assert (name, data["finish_reason"], data["tokens"]) == ("done", "length", 601)


async def test_fork_rewind_and_their_words(daemon: Daemon) -> None:
    """Forks share what was before and go their own ways; rewinding forgets."""
    await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [1, 2, 3, 4]})
    made = await daemon.ok("POST", "/v1/sessions/a/fork", {"id": "b", "at": 2})
    assert (made["tokens"], made["state"]) == (2, "idle")
    b = await daemon.ok("POST", "/v1/sessions/b/generate", {"token_ids": [9], "max_tokens": 2})
    assert b["token_ids"] == expected([1, 2, 9], 2)
    a = await daemon.ok("POST", "/v1/sessions/a/generate", {"max_tokens": 2})
    assert a["token_ids"] == expected([1, 2, 3, 4], 2)
    assert (await daemon.ok("POST", "/v1/sessions/a/rewind", {"to": 3}))["tokens"] == 3
    a = await daemon.ok("POST", "/v1/sessions/a/generate", {"max_tokens": 2})
    assert a["token_ids"] == expected([1, 2, 3], 2)
    assert (await daemon.call("POST", "/v1/sessions/a/rewind", {"to": 99}))[0] == 400


async def test_a_fork_of_a_running_session(tmp_path: Path) -> None:
    """A session that is drawing can be forked; the fork goes on from what was drawn."""
    async with run_daemon(tmp_path, "delay=0.01") as daemon:
        await daemon.ok("POST", "/v1/sessions", {"id": "a"})
        running = asyncio.create_task(
            daemon.ok("POST", "/v1/sessions/a/generate", {"token_ids": [5], "max_tokens": 40})
        )
        session = daemon.service.sessions.get("", "a")
        await daemon.until(lambda: session.run is not None and len(session.run.generated) > 3)
        status, found, _ = await daemon.call("POST", "/v1/sessions/a/generate", {"max_tokens": 1})
        assert (status, found["error"]["code"]) == (409, "session_busy")
        made = await daemon.ok("POST", "/v1/sessions/a/fork", {"id": "b"})
        count = made["tokens"]
        assert 4 <= count < 41
        whole = [5, *expected([5], 40)]
        b = await daemon.ok("POST", "/v1/sessions/b/generate", {"max_tokens": 2})
        assert b["token_ids"] == expected(whole[:count], 2)
        assert (await running)["token_ids"] == whole[1:]


async def test_suspend_resume_residency_points_and_pin(daemon: Daemon) -> None:
    """The other verbs change the state they name, and give what the engine answers."""
    await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5] * 600})
    found = await daemon.ok("POST", "/v1/sessions/a/suspend?wait=true", {"tier": "store"})
    assert (found["state"], found["suspended_tier"]) == ("suspended", "store")
    assert found["stored_tokens"] == found["tokens"]
    operation = await daemon.ok("POST", "/v1/sessions/a/resume", {})
    async with asyncio.timeout(60):
        while operation["state"] == "running":
            operation = await daemon.ok("GET", f"/v1/operations/{operation['id']}")
    assert operation["state"] == "done"
    assert (await daemon.ok("GET", "/v1/sessions/a"))["state"] == "idle"
    points = await daemon.ok("GET", "/v1/sessions/a/resume_points")
    assert points["positions"] == [256, 512]
    cells = (await daemon.ok("GET", "/v1/sessions/a/residency"))["residency"]
    assert cells == [{"group": "c4", "tier": "host", "tokens": 600, "bytes": 4096}]
    status, found, _ = await daemon.call("DELETE", "/v1/sessions/a/pin")
    assert (status, found["error"]["code"]) == (409, "not_pinned")
    pinned = await daemon.ok("PUT", "/v1/sessions/a/pin", {"tier": "host", "ttl": 100})
    assert pinned["pin"]["tier"] == "host"
    assert (await daemon.ok("DELETE", "/v1/sessions/a/pin"))["pin"] is None


async def test_pins_beyond_the_budget_are_507(tmp_path: Path) -> None:
    """A refused pin is 507 and leaves the session unpinned."""
    async with run_daemon(tmp_path, "nopins") as daemon:
        await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5]})
        status, found, _ = await daemon.call("PUT", "/v1/sessions/a/pin", {})
        assert (status, found["error"]["code"]) == (507, "pin_budget_exhausted")
        assert (await daemon.ok("GET", "/v1/sessions/a"))["pin"] is None


async def test_list_patch_delete_and_salts(daemon: Daemon) -> None:
    """Lists page in order of creation; another salt sees nothing; deletion is final."""
    for n in range(5):
        await daemon.ok("POST", "/v1/sessions", {"id": f"s{n}"})
    await daemon.ok("POST", "/v1/sessions", {"id": "s0", "cache_salt": "other"})
    page = await daemon.ok("GET", "/v1/sessions?limit=2&after=s1")
    assert [s["id"] for s in page["data"]] == ["s2", "s3"]
    assert page["has_more"]
    assert len((await daemon.ok("GET", "/v1/sessions?state=open&cache_salt=other"))["data"]) == 1
    assert not (await daemon.ok("GET", "/v1/sessions?state=idle"))["data"]
    changed = await daemon.ok("PATCH", "/v1/sessions/s1", {"metadata": {"k": 1}, "ttl": 50})
    assert (changed["metadata"], changed["ttl"]) == ({"k": 1}, 50)
    other = {"X-Cache-Salt": "else"}
    for method, path in [("GET", ""), ("DELETE", ""), ("POST", "/fork"), ("POST", "/generate")]:
        status, found, _ = await daemon.call(method, f"/v1/sessions/s1{path}", headers=other)
        assert (status, found["error"]["code"]) == (404, "session_not_found")
    assert (await daemon.ok("DELETE", "/v1/sessions/s1"))["deleted"]
    assert (await daemon.call("GET", "/v1/sessions/s1"))[0] == 404
    assert (await daemon.call("DELETE", "/v1/sessions/s1"))[0] == 404


async def test_delete_drops_only_blocks_that_are_nobody_elses(daemon: Daemon) -> None:
    """Deleting a fork names the first block after the shared prefix; the last one names 0."""
    await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [7] * 1000})
    await daemon.ok("POST", "/v1/sessions/a/fork", {"id": "b", "at": 600})
    await daemon.ok("POST", "/v1/sessions/b/append?wait=true", {"token_ids": [8] * 600})
    salted = {"id": "a", "token_ids": [7] * 1000, "cache_salt": "x"}
    await daemon.ok("POST", "/v1/sessions?wait=true", salted)
    await daemon.ok("DELETE", "/v1/sessions/b")
    await daemon.service.worker.refresh_stats(2)
    assert daemon.service.worker.counters()["drop_from_last"] == 600 // 256
    await daemon.ok("DELETE", "/v1/sessions/a")
    await daemon.service.worker.refresh_stats(2)
    assert daemon.service.worker.counters()["drop_from_last"] == 0


async def test_expiry(daemon: Daemon) -> None:
    """After its time to live a session is 410, and its name is free again."""
    await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "ttl": 0.3, "token_ids": [5]})
    ledger = daemon.service.journal.ledger
    await daemon.until(lambda: not ledger.records)
    status, found, _ = await daemon.call("GET", "/v1/sessions/a")
    assert (status, found["error"]["code"]) == (410, "session_expired")
    assert (await daemon.ok("POST", "/v1/sessions", {"id": "a"}))["state"] == "open"


async def test_session_events(daemon: Daemon) -> None:
    """The event stream tells of state changes, and ends when the session is deleted."""
    await daemon.ok("POST", "/v1/sessions", {"id": "a"})
    following = asyncio.create_task(
        daemon.http.get(daemon.url + "/v1/sessions/a/events").__aenter__()
    )
    response = await following
    await daemon.until(lambda: daemon.service.sessions.get("", "a").subscribers)
    await daemon.ok("POST", "/v1/sessions/a/generate", {"token_ids": [5], "max_tokens": 1})
    await daemon.ok("DELETE", "/v1/sessions/a")
    text = (await asyncio.wait_for(response.read(), 5)).decode()
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    assert names[0] == "session"
    assert names[-1] == "closed"
    states = [
        json.loads(line[6:]).get("state") for line in text.splitlines() if line[:6] == "data: "
    ]
    assert states[1:4] == ["active", "idle", "closing"]


async def test_expected_tokens_guards_a_repeat(daemon: Daemon) -> None:
    """An append that names a length which is not so changes nothing: 412."""
    await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5, 6]})
    body = {"token_ids": [7], "expected_tokens": 2}
    await daemon.ok("POST", "/v1/sessions/a/append?wait=true", body)
    status, found, _ = await daemon.call("POST", "/v1/sessions/a/append?wait=true", body)
    assert (status, found["error"]["code"]) == (412, "precondition_failed")
    assert (await daemon.ok("GET", "/v1/sessions/a"))["tokens"] == 3


@pytest.mark.parametrize("header", ["X-Cache-Salt", "X-Session-Id", "x-api-key"])
async def test_an_idempotency_key_is_its_callers_own(daemon: Daemon, header: str) -> None:
    """The same key and body from another tenant, caller or session is another request."""
    body = {"prompt": [5], "max_tokens": 1}
    ids = []
    for who in ("one", "two", "one"):
        headers = {"Idempotency-Key": "k", header: who}
        ids.append((await daemon.ok("POST", "/v1/completions", body, headers=headers))["id"])
    assert ids[0] == ids[2] != ids[1]


async def test_idempotency_key(daemon: Daemon) -> None:
    """The same key and body give the first answer; another body, or a stream, is refused."""
    await daemon.ok("POST", "/v1/sessions", {"id": "a"})
    key = {"Idempotency-Key": "k1"}
    path = "/v1/sessions/a/generate"
    both = await asyncio.gather(
        *(
            daemon.call("POST", path, {"token_ids": [5], "max_tokens": 3}, headers=key)
            for _ in range(2)
        )
    )
    assert both[0][:2] == both[1][:2]
    assert both[0][0] == 200
    assert sum("Idempotent-Replayed" in r.headers for _, _, r in both) == 1
    assert (await daemon.ok("GET", "/v1/sessions/a"))["tokens"] == 4
    status, _, _ = await daemon.call("POST", path, {"token_ids": [6]}, headers=key)
    assert status == 400
    body = {"token_ids": [6], "stream": True}
    status, found, _ = await daemon.call("POST", path, body, headers={"Idempotency-Key": "k2"})
    assert (status, found["error"]["code"]) == (400, "unsupported_combination")


async def test_a_key_finds_what_its_waiter_left(daemon: Daemon) -> None:
    """The connection broke while an append was waited for: asked again, it is not done again."""
    await daemon.ok("POST", "/v1/sessions", {"id": "a"})
    session = daemon.service.sessions.get("", "a")
    path, body = "/v1/sessions/a/append?wait=true", {"token_ids": [5, 6, 7]}
    key = {"Idempotency-Key": "k"}
    waiter = asyncio.create_task(daemon.call("POST", path, body, headers=key))
    await daemon.until(lambda: session.run is not None or session.length)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    found, _, response = await daemon.call("POST", path, body, headers=key)
    assert (found, response.headers["Idempotent-Replayed"], session.length) == (200, "true", 3)


async def leave_generating(daemon: Daemon, key: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """A request with a key whose client leaves while it draws; its path and body."""
    await daemon.ok("POST", "/v1/sessions", {"id": "a"})
    session = daemon.service.sessions.get("", "a")
    path, body = "/v1/sessions/a/generate", {"token_ids": [5, 6, 7], "max_tokens": 50}
    waiter = asyncio.create_task(daemon.call("POST", path, body, headers=key))
    await daemon.until(lambda: session.run is not None and session.run.generated)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    return path, body


async def test_a_request_with_a_key_goes_on_until_its_client_is_back(tmp_path: Path) -> None:
    """The connection broke while words were drawn: asked again, they are drawn and kept once."""
    key = {"Idempotency-Key": "k"}
    async with run_daemon(tmp_path, "delay=0.01") as daemon:
        path, body = await leave_generating(daemon, key)
        status, found, response = await daemon.call("POST", path, body, headers=key)
        assert (status, response.headers["Idempotent-Replayed"]) == (200, "true")
        assert found["token_ids"] == expected([5, 6, 7], 50)
        assert daemon.service.sessions.get("", "a").length == 53


async def test_a_request_that_was_cut_off_is_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody came back for it: it is cancelled, and later its key is refused, not obeyed twice."""
    monkeypatch.setattr(middleware, "LEFT_S", 0.0)
    key = {"Idempotency-Key": "k"}
    async with run_daemon(tmp_path, "delay=0.1") as daemon:
        path, body = await leave_generating(daemon, key)
        session = daemon.service.sessions.get("", "a")
        await daemon.until(lambda: not session.is_busy)
        length = session.length
        assert 3 < length < 53
        status, found, _ = await daemon.call("POST", path, body, headers=key)
        assert (status, found["error"]["code"]) == (412, "precondition_failed")
        assert session.length == length


async def test_logprobs_and_seed(daemon: Daemon) -> None:
    """Logprobs come when asked for; the seed that was used is said, and repeats the run."""
    await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5]})
    body = {"max_tokens": 3, "temperature": 1.0, "logprobs": 2}
    one = await daemon.ok("POST", "/v1/sessions/a/generate", body)
    assert [p["token_id"] for p in one["logprobs"]] == one["token_ids"]
    await daemon.ok("POST", "/v1/sessions/a/rewind", {"to": 1})
    two = await daemon.ok("POST", "/v1/sessions/a/generate", body | {"seed": one["seed"]})
    assert two["token_ids"] == one["token_ids"]


@pytest.mark.parametrize("fresh", [True, False])
async def test_everything_is_there_after_a_restart_of_the_daemon(
    tmp_path: Path, fresh: bool
) -> None:
    """A second daemon on the same state folder has every session, pin and word."""
    async with run_daemon(tmp_path) as daemon:
        await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5, 6, 7]})
        await daemon.ok("POST", "/v1/sessions/a/generate", {"max_tokens": 5})
        await daemon.ok("POST", "/v1/sessions/a/fork", {"id": "b", "at": 4})
        await daemon.ok("PUT", "/v1/sessions/b/pin", {})
        if not fresh:
            await daemon.ok("POST", "/v1/sessions/a/suspend?wait=true", {})
    async with run_daemon(tmp_path) as daemon:
        listed = (await daemon.ok("GET", "/v1/sessions"))["data"]
        assert [(s["id"], s["tokens"]) for s in listed] == [("a", 8), ("b", 4)]
        assert listed[0]["state"] == "suspended"  # the drain did it, if the test had not
        assert listed[1]["pin"] is not None
        whole = [5, 6, 7, *expected([5, 6, 7], 5)]
        for name, ids in [("a", whole), ("b", whole[:4])]:
            answer = await daemon.ok("POST", f"/v1/sessions/{name}/generate", {"max_tokens": 2})
            assert answer["token_ids"] == expected(ids, 2)


@pytest.mark.parametrize("verb", ["create", "fork", "delete"])
async def test_leaving_while_the_journal_writes_leaves_one_truth(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """What is made or deleted is so for the API and the journal alike, though nobody waited."""
    await daemon.ok("POST", "/v1/sessions", {"id": "a"})
    await daemon.ok("POST", "/v1/sessions/a/generate", {"token_ids": [5], "max_tokens": 1})
    journal, may_write = daemon.service.journal, threading.Event()
    write, writing = journal._file.write, threading.Event()

    def slow(events: Any) -> None:
        writing.set()
        may_write.wait()
        write(events)

    monkeypatch.setattr(journal._file, "write", slow)
    method, path, body = {
        "create": ("POST", "/v1/sessions", {"id": "b"}),
        "fork": ("POST", "/v1/sessions/a/fork", {"id": "b"}),
        "delete": ("DELETE", "/v1/sessions/a", None),
    }[verb]
    task = asyncio.create_task(daemon.call(method, path, body))
    await daemon.until(writing.is_set)
    task.cancel()
    await asyncio.sleep(0.1)  # the server sees the client leave
    may_write.set()
    there = {"a"} if verb != "delete" else set()
    made = {"b"} if verb != "delete" else set()
    await daemon.until(lambda: {r.id for r in journal.ledger.records.values()} == there | made)
    listed = await daemon.ok("GET", "/v1/sessions")
    assert {session["id"] for session in listed["data"]} == there | made
    status, _, _ = await daemon.call("POST", "/v1/sessions", {"id": "b" if made else "a"})
    assert status == (409 if made else 201)


async def test_a_fork_that_is_not_kept_leaves_nothing_in_the_engine(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk refuses the fork; its name is free and the engine has forgotten it."""
    await daemon.ok("POST", "/v1/sessions", {"id": "a"})
    await daemon.ok("POST", "/v1/sessions/a/generate", {"token_ids": [5], "max_tokens": 1})

    def full(_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(daemon.service.journal._file, "write", full)
        status, found, _ = await daemon.call("POST", "/v1/sessions/a/fork", {"id": "b"})
    assert (status, found["error"]["code"]) == (503, "store_unavailable")
    await daemon.service.worker.refresh_stats(2)
    assert daemon.service.worker.gauges()["sessions_open"] == 1
    await daemon.ok("POST", "/v1/sessions/a/fork", {"id": "b"})
