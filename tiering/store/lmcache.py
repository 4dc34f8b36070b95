"""A prefix store on any L2 adapter of LMCache: S3, Mooncake, NIXL, 3FS, Valkey, a shared folder.

Adapters keep bytes under names, and little else can be relied on: there is no listing, a second
write may or may not replace the first, deleting may do nothing, and nothing is checked. So the
frame is ours (codec), and so is the catalogue (lmcache_log), which is held in memory and kept
in the adapter beside the objects: these first, the rows that make them visible last.

How durable an object is once ``put`` returns is the adapter's matter: ``fs_native`` syncs
nothing. Bytes of a put that a crash cut off stay there without a name.

The specification is the adapter's own JSON, with these of ours: ``deadline_s`` (2), ``poll_s``
(0.5; how often others' logs are asked for news).
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsv4_tierd.tiering.errors import (
    InvalidRequest,
    PreconditionFailed,
    StoreUnavailable,
    TransferFailed,
    UnsupportedCombination,
)
from dsv4_tierd.tiering.store.catalogue import Entry
from dsv4_tierd.tiering.store.codec import decode, encode_header, header_size
from dsv4_tierd.tiering.store.disk import GcReport, ObjectInfo, VerifyReport
from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.lmcache_kit import LMCacheToolkit
from dsv4_tierd.tiering.store.lmcache_shelf import AdapterShelf, Toolkit
from dsv4_tierd.tiering.store.lmcache_space import (
    Space,
    log_other_identities,
    other_identities,
    remember_identity,
    stored_identities,
)
from dsv4_tierd.tiering.store.protocol import (
    Facts,
    ObjectKey,
    ObjectKind,
    StoredObject,
    StoreUsage,
)

log = logging.getLogger(__name__)

_BACK_OFF_S = (0.05, 5.0)
_FRAMES_MAX = 4


@dataclass(frozen=True, slots=True)
class LMCacheConfig:
    """Limits. ``bytes_max``: of this identity, all writers; 0 for none."""

    bytes_max: int
    deadline_s: float = 2.0
    poll_s: float = 0.5
    commit_bytes: int = 32 << 20


def open_lmcache(
    spec: Mapping[str, Any], identity: StoreIdentity | None, bytes_max: int
) -> LMCacheStore:
    """A store on the adapter that ``spec`` describes.

    Raises UnsupportedCombination (LMCache or a package of the adapter's is missing),
    InvalidRequest (the specification).
    """
    if identity is None:
        raise InvalidRequest("an LMCache store is looked at through a daemon's identity")
    adapter = dict(spec)
    try:
        limits: dict[str, Any] = {
            name: float(adapter.pop(name)) for name in ("deadline_s", "poll_s") if name in spec
        }
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"--store lmcache: {error}", param="store") from error
    config = LMCacheConfig(bytes_max, **limits)
    return LMCacheStore(LMCacheToolkit(adapter), config, identity)


def lmcache_identities(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The fields of every identity that wrote to the adapter. Raises as ``open_lmcache``."""
    adapter = {name: value for name, value in spec.items() if name not in ("deadline_s", "poll_s")}
    shelf = AdapterShelf(LMCacheToolkit(adapter), LMCacheConfig(0).deadline_s)
    try:
        shelf.connect()
        return [fields for _, fields in stored_identities(shelf)]
    except ImportError as error:
        raise UnsupportedCombination(f"--store lmcache: {error}", param="store") from error
    finally:
        shelf.close()


class LMCacheStore:
    """``PrefixStore`` over LMCache's L2 adapters."""

    def __init__(self, toolkit: Toolkit, config: LMCacheConfig, identity: StoreIdentity) -> None:
        """Connect, or start down and keep trying. Raises UnsupportedCombination."""
        self._config, self._fields = config, identity
        self._identity = identity.digest
        self.shelf = AdapterShelf(toolkit, config.deadline_s)
        self._frames = _Frames()
        self._space = Space(self.shelf, self._identity)
        self._writing = threading.RLock()
        self._counting = threading.Lock()
        self._open, self._up = True, False
        self._stop = threading.Event()
        self._bytes_read = self._bytes_written = 0
        self._checksum_failures = self._evicted = 0
        try:
            self._connect()
        except ImportError as error:
            self.shelf.close()
            raise UnsupportedCombination(f"--store lmcache: {error}", param="store") from error
        except StoreUnavailable as error:
            log.warning("store: %s; trying again in the background", error)
        self._thread = threading.Thread(target=self._run, name="store-lmcache-keep", daemon=True)
        self._thread.start()

    @property
    def identity(self) -> bytes:
        """Digest under which this store reads and writes."""
        return self._identity

    # ------------------------------------------------------------ reading
    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Memory only, no lock. Raises StoreUnavailable, at once, while the adapter is away."""
        self._check()
        find = self._space.find
        return [find(key) is not None for key in keys]

    def find(self, key: ObjectKey) -> Facts | None:
        """Memory only, no lock. Raises as ``has``."""
        self._check()
        entry = self._space.find(key)
        return None if entry is None else Facts(entry.parent, entry.payload_bytes)

    def get(self, key: ObjectKey, into: memoryview) -> bool:
        """Read and check one object; a bad one is forgotten before TransferFailed is raised."""
        self._check()
        into = into.cast("B")
        space = self._space
        entry = space.find(key)
        if entry is None:
            return False
        if entry.payload_bytes != len(into):
            raise TransferFailed(f"{key.kind.name} of {entry.payload_bytes} B for {len(into)}")
        if not self._read(space, entry, into):
            return False
        space.touch(entry)
        with self._counting:
            self._bytes_read += len(into)
        return True

    def _read(self, space: Space, entry: Entry, into: memoryview | None = None) -> bool:
        """Read and check a payload, ``into`` what may be given; False: its bytes are gone.

        Raises TransferFailed.
        """
        frame = self._frames.take(entry.extent.size)
        with self._tripping():
            there = self.shelf.load([(space.name(entry), frame)])[0]
            if not there:  # is it the object that is gone, or the one who looked for it?
                self.shelf.check_workers()
                there = self.shelf.load([(space.name(entry), frame)])[0]
        try:
            if not there:
                self._forget(space, entry)
                return False
            payload = decode(self._identity, entry.key, memoryview(frame))
            if into is not None:
                into[:] = payload
            self._frames.give_back(frame)  # not where it went wrong: the adapter may still write
            return True
        except TransferFailed as error:
            log.warning("store: %s is bad and forgotten: %s", _describe(entry.key), error)
            with self._counting:
                self._checksum_failures += 1
            self._forget(space, entry)
            raise

    def _forget(self, space: Space, entry: Entry) -> None:
        """Take the row back, here at once and for everyone if that can be said."""
        try:
            with self._tripping():
                space.remove([entry])
        except StoreUnavailable as error:
            log.warning("store: %s is not forgotten yet: %s", _describe(entry.key), error)

    # ------------------------------------------------------------ writing
    def put(self, objects: Sequence[StoredObject]) -> None:
        """Write what is not there yet, in commits of at most ``commit_bytes``.

        Each is whole or not, if its rows fit one log object; of more, those of its first ones.

        Raises PreconditionFailed (a page's parent is not stored: nothing is written),
        StoreUnavailable (away, full: earlier commits stay), InvalidRequest.
        """
        with self._writing:
            self._check()
            with self._tripping():
                self._space.follow()
                fresh = self._select(objects)
                kept = frozenset(
                    digest
                    for item in objects
                    for digest in (item.key.digest, item.parent)
                    if digest is not None
                )
                for group in _groups(fresh, self._config.commit_bytes):
                    self._commit(group, kept)

    def _select(self, objects: Sequence[StoredObject]) -> list[StoredObject]:
        """What must be written, each once, with parents checked."""
        fresh: dict[ObjectKey, StoredObject] = {}
        for item in objects:
            entry = self._space.find(item.key)
            if entry is not None:
                self._space.touch(entry)
                continue
            if item.key.kind is ObjectKind.PAGE and item.parent is not None:
                parent = replace(item.key, digest=item.parent)
                if parent not in fresh and self._space.find(parent) is None:
                    raise PreconditionFailed(f"the page before {_describe(item.key)} is not stored")
            fresh.setdefault(item.key, item)
        return list(fresh.values())

    def _commit(self, group: Sequence[StoredObject], kept: frozenset[bytes]) -> None:
        """Make room, write, publish; on any failure nothing of ``group`` is visible here."""
        frames = []
        for item in group:
            frame = bytearray(encode_header(self._identity, item))
            frame += memoryview(item.payload).cast("B")
            frames.append((item, frame))
        size = sum(len(frame) for _, frame in frames)
        self._make_room(size, kept)
        self._space.add(frames)
        with self._counting:
            self._bytes_written += size

    def _make_room(self, size: int, kept: frozenset[bytes]) -> None:
        bytes_max = self._config.bytes_max
        if not bytes_max or self._space.bytes_used + size <= bytes_max:
            return
        victims = self._space.give_up(self._space.bytes_used + size - bytes_max, kept)
        self._space.remove(victims)
        with self._counting:
            self._evicted += len(victims)
        if self._space.bytes_used + size > bytes_max:
            raise StoreUnavailable("the store is full, and the rest of it is in use")

    # ------------------------------------------------------------ removing
    def delete(self, keys: Iterable[ObjectKey]) -> int:
        """Remove objects and what hangs on them, and their bytes, if the adapter can.

        Returns how many of ``keys`` there were. Raises StoreUnavailable.
        """
        with self._writing:
            self._check()
            with self._tripping():
                self._space.follow()
                found = [self._space.find(key) for key in dict.fromkeys(keys)]
                entries = [entry for entry in found if entry is not None]
                self._space.remove(self._space.subtree(entries))
                return len(entries)

    def delete_tenant(self, tenant: str) -> int:
        """Remove every object of a tenant, under every identity."""
        with self._writing:
            self._check()
            gone = 0
            with self._tripping():
                self._space.follow()
                others = (
                    Space(self.shelf, i) for i in other_identities(self.shelf, self._identity)
                )
                for space in (self._space, *others):
                    if space is not self._space:
                        space.follow()
                    entries = space.of_tenant(tenant)
                    space.remove(entries)
                    gone += len(entries)
            return gone

    # ------------------------------------------------------------ state
    def verify(self, advance: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read and check every object of this identity; bad ones are forgotten.

        ``advance`` is told how many objects are done, and of how many.
        """
        count = size = 0
        bad = []
        space = self._space
        entries = space.entries()
        for entry in entries:
            self._check()
            if advance is not None:
                advance(count, len(entries))
            try:
                if not self._read(space, entry):
                    bad.append(f"{_describe(entry.key)}: its bytes are gone")
            except TransferFailed as error:
                bad.append(f"{_describe(entry.key)}: {error}")
            count += 1
            size += entry.payload_bytes
        return VerifyReport(count, size, tuple(bad))

    def gc(self) -> GcReport:
        """Take back rows whose bytes are gone, with what hangs on them; keep within the budget.

        Bytes of a put that a crash cut off stay: an adapter lists nothing.
        """
        with self._writing:
            self._check()
            with self._tripping():
                self._space.follow()
                before = self._space.bytes_used
                self.shelf.check_workers()
                self._space.remove(self._space.subtree(self._space.lost()))
                self._make_room(0, frozenset())
                return GcReport(before, self._space.bytes_used, 0)

    def list_objects(self) -> Iterator[ObjectInfo]:
        """Every object of this identity, in the order in which it became known."""
        self._check()
        for entry in self._space.entries():
            yield ObjectInfo(
                identity=self._identity.hex(),
                kind=entry.key.kind,
                tenant=entry.key.tenant,
                digest=entry.key.digest.hex(),
                parent=None if entry.parent is None else entry.parent.hex(),
                payload_bytes=entry.payload_bytes,
                record_bytes=entry.extent.size,
            )

    def usage(self) -> StoreUsage:
        """Gauges of this identity, whoever stored it; counters of this process."""
        with self._counting:
            return StoreUsage(
                up=self._open and self._up,
                objects=self._space.count,
                bytes_used=self._space.bytes_used,
                bytes_max=self._config.bytes_max,
                bytes_written=self._bytes_written,
                bytes_read=self._bytes_read,
                checksum_failures=self._checksum_failures,
                evicted_objects=self._evicted,
            )

    def close(self) -> None:
        """Let the adapter go. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._stop.set()
        self._thread.join(2 * self._config.deadline_s)
        self.shelf.close()

    def _check(self) -> None:
        if not self._open:
            raise StoreUnavailable("the store is closed", retry_after_s=None)
        if not self._up:
            raise StoreUnavailable("the LMCache adapter is away")

    def _tripping(self) -> _Tripping:
        return _Tripping(self._trip)

    def _trip(self, why: str) -> None:
        if self._up and not self.shelf.connected:
            self._up = False
            log.warning("store: LMCache is away: %s", why)

    # ------------------------------------------------------------ the keeper's thread
    def _connect(self) -> None:
        """A fresh adapter, and the catalogue read anew from what it holds."""
        self.shelf.connect()
        space = Space(self.shelf, self._identity)
        space.follow()
        remember_identity(self.shelf, self._fields)
        log_other_identities(self.shelf, self._fields)
        with self._writing:
            self._space = space
            self._up = True

    def _run(self) -> None:
        wait_s = self._config.poll_s
        while not self._stop.wait(wait_s):
            try:
                if self._up:
                    with self._tripping():
                        self.shelf.check_pulse()
                        self._space.follow()
                else:
                    self._connect()
                    log.info("store: LMCache answers again")
                wait_s = self._config.poll_s
            except Exception as error:  # noqa: BLE001 the thread outlives what nobody foresaw
                self.shelf.drop()
                self._trip(str(error))
                low, high = _BACK_OFF_S
                wait_s = min(max(low, 2 * wait_s), high) * random.uniform(0.5, 1.0)


class _Frames:
    """Buffers that are used again: a fresh megabyte costs as much as reading into it."""

    def __init__(self) -> None:
        self._size = 0
        self._free: list[bytearray] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> bytearray:
        """One of that size, holding anything."""
        with self._lock:
            if self._size == size and self._free:
                return self._free.pop()
        return bytearray(size)

    def give_back(self, frame: bytearray) -> None:
        """Nobody looks at or writes to it any more."""
        with self._lock:
            if self._size != len(frame):  # pages have one size, and most objects are pages
                self._size, self._free = len(frame), []
            if len(self._free) < _FRAMES_MAX:
                self._free.append(frame)


class _Tripping:
    """Notices when the adapter was lost in a call."""

    def __init__(self, trip: Callable[[str], None]) -> None:
        self._trip = trip

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StoreUnavailable):
            self._trip(error.message)


def _describe(key: ObjectKey) -> str:
    return f"{key.kind.name} {key.digest.hex()[:16]}"


def _groups(items: Sequence[StoredObject], bytes_max: int) -> Iterator[list[StoredObject]]:
    """``items`` in order, in runs of at most ``bytes_max`` bytes (or one item)."""
    group: list[StoredObject] = []
    size = 0
    for item in items:
        own = header_size(item.key.tenant) + memoryview(item.payload).nbytes
        if group and size + own > bytes_max:
            yield group
            group, size = [], 0
        group.append(item)
        size += own
    if group:
        yield group
