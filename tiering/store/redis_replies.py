"""What a reply must look like: each reader returns what it is, or raises ``ProtocolBroken``.

They run within the link's calls, which then name the command, let the connection go and open the
breaker: a server whose replies come wrong is read anew, and nothing of them ends a caller.
"""

from __future__ import annotations

import json
from typing import Any

from dsv4_tierd.tiering.store.resp import ProtocolBroken, Reply

_DIGITS_MAX = 20


def bad(what: str, found: object) -> ProtocolBroken:
    """The error to raise: ``what`` was expected, ``found`` came."""
    return ProtocolBroken(f"{what} was expected, got {found!r:.60}")


def as_int(reply: Reply) -> int:
    """An integer."""
    if not isinstance(reply, int):
        raise bad("an integer", reply)
    return reply


def as_count(reply: Reply) -> int:
    """An integer, not negative."""
    if as_int(reply) < 0:
        raise bad("a count", reply)
    return as_int(reply)


def as_flag(reply: Reply) -> bool:
    """0 or 1."""
    if as_int(reply) not in (0, 1):
        raise bad("0 or 1", reply)
    return reply == 1


def as_bytes(reply: object) -> bytes:
    """A string."""
    if not isinstance(reply, bytes):
        raise bad("a string", reply)
    return reply


def as_value(reply: Reply) -> bytes | None:
    """A string, or nothing."""
    return None if reply is None else as_bytes(reply)


def as_text(reply: object) -> str:
    """A string of UTF-8."""
    try:
        return as_bytes(reply).decode()
    except UnicodeDecodeError:
        raise bad("text", reply) from None


def as_ok(reply: Reply) -> None:
    """OK."""
    if reply != b"OK":
        raise bad("OK", reply)


def as_list(reply: object) -> list[Reply]:
    """A list."""
    if not isinstance(reply, list):
        raise bad("a list", reply)
    return reply


def as_strings(reply: object) -> list[bytes]:
    """A list of strings."""
    return [as_bytes(each) for each in as_list(reply)]


def as_pairs(reply: object) -> list[tuple[bytes, bytes]]:
    """A flat list of names and values."""
    flat = as_strings(reply)
    if len(flat) % 2:
        raise bad("pairs", f"{len(flat)} strings")
    return list(zip(flat[::2], flat[1::2], strict=True))


def as_number(reply: object) -> int:
    """A string of digits."""
    text = as_bytes(reply)
    if not text.isdigit() or len(text) > _DIGITS_MAX:  # int() also takes blanks and underscores
        raise bad("a number", text)
    return int(text)


def as_time_ms(reply: Reply) -> int:
    """What TIME says."""
    parts = as_strings(reply)
    if len(parts) != 2:
        raise bad("a time", parts)
    return as_number(parts[0]) * 1000 + as_number(parts[1]) // 1000


def as_page(reply: Reply) -> tuple[bytes, list[bytes]]:
    """What SCAN and HSCAN answer: the next cursor, and strings."""
    parts = as_list(reply)
    if len(parts) != 2:
        raise bad("a page", parts)
    as_number(parts[0])
    return as_bytes(parts[0]), as_strings(parts[1])


def as_object(text: object) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = json.loads(as_text(text))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise bad("a JSON object", text)
    return found


def as_fields(reply: Reply) -> dict[str, str]:
    """The lines of an INFO reply by name."""
    text = as_bytes(reply).decode(errors="replace")
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value for name, colon, value in pairs if colon}
