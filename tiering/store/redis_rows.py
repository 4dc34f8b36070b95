"""What a store's keys are called, what a catalogue row says, and the changes that are atomic.

::

    tierd:1:identities                   hash  identity hex -> the fields behind it, as JSON
    tierd:1:{<identity>}:cat             hash  kind, digest, tenant -> row: the catalogue
    tierd:1:{<identity>}:live            hash  extent -> how many rows point into it
    tierd:1:{<identity>}:meta            hash  extent -> when it goes (server's ms; 0: never)
    tierd:1:{<identity>}:pins            hash  kind, digest, tenant -> 1
    tierd:1:{<identity>}:doomed          hash  bytes that nothing points to and that must go
    tierd:1:{<identity>}:log             stream of changes, for the other daemons
    tierd:1:{<identity>}:epoch           drawn when the catalogue was begun
    tierd:1:x:<identity>:<tenant>:<kind>:<digest>:<ms>-<nonce>[.<part>]   an extent's bytes

Everything of one catalogue has one hash tag, so a script may change it on a cluster; extents
spread over all slots. Bytes are written first and published last.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from blake3 import blake3

from dsv4_tierd.tiering.errors import TransferFailed
from dsv4_tierd.tiering.store.codec import DIGEST_BYTES, header_size
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind
from dsv4_tierd.tiering.store.redis_replies import as_bytes, as_list, as_number, as_pairs, bad
from dsv4_tierd.tiering.store.resp import Reply

PREFIX = b"tierd:1:"
IDENTITIES = PREFIX + b"identities"
EXTENTS = PREFIX + b"x:"
LOG_EVENTS_MAX = 1024
ROWS_PER_CALL = 500  # a Lua script's stack is bounded

_ROW = struct.Struct("<BBQQQQ32s")
# Written; from the minimum on they are read. A record format that older releases cannot read comes
# with a later row version: they pass such rows over, and leave them alone.
_ROW_VERSION = 1
_ROW_VERSION_MIN = 1
_NO_PARENT = bytes(DIGEST_BYTES)
_KINDS = frozenset(int(kind) for kind in ObjectKind)
_EXTENT_BYTES_MAX = 64 << 20  # of one with several records: writers stop far below

EventId = tuple[int, int]
BEGINNING: EventId = (0, 0)


@dataclass(frozen=True, slots=True)
class Names:
    """Keys of one identity's catalogue. ``identity``: hex."""

    identity: str

    def _key(self, what: str) -> bytes:
        return PREFIX + f"{{{self.identity}}}:{what}".encode()

    @property
    def cat(self) -> bytes:
        return self._key("cat")

    @property
    def live(self) -> bytes:
        return self._key("live")

    @property
    def meta(self) -> bytes:
        return self._key("meta")

    @property
    def pins(self) -> bytes:
        return self._key("pins")

    @property
    def doomed(self) -> bytes:
        return self._key("doomed")

    @property
    def log(self) -> bytes:
        return self._key("log")

    @property
    def epoch(self) -> bytes:
        return self._key("epoch")

    def all(self) -> list[bytes]:
        """Every key, the epoch first: without it nothing of the rest counts."""
        return [self.epoch, self.cat, self.live, self.meta, self.pins, self.doomed, self.log]

    @property
    def extents(self) -> bytes:
        """What the names of this identity's extents begin with."""
        return EXTENTS + f"{self.identity[:16]}:".encode()

    def extent(self, key: ObjectKey, now_ms: int) -> bytes:
        """A name that no other writer draws, for an extent that begins with ``key``."""
        tenant = blake3(key.tenant.encode()).hexdigest(length=8)
        own = f"{tenant}:{int(key.kind)}:{key.digest.hex()[:16]}"
        return self.extents + f"{own}:{now_ms:x}-{os.urandom(6).hex()}".encode()


def part_name(extent: bytes, part: int) -> bytes:
    """Key of an extent's n-th value."""
    return extent if part == 0 else b"%s.%d" % (extent, part)


def extent_of(key: bytes) -> tuple[bytes, int]:
    """The extent that a value's key belongs to, and when it was named (ms, the server's clock).

    Raises TransferFailed: it is no such key.
    """
    extent = key.partition(b".")[0]
    try:
        born_ms = int(extent.rpartition(b":")[2].partition(b"-")[0], 16)
    except ValueError:
        born_ms = -1
    if born_ms < 0 or not key.startswith(EXTENTS):
        raise TransferFailed(f"not a value of an extent: {key!r:.60}")
    return extent, born_ms


