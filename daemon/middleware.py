"""What every request passes: errors as JSON, API keys, body limit, idempotency keys."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from dsv4_tierd.daemon.config import BadConfig
from dsv4_tierd.daemon.service import Service
from dsv4_tierd.daemon.wire import error_json
from dsv4_tierd.tiering.errors import (
    BadRequest,
    BodyTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Refused,
    TierError,
    Unauthorized,
    Unavailable,
    UnsupportedCombination,
)

log = logging.getLogger("dsv4_tierd.daemon")

SERVICE = web.AppKey("service", Service)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
KEYS_KEPT = 2_048
KEY_CHARS_MAX = 256
# Whose request it is, and on what: the same key under another of these is another request.
NAMING_HEADERS = (
    "Authorization",
    "x-api-key",
    "X-Cache-Salt",
    "X-Session-Id",
    "x-claude-code-session-id",
)
KEPT_BODY_BYTES_MAX = 1 << 20


def json_response(data: Any, status: int = 200) -> web.Response:
    """Any msgspec-encodable value as JSON."""
    return web.Response(
        body=msgspec.json.encode(data), status=status, content_type="application/json"
    )


def error_response(error: TierError) -> web.Response:
    """The envelope, with Retry-After or a word that retrying cannot help."""
    response = json_response(error_json(error), error.status)
    if isinstance(error, Refused | Unavailable) or error.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    elif isinstance(error, BadRequest) or error.status == 500:
        response.headers["x-should-retry"] = "false"  # SDKs repeat 409 and 5xx by themselves
    return response


def _from_http(error: web.HTTPException, request: web.Request) -> TierError:
    if error.status == 413:
        return BodyTooLarge("the body is larger than this daemon takes")
    if error.status == 404:
        return NotFound(f"there is no route {request.path}")
    if error.status == 405:
        return MethodNotAllowed(f"{request.path} does not take {request.method}")
    return InvalidRequest(error.reason)


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every exception becomes the envelope; one that is not a TierError is a bug and is logged."""
    service = request.app[SERVICE]
    try:
        response = await handler(request)
    except TierError as error:
        response = error_response(error)
    except web.HTTPException as error:
        response = error_response(_from_http(error, request))
    except web.RequestPayloadError as error:
        response = error_response(InvalidRequest(f"the body cannot be read: {error}"))
        response.force_close()  # where the next request begins is not known
    except RecursionError:
        response = error_response(InvalidRequest("the body is nested too deeply"))
    except (ConnectionResetError, asyncio.CancelledError):
        raise
    except Exception:
        log.exception("bug in %s %s", request.method, request.path)
        response = error_response(TierError("an error inside the daemon; its log says more"))
    service.metrics.responded(response.status)
    return response


def read_keys(file: Path | None) -> tuple[bytes, ...]:
    """API keys, one a line; ``#`` starts a comment. Raises BadConfig."""
    if file is None:
        return ()
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadConfig(f"cannot read {file}: {error}") from error
    keys = tuple(line.strip().encode() for line in lines if line.strip()[:1] not in ("", "#"))
    if not keys:
        raise BadConfig(f"{file} holds no key")
    return keys


def _is_one_of(given: bytes, keys: Sequence[bytes]) -> bool:
    found = [hmac.compare_digest(given, key) for key in keys]  # all of them: constant time
    return any(found)


def authenticator(keys: Sequence[bytes]) -> Any:
    """The middleware that asks for one of ``keys``; none: everybody may."""

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Bearer or x-api-key; compared in constant time."""
        if keys and request.path not in OPEN_PATHS:
            given = request.headers.get("x-api-key") or ""
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() == "bearer":
                given = token.strip()
            if not _is_one_of(given.encode(), keys):
                raise Unauthorized("a valid API key is needed")
        return await handler(request)

    return authenticate


@web.middleware
async def limit_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A body that says it is too long is refused unread; one that lies is cut off while read."""
    limit = request.app[SERVICE].config.body_bytes_max
    if request.content_length is not None and request.content_length > limit:
        raise BodyTooLarge(f"the body is larger than {limit} bytes")
    return await handler(request)


@dataclass(frozen=True, slots=True)
class _Kept:
    digest: bytes
    answer: asyncio.Future[tuple[int, bytes] | None]


def idempotency() -> Any:
    """``Idempotency-Key`` on a POST: the same request again gives the first one's answer.

    Kept in memory, the newest 2,048; answers that ask to come back (429, 5xx) are not kept.
    """
    kept: OrderedDict[tuple[str, ...], _Kept] = OrderedDict()

    @web.middleware
    async def once(request: web.Request, handler: Handler) -> web.StreamResponse:
        key = request.headers.get("Idempotency-Key")
        if key is None or request.method != "POST":
            return await handler(request)
        if not 0 < len(key) <= KEY_CHARS_MAX:
            raise InvalidRequest(f"Idempotency-Key is 1 to {KEY_CHARS_MAX} characters")
        said = (request.headers.get(header, "") for header in NAMING_HEADERS)
        name = (key, request.path_qs, *said)
        digest = hashlib.blake2b(await request.read(), digest_size=16).digest()
        while (found := kept.get(name)) is not None:
            if found.digest != digest:
                raise InvalidRequest("Idempotency-Key was used with another body")
            answer = await asyncio.shield(found.answer)
            if answer is not None:
                return _again(*answer)
        return await _first(kept, name, digest, request, handler)

    return once


def _again(status: int, body: bytes) -> web.Response:
    response = web.Response(body=body, status=status, content_type="application/json")
    response.headers["Idempotent-Replayed"] = "true"
    return response


def refuse_key_on_stream(request: web.Request) -> None:
    """A stream cannot be played again. Raises UnsupportedCombination."""
    if "Idempotency-Key" in request.headers:
        raise UnsupportedCombination("Idempotency-Key does not go with a stream", param="stream")


async def _first(
    kept: OrderedDict[tuple[str, ...], _Kept],
    name: tuple[str, ...],
    digest: bytes,
    request: web.Request,
    handler: Handler,
) -> web.StreamResponse:
    mine = _Kept(digest, asyncio.get_running_loop().create_future())
    kept[name] = mine

    def ended(work: asyncio.Future[web.StreamResponse]) -> None:
        keep = None if work.cancelled() or work.exception() else _playable(work.result())
        mine.answer.set_result(keep)
        if keep is None and kept.get(name) is mine:
            del kept[name]
        while len(kept) > KEYS_KEPT:
            kept.popitem(last=False)

    work = asyncio.ensure_future(handler(request))
    work.add_done_callback(ended)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        # Who waits and leaves stops nothing: who comes back with the key gets the answer.
        if "wait" not in request.query:
            work.cancel()
        raise


def _playable(response: web.StreamResponse) -> tuple[int, bytes] | None:
    body = response.body if isinstance(response, web.Response) else None
    if response.status < 400 and isinstance(body, bytes) and len(body) <= KEPT_BODY_BYTES_MAX:
        return response.status, body
    return None
