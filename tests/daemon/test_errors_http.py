"""Each bad input a clear 4xx with the envelope, and nothing changed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from daemon_harness import Daemon, run_daemon
from dsv4_tierd.daemon import operations
from dsv4_tierd.daemon.middleware import error_response
from dsv4_tierd.tiering import errors

GENERATE = "/v1/sessions/a/generate"
CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def nested(depth: int) -> dict[str, Any]:
    """A JSON object of that many levels."""
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"k": value}
    return value


BAD: list[tuple[str, str, Any, int, str]] = [
    ("POST", GENERATE, {"max_tokens": -1}, 400, "invalid_request"),
    ("POST", GENERATE, {"max_tokens": 0}, 400, "invalid_request"),
    ("POST", GENERATE, {"max_tokens": "5"}, 400, "invalid_request"),
    ("POST", GENERATE, {"max_tokens": 1 << 80}, 400, "invalid_request"),
    ("POST", GENERATE, {"temperature": -0.1}, 400, "invalid_request"),
    ("POST", GENERATE, {"top_p": 0}, 400, "invalid_request"),
    ("POST", GENERATE, {"top_k": -3}, 400, "invalid_request"),
    ("POST", GENERATE, {"stop": [""]}, 400, "invalid_request"),
    ("POST", GENERATE, {"stop": ["x"] * 17}, 400, "invalid_request"),
    ("POST", GENERATE, {"logprobs": 21}, 400, "invalid_request"),
    ("POST", GENERATE, {"unknown": 1}, 400, "invalid_request"),
    ("POST", GENERATE, {"token_ids": [129_280]}, 400, "invalid_token_ids"),
    ("POST", GENERATE, {"token_ids": [-1]}, 400, "invalid_token_ids"),
    ("POST", GENERATE, {"token_ids": [1 << 70]}, 400, "invalid_token_ids"),
    ("POST", GENERATE, {"token_ids": [1.5]}, 400, "invalid_request"),
    ("POST", GENERATE, {"token_ids": "abc"}, 400, "invalid_request"),
    ("POST", GENERATE, {"stop_token_ids": [129_280]}, 400, "invalid_token_ids"),
    ("POST", GENERATE, {"token_ids": [1], "text": "x"}, 400, "invalid_request"),
    ("POST", GENERATE, {"messages": []}, 400, "invalid_request"),
    ("POST", GENERATE, {"messages": [{"role": "martian", "content": ""}]}, 400, "invalid_request"),
    ("POST", GENERATE, {"messages": USER, "max_tokens": 1 << 20}, 400, "context_length_exceeded"),
    ("POST", GENERATE, {"expected_tokens": 99}, 412, "precondition_failed"),
    ("POST", GENERATE, [], 400, "invalid_request"),
    ("POST", "/v1/sessions/a/append", {}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/append", {"token_ids": []}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/append", {"text": ""}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/append?wait=maybe", {"token_ids": [5]}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/fork", {"at": 99}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/fork", {"at": -1}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/fork", {"id": "a"}, 409, "session_exists"),
    ("POST", "/v1/sessions/a/fork", {"id": "../b"}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/rewind", {}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/suspend", {"tier": "moon"}, 400, "invalid_request"),
    ("PUT", "/v1/sessions/a/pin", {"tier": "store"}, 400, "invalid_request"),
    ("PUT", "/v1/sessions/a/pin", {"ttl": -1}, 400, "invalid_request"),
    ("POST", "/v1/sessions", {"id": "a"}, 409, "session_exists"),
    ("POST", "/v1/sessions", {"id": "x/../../etc/passwd"}, 400, "invalid_request"),
    ("POST", "/v1/sessions", {"id": ""}, 400, "invalid_request"),
    ("POST", "/v1/sessions", {"id": "x" * 129}, 400, "invalid_request"),
    ("POST", "/v1/sessions", {"ttl": 0}, 400, "invalid_request"),
    ("POST", "/v1/sessions", {"ttl": 1e300}, 400, "invalid_request"),
    ("POST", "/v1/sessions", {"metadata": {"k": "x" * 20_000}}, 400, "invalid_request"),
    ("POST", "/v1/sessions", {"metadata": {"k": 1 << 64}}, 400, "invalid_request"),
    ("POST", "/v1/sessions", {"metadata": {"k": [{"l": -(1 << 63) - 1}]}}, 400, "invalid_request"),
    ("POST", "/v1/sessions", {"metadata": nested(33)}, 400, "invalid_request"),
    ("POST", "/v1/sessions", {"cache_salt": "x" * 200}, 400, "invalid_request"),
    ("PATCH", "/v1/sessions/a", {"metadata": {"k": 1 << 80}}, 400, "invalid_request"),
    ("POST", "/v1/sessions", {"write_policy": "sometimes"}, 400, "invalid_request"),
    ("POST", "/v1/sessions", {"prefix": 1}, 400, "invalid_request"),
    ("PATCH", "/v1/sessions/a", {"ttl": -5}, 400, "invalid_request"),
    ("GET", "/v1/sessions?limit=0", None, 400, "invalid_request"),
    ("GET", "/v1/sessions?limit=x", None, 400, "invalid_request"),
    ("GET", "/v1/sessions?state=happy", None, 400, "invalid_request"),
    ("GET", "/v1/sessions?after=nobody", None, 400, "invalid_request"),
    ("GET", "/v1/sessions/nobody", None, 404, "session_not_found"),
    ("GET", "/v1/sessions/..%2F..%2Fetc%2Fpasswd", None, 400, "invalid_request"),
    ("GET", "/v1/sessions/%00", None, 400, "invalid_request"),
    ("GET", "/v1/operations/op-1", None, 404, "not_found"),
    ("GET", "/nothing", None, 404, "not_found"),
    ("PUT", "/v1/sessions", {}, 405, "method_not_allowed"),
    ("POST", "/tokenize", {}, 400, "invalid_request"),
    ("POST", "/detokenize", {"token_ids": [1 << 31]}, 400, "invalid_token_ids"),
    ("POST", "/v1/prefixes/lookup", {}, 400, "invalid_request"),
    ("POST", "/v1/prefixes/warm", {}, 400, "invalid_request"),
    ("POST", "/v1/prefixes/warm", {"token_ids": [-1]}, 400, "invalid_token_ids"),
    ("POST", "/v1/store/verify?wait=maybe", {}, 400, "invalid_request"),
    ("POST", "/v1/store/verify", {"budget": 1}, 400, "invalid_request"),
    ("POST", "/v1/store/gc", {"budget": 1}, 400, "invalid_request"),
    ("POST", "/v1/store/burn", {}, 404, "not_found"),
    ("POST", CHAT, {}, 400, "invalid_request"),
    ("POST", CHAT, {"messages": "hi"}, 400, "invalid_request"),
    ("POST", CHAT, {"messages": USER, "model": "gpt-9"}, 404, "not_found"),
    ("POST", CHAT, {"messages": USER, "n": 0}, 400, "invalid_request"),
    ("POST", CHAT, {"messages": USER, "n": 999}, 400, "invalid_request"),
    ("POST", CHAT, {"messages": USER, "n": True}, 400, "invalid_request"),
    ("POST", CHAT, {"messages": USER, "temperature": "hot"}, 400, "invalid_request"),
    ("POST", CHAT, {"messages": USER, "temperature": 10**400}, 400, "invalid_request"),
    ("POST", CHAT, {"messages": USER, "top_p": 10**400}, 400, "invalid_request"),
    ("POST", CHAT, {"messages": USER, "max_tokens": -4}, 400, "invalid_request"),
    ("POST", CHAT, {"messages": USER, "banana": 1}, 400, "invalid_request"),
    ("POST", CHAT, {"messages": USER, "stop": [5]}, 400, "invalid_request"),
    ("POST", CHAT, {"messages": USER, "top_logprobs": 3}, 400, "invalid_request"),
    ("POST", CHAT, {"messages": USER, "session_id": "../x"}, 400, "invalid_request"),
    ("POST", CHAT, {"messages": USER, "max_tokens": 1 << 21}, 400, "context_length_exceeded"),
    ("POST", CHAT, {"messages": USER, "logit_bias": {"5": 1}}, 400, "unsupported_combination"),
    ("POST", CHAT, {"messages": USER, "presence_penalty": 1}, 400, "unsupported_combination"),
    (
        "POST",
        CHAT,
        {"messages": USER, "response_format": {"type": "json_object"}},
        400,
        "unsupported_combination",
    ),
    ("POST", CHAT, {"messages": USER, "tool_choice": "required"}, 400, "unsupported_combination"),
    ("POST", COMPLETE, {"prompt": ""}, 400, "invalid_request"),
    ("POST", COMPLETE, {"prompt": []}, 400, "invalid_request"),
    ("POST", COMPLETE, {"prompt": 5}, 400, "invalid_request"),
    ("POST", COMPLETE, {"prompt": ["a", "b"]}, 400, "unsupported_combination"),
    ("POST", COMPLETE, {"prompt": "x", "echo": True}, 400, "unsupported_combination"),
    ("POST", COMPLETE, {"prompt": [129_280]}, 400, "invalid_token_ids"),
]


async def test_every_bad_input_is_a_clear_error_and_changes_nothing(daemon: Daemon) -> None:
    """Status, code and message for each; sessions and journal are as before."""
    await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5, 6]})
    before = await daemon.ok("GET", "/v1/sessions/a")
    size = daemon.service.journal.size_bytes
    for method, path, body, status, code in BAD:
        got, found, _ = await daemon.call(method, path, body)
        assert (got, found["error"]["code"]) == (status, code), (path, body, found)
        assert found["error"]["message"]
        assert set(found["error"]) == {"message", "type", "param", "code"}
    _, found, _ = await daemon.call("POST", "/v1/sessions", {"write_policy": "sometimes"})
    assert found["error"]["param"] == "write_policy"
    assert found["error"]["message"].endswith("one of through, on_suspend, never")
    assert await daemon.ok("GET", "/v1/sessions/a") == before
    assert daemon.service.journal.size_bytes == size
    assert len(daemon.service.sessions) == 1
    assert not daemon.service.running


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b"[" * 100_000,
        b'{"metadata":' + b'{"a":' * 100_000,
        b'{"messages": [' + b"[" * 5_000 + b"]" * 5_000 + b"]}",
    ],
)
async def test_bodies_that_are_not_sane_json(daemon: Daemon, body: bytes) -> None:
    """Broken, deeply nested and not-a-number bodies are 400 everywhere."""
    paths = ["/v1/sessions/a/generate", CHAT, COMPLETE, "/v1/prefixes/lookup"]
    await daemon.ok("POST", "/v1/sessions", {"id": "a"})
    for path in paths:
        status, found, _ = await daemon.call("POST", path, data=body)
        assert status == 400, (path, found)
    if body:
        status, _, _ = await daemon.call("POST", "/v1/sessions", data=body)
        assert status == 400
    assert len(daemon.service.sessions) == 1


async def test_a_body_that_is_not_encoded_as_it_says_is_refused(daemon: Daemon) -> None:
    """Not gzip, though it says so: 400, not a bug of the daemon."""
    for path in ("/v1/sessions", CHAT, "/v1/prefixes/lookup"):
        headers = {"Content-Encoding": "gzip"}
        status, found, _ = await daemon.call("POST", path, data=b"{}", headers=headers)
        assert (status, found["error"]["code"]) == (400, "invalid_request")
        assert "the body cannot be read" in found["error"]["message"]


async def test_only_a_body_that_says_so_is_ids(daemon: Daemon) -> None:
    """A type that is none is as no type: JSON."""
    for said in (";;;", "nonsense", "\xe9", "application/json; charset=utf-16"):
        headers = {"Content-Type": said}
        status, found, _ = await daemon.call("POST", "/v1/sessions", data=b"{}", headers=headers)
        assert (status, found.get("state")) == (201, "open"), said
    headers = {"Content-Type": "Application/Octet-Stream ; v=1"}
    found = await daemon.ok("POST", "/v1/sessions?wait=true", data=bytes(8), headers=headers)
    assert found["tokens"] == 2


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /\xff%s%d HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/sessions HTTP/1.0\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    ],
)
async def test_what_is_no_http_is_one_line_in_the_log(
    daemon: Daemon, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    """400 for who sent it; nobody can fill the log with traces."""
    caplog.set_level("INFO")
    host, port = daemon.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    assert b" 400 " in (await reader.read()).split(b"\r\n", 1)[0]
    writer.close()
    await daemon.ok("GET", "/health")
    records = [record for record in caplog.records if record.name == "aiohttp.server"]
    assert len(records) == 1
    assert (records[0].levelname, records[0].exc_info) == ("INFO", None)
    assert records[0].getMessage().count("\n") == 0


async def test_the_deepest_metadata_and_largest_numbers_are_kept(tmp_path: Path) -> None:
    """What is taken can be listed, and is there after a restart."""
    metadata = {"deep": nested(31), "numbers": [(1 << 64) - 1, -(1 << 63)]}
    async with run_daemon(tmp_path) as daemon:
        await daemon.ok("POST", "/v1/sessions", {"id": "a", "metadata": metadata})
    async with run_daemon(tmp_path) as daemon:
        (found,) = (await daemon.ok("GET", "/v1/sessions"))["data"]
        assert found["metadata"] == metadata


async def test_a_salt_that_is_no_text_is_refused(daemon: Daemon) -> None:
    """Header bytes that are not UTF-8 reach neither journal nor engine, and the daemon lives."""
    host, port = daemon.url.removeprefix("http://").split(":")
    for path, body in (("/v1/sessions", b"{}"), ("/v1/prefixes/lookup", b'{"token_ids": [5]}')):
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        salt = b"X-Cache-Salt: \xff\r\n" + f"Content-Length: {len(body)}\r\n\r\n".encode()
        writer.write(head.encode() + salt + body)
        assert (await reader.read()).startswith(b"HTTP/1.1 400"), path
        writer.close()
    assert len(daemon.service.sessions) == 0
    await daemon.ok("POST", "/v1/sessions", {"id": "a"})


@pytest.mark.parametrize("verb", ["/v1/prefixes/lookup", "/v1/completions"])
async def test_what_is_too_long_is_refused_by_its_own_name(tmp_path: Path, verb: str) -> None:
    """Beyond the budgets, or beyond the model; nothing of it is sent to the engine."""
    async with run_daemon(tmp_path, "context=1000,model_context=2000") as daemon:
        for count, code in (
            (1000, None),
            (1001, "exceeds_capacity"),
            (2000, "exceeds_capacity"),
            (2001, "context_length_exceeded"),
        ):
            ids = [5] * count
            if verb == "/v1/completions":
                body = {"prompt": ids[:-1], "max_tokens": 1}
            else:
                body = {"token_ids": ids}
            status, found, _ = await daemon.call("POST", verb, body)
            assert (status, found.get("error", {}).get("code")) == (
                (200, None) if code is None else (400, code)
            )


async def test_a_body_that_is_too_long_is_413(tmp_path: Path) -> None:
    """Refused unread when it says so, and cut off while read when it does not."""
    async with run_daemon(tmp_path, body_bytes_max=100_000) as daemon:
        await daemon.ok("POST", "/v1/sessions", {"id": "a"})
        status, found, _ = await daemon.call("POST", GENERATE, data=b"x" * 200_000)
        assert (status, found["error"]["code"]) == (413, "body_too_large")

        async def chunks() -> Any:
            for _ in range(20):
                yield b"x" * 10_000

        status, found, _ = await daemon.call("POST", GENERATE, data=chunks())
        assert (status, found["error"]["code"]) == (413, "body_too_large")


async def test_api_keys(tmp_path: Path) -> None:
    """With keys configured, only they open the API; health stays open."""
    keys = tmp_path / "keys"
    keys.write_text("# ours\n  # old\nsecret-1\nsecret-2\n")
    async with run_daemon(tmp_path / "s", api_key_file=keys) as daemon:
        assert (await daemon.call("GET", "/health"))[0] == 200
        for headers in ({}, {"Authorization": "Bearer nope"}, {"x-api-key": "# old"}):
            status, found, _ = await daemon.call("GET", "/v1/models", headers=headers)
            assert (status, found["error"]["code"]) == (401, "unauthorized")
        for headers in ({"Authorization": "Bearer secret-2"}, {"x-api-key": "secret-1"}):
            assert (await daemon.call("GET", "/v1/models", headers=headers))[0] == 200


@pytest.mark.parametrize("header", [b"x-api-key: \xff", b"Authorization: Bearer \xff"])
async def test_a_key_that_is_no_text_is_no_bug(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, header: bytes
) -> None:
    """401 as for any wrong key; nobody without a key can fill the log with traces."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    async with run_daemon(tmp_path / "s", api_key_file=keys) as daemon:
        host, port = daemon.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        writer.write(head + header + b"\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 401")
        writer.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_without_a_tokenizer_text_is_refused_and_ids_are_served(tmp_path: Path) -> None:
    """A checkpoint with another vocabulary: text is a clear 400, ids work."""
    async with run_daemon(tmp_path, "vocab=1000") as daemon:
        await daemon.ok("POST", "/v1/sessions", {"id": "a"})
        for path, body in [
            (GENERATE, {"text": "hi"}),
            (GENERATE, {"messages": USER}),
            (GENERATE, {"token_ids": [5], "stop": "x"}),
            (CHAT, {"messages": USER}),
            (COMPLETE, {"prompt": "hi"}),
            ("/tokenize", {"text": "hi"}),
        ]:
            status, found, _ = await daemon.call("POST", path, body)
            assert (status, found["error"]["code"]) == (400, "unsupported_combination"), path
        await daemon.ok("POST", COMPLETE, {"prompt": [5, 6], "max_tokens": 2})


