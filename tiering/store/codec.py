"""The framed record: how one object is written, on a disk or in a server.

::

    offset  bytes  field           (integers little-endian)
         0      8  magic           b"DSV4TIER"
         8      2  version         1
        10      1  kind            ObjectKind
        11      1  codec           0: the payload is stored as it is
        12      2  tenant_bytes    length of the tenant's UTF-8
        14      2  flags           bit 0: there is a parent
        16      4  header_bytes    192 + tenant_bytes, rounded up to 64
        20      4  reserved        zero
        24      8  payload_bytes
        32      8  payload_xxh3    xxh3-64 of the payload
        40     32  identity        digest of the StoreIdentity
        72     32  digest          the object's digest
       104     32  parent          zeros without a parent
       136     48  reserved        zero
       184      8  header_xxh3     xxh3-64 of bytes 0..184 and 192..header_bytes
       192      -  tenant          UTF-8, zero-padded to header_bytes
    header_bytes  payload

The header's checksum covers the payload's, so a header and a payload of different objects
never pass together.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from dsv4_tierd.tiering.errors import InvalidRequest, TransferFailed
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, StoredObject

MAGIC = b"DSV4TIER"
FORMAT_VERSION = 1  # written; from FORMAT_VERSION_MIN on they are read
FORMAT_VERSION_MIN = 1
DIGEST_BYTES = 32
FIXED_BYTES = 192
TENANT_BYTES_MAX = 1024
HEADER_BYTES_MAX = FIXED_BYTES + TENANT_BYTES_MAX

_CODEC_NONE = 0
_FLAG_PARENT = 1
_NO_PARENT = bytes(DIGEST_BYTES)
_FIELDS = struct.Struct("<8sHBBHHIIQQ32s32s32s48x")
_SUM = struct.Struct("<Q")
assert _FIELDS.size + _SUM.size == FIXED_BYTES


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """Everything that a record says of itself. ``identity``: 32 bytes."""

    identity: bytes
    key: ObjectKey
    parent: bytes | None
    header_bytes: int
    payload_bytes: int
    payload_xxh3: int

    @property
    def frame_bytes(self) -> int:
        """Header and payload."""
        return self.header_bytes + self.payload_bytes


def readable() -> str:
    """The formats that this release reads, for people."""
    low, high = FORMAT_VERSION_MIN, FORMAT_VERSION
    return f"{low}" if low == high else f"{low} to {high}"


def header_size(tenant: str) -> int:
    """Bytes of the header of a tenant's records. Raises InvalidRequest: the tenant is too long."""
    length = len(tenant.encode())
    if length > TENANT_BYTES_MAX:
        raise InvalidRequest(f"a tenant may have {TENANT_BYTES_MAX} bytes of UTF-8, got {length}")
    return -(-(FIXED_BYTES + length) // 64) * 64


def encode_header(identity: bytes, item: StoredObject) -> bytes:
    """The header of ``item``'s record; the payload follows it unchanged.

    Reads the payload once, for its checksum. Raises InvalidRequest.
    """
    key, tenant = item.key, item.key.tenant.encode()
    header_bytes = header_size(key.tenant)
    digests = (identity, key.digest, _NO_PARENT if item.parent is None else item.parent)
    if any(len(digest) != DIGEST_BYTES for digest in digests):
        raise InvalidRequest("identity, digest and parent must have 32 bytes each")
    fixed = _FIELDS.pack(
        MAGIC,
        FORMAT_VERSION,
        key.kind,
        _CODEC_NONE,
        len(tenant),
        0 if item.parent is None else _FLAG_PARENT,
        header_bytes,
        0,
        memoryview(item.payload).nbytes,
        xxhash.xxh3_64_intdigest(item.payload),
        *digests,
    )
    padded = tenant.ljust(header_bytes - FIXED_BYTES, b"\0")
    return fixed + _SUM.pack(xxhash.xxh3_64_intdigest(fixed + padded)) + padded


def decode_header(data: bytes | bytearray | memoryview) -> RecordHeader:
    """The header at the start of ``data``, checked. Raises TransferFailed, saying what is wrong."""
    view = memoryview(data)
    if len(view) < FIXED_BYTES:
        raise TransferFailed(f"short header: {len(view)} of at least {FIXED_BYTES} bytes")
    (
        magic,
        version,
        kind,
        codec,
        tenant_bytes,
        flags,
        header_bytes,
        _,
        length,
        checksum,
        *digests,
    ) = _FIELDS.unpack_from(view)
    if magic != MAGIC:
        raise TransferFailed("not a record: wrong magic")
    if not FORMAT_VERSION_MIN <= version <= FORMAT_VERSION:
        raise TransferFailed(f"record format {version}, this reads {readable()}")
    if not FIXED_BYTES + tenant_bytes <= header_bytes <= min(len(view), HEADER_BYTES_MAX):
        raise TransferFailed(f"header of {header_bytes} bytes with {len(view)} at hand")
    covered = bytes(view[: _FIELDS.size]) + bytes(view[FIXED_BYTES:header_bytes])
    if xxhash.xxh3_64_intdigest(covered) != _SUM.unpack_from(view, _FIELDS.size)[0]:
        raise TransferFailed("wrong header checksum")
    if codec != _CODEC_NONE:
        raise TransferFailed(f"codec {codec} is not known")
    identity, digest, parent = digests
    try:
        tenant = bytes(view[FIXED_BYTES : FIXED_BYTES + tenant_bytes]).decode()
        key = ObjectKey(ObjectKind(kind), tenant, digest)
    except ValueError as error:
        raise TransferFailed(f"a record of kind {kind} with a name that is none") from error
    return RecordHeader(
        identity=identity,
        key=key,
        parent=parent if flags & _FLAG_PARENT else None,
        header_bytes=header_bytes,
        payload_bytes=length,
        payload_xxh3=checksum,
    )


def check_payload(header: RecordHeader, payload: bytes | bytearray | memoryview) -> None:
    """Raises TransferFailed unless ``payload`` is what ``header`` was written for."""
    size = memoryview(payload).nbytes
    if size != header.payload_bytes:
        raise TransferFailed(f"payload of {size} bytes, {header.payload_bytes} were written")
    if xxhash.xxh3_64_intdigest(payload) != header.payload_xxh3:
        raise TransferFailed("wrong payload checksum")


def check_name(header: RecordHeader, identity: bytes, key: ObjectKey) -> None:
    """Raises TransferFailed unless the record is the one asked for."""
    if header.identity != identity or header.key != key:
        raise TransferFailed(f"the record is another object: {header.key}")


def check_parent(header: RecordHeader, parent: bytes | None) -> None:
    """Raises TransferFailed unless the record hangs where the catalogue says."""
    if header.parent != parent:
        raise TransferFailed("the record hangs on another page than its row says")


def encode(identity: bytes, item: StoredObject) -> bytes:
    """Header and payload in one piece, for stores that take one value. Copies the payload."""
    return encode_header(identity, item) + bytes(item.payload)


def decode(identity: bytes, key: ObjectKey, frame: bytes | memoryview) -> memoryview:
    """The payload within ``frame``, checked against its name. Raises TransferFailed. No copy."""
    header = decode_header(memoryview(frame)[:HEADER_BYTES_MAX])
    check_name(header, identity, key)
    payload = memoryview(frame)[header.header_bytes :]
    check_payload(header, payload)
    return payload
