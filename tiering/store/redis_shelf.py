"""One identity's objects on the servers, and their mirror: every change, made and followed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from dsv4_tierd.tiering.errors import PreconditionFailed, StoreUnavailable
from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, StoredObject
from dsv4_tierd.tiering.store.redis_link import Link, OutOfMemory
from dsv4_tierd.tiering.store.redis_mirror import BEGINNING, EventId, Held, Mirror, Row
from dsv4_tierd.tiering.store.redis_rows import (
    ERASE,
    FORGET,
    IDENTITIES,
    LOG_EVENTS_MAX,
    PIN,
    PUBLISH,
    REMOVE,
    ROWS_PER_CALL,
    USE,
    Doom,
    Event,
    Names,
    Place,
    event_id,
    events_of,
    field_of,
    part_name,
)
from dsv4_tierd.tiering.store.resp import Argument, Reply

PROVISIONAL_S = 300  # bytes that are never published go by themselves after so long
_SCAN_COUNT = 1000
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Draft:
    """A row to publish: the object, its record's place."""

    item: StoredObject
    place: Place


class Shelf:
    """Bytes and rows of one identity. Thread-safe; every call is bounded by the link."""

    def __init__(self, link: Link, identity: bytes) -> None:
        self.link = link
        self.names = Names(identity.hex())
        self.mirror = Mirror(identity)
        self._epoch = b""
        self._following = threading.Lock()
        self._unsure: list[Doom] = []

    # ------------------------------------------------------------ the mirror
    def load(self, identity: StoreIdentity | None) -> bool:
        """Begin, or go on where the log was left; whether everything was read anew.

        Works while the breaker is open. Raises StoreUnavailable.
        """
        names = self.names
        epoch = self._begin(identity)
        self._set_clock()
        last = self.mirror.last_id
        if epoch == self._epoch and last != BEGINNING:
            text = b"%d-%d" % last
            if self._probe(names.log, "XRANGE", names.log, text, text) and self._complete():
                return False
        newest = self._newest()
        rows = dict(self._scan(names.cat))
        self.mirror.reset(
            rows, dict(self._scan(names.meta)), (name for name, _ in self._scan(names.pins)), newest
        )
        self._epoch = epoch
        return True

    def _begin(self, identity: StoreIdentity | None) -> bytes:
        """The catalogue's epoch, drawn where there is none. Writes nothing that is there."""
        names = self.names
        if identity is not None and not self._probe(
            IDENTITIES, "HEXISTS", IDENTITIES, names.identity
        ):
            fields = json.dumps(identity.as_dict(), sort_keys=True)
            self._probe(IDENTITIES, "HSETNX", IDENTITIES, names.identity, fields)
        epoch = self._probe(names.epoch, "GET", names.epoch)
        if epoch is None and identity is not None:
            self._probe(names.epoch, "SET", names.epoch, os.urandom(16).hex(), "NX")
            epoch = self._probe(names.epoch, "GET", names.epoch)
        return epoch if isinstance(epoch, bytes) else b"none"

    def forget(self) -> None:
        """The next ``load`` reads everything anew."""
        self._epoch = b""

    def _complete(self) -> bool:
        """Read the log to its end; whether the mirror is then as large as the catalogue."""
        self.catch_up(probe=True)
        return self._probe(self.names.cat, "HLEN", self.names.cat) == self.mirror.seen

    def in_step(self) -> bool:
        """Whether the mirror and the server agree, as far as counting and the epoch tell."""
        epoch = self._probe(self.names.epoch, "GET", self.names.epoch)
        if (epoch or b"none") != self._epoch:
            return False
        self._set_clock()
        before = self.mirror.last_id
        for pause_s in (0.0, 0.05, 0.1):  # a call may be between its two halves
            time.sleep(pause_s)
            there = self._probe(self.names.cat, "HLEN", self.names.cat)
            # A change meanwhile proves nothing: the next look will tell.
            if there == self.mirror.seen or self._newest() != before:
                return True
        return False

    def catch_up(self, wait_s: float = 0.0, *, probe: bool = False) -> None:
        """Apply what the log holds beyond the mirror.

        ``wait_s``: wait so long for something to come, and then read no further than that.
        """
        log = self.names.log
        while True:
            args: list[Argument] = ["XREAD", "COUNT", 256]
            if wait_s:
                args += ["BLOCK", int(wait_s * 1000)]
            args += ["STREAMS", log, b"%d-%d" % self.mirror.last_id]
            reply = self.link.call(log, *args, wait_s=wait_s, probe=probe)
            if not reply:
                return
            assert isinstance(reply, list) and isinstance(reply[0], list)
            entries = reply[0][1]
            assert isinstance(entries, list)
            with self._following:
                for event in events_of(list(entries)):
                    self.mirror.follow(event)
            if wait_s:
                return

    def _newest(self) -> EventId:
        reply = self._probe(self.names.log, "XREVRANGE", self.names.log, "+", "-", "COUNT", 1)
        assert isinstance(reply, list)
        return next((event.id for event in events_of(list(reply))), BEGINNING)

    def _set_clock(self) -> None:
        reply = self._probe(self.names.epoch, "TIME")
        assert isinstance(reply, list)
        seconds, micros = (int(part) for part in reply if isinstance(part, bytes))
        self.mirror.set_clock(seconds * 1000 + micros // 1000)

    def _scan(self, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        return scan_hash(self.link, key, probe=True)

    def _probe(self, key: bytes, *args: Argument) -> Reply:
        return self.link.call(key, *args, probe=True)

    # ------------------------------------------------------------ bytes
    def write(self, extent: bytes, pieces: Sequence[memoryview | bytes]) -> None:
        """The extent's values, for some minutes. Raises StoreUnavailable."""
        config = self.link.config
        for part, span in enumerate(_cut(pieces, config.value_bytes)):
            name = part_name(extent, part)
            carried = sum(len(piece) for piece in span)
            self.link.call(name, "SET", name, span, "EX", PROVISIONAL_S, size=carried)

    def keep(self, written: Iterable[Doom], begun: float) -> None:
        """Extents are about to be published: they last. Raises OutOfMemory: they are gone.

        ``begun``: when writing them began (time.monotonic); Raises StoreUnavailable where that is
        so long ago that ``gc`` might take them for forgotten.
        """
        if time.monotonic() - begun > PROVISIONAL_S / 2:
            raise StoreUnavailable("writing took too long")
        names = [n for each in written for n in self._values(each.extent, each.extent_bytes)]
        self._lasting(names)
        if not all(self.link.many([("EXISTS", name) for name in names])):
            raise OutOfMemory("the server evicts what was just written")

    def _lasting(self, names: Sequence[bytes], *, for_good: bool = False) -> None:
        """Values last as long as the configuration says, from now on."""
        ttl_ms = int(self.link.config.ttl_s * 1000)
        if ttl_ms and not for_good:
            self.link.many([("PEXPIRE", name, ttl_ms) for name in names])
        else:
            self.link.many([("PERSIST", name) for name in names])

    def _values(self, extent: bytes, size: int) -> list[bytes]:
        count = max(1, -(-size // self.link.config.value_bytes))
        return [part_name(extent, part) for part in range(count)]

    def read(self, place: Place, targets: Sequence[memoryview]) -> int:
        """Fill ``targets`` with the record's bytes; returns how many there were.

        0: a value is not there. Fewer than the record's size: one was cut short.
        """
        value_bytes = self.link.config.value_bytes
        found, at, end = 0, place.offset, place.offset + place.size
        left = list(targets)
        while at < end:
            part, start = divmod(at, value_bytes)
            count = min(value_bytes - start, end - at)
            span, left = _take(left, count)
            got = self.link.read(part_name(place.extent, part), start, span)
            if got == 0:
                return 0
            found += got
            if got < count:
                break
            at += count
        return found

    def discard(self, dooms: Iterable[Doom]) -> None:
        """Remove bytes that nothing points to, and the notes that they must go."""
        value_bytes = self.link.config.value_bytes
        for group in batched(list(dooms), ROWS_PER_CALL):
            whole = [doom for doom in group if not doom.size]
            names = [n for doom in whole for n in self._values(doom.extent, doom.extent_bytes)]
            self.link.many([("UNLINK", name) for name in names])
            for doom in group:
                if doom.size:
                    self._erase(doom, value_bytes)
            doomed = self.names.doomed
            self.link.call(doomed, "HDEL", doomed, *(doom.field for doom in group))

    def discard_unused(self, dooms: Iterable[Doom]) -> None:
        """Remove extents that no row seems to point to.

        The server is asked again: what it said has no checksum, and may have come wrong.
        """
        live = self.names.live
        self.discard(d for d in dooms if not self.link.call(live, "HEXISTS", live, d.extent))

    def _erase(self, doom: Doom, value_bytes: int) -> None:
        at, end = doom.offset, doom.offset + doom.size
        while at < end:
            part, start = divmod(at, value_bytes)
            count = min(value_bytes - start, end - at)
            name = part_name(doom.extent, part)
            self.link.call(name, "EVAL", ERASE, 1, name, start, count)
            at += count

    def sweep(self) -> int:
        """Remove what an earlier call was kept from removing; how many extents or records."""
        while self._unsure:
            self.discard_unused(self._unsure[-1:])
            self._unsure.pop()
        reply = self.link.call(self.names.doomed, "HKEYS", self.names.doomed)
        assert isinstance(reply, list)
        dooms = [Doom.parse(name) for name in reply if isinstance(name, bytes)]
        self.discard(dooms)
        return len(dooms)

    def unsure(self, written: Iterable[Doom]) -> None:
        """Extents whose publication was not answered: ``sweep`` finds out."""
        self._unsure += written

    # ------------------------------------------------------------ rows
    def publish(self, drafts: Sequence[Draft]) -> set[bytes]:
        """Make rows visible; which of their extents are in use.

        Raises PreconditionFailed (a page's parent is gone), StoreUnavailable.
        """
        ttl_ms = int(self.link.config.ttl_s * 1000)
        args: list[Argument] = [self._epoch, LOG_EVENTS_MAX, ttl_ms, len(drafts)]
        fields = []
        for draft in drafts:
            name = field_of(draft.item.key)
            fields.append(name)
            args += [name, draft.place.pack(), needed_parent(draft.item), draft.place.extent]
        reply = self._script(PUBLISH, args)
        if reply[0] == b"epoch":
            self.link.trip("it was emptied")
            raise StoreUnavailable("the server was emptied meanwhile")
        if reply[0] == b"parent":
            missing = reply[1]
            assert isinstance(missing, bytes)
            self.catch_up()
            self.mirror.forget(missing)
            raise PreconditionFailed(f"the page before is not stored: {missing[1:9].hex()}…")
        _, event, now, *rows = reply
        assert isinstance(event, bytes) and isinstance(now, bytes)
        self.mirror.set_clock(int(now))
        self._led(event, b"put", fields, drafts, rows, int(now) + ttl_ms if ttl_ms else 0)
        mine = {draft.place.pack(): draft.place.extent for draft in drafts}
        return {mine[row] for row in rows if isinstance(row, bytes) and row in mine}

    def _led(
        self,
        event: bytes,
        verb: bytes,
        fields: Sequence[bytes],
        drafts: Sequence[Draft],
        rows: Sequence[Reply],
        expires_ms: int,
    ) -> None:
        """Own rows into the mirror now; others' that were there before, too."""
        own: list[tuple[bytes, bytes]] = []
        for name, draft, row in zip(fields, drafts, rows, strict=True):
            assert isinstance(row, bytes)
            if row == draft.place.pack() and event:
                own += [(name, row), (b"x" + draft.place.extent, b"%d" % expires_ms)]
            else:
                self.mirror.adopt(name, row)
        if own:
            self.mirror.lead(Event(event_id(event), verb, own))

    def remove(self, rows: Sequence[Row], *, erase: bool) -> int:
        """Rows out of the catalogue and their bytes off the servers; how many rows went.

        ``erase``: also the bytes of records whose extents live on. Raises StoreUnavailable.
        """
        gone = 0
        for group in batched(rows, ROWS_PER_CALL):
            changes = [(field_of(row.key), row.packed, row.place) for row in group]
            gone += self.remove_places(changes, erase=erase)
        return gone

    def remove_places(self, changes: Sequence[tuple[bytes, bytes, Place]], *, erase: bool) -> int:
        """Like ``remove``, by field, row and place; at most ``ROWS_PER_CALL``."""
        args: list[Argument] = [LOG_EVENTS_MAX, len(changes)]
        for name, packed, place in changes:
            span = b"|%d|%d" % (place.offset, place.size) if erase else b""
            args += [name, packed, place.extent, b"|%d" % place.extent_bytes, span]
        event, gone, *doomed = self._script(REMOVE, args)
        assert isinstance(event, bytes) and isinstance(gone, int)
        if event:
            pairs = [(name, packed) for name, packed, _ in changes]
            self.mirror.lead(Event(event_id(event), b"del", pairs))
        self.discard(Doom.parse(name) for name in doomed if isinstance(name, bytes))
        return gone

    def use(self, held: Iterable[Held]) -> None:
        """Tell everyone that extents were read, and let them last. Raises StoreUnavailable."""
        ttl_ms = int(self.link.config.ttl_s * 1000)
        pinned = self.mirror.pinned_extents()
        for last, some in ((False, set(held) - pinned), (True, set(held) & pinned)):
            for group in batched(list(some), ROWS_PER_CALL):
                if ttl_ms:
                    names = [n for each in group for n in self._values(each.name, each.byte_count)]
                    self._lasting(names, for_good=last)
                args: list[Argument] = [LOG_EVENTS_MAX, 0 if last else ttl_ms]
                self._script_one(USE, [*args, *(each.name for each in group)])

    def pin(self, fields: Sequence[bytes], *, on: bool) -> bytes:
        """Set or take pins, all or none; the field that stands in the way, or nothing."""
        verb = "pin" if on else "unpin"
        event, wrong = self._script(PIN, [LOG_EVENTS_MAX, verb, *fields])
        assert isinstance(event, bytes) and isinstance(wrong, bytes)
        if event:
            self.mirror.lead(Event(event_id(event), verb.encode(), [(f, b"1") for f in fields]))
        return wrong

    def forget_identity(self) -> bool:
        """Remove a catalogue that holds nothing; False: it holds something."""
        return self._script_one(FORGET, []) == 1

    def _script(self, script: str, args: Sequence[Argument]) -> list[Reply]:
        reply = self._script_one(script, args)
        assert isinstance(reply, list)
        return reply

    def _script_one(self, script: str, args: Sequence[Argument]) -> Reply:
        keys = self.names.all()
        return self.link.call(self.names.cat, "EVAL", script, len(keys), *keys, *args)


def scan_hash(link: Link, key: bytes, *, probe: bool = False) -> Iterator[tuple[bytes, bytes]]:
    """A hash's fields and values, without blocking the server for long."""
    cursor = b"0"
    while True:
        reply = link.call(key, "HSCAN", key, cursor, "COUNT", _SCAN_COUNT, probe=probe)
        assert isinstance(reply, list)
        after, flat = reply
        assert isinstance(after, bytes) and isinstance(flat, list)
        names, values = flat[::2], flat[1::2]
        for name, value in zip(names, values, strict=True):
            assert isinstance(name, bytes) and isinstance(value, bytes)
            yield name, value
        if after == b"0":
            return
        cursor = after


def needed_parent(item: StoredObject) -> bytes:
    """The field of the page that must be stored before this one; empty for none."""
    if item.key.kind is not ObjectKind.PAGE or item.parent is None:
        return b""
    return field_of(ObjectKey(ObjectKind.PAGE, item.key.tenant, item.parent))


def batched(items: Sequence[_T], size: int) -> Iterator[list[_T]]:
    """``items`` in lists of at most ``size``."""
    rest = iter(items)
    while group := list(islice(rest, size)):
        yield group


def _cut(pieces: Sequence[memoryview | bytes], size: int) -> Iterator[list[memoryview]]:
    """The pieces' bytes in spans of ``size`` bytes; the last has what is left."""
    left = [memoryview(piece).cast("B") for piece in pieces]
    while True:
        span, left = _take(left, size)
        yield span
        if not left:
            return


def _take(views: Sequence[memoryview], count: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first ``count`` bytes of the views, and the rest."""
    span: list[memoryview] = []
    for i, view in enumerate(views):
        if len(view) > count:
            return [*span, view[:count]], [view[count:], *views[i + 1 :]]
        span.append(view)
        count -= len(view)
    return span, []
