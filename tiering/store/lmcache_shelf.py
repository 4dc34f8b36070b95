"""An L2 adapter of LMCache with what it lacks: deadlines, replacement after a failure, a pulse.

The adapter's tasks run on its own threads, over buffers that are ours. One that is late is given
up together with its adapter: what it may still write to is kept until the adapter is closed, in
the background, and a fresh adapter takes its place.

Nothing here imports LMCache: a ``Toolkit`` does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from dsv4_tierd.tiering.errors import StoreUnavailable, TierError
from dsv4_tierd.tiering.store.bounded import Bounded

log = logging.getLogger(__name__)

_CANARY_BYTES = 64
_QUESTIONS, _ROUNDS = 16, 4
_LINGER_S = 5.0  # for tasks that were given up to end before their adapter


@dataclass(frozen=True, slots=True)
class Name:
    """An object's name in an adapter. ``space`` without ``@``; ``digest`` 32 bytes."""

    space: str
    digest: bytes
    group: int
    rank: int = 0
    salt: str = ""


class Toolkit(Protocol):
    """What comes from LMCache: adapters (its ``L2AdapterInterface``), keys and memory objects."""

    def create(self) -> Any:
        """A fresh adapter. May block, may raise anything."""

    def key(self, name: Name) -> Any:
        """LMCache's key for a name."""

    def wrap(self, buffer: bytearray) -> Any:
        """LMCache's memory object over a buffer."""


class _Session:
    """One adapter, a thread that gives it tasks, which may block, another for their results."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self._lock = threading.Lock()
        self._pending: dict[str, dict[int, tuple[Future[Any], object]]] = {
            "store": {},
            "lookup": {},
            "load": {},
        }
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._asking = threading.Thread(target=self._ask, name="store-lmcache-ask", daemon=True)
        self._answering = threading.Thread(target=self._run, name="store-lmcache", daemon=True)
        self._asking.start()
        self._answering.start()

    def submit(self, kind: str, task: Callable[[], int], memory: object) -> Future[Any]:
        """Begin a task soon; ``memory`` lives until its end, or the adapter's."""
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                with self._lock:  # it may be done before its number is known
                    self._pending[kind][task()] = (answer, memory)
            except Exception as error:  # noqa: BLE001 it is the caller's
                answer.set_exception(error)

        self._asked.put(ask)
        return answer

    def unlock(self, keys: list[Any]) -> None:
        """Let go of what a lookup found; soon, and nobody waits for it."""

        def ask() -> None:
            try:
                self.adapter.submit_unlock(keys)
            except Exception as error:  # noqa: BLE001 it is foreign
                log.debug("store: unlocking in an LMCache adapter: %s", error)

        self._asked.put(ask)

    def close(self) -> None:
        """End the adapter; may take as long as it likes."""
        self._asked.put(None)
        self._asking.join()
        # The S3 adapter's awscrt may crash the process if it is ended with requests on their way.
        end = time.monotonic() + _LINGER_S
        while any(self._pending.values()) and time.monotonic() < end:
            time.sleep(0.05)
        os.eventfd_write(self._stop_fd, 1)
        self._answering.join()
        try:
            self.adapter.close()
        except Exception as error:  # noqa: BLE001 it is foreign, and gone
            log.debug("store: closing an LMCache adapter: %s", error)
        os.close(self._stop_fd)

    def _ask(self) -> None:
        while (ask := self._asked.get()) is not None:
            ask()

    def _run(self) -> None:
        fds: dict[int, Callable[[], None]] = {
            self.adapter.get_store_event_fd(): self._stored,
            self.adapter.get_lookup_and_lock_event_fd(): lambda: self._queried(
                "lookup", self.adapter.query_lookup_and_lock_result
            ),
            self.adapter.get_load_event_fd(): lambda: self._queried(
                "load", self.adapter.query_load_result
            ),
        }
        poller = select.poll()
        for fd in (*fds, self._stop_fd):
            poller.register(fd, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == self._stop_fd:
                    return
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 8)
                with self._lock:
                    fds[fd]()

    def _stored(self) -> None:
        for task, found in self.adapter.pop_completed_store_tasks().items():
            self._answer("store", task, found.is_successful())

    def _queried(self, kind: str, query: Callable[[int], Any]) -> None:
        for task in list(self._pending[kind]):
            found = query(task)
            if found is not None:
                self._answer(kind, task, found)

    def _answer(self, kind: str, task: int, found: Any) -> None:
        waiting = self._pending[kind].pop(task, None)
        if waiting is not None:
            waiting[0].set_result(found)


