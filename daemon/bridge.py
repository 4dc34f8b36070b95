"""One worker incarnation's socket: frames out in order, answers in to whoever waits.

Late, doubled or unknown answers find nobody waiting and are counted, nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from dsv4_tierd.engine.config import EngineConfig
from dsv4_tierd.engine.messages import (
    FRAME_BYTES_MAX,
    Ack,
    Done,
    Failed,
    LoadProgress,
    Progress,
    Ready,
    ToDaemon,
    Tokens,
    ToWorker,
)
from dsv4_tierd.tiering.errors import EngineRestarting, TierError, from_code

_LENGTH = struct.Struct("<I")
RESTART_RETRY_S = 1.0
NOBODY = 0  # op id of messages whose answer is not awaited

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToDaemon] = msgspec.msgpack.Decoder(ToDaemon)

RequestMessage = Progress | Tokens | Done | Failed


class WorkerProtocolError(Exception):
    """The worker sent what cannot be a message; the connection is given up."""


class RequestSink(Protocol):
    """Where one request's messages go. Called on the event loop, never blocks."""

    def feed(self, message: RequestMessage) -> None: ...


def restarting() -> EngineRestarting:
    """The error of everything that needs the engine while there is none."""
    return EngineRestarting(
        "the engine is restarting; sessions are kept", retry_after_s=RESTART_RETRY_S
    )


class Bridge:
    """A connection to a running worker. Bounded: writes wait for the socket, reads by credit."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        incarnation: int,
        on_load: Callable[[LoadProgress], None],
    ) -> None:
        self.incarnation = incarnation
        self.strays = 0
        self.closed = False
        self._reader = reader
        self._writer = writer
        self._on_load = on_load
        self._op_ids = itertools.count(1)
        self._acks: dict[int, asyncio.Future[Ack]] = {}
        self._sinks: dict[str, RequestSink] = {}
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

    def configure(self, config: EngineConfig) -> None:
        """Say what the worker is; before anything else."""
        payload = config.to_json().encode()
        self._writer.write(_LENGTH.pack(len(payload)) + payload)

    async def ready(self) -> Ready:
        """The handshake. Raises EngineRestarting if the worker dies first."""
        return await asyncio.shield(self._ready)

    async def send(self, message: ToWorker) -> None:
        """Queue one frame, in call order; waits while the socket is full."""
        if self.closed:
            raise restarting()
        self.send_soon(message)
        await self._drain()

    async def _drain(self) -> None:
        try:
            await self._writer.drain()
        except (ConnectionError, RuntimeError) as error:
            raise restarting() from error

    def send_soon(self, message: ToWorker) -> None:
        """Queue a frame without waiting for room; for the few that must not wait."""
        if not self.closed:
            payload = _encoder.encode(message)
            assert len(payload) <= FRAME_BYTES_MAX, f"a frame of {len(payload)} bytes"
            self._writer.write(_LENGTH.pack(len(payload)) + payload)

    async def ask(self, make: Callable[[int], ToWorker]) -> Ack:
        """Send a message that has an op id, and wait for its answer.

        Raises the TierError that the Ack names, EngineRestarting if the worker dies.
        """
        if self.closed:
            raise restarting()
        return await self.start_ask(make)

    def start_ask(self, make: Callable[[int], ToWorker]) -> Awaitable[Ack]:
        """Like ``ask``, but the message is on its way when this returns. Await the result once."""
        op_id = next(self._op_ids)
        answer: asyncio.Future[Ack] = asyncio.get_running_loop().create_future()
        self._acks[op_id] = answer
        self.send_soon(make(op_id))
        return self._answer(op_id, answer)

    async def _answer(self, op_id: int, answer: asyncio.Future[Ack]) -> Ack:
        try:
            await self._drain()
            ack = await answer
        finally:
            self._acks.pop(op_id, None)
        if ack.code is not None:
            raise from_code(ack.code, ack.message, retry_after_s=ack.retry_after_s)
        return ack

    def listen(self, request_id: str, sink: RequestSink) -> None:
        assert request_id not in self._sinks
        self._sinks[request_id] = sink

    @property
    def requests(self) -> int:
        return len(self._sinks)

    async def run(self) -> None:
        """Read until the socket closes; then everything in flight fails."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                if length > FRAME_BYTES_MAX:
                    raise WorkerProtocolError(f"a frame of {length} bytes")
                self._dispatch(_decoder.decode(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except msgspec.DecodeError as error:
            raise WorkerProtocolError(str(error)) from error
        finally:
            self.fail_all(restarting())

    def _dispatch(self, message: ToDaemon) -> None:
        match message:
            case Ready():
                if not self._ready.done():
                    self._ready.set_result(message)
            case LoadProgress():
                self._on_load(message)
            case Ack():
                answer = self._acks.get(message.op_id)
                if answer is None or answer.done():
                    self.strays += message.op_id != NOBODY
                else:
                    answer.set_result(message)
            case Done() | Failed():
                self._feed(self._sinks.pop(message.request_id, None), message)
            case _:
                self._feed(self._sinks.get(message.request_id), message)

    def _feed(self, sink: RequestSink | None, message: RequestMessage) -> None:
        if sink is None:
            self.strays += 1
        else:
            sink.feed(message)

    def fail_all(self, error: TierError) -> None:
        """Everything that waits gets ``error``; nothing can be sent any more."""
        self.closed = True
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # nobody may be waiting
        acks: list[asyncio.Future[Any]] = [a for a in self._acks.values() if not a.done()]
        for answer in acks:
            answer.set_exception(error)
        sinks, self._sinks = self._sinks, {}
        for request_id, sink in sinks.items():
            sink.feed(Failed.of(request_id, error))
        self._writer.close()
