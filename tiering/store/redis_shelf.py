"""One identity's objects on the servers, and their mirror: every change, made and followed."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from dsv4_tierd.tiering.errors import PreconditionFailed, StoreUnavailable
from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, StoredObject
from dsv4_tierd.tiering.store.redis_link import Link, OutOfMemory
from dsv4_tierd.tiering.store.redis_mirror import Held, Mirror, Row
from dsv4_tierd.tiering.store.redis_replies import (
    as_bytes,
    as_count,
    as_flag,
    as_number,
    as_ok,
    as_page,
    as_pairs,
    as_strings,
    as_time_ms,
    as_value,
)
from dsv4_tierd.tiering.store.redis_rows import (
    BEGINNING,
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
    EventId,
    Names,
    Place,
    Published,
    events_of,
    field_of,
    id_or_none,
    log_after,
    part_name,
    pinned,
    removed,
)
from dsv4_tierd.tiering.store.resp import Argument, Reply

PROVISIONAL_S = 300  # bytes that are never published go by themselves after so long
_SCAN_COUNT = 1000
_READ_COUNT = 256  # entries of the log at once; far fewer than are kept
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
        self._garbled = 0  # of the link's wrong replies, those before the mirror was read
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
        last, garbled = self.mirror.last_id, self.link.garbled
        same = epoch == self._epoch and last != BEGINNING and garbled == self._garbled
        if same and self._in_log(last) and self._complete():
            return False
        newest = self._newest()
        rows = dict(self._scan(names.cat, as_bytes))
        expiries = dict(self._scan(names.meta, as_number))
        pins = [name for name, _ in self._scan(names.pins, as_bytes)]
        self.mirror.reset(rows, expiries, pins, newest)
        self._epoch, self._garbled = epoch, garbled
        return True

    def _begin(self, identity: StoreIdentity | None) -> bytes:
        """The catalogue's epoch, drawn where there is none. Writes nothing that is there."""
        names = self.names
        if identity is not None and not self._probe(
            IDENTITIES, "HEXISTS", IDENTITIES, names.identity, read=as_flag
        ):
            fields = json.dumps(identity.as_dict(), sort_keys=True)
            self._probe(IDENTITIES, "HSETNX", IDENTITIES, names.identity, fields, read=as_flag)
        epoch = self._there()
        if epoch is None and identity is not None:
            drawn = os.urandom(16).hex()
            self._probe(names.epoch, "SET", names.epoch, drawn, "NX", read=as_value)
            epoch = self._there()
        return b"none" if epoch is None else epoch

    def _there(self) -> bytes | None:
        return self._probe(self.names.epoch, "GET", self.names.epoch, read=as_value)

    def count(self, *, probe: bool = False) -> int:
        """Rows of the server's catalogue. Raises StoreUnavailable."""
        return self.link.call(self.names.cat, "HLEN", self.names.cat, read=as_count, probe=probe)

    def forget(self) -> None:
        """The next ``load`` reads everything anew."""
        self._epoch = b""

    def _complete(self) -> bool:
        """Read the log to its end; whether the mirror is then as large as the catalogue."""
        self.catch_up(probe=True)
        return self.count(probe=True) == self.mirror.seen

    def in_step(self) -> bool:
        """Whether the mirror and the server agree, as far as counting and the epoch tell."""
        if (self._there() or b"none") != self._epoch:
            return False
        self._set_clock()
        before = self.mirror.last_id
        for pause_s in (0.0, 0.05, 0.1):  # a call may be between its two halves
            time.sleep(pause_s)
            there, newest = self.count(probe=True), self._newest()
            if newest < before:  # we believe an entry that is not there: we would wait for ever
                return False
            # A change meanwhile proves nothing: the next look will tell.
            if there == self.mirror.seen or newest != before:
                return True
        return False

    def catch_up(self, wait_s: float = 0.0, *, probe: bool = False) -> None:
        """Apply what the log holds beyond the mirror.

        ``wait_s``: wait so long for something to come, and then read no further than that.
        Raises StoreUnavailable: also where so much came that the log does not reach back.
        """
        log = self.names.log
        while True:
            last = self.mirror.last_id
            args: list[Argument] = ["XREAD", "COUNT", _READ_COUNT]
            if wait_s:
                args += ["BLOCK", int(wait_s * 1000)]
            args += ["STREAMS", log, b"%d-%d" % last]
            events = self.link.call(
                log, *args, read=log_after(last, log), wait_s=wait_s, probe=probe
            )
            if len(events) == _READ_COUNT and last != BEGINNING and not self._in_log(last):
                self.forget()
                self.link.trip("the log was cut meanwhile, the catalogue is read anew")
                raise StoreUnavailable("the catalogue is read anew")
            with self._following:
                for event in events:
                    self.mirror.follow(event)
            if wait_s or not events:
                return

    def _in_log(self, entry: EventId) -> bool:
        text = b"%d-%d" % entry
        log = self.names.log
        return bool(self._probe(log, "XRANGE", log, text, text, read=events_of))

    def _newest(self) -> EventId:
        log = self.names.log
        found = self._probe(log, "XREVRANGE", log, "+", "-", "COUNT", 1, read=events_of)
        return found[0].id if found else BEGINNING

    def _set_clock(self) -> None:
        self.mirror.set_clock(self._probe(self.names.epoch, "TIME", read=as_time_ms))

    def _scan(self, key: bytes, value: Callable[[bytes], _T]) -> Iterator[tuple[bytes, _T]]:
        return scan_hash(self.link, key, value, probe=True)

    def _probe(self, key: bytes, *args: Argument, read: Callable[[Reply], _T]) -> _T:
        return self.link.call(key, *args, read=read, probe=True)

    # ------------------------------------------------------------ bytes
    def write(self, extent: bytes, pieces: Sequence[memoryview | bytes]) -> None:
        """The extent's values, for some minutes. Raises StoreUnavailable."""
        config = self.link.config
        for part, span in enumerate(_cut(pieces, config.value_bytes)):
            name = part_name(extent, part)
            carried = sum(len(piece) for piece in span)
            self.link.call(name, "SET", name, span, "EX", PROVISIONAL_S, read=as_ok, size=carried)

    def keep(self, written: Iterable[Doom], begun: float) -> None:
        """Extents are about to be published: they last. Raises OutOfMemory: they are gone.

        ``begun``: when writing them began (time.monotonic); Raises StoreUnavailable where that is
        so long ago that ``gc`` might take them for forgotten.
        """
        if time.monotonic() - begun > PROVISIONAL_S / 2:
            raise StoreUnavailable("writing took too long")
        names = [n for each in written for n in self._values(each.extent, each.extent_bytes)]
        self._lasting(names)
        if not all(self.link.many([("EXISTS", name) for name in names], as_flag)):
            raise OutOfMemory("the server evicts what was just written")

    def _lasting(self, names: Sequence[bytes], *, for_good: bool = False) -> None:
        """Values last as long as the configuration says, from now on."""
        ttl_ms = int(self.link.config.ttl_s * 1000)
        if ttl_ms and not for_good:
            self.link.many([("PEXPIRE", name, ttl_ms) for name in names], as_flag)
        else:
            self.link.many([("PERSIST", name) for name in names], as_flag)

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
            self.link.many([("UNLINK", name) for name in names], as_flag)
            for doom in group:
                if doom.size:
                    self._erase(doom, value_bytes)
            doomed = self.names.doomed
            self.link.call(doomed, "HDEL", doomed, *(doom.field for doom in group), read=as_count)

    def discard_unused(self, dooms: Iterable[Doom]) -> None:
        """Remove extents that no row seems to point to.

        The server is asked again: what it said has no checksum, and may have come wrong.
        """
        self.discard(doom for doom in dooms if not self._live(doom.extent))

    def _live(self, extent: bytes) -> bool:
        live = self.names.live
        return self.link.call(live, "HEXISTS", live, extent, read=as_flag)

    def _erase(self, doom: Doom, value_bytes: int) -> None:
        at, end = doom.offset, doom.offset + doom.size
        while at < end:
            part, start = divmod(at, value_bytes)
            count = min(value_bytes - start, end - at)
            name = part_name(doom.extent, part)
            self.link.call(name, "EVAL", ERASE, 1, name, start, count, read=as_flag)
            at += count

    def sweep(self) -> int:
        """Remove what an earlier call was kept from removing; how many extents or records."""
        while self._unsure:
            oldest = self._unsure[0]
            self.discard_unused([oldest])
            with contextlib.suppress(ValueError):  # another thread did it too
                self._unsure.remove(oldest)
        doomed = self.names.doomed
        dooms = self.link.call(doomed, "HKEYS", doomed, read=_dooms)
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
        parents = {needed_parent(draft.item) for draft in drafts} - {b""}
        done = self._script(PUBLISH, args, Published.reader(len(drafts), parents))
        if done.refused == "epoch":
            self.link.trip("it was emptied")
            raise StoreUnavailable("the server was emptied meanwhile")
        if done.refused == "parent":
            self.catch_up()
            self.mirror.forget(done.missing)
            raise PreconditionFailed(f"the page before is not stored: {done.missing[1:9].hex()}…")
        self.mirror.set_clock(done.now_ms)
        self._led(done, fields, drafts, done.now_ms + ttl_ms if ttl_ms else 0)
        mine = {draft.place.pack(): draft.place.extent for draft in drafts}
        return {mine[row] for row in done.rows if row in mine}

    def _led(
        self, done: Published, fields: Sequence[bytes], drafts: Sequence[Draft], expires_ms: int
    ) -> None:
        """Own rows into the mirror now; others' that were there before, too."""
        own: list[tuple[bytes, bytes]] = []
        for name, draft, row in zip(fields, drafts, done.rows, strict=True):
            if row == draft.place.pack() and done.event is not None:
                own += [(name, row), (b"x" + draft.place.extent, b"%d" % expires_ms)]
            else:
                self.mirror.adopt(name, row)
        if own and done.event is not None:
            self.mirror.lead(Event(done.event, b"put", own))

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
        event, gone, doomed = self._script(REMOVE, args, removed(len(changes)))
        if event is not None:
            pairs = [(name, packed) for name, packed, _ in changes]
            self.mirror.lead(Event(event, b"del", pairs))
        self.discard(doomed)
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
                self._script(USE, [*args, *(each.name for each in group)], id_or_none)

    def pin(self, fields: Sequence[bytes], *, on: bool) -> bytes:
        """Set or take pins, all or none; the field that stands in the way, or nothing."""
        verb = "pin" if on else "unpin"
        event, wrong = self._script(PIN, [LOG_EVENTS_MAX, verb, *fields], pinned(fields))
        if event is not None:
            self.mirror.lead(Event(event, verb.encode(), [(f, b"1") for f in fields]))
        return wrong

    def forget_identity(self) -> bool:
        """Remove a catalogue that holds nothing; False: it holds something."""
        return self._script(FORGET, [], as_flag)

    def _script(self, script: str, args: Sequence[Argument], read: Callable[[Reply], _T]) -> _T:
        keys = self.names.all()
        return self.link.call(self.names.cat, "EVAL", script, len(keys), *keys, *args, read=read)


def scan_hash(
    link: Link, key: bytes, value: Callable[[bytes], _T], *, probe: bool = False
) -> Iterator[tuple[bytes, _T]]:
    """A hash's fields, and what ``value`` reads of theirs, without blocking the server for long."""

    def read(reply: Reply) -> tuple[bytes, list[tuple[bytes, _T]]]:
        after, flat = as_page(reply)
        return after, [(name, value(each)) for name, each in as_pairs(flat)]

    cursor = b"0"
    while True:
        args: list[Argument] = ["HSCAN", key, cursor, "COUNT", _SCAN_COUNT]
        cursor, pairs = link.call(key, *args, read=read, probe=probe)
        yield from pairs
        if cursor == b"0":
            return


def _dooms(reply: Reply) -> list[Doom]:
    return [Doom.parse(name) for name in as_strings(reply)]


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
