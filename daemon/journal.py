"""The transcript journal: an append-only file of checksummed batches, and its compaction.

::

    file  = "DSV4TJ01"  batch*
    batch = magic u32, payload length u32, xxh3_64(payload) u64, payload (msgpack events)

One batch is one write and one fsync, and the next is written only when that is done. So after
a crash at most the last batch is torn: it was never acknowledged and is cut off at start. A bad
batch with a good one after it is not a crash but damage, and the daemon refuses to guess.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import xxhash

from dsv4_tierd.daemon.config import CannotStart
from dsv4_tierd.daemon.ledger import AnyEvent, Ledger
from dsv4_tierd.daemon.transcript import TokenRun
from dsv4_tierd.tiering.errors import InvalidRequest, StoreUnavailable

FILE_MAGIC = b"DSV4TJ01"
BATCH_MAGIC = 0x4A54_4256
_HEAD = struct.Struct("<IIQ")
BATCH_BYTES_MAX = 1 << 30
SNAPSHOT_BATCH_BYTES = 4 << 20
DEAD_BYTES_MIN = 1 << 20  # below this, compaction is not worth a rename

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[AnyEvent])


class JournalDamaged(CannotStart):
    """The journal's middle is unreadable; acknowledged facts would be lost by going on."""


class StateDirBusy(CannotStart):
    """Another daemon holds the state folder."""


class StateLock:
    """An flock on the state folder; the kernel drops it when the process dies."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._fd)
            raise StateDirBusy(f"another daemon uses {folder}") from error

    def release(self) -> None:
        os.close(self._fd)


def encode_batch(events: Sequence[AnyEvent]) -> bytes:
    """One batch as it stands in the file."""
    payload = _encoder.encode(events)
    assert len(payload) <= BATCH_BYTES_MAX
    return _HEAD.pack(BATCH_MAGIC, len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def read_batch(data: memoryview, offset: int) -> tuple[list[AnyEvent], int] | None:
    """The batch at ``offset`` and where it ends; None if it is not whole and intact."""
    if offset + _HEAD.size > len(data):
        return None
    magic, length, digest = _HEAD.unpack_from(data, offset)
    end = offset + _HEAD.size + length
    if magic != BATCH_MAGIC or end > len(data):
        return None
    payload = data[offset + _HEAD.size : end]
    if xxhash.xxh3_64_intdigest(payload) != digest:
        return None
    try:
        return _decoder.decode(payload), end
    except msgspec.DecodeError as error:
        raise JournalDamaged(f"the batch at byte {offset} has unknown events: {error}") from error


class JournalFile:
    """The file. Blocking; one caller at a time; knows nothing of sessions but their bytes."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        """Open or make ``folder``/journal, fill ``ledger``, cut a torn end off, compact if it pays.

        Raises JournalDamaged, OSError.
        """
        self.path = folder / "journal"
        self.torn_bytes = 0
        self.compactions = 0
        self._live_bytes = 0
        self._unnamed = False  # a copy has the file's name, and a power cut may take it back
        self.path.with_suffix(".new").unlink(missing_ok=True)  # of a compaction that was cut off
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._size = self._load(ledger)
        _sync_folder(folder)
        with contextlib.suppress(OSError):  # no room for a copy: the old file is still whole
            self.compact(list(ledger.snapshot()))

    @property
    def size_bytes(self) -> int:
        return self._size

    def _load(self, ledger: Ledger) -> int:
        data = memoryview(self.path.read_bytes())
        if len(data) < len(FILE_MAGIC):  # a crash while it was made: nothing was acknowledged
            os.ftruncate(self._fd, 0)
            _write_all(self._fd, FILE_MAGIC, 0)
            os.fsync(self._fd)
            return len(FILE_MAGIC)
        if data[: len(FILE_MAGIC)] != FILE_MAGIC:
            raise JournalDamaged(f"{self.path} is not a journal of this version")
        offset = len(FILE_MAGIC)
        hold: list[TokenRun] = []
        while (found := read_batch(data, offset)) is not None:
            events, end = found
            try:
                ledger.apply(events, hold)
            except (KeyError, AssertionError) as error:
                raise JournalDamaged(f"{self.path}: contradiction at {offset}: {error}") from error
            offset = end
        self._refuse_damage(data, offset)
        if offset < len(data):
            self.torn_bytes = len(data) - offset
            os.ftruncate(self._fd, offset)
            os.fsync(self._fd)
        return offset

    def _refuse_damage(self, data: memoryview, offset: int) -> None:
        magic = BATCH_MAGIC.to_bytes(4, "little")
        rest = bytes(data[offset:])
        at = rest.find(magic, 1)
        while at >= 0:
            if read_batch(data, offset + at) is not None:
                raise JournalDamaged(
                    f"{self.path}: byte {offset} is unreadable, but byte {offset + at} is not; "
                    "restore the file from a copy, or cut it at the first of the two to lose "
                    "everything after it"
                )
            at = rest.find(magic, at + 1)

    def write(self, events: Sequence[AnyEvent]) -> None:
        """One batch, durable when it returns. The file is as before if it raises OSError."""
        batch = encode_batch(events)
        try:
            self._sync_name()
            _write_all(self._fd, batch, self._size)
            os.fdatasync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(batch)

    def is_due(self) -> bool:
        """Whether so much was written since the last measurement that compaction may pay."""
        return self._size > 2 * self._live_bytes + DEAD_BYTES_MIN

    def compact(self, snapshot: Sequence[AnyEvent]) -> bool:
        """Rewrite the file as ``snapshot`` if more than half of it, and 1 MiB, is dead.

        Raises OSError: there is no copy, and none is made before the file has doubled; or it is
        the file now, and its name is not durable yet: the next write sees to that.
        """
        batches = list(_snapshot_batches(snapshot))
        self._live_bytes = sum(map(len, batches))
        if self._size - self._live_bytes <= max(DEAD_BYTES_MIN, self._live_bytes):
            return False
        new = self.path.with_suffix(".new")
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            size = _write_all(fd, FILE_MAGIC, 0)
            for batch in batches:
                size += _write_all(fd, batch, size)
            os.fsync(fd)
            new.replace(self.path)
        except OSError:
            self._live_bytes = self._size
            os.close(fd)
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        old, self._fd, self._size = self._fd, fd, size
        self._unnamed = True
        self.compactions += 1
        os.close(old)
        self._sync_name()
        return True

    def _sync_name(self) -> None:
        if self._unnamed:
            _sync_folder(self.path.parent)
            self._unnamed = False

    def close(self) -> None:
        os.close(self._fd)


def _snapshot_batches(events: Iterable[AnyEvent]) -> Iterable[bytes]:
    group: list[AnyEvent] = []
    size = 0
    for event in events:
        group.append(event)
        size += 200 + len(getattr(event, "ids", b""))
        if size >= SNAPSHOT_BATCH_BYTES:
            yield encode_batch(group)
            group, size = [], 0
    if group:
        yield encode_batch(group)


def _write_all(fd: int, data: bytes, offset: int) -> int:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
    return done


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_Waiting = tuple[Sequence[AnyEvent], asyncio.Future[None]]


def _answer(group: Iterable[_Waiting], problem: Exception | None) -> None:
    for _, done in group:
        if not done.done():
            if problem is None:
                done.set_result(None)
            else:
                done.set_exception(problem)


def _refuse_unwritable(events: Sequence[AnyEvent]) -> None:
    """Raises InvalidRequest: that is its sender's fault, and must not end the writer."""
    try:
        _encoder.encode(events)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"this cannot be kept: {error}") from error


