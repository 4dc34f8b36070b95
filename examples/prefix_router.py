"""A router in front of several daemons: a request goes where its prefix is hottest.

    python examples/prefix_router.py --listen 8099 http://127.0.0.1:8100 http://127.0.0.1:8101

Every daemon is asked at once how much of the request it holds (``POST /v1/prefixes/lookup``, the
token ids as little-endian int32: 3.6 MB for 900,000 tokens, answered in milliseconds). A token
in device memory counts most, one in a store that all daemons share least. Daemons that do not
answer in time are passed over; where all are equal, requests with the same beginning go to the
same one. Requests in a session (``/v1/sessions/{id}/…``) stay where the session was made.

The one that sends token ids should be the one that has a tokenizer; messages and text work as
well, and then every daemon tokenizes them.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import struct
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

WEIGHTS = {"device": 1.0, "host": 0.9, "store": 0.5}
LOOKUP_S = 0.25
SESSIONS_MAX = 100_000
BODY_BYTES_MAX = 64 << 20
BEGINNING_BYTES = 4096
# Those of one hop (RFC 9110, 7.6.1), and those that are written anew.
NOT_FORWARDED = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "host", "content-length", "content-encoding"),
    "accept-encoding",
}


@dataclass(frozen=True, slots=True)
class Heat:
    """What a daemon holds of a prompt. ``score``: tokens, weighted by where they lie."""

    url: str
    score: float
    matched_tokens: int


def words_of(body: dict[str, Any]) -> tuple[bytes | None, dict[str, Any]]:
    """The prompt of a request: int32 bytes where it is token ids, else what lookup takes."""
    prompt = body.get("token_ids", body.get("prompt"))
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return struct.pack(f"<{len(prompt)}i", *prompt), {}
    if isinstance(prompt, str):
        return None, {"text": prompt}
    return None, {name: body[name] for name in ("messages", "text") if name in body}


class Router:
    """Chooses among daemons, and passes requests on."""

    def __init__(self, urls: Sequence[str], http: aiohttp.ClientSession) -> None:
        self._urls, self._http = [url.rstrip("/") for url in urls], http
        self._homes: OrderedDict[tuple[str, str], str] = OrderedDict()

    # ------------------------------------------------------------ choosing
    async def choose(
        self, octets: bytes | None, words: dict[str, Any], headers: dict[str, str]
    ) -> Heat:
        """The daemon that holds most of these words. HTTPServiceUnavailable: none answers."""
        if octets is None and not words:
            words = {"token_ids": [0]}  # only to see who is there
        asked = [self._ask(url, octets, words, headers) for url in self._urls]
        found = [heat for heat in await asyncio.gather(*asked) if heat is not None]
        if not found:
            raise web.HTTPServiceUnavailable(text="no daemon answers", headers={"Retry-After": "1"})
        beginning = (octets or json.dumps(words).encode())[:BEGINNING_BYTES]
        return max(found, key=lambda heat: (heat.score, _rank(heat.url, beginning)))

    async def _ask(
        self, url: str, octets: bytes | None, words: dict[str, Any], headers: dict[str, str]
    ) -> Heat | None:
        sent: dict[str, Any] = {"json": words}
        if octets is not None:
            sent, headers = (
                {"data": io.BytesIO(octets)},
                headers | {"Content-Type": "application/octet-stream"},
            )
        found = await self._json("POST", f"{url}/v1/prefixes/lookup", headers=headers, **sent)
        if found is None:
            return None
        score = sum(WEIGHTS[tier] * found["tiers"][tier] for tier in WEIGHTS)
        return Heat(url, score, found["matched_tokens"])

    async def _home(self, salt: str, session: str, headers: dict[str, str]) -> str:
        """Where a session lives; the first daemon, which will say so, if nowhere."""
        if (salt, session) not in self._homes:
            asked = [
                self._json("GET", f"{url}/v1/sessions/{session}", headers=headers)
                for url in self._urls
            ]
            found = zip(self._urls, await asyncio.gather(*asked), strict=True)
            self._remember(salt, session, next((url for url, has in found if has), self._urls[0]))
        return self._homes[salt, session]

    def _remember(self, salt: str, session: str, url: str) -> None:
        self._homes[salt, session] = url
        while len(self._homes) > SESSIONS_MAX:
            self._homes.popitem(last=False)

    async def _json(self, method: str, url: str, **sent: Any) -> Any:
        """An answer within the time for it; None: there was none, or not a good one."""
        try:
            async with asyncio.timeout(LOOKUP_S), self._http.request(method, url, **sent) as answer:
                return await answer.json() if answer.ok else None
        except (aiohttp.ClientError, TimeoutError):
            return None

    # ------------------------------------------------------------ passing on
    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass a request to the right daemon, and its answer back as it comes."""
        data = await request.read()
        octets, body = _parsed(request, data)
        salt = body.get("cache_salt") or request.headers.get("X-Cache-Salt")
        salt = salt or request.query.get("cache_salt") or ""
        asking = {"X-Cache-Salt": salt} if salt else {}
        if "Authorization" in request.headers:
            asking["Authorization"] = request.headers["Authorization"]
        parts = request.path.strip("/").split("/")
        if parts[:2] == ["v1", "sessions"] and len(parts) > 2:
            url = await self._home(salt, parts[2], asking)
        else:
            words: dict[str, Any] = {}
            if octets is None:
                octets, words = words_of(body)
            url = (await self.choose(octets, words, asking)).url
        makes_session = request.method == "POST" and parts[:2] == ["v1", "sessions"]
        makes_session = makes_session and (len(parts) == 2 or parts[3:] == ["fork"])
        return await self._forward(request, url, data, salt if makes_session else None)

    async def _forward(
        self, request: web.Request, url: str, data: bytes, new_session_salt: str | None
    ) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in NOT_FORWARDED}
        try:
            async with self._http.request(
                request.method, url + request.path_qs, data=io.BytesIO(data), headers=headers
            ) as answer:
                kept = {k: v for k, v in answer.headers.items() if k.lower() not in NOT_FORWARDED}
                response = web.StreamResponse(status=answer.status, headers=kept)
                response.headers["X-Routed-To"] = url
                if new_session_salt is not None and answer.ok:  # it stays where it was made
                    self._remember(new_session_salt, (await answer.json())["id"], url)
                    await response.prepare(request)
                    await response.write(await answer.read())
                else:
                    await response.prepare(request)
                    async for part in answer.content.iter_any():
                        await response.write(part)
                await response.write_eof()
                return response
        except aiohttp.ClientConnectionError as error:
            raise web.HTTPBadGateway(text=f"{url}: {error}") from error


