"""What a folder's disk gives: its files read from start to end, none of them from memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

READ_BYTES = 8 << 20
READERS = 4
SAMPLE_BYTES = 4 << 30


def drop_cached(folder: Path) -> None:
    """Have the kernel forget the folder's pages, so that reads go to the disk."""
    os.sync()
    for path in _files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_rate_gbs(folder: Path) -> float:
    """GB a second of large reads by a few threads, of at most SAMPLE_BYTES."""
    drop_cached(folder)
    pieces, left = [], SAMPLE_BYTES
    for path in _files(folder):
        for first in range(0, path.stat().st_size, READ_BYTES):
            if left > 0:
                pieces.append((path, first))
                left -= READ_BYTES
    started = time.perf_counter()
    with ThreadPoolExecutor(READERS) as readers:
        total = sum(readers.map(_read, pieces))
    return total / (time.perf_counter() - started) / 1e9


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(path for path in folder.rglob("*") if path.is_file())


def _read(piece: tuple[Path, int]) -> int:
    path, first = piece
    file = os.open(path, os.O_RDONLY)
    try:
        return len(os.pread(file, READ_BYTES, first))
    finally:
        os.close(file)
