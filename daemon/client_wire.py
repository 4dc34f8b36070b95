"""What the client sends and reads: addresses, bodies, error envelopes, server-sent events."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from dsv4_tierd.daemon.client_errors import ConnectionFailedError, TierdError, error_from


def checked_address(text: str) -> str:
    """A daemon's address without its last slashes. Raises ValueError."""
    try:
        url = URL(text)
        good = url.scheme in ("http", "https") and url.host and url.port
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"{text!r} is no address of a daemon: http://HOST:PORT")
    return text.rstrip("/")


def checked_header(name: str, text: str) -> str:
    """A header's value. Raises ValueError."""
    if not text.isprintable():
        raise ValueError(f"{name} is one line of printable characters")
    return text


def session_path(id: str, verb: str = "") -> str:
    """A session's path; whatever the name is, it is one segment."""
    return f"/v1/sessions/{quote(id, safe='')}{verb}"


def encode(body: Any) -> tuple[bytes | io.BytesIO | None, dict[str, str]]:
    """A body as JSON, bytes as they are, and the header that says so."""
    if body is None:
        return None, {}
    if isinstance(body, bytes):
        return io.BytesIO(body), {"Content-Type": "application/octet-stream"}
    return msgspec.json.encode(body), {"Content-Type": "application/json"}


def decode(response: aiohttp.ClientResponse, raw: bytes) -> Any:
    """A JSON answer. Raises the TierdError that it is, or ConnectionFailedError: it is not JSON."""
    try:
        found = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        if response.status < 400:
            raise ConnectionFailedError(
                f"{response.url} answers, and not in JSON: it is no dsv4-tierd"
            ) from error
        found = None
    if response.status >= 400:
        after = response.headers.get("Retry-After", "")
        raise error_from(response.status, found, float(after) if after.isdigit() else None)
    return found


def no_answer(method: str, url: str, error: Exception) -> TierdError:
    """What becomes of a failure below HTTP."""
    return ConnectionFailedError(f"{method} {url}: {str(error) or type(error).__name__}")


async def events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[str, bytes]]:
    """Server-sent events; comments are dropped."""
    name, data = "message", b""
    pending = b""
    async for piece in content.iter_any():
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"event: "):
                name = line[7:].decode()
            elif line.startswith(b"data: "):
                data += line[6:]
            elif not line and data:
                yield name, data
                name, data = "message", b""
