"""Server-sent events with back-pressure: nothing is taken from the engine that was not sent on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec
from aiohttp import web

from dsv4_tierd.daemon.run import Run, RunEvent
from dsv4_tierd.engine.messages import Done, Tokens

SEND_BUFFER_BYTES = 64 << 10  # what a client that does not read can cost


class ClientStalled(ConnectionResetError):
    """The client has not read for too long; its stream is given up."""


class EventStream:
    """One SSE response. ``open`` sends the headers; every write waits for the client."""

    def __init__(self, request: web.Request, stall_s: float) -> None:
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        self._request = request
        self._stall_s = stall_s

    async def open(self) -> None:
        transport = self._request.transport
        if transport is not None:
            transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES // 4)
            sock = transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Raises ConnectionResetError when the client is gone or has stalled."""
        await self._within_stall(self.response.write(data))

    async def _within_stall(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await sending
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()  # closing would wait for it to read
            raise ClientStalled("the client does not read") from error

    async def event(self, data: Any, name: str | None = None) -> None:
        head = b"" if name is None else b"event: " + name.encode() + b"\n"
        body = data if isinstance(data, bytes) else msgspec.json.encode(data)
        await self.write(head + b"data: " + body + b"\n\n")

    async def comment(self, text: str) -> None:
        await self.write(b": " + text.encode() + b"\n\n")

    async def close(self) -> None:
        """Raises as ``write``."""
        await self._within_stall(self.response.write_eof())


async def events_of(
    run: Run, first: RunEvent | None, keepalive_s: float
) -> AsyncIterator[RunEvent | None]:
    """A run's events to its Done; None when it is time for a sign of life.

    Credit is given for a token when the loop body, which sends it on, comes back for more.
    """
    event = first
    while True:
        yield event
        if isinstance(event, Done):
            return
        if isinstance(event, Tokens):
            await run.credit(len(event.token_ids))
        event = await run.next(keepalive_s)
