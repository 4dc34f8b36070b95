"""A router in front of several daemons: a request goes where its prefix is hottest.

    python examples/prefix_router.py --listen 8099 http://127.0.0.1:8100 http://127.0.0.1:8101

Every daemon is asked at once how much of the request it holds (``POST /v1/prefixes/lookup``, the
token ids as little-endian int32: 3.6 MB for 900,000 tokens, answered in milliseconds). A token
in device memory counts most, one in a store that all daemons share least. Daemons that do not
answer in time are passed over; where all are equal, requests with the same beginning go to the
same one. Where none answers in time, and for requests without words, it is the turn of the ready
daemon that was used least recently. Only if none can be reached, the answer is 503.

What names a session (``/v1/sessions/{id}/…``, ``session_id`` in the body, ``X-Session-Id``,
``x-claude-code-session-id``) or an operation goes to the daemon that has it. That is remembered,
and forgotten once that daemon is gone or has it no more: then all are asked, and what none of them
has goes where the rest goes, so that ``…/resume`` finds a daemon that shares the store.
``GET /v1/sessions`` lists the sessions of all daemons; ``X-Unreached`` names those that are silent.

Send token ids where you can: messages and text are tokenized by every daemon.
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
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
from aiohttp import web

WEIGHTS = {"device": 1.0, "host": 0.9, "store": 0.5}
LOOKUP_S = 1.0  # a hit saves the minutes that a long prefix takes to compute
FIND_S = 1.0
HOMES_MAX = 100_000
PAGE = 1000
BODY_BYTES_MAX = 64 << 20
BEGINNING_BYTES = 4096
# Those of one hop (RFC 9110, 7.6.1), and those that are written anew.
NOT_FORWARDED = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "host", "content-length", "content-encoding"),
    "accept-encoding",
}
OCTETS, JSON = "application/octet-stream", "application/json"


@dataclass(frozen=True, slots=True)
class Call:
    """A request and what it is about.

    words: what lookup takes; place: the path of the session or operation that it names; asking:
    headers for questions of our own.
    """

    request: web.Request
    data: bytes
    words: bytes
    salt: str
    place: str | None
    asking: dict[str, str]


async def read_call(request: web.Request) -> Call:
    """What is neither octets nor a JSON object is for the daemon to refuse.

    Not so a header that is no text: it would not arrive there, and a tenant's salt would be none.
    """
    try:
        "".join(request.headers.values()).encode()
    except UnicodeEncodeError as error:
        raise web.HTTPBadRequest(text="a header is not UTF-8") from error
    data, body = await request.read(), {}
    octets = is_octets(request)
    if not octets:
        with suppress(ValueError, RecursionError):
            body = json.loads(data or b"{}")
        body = body if isinstance(body, dict) else {}
    words, kind = (data, OCTETS) if octets else words_of(body)
    salt = body.get("cache_salt") or request.headers.get("X-Cache-Salt")
    salt = str(salt or request.query.get("cache_salt") or "")
    asking = {k: request.headers[k] for k in ("Authorization", "x-api-key") if k in request.headers}
    asking |= {"Content-Type": kind} | ({"X-Cache-Salt": salt} if salt else {})
    return Call(request, data, words, salt, place_of(request, body), asking)


def is_octets(request: web.Request) -> bool:
    """Only when it says so: aiohttp's ``content_type`` is octets where there is none."""
    said, _, _ = request.headers.get("Content-Type", "").partition(";")
    return said.strip().lower() == OCTETS


def words_of(body: dict[str, Any]) -> tuple[bytes, str]:
    """The prompt of a request: int32 bytes where it is token ids, else what lookup takes."""
    prompt = body.get("token_ids", body.get("prompt"))
    if isinstance(prompt, list) and prompt:
        with suppress(struct.error):  # no ids
            return struct.pack(f"<{len(prompt)}i", *prompt), OCTETS
    if isinstance(prompt, str):
        return json.dumps({"text": prompt}).encode(), JSON
    words = {name: body[name] for name in ("messages", "text") if name in body}
    return json.dumps(words).encode() if words else b"", JSON


