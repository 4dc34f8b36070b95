"""What moves between the tiers in the background: out to the remote, and up into the local one.

One thread for each way, so that a remote that hangs keeps no copy from coming up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from dsv4_tierd.tiering.errors import PreconditionFailed, StoreUnavailable, TierError
from dsv4_tierd.tiering.store.bounded import Bounded
from dsv4_tierd.tiering.store.protocol import (
    Facts,
    ObjectKey,
    ObjectKind,
    PrefixStore,
    StoredObject,
)

log = logging.getLogger(__name__)

LOOK_S = 0.2
PARENT_WAIT_S = 30.0


class RemoteTier(Protocol):
    """What ``Outbox`` needs of a remote."""

    writes: Bounded
    doomed: dict[ObjectKey, None]
    doomed_tenants: dict[str, None]

    def has(self, keys: Sequence[ObjectKey]) -> list[bool]: ...

    def put(
        self, objects: Sequence[StoredObject], wanted: Callable[[ObjectKey], bool] | None = None
    ) -> None: ...

    def purge(self) -> int: ...


def chain_of(
    key: ObjectKey, find: Callable[[ObjectKey], Facts | None]
) -> Iterator[tuple[ObjectKey, Facts]]:
    """A page and those before it, as far up as ``find`` knows them."""
    facts = find(key)
    while facts is not None:
        yield key, facts
        if facts.parent is None:
            return
        key = ObjectKey(ObjectKind.PAGE, key.tenant, facts.parent)
        facts = find(key)


class Outbox:
    """Names of what the remote is to get, in order; the bytes stay in the local tier till then."""

    def __init__(self, local: PrefixStore, remote: RemoteTier, batch_bytes: int) -> None:
        self._local, self._remote, self._batch_bytes = local, remote, batch_bytes
        self._changed = threading.Condition()
        self._waiting: dict[ObjectKey, None] = {}
        self._in_hand: dict[ObjectKey, None] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="store-out", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Objects that are still to be sent."""
        return len(self._waiting) + len(self._in_hand)

    def send(self, keys: Iterable[ObjectKey]) -> None:
        """Send these, soon."""
        with self._changed:
            self._waiting.update(dict.fromkeys(keys))
            self._changed.notify_all()

    def send_chain(self, leaf: ObjectKey) -> None:
        """Send a page, the pages before it, and their points, as far as the remote lacks them."""
        pages = [key for key, _ in chain_of(leaf, self._local.find)][::-1]
        points = [ObjectKey(ObjectKind.RESUME, key.tenant, key.digest) for key in pages]
        names = [*pages, *points]
        here = [*(True for _ in pages), *self._local.has(points)]
        there = self._remote.has(names)
        self.send(
            key for key, has, known in zip(names, here, there, strict=True) if has and not known
        )

    def forget(self, which: Callable[[ObjectKey], bool]) -> None:
        """Do not send these."""
        with self._changed:
            for keys in (self._waiting, self._in_hand):
                for key in [key for key in keys if which(key)]:
                    del keys[key]

    def flush(self, end: float) -> bool:
        """Wait until nothing is left to send; False: ``end`` (monotonic) came first."""
        with self._changed:
            while self.waiting or self._remote.doomed or self._remote.doomed_tenants:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, LOOK_S))
        return True

    def close(self) -> None:
        """End the thread, or leave it to its deadline."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(LOOK_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._stopping and not (self._waiting and self._remote.writes.closed):
                    self._changed.wait(LOOK_S)
                if self._stopping:
                    return
            if not self._remote.writes.closed:
                continue
            try:
                if self._remote.doomed or self._remote.doomed_tenants:
                    self._remote.purge()
                self._send_batch()
            except StoreUnavailable:
                continue  # the breaker says when to go on
            except Exception:  # the thread outlives what nobody foresaw
                log.exception("store: writing to the remote tier failed")
                self._remote.writes.trip("an unforeseen error")

    def _send_batch(self) -> None:
        batch = self._take()
        if not batch:
            return
        try:
            try:
                self._remote.put(batch, self._in_hand.__contains__)
            except PreconditionFailed:
                self._resend(batch)
        except StoreUnavailable:
            self._put_back()
            raise
        finally:
            with self._changed:
                self._in_hand.clear()
                self._changed.notify_all()

    def _put_back(self) -> None:
        with self._changed:
            self._waiting = self._in_hand | self._waiting
            self._in_hand = {}

    def _resend(self, batch: Sequence[StoredObject]) -> None:
        """The remote gave up pages before these: they go first; what has none here is left out."""
        before: dict[ObjectKey, None] = {}
        for item in batch:
            if item.parent is not None and item.key.kind is ObjectKind.PAGE:
                start = ObjectKey(ObjectKind.PAGE, item.key.tenant, item.parent)
                walk = [key for key, _ in chain_of(start, self._local.find)]
                before.update(dict.fromkeys(reversed(walk)))
        wanted = (before | self._in_hand).__contains__
        names = list(dict.fromkeys([*before, *(item.key for item in batch)]))
        there = self._remote.has(names)
        for key in [key for key, known in zip(names, there, strict=True) if not known]:
            lacking = self._read(key)
            if lacking is not None:
                try:
                    self._remote.put([lacking], wanted)
                except PreconditionFailed:
                    log.debug("store: %s has no page before it any more", key)

    def _take(self) -> list[StoredObject]:
        """The next objects, up to a batch's bytes, those that the remote has left out."""
        batch: list[StoredObject] = []
        size = 0
        while size < self._batch_bytes:
            with self._changed:
                key = next(iter(self._waiting), None)
                if key is None:
                    break
                del self._waiting[key]
                self._in_hand[key] = None
            item = None if self._remote.has([key])[0] else self._read(key)
            if item is not None:
                batch.append(item)
                size += memoryview(item.payload).nbytes
        if not batch:
            with self._changed:
                self._in_hand.clear()
                self._changed.notify_all()
        return batch

    def _read(self, key: ObjectKey) -> StoredObject | None:
        """The object as the local tier has it; None: it has not, or not whole."""
        try:
            facts = self._local.find(key)
            if facts is None:
                return None
            payload = bytearray(facts.payload_bytes)
            if not self._local.get(key, memoryview(payload)):
                return None
        except TierError as error:
            log.warning("store: %s is not sent to the remote tier: %s", key.kind.name, error)
            return None
        return StoredObject(key, facts.parent, memoryview(payload))


