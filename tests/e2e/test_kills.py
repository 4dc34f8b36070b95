"""A daemon is killed while it writes to each kind of store: what it acknowledged is stored.

And it is all that can be seen, but for what requests that were cut off had finished: blocks of
words that somebody sent, each behind the one before it, and tails of sessions that somebody
suspended. A daemon that starts on the store uses both, and answers as if nothing had been stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

import redis_servers
from dsv4_tierd.daemon.journal import FILE_MAGIC, read_batch
from dsv4_tierd.daemon.ledger import Ledger, Record
from dsv4_tierd.daemon.transcript import TokenRun
from dsv4_tierd.tiering.blocks import Transcript, chain_root
from dsv4_tierd.tiering.errors import StoreUnavailable
from dsv4_tierd.tiering.retention import tail_digest
from dsv4_tierd.tiering.store.disk import ObjectInfo
from dsv4_tierd.tiering.store.maintain import Maintained, opened_for_care
from dsv4_tierd.tiering.store.open import identities_of, parse_spec
from dsv4_tierd.tiering.store.protocol import ObjectKind
from live_daemon import CLI, ENVIRON, Live, live_daemon
from lmcache_cases import needs_lmcache

KILLS = int(os.environ.get("TEST_KILLS", "1"))
QUESTION = [11, 12, 13]
DRAWN = 8
MOST = 0.99
ROOM = "8GiB"  # nothing is given up
IN_BETWEEN, AT_THE_END = 1, 12  # sessions that go on of each sort; computing them takes time
SPECS: dict[str, Callable[[Path], str]] = {
    "disk": lambda folder: f"disk:{folder}",
    "redis": lambda _: redis_servers.emptied().url,
    "lmcache_fs_native": lambda folder: (
        "lmcache:" + json.dumps({"type": "fs_native", "base_path": str(folder)})
    ),
    "tiered": lambda folder: f"disk:{folder},{redis_servers.emptied().url}",
}


@dataclass
class Sent:
    """A session as its client knows it.

    ``transcript``: what is computed of its words; the last one is left to be. ``suspending``: that
    was asked, ``stored``: and acknowledged.
    """

    ids: list[int]
    transcript: Transcript
    suspending: bool = False
    stored: bool = False

    @property
    def blocks(self) -> list[str]:
        return [name.hex() for name in self.transcript.hashes]


@dataclass
class Load:
    """Sessions that clients make and suspend until the daemon dies.

    ``orphans``: tails of suspensions that were cut off, by session; they stay if the session is
    deleted, until the store gives them up.
    """

    chance: random.Random
    root: bytes
    sent: dict[str, Sent] = field(default_factory=dict)
    orphans: dict[str, str] = field(default_factory=dict)
    count: int = 0
    acknowledged: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def stored(self) -> list[str]:
        """Acknowledged, oldest first."""
        return [name for name, sent in self.sent.items() if sent.stored]

    @property
    def cut_off(self) -> list[str]:
        """Not acknowledged: made or not, and suspended or not."""
        return [name for name, sent in self.sent.items() if not sent.stored]

    async def run(self, live: Live) -> None:
        """One client's life."""
        with contextlib.suppress(aiohttp.ClientError):
            while True:
                name, self.count = f"s{self.count}", self.count + 1
                length = self.chance.choice([768, 1024, self.chance.randrange(300, 3000)])
                ids = [self.chance.randrange(2, 512) for _ in range(length)]
                computed = Transcript(self.root, np.array(ids[:-1], dtype=np.int32))
                self.sent[name] = Sent(ids, computed)
                made = {"id": name, "token_ids": ids}
                if await self.done(live, "/v1/sessions?wait=true", made) is None:
                    return
                if not await self.suspended(live, name):
                    return

    async def suspended(self, live: Live, name: str) -> bool:
        """Suspend a session; whether that was acknowledged. The store has all of it then."""
        sent = self.sent[name]
        sent.suspending = True
        path = f"/v1/sessions/{name}/suspend?wait=true"
        found = await self.done(live, path, {"tier": "store"})
        if found is None:
            return False
        assert found["stored_tokens"] == len(sent.transcript), found
        sent.stored = True
        self.acknowledged.set()
        self.orphans.pop(name, None)
        return True

    async def done(self, live: Live, path: str, body: object) -> Any:
        """The answer; None: it was not acknowledged, which only the engine's end may cause."""
        status, found, _ = await live.call("POST", path, body)
        assert status < 300 or "engine_restarting" in str(found), found
        return found if status < 300 else None


