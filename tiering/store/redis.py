"""The prefix store on Redis, Valkey or a cluster of either: one prefix for many daemons.

A put packs objects into extents of at most 4 MiB, writes them, and publishes their catalogue
rows last and at once, so that whatever is visible is whole. ``has`` looks at a mirror of the
catalogue in memory, which follows the server's log of changes. The server may lose what it
likes: a row whose bytes are gone is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from dsv4_tierd.tiering.errors import (
    InvalidRequest,
    NotPinned,
    PinBudgetExhausted,
    PreconditionFailed,
    StoreUnavailable,
    TransferFailed,
)
from dsv4_tierd.tiering.store.codec import (
    HEADER_BYTES_MAX,
    MAGIC,
    check_name,
    check_parent,
    check_payload,
    decode_header,
    encode_header,
    header_size,
)
from dsv4_tierd.tiering.store.disk import GcReport, ObjectInfo, VerifyReport
from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.protocol import (
    Facts,
    ObjectKey,
    ObjectKind,
    StoredObject,
    StoreUsage,
)
from dsv4_tierd.tiering.store.redis_care import (
    GRACE_S,
    delete_tenant_elsewhere,
    list_objects,
    shrink,
    tidy,
    verify,
)
from dsv4_tierd.tiering.store.redis_config import RedisConfig
from dsv4_tierd.tiering.store.redis_keeper import Keeper
from dsv4_tierd.tiering.store.redis_link import Link, OutOfMemory
from dsv4_tierd.tiering.store.redis_mirror import ROW_OVERHEAD_BYTES, Row
from dsv4_tierd.tiering.store.redis_rows import ROWS_PER_CALL, Doom, Place, field_of, key_of
from dsv4_tierd.tiering.store.redis_shelf import Draft, Shelf

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_ERASED = bytes(len(MAGIC))


class RedisStore:
    """``PrefixStore`` on a Redis. Without an identity it serves maintenance only."""

    def __init__(self, config: RedisConfig, identity: StoreIdentity | None) -> None:
        """Connect, or start down and keep trying. Raises InvalidRequest (the URL)."""
        self._identity = bytes(32) if identity is None else identity.digest
        self.link = Link(config)
        self.shelf = Shelf(self.link, self._identity)
        self.config = self.link.config
        self._mirror = self.shelf.mirror
        self._writing = threading.Lock()
        self._counting = threading.Lock()
        self._open = True
        self._trouble: str | None = None
        self._bytes_read = self._bytes_written = 0
        self._checksum_failures = self._evicted = 0
        self.keeper = Keeper(self.shelf, identity)
        self.keeper.start()

    @property
    def identity(self) -> bytes:
        """Digest under which this store reads and writes; zeros when for maintenance only."""
        return self._identity

    # ------------------------------------------------------------ reading
    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Memory only, no lock. Raises StoreUnavailable, at once, while the server is away."""
        self._check()
        return self._mirror.has(keys)

    def find(self, key: ObjectKey) -> Facts | None:
        """Memory only, no lock. Raises as ``has``."""
        self._check()
        row = self._mirror.find(key)
        return None if row is None else Facts(row.parent, row.payload_bytes)

    def get(self, key: ObjectKey, into: memoryview) -> bool:
        """Read and check one object; a bad one is forgotten before TransferFailed is raised."""
        self._check()
        into = into.cast("B")
        row = self._mirror.find(key)
        if row is None:
            return False
        if row.payload_bytes != len(into):
            raise TransferFailed(f"{key.kind.name} of {row.payload_bytes} B for {len(into)}")
        try:
            there = self._read(row, into)
        except TransferFailed as error:
            log.warning("store: %s is bad and forgotten: %s", _describe(key), error)
            with self._counting:
                self._checksum_failures += 1
            self._forget(row)
            raise
        if not there:
            self._forget(row)
            return False
        with self._counting:
            self._bytes_read += len(into)
        self._mirror.touch(row)
        self.keeper.used(row.held)
        return True

    def _read(self, row: Row, into: memoryview) -> bool:
        """Fill ``into``; False: the bytes are not there (any more). Raises TransferFailed."""
        head = memoryview(bytearray(row.place.size - row.payload_bytes))
        found = self.shelf.read(row.place, [head, into])
        if found == 0 or (found == row.place.size and head[: len(MAGIC)] == _ERASED):
            return False  # evicted, expired or deleted since the look-up
        if found < row.place.size:
            raise TransferFailed(f"short read: {found} of {row.place.size} bytes")
        header = decode_header(head[:HEADER_BYTES_MAX])
        check_name(header, self._identity, row.key)
        check_payload(header, into)
        check_parent(header, row.parent)
        return True

    def _forget(self, row: Row) -> None:
        """Take the row back, here at once and everywhere soon."""
        self._mirror.drop(row)
        try:
            self.shelf.remove([row], erase=False)
        except StoreUnavailable as error:
            log.warning("store: %s is not forgotten yet: %s", _describe(row.key), error)

    # ------------------------------------------------------------ writing
    def put(self, objects: Sequence[StoredObject]) -> None:
        """Write what is not there yet, in commits of at most ``commit_bytes``, each whole or not.

        Raises PreconditionFailed (a page's parent is not stored: nothing is written),
        StoreUnavailable (away, full, out of memory: earlier commits stay), InvalidRequest.
        """
        assert any(self._identity), "opened for maintenance only"
        with self._writing:
            self._check()
            self.shelf.catch_up()
            fresh = self._select(objects)
            kept = frozenset(
                digest
                for item in objects
                for digest in (item.key.digest, item.parent)
                if digest is not None
            )
            try:
                for group in _groups(fresh, self.config.commit_bytes, ROWS_PER_CALL):
                    self._commit(group, kept)
            except OutOfMemory as error:  # it answers, and takes nothing
                self._trouble = str(error)
                raise
            self._trouble = None

    def _select(self, objects: Sequence[StoredObject]) -> list[StoredObject]:
        """What must be written, each once, with parents checked."""
        fresh: dict[ObjectKey, StoredObject] = {}
        for item in objects:
            row = self._mirror.find(item.key)
            if row is not None:
                self._mirror.touch(row)
                self.keeper.used(row.held)
                continue
            if item.key.kind is ObjectKind.PAGE and item.parent is not None:
                parent = replace(item.key, digest=item.parent)
                if parent not in fresh and self._mirror.find(parent) is None:
                    raise PreconditionFailed(f"the page before {_describe(item.key)} is not stored")
            fresh.setdefault(item.key, item)
        return list(fresh.values())

    def _commit(self, group: Sequence[StoredObject], kept: frozenset[bytes]) -> None:
        """Make room, write, publish; on any failure nothing of ``group`` is visible."""
        extents = list(_extents(group, self.config.value_bytes))
        self._make_room(extents, kept)
        begun = time.monotonic()
        drafts: dict[ObjectKey, Draft] = {}
        written: list[Doom] = []
        try:
            for extent in extents:
                name = self.shelf.names.extent(extent[0].key, self._mirror.now_ms())
                written.append(Doom(name, sum(map(record_bytes, extent))))
                pieces = self._draft(written[-1], extent, drafts)
                self._squeezed(partial(self.shelf.write, name, pieces), kept)
            self.shelf.keep(written, begun)
            rows = [drafts[item.key] for item in group]
            in_use = self._squeezed(lambda: self.shelf.publish(rows), kept)
        except (PreconditionFailed, OutOfMemory):
            self.shelf.discard(written)  # known not to be published
            raise
        except StoreUnavailable:
            self.shelf.unsure(written)
            raise
        self.shelf.discard_unused(doom for doom in written if doom.extent not in in_use)
        with self._counting:
            self._bytes_written += sum(doom.extent_bytes for doom in written)

    def _draft(
        self, extent: Doom, items: Sequence[StoredObject], drafts: dict[ObjectKey, Draft]
    ) -> list[memoryview | bytes]:
        """Note where each item's record stands; returns the extent's bytes in pieces."""
        pieces: list[memoryview | bytes] = []
        at = 0
        for item in items:
            payload = memoryview(item.payload).cast("B")
            pieces += [encode_header(self._identity, item), payload]
            size = record_bytes(item)
            place = Place(extent.extent, extent.extent_bytes, at, size, len(payload), item.parent)
            drafts[item.key] = Draft(item, place)
            at += size
        return pieces

    def _squeezed(self, call: Callable[[], _T], kept: frozenset[bytes]) -> _T:
        """Make ``call``; where the server is fuller than our budget knows, evict and try again."""
        try:
            return call()
        except OutOfMemory:
            if not self._evict(2 * self.config.value_bytes, kept):
                raise
            return call()

    def _make_room(self, extents: Sequence[Sequence[StoredObject]], kept: frozenset[bytes]) -> None:
        """Evict until the extents fit both budgets. Raises StoreUnavailable."""
        need: dict[str, int] = {}
        for extent in extents:
            size = sum(record_bytes(item) + ROW_OVERHEAD_BYTES for item in extent)
            tenant = extent[0].key.tenant
            need[tenant] = need.get(tenant, 0) + size
        if self.config.tenant_bytes_max:
            for tenant, size in need.items():
                used = self._mirror.tenant_bytes.get(tenant, 0)
                excess = used + size - self.config.tenant_bytes_max
                if excess > 0 and self._evict(excess, kept, tenant) < excess:
                    raise StoreUnavailable("the tenant's budget is full, and in use")
        if self.config.bytes_max:
            excess = self._mirror.bytes_used + sum(need.values()) - self.config.bytes_max
            if excess > 0 and self._evict(excess, kept) < excess:
                raise StoreUnavailable("the store is full, and the rest of it is in use")

    def _evict(self, excess: int, kept: frozenset[bytes], tenant: str | None = None) -> int:
        """Give up the coldest objects; how many bytes that freed."""
        before = self._mirror.bytes_used
        victims = self._mirror.give_up(excess, kept, tenant)
        freed = before - self._mirror.bytes_used
        self.shelf.remove(victims, erase=False)
        with self._counting:
            self._evicted += len(victims)
        return freed

    # ------------------------------------------------------------ removing
    def delete(self, keys: Iterable[ObjectKey]) -> int:
        """Remove objects and what hangs on them; their bytes are gone when it returns.

        Returns how many of ``keys`` there were. Raises StoreUnavailable: then they may still be
        there, or be invisible and not all gone yet (which is made up for after a reconnect).
        """
        with self._writing:
            self._check()
            self.shelf.catch_up()
            wanted = list(dict.fromkeys(keys))
            found = [key for key in wanted if self._mirror.find(key) is not None]
            self.shelf.remove(self._mirror.subtree(wanted), erase=True)
            return len(found)

    def delete_tenant(self, tenant: str) -> int:
        """Remove every object of a tenant, under every identity."""
        with self._writing:
            self._check()
            self.shelf.catch_up()
            rows = [row for row in self._mirror.rows() if row.key.tenant == tenant]
            gone = self.shelf.remove(rows, erase=True)
            return gone + delete_tenant_elsewhere(self.link, tenant, self._identity)

    # ------------------------------------------------------------ pins
    def pin(self, keys: Sequence[ObjectKey]) -> None:
        """Keep objects, and the pages that they hang on, from eviction and from their end of time.

        Pinning again changes nothing. Raises PreconditionFailed (not stored: nothing is pinned),
        PinBudgetExhausted, StoreUnavailable.
        """
        with self._writing:
            self._check()
            self.shelf.catch_up()
            rows = [self._mirror.find(key) for key in keys]
            held = self._mirror.chain(row.held for row in rows if row is not None)
            size = sum(each.byte_count for each in held | self._mirror.pinned_extents())
            if self.config.bytes_max and size > self.config.pin_share * self.config.bytes_max:
                raise PinBudgetExhausted(f"{size} bytes would be pinned")
            for group in _runs(keys):
                wrong = self.shelf.pin([field_of(key) for key in group], on=True)
                if wrong:
                    raise PreconditionFailed(f"{_describe(key_of(wrong))} is not stored")
            self.shelf.use(held)

    def unpin(self, keys: Sequence[ObjectKey]) -> None:
        """Take pins back. Raises NotPinned (one of them was not: nothing changes)."""
        with self._writing:
            self._check()
            self.shelf.catch_up()
            held = self._mirror.pinned_extents()
            for group in _runs(keys):
                wrong = self.shelf.pin([field_of(key) for key in group], on=False)
                if wrong:
                    raise NotPinned(f"{_describe(key_of(wrong))} is not pinned")
            self.shelf.use(held)

    # ------------------------------------------------------------ state
    def verify(self, advance: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read and check every object of every identity; bad ones are forgotten.

        ``advance`` is told how many objects are done, and of about how many.
        """
        self._check()
        return verify(self.shelf, advance)

    def gc(self, grace_s: float = GRACE_S) -> GcReport:
        """Remove bytes without rows and rows without bytes, and identities without objects.

        ``grace_s``: younger bytes may be about to be published, and stay. For maintenance: each
        identity is shrunk to ``bytes_max`` first.
        """
        with self._writing:
            self._check()
            freed = 0
            if self.config.bytes_max and not any(self._identity):
                freed = shrink(self.shelf, self.config.bytes_max)
            found = tidy(self.shelf, grace_s)
            return replace(found, bytes_before=found.bytes_before + freed)

    def list_objects(self) -> Iterator[ObjectInfo]:
        """Every object of every identity."""
        self._check()
        return list_objects(self.shelf)

    def usage(self) -> StoreUsage:
        """Gauges of this identity, whoever stored it; counters of this process."""
        with self._counting:
            return StoreUsage(
                up=self._open and self.link.up and self._trouble is None,
                objects=self._mirror.count,
                bytes_used=self._mirror.bytes_used,
                bytes_max=self.config.bytes_max,
                bytes_written=self._bytes_written,
                bytes_read=self._bytes_read,
                checksum_failures=self._checksum_failures,
                evicted_objects=self._evicted + self.keeper.expired,
            )

    def close(self) -> None:
        """Tell what was used, and let the servers go. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        self.keeper.stop()
        self.link.close()

    def _check(self) -> None:
        if not self._open:
            raise StoreUnavailable("the store is closed", retry_after_s=None)
        self.link.check()


def record_bytes(item: StoredObject) -> int:
    """Bytes that an object takes in its extent."""
    return header_size(item.key.tenant) + memoryview(item.payload).nbytes


def _describe(key: ObjectKey) -> str:
    return f"{key.kind.name} {key.digest.hex()[:16]}"


def _runs(keys: Sequence[ObjectKey]) -> Iterator[Sequence[ObjectKey]]:
    """Pins are set all or none, so they go in one call."""
    if len(keys) > 3000:
        raise InvalidRequest(f"at most 3000 objects are pinned at once, got {len(keys)}")
    if keys:
        yield keys


def _groups(
    items: Sequence[StoredObject], bytes_max: int, count_max: int
) -> Iterator[list[StoredObject]]:
    """``items`` in order, in runs of at most ``bytes_max`` bytes (or one item)."""
    group: list[StoredObject] = []
    size = 0
    for item in items:
        if group and (size + record_bytes(item) > bytes_max or len(group) == count_max):
            yield group
            group, size = [], 0
        group.append(item)
        size += record_bytes(item)
    if group:
        yield group


def _extents(items: Sequence[StoredObject], bytes_max: int) -> Iterator[list[StoredObject]]:
    """One tenant's neighbours together; tails apart, as they come and go by themselves."""
    shelves: dict[tuple[str, bool], list[StoredObject]] = {}
    for item in items:
        where = (item.key.tenant, item.key.kind is ObjectKind.TAIL)
        shelves.setdefault(where, []).append(item)
    for (_, is_tail), shelf in shelves.items():
        yield from _groups(shelf, bytes_max, 1 if is_tail else ROWS_PER_CALL)
