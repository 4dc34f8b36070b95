"""Two daemons, each a process with its engine, on one store: one's prefix is the other's hit.

``TEST_SHARED_TOKENS=65536`` for the length of the issue; by default it is short.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import redis_servers
from live_daemon import CLI, ENVIRON, Live, live_daemon, until
from lmcache_cases import needs_lmcache

TOKENS = int(os.environ.get("TEST_SHARED_TOKENS", "4096"))
WAIT_S = 240 + TOKENS // 64  # for a call that computes them, on a busy machine
MOST = 0.99
QUESTION = [11, 22, 33]
ROOM = {"host_budget": "512MiB", "device_budget": "256MiB", "max_batch": 2, "chunk_tokens": 512}
RESUME, SUSPEND = "/resume?wait=true", "/suspend?wait=true"
pytestmark = pytest.mark.timeout(60 + 2 * WAIT_S)


def fs_native(folder: Path) -> str:
    folder.mkdir()
    return "lmcache:" + json.dumps({"type": "fs_native", "base_path": str(folder)})


STORES: dict[str, Callable[[Path], str]] = {
    "redis": lambda _: redis_servers.emptied().url,
    "lmcache": fs_native,
    "tiered": lambda folder: f"disk:{folder}-NAME,{redis_servers.emptied().url}",
}
LMCACHE = pytest.param("lmcache", marks=needs_lmcache)


@dataclass(frozen=True)
class Two:
    """Daemon A, which has computed; daemon B, which starts when asked; a store of both."""

    folder: Path
    model: Path
    kind: str
    spec: str

    @asynccontextmanager
    async def daemon(self, name: str, **settings: Any) -> AsyncIterator[Live]:
        folder = self.folder / name
        folder.mkdir()
        given = {"store": self.spec.replace("NAME", name), "name": name, **ROOM, **settings}
        async with live_daemon(folder, self.model, read_s=WAIT_S, **given) as live:
            yield live


@pytest.fixture
def two(tmp_path: Path, tiny: Path, request: pytest.FixtureRequest) -> Two:
    kind = getattr(request, "param", "redis")
    return Two(tmp_path, tiny, kind, STORES[kind](tmp_path / "store"))


def on(*kinds: Any) -> pytest.MarkDecorator:
    """On stores of these kinds."""
    return pytest.mark.parametrize("two", kinds, indirect=True)


def words(seed: int, count: int = TOKENS + 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 129_000) for _ in range(count)]


async def computed(live: Live, prefix: list[int]) -> list[int]:
    """A session of the prefix, computed and written; what the model says to the question."""
    usage = await live.create("mine", prefix)
    assert usage["computed_tokens"] >= TOKENS, "nobody had it"
    answer = await live.generate("mine", QUESTION)
    await live.at_rest(WAIT_S)
    return list(answer["token_ids"])


async def seen(live: Live, prefix: list[int]) -> None:
    """Wait until a daemon's catalogue has all blocks of the prefix."""
    async with asyncio.timeout(60):
        while True:
            found = await live.ok("POST", "/v1/prefixes/lookup", {"token_ids": prefix})
            if found["matched_tokens"] >= MOST * len(prefix):
                return
            await asyncio.sleep(0.1)


async def hit(live: Live, prefix: list[int], tier: str = "store") -> list[int]:
    """Another session on the prefix: nearly all of it is cached there. Its answer."""
    usage = await live.create("other", prefix)
    found = usage["cached_tokens_details"][tier]
    assert found >= MOST * len(prefix), usage
    assert usage["computed_tokens"] <= (1 - MOST) * len(prefix)
    return list((await live.generate("other", QUESTION))["token_ids"])


@on("redis", LMCACHE)
async def test_a_prefix_of_one_is_the_others_hit(two: Two) -> None:
    """>= 99 % from the store, tokens equal, while A lives."""
    prefix = words(1)
    async with two.daemon("a") as a, two.daemon("b") as b:
        said = await computed(a, prefix)
        await seen(b, prefix)
        assert await hit(b, prefix) == said


@on("redis", LMCACHE, "tiered")
async def test_the_same_when_the_first_was_killed(two: Two) -> None:
    """SIGKILL to A, and its engine goes with it; B starts afterwards."""
    prefix = words(2)
    async with two.daemon("a") as a:
        said = await computed(a, prefix)
        if two.kind == "tiered":  # only a suspend waits for the remote
            await a.ok("POST", "/v1/sessions/mine" + SUSPEND, {})
        await a.kill()
    async with two.daemon("b") as b:
        await seen(b, prefix)
        assert await hit(b, prefix) == said


