"""A catalogue inside an object store that can neither list nor replace objects.

Every writer (a process, once it writes) has a *log*: immutable objects of one size, numbered
from 0, each with rows that say what the writer stored or removed. A writer announces itself in
the next free *slot*, an object of its own. Whoever knows the slots and reads every log to its
end knows all that is stored; finding out what is new takes one question.

An object's name carries the *incarnation* under which it was stored, so that a removal means
that one and never what was stored under the same key afterwards; logs can then be read in any
order. Two writers that store the same key at once make two incarnations: the lower one stays,
and the other's writer removes it.

A log object that is lost costs the objects that it named, and nothing else.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from dsv4_tierd.tiering.store.lmcache_shelf import Name
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind

log = logging.getLogger(__name__)

LOG_BYTES = 16 << 10
SLOT_BYTES = 64
LOG_GROUP, SLOT_GROUP = 100, 101
_AHEAD = 16  # log objects asked for at once; so many in a row may be lost
_SLOTS_AHEAD = 4
_WATCH_POLLS = 20  # a claimed slot is looked at so often
_HEAD = struct.Struct("<8sHHI16sQ32s")  # magic, version, rows, bytes, writer, number, identity
_ROW = struct.Struct("<BBHIQ32s32s")  # verb and parent bit, kind, tenant bytes, incarnation, ...
_SUM = struct.Struct("<Q")
_MAGIC = b"DSV4LOG\0"
_VERSION, _VERSION_MIN = 1, 1  # written; from the minimum on they are read
_REMOVED, _PARENT = 1, 2


class Shelf(Protocol):
    """What a log needs of an object store."""

    def store(self, items: Sequence[tuple[Name, bytearray]]) -> None: ...

    def load(self, items: Sequence[tuple[Name, bytearray]]) -> list[bool]: ...

    def exists(self, names: Sequence[Name]) -> list[bool]: ...


@dataclass(frozen=True, slots=True)
class LogRow:
    """One stored (or removed) incarnation of an object."""

    key: ObjectKey
    incarnation: int
    payload_bytes: int = 0
    parent: bytes | None = None
    removed: bool = False


def pack_rows(identity: bytes, writer: bytes, number: int, rows: Sequence[LogRow]) -> bytearray:
    """A log object of ``LOG_BYTES``."""
    body = b"".join(_pack(row) for row in rows)
    head = _HEAD.pack(_MAGIC, _VERSION, len(rows), len(body), writer, number, identity)
    data = bytearray(head + body).ljust(LOG_BYTES - _SUM.size, b"\0")
    assert len(data) + _SUM.size == LOG_BYTES, "more rows than a log object holds"
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))


def unpack_rows(identity: bytes, writer: bytes, number: int, data: bytearray) -> list[LogRow]:
    """The rows of a log object. Raises ValueError: it is not the one asked for, or not whole."""
    if _SUM.unpack_from(data, LOG_BYTES - _SUM.size)[0] != xxhash.xxh3_64_intdigest(
        data[: LOG_BYTES - _SUM.size]
    ):
        raise ValueError("wrong checksum")
    magic, version, count, _, *name = _HEAD.unpack_from(data)
    if magic == _MAGIC and not _VERSION_MIN <= version <= _VERSION:
        raise ValueError(f"it is of version {version}, of another release of dsv4-tierd")
    if magic != _MAGIC or name != [writer, number, identity]:
        raise ValueError("not the log object that was asked for")
    rows, at = [], _HEAD.size
    for _ in range(count):
        flags, kind, tenant_bytes, incarnation, size, digest, parent = _ROW.unpack_from(data, at)
        at += _ROW.size
        tenant = bytes(data[at : at + tenant_bytes]).decode()
        at += tenant_bytes
        key = ObjectKey(ObjectKind(kind), tenant, digest)
        anchor = parent if flags & _PARENT else None
        rows.append(LogRow(key, incarnation, size, anchor, bool(flags & _REMOVED)))
    return rows


def split_rows(rows: Sequence[LogRow]) -> Iterator[list[LogRow]]:
    """Rows in order, as many at a time as a log object holds."""
    room = LOG_BYTES - _HEAD.size - _SUM.size
    group: list[LogRow] = []
    used = 0
    for row in rows:
        size = _ROW.size + len(row.key.tenant.encode())
        if used + size > room:
            yield group
            group, used = [], 0
        group.append(row)
        used += size
    if group:
        yield group


def _pack(row: LogRow) -> bytes:
    tenant = row.key.tenant.encode()
    flags = _REMOVED * row.removed | _PARENT * (row.parent is not None)
    parent = row.parent or bytes(32)
    return (
        _ROW.pack(
            flags,
            row.key.kind,
            len(tenant),
            row.incarnation,
            row.payload_bytes,
            row.key.digest,
            parent,
        )
        + tenant
    )


class Log:
    """All writers' logs of one identity, and this process's own. Thread-safe."""

    def __init__(self, shelf: Shelf, identity: bytes, space: str) -> None:
        self._shelf, self._identity, self._space = shelf, identity, space
        self._writer = os.urandom(16)
        self._number = 0
        self._slot: int | None = None
        self._watch = 0
        self._slots = 0
        self._peers: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self.lost = 0

    def append(self, rows: Sequence[LogRow]) -> None:
        """Say what was done; everyone can read it when it returns. Raises StoreUnavailable."""
        with self._lock:
            if self._slot is None:
                self._claim()
            for group in split_rows(rows):
                number, self._number = self._number, self._number + 1
                data = pack_rows(self._identity, self._writer, number, group)
                self._shelf.store([(self._log_name(self._writer, number), data)])

    def read_new(self) -> list[LogRow]:
        """Rows of others that were not read yet. Raises StoreUnavailable: read from the start."""
        found: list[LogRow] = []
        with self._lock:
            self._keep_slot()
            self._find_writers()
            writers = [writer for writer in self._peers if writer != self._writer]
            heads = [self._log_name(writer, self._peers[writer]) for writer in writers]
            there = self._shelf.exists(heads) if heads else []
            for writer, is_there in zip(writers, there, strict=True):
                if is_there:
                    found += self._read_on(writer)
        return found

    def _read_on(self, writer: bytes) -> Iterator[LogRow]:
        while True:
            first = self._peers[writer]
            names = [self._log_name(writer, first + i) for i in range(_AHEAD)]
            there = self._shelf.exists(names)
            if not any(there):
                return
            count = max(index for index, is_there in enumerate(there) if is_there) + 1
            buffers = [bytearray(LOG_BYTES) for _ in range(count)]
            loaded = self._shelf.load(list(zip(names[:count], buffers, strict=True)))
            for index, is_there in enumerate(loaded):
                self._peers[writer] = first + index + 1
                try:
                    if not is_there:
                        raise ValueError("it is not there")  # noqa: TRY301
                    yield from unpack_rows(self._identity, writer, first + index, buffers[index])
                except ValueError as error:
                    self.lost += 1
                    log.warning("store: log object %d of a writer: %s", first + index, error)

    def _find_writers(self) -> None:
        while True:
            names = [self._slot_name(self._slots + i) for i in range(_SLOTS_AHEAD)]
            there = self._shelf.exists(names)
            if not any(there):
                return
            count = max(index for index, is_there in enumerate(there) if is_there) + 1
            for index in range(count):
                writer = self._read_slot(self._slots + index)
                if writer is not None:
                    self._peers.setdefault(writer, 0)
            self._slots += count

    def _claim(self) -> None:
        """Take the next free slot.

        Another may take it too: one of the two is then seen there, whichever way the store
        treats a second write, and the other takes the next.
        """
        self._find_writers()
        slot = self._slots
        while True:
            data = bytearray(self._writer).ljust(SLOT_BYTES - _SUM.size, b"\0")
            data += _SUM.pack(xxhash.xxh3_64_intdigest(data))
            self._shelf.store([(self._slot_name(slot), data)])
            if self._read_slot(slot) == self._writer:
                break
            slot += 1
        self._slot, self._watch = slot, _WATCH_POLLS

    def _keep_slot(self) -> None:
        if self._slot is not None and self._watch:
            self._watch -= 1
            if self._read_slot(self._slot) != self._writer:
                self._claim()

    def _read_slot(self, slot: int) -> bytes | None:
        data = bytearray(SLOT_BYTES)
        if not self._shelf.load([(self._slot_name(slot), data)])[0]:
            return None
        body = data[: -_SUM.size]
        good = _SUM.unpack_from(data, len(body))[0] == xxhash.xxh3_64_intdigest(body)
        return bytes(data[:16]) if good else None

    def _log_name(self, writer: bytes, number: int) -> Name:
        return Name(self._space, writer + number.to_bytes(16, "little"), LOG_GROUP)

    def _slot_name(self, slot: int) -> Name:
        return Name(self._space, slot.to_bytes(32, "little"), SLOT_GROUP)