@pytest.mark.parametrize("code", sorted(errors.error_classes()))
def test_every_error_has_its_status_and_says_when_to_come_back(code: str) -> None:
    """The wire form of each error of the tree: status, code, Retry-After or no-retry."""
    error = errors.from_code(code, "why", param="p")
    response = error_response(error)
    assert response.status == error.status >= 400
    assert f'"code":"{code}"'.encode() in bytes(response.body or b"")
    if isinstance(error, errors.Refused | errors.Unavailable):
        assert int(response.headers["Retry-After"]) >= 1
    else:
        assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("code", ["queue_full", "host_pool_exhausted", "exceeds_capacity"])
async def test_the_engines_refusals_keep_their_status_also_for_streams(
    tmp_path: Path, code: str
) -> None:
    """A refusal before the first token is an HTTP error, not a broken stream."""
    async with run_daemon(tmp_path, f"refuse={code}") as daemon:
        await daemon.ok("POST", "/v1/sessions", {"id": "a"})
        want = errors.from_code(code, "").status
        for path, body in [
            (GENERATE, {"token_ids": [5]}),
            (GENERATE, {"token_ids": [5], "stream": True}),
            (COMPLETE, {"prompt": [5], "stream": True}),
            (CHAT, {"messages": USER, "stream": True}),
        ]:
            status, found, response = await daemon.call("POST", path, body)
            assert (status, found["error"]["code"]) == (want, code)
            assert response.headers.get("Retry-After") == "2"
        assert (await daemon.ok("GET", "/v1/sessions/a"))["tokens"] == 0
        assert not daemon.service.running
        await asyncio.sleep(0)


async def test_an_append_that_is_refused_appends_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many operations run as may: 429 says that nothing was done."""
    await daemon.ok("POST", "/v1/sessions", {"id": "a"})
    monkeypatch.setattr(operations, "OPERATIONS_MAX", 0)
    for path, body in ("/v1/sessions/a/append", {}), ("/v1/sessions", {"id": "b"}):
        status, found, _ = await daemon.call("POST", path, body | {"token_ids": [5]})
        assert (status, found["error"]["code"]) == (429, "queue_full")
    await daemon.until(lambda: daemon.service.sessions.find("", "b") is None)
    session = daemon.service.sessions.get("", "a")
    assert (session.is_busy, session.length) == (False, 0)
