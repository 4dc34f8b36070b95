"""Looking after what a Redis holds, under every identity: list, verify, tidy, delete."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from dsv4_tierd.tiering.errors import StoreUnavailable, TransferFailed
from dsv4_tierd.tiering.store.codec import (
    HEADER_BYTES_MAX,
    check_name,
    check_parent,
    check_payload,
    decode_header,
)
from dsv4_tierd.tiering.store.disk import GcReport, ObjectInfo, VerifyReport
from dsv4_tierd.tiering.store.protocol import ObjectKey
from dsv4_tierd.tiering.store.redis_link import Link
from dsv4_tierd.tiering.store.redis_replies import as_bytes, as_count, as_flag, as_page, as_value
from dsv4_tierd.tiering.store.redis_rows import (
    EXTENTS,
    IDENTITIES,
    ROWS_PER_CALL,
    Place,
    extent_of,
    part_name,
    row_of,
)
from dsv4_tierd.tiering.store.redis_shelf import Shelf, batched, scan_hash
from dsv4_tierd.tiering.store.resp import Argument

GRACE_S = 900.0
_Found = tuple[bytes, bytes, ObjectKey, Place]  # field, row as it stands, and both read


def shelves(own: Shelf) -> Iterator[Shelf]:
    """One shelf for each identity that has written; ``own`` for its own."""
    for identity in _identities(own.link):
        yield own if identity.hex() == own.names.identity else Shelf(own.link, identity)


def _identities(link: Link) -> list[bytes]:
    """Who has written. Raises StoreUnavailable, rather than leave one out: what it has would go."""
    found = []
    for name, _ in scan_hash(link, IDENTITIES, as_bytes):
        if not re.fullmatch(rb"[0-9a-f]{64}", name):
            raise StoreUnavailable(f"{IDENTITIES.decode()} holds {name!r:.80}, which is none")
        found.append(bytes.fromhex(name.decode()))
    return found


def _rows(shelf: Shelf, strange: set[bytes] | None = None) -> Iterator[_Found]:
    """Rows that this version can read, the others into ``strange``; HSCAN may show one twice."""
    seen: set[bytes] = set()
    for name, row in scan_hash(shelf.link, shelf.names.cat, as_bytes):
        if name not in seen:
            seen.add(name)
            try:
                found = (name, row, *row_of(name, row))
            except TransferFailed:
                if strange is not None:
                    strange.add(name)
            else:
                yield found


def list_objects(own: Shelf) -> Iterator[ObjectInfo]:
    """Every object of every identity, in no order."""
    for shelf in shelves(own):
        for _, _, key, place in _rows(shelf):
            yield ObjectInfo(
                identity=shelf.names.identity,
                kind=key.kind,
                tenant=key.tenant,
                digest=key.digest.hex(),
                parent=None if place.parent is None else place.parent.hex(),
                payload_bytes=place.payload_bytes,
                record_bytes=place.size,
            )


def verify(own: Shelf, advance: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Read and check everything; what is bad or gone is forgotten. Raises StoreUnavailable."""
    objects = bytes_read = done = 0
    bad: list[str] = []
    looked_at = list(shelves(own))
    total = sum(shelf.count() for shelf in looked_at)
    for shelf in looked_at:
        for name, row, key, place in _rows(shelf):
            if advance is not None:
                advance(done, total)
            done += 1
            if _expired(shelf, place):
                continue
            wrong = _wrong(shelf, key, place)
            if wrong and not _still(shelf, name, row):
                continue  # removed by somebody while it was read
            objects += 1
            bytes_read += place.payload_bytes
            if wrong:
                bad.append(f"{key.kind.name} {key.digest.hex()[:16]}: {wrong}")
                shelf.remove_places([(name, row, place)], erase=False)
    return VerifyReport(objects, bytes_read, tuple(bad))


def _expired(shelf: Shelf, place: Place) -> bool:
    held = shelf.mirror.held.get(place.extent)
    return held is not None and 0 < held.expires_ms <= shelf.mirror.now_ms()


def _still(shelf: Shelf, name: bytes, row: bytes) -> bool:
    cat = shelf.names.cat
    return shelf.link.call(cat, "HGET", cat, name, read=as_value) == row


def _wrong(shelf: Shelf, key: ObjectKey, place: Place) -> str:
    """What is wrong with a record; empty: nothing."""
    whole = memoryview(bytearray(place.size))
    found = shelf.read(place, [whole])
    if found == 0:
        return "its bytes are gone"
    if found < place.size:
        return f"short read: {found} of {place.size} bytes"
    try:
        header = decode_header(whole[:HEADER_BYTES_MAX])
        check_name(header, bytes.fromhex(shelf.names.identity), key)
        check_payload(header, whole[header.header_bytes :])
        check_parent(header, place.parent)
    except TransferFailed as error:
        return str(error)
    return ""


