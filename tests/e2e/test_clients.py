"""Clients that leave, stall or send nonsense, on the real engine; and gauges that stay honest."""

from __future__ import annotations

import asyncio
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from live_daemon import Live, Reader, live_daemon, until


def words(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 512) for _ in range(count)]


def usage_of(events: list[tuple[str, Any]]) -> dict[str, Any]:
    name, data = events[-1]
    assert name == "done", events[-1]
    found: dict[str, Any] = data["usage"]
    return found


async def idle(live: Live, name: str, timeout_s: float = 60.0) -> dict[str, Any]:
    async with asyncio.timeout(timeout_s):
        while True:
            found: dict[str, Any] = await live.ok("GET", f"/v1/sessions/{name}")
            if found["state"] == "idle":
                return found
            await asyncio.sleep(0.01)


async def test_a_client_that_leaves_mid_stream_costs_nothing_more(
    tmp_path: Path, micro: Path
) -> None:
    """A disconnect in decode or prefill cancels within a step; pages are back, words are kept."""
    async with live_daemon(tmp_path, micro) as live:
        await live.create("a", words(1, 1000))
        await live.at_rest()
        drawn = 0
        async for name, data in live.events("a", [5], 20_000):
            drawn += len(data["token_ids"]) if name == "tokens" else 0
            if drawn >= 10:
                break  # leaves the stream's context: the connection closes
        kept = (await idle(live, "a"))["tokens"]
        assert 1001 + 10 <= kept < 1001 + 10 + 300  # at most the credit more
        steps = (await live.counters())["steps"]
        await asyncio.sleep(0.3)
        assert (await live.counters())["steps"] == steps  # it computes nothing for nobody
        async for name, data in live.events("a", words(2, 30_000), 4):
            if name == "progress" and data["done"] > 1000:
                break
        await idle(live, "a")
        gauges = await live.at_rest()
        assert gauges["requests_running"] == 0
        cached = gauges["host_pages_cached"] + gauges["host_pages_idle_tails"]
        assert gauges["host_pages_free"] + cached == gauges["host_pages_capacity"]
        assert (await live.counters())["requests_cancelled"] == 2
        twin = await live.ok("POST", "/v1/sessions/a/fork", {"id": "b", "at": kept})
        assert twin["tokens"] == kept
        await live.ok("POST", "/v1/sessions/a/rewind", {"to": kept})
        one, two = await asyncio.gather(live.generate("a", [7], 6), live.generate("b", [7], 6))
        assert one["token_ids"] == two["token_ids"]


async def test_a_reader_who_stops_parks_only_its_own_session(tmp_path: Path, micro: Path) -> None:
    """Tokens stop at the credit, others are served meanwhile, and reading on gets every token."""
    async with live_daemon(tmp_path, micro, stream_credit_tokens=16) as live:
        await live.create("a", words(1, 300))
        await live.create("b", words(2, 300))
        count = 400  # tokens with twenty alternatives each: more than the sockets hold
        body = {"token_ids": [5], "max_tokens": count, "ignore_eos": True, "stream": True,
                "logprobs": 20}  # fmt: skip
        reader = Reader(live.url, "/v1/sessions/a/generate", json.dumps(body).encode())
        try:
            await asyncio.sleep(1.0)
            drawn = -1.0
            async with asyncio.timeout(60):
                while drawn != (drawn := (await live.counters())["tokens_generated"]):  # noqa: ASYNC110
                    await asyncio.sleep(0.5)
            assert 16 < drawn < count
            assert (await live.gauges())["requests_decoding"] == 1  # parked, not ended
            answer = await live.generate("b", [5], 40)
            assert len(answer["token_ids"]) == 40
            assert (await live.counters())["tokens_generated"] == drawn + 40
            text = await asyncio.to_thread(lambda: b"".join(reader.pieces()))
        finally:
            reader.close()
        assert text.count(b"event: tokens") == count
        assert b"event: done" in text
        assert (await live.ok("GET", "/v1/sessions/a"))["tokens"] == 301 + count


async def test_a_long_prompt_does_not_stop_those_who_stream(tmp_path: Path, micro: Path) -> None:
    """While a long prompt is read its stream shows progress and a running session's tokens come."""
    async with live_daemon(tmp_path, micro, keepalive_s=0.05) as live:
        await live.create("a", words(1, 300))
        await live.ok("POST", "/v1/sessions", {"id": "b"})
        reading: list[tuple[str, Any]] = []
        tokens_meanwhile = 0

        async def read() -> None:
            async for event in live.events("b", words(2, 4_000), 2):
                reading.append(event)  # noqa: PERF401  seen while it comes

        task = asyncio.create_task(read())
        await until(lambda: any(name == "progress" for name, _ in reading))
        async for name, _ in live.events("a", [5], 20_000):
            tokens_meanwhile += name == "tokens" and not task.done()
            if task.done():
                break
        await task
        assert tokens_meanwhile >= 20
        progress = [data for name, data in reading if name == "progress"]
        assert [p["done"] for p in progress] == sorted({p["done"] for p in progress})
        assert len(progress) >= 10
        assert progress[-1]["total"] == 4_000
        assert any(text == "keep-alive" for name, text in reading if name == "")
        usage = usage_of(reading)
        assert usage["computed_tokens"] == 4_000


