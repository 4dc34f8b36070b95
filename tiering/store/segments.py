"""Append-only segment files: where the records' bytes lie.

A record starts at a multiple of 4 KiB and is never changed, only freed. Freed ranges become
holes, so the folder shrinks at once; a segment without a live record is removed. Where the file
system knows no holes, freed ranges are overwritten with zeros and the space comes back when the
segment goes (see compaction in ``disk.py``). Nothing here is thread-safe but ``read``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsv4_tierd.tiering.errors import TransferFailed
from dsv4_tierd.tiering.store.catalogue import Extent
from dsv4_tierd.tiering.store.codec import (
    FIXED_BYTES,
    HEADER_BYTES_MAX,
    RecordHeader,
    check_payload,
    decode_header,
)
from dsv4_tierd.tiering.store.files import Buffer, Files, overwrite

ALIGN_BYTES = 4096


def record_size(frame_bytes: int) -> int:
    """Bytes that a frame takes in a segment."""
    return -(-frame_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(slots=True)
class Segment:
    """One file: ``end`` is where the next record would go, ``live_bytes`` are of live records."""

    number: int
    end: int = 0
    live_bytes: int = 0


class SegmentLog:
    """The segments of one folder. Records are appended to the last, the *active* one."""

    def __init__(self, folder: Path, files: Files, segment_bytes: int) -> None:
        self.folder = folder
        self.can_punch = True
        self.bytes_written = 0
        self._files = files
        self._segment_bytes = segment_bytes
        self._segments: dict[int, Segment] = {}
        self._active: Segment | None = None
        self._next = 1
        folder.mkdir(exist_ok=True)

    @property
    def used_bytes(self) -> int:
        """Disk space held: live records, and dead ones where they cannot be given back."""
        if self.can_punch:
            return sum(segment.live_bytes for segment in self._segments.values())
        return sum(segment.end for segment in self._segments.values())

    def path(self, number: int) -> Path:
        """File of a segment."""
        return self.folder / f"{number:08d}.seg"

    def numbers_on_disk(self) -> list[int]:
        """Segments that have a file, oldest first."""
        names = (path.stem for path in self.folder.glob("*.seg"))
        numbers = {int(name) for name in names if name.isdecimal()}
        return sorted(number for number in numbers if self.path(number).exists())

    def append(self, frames: Sequence[tuple[bytes, Buffer]]) -> list[Extent]:
        """Write (header, payload) records and make them durable; all of them or none.

        Raises OSError; then the file is cut back and another segment is used from here on, as
        the state of a file whose write or sync failed is not known.
        """
        started: dict[int, int] = {}
        extents = []
        try:
            for header, payload in frames:
                size = record_size(len(header) + memoryview(payload).nbytes)
                segment = self._segment_for(size)
                started.setdefault(segment.number, segment.end)
                extents.append(Extent(segment.number, segment.end, size))
                padding = bytes(size - len(header) - memoryview(payload).nbytes)
                with self._opened(segment.number, write=True) as fd:
                    self._files.write(fd, [header, payload, padding], segment.end)
                segment.end += size
                segment.live_bytes += size
            self._sync(started)
        except OSError:
            self._roll_back(started)
            raise
        self.bytes_written += sum(extent.size for extent in extents)
        return extents

    def read(self, extent: Extent, into: memoryview) -> RecordHeader:
        """Fill ``into`` with the payload at ``extent`` and check it.

        Raises TransferFailed (short, wrong checksum, I/O error). The caller keeps the extent
        from being freed meanwhile.
        """
        head = bytearray(HEADER_BYTES_MAX)
        try:
            with self._opened(extent.segment, write=False) as fd:
                # The header's length follows from the extent only with the tenant, so ask first.
                got = self._files.read(fd, [memoryview(head)], extent.offset)
                header = decode_header(memoryview(head)[:got])
                if header.payload_bytes != len(into):
                    raise TransferFailed(f"{header.payload_bytes} bytes for {len(into)}")
                got = self._files.read(fd, [into], extent.offset + header.header_bytes)
        except OSError as error:
            raise TransferFailed(f"{self.path(extent.segment).name}: {error}") from error
        if got != len(into):
            raise TransferFailed(f"short read: {got} of {len(into)} bytes")
        check_payload(header, into)
        return header

    def free(self, extents: Iterable[Extent], *, durable: bool = False) -> None:
        """Erase records and give back their space; ``durable``: also across a power cut.

        What is erased here and comes back then is erased again at the next start. Raises OSError.
        """
        by_segment: dict[int, list[Extent]] = {}
        for extent in extents:
            by_segment.setdefault(extent.segment, []).append(extent)
        for number, dead in by_segment.items():
            segment = self._segments[number]
            dead_bytes = sum(extent.size for extent in dead)
            if segment.live_bytes == dead_bytes:
                self._drop(segment)
                continue
            self._erase(number, dead, durable=durable)
            segment.live_bytes -= dead_bytes
        if durable:
            self._files.sync_folder(self.folder)

    def adopt(self, number: int, live: Sequence[Extent]) -> list[Extent]:
        """Take over a file left by an earlier run, of which only ``live`` counts.

        Everything else in it is erased, its tail cut. Returns those of ``live`` that lie beyond
        its end: lost. Raises OSError.
        """
        path = self.path(number)
        size = self._files.size(path) if path.exists() else 0
        kept = sorted((e for e in live if e.end <= size), key=lambda extent: extent.offset)
        segment = Segment(number, kept[-1].end if kept else 0, sum(e.size for e in kept))
        self._next = max(self._next, number + 1)
        if not kept:
            path.unlink(missing_ok=True)
        else:
            self._segments[number] = self._active = segment
            with self._opened(number, write=True) as fd:
                self._files.truncate(fd, segment.end)
            self._erase(number, _gaps(number, kept), durable=True)
        return [extent for extent in live if extent.end > size]

    def scan(self, number: int) -> Iterator[tuple[RecordHeader, Extent]]:
        """Every whole, right record of a file, found without an index. Reads all of it."""
        size, offset = self._files.size(self.path(number)), 0
        while offset + FIXED_BYTES <= size:
            found = self._record_at(number, offset)
            if found is not None:
                yield found
            offset = offset + ALIGN_BYTES if found is None else found[1].end

    def sparse(self, live_share: float) -> list[int]:
        """Segments of which less than ``live_share`` is alive, emptiest first."""
        found = [s for s in self._segments.values() if s.live_bytes < live_share * s.end]
        return [s.number for s in sorted(found, key=lambda segment: segment.live_bytes)]

    def seal(self, number: int) -> None:
        """Append nothing more to a segment."""
        if self._active is not None and self._active.number == number:
            self._active = None

    def _record_at(self, number: int, offset: int) -> tuple[RecordHeader, Extent] | None:
        try:
            with self._opened(number, write=False) as fd:
                head = bytearray(HEADER_BYTES_MAX)
                header = decode_header(
                    memoryview(head)[: self._files.read(fd, [memoryview(head)], offset)]
                )
            extent = Extent(number, offset, record_size(header.frame_bytes))
            if extent.end > self._files.size(self.path(number)):
                return None
            self.read(extent, memoryview(bytearray(header.payload_bytes)))
        except TransferFailed:
            return None
        return header, extent

    def _segment_for(self, size: int) -> Segment:
        active = self._active
        if active is None or (active.end and active.end + size > self._segment_bytes):
            active = self._active = Segment(self._next)
            self._segments[active.number] = active
            self._next += 1
        return active

    def _sync(self, started: dict[int, int]) -> None:
        for number in started:
            with self._opened(number, write=True) as fd:
                self._files.sync(fd)
        if 0 in started.values():
            self._files.sync_folder(self.folder)

    def _roll_back(self, started: dict[int, int]) -> None:
        for number, end in started.items():
            segment = self._segments[number]
            segment.live_bytes -= segment.end - end
            segment.end = end
            self.seal(number)
            # The disk may refuse this too; then the next start cuts the tail.
            with contextlib.suppress(OSError):
                if segment.live_bytes == 0:
                    self._drop(segment)
                    continue
                with self._opened(number, write=True) as fd:
                    self._files.truncate(fd, end)

    def _drop(self, segment: Segment) -> None:
        self.seal(segment.number)
        path = self.path(segment.number)
        if path.exists():
            self._files.unlink(path)
        del self._segments[segment.number]

    def _erase(self, number: int, extents: Sequence[Extent], *, durable: bool) -> None:
        with self._opened(number, write=True) as fd:
            for extent in extents:
                if self.can_punch and not self._files.punch(fd, extent.offset, extent.size):
                    self.can_punch = False
                if not self.can_punch:
                    overwrite(self._files, fd, extent.offset, extent.size)
            if extents and durable:
                self._files.sync(fd)

    @contextlib.contextmanager
    def _opened(self, number: int, *, write: bool) -> Iterator[int]:
        fd = self._files.open(self.path(number), write=write)
        try:
            yield fd
        finally:
            self._files.close(fd)


def _gaps(number: int, kept: Sequence[Extent]) -> list[Extent]:
    """The ranges before and between ``kept``, which is in order."""
    starts = [0, *(extent.end for extent in kept)]
    pairs = zip(starts, (extent.offset for extent in kept), strict=False)
    return [Extent(number, start, stop - start) for start, stop in pairs if stop > start]
