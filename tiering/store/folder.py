"""A store's folder: who owns it, which identities wrote to it, and what an earlier run left.

::

    lock                    flock: one process owns the folder
    identities/<hex>.json   the fields behind an identity's digest, for people
    index.sqlite            names and places of the objects, written last
    segments/<n>.seg        the objects
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from dsv4_tierd.tiering.errors import StoreUnavailable
from dsv4_tierd.tiering.store.catalogue import Catalogue, Entry, Extent
from dsv4_tierd.tiering.store.codec import DIGEST_BYTES
from dsv4_tierd.tiering.store.files import Files
from dsv4_tierd.tiering.store.identity import StoreIdentity, differences
from dsv4_tierd.tiering.store.index import Index, IndexCorrupt
from dsv4_tierd.tiering.store.segments import SegmentLog

log = logging.getLogger(__name__)


class FolderLock:
    """An flock on the folder, released with the process whatever happens to it."""

    def __init__(self, folder: Path) -> None:
        """Raises StoreUnavailable: another process has it."""
        self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise StoreUnavailable(
                f"{folder} is in use by process {owner}: a store folder has one owner"
            ) from error
        with contextlib.suppress(OSError):  # a full disk: only people read it
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let another process have the folder."""
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a folder holds once it has been put in order. ``lost``: rows without their bytes."""

    index: Index
    segments: SegmentLog
    catalogue: Catalogue
    lost: int


def open_contents(folder: Path, files: Files, segment_bytes: int) -> Contents:
    """Open what is there; erase bytes that were never published, forget rows without bytes.

    Raises StoreUnavailable, OSError.
    """
    segments = SegmentLog(folder / "segments", files, segment_bytes)
    index, entries = _open_index(folder / "index.sqlite", segments)
    try:
        lost = _adopt(segments, index, entries)
    except BaseException:
        index.close()
        raise
    catalogue = Catalogue()
    for entry in entries:
        if entry.row not in lost:
            catalogue.add(entry)
    return Contents(index, segments, catalogue, len(lost))


def remember_identity(folder: Path, identity: StoreIdentity) -> None:
    """Keep the fields of an identity beside what it writes."""
    path = _identity_path(folder, identity.digest)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(identity.as_dict(), indent=2) + "\n")
    temporary.replace(path)


def forget_identities(folder: Path, keep: set[bytes]) -> None:
    """Remove the field files of identities that have nothing stored."""
    for digest in _identities(folder):
        if digest not in keep:
            _identity_path(folder, digest).unlink()


def stored_identities(folder: Path) -> list[dict[str, object]]:
    """The fields of every identity that wrote here and whose file can be read."""
    found = [identity_fields(folder, digest) for digest in _identities(folder)]
    return [fields for fields in found if fields]


def identity_fields(folder: Path, digest: bytes) -> dict[str, object]:
    """The fields of an identity; empty where they are not known."""
    with contextlib.suppress(OSError, ValueError):
        fields = json.loads(_identity_path(folder, digest).read_text())
        if isinstance(fields, dict):
            return fields
    return {}


def log_other_identities(folder: Path, identity: StoreIdentity, catalogue: Catalogue) -> None:
    """Say what the folder holds that this identity cannot use, and which fields are why."""
    counts: dict[bytes, int] = {}
    for entry in catalogue:
        counts[entry.identity] = counts.get(entry.identity, 0) + 1
    own = counts.pop(identity.digest, 0)
    for digest, count in counts.items():
        fields = identity_fields(folder, digest)
        why = "; ".join(differences(fields, identity.as_dict())) if fields else "fields not known"
        log.log(
            logging.INFO if own else logging.WARNING,
            "store %s: %d objects of identity %s cannot be used, it differs in %s",
            folder,
            count,
            digest.hex()[:16],
            why,
        )


def _identities(folder: Path) -> list[bytes]:
    """Digests by their files; others in there are not ours."""
    found = []
    for path in sorted((folder / "identities").glob("*.json")):
        with contextlib.suppress(ValueError):
            found.append(bytes.fromhex(path.stem))
    return [digest for digest in found if len(digest) == DIGEST_BYTES]


def _identity_path(folder: Path, digest: bytes) -> Path:
    return folder / "identities" / f"{digest.hex()}.json"


def _open_index(path: Path, segments: SegmentLog) -> tuple[Index, list[Entry]]:
    """The index and its rows; rebuilt from the segments where it is missing or damaged."""
    try:
        index = Index(path, create=not segments.numbers_on_disk())
    except IndexCorrupt as error:
        return _rebuild(path, segments, error)
    try:
        return index, index.load()
    except IndexCorrupt as error:
        index.close()
        return _rebuild(path, segments, error)


def _rebuild(path: Path, segments: SegmentLog, why: IndexCorrupt) -> tuple[Index, list[Entry]]:
    entries: list[Entry] = []
    seen = set()
    for number in segments.numbers_on_disk():
        for header, extent in segments.scan(number):
            if (header.identity, header.key) in seen:
                continue  # a copy that was made just before the end: its twin is as good
            seen.add((header.identity, header.key))
            row = len(entries) + 1
            entries.append(
                Entry(
                    row,
                    header.identity,
                    header.key,
                    header.parent,
                    extent,
                    header.payload_bytes,
                    used=row,
                )
            )
    log.warning("store %s: %s; rebuilt from %d records", path.parent, why, len(entries))
    Index.remove(path)
    fresh = path.with_suffix(".new")
    Index.remove(fresh)
    index = Index(fresh, create=True)
    try:
        index.insert(entries)
        index.erase_history()
    finally:
        index.close()
    # Whole or not at all: an index half filled would have the rest of the bytes erased.
    fresh.replace(path)
    return Index(path, create=False), entries


def _adopt(segments: SegmentLog, index: Index, entries: list[Entry]) -> set[int]:
    """Hand the files to the log; returns the rows whose bytes are gone."""
    by_segment: dict[int, dict[Extent, int]] = {n: {} for n in segments.numbers_on_disk()}
    for entry in entries:
        by_segment.setdefault(entry.extent.segment, {})[entry.extent] = entry.row
    lost: set[int] = set()
    for number in sorted(by_segment):
        rows = by_segment[number]
        lost.update(rows[extent] for extent in segments.adopt(number, list(rows)))
    if lost:
        log.warning("store: %d objects lost their bytes and are forgotten", len(lost))
        index.delete(lost)
    return lost
