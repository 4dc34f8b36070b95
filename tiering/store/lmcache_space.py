"""One identity's objects in an adapter: bytes, rows, and the catalogue that mirrors them."""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import xxhash
from blake3 import blake3

from dsv4_tierd.tiering.store.catalogue import Catalogue, Entry, Extent
from dsv4_tierd.tiering.store.codec import header_size
from dsv4_tierd.tiering.store.identity import StoreIdentity, differences
from dsv4_tierd.tiering.store.lmcache_log import Log, LogRow
from dsv4_tierd.tiering.store.lmcache_shelf import AdapterShelf, Name
from dsv4_tierd.tiering.store.protocol import ObjectKey, StoredObject

log = logging.getLogger(__name__)

IDENTITY_BYTES = 4096
_IDENTITY_GROUP = 102
_COMMON = "dsv4-tierd-1"
_SUM_BYTES = 8
_ASKED_AT_ONCE = 256


class Space:
    """Objects of one identity. Lookups need no lock; changes to the mirror take one."""

    def __init__(self, shelf: AdapterShelf, identity: bytes) -> None:
        self._shelf, self._identity = shelf, identity
        self._space = f"{_COMMON}-{identity[:16].hex()}"
        self._log = Log(shelf, identity, self._space)
        self._catalogue = Catalogue()
        self._removed: set[tuple[ObjectKey, int]] = set()  # told before what they remove
        self._row = 0
        self._lock = threading.Lock()
        self._cannot_delete = False
        self.bytes_used = 0

    # ------------------------------------------------------------ the mirror
    @property
    def count(self) -> int:
        """Objects."""
        return self._catalogue.count

    def find(self, key: ObjectKey) -> Entry | None:
        """The entry of that name, or None. ``extent``: incarnation, nothing, frame bytes."""
        return self._catalogue.find(self._identity, key)

    def entries(self) -> list[Entry]:
        """All of them, in the order in which they became known."""
        with self._lock:
            return sorted(self._catalogue, key=lambda entry: entry.row)

    def subtree(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries and all that hangs on them, children first."""
        with self._lock:
            return self._catalogue.subtree(entries)

    def of_tenant(self, tenant: str) -> list[Entry]:
        """Every entry of a tenant."""
        with self._lock:
            return self._catalogue.of_tenant(tenant)

    def touch(self, entry: Entry) -> None:
        """The entry was used now."""
        with self._lock:
            self._catalogue.touch(entry)

    def give_up(self, excess: int, kept: frozenset[bytes]) -> list[Entry]:
        """Take the coldest entries out of the mirror until ``excess`` bytes are free."""
        victims = []
        with self._lock:
            while excess > 0:
                entry = self._catalogue.pop_victim(kept)
                if entry is None:
                    break
                victims.append(entry)
                self.bytes_used -= entry.extent.size
                excess -= entry.extent.size
        return victims

    def lost(self) -> list[Entry]:
        """Entries whose bytes the adapter does not have. Raises StoreUnavailable."""
        entries = self.entries()
        found = []
        for at in range(0, len(entries), _ASKED_AT_ONCE):
            some = entries[at : at + _ASKED_AT_ONCE]
            there = self._shelf.exists([self.name(entry) for entry in some])
            found += [entry for entry, is_there in zip(some, there, strict=True) if not is_there]
        return found

    def name(self, entry: Entry) -> Name:
        """Where an entry's frame lies."""
        return self._name(entry.key, entry.extent.segment)

    # ------------------------------------------------------------ changes
    def follow(self) -> None:
        """Apply what other writers did. Raises StoreUnavailable."""
        twins: list[Entry] = []
        for row in self._log.read_new():
            with self._lock:
                twins += self._apply(row)
        self.remove(twins)

    def add(self, frames: Sequence[tuple[StoredObject, bytearray]]) -> None:
        """Write frames, then make them visible. Raises StoreUnavailable."""
        rows = [
            LogRow(item.key, secrets.randbits(31), memoryview(item.payload).nbytes, item.parent)
            for item, _ in frames
        ]
        self._shelf.store(
            [
                (self._name(row.key, row.incarnation), frame)
                for row, (_, frame) in zip(rows, frames, strict=True)
            ]
        )
        self._log.append(rows)
        late: list[Entry] = []
        with self._lock:
            for row in rows:
                late += self._apply(row, own=True)
        self.remove(late)

    def remove(self, entries: Sequence[Entry]) -> None:
        """Take entries out here, then for everyone, then their bytes. Raises StoreUnavailable."""
        if not entries:
            return
        with self._lock:
            for entry in entries:
                if entry.live and self._catalogue.find(self._identity, entry.key) is entry:
                    self._catalogue.remove(entry)
                    self.bytes_used -= entry.extent.size
        self._log.append(
            [LogRow(entry.key, entry.extent.segment, removed=True) for entry in entries]
        )
        names = [self.name(entry) for entry in entries]
        self._shelf.delete(names)
        if not self._cannot_delete and any(self._shelf.exists(names)):
            self._cannot_delete = True
            log.warning("store: this LMCache adapter deletes nothing: bytes stay until it evicts")

    def _apply(self, row: LogRow, *, own: bool = False) -> list[Entry]:
        """Bring a row into the mirror; entries whose twin, stored at the same time, stays.

        ``own``: nobody else will remove this one, should the other stay.
        """
        name = (row.key, row.incarnation)
        there = self.find(row.key)
        if row.removed:
            if there is not None and there.extent.segment == row.incarnation:
                self._take_out(there)
            else:
                self._removed.add(name)
            return []
        if name in self._removed:
            self._removed.discard(name)
            return []
        if there is not None:
            if there.extent.segment <= row.incarnation:
                return [self._entry(row)] if own else []
            self._take_out(there)
        entry = self._entry(row)
        self._catalogue.add(entry)
        self.bytes_used += entry.extent.size
        return [] if there is None else [there]

    def _entry(self, row: LogRow) -> Entry:
        self._row += 1
        size = header_size(row.key.tenant) + row.payload_bytes
        return Entry(
            self._row,
            self._identity,
            row.key,
            row.parent,
            Extent(row.incarnation, 0, size),
            row.payload_bytes,
            used=self._catalogue.tick(),
        )

    def _take_out(self, entry: Entry) -> None:
        self._catalogue.remove(entry)
        self.bytes_used -= entry.extent.size

    def _name(self, key: ObjectKey, incarnation: int) -> Name:
        salt = blake3(key.tenant.encode()).hexdigest()[:32] if key.tenant else ""
        return Name(self._space, key.digest, int(key.kind), incarnation, salt)


# ------------------------------------------------------------ identities
def _identity_name(slot: int) -> Name:
    return Name(_COMMON, slot.to_bytes(32, "little"), _IDENTITY_GROUP)


def stored_identities(shelf: AdapterShelf) -> Iterator[tuple[int, dict[str, Any]]]:
    """Slot and fields of every identity that wrote here. Raises StoreUnavailable."""
    slot = 0
    while any(shelf.exists([_identity_name(slot), _identity_name(slot + 1)])):
        data = bytearray(IDENTITY_BYTES)
        if shelf.load([(_identity_name(slot), data)])[0]:
            body, told = data[:-_SUM_BYTES], data[-_SUM_BYTES:]
            if xxhash.xxh3_64_digest(body) == bytes(told):
                yield slot, json.loads(body.rstrip(b"\0"))
        slot += 1


def remember_identity(shelf: AdapterShelf, identity: StoreIdentity) -> None:
    """Keep the fields of an identity beside what it writes. Raises StoreUnavailable."""
    free = 0
    for slot, fields in stored_identities(shelf):
        free = slot + 1
        if fields == identity.as_dict():
            return
    body = bytearray(json.dumps(identity.as_dict()).encode().ljust(IDENTITY_BYTES - 8, b"\0"))
    shelf.store([(_identity_name(free), body + xxhash.xxh3_64_digest(body))])


def other_identities(shelf: AdapterShelf, own: bytes) -> list[bytes]:
    """Digests of the other identities that wrote here."""
    digests = [StoreIdentity(**fields).digest for _, fields in stored_identities(shelf)]
    return [digest for digest in digests if digest != own]


def log_other_identities(shelf: AdapterShelf, identity: StoreIdentity) -> None:
    """Say what else wrote here that this identity cannot use, and which fields are why."""
    for _, fields in stored_identities(shelf):
        why = "; ".join(differences(fields, identity.as_dict()))
        if why:
            log.warning("store: objects of another identity cannot be used, it differs in %s", why)