class Journal:
    """The file behind one writer task: callers await their events being durable.

    Batches that wait while one is written go into the next one together.
    """

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger()
        self._file = JournalFile(folder, self.ledger)
        self._waiting: list[_Waiting] = []
        self._wake = asyncio.Event()
        self._closed = False

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    async def commit(self, events: Sequence[AnyEvent]) -> None:
        """Durable and applied when it returns; StoreUnavailable, InvalidRequest: neither.

        Cancelling the caller does not call the events back. It waits for them all the same, so
        that it never lets a session go while facts about it are under way.
        """
        if not events:
            return
        done = self.queue(events)
        left: asyncio.CancelledError | None = None
        while not done.done():
            try:
                await asyncio.wait([done])
            except asyncio.CancelledError as error:
                left = error
        done.result()
        if left is not None:
            raise left

    def queue(self, events: Sequence[AnyEvent]) -> asyncio.Future[None]:
        """What ``commit`` waits for: done when the events are durable and applied."""
        if self._closed:
            raise StoreUnavailable("the journal is closed")
        _refuse_unwritable(events)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((events, done))
        self._wake.set()
        return done

    async def run(self) -> None:
        """The writer; one a process. Ends after ``close``."""
        try:
            while not (self._closed and not self._waiting):
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    await self._write_waiting()
        finally:  # nobody waits for a writer that is gone
            self._closed = True
            _answer(self._waiting, StoreUnavailable("the journal is closed"))

    async def _write_waiting(self) -> None:
        group, self._waiting = self._waiting, []
        events = [event for part, _ in group for event in part]
        problem: Exception | None = StoreUnavailable("the journal's writer has ended")
        try:
            await asyncio.to_thread(self._file.write, events)
            self.ledger.apply(events)
            problem = None
        except OSError as error:
            problem = StoreUnavailable(f"the journal cannot be written: {error}")
        finally:
            _answer(group, problem)
        if problem is None and self._file.is_due():
            snapshot = list(self.ledger.snapshot())
            with contextlib.suppress(OSError):  # no room for a copy: the old file is still whole
                await asyncio.to_thread(self._file.compact, snapshot)

    def close(self) -> None:
        """No more commits; ``run`` ends when those waiting are written."""
        self._closed = True
        self._wake.set()

    def release(self) -> None:
        """After ``run`` has ended."""
        self._file.close()
