"""A prefix store that misbehaves on demand, and I/O threads that run only when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from dsv4_tierd.tiering.errors import StoreUnavailable, TransferFailed
from dsv4_tierd.tiering.store.protocol import Facts, ObjectKey, StoredObject, StoreUsage
from naive_store import NaiveStore


class HostileStore:
    """A ``NaiveStore`` behind a lock, with faults.

    ``down``: every call raises StoreUnavailable. ``gate``: reads wait while it is cleared.
    ``broken``: so many of the next reads raise TransferFailed and lose their object.
    """

    def __init__(self, identity: bytes = bytes(32)) -> None:
        self.naive = NaiveStore(identity)
        self.identity = identity
        self.down = False
        self.broken = 0
        self.gate = threading.Event()
        self.gate.set()
        self.reads = 0
        self._lock = threading.Lock()

    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self._check()
        with self._lock:
            return self.naive.has(keys)

    def find(self, key: ObjectKey) -> Facts | None:
        self._check()
        with self._lock:
            return self.naive.find(key)

    def get(self, key: ObjectKey, into: memoryview) -> bool:
        self.reads += 1
        self.gate.wait()
        self._check()
        with self._lock:
            if self.broken and key in self.naive.objects:
                self.broken -= 1
                self.naive.forget(key)
                raise TransferFailed("injected: wrong checksum")
            return self.naive.get(key, into)

    def put(self, objects: Sequence[StoredObject]) -> None:
        self._check()
        with self._lock:
            self.naive.put(objects)

    def delete(self, keys: Iterable[ObjectKey]) -> int:
        self._check()
        with self._lock:
            return self.naive.delete(keys)

    def delete_tenant(self, tenant: str) -> int:
        self._check()
        with self._lock:
            return self.naive.delete_tenant(tenant)

    def usage(self) -> StoreUsage:
        with self._lock:
            return self.naive.usage()

    def close(self) -> None:
        """The objects stay: closing and opening again is a restart."""

    def _check(self) -> None:
        if self.down:
            raise StoreUnavailable("injected: the store is away")


class ManualExecutor:
    """A ThreadPoolExecutor whose work is done by ``run_one``, in the order of submission."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, call: Callable[..., Any], /, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: call(*args)))
        return future

    def run_one(self, index: int = 0) -> bool:
        """Do one piece of work; False if there is none."""
        if not self._waiting:
            return False
        future, call = self._waiting.pop(index % len(self._waiting))
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to the future
            future.set_exception(error)
        return True

    def run_all(self) -> None:
        while self.run_one():
            pass

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        if wait and not cancel_futures:
            self.run_all()


class Clock:
    """Stands for the ``time`` module where only ``monotonic`` and ``sleep`` are used."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
