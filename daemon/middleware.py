"""What every request passes: errors as JSON, API keys, body limit, idempotency keys."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

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
    PreconditionFailed,
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
LEFT_S = 5.0  # that a request with a key goes on for when nobody waits for it
Waited = TypeVar("Waited")


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
            if not _is_one_of(given.encode(errors="surrogateescape"), keys):
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


class _Kept:
    """A request under a key: who waits for it, and the answer to play again.

    One that nobody waits for any more goes on for ``LEFT_S``, then it is cut off; its key stays, so
    that what it has done by then is not done again.
    """

    def __init__(
        self, digest: bytes, work: asyncio.Task[web.StreamResponse], *, ends: bool
    ) -> None:
        self.digest, self.work = digest, work
        self.answer: asyncio.Future[tuple[int, bytes] | None] = work.get_loop().create_future()
        self.was_cut = False
        self._ends = ends
        self._waiting = 0
        work.add_done_callback(self._ended)

    async def wait(self, what: asyncio.Future[Waited]) -> Waited:
        """``work``'s response or error, or ``answer``."""
        self._waiting += 1
        try:
            return await asyncio.shield(what)
        finally:
            self._waiting -= 1
            if self._ends and not self._waiting and not self.work.done():
                self.work.get_loop().call_later(LEFT_S, self._cut_off)

    def _cut_off(self) -> None:
        if not self._waiting and self.work.cancel():
            self.was_cut = True

    def _ended(self, work: asyncio.Future[web.StreamResponse]) -> None:
        failed = work.cancelled() or work.exception() is not None
        self.answer.set_result(None if failed else _playable(work.result()))


def idempotency() -> Any:
    """``Idempotency-Key`` on a POST: the same request again gives the first one's answer.

    Kept in memory, the newest 2,048; answers that ask to come back (429, 5xx) are not kept. The
    request of a client whose connection broke goes on for ``LEFT_S``, or for ever if it is an
    operation; once it is cut off, its key is refused.
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
            answer = await found.wait(found.answer)
            if answer is not None:
                return _again(*answer)
            if found.was_cut:
                raise PreconditionFailed(
                    "the request under this Idempotency-Key was cut off when its client left;"
                    " look at what it has done, and use another key"
                )
        mine = _Kept(
            digest, asyncio.ensure_future(handler(request)), ends="wait" not in request.query
        )
        kept[name] = mine
        mine.answer.add_done_callback(lambda done: forget(name, mine))
        return await mine.wait(mine.work)

    def forget(name: tuple[str, ...], ended: _Kept) -> None:
        if ended.answer.result() is None and not ended.was_cut and kept.get(name) is ended:
            del kept[name]
        while len(kept) > KEYS_KEPT:
            kept.popitem(last=False)

    return once


def _again(status: int, body: bytes) -> web.Response:
    response = web.Response(body=body, status=status, content_type="application/json")
    response.headers["Idempotent-Replayed"] = "true"
    return response


def refuse_key_on_stream(request: web.Request) -> None:
    """A stream cannot be played again. Raises UnsupportedCombination."""
    if "Idempotency-Key" in request.headers:
        raise UnsupportedCombination("Idempotency-Key does not go with a stream", param="stream")


def _playable(response: web.StreamResponse) -> tuple[int, bytes] | None:
    body = response.body if isinstance(response, web.Response) else None
    if response.status < 400 and isinstance(body, bytes) and len(body) <= KEPT_BODY_BYTES_MAX:
        return response.status, body
    return None