class CopyUp:
    """Objects read from the remote, on their way into the local tier, pages before their own."""

    def __init__(self, local: PrefixStore, bytes_max: int) -> None:
        self._local, self._bytes_max = local, bytes_max
        self._changed = threading.Condition()
        self._waiting: dict[ObjectKey, tuple[StoredObject, float]] = {}
        self._bytes = 0
        self._busy = False
        self._stopping = False
        self.dropped = self.epoch = 0
        self._thread = threading.Thread(target=self._run, name="store-up", daemon=True)
        self._thread.start()

    def offer(self, item: StoredObject, epoch: int) -> None:
        """Copy this, unless too much is waiting, or anything was deleted since ``epoch``."""
        size = len(item.payload)
        with self._changed:
            if epoch != self.epoch or item.key in self._waiting:
                return
            if self._bytes + size > self._bytes_max:
                self.dropped += 1
                return
            self._waiting[item.key] = (item, time.monotonic())
            self._bytes += size
            self._changed.notify_all()

    def forget(self, which: Callable[[ObjectKey], bool]) -> None:
        """Do not copy these."""
        with self._changed:
            self.epoch += 1
            for key in [key for key in self._waiting if which(key)]:
                self._drop(key)
            while self._busy:  # one that is on its way is in before it is deleted
                self._changed.wait(LOOK_S)

    def flush(self, end: float) -> bool:
        """Wait until nothing can be copied any more; False: ``end`` (monotonic) came first."""
        with self._changed:
            while self._busy or self._next() is not None:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, LOOK_S))
        return True

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                item = self._next()
                while item is None and not self._stopping:
                    self._changed.wait(LOOK_S if self._waiting else None)
                    item = self._next()
                if self._stopping or item is None:
                    return
                self._drop(item.key)
                self._busy = True
            try:
                self._local.put([item])
            except TierError as error:
                self.dropped += 1
                log.debug("store: a copy is not kept: %s", error)
            except Exception:  # the thread outlives what nobody foresaw
                log.exception("store: copying to the local tier failed")
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> StoredObject | None:
        """One whose page before it is there; those whose never came in time are dropped."""
        late = time.monotonic() - PARENT_WAIT_S
        for key, (item, since) in list(self._waiting.items()):
            if self._rooted(item):
                return item
            if since < late:
                self._drop(key)
                self.dropped += 1
        return None

    def _rooted(self, item: StoredObject) -> bool:
        if item.parent is None or item.key.kind is not ObjectKind.PAGE:
            return True
        try:
            return self._local.has([ObjectKey(ObjectKind.PAGE, item.key.tenant, item.parent)])[0]
        except StoreUnavailable:
            return False

    def _drop(self, key: ObjectKey) -> None:
        item, _ = self._waiting.pop(key)
        self._bytes -= len(item.payload)
