"""Writers are killed at any moment: what was acknowledged is there, and no more than is owed.

A put that was cut off may be visible up to one of its commits, see ``Promises``.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import redis_servers
from crash_lives import Nursery, Promises
from crash_writer import PATIENT_S, open_small
from dsv4_tierd.tiering.store.lmcache import LMCacheStore
from dsv4_tierd.tiering.store.maintain import opened_for_care
from dsv4_tierd.tiering.store.protocol import PrefixStore
from dsv4_tierd.tiering.store.redis import RedisStore
from dsv4_tierd.tiering.store.tiered import TieredStore
from lmcache_cases import needs_lmcache

KILLS = int(os.environ.get("TEST_KILLS", "6"))
KILLS_PER_STORE = 10  # or reading all again takes for ever
SPECS: dict[str, Callable[[Path], str]] = {
    "disk": lambda folder: f"disk:{folder}",
    "redis": lambda _: redis_servers.emptied().url,
    "lmcache_fs_native": lambda folder: (
        "lmcache:" + json.dumps({"type": "fs_native", "base_path": str(folder)})
    ),
    "tiered": lambda folder: f"disk:{folder},{redis_servers.emptied().url}",
}


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Where the writers come from."""
    with Nursery() as nursery:
        yield nursery


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
@pytest.mark.timeout(60 + 10 * KILLS)
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=needs_lmcache if "lmcache" in k else ()) for k in SPECS]
)
def test_kill_nine_while_writing(kind: str, nursery: Nursery, tmp_path: Path) -> None:
    """After every kill: nothing acknowledged is missing, nothing else visible, all bytes right.

    But of the call that was cut off: whole commits, the first ones. ``$TEST_KILLS`` says how often
    (6). Where daemons share a store, one that lives through it all agrees.
    """
    chance = random.Random(KILLS)
    said = 0
    for life in range(KILLS):
        if life % KILLS_PER_STORE == 0:
            folder = tmp_path / f"{life}"
            folder.mkdir()
            spec = SPECS[kind](folder)
            promises = Promises(spec)
            witness = None if spec.startswith("disk:") else open_small(spec)
        lines = nursery.live_and_die(spec, life, chance.uniform(0.01, 0.3))
        said += sum(verb == "put" for verb, *_ in lines)
        promises.tell(lines)
        after = open_small(spec)
        promises.check(after)
        assert after.usage().checksum_failures == 0
        settle(after)
        after.close()
        with opened_for_care(spec) as tiers:
            promises.check_listing(tiers)
        if witness is not None:
            follow(witness)
            promises.check(witness)
        if life == KILLS - 1 or life % KILLS_PER_STORE == KILLS_PER_STORE - 1:
            if witness is not None:
                witness.close()
            empty(spec)
    assert said > KILLS, "no writer lived long enough to say anything"


def settle(store: PrefixStore) -> None:
    """What the check has read is copied up to where it will be."""
    if isinstance(store, TieredStore):
        assert store.flush(PATIENT_S)


def follow(store: PrefixStore) -> None:
    """It has heard what others did."""
    if isinstance(store, RedisStore):
        store.shelf.catch_up()
    if isinstance(store, LMCacheStore):
        store._space.follow()


def empty(spec: str) -> None:
    """All objects go, and no bytes are left that nothing points to."""
    store = open_small(spec)
    store.delete_tenant("")
    store.close()
    if "redis://" not in spec:
        return
    server = open_small(spec.rpartition(",")[2])
    assert isinstance(server, RedisStore)
    server.gc(grace_s=0)
    server.close()
    with redis_servers.current().client as client:
        assert client.keys("tierd:1:x:*") == [], "bytes are left that nothing points to"
