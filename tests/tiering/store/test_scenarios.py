"""What went wrong elsewhere, on every kind of store: lookups, slow readers, names."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest

import redis_servers
from dsv4_tierd.tiering.errors import StoreUnavailable, TransferFailed
from dsv4_tierd.tiering.store.protocol import PrefixStore
from dsv4_tierd.tiering.store.tiered import TieredStore
from fake_l2 import Bucket, open_fake
from lmcache_cases import open_adapter
from proxy import Fault, Proxy
from redis_cases import PATIENT_S, eventually, open_hasty, open_redis
from store_cases import chain, open_disk, page, present, read, resume
from tiered_cases import tiered_config

BUDGET = 1 << 20
OPENERS: dict[str, Callable[[Path], PrefixStore]] = {
    # Its index and whole blocks count, too.
    "disk": lambda folder: open_disk(folder, bytes_max=BUDGET + (256 << 10)),
    "redis": lambda _: open_redis(redis_servers.emptied().url, bytes_max=BUDGET),
    "lmcache": lambda _: open_fake(Bucket(), bytes_max=BUDGET),
}
if find_spec("lmcache"):  # test_lmcache_adapters says so where it is not
    OPENERS["lmcache_fs_native"] = lambda folder: open_adapter(
        {"type": "fs_native", "base_path": str(folder)}, bytes_max=BUDGET
    )


@pytest.fixture(params=OPENERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PrefixStore]:
    """An empty store of each kind that holds a megabyte."""
    store = OPENERS[request.param](tmp_path / "store")
    yield store
    store.close()


def test_lookups_hold_nothing_and_extend_no_life(store: PrefixStore) -> None:
    """Ten thousand of them, half by threads that leave: the oldest goes first, and all can go."""
    old, new = chain("old", 20, size=20_000), chain("new", 20, size=20_000)
    store.put(old)
    store.put(new)
    keys = [item.key for item in old]

    def look() -> None:
        for _ in range(5_000):
            assert all(store.has(keys))
            assert store.find(keys[3]) is not None

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    look()
    thread.join()
    store.put(chain("more", 20, size=20_000))
    assert all(present(store, new)), "what was only asked about goes first"
    assert sum(present(store, old)) < 15
    for number in range(4):
        store.put(chain(f"much{number}", 20, size=20_000))
    assert not any(present(store, [*old, *new]))
    assert store.usage().bytes_used <= store.usage().bytes_max


@pytest.mark.parametrize("part", [1, 2, 3])
def test_deleted_while_its_parts_are_read(part: int) -> None:
    """An object of three values, erased between two of them: a miss or an error, never other bytes.

    What takes its place meanwhile is not read for it either.
    """
    proxy = Proxy(redis_servers.emptied().port)
    store, other = open_redis(proxy.url), open_redis(proxy_target(proxy))
    item, later = page("a", size=150_000), page("b", size=150_000)
    store.put([item])
    found: list[object] = []

    def slow() -> None:
        try:
            found.append(read(store, item))
        except (TransferFailed, StoreUnavailable) as error:
            found.append(error)

    proxy.arm(Fault.STALL, part)
    reader = threading.Thread(target=slow)
    reader.start()
    while len(proxy.commands) < part:
        assert reader.is_alive()
    assert other.delete([item.key]) == 1
    other.put([later])
    other.gc(grace_s=0)
    proxy.release()
    reader.join()
    [outcome] = found
    whole = part == 3  # its last bytes were on their way already
    assert outcome == item.payload if whole else outcome is None or isinstance(outcome, Exception)
    assert read(other, later) == later.payload
    assert present(other, [item]) == [False]
    store.close()
    other.close()
    proxy.close()


def proxy_target(proxy: Proxy) -> str:
    return f"redis://127.0.0.1:{proxy.target}"


@pytest.mark.parametrize(
    ("fault", "byte"),
    [(Fault.CUT_BEFORE, 0), (Fault.CUT_AFTER, 0), (Fault.CUT_REPLY, 1), (Fault.STALL, 0)],
)
def test_a_fault_at_every_command_behind_a_folder(fault: Fault, byte: int, tmp_path: Path) -> None:
    """Two tiers: a write is acknowledged at once and reaches the server by itself; reads are right.

    Another daemon with an empty folder reads through the same faults.
    """
    proxy = Proxy(redis_servers.emptied().port)
    witness = open_redis(proxy_target(proxy))
    for n in count(1):
        items = [*chain(f"{n}-", 6), resume(f"{n}-5")]
        store = tiered(tmp_path / f"{n}", proxy)
        proxy.arm(fault, n, byte)
        begun = time.monotonic()
        store.put(items)
        assert time.monotonic() - begun < PATIENT_S, "it waits for the server"
        assert [read(store, item) for item in items] == [item.payload for item in items]
        eventually(lambda n=n, s=store: len(proxy.commands) >= n or not s.waiting)
        reached = len(proxy.commands) >= n
        proxy.release()
        assert store.flush(20.0)
        eventually(lambda items=items: all(present(witness, items)))
        assert [read(witness, item) for item in items] == [item.payload for item in items]
        other = tiered(tmp_path / f"{n}-other", proxy)
        proxy.arm(fault, n, byte)
        for item in items:
            assert read(other, item) in (None, item.payload)
        proxy.release()
        proxy.arm()
        eventually(
            lambda items=items, other=other: (
                [read(other, i) for i in items] == [i.payload for i in items]
            ),
            within_s=20,
        )
        for each in (store, other):
            each.close()
        if not reached:
            break
    assert n > 5
    assert witness.verify().bad == ()
    witness.close()
    proxy.close()


def tiered(folder: Path, proxy: Proxy) -> TieredStore:
    """A folder in front of the server behind the proxy."""
    return TieredStore(open_disk(folder), open_hasty(proxy.url), tiered_config())


def test_processes_with_other_hash_seeds_share() -> None:
    """What one puts under names made of tokens another finds, whatever their PYTHONHASHSEED."""
    url = redis_servers.emptied().url
    code = (
        "import sys; import numpy as np;"
        "from dsv4_tierd.tiering.blocks import Transcript, chain_root;"
        "from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, StoredObject;"
        "from redis_cases import open_redis; from store_cases import IDENTITY, content;"
        "ids = np.arange(256 * 5, dtype=np.int32);"
        "names = Transcript(chain_root(IDENTITY.digest, 'me'), ids).hashes;"
        "keys = [ObjectKey(ObjectKind.PAGE, 'me', name) for name in names];"
        "items = [StoredObject(k, p, content(k)) for k, p in zip(keys, [None, *names])];"
        "store = open_redis(sys.argv[2]);"
        "there = store.has(keys); print(sum(there)); store.put(items); store.close()"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code, "-", url],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "4242")
    ]
    assert found == ["0", "5"]
