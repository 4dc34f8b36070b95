"""The embedded prefix store: a folder, one owner, no server.

A put writes records to a segment, syncs them, and only then publishes them with an index row
and in the catalogue, so that whatever is visible is whole. Two locks: ``_writing`` is held by
the one thread that changes the folder, through its I/O; ``_lock`` guards the catalogue for
moments and is never held during I/O. ``has`` takes neither.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4_tierd.tiering.errors import PreconditionFailed, StoreUnavailable, TransferFailed
from dsv4_tierd.tiering.store import folder as folders
from dsv4_tierd.tiering.store.catalogue import Entry, Extent
from dsv4_tierd.tiering.store.codec import check_name, encode_header, header_size
from dsv4_tierd.tiering.store.files import Files, OsFiles
from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, StoredObject, StoreUsage
from dsv4_tierd.tiering.store.segments import record_size

log = logging.getLogger(__name__)

BYTES_MIN = 1 << 20
# Room kept for what a commit adds to the index: its log, then the file itself.
_INDEX_BYTES = 128 << 10
_INDEX_ROW_BYTES = 1 << 10
_COMPACT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """Where and how much. ``bytes_max`` bounds the whole folder, index included.

    ``commit_bytes``: at most so much is written for one sync. ``free_bytes_min``: nothing is
    written while the file system has less than this left.
    """

    folder: Path
    bytes_max: int
    segment_bytes: int = 256 << 20
    commit_bytes: int = 32 << 20
    free_bytes_min: int = 1 << 30


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One line of a listing. ``digest``, ``identity`` and ``parent`` are hex."""

    identity: str
    kind: ObjectKind
    tenant: str
    digest: str
    parent: str | None
    payload_bytes: int
    record_bytes: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What reading everything found. ``bad``: a line each; those objects are gone now."""

    objects: int
    bytes_read: int
    bad: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GcReport:
    """What tidying changed."""

    bytes_before: int
    bytes_after: int
    segments_compacted: int


class DiskStore:
    """``PrefixStore`` in a folder. Without an identity it serves maintenance only."""

    def __init__(
        self, config: DiskConfig, identity: StoreIdentity | None, files: Files | None = None
    ) -> None:
        """Open, or create. Raises StoreUnavailable (in use, unreadable), ValueError (config)."""
        if config.bytes_max < BYTES_MIN:
            raise ValueError(f"a store needs at least {BYTES_MIN} bytes, got {config.bytes_max}")
        self._config = config
        self._files = files or OsFiles()
        self._identity = bytes(32) if identity is None else identity.digest
        config.folder.mkdir(parents=True, exist_ok=True)
        self._owner = folders.FolderLock(config.folder)
        try:
            contents = folders.open_contents(config.folder, self._files, config.segment_bytes)
        except BaseException:
            self._owner.release()
            raise
        self._index, self._segments = contents.index, contents.segments
        self._catalogue = contents.catalogue
        self._next_row = max((entry.row for entry in self._catalogue), default=0) + 1
        self._writing = threading.Lock()
        self._lock = threading.Condition(threading.Lock())
        self._dead: list[Entry] = []
        self._open = True
        self._trouble: str | None = None
        self._bytes_used = 0
        self._bytes_read = 0
        self._checksum_failures = contents.lost
        self._evicted_objects = 0
        if identity is not None:
            folders.remember_identity(config.folder, identity)
            folders.log_other_identities(config.folder, identity, self._catalogue)
        self._measure()

    @property
    def identity(self) -> bytes:
        """Digest under which this store reads and writes; zeros when for maintenance only."""
        return self._identity

    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Memory only, no lock: about a millisecond for the pages of 900K tokens."""
        self._check_open()
        find, identity = self._catalogue.find, self._identity
        return [find(identity, key) is not None for key in keys]

    def get(self, key: ObjectKey, into: memoryview) -> bool:
        """Read and check one object; a bad one is forgotten before TransferFailed is raised."""
        self._check_open()
        into = into.cast("B")
        entry = self._pin(self._identity, key)
        if entry is None:
            return False
        try:
            if entry.payload_bytes != len(into):
                raise TransferFailed(f"{key.kind.name} of {entry.payload_bytes} B for {len(into)}")
            self._read(entry, into)
        finally:
            self._unpin(entry)
        with self._lock:
            self._bytes_read += len(into)
            self._catalogue.touch(entry)
        return True

    def put(self, objects: Sequence[StoredObject]) -> None:
        """Write what is not there yet, in commits of at most ``commit_bytes``.

        Raises PreconditionFailed (a page's parent is not stored: nothing is written),
        StoreUnavailable (full, no space left, I/O error: earlier commits stay), InvalidRequest.
        """
        assert any(self._identity), "opened for maintenance only"
        with self._writing:
            self._check_open()
            fresh = self._select(objects)
            protected = frozenset(
                digest
                for item in objects
                for digest in (item.key.digest, item.parent)
                if digest is not None
            )
            for group in _groups(fresh, self._config.commit_bytes):
                self._commit(group, protected)

    def delete(self, keys: Iterable[ObjectKey]) -> int:
        """Remove objects and what hangs on them; their bytes are erased when it returns.

        Waits for reads of them to end. Returns how many of ``keys`` there were. Raises
        StoreUnavailable: they are invisible, but not all erased yet.
        """
        with self._writing:
            self._check_open()
            with self._lock:
                found = [self._catalogue.find(self._identity, key) for key in dict.fromkeys(keys)]
            return self._remove([entry for entry in found if entry is not None])

    def delete_tenant(self, tenant: str) -> int:
        """Remove every object of a tenant, under every identity."""
        with self._writing:
            self._check_open()
            with self._lock:
                found = self._catalogue.of_tenant(tenant)
            return self._remove(found)

    def usage(self) -> StoreUsage:
        """Gauges over all identities; ``bytes_used`` includes the index."""
        with self._lock:
            return StoreUsage(
                up=self._open and self._trouble is None,
                objects=self._catalogue.count,
                bytes_used=self._bytes_used,
                bytes_max=self._config.bytes_max,
                bytes_written=self._segments.bytes_written,
                bytes_read=self._bytes_read,
                checksum_failures=self._checksum_failures,
                evicted_objects=self._evicted_objects,
            )

    def close(self) -> None:
        """Save when objects were used, and let the folder go. A second call does nothing."""
        with self._writing:
            if not self._open:
                return
            self._open = False
            try:
                self._bury()
                self._index.save_uses(self._catalogue)
                self._index.erase_history()
            except (OSError, sqlite3.Error) as error:
                log.warning("store %s: closed with %s", self._config.folder, error)
            finally:
                self._index.close()
                self._owner.release()

    def verify(self) -> VerifyReport:
        """Read and check every object of every identity; bad ones are forgotten."""
        objects = bytes_read = 0
        bad = []
        for entry in self._entries():
            self._check_open()
            pinned = self._pin(entry.identity, entry.key)
            if pinned is None:
                continue
            try:
                self._read(pinned, memoryview(bytearray(pinned.payload_bytes)))
            except TransferFailed as error:
                bad.append(f"{_describe(pinned)}: {error}")
            finally:
                self._unpin(pinned)
            objects += 1
            bytes_read += pinned.payload_bytes
        return VerifyReport(objects, bytes_read, tuple(bad))

    def gc(self) -> GcReport:
        """Erase what is dead, gather thinly used segments, shrink the index.

        Raises StoreUnavailable.
        """
        with self._writing:
            self._check_open()
            before = self._bytes_used
            try:
                self._bury()
                count = self._compact()
                with self._lock:
                    in_use = {entry.identity for entry in self._catalogue} | {self._identity}
                folders.forget_identities(self._config.folder, in_use)
                self._index.shrink()
            except (OSError, sqlite3.Error) as error:
                raise self._failed(error) from error
            self._measure()
            return GcReport(before, self._bytes_used, count)

    def list_objects(self) -> Iterator[ObjectInfo]:
        """Every object of every identity, least recently written first."""
        for entry in self._entries():
            yield ObjectInfo(
                identity=entry.identity.hex(),
                kind=entry.key.kind,
                tenant=entry.key.tenant,
                digest=entry.key.digest.hex(),
                parent=None if entry.parent is None else entry.parent.hex(),
                payload_bytes=entry.payload_bytes,
                record_bytes=entry.extent.size,
            )

    def _entries(self) -> list[Entry]:
        with self._lock:
            return sorted(self._catalogue, key=lambda entry: entry.row)

    def _check_open(self) -> None:
        if not self._open:
            raise StoreUnavailable("the store is closed", retry_after_s=None)

    # Reading.

    def _pin(self, identity: bytes, key: ObjectKey) -> Entry | None:
        with self._lock:
            entry = self._catalogue.find(identity, key)
            if entry is not None:
                entry.readers += 1
            return entry

    def _unpin(self, entry: Entry) -> None:
        with self._lock:
            entry.readers -= 1
            dead = not entry.live
            if not entry.readers:
                self._lock.notify_all()
        # A bad record is forgotten for good here, unless a writer is at work: then it does that.
        if dead and self._writing.acquire(blocking=False):
            try:
                self._bury()
            except (OSError, sqlite3.Error) as error:
                log.warning("store: a bad record is not erased yet: %s", error)
            finally:
                self._writing.release()

    def _read(self, entry: Entry, into: memoryview) -> None:
        """Fill ``into``; what fails a check is out of the catalogue when this raises."""
        try:
            header = self._segments.read(entry.extent, into)
            check_name(header, entry.identity, entry.key)
        except TransferFailed as error:
            log.warning("store: %s is bad and forgotten: %s", _describe(entry), error)
            with self._lock:
                self._checksum_failures += 1
                if entry.live:
                    self._catalogue.remove(entry)
                    self._dead.append(entry)
            raise

    # Writing; the caller holds ``_writing``.

    def _select(self, objects: Sequence[StoredObject]) -> list[StoredObject]:
        """What must be written, each once, with parents checked."""
        fresh: dict[ObjectKey, StoredObject] = {}
        with self._lock:
            for item in objects:
                entry = self._catalogue.find(self._identity, item.key)
                if entry is not None:
                    self._catalogue.touch(entry)
                elif item.key not in fresh:
                    parent = replace(item.key, digest=item.parent or b"")
                    is_page = item.key.kind is ObjectKind.PAGE and item.parent is not None
                    if is_page and parent not in fresh:
                        if self._catalogue.find(self._identity, parent) is None:
                            raise PreconditionFailed(
                                f"the page before {item.key.digest.hex()[:16]} is not stored"
                            )
                    fresh[item.key] = item
        return list(fresh.values())

    def _commit(self, group: Sequence[StoredObject], protected: frozenset[bytes]) -> None:
        """Make room, write, sync, publish."""
        frames = [
            (encode_header(self._identity, item), memoryview(item.payload).cast("B"))
            for item in group
        ]
        try:
            self._make_room(sum(_record_bytes(item) for item in group), len(group), protected)
            extents = self._segments.append(frames)
            entries = [
                self._entry(item, extent) for item, extent in zip(group, extents, strict=True)
            ]
            try:
                self._index.insert(entries)
            except sqlite3.Error:
                self._segments.free(extents)
                raise
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from error
        with self._lock:
            for entry in entries:
                self._catalogue.add(entry)
        self._trouble = None
        self._measure()

    def _entry(self, item: StoredObject, extent: Extent) -> Entry:
        row, self._next_row = self._next_row, self._next_row + 1
        with self._lock:
            used = self._catalogue.tick()
        size = memoryview(item.payload).nbytes
        return Entry(row, self._identity, item.key, item.parent, extent, size, used)

    def _make_room(self, need: int, count: int, protected: frozenset[bytes]) -> None:
        """Evict until ``need`` bytes of ``count`` objects fit; raises StoreUnavailable."""
        self._bury()
        self._measure()
        need += _INDEX_BYTES + count * _INDEX_ROW_BYTES
        while (excess := self._bytes_used + need - self._config.bytes_max) > 0:
            if not self._evict(excess, protected):
                raise StoreUnavailable("the store is full, and the rest of it is in use")
            self._bury()
            if not self._segments.can_punch:
                self._compact()
            self._measure()
        free = self._files.free_bytes(self._config.folder)
        if free - need < self._config.free_bytes_min:
            raise OSError(f"{free} bytes free, {self._config.free_bytes_min} must stay free")

    def _evict(self, excess: int, protected: frozenset[bytes]) -> bool:
        """Give up the coldest objects worth ``excess`` bytes; False: there is none to give up."""
        victims: list[Entry] = []
        with self._lock:
            while excess > 0:
                victim = self._catalogue.pop_victim(protected)
                if victim is None:
                    break
                victims.append(victim)
                excess -= victim.extent.size
            self._dead += victims
            self._evicted_objects += len(victims)
        return bool(victims)

    def _remove(self, roots: list[Entry]) -> int:
        with self._lock:
            doomed = self._catalogue.subtree(roots)
            for entry in doomed:
                self._catalogue.remove(entry)
            self._dead += doomed
            self._lock.wait_for(lambda: not any(entry.readers for entry in doomed))
        try:
            self._bury(durable=True)
            self._index.erase_history()
        except (OSError, sqlite3.Error) as error:
            raise self._failed(error) from error
        self._measure()
        return len(roots)

    def _bury(self, *, durable: bool = False) -> None:
        """Forget the rows and erase the bytes of what left the catalogue.

        Rows first: a row whose bytes are gone would be a bad record after a crash, bytes
        without a row are erased at the next start. What fails stays for the next call.
        """
        with self._lock:
            ready = [entry for entry in self._dead if not entry.readers]
        if not ready:
            return
        self._index.delete(entry.row for entry in ready)
        by_segment: dict[int, list[Entry]] = {}
        for entry in ready:
            by_segment.setdefault(entry.extent.segment, []).append(entry)
        for group in by_segment.values():
            self._segments.free([entry.extent for entry in group], durable=durable)
            done = set(map(id, group))
            with self._lock:
                self._dead = [entry for entry in self._dead if id(entry) not in done]

    def _compact(self) -> int:
        """Copy what lives in thinly used segments forward, where that fits; how many."""
        count = 0
        for number in self._segments.sparse(_COMPACT_SHARE):
            with self._lock:
                entries = [e for e in self._catalogue if e.extent.segment == number]
            size = sum(entry.extent.size for entry in entries)
            self._measure()
            if self._bytes_used + size + _INDEX_BYTES > self._config.bytes_max:
                break
            self._segments.seal(number)
            for entry in entries:
                self._move(entry)
            count += 1
        return count

    def _move(self, entry: Entry) -> None:
        """Copy one record to the active segment and free the old one."""
        payload = memoryview(bytearray(entry.payload_bytes))
        try:
            self._read(entry, payload)
        except TransferFailed:
            return  # counted and forgotten by _read
        item = StoredObject(entry.key, entry.parent, payload)
        [extent] = self._segments.append([(encode_header(entry.identity, item), payload)])
        self._index.move([(entry.row, extent)])
        with self._lock:
            self._lock.wait_for(lambda: not entry.readers)
            old, entry.extent = entry.extent, extent
        self._segments.free([old])

    def _failed(self, error: OSError | sqlite3.Error) -> StoreUnavailable:
        """The store is down until a write succeeds again."""
        if self._trouble is None:
            log.warning("store %s: writing failed: %s", self._config.folder, error)
        self._trouble = str(error)
        self._measure()
        return StoreUnavailable(f"the store cannot write: {error}")

    def _measure(self) -> None:
        used = self._segments.used_bytes + self._index.disk_bytes
        with self._lock:
            self._bytes_used = used


def _record_bytes(item: StoredObject) -> int:
    return record_size(header_size(item.key.tenant) + memoryview(item.payload).nbytes)


def _groups(items: Sequence[StoredObject], bytes_max: int) -> Iterator[list[StoredObject]]:
    """``items`` in order, in runs of at most ``bytes_max`` bytes (or one item)."""
    group: list[StoredObject] = []
    size = 0
    for item in items:
        if group and size + _record_bytes(item) > bytes_max:
            yield group
            group, size = [], 0
        group.append(item)
        size += _record_bytes(item)
    if group:
        yield group


def _describe(entry: Entry) -> str:
    return f"{entry.key.kind.name} {entry.key.digest.hex()[:16]} in segment {entry.extent.segment}"
