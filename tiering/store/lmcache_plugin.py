"""The other way round: this project's disk store as an L2 adapter of LMCache.

For a stock ``lmcache server`` (or its StorageManager), with this package importable there::

    --l2-adapter '{"type": "plugin", "module_path": "dsv4_tierd.tiering.store.lmcache_plugin",
                   "class_name": "TierdL2Adapter",
                   "adapter_params": {"path": "/var/lib/tierd", "bytes_max": "64GiB"}}'

What LMCache stores is then durable, checksummed on every read, bounded and counted across
restarts. Its objects are opaque: they lie under an identity of their own, with LMCache's
``cache_salt`` as the tenant, beside whatever else the folder holds. A folder has one owner.

``TierdL2Adapter`` is made when it is asked for, as its base class is LMCache's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from blake3 import blake3

from dsv4_tierd.tiering.errors import TierError
from dsv4_tierd.tiering.store.disk import DiskStore
from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.lmcache_kit import quiet_lmcache
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, StoredObject
from dsv4_tierd.tiering.store.vault import DiskConfig
from dsv4_tierd.tiering.units import parse_bytes

log = logging.getLogger(__name__)

_IDENTITY = StoreIdentity(
    weights_digest="lmcache",
    model_config_digest="lmcache",
    row_format="opaque",
    key_format="opaque",
    compute_dtype="opaque",
    state_dtype="opaque",
    layout_version=1,
    page_tokens=0,
)


def object_key(key: Any) -> ObjectKey:
    """The name in our store of an LMCache ``ObjectKey``."""
    hasher = blake3(derive_key_context="dsv4-tierd 2026-01 lmcache object key v1")
    for part in (
        key.model_name.encode(),
        str(key.kv_rank).encode(),
        str(key.object_group_id).encode(),
        key.chunk_hash,
    ):
        hasher.update(len(part).to_bytes(4, "little"))
        hasher.update(part)
    return ObjectKey(ObjectKind.PAGE, key.cache_salt, hasher.digest())


class Backend:
    """The store, the threads that work for an adapter, and the results that wait for it."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        """``path``; ``bytes_max`` (64GiB), ``workers`` (4). Raises ValueError, StoreUnavailable."""
        unknown = set(params) - {"path", "bytes_max", "workers"}
        if unknown or not params.get("path"):
            raise ValueError(f"adapter_params: path, bytes_max, workers; got {sorted(params)}")
        self.bytes_max = parse_bytes(str(params.get("bytes_max", "64GiB")))
        self.store = DiskStore(DiskConfig(Path(params["path"]), self.bytes_max), _IDENTITY)
        self._pool = ThreadPoolExecutor(int(params.get("workers", 4)), "lmcache-tierd")
        self._lock = threading.Lock()
        self._task = 0
        self.results: dict[str, dict[int, Any]] = {"store": {}, "lookup": {}, "load": {}}

    def submit(
        self, kind: str, work: Callable[[], Any], failed: Callable[[], Any], notify: Any
    ) -> int:
        """Run a task; its result (that of ``failed``, should it fail) waits until popped."""
        with self._lock:
            self._task += 1
            task = self._task

        def run() -> None:
            try:
                found = work()
            except Exception as error:  # noqa: BLE001 an adapter's thread must not die
                log.warning("store: an LMCache %s failed: %s", kind, error)
                found = failed()
            with self._lock:
                self.results[kind][task] = found
            notify()

        self._pool.submit(run)
        return task

    def pop(self, kind: str, task: int) -> Any:
        """A task's result, once; None while there is none."""
        with self._lock:
            return self.results[kind].pop(task, None)

    def pop_all(self, kind: str) -> dict[int, Any]:
        """All results of a kind, once."""
        with self._lock:
            found, self.results[kind] = self.results[kind], {}
        return found

    def put(self, keys: Sequence[Any], objects: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """Write objects; the keys that were new, and their bytes. Raises TierError."""
        names = [object_key(key) for key in keys]
        views = [item.byte_array.cast("B") for item in objects]
        there = self.store.has(names)
        self.store.put(
            [StoredObject(name, None, view) for name, view in zip(names, views, strict=True)]
        )
        fresh = [i for i, is_there in enumerate(there) if not is_there]
        return [keys[i] for i in fresh], [len(views[i]) for i in fresh]

    def read(self, key: Any, item: Any) -> bool:
        """Fill one memory object; False: not there, of another length, or bad and forgotten."""
        try:
            return self.store.get(object_key(key), item.byte_array.cast("B"))
        except TierError as error:
            log.warning("store: an object of LMCache's is not served: %s", error)
            return False

    def remove(self, keys: Sequence[Any]) -> list[int]:
        """Remove objects; the bytes of each, 0 where it was not there. Raises TierError."""
        names = [object_key(key) for key in keys]
        found = [self.store.find(name) for name in names]
        self.store.delete(names)
        return [0 if facts is None else facts.payload_bytes for facts in found]

    def close(self) -> None:
        """Finish what runs, and let the folder go."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.store.close()


class _Adapter:
    """LMCache's L2 interface over a ``Backend``: all of it but the base class."""

    _bitmap: Callable[[int], Any]
    _result: Callable[[bool, int], Any]
    _notifier: Callable[[], Any]
    _notify_keys_stored: Callable[[list[Any], list[int]], None]
    _notify_keys_accessed: Callable[[list[Any]], None]
    _notify_keys_deleted: Callable[[list[Any], list[int]], None]

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        self._backend = Backend(params)
        super().__init__(max_capacity_bytes=self._backend.bytes_max)  # type: ignore[call-arg]
        self._store_efd, self._lookup_efd, self._load_efd = (self._notifier() for _ in range(3))
        self._bytes_by_cache_salt = self._backend.store.bytes_by_tenant()
        self._total_bytes_used = sum(self._bytes_by_cache_salt.values())

    def get_usage(self) -> Any:
        """Counted from what is there: the store gives objects up by itself, and forgets bad ones.

        Were they counted still, LMCache would think the folder full, and delete for ever.
        """
        found = self._backend.store.bytes_by_tenant()
        return replace(
            super().get_usage(),  # type: ignore[misc]
            total_bytes_used=sum(found.values()),
            bytes_by_cache_salt=MappingProxyType(found),
        )

    def get_store_event_fd(self) -> int:
        return int(self._store_efd.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookup_efd.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._load_efd.fileno())

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        def work() -> Any:
            fresh, sizes = self._backend.put(keys, objects)
            if fresh:
                self._notify_keys_stored(fresh, sizes)
            return self._result(True, sum(sizes))

        return self._backend.submit(
            "store", work, lambda: self._result(False, 0), self._store_efd.notify
        )

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return self._backend.pop_all("store")

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: object) -> int:
        def work() -> Any:
            there = self._backend.store.has([object_key(key) for key in keys])
            return _bits(self._bitmap, there)

        return self._backend.submit(
            "lookup", work, lambda: self._bitmap(len(keys)), self._lookup_efd.notify
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._backend.pop("lookup", task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing is locked: an object evicted since is a miss."""

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        def work() -> Any:
            pairs = zip(keys, objects, strict=True)
            there = [self._backend.read(key, item) for key, item in pairs]
            loaded = [key for key, is_there in zip(keys, there, strict=True) if is_there]
            if loaded:
                self._notify_keys_accessed(loaded)
            return _bits(self._bitmap, there)

        return self._backend.submit(
            "load", work, lambda: self._bitmap(len(keys)), self._load_efd.notify
        )

    def query_load_result(self, task_id: int) -> Any:
        return self._backend.pop("load", task_id)

    def delete(self, keys: list[Any]) -> None:
        try:
            sizes = self._backend.remove(keys)
        except TierError as error:
            log.warning("store: objects of LMCache's are not deleted yet: %s", error)
            return
        if keys:  # also of those that the store had given up: nobody said so yet
            self._notify_keys_deleted(keys, sizes)

    def report_status(self) -> dict[str, Any]:
        usage = self._backend.store.usage()
        return {
            "is_healthy": usage.up,
            "type": "TierdL2Adapter",
            "objects": usage.objects,
            "bytes_used": usage.bytes_used,
            "bytes_max": usage.bytes_max,
            "checksum_failures": usage.checksum_failures,
            "evicted_objects": usage.evicted_objects,
        }

    def close(self) -> None:
        self._backend.close()
        for efd in (self._store_efd, self._lookup_efd, self._load_efd):
            with contextlib.suppress(OSError):
                efd.close()


@functools.cache
def adapter_class() -> type:
    """``TierdL2Adapter``. Raises ImportError: there is no LMCache."""
    quiet_lmcache()
    base = importlib.import_module("lmcache.v1.distributed.l2_adapters.base").L2AdapterInterface
    own = {
        "__doc__": "LMCache's L2 interface over a folder of this project's disk store.",
        "__module__": __name__,
        "_bitmap": importlib.import_module("lmcache.lmcache_native").Bitmap,
        "_result": importlib.import_module("lmcache.v1.distributed.internal_api").L2StoreResult,
        "_notifier": staticmethod(
            importlib.import_module("lmcache.v1.platform").create_event_notifier
        ),
    }
    return type("TierdL2Adapter", (_Adapter, base), own)


def _bits(bitmap: Any, there: Sequence[bool]) -> Any:
    found = bitmap(len(there))
    for index, is_there in enumerate(there):
        if is_there:
            found.set(index)
    return found


def __getattr__(name: str) -> Any:
    """LMCache looks its plugin's class up here."""
    if name == "TierdL2Adapter":
        return adapter_class()
    raise AttributeError(name)
