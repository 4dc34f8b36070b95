"""Objects, identities and a disk with faults, for tests of stores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from dsv4_tierd.tiering.store.disk import DiskStore
from dsv4_tierd.tiering.store.files import Buffer, Files, OsFiles
from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, PrefixStore, StoredObject
from dsv4_tierd.tiering.store.vault import DiskConfig

IDENTITY = StoreIdentity(
    weights_digest="ab" * 32,
    model_config_digest="cd" * 32,
    row_format="fp8",
    key_format="key_fp8",
    compute_dtype="bfloat16",
    state_dtype="float32",
    layout_version=1,
    page_tokens=256,
)
PAGE_BYTES = 10_000


def digest(name: str) -> bytes:
    """32 bytes that stand for ``name``."""
    return blake3(name.encode()).digest()


def content(key: ObjectKey, size: int = PAGE_BYTES) -> bytes:
    """The bytes of an object: they follow from its name, as real ones do."""
    seed = blake3(bytes([key.kind]) + key.tenant.encode() + key.digest)
    return bytes(seed.digest(length=size))


def page(
    name: str, after: str | None = None, tenant: str = "", size: int = PAGE_BYTES
) -> StoredObject:
    """A page, hanging on another."""
    key = ObjectKey(ObjectKind.PAGE, tenant, digest(name))
    return StoredObject(key, None if after is None else digest(after), content(key, size))


def resume(at: str, tenant: str = "", size: int = PAGE_BYTES) -> StoredObject:
    """The resume point behind a page."""
    key = ObjectKey(ObjectKind.RESUME, tenant, digest(at))
    return StoredObject(key, digest(at), content(key, size))


def tail(
    name: str, after: str | None = None, tenant: str = "", size: int = PAGE_BYTES
) -> StoredObject:
    """A suspended session's tail."""
    key = ObjectKey(ObjectKind.TAIL, tenant, digest(name))
    return StoredObject(key, None if after is None else digest(after), content(key, size))


def chain(name: str, count: int, tenant: str = "", size: int = PAGE_BYTES) -> list[StoredObject]:
    """Pages name0, name1, … each on the one before."""
    names = [f"{name}{i}" for i in range(count)]
    return [page(own, names[i - 1] if i else None, tenant, size) for i, own in enumerate(names)]


def read(store: PrefixStore, item: StoredObject) -> bytes | None:
    """What the store gives for an object; None: it has none."""
    into = bytearray(len(item.payload))
    return bytes(into) if store.get(item.key, memoryview(into)) else None


def present(store: PrefixStore, items: Sequence[StoredObject]) -> list[bool]:
    """``has`` by objects."""
    return store.has([item.key for item in items])


def open_disk(
    folder: Path,
    identity: StoreIdentity | None = IDENTITY,
    files: Files | None = None,
    *,
    bytes_max: int = 64 << 20,
    segment_bytes: int = 256 << 10,
    commit_bytes: int = 128 << 10,
) -> DiskStore:
    """A store with small segments, so that a test crosses many."""
    config = DiskConfig(folder, bytes_max, segment_bytes, commit_bytes, free_bytes_min=0)
    return DiskStore(config, identity, files)


def disk_usage(folder: Path) -> int:
    """What ``du`` counts: blocks, not lengths."""
    return sum(os.lstat(path).st_blocks * 512 for path in [folder, *folder.rglob("*")])


def folder_bytes(folder: Path) -> bytes:
    """Every byte of every file, to search in."""
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


class Crash(BaseException):
    """The process ends here. Not an Exception: nothing may handle it."""


class FaultyFiles(OsFiles):
    """The real disk, until told otherwise.

    ``errors``: per call name, the errnos of the coming calls (0: none). ``fail_at`` /
    ``crash_at``: number of the changing call (open for writing, write, sync, sync_folder,
    punch, truncate, unlink) that fails with EIO / ends the process, a write half done.
    """

    def __init__(self, *, holes: bool = True) -> None:
        self.errors: dict[str, list[int]] = {}
        self.calls = 0
        self.fail_at = self.crash_at = 0
        self.short_by = 0
        self.free: int | None = None
        self._holes = holes

    def open(self, path: Path, *, write: bool) -> int:
        self._before("open", changes=write)
        return super().open(path, write=write)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        try:
            self._before("write")
        except (Crash, OSError):
            data = b"".join(buffers)
            super().write(fd, [data[: len(data) // 2]], offset)
            raise
        super().write(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self._before("read", changes=False)
        return max(0, super().read(fd, buffers, offset) - self.short_by)

    def sync(self, fd: int) -> None:
        self._before("sync")
        super().sync(fd)

    def sync_folder(self, path: Path) -> None:
        self._before("sync_folder")
        super().sync_folder(path)

    def punch(self, fd: int, offset: int, size: int) -> bool:
        self._before("punch")
        return self._holes and super().punch(fd, offset, size)

    def truncate(self, fd: int, size: int) -> None:
        self._before("truncate")
        super().truncate(fd, size)

    def unlink(self, path: Path) -> None:
        self._before("unlink")
        super().unlink(path)

    def free_bytes(self, folder: Path) -> int:
        return super().free_bytes(folder) if self.free is None else self.free

    def _before(self, call: str, *, changes: bool = True) -> None:
        if changes:
            self.calls += 1
            if self.calls == self.crash_at:
                raise Crash
            if self.calls == self.fail_at:
                raise OSError(5, "injected")
        pending = self.errors.get(call)
        number = pending.pop(0) if pending else 0
        if number:
            raise OSError(number, os.strerror(number))
