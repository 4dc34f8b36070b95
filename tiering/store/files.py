"""The operating system as the store sees it: the seam where tests put faults in."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

Buffer = bytes | bytearray | memoryview

_PUNCH_KEEP_SIZE = 0x03  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, linux/falloc.h
_F_PUNCHHOLE = 99  # sys/fcntl.h of macOS
_ZEROS_BYTES = 1 << 20


class Files(Protocol):
    """File calls that may fail. Every one may raise OSError; offsets and sizes are bytes."""

    def open(self, path: Path, *, write: bool) -> int:
        """A descriptor; with ``write`` the file is created where it is missing."""

    def close(self, fd: int) -> None:
        """Close a descriptor."""

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all of ``buffers`` one after another at ``offset``."""

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """Fill ``buffers`` from ``offset``; bytes read, fewer only at the end of the file."""

    def sync(self, fd: int) -> None:
        """Make what was written durable."""

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""

    def punch(self, fd: int, offset: int, size: int) -> bool:
        """Turn a range into zeros that take no space. False: not possible on this file system."""

    def truncate(self, fd: int, size: int) -> None:
        """Cut a file."""

    def size(self, path: Path) -> int:
        """Length of a file."""

    def unlink(self, path: Path) -> None:
        """Remove a file."""

    def free_bytes(self, folder: Path) -> int:
        """Space that is left for this user on the folder's file system."""


class OsFiles:
    """``Files`` on the machine itself."""

    def open(self, path: Path, *, write: bool) -> int:
        flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        pending = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while pending:
            done = os.pwritev(fd, pending, offset)
            if done == 0:
                raise OSError(errno.EIO, "nothing was written")
            offset += done
            pending = _rest(pending, done)

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        pending = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        total = 0
        while pending:
            done = os.preadv(fd, pending, offset + total)
            if done == 0:
                break
            total += done
            pending = _rest(pending, done)
        return total

    def sync(self, fd: int) -> None:
        if sys.platform == "darwin":
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync alone leaves the data in the drive
        else:
            os.fdatasync(fd)

    def sync_folder(self, path: Path) -> None:
        with self.opened(path) as fd:
            os.fsync(fd)

    def punch(self, fd: int, offset: int, size: int) -> bool:
        try:
            if sys.platform == "darwin":
                fcntl.fcntl(fd, _F_PUNCHHOLE, struct.pack("<IIqq", 0, 0, offset, size))
            else:
                _fallocate(fd, _PUNCH_KEEP_SIZE, offset, size)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                return False
            raise
        return True

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def unlink(self, path: Path) -> None:
        path.unlink()

    def free_bytes(self, folder: Path) -> int:
        state = os.statvfs(folder)
        return state.f_bavail * state.f_frsize

    @contextlib.contextmanager
    def opened(self, path: Path) -> Iterator[int]:
        """A read-only descriptor for a with block."""
        fd = self.open(path, write=False)
        try:
            yield fd
        finally:
            self.close(fd)


def overwrite(files: Files, fd: int, offset: int, size: int) -> None:
    """Zeros over a range: what erases where holes cannot be punched."""
    zeros = bytes(min(size, _ZEROS_BYTES))
    for start in range(0, size, _ZEROS_BYTES):
        files.write(fd, [zeros[: min(size - start, _ZEROS_BYTES)]], offset + start)


def _rest(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of ``buffers`` once ``done`` bytes of them went through."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []


def _fallocate(fd: int, mode: int, offset: int, size: int) -> None:
    """fallocate(2), which Python's os module lacks."""
    libc = ctypes.CDLL(None, use_errno=True)
    call = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
    if call is None:
        raise OSError(errno.ENOSYS, "no fallocate")
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(fd, mode, offset, size):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
