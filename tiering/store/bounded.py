"""Calls to a store that may hang, bounded from outside, with a circuit breaker in front.

Stores have deadlines of their own; this one holds whatever they do. A call that is late is no
longer waited for: its thread ends when the store lets it, and nobody looks at its result.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from dsv4_tierd.tiering.errors import StoreUnavailable

log = logging.getLogger(__name__)

CALLS_MAX = 8
_T = TypeVar("_T")


class Bounded:
    """A breaker with a deadline for each call. Thread-safe.

    ``retry_after_s``: so long after a failure nothing is asked; then one call tries.
    """

    def __init__(self, name: str, retry_after_s: float) -> None:
        self._name, self._retry_after_s = name, retry_after_s
        self._retry_at = 0.0
        self._failing = False
        self._slots = threading.Semaphore(CALLS_MAX)
        self.trips = 0

    @property
    def closed(self) -> bool:
        """Whether calls are made."""
        return time.monotonic() >= self._retry_at

    def call(self, use: Callable[[], _T], deadline_s: float) -> _T:
        """``use()``'s result within the deadline.

        Raises StoreUnavailable (late, away, too many calls hang) and what else ``use`` raises.
        """
        if not self.closed:
            raise StoreUnavailable(f"{self._name} is left alone for a while")
        if self._failing:  # this call tries, and the others wait for what it finds
            self._retry_at = time.monotonic() + self._retry_after_s
        if not self._slots.acquire(blocking=False):
            self.trip("too many calls hang")
            raise StoreUnavailable(f"{self._name}: too many calls hang")
        answer: Future[_T] = Future()
        threading.Thread(
            target=self._run, args=(use, answer), name=f"store-{self._name}", daemon=True
        ).start()
        try:
            found = answer.result(deadline_s)
        except TimeoutError as error:
            if answer.done():  # the store's own
                raise
            self.trip(f"no answer within {deadline_s:.1f} s")
            raise StoreUnavailable(f"{self._name} is late") from error
        except StoreUnavailable as error:
            self.trip(error.message)
            raise
        if self._failing:
            self._failing, self._retry_at = False, 0.0
            log.info("store: %s answers again", self._name)
        return found

    def trip(self, why: str) -> None:
        """Ask nothing for a while."""
        self._retry_at = time.monotonic() + self._retry_after_s
        if not self._failing:
            self._failing = True
            self.trips += 1
            log.warning("store: %s is left alone: %s", self._name, why)

    def _run(self, use: Callable[[], _T], answer: Future[_T]) -> None:
        try:
            found = use()
        except BaseException as error:  # noqa: BLE001 it is the caller's
            answer.set_exception(error)
        else:
            answer.set_result(found)
        finally:
            self._slots.release()
