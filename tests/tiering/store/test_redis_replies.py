"""Replies that no command gives: each reader refuses them, and a row that came wrong is bounded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from dsv4_tierd.tiering.errors import TransferFailed
from dsv4_tierd.tiering.store import lease
from dsv4_tierd.tiering.store.codec import header_size
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind
from dsv4_tierd.tiering.store.redis_replies import (
    as_bytes,
    as_count,
    as_flag,
    as_int,
    as_list,
    as_number,
    as_object,
    as_ok,
    as_page,
    as_pairs,
    as_strings,
    as_text,
    as_time_ms,
    as_value,
)
from dsv4_tierd.tiering.store.redis_rows import (
    EXTENTS,
    Doom,
    Event,
    Names,
    Place,
    Published,
    events_of,
    extent_of,
    field_of,
    log_after,
    pinned,
    removed,
    row_of,
)
from dsv4_tierd.tiering.store.resp import ProtocolBroken, Reply

KEY = ObjectKey(ObjectKind.PAGE, "tenant", bytes(range(32)))
EXTENT = Names("ab" * 32).extent(KEY, 1_790_000_000_000)
ENTRY: Reply = [b"5-1", [b"verb", b"put", b"row", b"value"]]
EVENT = Event((5, 1), b"put", [(b"row", b"value")])
DOOM = EXTENT + b"|4096"
STRANGE: list[Reply] = [None, -1, 7, b"", b"x", b"\xff", b"1_0", [], [None], [b"x"], [[b"x"]]]


def acquired(reply: Reply) -> object:
    return lease._acquired(reply)


def owner(reply: Reply) -> object:
    return lease._owner(reply)


GOOD: list[tuple[Callable[[Reply], object], Reply, object]] = [
    (as_int, -2, -2),
    (as_count, 7, 7),
    (as_flag, 1, True),
    (as_bytes, b"x", b"x"),
    (as_value, None, None),
    (as_value, b"x", b"x"),
    (as_text, "ä".encode(), "ä"),
    (as_ok, b"OK", None),
    (as_list, [7], [7]),
    (as_strings, [b"x", b"y"], [b"x", b"y"]),
    (as_pairs, [b"x", b"y"], [(b"x", b"y")]),
    (as_number, b"12", 12),
    (as_time_ms, [b"3", b"4567"], 3004),
    (as_page, [b"0", [b"x"]], (b"0", [b"x"])),
    (as_object, b'{"a": 1}', {"a": 1}),
    (events_of, [ENTRY], [EVENT]),
    (log_after((5, 0), b"log"), [[b"log", [ENTRY]]], [EVENT]),
    (log_after((5, 0), b"log"), None, []),
    (Published.reader(1, {b"up"}), [b"epoch"], Published("epoch")),
    (Published.reader(1, {b"up"}), [b"parent", b"up"], Published("parent", missing=b"up")),
    (
        Published.reader(1, {b"up"}),
        [b"ok", b"5-1", b"9", b"row"],
        Published("", event=(5, 1), now_ms=9, rows=[b"row"]),
    ),
    (removed(1), [b"5-1", 1, DOOM], ((5, 1), 1, [Doom(EXTENT, 4096)])),
    (removed(1), [b"", 0], (None, 0, [])),
    (pinned([b"a"]), [b"5-1", b""], ((5, 1), b"")),
    (pinned([b"a"]), [b"", b"a"], (None, b"a")),
    (acquired, [b"12"], (12, "", 0)),
    (acquired, [b"0", b"me", -1], (0, "me", -1)),
    (owner, b"12 me", "me"),
]
WRONG: list[tuple[Callable[[Reply], object], Reply]] = [
    (events_of, [[b"5-1", [b"verb", b"put", b"row"]]]),
    (events_of, [[b"5-1", [b"werb", b"put"]]]),
    (events_of, [[b"5-1", [b"verb", b"use", b"xextent", b"-1"]]]),
    (events_of, [[b"5+1", [b"verb", b"put"]]]),
    (log_after((5, 1), b"log"), [[b"log", [ENTRY]]]),
    (log_after((5, 0), b"lof"), [[b"log", [ENTRY]]]),
    (log_after((5, 0), b"log"), [[b"log", [ENTRY, ENTRY]]]),
    (Published.reader(1, {b"up"}), [b"parent", b"uq"]),
    (Published.reader(1, {b"up"}), [b"parent", [b"up"]]),
    (Published.reader(1, {b"up"}), [b"nk", b"5-1", b"9", b"row"]),
    (Published.reader(2, {b"up"}), [b"ok", b"5-1", b"9", b"row"]),
    (Published.reader(1, {b"up"}), [b"ok", b"5,1", b"9", b"row"]),
    (removed(1), [b"5-1", 2]),
    (removed(1), [b"5-1", 1, EXTENT]),
    (removed(1), [b"5-1", 1, DOOM + b"|12"]),
    (removed(1), [b"5-1", 1, b"other|4096"]),
    (pinned([b"a"]), [b"", b"b"]),
    (pinned([b"a"]), [b"5-1", b"a"]),
    (acquired, [b"1", b"me", 5]),
    (acquired, [b"0"]),
    (acquired, [b"0", b"\xff", 5]),
    (owner, b"12 \xff"),
]


@pytest.mark.parametrize(("reader", "reply", "found"), GOOD)
def test_replies_as_they_are(
    reader: Callable[[Reply], object], reply: Reply, found: object
) -> None:
    """Each reader gives what the reply says."""
    assert reader(reply) == found


@pytest.mark.parametrize("reader", {id(each[0]): each[0] for each in GOOD}.values())
def test_strange_replies(reader: Callable[[Reply], object]) -> None:
    """Whatever comes, a reader raises this one error or returns."""
    for reply in STRANGE:
        with contextlib.suppress(ProtocolBroken):
            reader(reply)


@pytest.mark.parametrize(("reader", "reply"), WRONG)
def test_replies_that_are_nearly_right(reader: Callable[[Reply], object], reply: Reply) -> None:
    """Refused, rather than half believed."""
    with pytest.raises(ProtocolBroken):
        reader(reply)


@pytest.mark.parametrize("parent", [None, bytes(range(32, 64))])
def test_every_bit_of_a_row(parent: bytes | None) -> None:
    """With one bit wrong a row is refused, or names sizes that nobody has to fear."""
    head = header_size(KEY.tenant)
    place = Place(EXTENT, 4 << 20, 1 << 20, head + 5000, 5000, parent)
    field, row = field_of(KEY), place.pack()
    assert row_of(field, row) == (KEY, place)
    for at in range(len(field) + len(row)):
        for bit in range(8):
            both = bytearray(field + row)
            both[at] ^= 1 << bit
            try:
                _, found = row_of(bytes(both[: len(field)]), bytes(both[len(field) :]))
            except TransferFailed:
                continue
            assert found.size == place.size
            assert found.payload_bytes == place.payload_bytes
            assert found.offset + found.size <= found.extent_bytes <= 64 << 20
            assert found.extent.startswith(EXTENTS)
            assert (found.parent is None) == (parent is None)


@pytest.mark.parametrize(
    "key",
    [b"other", EXTENTS + b"x", b"u" + EXTENT[1:], EXTENTS + b"a:-1-b"],
    ids=["other", "short", "elsewhere", "no time"],  # an extent's own name is another each time
)
def test_keys_that_are_no_extents(key: bytes) -> None:
    """They are told apart, so that they can be left alone."""
    assert extent_of(EXTENT + b".3") == (EXTENT, 1_790_000_000_000)
    with pytest.raises(TransferFailed):
        extent_of(key)
