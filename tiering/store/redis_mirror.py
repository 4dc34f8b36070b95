"""The catalogue of a Redis store in this process's memory.

``has`` asks it and nothing else. It follows the server's log of changes; what this process
changes itself is applied at once, ahead of the log, and the log's older entries for those rows
are then passed over. Lookups take no lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from dsv4_tierd.tiering.errors import TransferFailed
from dsv4_tierd.tiering.store.catalogue import Catalogue, Entry, Extent
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind
from dsv4_tierd.tiering.store.redis_rows import (
    BEGINNING,
    Event,
    EventId,
    Place,
    field_of,
    key_of,
    row_of,
)

ROW_OVERHEAD_BYTES = 256  # a row's share of the server's memory, in the gauge of bytes used


@dataclass(slots=True, eq=False)
class Held:
    """One extent: its bytes go when no row is left. ``expires_ms``: server's clock, 0 never."""

    name: bytes
    number: int
    byte_count: int
    tenant: str
    expires_ms: int = 0
    rows: set[Row] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Row(Entry):
    """A catalogue entry whose segment is an extent; ``packed`` is the row as the server has it."""

    packed: bytes = field(kw_only=True)
    place: Place = field(kw_only=True)
    held: Held = field(kw_only=True)


class Mirror:
    """Rows of one identity. Changes take ``lock``; lookups do not."""

    def __init__(self, identity: bytes) -> None:
        self.lock = threading.RLock()
        self.last_id = BEGINNING
        self.pinned: set[bytes] = set()
        self.bytes_used = 0
        self.passed_over: set[bytes] = set()
        self.tenant_bytes: dict[str, int] = {}
        self.held: dict[bytes, Held] = {}
        self._identity = identity
        self._catalogue = Catalogue()
        self._ahead: dict[bytes, EventId] = {}
        self._numbers = count(1)
        self._clock_offset_ms = 0.0

    # ------------------------------------------------------------ lookups
    def find(self, key: ObjectKey) -> Row | None:
        """The row of that name, unless its bytes have run out of time."""
        entry = self._catalogue.find(self._identity, key)
        if entry is None:
            return None
        assert isinstance(entry, Row)
        expires = entry.held.expires_ms
        return entry if not expires or expires > self.now_ms() else None

    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Whether each is there, without a lock: a microsecond each."""
        return [self.find(key) is not None for key in keys]

    def now_ms(self) -> int:
        """The server's clock, as far as it is known."""
        return int(time.monotonic() * 1000 + self._clock_offset_ms)

    def set_clock(self, server_ms: int) -> None:
        """The server says that it is now ``server_ms``."""
        self._clock_offset_ms = server_ms - time.monotonic() * 1000

    @property
    def count(self) -> int:
        return self._catalogue.count

    @property
    def seen(self) -> int:
        """Rows of the server's catalogue, those of other versions too."""
        return self._catalogue.count + len(self.passed_over)

    def rows(self) -> list[Row]:
        """All of them."""
        with self.lock:
            return [entry for entry in self._catalogue if isinstance(entry, Row)]

    def subtree(self, keys: Iterable[ObjectKey]) -> list[Row]:
        """The objects that are there and what hangs on them, children first."""
        with self.lock:
            found = [self._catalogue.find(self._identity, key) for key in keys]
            entries = self._catalogue.subtree(entry for entry in found if entry is not None)
            return [entry for entry in entries if isinstance(entry, Row)]

    def expired(self) -> list[Row]:
        """Rows whose bytes have run out of time, and what hangs on them."""
        with self.lock:
            now = self.now_ms()
            late = [h for h in self.held.values() if h.expires_ms and h.expires_ms <= now]
            roots = [row for held in late for row in held.rows]
            return [e for e in self._catalogue.subtree(roots) if isinstance(e, Row)]

    # ------------------------------------------------------------ uses
    def touch(self, row: Row) -> None:
        """The row was read now."""
        with self.lock:
            self._catalogue.touch(row)

    def chain(self, held: Iterable[Held]) -> set[Held]:
        """The extents and those that their rows hang on, up to the roots."""
        with self.lock:
            seen: set[bytes] = set()
            found: set[Held] = set()
            pending = [row for each in held for row in each.rows]
            while pending:
                row = pending.pop()
                found.add(row.held)
                anchor = row.anchor
                if anchor is None or anchor in seen:
                    continue
                seen.add(anchor)
                page = self._catalogue.find(
                    self._identity, ObjectKey(ObjectKind.PAGE, row.key.tenant, anchor)
                )
                if isinstance(page, Row) and page is not row:
                    pending.append(page)
            return found

    def pinned_extents(self) -> set[Held]:
        """Extents that pins keep: those of pinned objects and of what they hang on."""
        with self.lock:
            rows = [self._row(name) for name in self.pinned]
            return self.chain(row.held for row in rows if row is not None)

    def give_up(self, excess: int, protected: frozenset[bytes], tenant: str | None) -> list[Row]:
        """Take out the coldest rows whose extents are worth ``excess`` bytes; may be too few."""
        victims: list[Row] = []
        with self.lock:
            pinned = (_key(each) for each in self.pinned)
            kept = protected | {key.digest for key in pinned if key is not None}
            before = self.bytes_used
            while before - self.bytes_used < excess:
                entry = self._catalogue.pop_victim(kept, tenant)
                if entry is None:
                    break
                assert isinstance(entry, Row)
                self._release(entry)
                victims.append(entry)
        return victims

    # ------------------------------------------------------------ changes
    def follow(self, event: Event) -> None:
        """Apply the log's next entry; older ones than the last are passed over."""
        with self.lock:
            if event.id <= self.last_id:
                return
            self.last_id = event.id
            self._apply(event, own=False)

    def lead(self, event: Event) -> None:
        """Apply what this process has just changed, unless the log has told already."""
        with self.lock:
            if event.id > self.last_id:
                self._apply(event, own=True)

    def adopt(self, field_: bytes, packed: bytes) -> None:
        """A row that the server has just shown, whose log entry is on its way."""
        with self.lock:
            if self._row(field_) is None:
                self._put(field_, packed)

    def drop(self, row: Row) -> None:
        """A row turned out to be worth nothing."""
        with self.lock:
            if row.live:
                self._remove(row)

    def forget(self, name: bytes) -> None:
        """The server does not have this row."""
        with self.lock:
            row = self._row(name)
            if row is not None:
                self._remove(row)

    def reset(
        self,
        rows: dict[bytes, bytes],
        expiries: dict[bytes, int],
        pins: Iterable[bytes],
        last_id: EventId,
    ) -> None:
        """Begin anew with what the server holds; older extents first in the order of eviction."""
        with self.lock:
            self._catalogue = Catalogue()
            self.held, self.bytes_used, self.tenant_bytes = {}, 0, {}
            self.passed_over = set()
            self._ahead, self.last_id, self.pinned = {}, last_id, set(pins)
            for name, packed in sorted(rows.items(), key=_age):
                self._put(name, packed)
            for extent, expires in expiries.items():
                if extent in self.held:
                    self.held[extent].expires_ms = expires

    def _apply(self, event: Event, *, own: bool) -> None:
        for name, value in event.pairs:
            if name[:1] == b"x":
                self._use(name[1:], int(value), touched=event.verb == b"use" and not own)
                continue
            ahead = self._ahead.get(name)
            if own:
                self._ahead[name] = event.id
            elif ahead is not None:
                if ahead > event.id:
                    continue
                del self._ahead[name]
            self._change(event.verb, name, value)

    def _change(self, verb: bytes, name: bytes, value: bytes) -> None:
        if verb == b"put":
            self._put(name, value)
        elif verb == b"del":
            row = self._row(name)
            self.pinned.discard(name)
            self.passed_over.discard(name)
            if row is not None and row.packed == value:
                self._remove(row)
        elif verb == b"pin":
            self.pinned.add(name)
        elif verb == b"unpin":
            self.pinned.discard(name)

    def _row(self, name: bytes) -> Row | None:
        key = _key(name)
        entry = None if key is None else self._catalogue.find(self._identity, key)
        return entry if isinstance(entry, Row) else None

    def _put(self, name: bytes, packed: bytes) -> None:
        old = self._row(name)
        if old is not None:
            if old.packed == packed:
                return
            self._remove(old)
        try:
            key, place = row_of(name, packed)
        except TransferFailed:
            self.passed_over.add(name)  # of another version: nothing that this one can read
            return
        self.passed_over.discard(name)
        held = self.held.get(place.extent)
        if held is None:
            held = Held(place.extent, next(self._numbers), place.extent_bytes, key.tenant)
            self.held[place.extent] = held
            self._count(held.tenant, held.byte_count)
        row = Row(
            next(self._numbers),
            self._identity,
            key,
            place.parent,
            Extent(held.number, place.offset, place.size),
            place.payload_bytes,
            self._catalogue.tick(),
            packed=packed,
            place=place,
            held=held,
        )
        held.rows.add(row)
        self._count(held.tenant, ROW_OVERHEAD_BYTES)
        self._catalogue.add(row)

    def _remove(self, row: Row) -> None:
        self._catalogue.remove(row)
        self._release(row)

    def _release(self, row: Row) -> None:
        """The row has left the catalogue."""
        held = row.held
        held.rows.discard(row)
        self.pinned.discard(field_of(row.key))
        self._count(held.tenant, -ROW_OVERHEAD_BYTES)
        if not held.rows and self.held.get(held.name) is held:
            del self.held[held.name]
            self._count(held.tenant, -held.byte_count)

    def _use(self, extent: bytes, expires_ms: int, *, touched: bool) -> None:
        held = self.held.get(extent)
        if held is not None:
            held.expires_ms = expires_ms
            if touched:
                for row in held.rows:
                    self._catalogue.touch(row)

    def _count(self, tenant: str, change: int) -> None:
        self.bytes_used += change
        self.tenant_bytes[tenant] = self.tenant_bytes.get(tenant, 0) + change
        if not self.tenant_bytes[tenant]:  # a gauge of nobody
            del self.tenant_bytes[tenant]


def _key(name: bytes) -> ObjectKey | None:
    """The object that a field names; None: another version's."""
    try:
        return key_of(name)
    except TransferFailed:
        return None


def _age(item: tuple[bytes, bytes]) -> tuple[bytes, int, int]:
    """Extents by the time in their names, records by place: parents before their children."""
    try:
        place = Place.unpack(item[1])
    except TransferFailed:
        return b"", 0, 0
    stamp = place.extent.rpartition(b":")[2].partition(b"-")[0]
    return stamp.rjust(16, b"0"), place.offset, len(item[0])
