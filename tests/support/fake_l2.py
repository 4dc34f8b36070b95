"""An object store behind LMCache's L2 interface, without LMCache, and no better than real ones."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.lmcache import LMCacheConfig, LMCacheStore
from dsv4_tierd.tiering.store.lmcache_shelf import Name
from store_cases import IDENTITY

DEADLINE_S = 1.0
POLL_S = 0.02


class _Bits(list[bool]):
    def test(self, index: int) -> bool:
        return self[index]


class _Result(int):
    def is_successful(self) -> bool:
        return self >= 0


@dataclass
class Bucket:
    """What outlives adapters. ``replaces``: a second write wins. ``deletes``: deleting works."""

    objects: dict[Name, bytes] = field(default_factory=dict)
    replaces: bool = False
    deletes: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)

    def store(self, name: Name, data: bytes) -> None:
        with self.lock:
            if self.replaces or name not in self.objects:
                self.objects[name] = data


class FakeKit:
    """A ``Toolkit`` on a bucket.

    ``refuses``: no adapter can be made. ``hangs``: tasks never end. Not ``takes_tasks``: to give it
    one blocks. ``dead``: as a client that lost its server: stores fail, everything else is "not
    there". ``dead`` ends with the adapter unless ``stays_dead``.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.refuses = self.hangs = self.stays_dead = False
        self.takes_tasks = threading.Event()
        self.takes_tasks.set()
        self.adapters: list[FakeAdapter] = []
        self.before_store: Callable[[list[Name]], None] = lambda names: None

    def create(self) -> FakeAdapter:
        if self.refuses:
            raise ConnectionError("nobody listens")
        self.adapters.append(FakeAdapter(self))
        return self.adapters[-1]

    def key(self, name: Name) -> Name:
        return name

    def wrap(self, buffer: bytearray) -> bytearray:
        return buffer


class FakeAdapter:
    """One client of a bucket. Tasks end on a thread of their own."""

    def __init__(self, kit: FakeKit) -> None:
        self._kit, self._bucket = kit, kit.bucket
        self.dead = kit.stays_dead
        self.dead_worker = False  # one of its workers: loads, and every fourth question
        self._fds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(3)]
        self._lock = threading.Lock()
        self._task = 0
        self._stored: dict[int, _Result] = {}
        self._found: dict[int, _Bits] = {}
        self.closed = False

    def get_store_event_fd(self) -> int:
        return self._fds[0]

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._fds[1]

    def get_load_event_fd(self) -> int:
        return self._fds[2]

    def submit_store_task(self, keys: list[Name], objects: list[bytearray]) -> int:
        def work(task: int) -> None:
            self._kit.before_store(keys)
            if not self.dead:
                for key, data in zip(keys, objects, strict=True):
                    self._bucket.store(key, bytes(data))
            self._stored[task] = _Result(-1 if self.dead else 0)

        return self._submit(work, 0)

    def pop_completed_store_tasks(self) -> dict[int, _Result]:
        with self._lock:
            done, self._stored = self._stored, {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[Name], layouts: dict[int, Any]) -> int:
        def work(task: int) -> None:
            found = [
                not self.dead
                and not (self.dead_worker and index % 4 == 3)
                and key in self._bucket.objects
                for index, key in enumerate(keys)
            ]
            self._found[task] = _Bits(found)

        return self._submit(work, 1)

    def query_lookup_and_lock_result(self, task: int) -> _Bits | None:
        return self._found.pop(task, None)

    def submit_unlock(self, keys: list[Name]) -> None:
        assert keys

    def submit_load_task(self, keys: list[Name], objects: list[bytearray]) -> int:
        def work(task: int) -> None:
            found = _Bits()
            for key, into in zip(keys, objects, strict=True):
                lost = self.dead or self.dead_worker
                data = None if lost else self._bucket.objects.get(key)
                if data is not None and len(data) >= len(into):  # longer is cut, as fs does
                    into[:] = data[: len(into)]
                found.append(data is not None and len(data) >= len(into))
            self._found[task] = found

        return self._submit(work, 2)

    def query_load_result(self, task: int) -> _Bits | None:
        return self._found.pop(task, None)

    def delete(self, keys: list[Name]) -> None:
        if self._bucket.deletes and not self.dead:
            for key in keys:
                self._bucket.objects.pop(key, None)

    def close(self) -> None:
        self.closed = True
        for fd in self._fds:
            os.close(fd)

    def _submit(self, work: Callable[[int], None], fd: int) -> int:
        self._kit.takes_tasks.wait()
        with self._lock:
            self._task += 1
            task = self._task
        if not self._kit.hangs:
            threading.Thread(target=self._work, args=(work, task, fd), daemon=True).start()
        return task

    def _work(self, work: Callable[[int], None], task: int, fd: int) -> None:
        with self._lock:
            work(task)
            if not self.closed:
                os.eventfd_write(self._fds[fd], 1)


def open_fake(
    bucket: Bucket | FakeKit, identity: StoreIdentity = IDENTITY, *, bytes_max: int = 64 << 20
) -> LMCacheStore:
    """A store on a bucket, with short times and small commits."""
    kit = bucket if isinstance(bucket, FakeKit) else FakeKit(bucket)
    config = LMCacheConfig(bytes_max, DEADLINE_S, POLL_S, commit_bytes=128 << 10)
    return LMCacheStore(kit, config, identity)


def open_first_wins(_: Path) -> LMCacheStore:
    """On a store where a second write changes nothing."""
    return open_fake(Bucket())


def open_last_wins(_: Path) -> LMCacheStore:
    """On one where it replaces, and where deleting does nothing."""
    return open_fake(Bucket(replaces=True, deletes=False))