JSON = {"Content-Type": "application/json"}
NONSENSE: list[tuple[str, str, Any, int, str]] = [
    # verb, path, body (bytes: raw), status, code
    ("POST", "/v1/sessions/empty/generate", {"token_ids": []}, 400, "invalid_request"),
    ("POST", "/v1/sessions/empty/generate", {}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/generate", {"token_ids": [512]}, 400, "invalid_token_ids"),
    ("POST", "/v1/sessions/a/generate", {"token_ids": [-1]}, 400, "invalid_token_ids"),
    ("POST", "/v1/sessions/a/generate", {"token_ids": [1 << 40]}, 400, "invalid_token_ids"),
    ("POST", "/v1/sessions/a/generate", {"token_ids": ["5"]}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/generate", {"text": "hello"}, 400, "unsupported_combination"),
    ("POST", "/v1/sessions/a/generate", {"max_tokens": 0}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/generate", {"max_tokens": -5}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/generate", {"max_tokens": 1 << 29}, 400, "context_length_exceeded"),
    ("POST", "/v1/sessions/a/generate", b'{"temperature": NaN}', 400, "invalid_request"),
    ("POST", "/v1/sessions/a/generate", b'{"temperature": 1e999}', 400, "invalid_request"),
    ("POST", "/v1/sessions/a/generate", {"temperature": -1}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/generate", {"top_p": 0}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/generate", {"stop": ["x"]}, 400, "unsupported_combination"),
    ("POST", "/v1/sessions/a/generate", {"stop_token_ids": [512]}, 400, "invalid_token_ids"),
    ("POST", "/v1/sessions/a/generate", {"colour": "red"}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/generate", {"expected_tokens": 7}, 412, "precondition_failed"),
    ("POST", "/v1/sessions/a/generate", b"[" * 200_000, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/generate", b"\xff\xfe", 400, "invalid_request"),
    ("POST", "/v1/sessions/a/append", {}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/append", {"token_ids": []}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/rewind", {"to": 101}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/rewind", {"to": -1}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/fork", {"at": 101}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/fork", {"id": "a"}, 409, "session_exists"),
    ("POST", "/v1/sessions/a/fork", {"id": "../../etc/passwd"}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/suspend", {"tier": "tape"}, 400, "invalid_request"),
    ("POST", "/v1/sessions/a/suspend?wait=perhaps", {}, 400, "invalid_request"),
    ("DELETE", "/v1/sessions/a/pin", None, 409, "not_pinned"),
    ("POST", "/v1/sessions", {"id": "a/../b"}, 400, "invalid_request"),
    ("POST", "/v1/sessions", {"id": ""}, 400, "invalid_request"),
    ("POST", "/v1/sessions", {"id": "b", "ttl": -1}, 400, "invalid_request"),
    ("POST", "/v1/sessions", {"id": "b", "token_ids": [9999]}, 400, "invalid_token_ids"),
    ("POST", "/v1/sessions", {"id": "a"}, 409, "session_exists"),
    ("GET", "/v1/sessions/a?cache_salt=other", None, 404, "session_not_found"),
    ("DELETE", "/v1/sessions/a?cache_salt=other", None, 404, "session_not_found"),
    ("POST", "/v1/sessions/a/generate?cache_salt=other", {}, 404, "session_not_found"),
    ("GET", "/v1/sessions/..%2f..%2fetc%2fpasswd", None, 400, "invalid_request"),
    ("POST", "/v1/completions", {"prompt": []}, 400, "invalid_request"),
    ("POST", "/v1/completions", {"prompt": [600], "max_tokens": 1}, 400, "invalid_token_ids"),
    ("POST", "/v1/completions", {"prompt": [5], "n": 0}, 400, "invalid_request"),
    ("POST", "/v1/completions", {"prompt": [5], "model": "gpt-9"}, 404, "not_found"),
    ("POST", "/v1/completions", {"prompt": [5], "echo": True}, 400, "unsupported_combination"),
    ("POST", "/v1/prefixes/lookup", {}, 400, "invalid_request"),
    ("POST", "/v1/nothing", {}, 404, "not_found"),
    ("PUT", "/v1/sessions/a/generate", {}, 405, "method_not_allowed"),
]


async def test_bad_input_is_a_clear_error_and_changes_nothing(tmp_path: Path, micro: Path) -> None:
    """Each gets its own 4xx, in the envelope; the session and the tiers are as they were."""
    async with live_daemon(tmp_path, micro) as live:
        await live.create("a", words(1, 100))
        await live.ok("POST", "/v1/sessions", {"id": "empty"})
        session = await live.ok("GET", "/v1/sessions/a")
        gauges = await live.at_rest()
        counters = await live.counters()
        wrong = []
        for verb, path, body, status, code in NONSENSE:
            more = {"data": body, "headers": JSON} if isinstance(body, bytes) else {}
            given = None if isinstance(body, bytes) else body
            got, found, _ = await live.call(verb, path, given, **more)
            error = found.get("error", {})
            if (got, error.get("code")) != (status, code) or not error.get("message"):
                wrong.append((verb, path, str(body)[:60], got, found))
        assert not wrong
        big = await live.call(
            "POST", "/v1/sessions/a/append", data=io.BytesIO(b"x" * (100 << 20)), headers=JSON
        )
        assert (big[0], big[1]["error"]["code"]) == (413, "body_too_large")
        assert await live.ok("GET", "/v1/sessions/a") == session
        assert [s["id"] for s in (await live.ok("GET", "/v1/sessions"))["data"]] == ["a", "empty"]
        assert await live.at_rest() == gauges
        after = await live.counters()
        assert after["tokens_computed"] == counters["tokens_computed"]
        assert len((await live.generate("a", [5], 3))["token_ids"]) == 3


def parts(metrics: dict[str, float], tier: str) -> float:
    names = ["free", "cached", "running", "idle_tails"] + ["pinned"] * (tier == "host")
    return sum(metrics[f"tierd_{tier}_pages_{name}"] for name in names)


async def test_metrics_are_honest(tmp_path: Path, micro: Path) -> None:
    """States sum to the capacity at any time, counters never fall, idle gauges are 0, sums fit."""
    async with live_daemon(tmp_path, micro) as live:
        await live.create("a", words(1, 1500))
        usages: list[dict[str, Any]] = []

        async def work(n: int) -> None:
            name = f"w{n}"
            await live.ok("POST", "/v1/sessions/a/fork", {"id": name})
            for turn in range(3):
                answer = await live.generate(name, words(10 * n + turn, 200), 12)
                usages.append(answer["usage"])

        working = asyncio.gather(*(work(n) for n in range(4)))
        before: dict[str, float] = {}
        scrapes = 0
        while not working.done():
            now = await live.metrics()
            scrapes += 1
            for tier in ("host", "device"):
                assert parts(now, tier) == now[f"tierd_{tier}_pages_capacity"]
            falling = [
                name
                for name, value in before.items()
                if "_total" in name and now.get(name, 0.0) < value
            ]
            assert not falling
            before = now
            await asyncio.sleep(0.02)
        await working
        assert scrapes >= 5
        dead = await live.kill_engine()
        await live.engine_back(dead)
        await live.generate("w0", [5], 2)
        await live.at_rest()
        now = await live.metrics()
        falling = [n for n, v in before.items() if "_total" in n and now.get(n, 0.0) < v]
        assert not falling  # not even over a restart
        for name in ("requests_queued", "requests_running", "requests_decoding",
                     "host_pages_running", "device_pages_running", "host_pages_pinned",
                     "store_writes_pending", "operations_running"):  # fmt: skip
            assert now[f"tierd_{name}"] == 0, name
        for usage in usages:
            found = sum(usage["cached_tokens_details"].values())
            assert found + usage["computed_tokens"] == usage["prompt_tokens"]
        sources = ("device", "host", "store", "computed")
        by_source = [now[f'tierd_prompt_tokens_total{{source="{s}"}}'] for s in sources]
        last_prompt = (await live.ok("GET", "/v1/sessions/w0"))["tokens"] - 2
        total = 1499 + sum(usage["prompt_tokens"] for usage in usages) + last_prompt
        assert sum(by_source) == total


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_anything_was_said_is_harmless(
    tmp_path: Path, micro: Path, stream: bool
) -> None:
    """Forty clients connect, ask and go at once; the daemon ends with nothing running."""
    async with live_daemon(tmp_path, micro) as live:
        await live.create("a", words(1, 600))
        body = json.dumps({"prompt": words(1, 900), "max_tokens": 500, "stream": stream}).encode()
        for _ in range(40):
            Reader(live.url, "/v1/completions", body).close()
        gauges = await live.at_rest()
        assert gauges["sessions_open"] == 1
        assert len((await live.generate("a", [5], 3))["token_ids"]) == 3