def field_of(key: ObjectKey) -> bytes:
    """A row's field: kind, digest, tenant."""
    return bytes([key.kind]) + key.digest + key.tenant.encode()


def key_of(field: bytes) -> ObjectKey:
    """The object that a field names. Raises TransferFailed: none that this version knows."""
    end = 1 + DIGEST_BYTES
    if len(field) < end or field[0] not in _KINDS:
        raise TransferFailed(f"a catalogue field of {len(field)} bytes, kind {field[:1].hex()}")
    try:
        return ObjectKey(ObjectKind(field[0]), field[end:].decode(), field[1:end])
    except UnicodeDecodeError:
        raise TransferFailed("a catalogue field's tenant is not text") from None


@dataclass(frozen=True, slots=True)
class Place:
    """A catalogue row: a record's place in an extent of ``extent_bytes``, and its parent."""

    extent: bytes
    extent_bytes: int
    offset: int
    size: int
    payload_bytes: int
    parent: bytes | None

    def pack(self) -> bytes:
        """As it stands in the catalogue."""
        return (
            _ROW.pack(
                _ROW_VERSION,
                self.parent is not None,
                self.extent_bytes,
                self.offset,
                self.size,
                self.payload_bytes,
                _NO_PARENT if self.parent is None else self.parent,
            )
            + self.extent
        )

    @classmethod
    def unpack(cls, row: bytes) -> Place:
        """Raises TransferFailed: not a row of this version, or one that cannot be.

        Rows come without a checksum; sizes that a wrong bit made huge must not be believed.
        """
        if len(row) <= _ROW.size or not _ROW_VERSION_MIN <= row[0] <= _ROW_VERSION:
            raise TransferFailed(f"a catalogue row of {len(row)} bytes, version {row[:1].hex()}")
        _, has_parent, extent_bytes, offset, size, payload_bytes, parent = _ROW.unpack_from(row)
        extent = row[_ROW.size :]
        if (
            offset + size > extent_bytes
            or payload_bytes > size
            or extent_bytes > max(size, _EXTENT_BYTES_MAX)
            or has_parent != (parent != _NO_PARENT)
            or not extent.startswith(EXTENTS)
        ):
            raise TransferFailed("a catalogue row contradicts itself")
        return cls(
            extent, extent_bytes, offset, size, payload_bytes, parent if has_parent else None
        )

    def parts(self, value_bytes: int) -> int:
        """How many values the extent has."""
        return max(1, -(-self.extent_bytes // value_bytes))


def row_of(field: bytes, row: bytes) -> tuple[ObjectKey, Place]:
    """An object and its place. Raises TransferFailed: not a row of this version."""
    key, place = key_of(field), Place.unpack(row)
    if place.size - place.payload_bytes != header_size(key.tenant):
        raise TransferFailed("a catalogue row's sizes are not those of a record")
    return key, place


@dataclass(frozen=True, slots=True)
class Doom:
    """Bytes that must go: a whole extent, or (``size`` > 0) one record within a live one."""

    extent: bytes
    extent_bytes: int
    offset: int = 0
    size: int = 0

    @property
    def field(self) -> bytes:
        """As it stands in the hash of the doomed; the scripts make the same."""
        whole = b"%s|%d" % (self.extent, self.extent_bytes)
        return whole + (b"|%d|%d" % (self.offset, self.size) if self.size else b"")

    @classmethod
    def parse(cls, field: bytes) -> Doom:
        """The inverse of ``field``. Raises ProtocolBroken."""
        extent, *numbers = field.split(b"|")
        if not extent.startswith(EXTENTS) or len(numbers) not in (1, 3):
            raise bad("bytes that must go", field)
        return cls(extent, *(as_number(number) for number in numbers))


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the log. ``pairs``: rows by field, or ``x`` + extent with its expiry."""

    id: EventId
    verb: bytes
    pairs: list[tuple[bytes, bytes]]


def event_id(text: object) -> EventId:
    """An entry's id as numbers, which order as the entries do. Raises ProtocolBroken."""
    ms, _, number = as_bytes(text).partition(b"-")
    return as_number(ms), as_number(number)


def id_or_none(text: object) -> EventId | None:
    """The id of the entry that a change made; None: nothing changed. Raises ProtocolBroken."""
    return event_id(text) if text != b"" else None


def events_of(entries: object) -> list[Event]:
    """Events of a stream's entries, in their order. Raises ProtocolBroken."""
    found = []
    for entry in as_list(entries):
        parts = as_list(entry)
        if len(parts) != 2:
            raise bad("an entry of the log", parts)
        pairs = as_pairs(parts[1])
        if not pairs or pairs[0][0] != b"verb":
            raise bad("an entry that begins with its verb", pairs[:1])
        for name, value in pairs[1:]:
            if name[:1] == b"x":
                as_number(value)
        found.append(Event(event_id(parts[0]), pairs[0][1], pairs[1:]))
    return found


def log_after(last: EventId, key: bytes) -> Callable[[Reply], list[Event]]:
    """Reads what XREAD answers to "of ``key``, beyond ``last``"."""

    def read(reply: Reply) -> list[Event]:
        if reply is None:
            return []
        streams = as_list(reply)
        named = as_list(streams[0]) if len(streams) == 1 else []
        if len(named) != 2 or named[0] != key:
            raise bad("one stream", streams)
        before, found = last, events_of(named[1])
        for event in found:
            if event.id <= before:
                raise bad("an entry beyond the last", event.id)
            before = event.id
        return found

    return read


@dataclass(frozen=True, slots=True)
class Published:
    """What PUBLISH answers.

    ``refused``: ``epoch``, ``parent`` (``missing`` is its field), or ``""``. ``rows``: of each
    draft, as it stands in the catalogue.
    """

    refused: str
    missing: bytes = b""
    event: EventId | None = None
    now_ms: int = 0
    rows: Sequence[bytes] = ()

    @classmethod
    def reader(cls, count: int, parents: Collection[bytes]) -> Callable[[Reply], Published]:
        """For ``count`` drafts that need ``parents``."""

        def read(reply: Reply) -> Published:
            verdict, *rest = as_list(reply) or [None]
            if verdict == b"epoch" and not rest:
                return cls("epoch")
            if verdict == b"parent" and len(rest) == 1 and as_bytes(rest[0]) in parents:
                return cls("parent", missing=as_bytes(rest[0]))
            if verdict != b"ok" or len(rest) != count + 2:
                raise bad("what publishing answers", verdict)
            event, now_ms = id_or_none(rest[0]), as_number(rest[1])
            return cls("", event=event, now_ms=now_ms, rows=[as_bytes(row) for row in rest[2:]])

        return read


def removed(count: int) -> Callable[[Reply], tuple[EventId | None, int, list[Doom]]]:
    """Reads what REMOVE answers for ``count`` rows: the event, how many went, the doomed."""

    def read(reply: Reply) -> tuple[EventId | None, int, list[Doom]]:
        parts = as_list(reply)
        gone = parts[1] if len(parts) >= 2 else None
        if not isinstance(gone, int) or not 0 <= gone <= count or len(parts) - 2 > gone:
            raise bad("what removing answers", parts[:2])
        return id_or_none(parts[0]), gone, [Doom.parse(as_bytes(each)) for each in parts[2:]]

    return read


def pinned(fields: Sequence[bytes]) -> Callable[[Reply], tuple[EventId | None, bytes]]:
    """Reads what PIN answers: the event, or the field that stands in the way."""

    def read(reply: Reply) -> tuple[EventId | None, bytes]:
        event, wrong = as_list(reply) if len(as_list(reply)) == 2 else (None, None)
        if (event == b"") != (wrong in fields) or (event != b"" and wrong != b""):
            raise bad("what pinning answers", reply)
        return id_or_none(event), as_bytes(wrong)

    return read


# KEYS: epoch cat live meta pins doomed log. All scripts take all, so that a cluster routes them.

# ARGV: epoch, events kept, ttl in ms, rows, then of each: field, row, field of the parent that it
# needs or '', extent. Rows that are there stay. Returns ok, event id or '', the server's ms, rows.
PUBLISH = """#!lua
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'epoch'} end
local count, ttl, fresh = tonumber(ARGV[4]), tonumber(ARGV[3]), {}
for i = 0, count - 1 do
  local field, parent = ARGV[5 + 4 * i], ARGV[7 + 4 * i]
  if parent ~= '' and not fresh[parent] and redis.call('HEXISTS', KEYS[2], parent) == 0
      and redis.call('HEXISTS', KEYS[2], field) == 0 then
    return {'parent', parent}
  end
  fresh[field] = true
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local expires = ttl > 0 and string.format('%.0f', now + ttl) or '0'
local event, reply, used = {'verb', 'put'}, {'ok', '', string.format('%.0f', now)}, {}
for i = 0, count - 1 do
  local field, row, extent = ARGV[5 + 4 * i], ARGV[6 + 4 * i], ARGV[8 + 4 * i]
  if redis.call('HSETNX', KEYS[2], field, row) == 1 then
    used[extent] = (used[extent] or 0) + 1
    event[#event + 1] = field
    event[#event + 1] = row
    reply[#reply + 1] = row
  else
    reply[#reply + 1] = redis.call('HGET', KEYS[2], field)
  end
end
for extent, rows in pairs(used) do
  redis.call('HINCRBY', KEYS[3], extent, rows)
  redis.call('HSET', KEYS[4], extent, expires)
  event[#event + 1] = 'x' .. extent
  event[#event + 1] = expires
end
if #event > 2 then
  reply[2] = redis.call('XADD', KEYS[7], 'MAXLEN', '~', ARGV[2], '*', unpack(event))
end
return reply
"""

# ARGV: events kept, rows, then of each: field, row, extent, '|bytes', '|offset|size' to erase or
# ''. Only rows that still say the same go. Returns event id or '', how many went, the doomed.
REMOVE = """#!lua flags=allow-oom
local event, doomed, gone = {'verb', 'del'}, {}, 0
for i = 0, tonumber(ARGV[2]) - 1 do
  local field, row, extent = ARGV[3 + 5 * i], ARGV[4 + 5 * i], ARGV[5 + 5 * i]
  if redis.call('HGET', KEYS[2], field) == row then
    redis.call('HDEL', KEYS[2], field)
    redis.call('HDEL', KEYS[5], field)
    gone = gone + 1
    event[#event + 1] = field
    event[#event + 1] = row
    local name = extent .. ARGV[6 + 5 * i]
    if redis.call('HINCRBY', KEYS[3], extent, -1) <= 0 then
      redis.call('HDEL', KEYS[3], extent)
      redis.call('HDEL', KEYS[4], extent)
      doomed[#doomed + 1] = name
    elseif ARGV[7 + 5 * i] ~= '' then
      doomed[#doomed + 1] = name .. ARGV[7 + 5 * i]
    end
  end
end
for _, name in ipairs(doomed) do redis.call('HSET', KEYS[6], name, '1') end
local id = ''
if gone > 0 then
  id = redis.call('XADD', KEYS[7], 'MAXLEN', '~', ARGV[1], '*', unpack(event))
end
return {id, gone, unpack(doomed)}
"""

# ARGV: events kept, ttl in ms (0: for good), extents. Returns event id or ''.
USE = """#!lua flags=allow-oom
local time, event, ttl = redis.call('TIME'), {'verb', 'use'}, tonumber(ARGV[2])
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local expires = ttl > 0 and string.format('%.0f', now + ttl) or '0'
for i = 3, #ARGV do
  if redis.call('HEXISTS', KEYS[3], ARGV[i]) == 1 then
    redis.call('HSET', KEYS[4], ARGV[i], expires)
    event[#event + 1] = 'x' .. ARGV[i]
    event[#event + 1] = expires
  end
end
if #event == 2 then return '' end
return redis.call('XADD', KEYS[7], 'MAXLEN', '~', ARGV[1], '*', unpack(event))
"""

# ARGV: events kept, 'pin' or 'unpin', fields: all or none. Returns event id, or '' and the field
# that stands in the way.
PIN = """#!lua flags=allow-oom
local event = {'verb', ARGV[2]}
for i = 3, #ARGV do
  local where = ARGV[2] == 'pin' and KEYS[2] or KEYS[5]
  if redis.call('HEXISTS', where, ARGV[i]) == 0 then return {'', ARGV[i]} end
  event[#event + 1] = ARGV[i]
  event[#event + 1] = '1'
end
for i = 3, #ARGV do
  if ARGV[2] == 'pin' then redis.call('HSET', KEYS[5], ARGV[i], '1')
  else redis.call('HDEL', KEYS[5], ARGV[i]) end
end
return {redis.call('XADD', KEYS[7], 'MAXLEN', '~', ARGV[1], '*', unpack(event)), ''}
"""

# An identity without objects goes, unless it has some by now. Returns 1, or 0.
FORGET = """#!lua flags=allow-oom
if redis.call('HLEN', KEYS[2]) > 0 then return 0 end
redis.call('UNLINK', unpack(KEYS))
return 1
"""

# KEYS: a value. ARGV: offset, size. Zeroes where there is something to zero.
ERASE = """#!lua flags=allow-oom
if redis.call('STRLEN', KEYS[1]) >= ARGV[1] + ARGV[2] then
  redis.call('SETRANGE', KEYS[1], ARGV[1], string.rep('\\0', tonumber(ARGV[2])))
end
return 1
"""
