"""kill -9, of the engine and of the daemon: no session is lost, no token differs."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import aiohttp

from dsv4_tierd.engine.model.transformer import Transformer
from live_daemon import CLI, ENVIRON, Live, live_daemon, until
from world import World

NAMES = "abcd"
STORED = "ab"  # acknowledged as stored before the kill
PROMPT = 3_000
QUESTION = [11, 12, 13]
SUSPEND = "/v1/sessions/a/suspend?wait=true"
DRAWN = 24


def words(seed: int, count: int = PROMPT) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 512) for _ in range(count)]


async def load(live: Live) -> None:
    """Four sessions; two of them are in the store."""
    for n, name in enumerate(NAMES):
        await live.create(name, words(n))
    for name in STORED:
        await live.ok("POST", f"/v1/sessions/{name}/suspend?wait=true", {"tier": "store"})


@functools.cache
def undisturbed(model: Path) -> dict[str, list[int]]:
    """What each session answers where nothing happens: one engine, no daemon."""
    world = World(Transformer.load(model), model)
    answers = (world.generate(world.open(words(n)), QUESTION, DRAWN) for n in range(len(NAMES)))
    return {name: answer.token_ids for name, answer in zip(NAMES, answers, strict=True)}


async def collect(live: Live, name: str, into: list[tuple[str, Any]]) -> None:
    async for event in live.events(name, [5], 20_000):
        into.append(event)  # noqa: PERF401  seen while it comes


async def go_on(live: Live, answers: dict[str, list[int]]) -> None:
    """Every session is there, and answers as if nothing had been."""
    for name in NAMES:
        found = await live.ok("GET", f"/v1/sessions/{name}")
        assert found["tokens"] == PROMPT
        answer = await live.generate(name, QUESTION, DRAWN)
        assert answer["token_ids"] == answers[name], name
        usage = answer["usage"]
        tiers = usage["cached_tokens_details"]
        assert sum(tiers.values()) + usage["computed_tokens"] == usage["prompt_tokens"]
        assert usage["prompt_tokens"] == PROMPT + len(QUESTION)
        if name in STORED:
            assert tiers["store"] >= 0.99 * PROMPT


async def test_the_engine_is_killed_while_four_sessions_stream(tmp_path: Path, micro: Path) -> None:
    """Streams end with engine_restarting, new calls are 503, it comes back, nothing is lost."""
    answers = undisturbed(micro)
    async with live_daemon(tmp_path, micro) as live:
        await load(live)
        seen: dict[str, list[tuple[str, Any]]] = {name: [] for name in NAMES}
        streams = [asyncio.create_task(collect(live, name, seen[name])) for name in NAMES]
        await until(lambda: all(sum(e[0] == "tokens" for e in s) > 5 for s in seen.values()))
        dead = await live.kill_engine()
        await asyncio.gather(*streams)
        for events in seen.values():
            name, data = events[-1]
            assert (name, data["error"]["code"]) == ("error", "engine_restarting")
        status, found, response = await live.call(
            "POST", "/v1/sessions/a/generate", {"max_tokens": 1}
        )
        assert (status, found["error"]["code"]) == (503, "engine_restarting")
        assert int(response.headers["Retry-After"]) >= 1
        assert (await live.call("GET", "/ready"))[0] == 503
        assert (await live.call("GET", "/health"))[0] == 200
        await live.engine_back(dead)
        assert (await live.ok("GET", "/ready"))["engine_restarts"] == 1
        await go_on(live, answers)
        metrics = await live.metrics()
        assert metrics["tierd_engine_restarts_total"] == 1


async def test_the_daemon_is_killed_while_four_sessions_stream(tmp_path: Path, micro: Path) -> None:
    """Its engine goes with it; a daemon on the same state folder has every session."""
    answers = undisturbed(micro)
    async with live_daemon(tmp_path, micro) as live:
        await load(live)
        seen: dict[str, list[tuple[str, Any]]] = {name: [] for name in NAMES}
        streams = [asyncio.create_task(collect(live, name, seen[name])) for name in NAMES]
        await until(lambda: all(sum(e[0] == "tokens" for e in s) > 5 for s in seen.values()))
        await live.kill()
        ended = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(error, aiohttp.ClientError) for error in ended), ended
        assert not any(name == "done" for events in seen.values() for name, _ in events)
        await live.start()
        await go_on(live, answers)


async def test_a_prefill_that_was_interrupted_goes_on_from_its_pages(
    tmp_path: Path, micro: Path
) -> None:
    """The same long prompt again: what the dead engine had stored is not computed."""
    prompt = words(9, 30_000)
    async with live_daemon(tmp_path, micro) as live:
        await live.ok("POST", "/v1/sessions", {"id": "a"})
        seen: list[tuple[str, Any]] = []

        async def read() -> None:
            async for event in live.events("a", prompt, 4):
                seen.append(event)  # noqa: PERF401  seen while it comes

        reading = asyncio.create_task(read())
        await until(lambda: any(n == "progress" and d["done"] > 15_000 for n, d in seen))
        dead = await live.kill_engine()
        await reading
        assert seen[-1][1]["error"]["code"] == "engine_restarting"
        assert (await live.ok("GET", "/v1/sessions/a"))["tokens"] == 0  # as it was
        await live.engine_back(dead)
        usage = (await live.generate("a", prompt, 4))["usage"]
        assert usage["cached_tokens_details"]["store"] > 10_000
        assert usage["computed_tokens"] < 20_000


def stored(live: Live) -> list[dict[str, Any]]:
    """`store ls` of a stopped daemon's folder."""
    command = [*CLI, "store", "ls", "--json", str(live.store)]
    done = subprocess.run(command, capture_output=True, check=True, env=ENVIRON, text=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


async def test_delete_removes_what_was_its_alone(tmp_path: Path, micro: Path) -> None:
    """A deleted session's pages and tail leave the store; a prefix that another shares stays."""
    shared = words(1, 1024)
    async with live_daemon(tmp_path, micro) as live:
        await live.create("a", shared + words(2, 1024))
        await live.create("b", shared + words(3, 1024))
        await live.create("c", words(4, 600))
        for name in "abc":
            await live.ok("POST", f"/v1/sessions/{name}/suspend?wait=true", {"tier": "store"})
        await live.stop()
        kinds = [o["kind"] for o in stored(live)]
        assert kinds.count("PAGE") == 4 + 3 + 3 + 2  # the last token of each is pending
        assert kinds.count("TAIL") == 3
        await live.start()
        await live.ok("DELETE", "/v1/sessions/b")
        await live.ok("DELETE", "/v1/sessions/c")
        status, found, _ = await live.call("GET", "/v1/sessions/b")
        assert (status, found["error"]["code"]) == (404, "session_not_found")
        for gone in (shared + words(3, 1024), words(4, 600)):
            looked = await live.ok("POST", "/v1/prefixes/lookup", {"token_ids": gone})
            assert looked["matched_tokens"] == (1024 if gone[:1024] == shared else 0)
        await live.stop()
        kinds = [o["kind"] for o in stored(live)]
        assert kinds.count("PAGE") == 4 + 3
        assert kinds.count("TAIL") == 1
        await live.start()
        usage = (await live.generate("a", [5], 2))["usage"]
        assert usage["cached_tokens_details"]["store"] >= 0.99 * 2048
        again = await live.create("d", words(4, 600))
        assert again["computed_tokens"] == 599


async def test_the_engine_comes_back_though_its_store_cannot_be_opened(
    tmp_path: Path, micro: Path
) -> None:
    """A cache that is gone costs computing, not the service; it is used again once it is back."""
    answers = undisturbed(micro)
    async with live_daemon(tmp_path, micro) as live:
        await load(live)
        away = tmp_path / "away"
        live.store.rename(away)
        live.store.write_text("no folder")
        dead = await live.kill_engine()
        await live.engine_back(dead)
        assert not (await live.gauges())["store_objects"]
        for name in NAMES:
            answer = await live.generate(name, QUESTION, DRAWN)
            assert answer["token_ids"] == answers[name], name
            assert answer["usage"]["cached_tokens_details"]["store"] == 0
        live.store.unlink()
        away.rename(live.store)
        status, found, _ = await live.call("POST", SUSPEND, {"tier": "store"})
        assert (status, found["error"]["code"]) == (503, "store_unavailable")
        assert "could not be opened yet" in found["error"]["message"]
        async with asyncio.timeout(60):
            while (  # noqa: ASYNC110  another process's state
                await live.call("POST", SUSPEND, {"tier": "store"})
            )[0] != 200:
                await asyncio.sleep(0.5)
        assert (await live.gauges())["store_objects"] >= PROMPT // 256
