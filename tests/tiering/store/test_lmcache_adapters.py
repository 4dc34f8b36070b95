"""LMCache itself, both ways: its adapters under our store, and our store under its manager."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import redis_servers
from dsv4_tierd.tiering.errors import (
    BadRequest,
    InvalidRequest,
    PreconditionFailed,
    StoreUnavailable,
    TransferFailed,
)
from dsv4_tierd.tiering.store.lmcache import LMCacheStore, open_lmcache
from dsv4_tierd.tiering.store.protocol import StoredObject
from lmcache_cases import needs_lmcache, open_adapter, open_fs_native, plugin_spec
from proxy import Fault, Proxy
from redis_cases import eventually
from store_cases import IDENTITY, chain, page, present, read, resume, tail

# Their packages warn of one another.
pytestmark = [needs_lmcache, pytest.mark.filterwarnings("ignore")]


def fs_spec(folder: Path, kind: str = "fs_native") -> dict[str, Any]:
    return {"type": kind, "base_path": str(folder)}


def test_a_folder_is_shared_and_outlives_everyone(tmp_path: Path) -> None:
    """Two stores on one fs_native folder see each other's objects; a later one finds them."""
    one, two = open_fs_native(tmp_path), open_fs_native(tmp_path)
    items = [*chain("a", 20), resume("a19"), tail("s", "a19")]
    one.put(items)
    eventually(lambda: all(present(two, items)))
    assert [read(two, item) for item in items] == [item.payload for item in items]
    assert two.delete([items[5].key]) == 1
    for store in (one, two):
        store.close()
    again = open_fs_native(tmp_path)
    assert present(again, items) == [True] * 5 + [False] * 17
    again.close()


def test_a_flipped_bit_in_a_file_is_refused(tmp_path: Path) -> None:
    """LMCache serves it; this store does not, and forgets it."""
    store = open_fs_native(tmp_path)
    item = page("a")
    store.put([item])
    [path] = [path for path in tmp_path.glob("*.data") if item.key.digest.hex() in path.name]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(TransferFailed):
        read(store, item)
    assert present(store, [item]) == [False]
    store.close()


def test_a_redis_that_restarts_under_its_client() -> None:
    """LMCache's resp client never recovers; its replacement does, and no answer is wrong."""
    server = redis_servers.Server()
    spec = {"type": "resp", "host": "127.0.0.1", "port": server.port, "num_workers": 2}
    store = open_adapter(spec)
    items = chain("a", 5)
    store.put(items)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    server.kill()
    eventually(lambda: not store.usage().up)
    with pytest.raises(StoreUnavailable):
        present(store, items)
    server.start()
    eventually(lambda: store.usage().up)
    assert present(store, items) == [False] * 5, "this server kept nothing"
    store.put(items)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    server.pause()
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable):
        read(store, items[0])
    assert time.monotonic() - begun < 12
    server.go_on()
    eventually(lambda: store.usage().up)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    store.close()
    server.close()


@pytest.mark.parametrize(
    ("fault", "byte"),
    [
        (Fault.CUT_BEFORE, 0),
        (Fault.CUT_WITHIN, 9),
        (Fault.CUT_AFTER, 0),
        (Fault.CORRUPT_REPLY, 20),
        (Fault.STALL, 0),
    ],
)
def test_a_fault_at_every_command_to_a_redis(fault: Fault, byte: int) -> None:
    """Through LMCache's resp client: bounded, whole or not at all, right, back by itself.

    Its client has no deadline, no checksum and no reconnect: these are ours.
    """
    proxy = Proxy(redis_servers.emptied().port, quiet=frozenset())
    store = open_adapter({"type": "resp", "host": "127.0.0.1", "port": proxy.port})
    for n in range(1, 12):
        items = chain(f"{n}-", 3)
        proxy.arm(fault, n, byte)
        begun = time.monotonic()
        outcomes: list[bytes | None] = []
        acknowledged = False
        with contextlib.suppress(StoreUnavailable, TransferFailed, PreconditionFailed):
            store.put(items)
            acknowledged = True
            outcomes += (read(store, item) for item in items)
        assert time.monotonic() - begun < 16
        for item, data in zip(items, outcomes, strict=False):
            assert data in (None, item.payload)
        eventually(lambda n=n: len(proxy.commands) >= n)  # it polls
        if acknowledged and fault is not Fault.CORRUPT_REPLY:
            eventually(lambda items=items: readable(store, items))
        eventually(lambda items=items: stored(store, items))
    eventually(lambda: store.usage().up)
    store.close()
    proxy.close()


