"""A daemon is killed while it writes to each kind of store: what it acknowledged is stored."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import pytest

import redis_servers
from dsv4_tierd.tiering.blocks import Transcript, chain_root
from dsv4_tierd.tiering.errors import StoreUnavailable
from dsv4_tierd.tiering.store.disk import ObjectInfo
from dsv4_tierd.tiering.store.maintain import Maintained, opened_for_care
from dsv4_tierd.tiering.store.open import identities_of, parse_spec
from dsv4_tierd.tiering.store.protocol import ObjectKind
from live_daemon import Live, live_daemon, until
from lmcache_cases import needs_lmcache

KILLS = int(os.environ.get("TEST_KILLS", "1"))
SPECS: dict[str, Callable[[Path], str]] = {
    "disk": lambda folder: f"disk:{folder}",
    "redis": lambda _: redis_servers.emptied().url,
    "lmcache_fs_native": lambda folder: (
        "lmcache:" + json.dumps({"type": "fs_native", "base_path": str(folder)})
    ),
    "tiered": lambda folder: f"disk:{folder},{redis_servers.emptied().url}",
}


@dataclass
class Load:
    """Sessions that a client makes and suspends until the daemon dies."""

    chance: random.Random
    made: dict[str, list[int]] = field(default_factory=dict)
    stored: list[str] = field(default_factory=list)  # acknowledged

    async def run(self, live: Live) -> None:
        with contextlib.suppress(aiohttp.ClientError):
            while True:
                name = f"s{len(self.made)}"
                length = self.chance.choice([768, 1024, self.chance.randrange(300, 3000)])
                ids = [self.chance.randrange(2, 512) for _ in range(length)]
                self.made[name] = ids
                made = {"id": name, "token_ids": ids}
                if not await self.done(live, "/v1/sessions?wait=true", made):
                    return
                suspend = f"/v1/sessions/{name}/suspend?wait=true"
                if not await self.done(live, suspend, {"tier": "store"}):
                    return
                self.stored.append(name)

    async def done(self, live: Live, path: str, body: object) -> bool:
        """Whether it was acknowledged; only the engine's end may keep it from that."""
        status, found, _ = await live.call("POST", path, body)
        assert status < 300 or "engine_restarting" in str(found), found
        return status < 300


@pytest.mark.timeout(60 + 30 * KILLS)
@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=needs_lmcache if "lmcache" in k else ()) for k in SPECS]
)
async def test_kill_nine_of_a_daemon_that_writes(kind: str, tmp_path: Path, micro: Path) -> None:
    """Reading everything finds nothing wrong; every acknowledged session has all its blocks.

    No block is visible that no session had. The engine, which writes, is killed first, or is left
    to find out that its daemon is gone. ``$TEST_KILLS`` says how often (1).
    """
    chance = random.Random(KILLS)
    load = Load(chance)
    (tmp_path / "kept").mkdir()
    spec = SPECS[kind](tmp_path / "kept")
    async with live_daemon(tmp_path, micro, store=spec) as live:
        for life in range(KILLS):
            if live.process is None:
                await live.start()
            engine = await live.engine_pid()
            clients = [asyncio.create_task(load.run(live)) for _ in range(2)]
            if not load.stored:  # however slow the machine is: there is something to keep
                await until(lambda c=clients: load.stored or any(each.done() for each in c), 60)
            await asyncio.sleep(chance.uniform(0.0, 2.0))
            if life % 2 == 0:
                os.kill(engine, signal.SIGKILL)
            await live.kill(engine)
            await asyncio.gather(*clients)
            check(spec, load)
    assert load.stored, "nothing was ever acknowledged"


def check(spec: str, load: Load) -> None:
    """What the tiers hold between them, against what was acknowledged."""
    with opened_soon(spec) as tiers:
        assert [tier.verify().bad for tier in tiers] == [()] * len(tiers)
        found = [list(tier.list_objects()) for tier in tiers]
    pages = {info.digest for each in found for info in each if info.kind is ObjectKind.PAGE}
    tails = {info.digest for each in found for info in each if info.kind is ObjectKind.TAIL}
    for each in found:
        assert_rooted(each)
    [identity] = identities_of(parse_spec(spec)[0])
    for name in load.stored:
        # Without the last token, which an append leaves to be computed, and its block with it.
        kept = hashes(identity.digest, load.made[name][:-1])
        assert kept <= pages, f"{name} was acknowledged"
    assert len(tails) >= len(load.stored)
    known = (hashes(identity.digest, ids) for ids in load.made.values())
    assert pages <= set().union(*known), "nobody had these words"


@contextlib.contextmanager
def opened_soon(spec: str) -> Iterator[list[Maintained]]:
    """A dead process's last thread may still hold the folder's lock, for a moment."""
    end = time.monotonic() + 10
    with contextlib.ExitStack() as opened:
        while True:
            try:
                tiers = opened.enter_context(opened_for_care(spec))
                break
            except StoreUnavailable:
                assert time.monotonic() < end
                time.sleep(0.05)
        yield tiers


def assert_rooted(found: list[ObjectInfo]) -> None:
    """Every page hangs on one that is there."""
    there = {info.digest for info in found if info.kind is ObjectKind.PAGE}
    assert all(info.parent in there for info in found if info.parent is not None)


def hashes(identity: bytes, ids: list[int]) -> set[str]:
    """Names of the blocks of a text."""
    transcript = Transcript(chain_root(identity, ""), np.array(ids, dtype=np.int32))
    return {name.hex() for name in transcript.hashes}