def cli(*arguments: object) -> Any:
    done = subprocess.run(
        [*CLI, *map(str, arguments), "--json"],
        check=False, capture_output=True, text=True, env=ENVIRON, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


@on("redis", LMCACHE)
async def test_the_same_from_a_file(two: Two) -> None:
    """Exported from the store of A, imported into the folder of another machine's daemon."""
    prefix = words(3)
    async with two.daemon("a") as a:
        said = await computed(a, prefix)
    ids, file, folder = (two.folder / name for name in ("ids", "prefix.bundle", "elsewhere"))
    np.array(prefix, "<i4").tofile(ids)
    told = await asyncio.to_thread(cli, "store", "export", two.spec, file, "--tokens", ids)
    assert told["pages"] == TOKENS // 256
    await asyncio.to_thread(cli, "store", "import", file, folder, "--adopt")
    async with two.daemon("b", store=f"disk:{folder}") as b:
        assert await hit(b, prefix) == said


async def test_a_warmed_prefix_is_hit_from_host_memory(two: Two) -> None:
    """``prefixes warm`` on B brings A's prefix up; the session that comes reads no store."""
    prefix = words(4)
    async with two.daemon("a") as a, two.daemon("b") as b:
        said = await computed(a, prefix)
        await seen(b, prefix)
        ids = two.folder / "ids"
        np.array(prefix, "<i4").tofile(ids)
        told = await asyncio.to_thread(cli, "prefixes", "warm", ids, "--ids", "--url", b.url)
        assert told == {
            "prompt_tokens": TOKENS + 1,
            "host_tokens": TOKENS,
            "loaded_tokens": TOKENS,
        }
        assert await hit(b, prefix, "host") == said


@on("redis", "tiered")
async def test_a_session_is_suspended_here_and_resumed_there(two: Two) -> None:
    """Words, pages and tail: B goes on where A stopped, and computes the new tokens only."""
    prefix = words(5)
    async with two.daemon("a") as a, two.daemon("b") as b:
        await computed(a, prefix)
        length = (await a.ok("GET", "/v1/sessions/mine"))["tokens"]
        await a.ok("POST", "/v1/sessions/mine" + SUSPEND, {})
        resumed = await b.ok("POST", "/v1/sessions/mine" + RESUME, {})
        assert resumed["tokens"] == length
        answer = await b.generate("mine", QUESTION)
        usage = answer["usage"]
        assert usage["computed_tokens"] <= len(QUESTION) + 1
        assert usage["replayed_tokens"] == 0
        status, found, _ = await a.call("POST", "/v1/sessions/mine/generate", {"max_tokens": 1})
        assert (status, found["error"]["code"]) == (409, "session_busy")
        assert "'b-" in found["error"]["message"]
        twin = await a.ok("POST", "/v1/sessions/mine/fork", {"id": "twin"})
        assert twin["tokens"] == length
        assert (await a.generate("twin", QUESTION))["token_ids"] == answer["token_ids"]


async def test_a_session_whose_daemon_dies_goes_on_from_its_last_record(two: Two) -> None:
    """SIGKILL while it runs: refused until the lease ends, then as it was suspended; A is told."""
    prefix = words(6, 700)
    async with two.daemon("a", lease_s=3.0) as a, two.daemon("b", lease_s=3.0) as b:
        await a.create("mine", prefix)
        await a.ok("POST", "/v1/sessions/mine" + SUSPEND, {})
        answer = (await a.generate("mine", QUESTION, 4))["token_ids"]
        running = asyncio.create_task(a.call("POST", "/v1/sessions/mine/generate", {}))
        await asyncio.sleep(0.3)
        await a.kill()
        await asyncio.gather(running, return_exceptions=True)
        status, found, _ = await b.call("POST", "/v1/sessions/mine" + RESUME, {})
        assert (status, found["error"]["code"]) == (409, "session_busy")
        assert "'a-" in found["error"]["message"]
        await taken(b)
        assert (await b.ok("GET", "/v1/sessions/mine"))["tokens"] == len(prefix)
        assert (await b.generate("mine", QUESTION, 4))["token_ids"] == answer
        await b.generate("mine", [44], 4)  # A had no such words
        await b.ok("POST", "/v1/sessions/mine" + SUSPEND, {})
        await a.start()
        status, found, _ = await a.call("POST", "/v1/sessions/mine/generate", {"max_tokens": 1})
        assert (status, found["error"]["code"]) == (412, "precondition_failed")
        back = await a.ok("POST", "/v1/sessions/mine" + RESUME, {})
        assert back["tokens"] == len(prefix) + len(QUESTION) + 4 + 1 + 4


async def taken(live: Live) -> None:
    """Wait until a daemon may have the session."""
    async with asyncio.timeout(60):
        while (await live.call("POST", "/v1/sessions/mine" + RESUME, {}))[0] != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


async def test_an_owner_that_was_stopped_is_fenced(two: Two) -> None:
    """SIGSTOP past the lease while it generates, SIGCONT when B has gone on: A's request fails."""
    prefix = words(7, 700)
    async with two.daemon("a", lease_s=2.0) as a, two.daemon("b", lease_s=2.0) as b:
        await a.create("mine", prefix)
        await a.ok("POST", "/v1/sessions/mine" + SUSPEND, {})
        body = {"max_tokens": 4000, "ignore_eos": True, "token_ids": QUESTION}
        running = asyncio.create_task(a.call("POST", "/v1/sessions/mine/generate", body))
        await until(lambda: _owner_is("a"))
        assert a.process is not None
        a.process.send_signal(19)  # the daemon stops; its engine draws on
        await taken(b)
        answer = (await b.generate("mine", QUESTION, 4))["token_ids"]
        a.process.send_signal(18)
        status, found, _ = await running
        assert (status, found["error"]["code"]) == (409, "session_busy")
        assert (await a.ok("GET", "/v1/sessions/mine"))["tokens"] == len(prefix)
        twin = await a.ok("POST", "/v1/sessions/mine/fork", {"id": "twin"})
        assert twin["tokens"] == len(prefix)
        assert (await a.generate("twin", QUESTION, 4))["token_ids"] == answer


def _owner_is(name: str) -> bool:
    with redis_servers.current().client as client:
        held = [client.get(key) or b"" for key in client.keys("tierd:1:lease:*:by")]
    return any(f" {name}-".encode() in claim for claim in held)