def _parsed(request: web.Request, data: bytes) -> tuple[bytes | None, dict[str, Any]]:
    """Token ids as they came, or a JSON object; what is neither is for the daemon to refuse."""
    if request.content_type == "application/octet-stream":
        return data, {}
    try:
        body = json.loads(data or b"{}")
    except ValueError:
        return None, {}
    return None, body if isinstance(body, dict) else {}


def _rank(url: str, beginning: bytes) -> bytes:
    """Rendezvous hashing: the same beginning prefers the same daemon, whoever else is there."""
    return hashlib.blake2b(url.encode() + b"\0" + beginning, digest_size=8).digest()


def make_app(urls: Sequence[str]) -> web.Application:
    """The router as an aiohttp application."""

    async def lifetime(app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=True) as http:
            app[ROUTER] = Router(urls, http)
            yield

    async def handle(request: web.Request) -> web.StreamResponse:
        return await request.app[ROUTER].handle(request)

    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.cleanup_ctx.append(lifetime)
    app.router.add_route("*", "/{path:.*}", handle)
    return app


ROUTER = web.AppKey("router", Router)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("urls", nargs="+", help="Base URLs of the daemons.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--listen", type=int, default=8099, help="Port.")
    arguments = parser.parse_args()
    web.run_app(make_app(arguments.urls), host=arguments.host, port=arguments.listen)


if __name__ == "__main__":
    main()
