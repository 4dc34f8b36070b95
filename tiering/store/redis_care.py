"""Looking after what a Redis holds, under every identity: list, verify, tidy, delete."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dsv4_tierd.tiering.errors import TransferFailed
from dsv4_tierd.tiering.store.codec import (
    HEADER_BYTES_MAX,
    check_name,
    check_payload,
    decode_header,
)
from dsv4_tierd.tiering.store.disk import GcReport, ObjectInfo, VerifyReport
from dsv4_tierd.tiering.store.protocol import ObjectKey
from dsv4_tierd.tiering.store.redis_link import Link
from dsv4_tierd.tiering.store.redis_rows import (
    EXTENTS,
    IDENTITIES,
    ROWS_PER_CALL,
    Place,
    extent_of,
    key_of,
    part_name,
)
from dsv4_tierd.tiering.store.redis_shelf import Shelf, batched, scan_hash

GRACE_S = 900.0
_Found = tuple[bytes, bytes, ObjectKey, Place]  # field, row as it stands, and both read


def shelves(own: Shelf) -> Iterator[Shelf]:
    """One shelf for each identity that has written; ``own`` for its own."""
    for name, _ in list(scan_hash(own.link, IDENTITIES)):
        if name.decode() == own.names.identity:
            yield own
        else:
            yield Shelf(own.link, bytes.fromhex(name.decode()))


def _rows(shelf: Shelf, strange: set[bytes] | None = None) -> Iterator[_Found]:
    """Rows that this version can read, the others into ``strange``; HSCAN may show one twice."""
    seen: set[bytes] = set()
    for name, row in scan_hash(shelf.link, shelf.names.cat):
        if name not in seen:
            seen.add(name)
            try:
                yield name, row, key_of(name), Place.unpack(row)
            except (TransferFailed, ValueError):
                if strange is not None:
                    strange.add(name)


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
    total = sum(_count(shelf) for shelf in looked_at)
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


def _count(shelf: Shelf) -> int:
    count = shelf.link.call(shelf.names.cat, "HLEN", shelf.names.cat)
    assert isinstance(count, int)
    return count


def _expired(shelf: Shelf, place: Place) -> bool:
    held = shelf.mirror.held.get(place.extent)
    return held is not None and 0 < held.expires_ms <= shelf.mirror.now_ms()


def _still(shelf: Shelf, name: bytes, row: bytes) -> bool:
    return shelf.link.call(shelf.names.cat, "HGET", shelf.names.cat, name) == row


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
        listed = dict(scan_hash(shelf.link, shelf.names.live))  # before the rows: see below
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
                shelf.link.call(where, "HDEL", where, *group)
        used += sum(rows[0][3].extent_bytes for rows in by_extent.values())
        removed += _forget_lost(shelf, by_extent)
        forgettable = not by_extent and not strange and shelf is not own
        if forgettable and shelf.forget_identity():
            own.link.call(IDENTITIES, "HDEL", IDENTITIES, shelf.names.identity)
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
        if all(shelf.link.many([("EXISTS", name) for name in names])):
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
        extent, born_ms = extent_of(name)
        if extent in known or born_ms > before_ms or extent.startswith(untouchable):
            continue
        length = link.call(name, "STRLEN", name)
        assert isinstance(length, int)
        link.call(name, "UNLINK", name)
        count += 1
        size += length
    return count, size


def _extent_values(link: Link) -> Iterator[bytes]:
    """Keys of every extent's values, on every primary."""
    for pool in link.pools():
        cursor = b"0"
        while True:
            reply = link.ask(pool, "SCAN", cursor, "MATCH", EXTENTS + b"*", "COUNT", 1000)
            assert isinstance(reply, list)
            after, names = reply
            assert isinstance(after, bytes) and isinstance(names, list)
            yield from (name for name in names if isinstance(name, bytes))
            if after == b"0":
                break
            cursor = after


def delete_tenant_elsewhere(link: Link, tenant: str, own: bytes) -> int:
    """Remove a tenant's objects under every identity but ``own``; how many there were."""
    gone = 0
    for name, _ in list(scan_hash(link, IDENTITIES)):
        if name.decode() == own.hex():
            continue
        shelf = Shelf(link, bytes.fromhex(name.decode()))
        mine = [found for found in _rows(shelf) if found[2].tenant == tenant]
        for group in batched(mine, ROWS_PER_CALL):
            changes = [(field, row, place) for field, row, _, place in group]
            gone += shelf.remove_places(changes, erase=True)
    return gone