class AdapterShelf:
    """Objects in an adapter. Thread-safe; every call ends within its deadline.

    A call takes at most ``deadline_s``, and a second more for every ``rate_min`` bytes. One that
    fails or is late drops the adapter; ``connect`` makes the next.
    """

    def __init__(self, toolkit: Toolkit, deadline_s: float, rate_min: int = 32 << 20) -> None:
        self._toolkit, self._deadline_s, self._rate_min = toolkit, deadline_s, rate_min
        self._session: _Session | None = None
        self._bounded = Bounded("lmcache", 0.0)
        self._canary = Name("dsv4-tierd-1", os.urandom(32), 103)
        self.drops = 0

    @property
    def connected(self) -> bool:
        """Whether there is an adapter."""
        return self._session is not None

    def connect(self) -> None:
        """A fresh adapter that stores and finds.

        Raises StoreUnavailable; ImportError (a package or an extension is missing).
        """
        self.drop()
        try:
            adapter = self._bounded.call(self._toolkit.create, self._deadline_s)
        except (TierError, ImportError):
            raise
        except Exception as error:
            if isinstance(error.__cause__, ImportError):
                raise error.__cause__ from error
            raise StoreUnavailable(f"the LMCache adapter cannot be made: {error}") from error
        self._session = _Session(adapter)
        self.store([(self._canary, bytearray(b"canary".ljust(_CANARY_BYTES, b"\0")))])
        self.check_pulse()

    def drop(self) -> None:
        """Give the adapter up. Its end is waited for by nobody."""
        session, self._session = self._session, None
        if session is not None:
            self.drops += 1
            threading.Thread(target=session.close, name="store-lmcache-end", daemon=True).start()

    def close(self) -> None:
        """Give the adapter up, and wait a deadline for its end."""
        with contextlib.suppress(StoreUnavailable):
            self.delete([self._canary])
        session, self._session = self._session, None
        if session is not None:
            ending = threading.Thread(target=session.close, name="store-lmcache-end", daemon=True)
            ending.start()
            ending.join(self._deadline_s)

    def check_pulse(self) -> None:
        """Some adapters answer "not there" when they are dead: ask for what must be there.

        Raises StoreUnavailable.
        """
        if not self.exists([self._canary])[0]:
            self.drop()
            raise StoreUnavailable("the LMCache adapter does not find what it was just given")

    def check_workers(self) -> None:
        """The pulse of all of an adapter's workers: one whose connection is dead misses everything.

        So many questions at once that each gets some of them. Raises StoreUnavailable.
        """
        if not all(all(self.exists([self._canary] * _QUESTIONS)) for _ in range(_ROUNDS)):
            self.drop()
            raise StoreUnavailable("a part of the LMCache adapter is dead")

    def store(self, items: Sequence[tuple[Name, bytearray]]) -> None:
        """Write objects; all are there when it returns. Raises StoreUnavailable."""
        keys = [self._toolkit.key(name) for name, _ in items]
        objects = [self._toolkit.wrap(data) for _, data in items]
        size = sum(len(data) for _, data in items)
        memory = (items, objects)
        done = self._call("store", lambda a: a.submit_store_task(keys, objects), memory, size)
        if not done:
            self.drop()
            raise StoreUnavailable("the LMCache adapter could not store")

    def load(self, items: Sequence[tuple[Name, bytearray]]) -> list[bool]:
        """Fill buffers of the objects' own lengths; which were there. Raises StoreUnavailable."""
        keys = [self._toolkit.key(name) for name, _ in items]
        objects = [self._toolkit.wrap(data) for _, data in items]
        size = sum(len(data) for _, data in items)
        memory = (items, objects)
        found = self._call("load", lambda a: a.submit_load_task(keys, objects), memory, size)
        return [bool(found.test(index)) for index in range(len(items))]

    def exists(self, names: Sequence[Name]) -> list[bool]:
        """Which objects are there. Raises StoreUnavailable."""
        keys = [self._toolkit.key(name) for name in names]
        found = self._call("lookup", lambda a: a.submit_lookup_and_lock_task(keys, {}), keys, 0)
        there = [bool(found.test(index)) for index in range(len(names))]
        locked = [key for key, is_there in zip(keys, there, strict=True) if is_there]
        session = self._session
        if locked and session is not None:
            session.unlock(locked)
        return there

    def delete(self, names: Sequence[Name]) -> None:
        """Remove objects, if the adapter can. Raises StoreUnavailable."""
        keys = [self._toolkit.key(name) for name in names]
        session = self._session
        if session is None:
            raise StoreUnavailable("the LMCache adapter is being replaced")
        try:
            self._bounded.call(lambda: session.adapter.delete(keys), self._deadline_s)
        except StoreUnavailable:
            self.drop()
            raise

    def _call(self, kind: str, task: Callable[[Any], int], memory: object, size: int) -> Any:
        session = self._session
        if session is None:
            raise StoreUnavailable("the LMCache adapter is being replaced")
        end = time.monotonic() + self._deadline_s + size / self._rate_min
        try:
            answer = session.submit(kind, lambda: task(session.adapter), memory)
            return answer.result(max(0.0, end - time.monotonic()))
        except TimeoutError as error:
            self._lost(session)
            raise StoreUnavailable(f"the LMCache adapter is late with a {kind}") from error
        except Exception as error:
            self._lost(session)
            raise StoreUnavailable(f"the LMCache adapter failed a {kind}: {error}") from error

    def _lost(self, session: _Session) -> None:
        if self._session is session:
            self.drop()
