"""One prefix as a file: its pages and resume points, to carry from one store to another.

::

    b"DSV4PFX1"  manifest_bytes (u32)  manifest_xxh3 (u64)  manifest (JSON)
    records      as in every store (codec): pages from the first on, each with its resume point
    b"DSV4PEND"  record count (u64)  BLAKE3 of everything before

Written and read in one pass, so that it may go through a pipe. A record is checked before it is
stored and hangs on one that was; a file that was cut off leaves a shorter prefix, and an error.
The manifest has the identity's fields: a store of another identity refuses the file and says in
what they differ. Checksums find damage, not malice: take files from those you trust.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import xxhash
from blake3 import blake3

from dsv4_tierd.tiering.blocks import TokenArray, Transcript, chain_root
from dsv4_tierd.tiering.errors import NotFound, TransferFailed, UnsupportedCombination
from dsv4_tierd.tiering.store.codec import (
    FIXED_BYTES,
    HEADER_BYTES_MAX,
    RecordHeader,
    check_payload,
    decode_header,
    encode_header,
)
from dsv4_tierd.tiering.store.identity import FIELD_NAMES, StoreIdentity, differences
from dsv4_tierd.tiering.store.protocol import (
    Facts,
    ObjectKey,
    ObjectKind,
    PrefixStore,
    StoredObject,
)
from dsv4_tierd.tiering.store.tiered_copies import chain_of

FORMAT_VERSION = 1  # written; from FORMAT_VERSION_MIN on they are read
FORMAT_VERSION_MIN = 1
MANIFEST_BYTES_MAX = 1 << 20
_MAGIC, _END = b"DSV4PFX1", b"DSV4PEND"
_HEAD, _TAIL = struct.Struct("<8sIQ"), struct.Struct("<8sQ32s")
_HEADER_BYTES_AT = 16  # where a record says how long its header is
_BATCH_BYTES = 32 << 20
PAYLOAD_BYTES_MAX = 1 << 32


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a file says that it holds. ``leaf``: hash of its last block."""

    identity: StoreIdentity
    tenant: str
    leaf: bytes
    pages: int
    points: int
    payload_bytes: int

    def pack(self) -> bytes:
        """JSON."""
        fields = {"format": FORMAT_VERSION, "identity": self.identity.as_dict()}
        rest = {"pages": self.pages, "points": self.points, "payload_bytes": self.payload_bytes}
        return json.dumps(fields | {"tenant": self.tenant, "leaf": self.leaf.hex()} | rest).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Manifest:
        """Raises TransferFailed, UnsupportedCombination (a later format)."""
        try:
            found: Mapping[str, Any] = json.loads(data)
            if not FORMAT_VERSION_MIN <= found["format"] <= FORMAT_VERSION:
                raise UnsupportedCombination(
                    f"the file has format {found['format']}, this reads {FORMAT_VERSION}"
                )
            fields = found["identity"]
            if set(fields) != set(FIELD_NAMES):
                odd = ", ".join(sorted(set(fields) ^ set(FIELD_NAMES)))
                raise UnsupportedCombination(f"the file's identity has other fields: {odd}")
            return cls(
                StoreIdentity(**fields),
                str(found["tenant"]),
                bytes.fromhex(found["leaf"]),
                int(found["pages"]),
                int(found["points"]),
                int(found["payload_bytes"]),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise TransferFailed(f"the file's manifest cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class BundleReport:
    """What was moved."""

    manifest: Manifest
    objects: int
    file_bytes: int


def stored_leaf(
    store: PrefixStore, identity: StoreIdentity, tenant: str, tokens: TokenArray
) -> bytes:
    """Hash of the last block of ``tokens`` ([n] int32) up to which ``store`` has all.

    Raises NotFound: it has not even the first.
    """
    root = chain_root(identity.digest, tenant)
    hashes = Transcript(root, np.ascontiguousarray(tokens, "<i4")).hashes
    there = store.has([ObjectKey(ObjectKind.PAGE, tenant, key) for key in hashes])
    count = next((i for i, is_there in enumerate(there) if not is_there), len(there))
    if not count:
        raise NotFound("nothing of these tokens is stored")
    return hashes[count - 1]


def export_prefix(
    store: PrefixStore,
    identity: StoreIdentity,
    tenant: str,
    leaf: bytes,
    file: BinaryIO,
    progress: Callable[[int, int], None] | None = None,
) -> BundleReport:
    """Write the prefix that ends with block ``leaf`` to ``file``.

    ``progress`` is called with payload bytes done and in all.
    Raises NotFound (it is not stored, or has no beginning), TransferFailed (a page went bad or
    away meanwhile: the file is not whole), StoreUnavailable.
    """
    assert store.identity == identity.digest, "the store has another identity"
    objects = _objects(store, tenant, leaf)
    pages = sum(key.kind is ObjectKind.PAGE for key, _ in objects)
    total = sum(facts.payload_bytes for _, facts in objects)
    manifest = Manifest(identity, tenant, leaf, pages, len(objects) - pages, total)
    out = _Out(file)
    packed = manifest.pack()
    out.write(_HEAD.pack(_MAGIC, len(packed), xxhash.xxh3_64_intdigest(packed)) + packed)
    done = 0
    for key, facts in objects:
        payload = memoryview(bytearray(facts.payload_bytes))
        if not store.get(key, payload):
            raise TransferFailed(f"{key.kind.name} {key.digest.hex()[:16]} went away meanwhile")
        out.write(encode_header(identity.digest, StoredObject(key, facts.parent, payload)))
        out.write(payload)
        done += len(payload)
        if progress is not None:
            progress(done, total)
    file.write(_TAIL.pack(_END, len(objects), out.hasher.digest()))
    return BundleReport(manifest, len(objects), out.count + _TAIL.size)


def read_manifest(file: BinaryIO) -> Manifest:
    """What ``file`` holds; it is then at its first record. Raises TransferFailed."""
    return _manifest(_In(file))


def import_prefix(
    file: BinaryIO,
    store: PrefixStore,
    identity: StoreIdentity,
    progress: Callable[[int, int], None] | None = None,
) -> BundleReport:
    """Store the prefix in ``file``; objects that are there already are left alone.

    Raises UnsupportedCombination (another identity: nothing is stored), TransferFailed (damaged
    or cut off: what came before stays), StoreUnavailable.
    """
    source = _In(file)
    manifest = _manifest(source)
    check_identity(manifest, identity)
    batch: list[StoredObject] = []
    size = count = done = 0
    for item in _records(source, manifest):
        batch.append(item)
        size += memoryview(item.payload).nbytes
        count += 1
        if size >= _BATCH_BYTES:
            store.put(batch)
            done += size
            batch, size = [], 0
            if progress is not None:
                progress(done, manifest.payload_bytes)
    store.put(batch)
    if progress is not None:
        progress(done + size, manifest.payload_bytes)
    return BundleReport(manifest, count, source.count)


def check_identity(manifest: Manifest, identity: StoreIdentity) -> None:
    """Raises UnsupportedCombination, naming what differs."""
    why = differences(manifest.identity.as_dict(), identity.as_dict())
    if why:
        raise UnsupportedCombination(f"the file is of another identity: {'; '.join(why)}")


def _objects(store: PrefixStore, tenant: str, leaf: bytes) -> list[tuple[ObjectKey, Facts]]:
    """Pages from the first to the leaf, each followed by its resume point."""
    up = list(chain_of(ObjectKey(ObjectKind.PAGE, tenant, leaf), store.find))
    if not up:
        raise NotFound(f"block {leaf.hex()[:16]} is not stored")
    if up[-1][1].parent is not None:
        raise NotFound(f"a block before {leaf.hex()[:16]} is not stored")
    found = []
    for key, facts in reversed(up):
        found.append((key, facts))
        point = ObjectKey(ObjectKind.RESUME, tenant, key.digest)
        known = store.find(point)
        if known is not None:
            found.append((point, known))
    return found


class _Out:
    """Counts and hashes what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.hasher, self.count = file, blake3(), 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.hasher.update(data)
        self.count += len(data)


class _In:
    """Counts and hashes what is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.hasher, self.count = file, blake3(), 0

    def read(self, size: int, *, hashed: bool = True) -> bytearray:
        """Exactly so many bytes. Raises TransferFailed: there are fewer."""
        data = bytearray()
        while len(data) < size:
            part = self._file.read(min(size - len(data), 1 << 24))
            if not part:
                raise TransferFailed("the file was cut off")
            data += part
        if hashed:
            self.hasher.update(data)
        self.count += size
        return data


def _manifest(source: _In) -> Manifest:
    magic, size, checksum = _HEAD.unpack(source.read(_HEAD.size))
    if magic != _MAGIC:
        raise TransferFailed("this is not an exported prefix")
    if size > MANIFEST_BYTES_MAX:
        raise TransferFailed("the file's manifest is damaged")
    packed = bytes(source.read(size))
    if xxhash.xxh3_64_intdigest(packed) != checksum:
        raise TransferFailed("the file's manifest is damaged")
    return Manifest.unpack(packed)


def _records(source: _In, manifest: Manifest) -> Iterator[StoredObject]:
    """The objects, each checked and in its place; then the end. Raises TransferFailed."""
    count, last = 0, None
    while True:
        before = source.hasher.digest()
        start = source.read(len(_END), hashed=False)
        if start == _END:
            break
        source.hasher.update(start)
        header = _header(source, start)
        last = _placed(header, manifest, last)
        payload = source.read(header.payload_bytes)
        check_payload(header, payload)
        yield StoredObject(header.key, header.parent, memoryview(payload))
        count += 1
    rest = source.read(_TAIL.size - len(_END), hashed=False)
    _, told, digest = _TAIL.unpack(start + rest)
    if (told, digest) != (count, before) or count != manifest.pages + manifest.points:
        raise TransferFailed("the file is not what was written: its records do not add up")
    if last != manifest.leaf:
        raise TransferFailed("the file does not reach the block that it names")


def _header(source: _In, start: bytearray) -> RecordHeader:
    fixed = start + source.read(FIXED_BYTES - len(start))
    size = int.from_bytes(fixed[_HEADER_BYTES_AT : _HEADER_BYTES_AT + 4], "little")
    if not FIXED_BYTES <= size <= HEADER_BYTES_MAX:
        raise TransferFailed(f"header of {size} bytes")
    header = decode_header(fixed + source.read(size - FIXED_BYTES))
    if header.payload_bytes > PAYLOAD_BYTES_MAX:
        raise TransferFailed(f"payload of {header.payload_bytes} bytes")
    return header


def _placed(header: RecordHeader, manifest: Manifest, last: bytes | None) -> bytes | None:
    """The last page's digest once this record is taken. Raises TransferFailed: out of place."""
    key = header.key
    if header.identity != manifest.identity.digest or key.tenant != manifest.tenant:
        raise TransferFailed("a record is of another identity or tenant than the file")
    if key.kind is ObjectKind.PAGE and header.parent == last:
        return key.digest
    if key.kind is ObjectKind.RESUME and key.digest == last:
        return last
    raise TransferFailed(f"{key.kind.name} {key.digest.hex()[:16]} is out of its place")
