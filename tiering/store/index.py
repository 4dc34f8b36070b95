"""The durable index: one SQLite row for each object, written after the object's bytes.

It holds names and places only; whether bytes are right is for their checksum to say. Rows are
appended in the order of their numbers and never looked up by name (the catalogue in memory does
that), so a commit touches a page or two whatever the folder holds.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path

from dsv4_tierd.tiering.errors import StoreUnavailable
from dsv4_tierd.tiering.store.catalogue import Entry, Extent
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind

SCHEMA_VERSION = 1  # written; from SCHEMA_VERSION_MIN on they are read
SCHEMA_VERSION_MIN = 1
_WAL_PAGES = 256  # 1 MiB of log before it is folded back into the file

_SCHEMA = """
CREATE TABLE identities (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE);
CREATE TABLE objects (
    id INTEGER PRIMARY KEY, identity INTEGER NOT NULL, kind INTEGER NOT NULL,
    tenant TEXT NOT NULL, digest BLOB NOT NULL, parent BLOB, segment INTEGER NOT NULL,
    start INTEGER NOT NULL, size INTEGER NOT NULL, payload_bytes INTEGER NOT NULL,
    used INTEGER NOT NULL);
"""
_INSERT = "INSERT INTO objects VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_SELECT = """
SELECT o.id, i.digest, kind, tenant, o.digest, parent, segment, start, size, payload_bytes, used
FROM objects o JOIN identities i ON i.id = o.identity ORDER BY o.id
"""

_REFUSED = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    }
)


class IndexCorrupt(Exception):
    """The index cannot be read; the segments can rebuild it."""


class Index:
    """Rows of one folder. Not thread-safe: the store's writer lock guards it.

    Every writing call is one durable transaction and raises sqlite3.Error when it is not.
    """

    def __init__(self, path: Path, *, create: bool) -> None:
        """Open; an empty file becomes an index only with ``create``.

        Raises IndexCorrupt, StoreUnavailable (the disk is full, or refuses).
        """
        self.path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(create=create)
                self._identities: dict[bytes, int] = dict(
                    self._db.execute("SELECT digest, id FROM identities").fetchall()
                )
            except BaseException:
                self._db.close()
                raise
        except sqlite3.DatabaseError as error:
            raise _opening_error(path, error) from error

    @staticmethod
    def remove(path: Path) -> None:
        """Delete an index and its side files."""
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)

    def load(self) -> list[Entry]:
        """Every row, oldest first. Raises IndexCorrupt."""
        try:
            return [_entry(row) for row in self._db.execute(_SELECT)]
        except (ValueError, TypeError) as error:
            raise IndexCorrupt(f"{self.path.name}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise _opening_error(self.path, error) from error

    def insert(self, entries: Sequence[Entry]) -> None:
        """Publish objects."""
        added: dict[bytes, int] = {}
        with self._transaction():
            for digest in {entry.identity for entry in entries} - self._identities.keys():
                cursor = self._db.execute("INSERT INTO identities (digest) VALUES (?)", (digest,))
                assert cursor.lastrowid is not None
                added[digest] = cursor.lastrowid
            known = self._identities | added
            self._db.executemany(_INSERT, [_row(e, known[e.identity]) for e in entries])
        self._identities |= added

    def delete(self, rows: Iterable[int]) -> None:
        """Forget objects."""
        with self._transaction():
            self._db.executemany("DELETE FROM objects WHERE id = ?", [(row,) for row in rows])

    def move(self, places: Iterable[tuple[int, Extent]]) -> None:
        """Give objects new places."""
        rows = [(place.segment, place.offset, place.size, row) for row, place in places]
        with self._transaction():
            self._db.executemany(
                "UPDATE objects SET segment = ?, start = ?, size = ? WHERE id = ?", rows
            )

    def save_uses(self, entries: Iterable[Entry]) -> None:
        """Keep when each object was last used, so that eviction goes on where it stopped."""
        rows = [(entry.used, entry.row) for entry in entries]
        with self._transaction():
            self._db.executemany("UPDATE objects SET used = ? WHERE id = ?", rows)

    def erase_history(self) -> None:
        """Fold the log back and empty it: deleted names leave the folder with it."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def shrink(self) -> None:
        """Give unused pages back to the file system."""
        self._db.execute("VACUUM")
        self.erase_history()

    @property
    def disk_bytes(self) -> int:
        """Size of the index and its side files."""
        paths = (self.path.with_name(self.path.name + suffix) for suffix in ("", "-wal", "-shm"))
        return sum(path.stat().st_size for path in paths if path.exists())

    def close(self) -> None:
        """Release the file."""
        self._db.close()

    def _prepare(self, *, create: bool) -> None:
        execute = self._db.execute
        execute("PRAGMA journal_mode = WAL").fetchall()
        execute("PRAGMA synchronous = FULL")  # a row is promised once put() has returned
        execute("PRAGMA secure_delete = ON")
        execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}").fetchall()
        execute(f"PRAGMA journal_size_limit = {_WAL_PAGES * 4096}").fetchall()
        version = execute("PRAGMA user_version").fetchone()[0]
        if version == 0 and create:
            self._db.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
        problems = execute("PRAGMA quick_check").fetchall()
        if problems != [("ok",)]:
            raise IndexCorrupt(f"{self.path.name}: {problems[0][0]}")
        if version > SCHEMA_VERSION:  # rebuilt from records that this release cannot read, all went
            raise StoreUnavailable(
                f"{self.path} was written by a later release: index version {version},"
                f" this reads up to {SCHEMA_VERSION}",
                retry_after_s=None,
            )
        if not create and version < SCHEMA_VERSION_MIN:
            raise IndexCorrupt(f"index of version {version}")

    def _transaction(self) -> _Transaction:
        return _Transaction(self._db)


class _Transaction:
    """BEGIN IMMEDIATE … COMMIT, or ROLLBACK when either the body or the commit fails."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")


def _opening_error(path: Path, error: sqlite3.DatabaseError) -> Exception:
    """A damaged file can be rebuilt; a disk that refuses must not lead to that."""
    text = f"{path.name}: {error}"
    # Python's own errors, as of text that is no UTF-8, have no code.
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    if code & 0xFF in _REFUSED:
        return StoreUnavailable(text)
    return IndexCorrupt(text)


def _row(entry: Entry, identity: int) -> tuple[int | str | bytes | None, ...]:
    place, key = entry.extent, entry.key
    name = (entry.row, identity, int(key.kind), key.tenant, key.digest, entry.parent)
    return (*name, place.segment, place.offset, place.size, entry.payload_bytes, entry.used)


def _entry(row: tuple[int, bytes, int, str, bytes, bytes | None, int, int, int, int, int]) -> Entry:
    number, identity, kind, tenant, digest, parent, segment, start, size, payload, used = row
    key = ObjectKey(ObjectKind(kind), tenant, digest)
    return Entry(number, identity, key, parent, Extent(segment, start, size), payload, used)
