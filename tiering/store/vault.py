"""The moving parts of an embedded store, and the two locks that keep them apart.

``writing`` is held by the one thread that changes the folder, through its I/O; ``lock`` guards
the catalogue for moments and is never held during I/O.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsv4_tierd.tiering.errors import StoreUnavailable, TransferFailed
from dsv4_tierd.tiering.store.catalogue import Entry, Extent
from dsv4_tierd.tiering.store.codec import check_name, encode_header, header_size
from dsv4_tierd.tiering.store.files import Files
from dsv4_tierd.tiering.store.folder import open_contents
from dsv4_tierd.tiering.store.protocol import ObjectKey, StoredObject
from dsv4_tierd.tiering.store.segments import record_size

log = logging.getLogger(__name__)

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


class Vault:
    """Catalogue, segments and index of one folder, changed together. The folder is locked."""

    def __init__(self, config: DiskConfig, files: Files) -> None:
        """Open what is there. Raises StoreUnavailable, OSError."""
        contents = open_contents(config.folder, files, config.segment_bytes)
        self.catalogue = contents.catalogue
        self.segments = contents.segments
        self.index = contents.index
        self.writing = threading.Lock()
        self.lock = threading.Condition(threading.Lock())
        self.trouble: str | None = None
        self.bytes_used = 0
        self.checksum_failures = contents.lost
        self.evicted_objects = 0
        self._config = config
        self._files = files
        self._dead: list[Entry] = []
        self._next_row = max((entry.row for entry in self.catalogue), default=0) + 1
        self.measure()

    # Reading.

    def pin(self, identity: bytes, key: ObjectKey) -> Entry | None:
        """The entry, its bytes kept in place until ``unpin``; None: not there."""
        with self.lock:
            entry = self.catalogue.find(identity, key)
            if entry is not None:
                entry.readers += 1
            return entry

    def unpin(self, entry: Entry) -> None:
        """The read is over."""
        with self.lock:
            entry.readers -= 1
            dead = not entry.live
            if not entry.readers:
                self.lock.notify_all()
        # A bad record is forgotten for good here, unless a writer is at work: then it does that.
        if dead and self.writing.acquire(blocking=False):
            try:
                self.bury()
            except (OSError, sqlite3.Error) as error:
                log.warning("store: a bad record is not erased yet: %s", error)
            finally:
                self.writing.release()

    def read(self, entry: Entry, into: memoryview) -> None:
        """Fill ``into``; what fails a check is out of the catalogue when this raises."""
        try:
            header = self.segments.read(entry.extent, into)
            check_name(header, entry.identity, entry.key)
        except TransferFailed as error:
            log.warning("store: %s is bad and forgotten: %s", describe(entry), error)
            with self.lock:
                if entry.live:  # else another reader found it first
                    self.checksum_failures += 1
                    self.catalogue.remove(entry)
                    self._dead.append(entry)
            raise

    # Writing; the caller holds ``writing``.

    def commit(
        self, identity: bytes, group: Sequence[StoredObject], protected: frozenset[bytes]
    ) -> None:
        """Make room without touching ``protected`` digests, write, sync, publish.

        Raises StoreUnavailable, and then nothing of ``group`` is visible.
        """
        frames = [
            (encode_header(identity, item), memoryview(item.payload).cast("B")) for item in group
        ]
        try:
            self._make_room(sum(record_bytes(item) for item in group), len(group), protected)
            extents = self.segments.append(frames)
            entries = [
                self._entry(identity, item, extent)
                for item, extent in zip(group, extents, strict=True)
            ]
            try:
                self.index.insert(entries)
            except sqlite3.Error:
                self.segments.free(extents)
                raise
        except (OSError, sqlite3.Error) as error:
            raise self.failed(error) from error
        with self.lock:
            for entry in entries:
                self.catalogue.add(entry)
        self.trouble = None
        self.measure()

    def _entry(self, identity: bytes, item: StoredObject, extent: Extent) -> Entry:
        row, self._next_row = self._next_row, self._next_row + 1
        with self.lock:
            used = self.catalogue.tick()
        size = memoryview(item.payload).nbytes
        return Entry(row, identity, item.key, item.parent, extent, size, used)

    def _make_room(self, need: int, count: int, protected: frozenset[bytes]) -> None:
        """Evict until ``need`` bytes of ``count`` objects fit; raises StoreUnavailable."""
        self.bury()
        self.measure()
        need += _INDEX_BYTES + count * _INDEX_ROW_BYTES
        self.shrink(need, protected)
        free = self._files.free_bytes(self._config.folder)
        if free - need < self._config.free_bytes_min:
            raise OSError(f"{free} bytes free, {self._config.free_bytes_min} must stay free")

    def shrink(self, need: int = 0, protected: frozenset[bytes] = frozenset()) -> None:
        """Evict until ``need`` bytes more are within the budget; raises StoreUnavailable."""
        while (excess := self.bytes_used + need - self._config.bytes_max) > 0:
            if not self._evict(excess, protected):
                raise StoreUnavailable("the store is full, and the rest of it is in use")
            self.bury()
            if not self.segments.can_punch:
                self.compact()
            self.measure()

    def _evict(self, excess: int, protected: frozenset[bytes]) -> bool:
        """Give up the coldest objects worth ``excess`` bytes; False: there is none to give up."""
        victims: list[Entry] = []
        with self.lock:
            while excess > 0:
                victim = self.catalogue.pop_victim(protected)
                if victim is None:
                    break
                victims.append(victim)
                excess -= victim.extent.size
            self._dead += victims
            self.evicted_objects += len(victims)
        return bool(victims)

    def remove(self, roots: list[Entry]) -> int:
        """Take out and erase ``roots`` and what hangs on them; waits for reads of them."""
        with self.lock:
            doomed = self.catalogue.subtree(roots)
            for entry in doomed:
                self.catalogue.remove(entry)
            self._dead += doomed
            self.lock.wait_for(lambda: not any(entry.readers for entry in doomed))
        try:
            self.bury(durable=True)
            self.index.erase_history()
        except (OSError, sqlite3.Error) as error:
            raise self.failed(error) from error
        self.measure()
        return len(roots)

    def bury(self, *, durable: bool = False) -> None:
        """Forget the rows and erase the bytes of what left the catalogue.

        Rows first: a row whose bytes are gone would be a bad record after a crash, bytes
        without a row are erased at the next start. What fails stays for the next call.
        """
        with self.lock:
            ready = [entry for entry in self._dead if not entry.readers]
        if not ready:
            return
        self.index.delete(entry.row for entry in ready)
        by_segment: dict[int, list[Entry]] = {}
        for entry in ready:
            by_segment.setdefault(entry.extent.segment, []).append(entry)
        for group in by_segment.values():
            self.segments.free([entry.extent for entry in group], durable=durable)
            done = set(map(id, group))
            with self.lock:
                self._dead = [entry for entry in self._dead if id(entry) not in done]

    def compact(self) -> int:
        """Copy what lives in thinly used segments forward, where that fits; how many."""
        count = 0
        for number in self.segments.sparse(_COMPACT_SHARE):
            with self.lock:
                entries = [e for e in self.catalogue if e.extent.segment == number]
            size = sum(entry.extent.size for entry in entries)
            self.measure()
            if self.bytes_used + size + _INDEX_BYTES > self._config.bytes_max:
                break
            self.segments.seal(number)
            for entry in entries:
                self._move(entry)
            count += 1
        return count

    def _move(self, entry: Entry) -> None:
        """Copy one record to the active segment and free the old one."""
        payload = memoryview(bytearray(entry.payload_bytes))
        try:
            self.read(entry, payload)
        except TransferFailed:
            return  # counted and forgotten by read()
        item = StoredObject(entry.key, entry.parent, payload)
        [extent] = self.segments.append([(encode_header(entry.identity, item), payload)])
        self.index.move([(entry.row, extent)])
        with self.lock:
            self.lock.wait_for(lambda: not entry.readers)
            old, entry.extent = entry.extent, extent
        self.segments.free([old])

    def failed(self, error: OSError | sqlite3.Error) -> StoreUnavailable:
        """The store is down until a write succeeds again."""
        if self.trouble is None:
            log.warning("store %s: writing failed: %s", self._config.folder, error)
        self.trouble = str(error)
        self.measure()
        return StoreUnavailable(f"the store cannot write: {error}")

    def measure(self) -> None:
        """Refresh the gauge of bytes used."""
        used = self.segments.used_bytes + self.index.disk_bytes
        with self.lock:
            self.bytes_used = used


def record_bytes(item: StoredObject) -> int:
    """Bytes that an object takes in a segment."""
    return record_size(header_size(item.key.tenant) + memoryview(item.payload).nbytes)


def describe(entry: Entry) -> str:
    """An object's name for people."""
    return f"{entry.key.kind.name} {entry.key.digest.hex()[:16]} in segment {entry.extent.segment}"
