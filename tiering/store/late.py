"""A store that cannot be opened yet: away until it can, and then itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from dsv4_tierd.tiering.errors import StoreUnavailable
from dsv4_tierd.tiering.store.protocol import (
    Facts,
    ObjectKey,
    PrefixStore,
    StoredObject,
    StoreUsage,
    TwoTiers,
    parts_of,
)

log = logging.getLogger(__name__)

RETRY_S = 5.0


class LateStore:
    """``PrefixStore`` over what ``open_it`` will return; tried every ``retry_s`` in the background.

    A prefix store saves work and holds no truth, so an engine that comes back does not wait for
    one that is full, locked or gone.
    """

    def __init__(
        self,
        open_it: Callable[[], PrefixStore],
        identity: bytes,
        bytes_max: int,
        retry_s: float = RETRY_S,
    ) -> None:
        self._open_it, self._identity, self._bytes_max = open_it, identity, bytes_max
        self._retry_s = retry_s
        self._store: PrefixStore | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-open", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closing.wait(self._retry_s):
            try:
                self._store = self._open_it()
            except StoreUnavailable as error:
                log.warning("store: still not open: %s", error.message)
                continue
            except Exception:  # the thread outlives what nobody foresaw
                log.exception("store: still not open")
                continue
            log.info("store: open at last")
            return

    def _now(self) -> PrefixStore:
        if self._store is None or self._closing.is_set():
            raise StoreUnavailable("the store could not be opened yet")
        return self._store

    @property
    def identity(self) -> bytes:
        """As the protocol says; so is every call below."""
        return self._identity

    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return self._now().has(keys)

    def find(self, key: ObjectKey) -> Facts | None:
        return self._now().find(key)

    def get(self, key: ObjectKey, into: memoryview) -> bool:
        return self._now().get(key, into)

    def put(self, objects: Sequence[StoredObject]) -> None:
        self._now().put(objects)

    def delete(self, keys: Iterable[ObjectKey]) -> int:
        return self._now().delete(keys)

    def delete_tenant(self, tenant: str) -> int:
        return self._now().delete_tenant(tenant)

    def parts(self) -> tuple[PrefixStore, ...]:
        return parts_of(self._now())

    def usage(self) -> StoreUsage:
        if self._store is not None:
            return self._store.usage()
        return StoreUsage(False, 0, 0, self._bytes_max, 0, 0, 0, 0)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        if self._store is not None:
            self._store.close()


class LateTwoTiers(LateStore):
    """The same, of a store of two tiers."""

    @property
    def waiting(self) -> int:
        return self._store.waiting if isinstance(self._store, TwoTiers) else 0

    def send_chain(self, leaf: ObjectKey) -> None:
        inner = self._now()
        assert isinstance(inner, TwoTiers)
        inner.send_chain(leaf)
