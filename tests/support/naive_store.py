"""The prefix store as a dict: what every real one must be indistinguishable from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dsv4_tierd.tiering.errors import PreconditionFailed, StoreUnavailable, TransferFailed
from dsv4_tierd.tiering.store.protocol import (
    Facts,
    ObjectKey,
    ObjectKind,
    StoredObject,
    StoreUsage,
)


class NaiveStore:
    """``PrefixStore`` in memory, without bound. Not thread-safe."""

    def __init__(self, identity: bytes) -> None:
        self.identity = identity
        self.objects: dict[ObjectKey, tuple[bytes | None, bytes]] = {}
        self.bad: set[ObjectKey] = set()
        self.failures = 0
        self._read = self._written = 0
        self._open = True

    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self._check()
        return [key in self.objects for key in keys]

    def find(self, key: ObjectKey) -> Facts | None:
        self._check()
        if key not in self.objects:
            return None
        parent, payload = self.objects[key]
        return Facts(parent, len(payload))

    def get(self, key: ObjectKey, into: memoryview) -> bool:
        self._check()
        if key not in self.objects:
            return False
        payload = self.objects[key][1]
        if len(payload) != len(into):
            raise TransferFailed("wrong length")
        if key in self.bad:
            self.forget(key)
            raise TransferFailed("bad bytes")
        into[:] = payload
        self._read += len(payload)
        return True

    def put(self, objects: Sequence[StoredObject]) -> None:
        self._check()
        fresh: dict[ObjectKey, StoredObject] = {}
        for item in objects:
            if item.key in self.objects:
                continue
            if item.key.kind is ObjectKind.PAGE and item.parent is not None:
                parent = replace(item.key, digest=item.parent)
                if parent not in fresh and parent not in self.objects:
                    raise PreconditionFailed("no parent")
            fresh.setdefault(item.key, item)
        for key, item in fresh.items():
            self.objects[key] = (item.parent, bytes(item.payload))
            self._written += len(item.payload)

    def delete(self, keys: Iterable[ObjectKey]) -> int:
        self._check()
        found = [key for key in dict.fromkeys(keys) if key in self.objects]
        for key in found:
            self._delete_tree(key)
        return len(found)

    def delete_tenant(self, tenant: str) -> int:
        self._check()
        return self.delete([key for key in self.objects if key.tenant == tenant])

    def usage(self) -> StoreUsage:
        used = sum(len(payload) for _, payload in self.objects.values())
        return StoreUsage(
            up=self._open,
            objects=len(self.objects),
            bytes_used=used,
            bytes_max=1 << 62,
            bytes_written=self._written,
            bytes_read=self._read,
            checksum_failures=self.failures,
            evicted_objects=0,
        )

    def close(self) -> None:
        self._open = False

    def spoil(self, key: ObjectKey) -> None:
        """The stored bytes of an object go bad; the next read finds out."""
        self.bad.add(key)

    def forget(self, key: ObjectKey) -> None:
        """A read found bad bytes: the object is gone, what hangs on it stays."""
        del self.objects[key]
        self.bad.discard(key)
        self.failures += 1

    def anchor(self, key: ObjectKey) -> ObjectKey | None:
        """The page that an object hangs on."""
        digest = key.digest if key.kind is ObjectKind.RESUME else self.objects[key][0]
        return None if digest is None else ObjectKey(ObjectKind.PAGE, key.tenant, digest)

    def _delete_tree(self, root: ObjectKey) -> None:
        if root not in self.objects:
            return
        if root.kind is ObjectKind.PAGE:
            children = [key for key in self.objects if self.anchor(key) == root and key != root]
            for child in children:
                self._delete_tree(child)
        self.objects.pop(root, None)
        self.bad.discard(root)

    def _check(self) -> None:
        if not self._open:
            raise StoreUnavailable("closed")