def tidy(own: Shelf, grace_s: float) -> GcReport:
    """Bytes without rows go, rows without bytes go, identities without objects go.

    Where another release has rows that this one cannot read, bytes stay: they may be theirs.
    ``segments_compacted`` counts the extents that went. Raises StoreUnavailable.
    """
    used = removed = count = 0
    known: set[bytes] = set()
    untouchable: list[bytes] = []
    for shelf in list(shelves(own)):
        strange: set[bytes] = set()
        count += shelf.sweep()
        live = scan_hash(shelf.link, shelf.names.live, as_bytes)
        listed = dict(live)  # before the rows: see below
        by_extent: dict[bytes, list[_Found]] = {}
        for found in _rows(shelf, strange):
            by_extent.setdefault(found[3].extent, []).append(found)
        known |= by_extent.keys()
        if strange:
            untouchable.append(shelf.names.extents)
        # A row published after `live` was read is not in it, so what is in it alone is dead.
        dead = [extent for extent in listed if extent not in by_extent and not strange]
        for group in batched(dead, ROWS_PER_CALL):
            for where in (shelf.names.live, shelf.names.meta):
                shelf.link.call(where, "HDEL", where, *group, read=as_count)
        used += sum(rows[0][3].extent_bytes for rows in by_extent.values())
        removed += _forget_lost(shelf, by_extent)
        forgettable = not by_extent and not strange and shelf is not own
        if forgettable and shelf.forget_identity():
            own.link.call(IDENTITIES, "HDEL", IDENTITIES, shelf.names.identity, read=as_count)
    before_ms = own.mirror.now_ms() - int(grace_s * 1000)
    orphans, orphan_bytes = _remove_orphans(own.link, known, tuple(untouchable), before_ms)
    return GcReport(used + orphan_bytes, used - removed, count + orphans)


def shrink(own: Shelf, bytes_max: int) -> int:
    """Give up the coldest objects of each identity that has more; how many bytes that freed."""
    freed = 0
    for shelf in list(shelves(own)):
        if shelf is not own:
            shelf.load(None)
        before = shelf.mirror.bytes_used
        if before > bytes_max:
            victims = shelf.mirror.give_up(before - bytes_max, frozenset(), None)
            shelf.remove(victims, erase=False)
            freed += before - shelf.mirror.bytes_used
    return freed


def _forget_lost(shelf: Shelf, by_extent: dict[bytes, list[_Found]]) -> int:
    """Rows into extents of which a value is gone; returns those extents' bytes."""
    lost = 0
    for extent, rows in by_extent.items():
        parts = rows[0][3].parts(shelf.link.config.value_bytes)
        names = [part_name(extent, part) for part in range(parts)]
        if all(shelf.link.many([("EXISTS", name) for name in names], as_flag)):
            continue
        lost += rows[0][3].extent_bytes
        for group in batched(rows, ROWS_PER_CALL):
            shelf.remove_places([(name, row, place) for name, row, _, place in group], erase=False)
    return lost


def _remove_orphans(
    link: Link, known: set[bytes], untouchable: tuple[bytes, ...], before_ms: int
) -> tuple[int, int]:
    """Values of extents that no catalogue knows and that are too old to be on their way.

    Returns how many values went, and their bytes.
    """
    count = size = 0
    for name in _extent_values(link):
        try:
            extent, born_ms = extent_of(name)
        except TransferFailed:
            continue  # nothing of ours
        if extent in known or born_ms > before_ms or extent.startswith(untouchable):
            continue
        length = link.call(name, "STRLEN", name, read=as_count)
        link.call(name, "UNLINK", name, read=as_flag)
        count += 1
        size += length
    return count, size


def _extent_values(link: Link) -> Iterator[bytes]:
    """Keys of every extent's values, on every primary."""
    for pool in link.pools():
        cursor = b"0"
        while True:
            args: list[Argument] = ["SCAN", cursor, "MATCH", EXTENTS + b"*", "COUNT", 1000]
            cursor, names = link.ask(pool, *args, read=as_page)
            yield from names
            if cursor == b"0":
                break


def delete_tenant_elsewhere(link: Link, tenant: str, own: bytes) -> int:
    """Remove a tenant's objects under every identity but ``own``; how many there were."""
    gone = 0
    for identity in _identities(link):
        if identity == own:
            continue
        shelf = Shelf(link, identity)
        mine = [found for found in _rows(shelf) if found[2].tenant == tenant]
        for group in batched(mine, ROWS_PER_CALL):
            changes = [(field, row, place) for field, row, _, place in group]
            gone += shelf.remove_places(changes, erase=True)
    return gone