class Store:
    """What a store's tiers hold between them, while no daemon runs."""

    def __init__(self, spec: str) -> None:
        """Read and check everything."""
        with opened_soon(spec) as tiers:
            assert [tier.verify().bad for tier in tiers] == [()] * len(tiers)
            found = [list(tier.list_objects()) for tier in tiers]
        for tier in found:
            assert_rooted(tier)
        self.near = {(info.kind, info.digest) for info in found[0]}
        self.all = {(info.kind, info.digest) for tier in found for info in tier}

    def named(self, kind: ObjectKind) -> set[str]:
        return {digest for own, digest in self.all if own is kind}


def check(store: Store, records: dict[str, Record], load: Load) -> None:
    """What is there, against what was sent and what was acknowledged."""
    pages, points = store.named(ObjectKind.PAGE), store.named(ObjectKind.RESUME)
    for name in load.stored:
        check_stored(store, records[name], load.sent[name])
    for name in load.cut_off:
        if name in records and load.sent[name].suspending:
            load.orphans[name] = tail_of(records[name], load.sent[name]).hex()
    known: set[str] = set()
    for name, sent in load.sent.items():
        there = [block in pages for block in sent.blocks]
        assert there == sorted(there, reverse=True), f"{name} has holes"
        known.update(sent.blocks)
    assert pages <= known, "nobody had these words, or not any more"
    assert points <= pages
    tails = {tail_of(records[name], load.sent[name]).hex() for name in load.stored}
    assert store.named(ObjectKind.TAIL) <= tails | set(load.orphans.values()), (
        "nobody suspended these"
    )


def check_stored(store: Store, record: Record, sent: Sent) -> None:
    """An acknowledged session: in the journal, and all of it in the nearest tier."""
    tail, blocks = tail_of(record, sent), sent.blocks
    assert (record.suspended_tier, record.transcript.length) == ("store", len(sent.ids))
    assert record.tail_key is not None
    assert record.tail_key[:32] == tail
    wanted = {(ObjectKind.PAGE, block) for block in blocks}
    wanted |= {(ObjectKind.RESUME, blocks[-1]), (ObjectKind.TAIL, tail.hex())}
    assert wanted <= store.near, f"{record.id} was acknowledged"


def tail_of(record: Record, sent: Sent) -> bytes:
    """Name of the tail that a session leaves when it is suspended."""
    return tail_digest(record.uid, sent.transcript, len(sent.transcript))


def journalled(folder: Path) -> dict[str, Record]:
    """A dead daemon's sessions, by name."""
    data = memoryview((folder / "state" / "journal").read_bytes())
    ledger, hold, at = Ledger(), list[TokenRun](), len(FILE_MAGIC)
    while (found := read_batch(data, at)) is not None:
        events, at = found
        ledger.apply(events, hold)
    return {record.id: record for record in ledger.records.values()}


