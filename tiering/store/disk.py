"""The embedded prefix store: a folder, one owner, no server.

A put writes records to a segment, syncs them, and only then publishes them with an index row
and in the catalogue, so that whatever is visible is whole. ``has`` looks at memory and takes no
lock, so a thread that must not wait may call it.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dsv4_tierd.tiering.errors import PreconditionFailed, StoreUnavailable, TransferFailed
from dsv4_tierd.tiering.store.catalogue import Entry
from dsv4_tierd.tiering.store.files import Files, OsFiles
from dsv4_tierd.tiering.store.folder import (
    FolderLock,
    forget_identities,
    log_other_identities,
    remember_identity,
)
from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.protocol import (
    Facts,
    ObjectKey,
    ObjectKind,
    StoredObject,
    StoreUsage,
)
from dsv4_tierd.tiering.store.vault import DiskConfig, Vault, describe, record_bytes

log = logging.getLogger(__name__)

BYTES_MIN = 1 << 20


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
        self._identity = bytes(32) if identity is None else identity.digest
        with contextlib.ExitStack() as opened:
            try:
                config.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._owner = FolderLock(config.folder)
                opened.callback(self._owner.release)
                self._vault = Vault(config, files or OsFiles())
                opened.callback(self._vault.index.close)
                if identity is not None:
                    remember_identity(config.folder, identity)
                    log_other_identities(config.folder, identity, self._vault.catalogue)
            except (OSError, sqlite3.Error) as error:
                raise StoreUnavailable(f"{config.folder}: {error}") from error
            opened.pop_all()
        self._open = True
        self._bytes_read = 0

    @property
    def identity(self) -> bytes:
        """Digest under which this store reads and writes; zeros when for maintenance only."""
        return self._identity

    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Memory only, no lock: about a millisecond for the pages of 900K tokens."""
        self._check_open()
        find, identity = self._vault.catalogue.find, self._identity
        return [find(identity, key) is not None for key in keys]

    def find(self, key: ObjectKey) -> Facts | None:
        """Memory only, no lock."""
        self._check_open()
        entry = self._vault.catalogue.find(self._identity, key)
        return None if entry is None else Facts(entry.parent, entry.payload_bytes)

    def get(self, key: ObjectKey, into: memoryview) -> bool:
        """Read and check one object; a bad one is forgotten before TransferFailed is raised."""
        self._check_open()
        into = into.cast("B")
        entry = self._vault.pin(self._identity, key)
        if entry is None:
            return False
        try:
            if entry.payload_bytes != len(into):
                raise TransferFailed(f"{key.kind.name} of {entry.payload_bytes} B for {len(into)}")
            self._vault.read(entry, into)
        finally:
            self._vault.unpin(entry)
        with self._vault.lock:
            self._bytes_read += len(into)
            self._vault.catalogue.touch(entry)
        return True

    def put(self, objects: Sequence[StoredObject]) -> None:
        """Write what is not there yet, in commits of at most ``commit_bytes``, each whole or not.

        Raises PreconditionFailed (a page's parent is not stored: nothing is written),
        StoreUnavailable (full, no space left, I/O error: earlier commits stay), InvalidRequest.
        """
        assert any(self._identity), "opened for maintenance only"
        with self._vault.writing:
            self._check_open()
            fresh = self._select(objects)
            protected = frozenset(
                digest
                for item in objects
                for digest in (item.key.digest, item.parent)
                if digest is not None
            )
            for group in _groups(fresh, self._config.commit_bytes):
                self._vault.commit(self._identity, group, protected)

    def delete(self, keys: Iterable[ObjectKey]) -> int:
        """Remove objects and what hangs on them; their bytes are erased when it returns.

        Waits for reads of them to end. Returns how many of ``keys`` there were. Raises
        StoreUnavailable: they are invisible, but not all erased yet.
        """
        with self._vault.writing:
            self._check_open()
            with self._vault.lock:
                find = self._vault.catalogue.find
                found = [find(self._identity, key) for key in dict.fromkeys(keys)]
            return self._vault.remove([entry for entry in found if entry is not None])

    def delete_tenant(self, tenant: str) -> int:
        """Remove every object of a tenant, under every identity."""
        with self._vault.writing:
            self._check_open()
            with self._vault.lock:
                found = self._vault.catalogue.of_tenant(tenant)
            return self._vault.remove(found)

    def bytes_by_tenant(self) -> dict[str, int]:
        """Payload bytes of this identity."""
        with self._vault.lock:
            sizes = self._vault.catalogue.payload_bytes.items()
            return {tenant: size for (own, tenant), size in sizes if own == self._identity}

    def usage(self) -> StoreUsage:
        """Gauges over all identities; ``bytes_used`` includes the index."""
        with self._vault.lock:
            return StoreUsage(
                up=self._open and self._vault.trouble is None,
                objects=self._vault.catalogue.count,
                bytes_used=self._vault.bytes_used,
                bytes_max=self._config.bytes_max,
                bytes_written=self._vault.segments.bytes_written,
                bytes_read=self._bytes_read,
                checksum_failures=self._vault.checksum_failures,
                evicted_objects=self._vault.evicted_objects,
            )

    def close(self) -> None:
        """Save when objects were used, and let the folder go. A second call does nothing."""
        with self._vault.writing:
            if not self._open:
                return
            self._open = False
            try:
                self._vault.bury()
                self._vault.index.save_uses(self._vault.catalogue)
                self._vault.index.erase_history()
            except (OSError, sqlite3.Error) as error:
                log.warning("store %s: closed with %s", self._config.folder, error)
            finally:
                self._vault.index.close()
                self._owner.release()

    def verify(self, advance: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read and check every object of every identity; bad ones are forgotten.

        ``advance`` is told how many objects are done, and of how many.
        """
        objects = bytes_read = 0
        bad = []
        entries = self._entries()
        for done, entry in enumerate(entries):
            self._check_open()
            if advance is not None:
                advance(done, len(entries))
            pinned = self._vault.pin(entry.identity, entry.key)
            if pinned is None:
                continue
            try:
                self._vault.read(pinned, memoryview(bytearray(pinned.payload_bytes)))
            except TransferFailed as error:
                bad.append(f"{describe(pinned)}: {error}")
            finally:
                self._vault.unpin(pinned)
            objects += 1
            bytes_read += pinned.payload_bytes
        return VerifyReport(objects, bytes_read, tuple(bad))

    def gc(self) -> GcReport:
        """Erase what is dead, keep within the budget, gather segments, shrink the index.

        Raises StoreUnavailable.
        """
        with self._vault.writing:
            self._check_open()
            before = self._vault.bytes_used
            try:
                self._vault.bury()
                self._vault.measure()
                self._vault.shrink()
                count = self._vault.compact()
                with self._vault.lock:
                    in_use = {entry.identity for entry in self._vault.catalogue} | {self._identity}
                forget_identities(self._config.folder, in_use)
                self._vault.index.shrink()
            except (OSError, sqlite3.Error) as error:
                raise self._vault.failed(error) from error
            self._vault.measure()
            return GcReport(before, self._vault.bytes_used, count)

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
        with self._vault.lock:
            return sorted(self._vault.catalogue, key=lambda entry: entry.row)

    def _check_open(self) -> None:
        if not self._open:
            raise StoreUnavailable("the store is closed", retry_after_s=None)

    def _select(self, objects: Sequence[StoredObject]) -> list[StoredObject]:
        """What must be written, each once, with parents checked."""
        fresh: dict[ObjectKey, StoredObject] = {}
        find = self._vault.catalogue.find
        with self._vault.lock:
            for item in objects:
                entry = find(self._identity, item.key)
                if entry is not None:
                    self._vault.catalogue.touch(entry)
                    continue
                if item.key.kind is ObjectKind.PAGE and item.parent is not None:
                    parent = replace(item.key, digest=item.parent)
                    if parent not in fresh and find(self._identity, parent) is None:
                        name = item.key.digest.hex()[:16]
                        raise PreconditionFailed(f"the page before {name} is not stored")
                fresh.setdefault(item.key, item)
        return list(fresh.values())


def _groups(items: Sequence[StoredObject], bytes_max: int) -> Iterator[list[StoredObject]]:
    """``items`` in order, in runs of at most ``bytes_max`` bytes (or one item)."""
    group: list[StoredObject] = []
    size = 0
    for item in items:
        if group and size + record_bytes(item) > bytes_max:
            yield group
            group, size = [], 0
        group.append(item)
        size += record_bytes(item)
    if group:
        yield group
