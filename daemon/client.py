"""The async client: sessions that are forked, streamed from, suspended.

::

    async with AsyncTierd() as tierd:
        base = await tierd.sessions.create(messages=[system, repository])
        async with tierd.fork(base) as agent:  # suspended when the block ends
            async for event in agent.stream("Find the race in the scheduler."):
                print(event.text, end="")
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Generator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import aiohttp
import msgspec

from dsv4_tierd.daemon import client_wire
from dsv4_tierd.daemon.client_errors import (
    BadRequestError,
    ConnectionFailedError,
    SessionBusyError,
    TierdError,
    UnavailableError,
    error_from,
)
from dsv4_tierd.daemon.client_parts import Operations, Prefixes
from dsv4_tierd.daemon.client_wire import session_path
from dsv4_tierd.daemon.retry import RetryPolicy

if TYPE_CHECKING:
    import openai

DEFAULT_URL = "http://127.0.0.1:8100"
Message = Mapping[str, Any]
Json = dict[str, Any]
_GONE = frozenset({"session_not_found", "not_pinned"})
_LEFT_S = 10.0  # that a session is busy, at most, with a stream that was left


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. Only silence is bounded: a stream may go on for hours, with signs of life.

    An answer that comes whole after long work (create, append, generate, suspend, ...) has no
    signs of life before it; it is waited for as long as the connection lasts.
    """

    connect_s: float = 5.0
    silence_s: float = 120.0


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a generation. ``kind``: progress, tokens or done (then ``result`` is set)."""

    kind: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    done: int = 0
    total: int = 0
    result: Json | None = None


class AsyncTierd:
    """A connection to one daemon. ``cache_salt`` is the tenant whose sessions these are.

    Raises ValueError for an address, a key or a salt that cannot be sent.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        timeout: Timeouts = Timeouts(),
        max_retries: int = 2,
        cache_salt: str | None = None,
    ) -> None:
        address = base_url or os.environ.get("TIERD_BASE_URL") or DEFAULT_URL
        self.base_url = client_wire.checked_address(address)
        self.api_key = api_key or os.environ.get("TIERD_API_KEY")
        self.cache_salt = cache_salt
        client_wire.checked_header("api_key", self.api_key or "")
        client_wire.checked_header("cache_salt", cache_salt or "")
        self.sessions = Sessions(self)
        self.prefixes = Prefixes(self)
        self.operations = Operations(self)
        self._timeout = timeout
        self._retry = RetryPolicy(max_retries)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    def fork(self, session: Session, id: str | None = None, at: int | None = None) -> Forking:
        """``await`` it for a session, or enter it for one that is suspended at the end."""
        return Forking(session, id, at)

    def openai(self, session: Session | None = None) -> openai.AsyncOpenAI:
        """OpenAI's client on this daemon; its chats go on in ``session`` if one is given."""
        import openai

        headers = self._headers() | ({} if session is None else {"X-Session-Id": session.id})
        return openai.AsyncOpenAI(
            base_url=self.base_url + "/v1",
            api_key=self.api_key or "none",
            default_headers=headers,
        )

    async def ready(self) -> Json:
        """What /ready says, ready or not. Raises TierdError."""
        url = self.base_url + "/ready"
        try:
            async with self._client().get(url) as response:
                raw = await response.read()
                try:
                    found = msgspec.json.decode(raw, type=dict[str, Any])
                except msgspec.DecodeError:
                    found = {}
                if "ready" not in found:
                    client_wire.decode(response, raw)
                    raise ConnectionFailedError(f"{url} answers, and is no dsv4-tierd's")
                return found
        except (aiohttp.ClientError, TimeoutError) as error:
            raise client_wire.no_answer("GET", url, error) from error

    async def wait_ready(self, timeout_s: float = 300.0, *, not_pid: int | None = None) -> None:
        """Wait until an engine serves (another than ``not_pid``). Raises UnavailableError."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    with suppress(ConnectionFailedError, UnavailableError):
                        found = await self.ready()
                        if found["ready"] and found["engine_pid"] != not_pid:
                            return
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            raise UnavailableError(f"not ready within {timeout_s} s") from error

    async def call(self, method: str, path: str, body: Any = None, **query: str) -> Any:
        """One JSON call, repeated as the policy allows. Raises TierdError."""
        headers = self._headers()
        if method == "POST":
            headers["Idempotency-Key"] = uuid.uuid4().hex
        attempt = 0
        while True:
            try:
                return await self._once(method, path, body, query, headers)
            except TierdError as error:
                if method == "DELETE" and attempt and error.code in _GONE:
                    return {}  # the first try had done it
                await self._pause_or_raise(error, attempt, repeatable=True)
            attempt += 1

    async def _pause_or_raise(self, error: TierdError, attempt: int, *, repeatable: bool) -> None:
        forbidden = isinstance(error, BadRequestError)
        if not self._retry.allows(
            attempt, status=error.status, forbidden=forbidden, repeatable=repeatable
        ):
            raise error
        await asyncio.sleep(self._retry.pause_s(attempt, error.retry_after_s))

    async def _once(
        self, method: str, path: str, body: Any, query: dict[str, str], headers: dict[str, str]
    ) -> Any:
        data, kind = client_wire.encode(body)
        is_long = query.get("wait") == "true" or path.endswith("/generate")
        try:
            async with self._client().request(
                method,
                self.base_url + path,
                params=query,
                data=data,
                headers=headers | kind,
                timeout=self._limits(None if is_long else self._timeout.silence_s),
            ) as response:
                return client_wire.decode(response, await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise client_wire.no_answer(method, self.base_url + path, error) from error

    async def stream(self, path: str, body: Json) -> AsyncGenerator[tuple[str, Json]]:
        """Events (name, data) of one POST. Repeated only while refused, before any event."""
        attempt = 0
        while True:
            try:
                async with aclosing(self._stream_once(path, body)) as events:
                    async for event in events:
                        attempt = self._retry.max_retries  # something was said: never again
                        yield event
                return
            except TierdError as error:
                await self._pause_or_raise(error, attempt, repeatable=False)
            attempt += 1

    async def _stream_once(self, path: str, body: Json) -> AsyncGenerator[tuple[str, Json]]:
        data, kind = client_wire.encode(body)
        try:
            async with self._client().post(
                self.base_url + path, data=data, headers=self._headers() | kind
            ) as response:
                if response.status >= 400:
                    client_wire.decode(response, await response.read())
                async for name, raw in client_wire.events(response.content):
                    found = msgspec.json.decode(raw)
                    if name == "error":
                        raise error_from(None, found, None)
                    yield name, found
        except (aiohttp.ClientError, TimeoutError) as error:
            raise client_wire.no_answer("POST", self.base_url + path, error) from error

    def _headers(self) -> dict[str, str]:
        headers = {} if self.cache_salt is None else {"X-Cache-Salt": self.cache_salt}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                timeout=self._limits(self._timeout.silence_s),
                connector=aiohttp.TCPConnector(limit=0),
            )
            # It would repeat a DELETE unseen, and the second one finds nothing.
            self._http._retry_connection = False  # noqa: SLF001  no other way
        return self._http

    def _limits(self, silence_s: float | None) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(
            total=None, sock_connect=self._timeout.connect_s, sock_read=silence_s
        )


class Sessions:
    """What ``tierd.sessions`` is."""

    def __init__(self, client: AsyncTierd) -> None:
        self._client = client

    async def create(
        self,
        id: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        ttl: float | None = None,
        metadata: Json | None = None,
        pin: bool = False,
        write_policy: Literal["through", "on_suspend", "never"] | None = None,
    ) -> Session:
        """A new session, its words computed when this returns."""
        body = _given(
            id=id, messages=messages, text=text, token_ids=token_ids, ttl=ttl, metadata=metadata
        ) | _given(write_policy=write_policy, pin=pin)
        found = await self._client.call("POST", "/v1/sessions", body, wait="true")
        return Session(self._client, found)

    async def resume(self, id: str) -> Session:
        """A session of this daemon, or one that another daemon suspended to the shared store."""
        path = session_path(id, "/resume")
        return Session(self._client, await self._client.call("POST", path, {}, wait="true"))

    async def get(self, id: str) -> Session:
        return Session(self._client, await self._client.call("GET", session_path(id)))

    async def list(self, *, state: str | None = None, page: int = 100) -> AsyncIterator[Session]:
        """All sessions, oldest first, fetched a page at a time."""
        query, seen = _given(state=state, limit=str(page)), set[str]()
        while True:
            try:
                found = await self._client.call("GET", "/v1/sessions", **query)
            except BadRequestError as error:
                if error.param != "after":
                    raise
                del query["after"]  # it was deleted meanwhile: from the start, past what was seen
                continue
            for data in found["data"]:
                if data["id"] not in seen:
                    seen.add(data["id"])
                    yield Session(self._client, data)
            if not found["has_more"]:
                return
            query["after"] = found["last_id"]

    async def delete(self, id: str) -> None:
        await self._client.call("DELETE", session_path(id))


def _given(**values: Any) -> Json:
    return {name: value for name, value in values.items() if value is not None}


class Session:
    """One session. ``info`` is what the daemon last said of it. Leaving its context suspends it."""

    def __init__(self, client: AsyncTierd, info: Json) -> None:
        self._client = client
        self.info = info
        self._deleted = False

    def __repr__(self) -> str:
        return f"<Session {self.id!r} {self.state}, {self.tokens:,} tokens>"

    @property
    def id(self) -> str:
        return str(self.info["id"])

    @property
    def tokens(self) -> int:
        return int(self.info["tokens"])

    @property
    def state(self) -> str:
        return str(self.info["state"])

    def _path(self, verb: str = "") -> str:
        return session_path(self.id, verb)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if not self._deleted:
                await self._suspend_when_free()
        except TierdError:
            if error is None:
                raise

    async def _suspend_when_free(self) -> None:
        """A stream that was left before its end keeps the session busy for a moment."""
        until_s = time.monotonic() + _LEFT_S
        while (await self.refresh()).state not in ("suspended", "suspending"):
            try:
                await self.suspend()
            except SessionBusyError:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(0.05)

    async def refresh(self) -> Session:
        self.info = await self._client.call("GET", self._path())
        return self

    async def append(
        self,
        *,
        messages: Sequence[Message] | None = None,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> Json:
        """Compute new words; returns usage. Guarded: never done twice."""
        body = _given(messages=messages, text=text, token_ids=token_ids)
        body["expected_tokens"] = self.tokens
        found: Json = await self._client.call("POST", self._path("/append"), body, wait="true")
        self.info["tokens"] = found["tokens"]
        return found

    async def generate(self, prompt: str | None = None, **options: Any) -> Json:
        """The whole answer. ``prompt`` is a user's message; raw words go in ``text=``."""
        body = self._generate_body(prompt, options)
        found: Json = await self._client.call("POST", self._path("/generate"), body)
        self.info["tokens"] = found["tokens"]
        return found

    async def stream(self, prompt: str | None = None, **options: Any) -> AsyncIterator[StreamEvent]:
        """The answer as it comes; the last event is ``done``, with usage in ``result``."""
        body = self._generate_body(prompt, options) | {"stream": True}
        async with aclosing(self._client.stream(self._path("/generate"), body)) as events:
            async for name, data in events:
                if name == "progress":
                    yield StreamEvent("progress", done=data["done"], total=data["total"])
                elif name == "tokens":
                    yield StreamEvent("tokens", data["text"], tuple(data["token_ids"]))
                elif name == "done":
                    self.info["tokens"] = data["tokens"]
                    yield StreamEvent("done", data["text"], result=data)

    def _generate_body(self, prompt: str | None, options: Json) -> Json:
        body = {"expected_tokens": self.tokens, **_given(**options)}
        if prompt is not None:
            body["messages"] = [{"role": "user", "content": prompt}]
        return body

    async def fork(self, id: str | None = None, at: int | None = None) -> Session:
        body = _given(id=id, at=at)
        return Session(self._client, await self._client.call("POST", self._path("/fork"), body))

    async def suspend(self, tier: Literal["host", "store"] | None = None) -> Session:
        """Durable in the store when this returns, if there is a store."""
        body = _given(tier=tier)
        self.info = await self._client.call("POST", self._path("/suspend"), body, wait="true")
        return self

    async def resume(self) -> Session:
        self.info = await self._client.call("POST", self._path("/resume"), {}, wait="true")
        return self

    async def rewind(self, to: int) -> Session:
        self.info = await self._client.call("POST", self._path("/rewind"), {"to": to})
        return self

    async def pin(self, ttl: float | None = None) -> Session:
        self.info = await self._client.call("PUT", self._path("/pin"), _given(ttl=ttl))
        return self

    async def unpin(self) -> Session:
        found = await self._client.call("DELETE", self._path("/pin"))
        self.info = found or (await self.refresh()).info
        return self

    async def residency(self) -> list[Json]:
        found: list[Json] = (await self._client.call("GET", self._path("/residency")))["residency"]
        return found

    async def resume_points(self) -> list[int]:
        found = await self._client.call("GET", self._path("/resume_points"))
        return list(found["positions"])

    async def close(self) -> None:
        """Delete the session and what only it had stored."""
        await self._client.call("DELETE", self._path())
        self._deleted = True


class Forking(Awaitable[Session]):
    """A fork to come: ``await`` it, or ``async with`` it."""

    def __init__(self, source: Session, id: str | None, at: int | None) -> None:
        self._source, self._id, self._at = source, id, at
        self._made: Session | None = None

    def __await__(self) -> Generator[Any, None, Session]:
        return self._source.fork(self._id, self._at).__await__()

    async def __aenter__(self) -> Session:
        self._made = await self
        return self._made

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._made is not None
        await self._made.__aexit__(kind, error, trace)