@dataclass(frozen=True)
class Restarted:
    """A daemon that starts on what a killed one left. ``cold``: one without a store."""

    live: Live
    cold: Live
    load: Load

    async def resume(self, count: int) -> None:
        """Some acknowledged sessions, the newest among them, go on from the store."""
        names = self.load.stored
        older = self.load.chance.sample(names[:-1], min(count, len(names)) - 1) if names else []
        for name in [*names[-1:], *older]:
            length = len(self.load.sent[name].ids)
            usage = await self.go_on(name)
            assert usage["cached_tokens_details"]["store"] >= MOST * length, usage
            assert usage["computed_tokens"] == 1 + len(QUESTION), usage  # one was left to be
            assert usage["replayed_tokens"] == 0, usage

    async def mend(self, count: int) -> None:
        """What was cut off last is asked for again, on what it left there.

        Of those made anew half go on, the others are suspended; those that are there go on: their
        tails were in the engine that died.
        """
        for name in self.load.cut_off[-count:]:
            sent = self.load.sent[name]
            path = f"/v1/sessions/{name}"
            status, found, _ = await self.live.call("GET", path)
            anew = status == 404 or not found["tokens"]
            if anew:
                if status != 404:
                    await self.live.ok("DELETE", path)
                await self.live.create(name, sent.ids)
            else:
                assert found["tokens"] == len(sent.ids)
            if anew and self.load.chance.random() < 0.5:
                assert await self.load.suspended(self.live, name)
            else:
                await self.go_on(name)

    async def go_on(self, name: str) -> Any:
        """A session answers as where nothing was stored, and is deleted; usage of the answer."""
        sent = self.load.sent.pop(name)
        answer, computed = await asyncio.gather(
            self.live.generate(name, QUESTION, DRAWN), self.computed(name, sent.ids)
        )
        assert answer["token_ids"] == computed, name
        usage = answer["usage"]
        cached = sum(usage["cached_tokens_details"].values())
        assert cached + usage["computed_tokens"] == len(sent.ids) + len(QUESTION), usage
        await self.live.ok("DELETE", f"/v1/sessions/{name}")
        return usage

    async def computed(self, name: str, ids: Sequence[int]) -> list[int]:
        """The answer of the daemon without a store."""
        usage = await self.cold.create(name, ids)
        assert usage["computed_tokens"] == len(ids) - 1
        answer = await self.cold.generate(name, QUESTION, DRAWN)
        await self.cold.ok("DELETE", f"/v1/sessions/{name}")
        return list(answer["token_ids"])


@contextlib.asynccontextmanager
async def a_daemon_and_a_cold_one(
    folder: Path, model: Path, spec: str
) -> AsyncIterator[tuple[Live, Live]]:
    """Two daemons, the second without a store."""
    (folder / "cold").mkdir()
    async with (
        live_daemon(folder, model, start=False, store=spec, store_budget=ROOM) as live,
        live_daemon(folder / "cold", model, start=False, store="none") as cold,
    ):
        await asyncio.gather(live.start(), cold.start())
        yield live, cold


@pytest.mark.timeout(300 + 30 * KILLS)
@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=needs_lmcache if "lmcache" in k else ()) for k in SPECS]
)
async def test_kill_nine_of_a_daemon_that_writes(kind: str, tmp_path: Path, micro: Path) -> None:
    """After each kill, what is stored is what is owed; the next daemon goes on from there.

    The engine, which writes, is killed first, or is left to find out that its daemon is gone.
    ``$TEST_KILLS`` says how often (1).
    """
    chance = random.Random(KILLS)
    (tmp_path / "kept").mkdir()
    spec = SPECS[kind](tmp_path / "kept")
    async with a_daemon_and_a_cold_one(tmp_path, micro, spec) as (live, cold):
        [identity] = identities_of(parse_spec(spec)[0])
        load = Load(chance, chain_root(identity.digest, ""))
        restarted = Restarted(live, cold, load)
        for life in range(KILLS):
            await one_life(live, load, engine_first=life % 2 == 0)
            check(Store(spec), journalled(tmp_path), load)
            await live.start()
            if life == KILLS - 1 or chance.random() < 0.5:
                count = IN_BETWEEN if life < KILLS - 1 else AT_THE_END
                await restarted.resume(count)
                await restarted.mend(count)
        await live.stop()
        check(Store(spec), journalled(tmp_path), load)
    assert verified(spec)["bad"] == []


async def one_life(live: Live, load: Load, *, engine_first: bool) -> None:
    """Clients are served until the daemon is killed: at any moment, or as it acknowledges."""
    engine = await live.engine_pid()
    clients = [asyncio.create_task(load.run(live)) for _ in range(2)]
    await asyncio.sleep(load.chance.uniform(0.0, 1.5))
    if not load.stored or load.chance.random() < 0.5:
        load.acknowledged.clear()
        told = asyncio.create_task(load.acknowledged.wait())
        await asyncio.wait([told, *clients], timeout=120, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
    if engine_first:
        os.kill(engine, signal.SIGKILL)
    await live.kill(engine)
    await asyncio.gather(*clients)
    assert load.stored, "nothing was acknowledged"


def verified(spec: str) -> Any:
    """``store verify`` of it all."""
    done = subprocess.run(
        [*CLI, "store", "verify", spec, "--json"],
        check=False, capture_output=True, text=True, env=ENVIRON, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


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