def place_of(request: web.Request, body: dict[str, Any]) -> str | None:
    """The path of the session or operation that a request names."""
    parts = request.rel_url.raw_path.strip("/").split("/")
    if len(parts) > 2 and parts[:2] in (["v1", "sessions"], ["v1", "operations"]):
        return "/" + "/".join(parts[:3])
    if parts == ["v1", "sessions"]:
        name = body.get("id") or request.query.get("id")
    else:
        name = body.get("session_id") or request.headers.get("X-Session-Id")
        name = name or request.headers.get("x-claude-code-session-id")
    if not name or not isinstance(name, str):
        return None
    return f"/v1/sessions/{quote(name, safe='', errors='surrogatepass')}"


class Router:
    """Chooses among daemons, and passes requests on."""

    def __init__(self, urls: Sequence[str], http: aiohttp.ClientSession) -> None:
        self._urls = [url.rstrip("/") for url in urls]  # least recently used first
        self._http = http
        self._homes: OrderedDict[tuple[str, str], str] = OrderedDict()  # by salt and place

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass a request to the right daemon, and its answer back as it comes."""
        call = await read_call(request)
        answer: web.StreamResponse | None = None
        if (request.method, request.path) == ("GET", "/v1/sessions"):
            answer = await self._list(call)
        home = self._homes.get((call.salt, call.place or ""))
        if home is not None:
            answer = await self._forward(call, home, only_if_there=True)
        if answer is not None:
            return answer
        self._homes.pop((call.salt, call.place or ""), None)
        for url in await self._candidates(call):
            if (answer := await self._forward(call, url)) is not None:
                return answer
        raise web.HTTPServiceUnavailable(
            text="no daemon can be reached", headers={"Retry-After": "1"}
        )

    async def _candidates(self, call: Call) -> list[str]:
        """All daemons, in the order in which to try them."""
        first: list[str] = []
        if call.place is not None:
            first = list(await self._ask_all(call, call.place, FIND_S))
        if not first and call.words:
            first = await self._hottest(call)
        if not first:
            first = list(await self._ask_all(call, "/ready", LOOKUP_S))
        return first + [url for url in self._urls if url not in first]

    async def _hottest(self, call: Call) -> list[str]:
        """Daemons that say in time what they hold of the words, the one with most first."""
        found = await self._ask_all(call, "/v1/prefixes/lookup", LOOKUP_S, call.words)

        def heat(url: str) -> tuple[float, bytes]:
            tiers = found[url]["tiers"]
            score = sum(weight * tiers[tier] for tier, weight in WEIGHTS.items())
            beginning = url.encode() + b"\0" + call.words[:BEGINNING_BYTES]
            return score, hashlib.blake2b(beginning, digest_size=8).digest()  # rendezvous hashing

        return sorted(found, key=heat, reverse=True)

    async def _ask_all(
        self, call: Call, path: str, seconds: float, data: bytes | None = None
    ) -> dict[str, Any]:
        """Good answers by daemon, least recently used first."""
        urls = list(self._urls)
        asked = (self._ask(call, url + path, seconds, data) for url in urls)
        found = zip(urls, await asyncio.gather(*asked), strict=True)
        return {url: answer for url, answer in found if answer is not None}

    async def _ask(self, call: Call, url: str, seconds: float, data: bytes | None = None) -> Any:
        """The answer to GET, or to POST of data; None: there is none in time, or no good one."""
        method, sent = ("GET", None) if data is None else ("POST", io.BytesIO(data))
        try:
            async with (
                asyncio.timeout(seconds),
                self._http.request(method, url, headers=call.asking, data=sent) as answer,
            ):
                return await answer.json() if answer.ok else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def _forward(
        self, call: Call, url: str, *, only_if_there: bool = False
    ) -> web.StreamResponse | None:
        """A daemon's answer. None, and nothing was done: it is not reached, or it is a 404."""
        request = call.request
        headers = {k: v for k, v in request.headers.items() if k.lower() not in NOT_FORWARDED}
        sent = io.BytesIO(call.data) if call.data else None
        self._urls.sort(key=url.__eq__)  # it is the last one now
        try:
            async with self._http.request(
                request.method,
                url + request.path_qs,
                data=sent,
                headers=headers,
                skip_auto_headers=["Content-Type"],  # what has no type stays without one
            ) as answer:
                if only_if_there and answer.status == 404:
                    return None
                if answer.ok:
                    await self._remember(call, url, answer)
                kept = {k: v for k, v in answer.headers.items() if k.lower() not in NOT_FORWARDED}
                response = web.StreamResponse(status=answer.status, headers=kept)
                response.headers["X-Routed-To"] = url
                await response.prepare(request)
                if answer.status == 201:
                    await response.write(await answer.read())
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            return None
        except aiohttp.ClientConnectionError as error:
            raise web.HTTPBadGateway(text=f"{url}: {error}") from error

    async def _remember(self, call: Call, url: str, answer: aiohttp.ClientResponse) -> None:
        """Where is what the request named, or what it made."""
        places = [call.place, answer.headers.get("Location")]
        if answer.status == 201:  # a session was made
            made = await answer.json()
            places.append(f"/v1/sessions/{quote(made['id'], safe='')}")
            if made.get("operation"):
                places.append(f"/v1/operations/{made['operation']['id']}")
        if call.request.method == "DELETE" and call.request.rel_url.raw_path == call.place:
            self._homes.pop((call.salt, call.place), None)
            places = []
        for place in filter(None, places):
            self._homes[call.salt, place] = url
            self._homes.move_to_end((call.salt, place))
        while len(self._homes) > HOMES_MAX:
            self._homes.popitem(last=False)

    async def _list(self, call: Call) -> web.Response | None:
        """A page of all daemons' sessions; None: no daemon gives any, and one should say why."""
        query, urls = call.request.query, list(self._urls)
        lists = await asyncio.gather(*(self._sessions(call, url) for url in urls))
        newest: dict[str, dict[str, Any]] = {}
        for session in sorted(
            (s for each in lists for s in each or ()), key=lambda s: s["used_at"]
        ):
            newest[session["id"]] = session  # two know it: it is the one's that used it last
        data = sorted(newest.values(), key=lambda s: (s["created_at"], s["id"]))
        try:
            limit = int(query.get("limit", "100"))
            if "after" in query:
                data = data[[s["id"] for s in data].index(query["after"]) + 1 :]
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"limit or after: {error}") from error
        data = [s for s in data if query.get("state") in (None, s["state"])]
        page = data[: max(limit, 1)]
        more, last = len(data) > len(page), page[-1]["id"] if page else None
        silent = [url for url, each in zip(urls, lists, strict=True) if each is None]
        if len(silent) == len(urls):
            return None
        return web.json_response(
            {"object": "list", "data": page, "has_more": more, "last_id": last},
            headers={"X-Unreached": ", ".join(silent)} if silent else {},
        )

    async def _sessions(self, call: Call, url: str) -> list[dict[str, Any]] | None:
        """All sessions of one daemon."""
        data, after = [], ""
        while page := await self._ask(call, f"{url}/v1/sessions?limit={PAGE}{after}", FIND_S):
            data += page["data"]
            if not page["has_more"]:
                return data
            after = f"&after={quote(page['last_id'], safe='')}"
        return None


def make_app(urls: Sequence[str]) -> web.Application:
    """The router as an aiohttp application."""

    async def lifetime(app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0)
        every = aiohttp.TCPConnector(limit=0)  # a stream may be open for hours
        async with aiohttp.ClientSession(timeout=timeout, connector=every) as http:
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
    app = make_app(arguments.urls)
    # Who leaves is left at the daemon too, which then cancels the request.
    web.run_app(app, host=arguments.host, port=arguments.listen, handler_cancellation=True)


if __name__ == "__main__":
    main()
