"""One request that the engine works on, between the bridge that feeds it and the one who reads.

The reader may be slow, or gone: what it has not read is bounded by the credit it gave, and the
session's words are kept by the service, not by the reader.
"""

from __future__ import annotations

import array
import asyncio
from collections import deque

from dsv4_tierd.daemon.bridge import Bridge, RequestMessage
from dsv4_tierd.engine.messages import Cancel, Credit, Done, Failed, Progress, Tokens
from dsv4_tierd.tiering.errors import TierError, from_code

RunEvent = Progress | Tokens | Done
NO_LIMIT = 1 << 30


class Run:
    """A submitted request. ``feed`` is the bridge's side, ``next`` and ``cancel`` the reader's."""

    def __init__(self, request_id: str, bridge: Bridge, credit: int) -> None:
        self.request_id = request_id
        self.generated = array.array("i")
        self.progress: Progress | None = None
        self.flooded = False
        self.ended: asyncio.Future[Done | Failed] = asyncio.get_running_loop().create_future()
        self._bridge = bridge
        self._credit = credit
        self._limited = credit < NO_LIMIT
        self._ready: deque[RunEvent | Failed] = deque()
        self._wake = asyncio.Event()
        self._abandoned = False

    def feed(self, message: RequestMessage) -> None:
        match message:
            case Tokens():
                self._take(message)
            case Progress():
                self.progress = message
                if self._ready and isinstance(self._ready[-1], Progress):
                    self._ready.pop()  # only the newest matters
                self._offer(message)
            case Done() | Failed():
                if not self.ended.done():
                    self.ended.set_result(message)

    def _take(self, message: Tokens) -> None:
        self.generated.extend(message.token_ids)
        self._credit -= len(message.token_ids)
        if self._limited and self._credit < 0:
            self.flooded = True  # the worker ignores credit: stop listening before memory fills
            self._ready.clear()
            return
        self._offer(message)

    def _offer(self, message: RunEvent | Failed) -> None:
        if not self._abandoned:
            self._ready.append(message)
            self._wake.set()

    @property
    def is_abandoned(self) -> bool:
        """Whether its reader has left."""
        return self._abandoned

    def publish_end(self, end: Done | Failed) -> None:
        """The service has made the end durable: the reader may see it."""
        self._offer(end)

    async def next(self, timeout_s: float | None = None) -> RunEvent | None:
        """The next event; None after ``timeout_s`` without one. Done is the last.

        Raises the TierError that ended the request.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._ready:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return None
        event = self._ready.popleft()
        if isinstance(event, Failed):
            raise error_of(event)
        return event

    async def credit(self, tokens: int) -> None:
        """The reader has passed on ``tokens`` more."""
        if self._limited and tokens and not self.ended.done() and not self._bridge.closed:
            self._credit += tokens
            await self._bridge.send(Credit(request_id=self.request_id, tokens=tokens))

    def cancel(self) -> None:
        """Nobody reads any more: drop what waits and tell the engine. Never blocks or raises."""
        self._abandoned = True
        self._ready.clear()
        self.stop()

    def stop(self) -> None:
        """The engine shall end it; what it has drawn can still be read. Never blocks or raises."""
        if not self.ended.done():
            self._bridge.send_soon(Cancel(request_id=self.request_id))

    def restart(self, bridge: Bridge) -> None:
        """It was refused before it began, and is asked for once more."""
        self._bridge = bridge
        self.ended = asyncio.get_running_loop().create_future()


def error_of(failed: Failed) -> TierError:
    """The error that a Failed names."""
    return from_code(failed.code, failed.message, retry_after_s=failed.retry_after_s)
