"""Processes that write to a store until they are killed, and say what was acknowledged.

Run as a script it is a *nursery*: everything is imported once, and each line ``<seed> <spec>``
on its input forks a writer that puts runs of pages and deletes some, for ever. The nursery says
``born <pid>`` and, when the writer is gone, ``buried <pid>``. The writer says of a run ``putting``
before and ``put`` after the call that stores it, ``dropping`` before and ``gone`` after the one
that removes it: ``<verb> <name> <pages> <bytes of each> .``; a line without its dot was cut off by
the end.
"""

from __future__ import annotations

import os
import random
import sys
from importlib.util import find_spec

from dsv4_tierd.tiering.store.codec import header_size
from dsv4_tierd.tiering.store.lmcache_kit import LMCacheToolkit
from dsv4_tierd.tiering.store.open import TierSpec, parse_spec
from dsv4_tierd.tiering.store.protocol import PrefixStore
from dsv4_tierd.tiering.store.tiered import TieredConfig, TieredStore
from lmcache_cases import open_adapter
from redis_cases import open_redis
from store_cases import chain, open_disk

PATIENT_S = 10.0
RUN_MAX = 12
COMMIT_BYTES = 128 << 10
DISK_BLOCK_BYTES = 4096


def open_small(spec: str) -> PrefixStore:
    """What ``spec`` names, with small pieces, so that a writer crosses many, and long deadlines."""
    tiers = [_open(tier) for tier in parse_spec(spec)]
    if len(tiers) == 1:
        return tiers[0]
    return TieredStore(*tiers, TieredConfig(deadline_s=PATIENT_S, close_s=PATIENT_S))


def _open(tier: TierSpec) -> PrefixStore:
    if tier.folder is not None:
        return open_disk(
            tier.folder, bytes_max=1 << 30, segment_bytes=512 << 10, commit_bytes=COMMIT_BYTES
        )
    if tier.redis_url is not None:
        return open_redis(
            tier.redis_url, bytes_max=0, deadline_s=PATIENT_S, commit_bytes=COMMIT_BYTES
        )
    assert tier.lmcache is not None  # its commits are of COMMIT_BYTES too
    return open_adapter(dict(tier.lmcache), bytes_max=0, deadline_s=PATIENT_S)


def pages_per_commit(spec: str, payload_bytes: int) -> int:
    """How many pages of a size the nearest tier makes visible at once."""
    record = header_size("") + payload_bytes
    if parse_spec(spec)[0].folder is not None:
        record = -(-record // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES
    return max(1, COMMIT_BYTES // record)


def write(spec: str, seed: int) -> None:
    """Put runs, delete some, for ever."""
    chance = random.Random(seed)
    store = open_small(spec)
    number = 0
    while True:
        name = f"{seed}-{number}-"
        size = chance.randint(100, 40_000)
        run = chain(name, chance.randint(1, RUN_MAX), size=size)
        say("putting", name, len(run), size)
        store.put(run)
        say("put", name, len(run), size)
        if chance.random() < 0.3:
            say("dropping", name, len(run), size)
            store.delete([run[0].key])
            say("gone", name, len(run), size)
        number += 1


def say(verb: str, name: str, pages: int, payload_bytes: int) -> None:
    """A line about a run, on its way before this returns."""
    print(verb, name, pages, payload_bytes, ".", flush=True)


def nursery() -> None:
    """Fork a writer a line of input; say when it began and when it is gone."""
    if find_spec("lmcache"):  # seconds, once
        LMCacheToolkit({"type": "fs_native", "base_path": "unused"})
    for line in sys.stdin:
        seed, _, spec = line.strip().partition(" ")
        child = os.fork()
        if not child:
            write(spec, int(seed))
        print("born", child, flush=True)
        os.waitpid(child, 0)
        print(f"\nburied {child}", flush=True)


if __name__ == "__main__":
    nursery()
