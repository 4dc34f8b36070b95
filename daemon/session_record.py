"""What a daemon needs to go on with another's session: one framed, checksummed record.

::

    record = magic "DSV4TSR1"  version u64  payload length u32  0 u32  xxh3_64 u64  payload

The checksum covers version and payload; the payload is one MessagePack map. ``version`` counts
the session's suspensions, so that whoever has older words knows.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import xxhash

from dsv4_tierd.tiering.errors import TransferFailed

MAGIC = b"DSV4TSR1"
_HEAD = struct.Struct("<8sQIIQ")
HEAD_BYTES = _HEAD.size


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A session as it was suspended. Times are Unix seconds; ``token_ids`` int32 LE bytes.

    ``holder``: the daemon that wrote it. ``tail_key``: of the stored tail. ``identity``: hex, of
    weights and formats: a record is found under it alone, and says it again. ``deleted``: no words
    are left, and none that another daemon still has are to be used.
    """

    identity: str
    id: str
    salt: str
    holder: str
    written_s: float
    created_s: float
    used_s: float
    token_ids: bytes
    ttl_s: float | None = None
    metadata: dict[str, Any] = {}
    encoding: str = ""
    turn: str = "none"
    tail_key: bytes | None = None
    write_policy: str = ""
    deleted: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SessionRecord)


def encode(record: SessionRecord, version: int) -> bytes:
    """The record's bytes."""
    payload = _encoder.encode(record)
    return _HEAD.pack(MAGIC, version, len(payload), 0, _digest(version, payload)) + payload


def version_of(head: bytes | None) -> int:
    """The version that the first ``HEAD_BYTES`` name; 0: there is no record, or it is no record."""
    if head is None or len(head) < HEAD_BYTES or head[: len(MAGIC)] != MAGIC:
        return 0
    return int(_HEAD.unpack_from(head)[1])


def decode(data: bytes) -> tuple[SessionRecord, int]:
    """A record and its version. Raises TransferFailed: it is not whole, or not of this format."""
    if len(data) < HEAD_BYTES:
        raise TransferFailed(f"a session record of {len(data)} bytes")
    magic, version, length, _, digest = _HEAD.unpack_from(data)
    payload = data[HEAD_BYTES:]
    if magic != MAGIC or length != len(payload) or digest != _digest(version, payload):
        raise TransferFailed("a session record fails its check")
    try:
        return _decoder.decode(payload), version
    except msgspec.DecodeError as error:
        raise TransferFailed(f"a session record cannot be read: {error}") from error


def _digest(version: int, payload: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(version.to_bytes(8, "little") + payload))