def readable(store: LMCacheStore, items: list[StoredObject]) -> bool:
    """Whether all can be read now; one of LMCache's workers may still be dead, which shows late."""
    try:
        return [read(store, item) for item in items] == [item.payload for item in items]
    except StoreUnavailable:
        return False


def stored(store: LMCacheStore, items: list[StoredObject]) -> bool:
    """Whether they could be put now, if they are not there."""
    try:
        store.put(items)
        return readable(store, items)
    except (StoreUnavailable, TransferFailed, PreconditionFailed):
        return False


def test_wrong_specifications_of_adapters(tmp_path: Path) -> None:
    """An unknown adapter, a missing field and a missing package are named."""
    for spec in ({"type": "no_such"}, {"type": "fs_native"}, {"type": "resp", "host": ""}):
        with pytest.raises(BadRequest):
            open_lmcache(spec, IDENTITY, 0)
    with pytest.raises(InvalidRequest):
        open_lmcache(fs_spec(tmp_path), None, 0)
    wrong = {"type": "resp", "host": "127.0.0.1", "port": "hunter2", "password": "hunter2"}
    with pytest.raises(BadRequest) as refused:
        open_lmcache(wrong, IDENTITY, 0)
    assert "hunter2" not in str(refused.value)


def test_nothing_is_told_to_lmcaches_makers() -> None:
    """Its telemetry is off before it is imported."""
    code = (
        "from dsv4_tierd.tiering.store.lmcache_kit import LMCacheToolkit;"
        "LMCacheToolkit({'type': 'fs_native', 'base_path': '/nowhere'});"
        "from lmcache.usage_telemetry.identity import is_usage_tracking_enabled;"
        "print(is_usage_tracking_enabled())"
    )
    asked = ("LMCACHE_TRACK_USAGE", "DO_NOT_TRACK")
    environ = {name: value for name, value in os.environ.items() if name not in asked}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().lower() == "false"


# ------------------------------------------------------------ inbound
def memory(size: int, fill: int = 0) -> Any:
    """A memory object of LMCache's over fresh bytes."""
    return _kit().wrap(bytearray([fill]) * size)


def _kit() -> Any:
    from dsv4_tierd.tiering.store.lmcache_kit import LMCacheToolkit

    return LMCacheToolkit({"type": "fs_native", "base_path": "unused"})


def their_key(index: int, salt: str = "") -> Any:
    from lmcache.v1.distributed.api import ObjectKey

    return ObjectKey(index.to_bytes(32, "big"), "some/model", kv_rank=7, cache_salt=salt)


def wait_for(query: Callable[[], Any]) -> Any:
    """The first answer that is one."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        found = query()
        if found:
            return found
        time.sleep(0.002)
    raise AssertionError("no answer")


def make_plugin(folder: Path, **params: str) -> Any:
    """Our class, made by LMCache as it makes any adapter."""
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class

    spec = plugin_spec(folder)
    spec["adapter_params"] |= params
    return create_l2_adapter(get_l2_adapter_config_class("plugin").from_dict(spec))


def test_lmcache_stores_into_our_folder(tmp_path: Path) -> None:
    """Store, look up, load and delete; counted by salt, and counted still after a restart."""
    adapter = make_plugin(tmp_path)
    keys = [their_key(index, "you" if index % 2 else "") for index in range(6)]
    task = adapter.submit_store_task(keys, [memory(5000, index) for index in range(6)])
    stored = wait_for(adapter.pop_completed_store_tasks)
    assert stored[task].is_successful()
    assert stored[task].bytes_transferred() == 30_000
    task = adapter.submit_lookup_and_lock_task([*keys, their_key(99)], {})
    found = wait_for(lambda: adapter.query_lookup_and_lock_result(task))
    assert [found.test(index) for index in range(7)] == [True] * 6 + [False]
    adapter.submit_unlock(keys)
    into = [memory(5000) for _ in keys]
    task = adapter.submit_load_task(keys, into)
    loaded = wait_for(lambda: adapter.query_load_result(task))
    assert all(loaded.test(index) for index in range(6))
    for index, item in enumerate(into):
        assert bytes(item.byte_array.cast("B")) == bytes([index]) * 5000
    usage = adapter.get_usage()
    assert (usage.total_bytes_used, dict(usage.bytes_by_cache_salt)) == (
        30_000,
        {"": 15_000, "you": 15_000},
    )
    adapter.close()
    again = make_plugin(tmp_path)
    assert again.get_usage().total_bytes_used == 30_000
    again.delete(keys[:2])
    assert again.get_usage().total_bytes_used == 20_000
    task = again.submit_load_task(keys, [memory(5000 if i != 5 else 4999) for i in range(6)])
    loaded = wait_for(lambda: again.query_load_result(task))
    assert [loaded.test(index) for index in range(6)] == [False, False, True, True, True, False]
    assert again.report_status()["is_healthy"]
    again.close()


def test_what_our_folder_gives_up_is_not_counted(tmp_path: Path) -> None:
    """More than the budget went in: LMCache is told of what is there, and need delete nothing."""
    adapter = make_plugin(tmp_path, bytes_max="4MiB")
    keys = [their_key(index) for index in range(100)]
    for key in keys:
        adapter.submit_store_task([key], [memory(100_000)])
        assert wait_for(adapter.pop_completed_store_tasks)
    usage = adapter.get_usage()
    assert 2 << 20 < usage.total_bytes_used < 4 << 20
    assert usage.bytes_by_cache_salt == {"": usage.total_bytes_used}
    adapter.delete(keys)
    assert (adapter.get_usage().total_bytes_used, adapter.report_status()["objects"]) == (0, 0)
    adapter.close()


@contextlib.contextmanager
def manager(folder: Path) -> Iterator[Any]:
    """LMCache's StorageManager with a small memory tier, over our folder."""
    from lmcache.v1.distributed import config as cfg
    from lmcache.v1.distributed.l2_adapters.config import (
        L2AdaptersConfig,
        get_l2_adapter_config_class,
    )
    from lmcache.v1.distributed.storage_manager import StorageManager

    plugin = get_l2_adapter_config_class("plugin").from_dict(plugin_spec(folder))
    made = StorageManager(
        cfg.StorageManagerConfig(
            cfg.L1ManagerConfig(cfg.L1MemoryManagerConfig(8 << 20, use_lazy=False, shm_name="")),
            cfg.EvictionConfig("LRU"),
            L2AdaptersConfig([plugin]),
        )
    )
    yield made
    made.close()


def test_lmcaches_own_manager_uses_our_folder(tmp_path: Path) -> None:
    """Its StorageManager writes through to our store; a later one reads it back, bit for bit."""
    import torch
    from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, PrefetchTaskSpec

    size = 64 << 10
    layout = MemoryLayoutDesc([torch.Size([size])], [torch.uint8])
    keys = [their_key(index) for index in range(8)]
    with manager(tmp_path) as first:
        reserved = first.reserve_write(keys, layout)
        for index, key in enumerate(keys):
            reserved[key].tensor.fill_(index + 1)
        first.finish_write(keys)
        [(_, adapter)] = first.l2_adapters()
        wait_for(lambda: adapter.get_usage().total_bytes_used == 8 * size)
    with manager(tmp_path) as second:
        wanted = [*keys, their_key(99)]
        handle = second.submit_prefetch_task(
            PrefetchTaskSpec([GroupedObjectKeys(wanted, 0, layout)])
        )
        assert second.wait_prefetch_status(handle, 5.0)
        found = second.query_prefetch_status(handle)
        assert found.l2_hit_count == 8
        with second.read_prefetched_results(keys) as objects:
            assert [int(item.tensor.min()) for item in objects] == list(range(1, 9))
            assert [int(item.tensor.max()) for item in objects] == list(range(1, 9))
        second.finish_read_prefetched(keys)
