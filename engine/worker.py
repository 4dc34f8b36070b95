"""The engine's process: one thread runs the loop, two move frames. Ends when its socket closes."""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import socket
import struct
import sys
import threading
from collections import deque

import msgspec
from tokenizers import Tokenizer

from dsv4_tierd.engine.build import (
    Layouts,
    build_engine,
    load_model,
    open_store,
    resolved,
    row_kind,
    store_identity,
)
from dsv4_tierd.engine.config import EngineConfig
from dsv4_tierd.engine.gpu.runner import DeviceRunner
from dsv4_tierd.engine.gpu.warm import warm
from dsv4_tierd.engine.loop import Engine
from dsv4_tierd.engine.messages import (
    FRAME_BYTES_MAX,
    LoadProgress,
    LookupPrefix,
    Ready,
    ToDaemon,
    ToWorker,
)
from dsv4_tierd.engine.model.config import ConfigError, load_config
from dsv4_tierd.engine.model.folder import WeightsError
from dsv4_tierd.engine.model.presets import model_name
from dsv4_tierd.engine.verbs import Verbs
from dsv4_tierd.engine.vocabulary import find_tokenizer
from dsv4_tierd.tiering.errors import TierError

log = logging.getLogger("dsv4_tierd.engine")

INBOX_MAX = 1024
OUTBOX_MAX = 4096
IDLE_WAIT_S = 0.02
LENGTH = struct.Struct("<I")
CANNOT_START = (TierError, ConfigError, WeightsError, MemoryError)  # a setting's or file's fault


class FrameTooLong(Exception):
    """What came is no frame of the daemon's."""


def _frame(sock: socket.socket) -> bytes:
    """The next frame's body. Raises EOFError, OSError, FrameTooLong."""
    (size,) = LENGTH.unpack(_exactly(sock, LENGTH.size))
    if size > FRAME_BYTES_MAX:
        raise FrameTooLong(f"a frame of {size} bytes")
    return _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = sock.recv(min(left, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_config(sock: socket.socket) -> EngineConfig:
    """The first frame, as JSON. Raises EOFError, msgspec.DecodeError.

    Not an argument: everyone on the machine may read those, and a store's URL may hold a password.
    """
    return EngineConfig.from_json(_frame(sock))


class Channel:
    """Frames in and out over a stream socket, each by its own thread, bounded both ways."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self.inbox: queue.Queue[ToWorker | None] = queue.Queue(INBOX_MAX)
        self._outbox: queue.Queue[bytes] = queue.Queue(OUTBOX_MAX)
        threading.Thread(target=self._read, name="socket-read", daemon=True).start()
        threading.Thread(target=self._write, name="socket-write", daemon=True).start()

    def send(self, message: ToDaemon) -> None:
        """Queue one message; credit keeps what is in flight below the bound."""
        body = msgspec.msgpack.encode(message)
        self._outbox.put(LENGTH.pack(len(body)) + body)

    def _read(self) -> None:
        try:
            while True:
                self.inbox.put(self._decoder.decode(_frame(self._sock)))
        except (EOFError, OSError):
            pass
        except FrameTooLong as error:
            log.error("%s: the connection is given up", error)  # noqa: TRY400  no bug of ours
        except msgspec.DecodeError:
            log.exception("what came is no message: the connection is given up")
        self.inbox.put(None)

    def _write(self) -> None:
        try:
            while True:
                self._sock.sendall(self._outbox.get())
        except OSError:
            os._exit(0)  # the daemon is gone, and with it every reason to go on


def load(channel: Channel, config: EngineConfig) -> tuple[Engine, Verbs]:
    """All that serving needs; says Ready. Raises what CANNOT_START names, or a bug's error."""
    channel.send(LoadProgress(stage="weights", done=0, total=1))
    config = resolved(config, load_config(config.model))
    model = load_model(config)
    channel.send(LoadProgress(stage="weights", done=1, total=1))
    layouts = Layouts.of(model.config, row_kind(config.kv_dtype))
    identity = store_identity(config, model.config, layouts)
    store = open_store(config, identity)
    tokenizer_file = find_tokenizer(config.model, model.config.vocab_size)
    tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file is not None else None
    engine, verbs, sizes = build_engine(
        config,
        model,
        channel.send,
        tokenizer,
        store,
        identity.digest,
        lambda done, total: channel.send(LoadProgress(stage="pinning", done=done, total=total)),
    )
    if isinstance(engine.runner, DeviceRunner):
        warm(
            engine.runner,
            engine.options.chunk_tokens,
            lambda done, total: channel.send(LoadProgress(stage="kernels", done=done, total=total)),
        )
    channel.send(
        Ready(
            model_id=model_name(config.model),
            vocab_size=model.config.vocab_size,
            context_length=sizes.context_tokens,
            model_context_length=model.config.max_position_embeddings,
            has_tokenizer=tokenizer is not None,
            eos_token_ids=model.config.eos_token_ids,
            identity=identity.digest.hex(),
            plan=sizes.bytes_by_pool,
        )
    )
    return engine, verbs


def serve(channel: Channel, engine: Engine, verbs: Verbs) -> None:
    """Run until the socket closes. A lookup does not wait for a step's end, all else does."""
    held: deque[ToWorker | None] = deque()  # what came during the step

    def answer_lookups() -> None:
        """They read the tree, which no layer does. Not AskStats: it waits for the device."""
        for _ in range(min(channel.inbox.qsize(), INBOX_MAX - len(held))):
            message = channel.inbox.get_nowait()
            if isinstance(message, LookupPrefix):
                verbs.handle(message)
            else:
                held.append(message)

    def following(wait: bool) -> ToWorker | None:
        return held.popleft() if held else channel.inbox.get(block=wait, timeout=IDLE_WAIT_S)

    engine.runner.at_border = answer_lookups
    busy = True
    while True:
        try:
            message = following(wait=not busy)
            while message is not None:
                verbs.handle(message)
                message = following(wait=False)
            break  # the socket closed
        except queue.Empty:
            pass
        verbs.poll()
        busy = engine.step()
    engine.tiers.coordinator.close()


def main() -> None:
    """``python -m dsv4_tierd.engine.worker --socket-fd N``; the rest comes over the socket."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--socket-fd", type=int, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides when to stop
    sock = socket.socket(fileno=arguments.socket_fd)
    try:
        config = read_config(sock)
    except EOFError:
        return  # the daemon is gone already
    try:
        channel = Channel(sock)
        try:
            engine, verbs = load(channel, config)
        except CANNOT_START as error:
            log.error("the engine cannot start: %s", error)  # noqa: TRY400  no bug of ours
            os._exit(1)
        serve(channel, engine, verbs)
    except BaseException:
        log.exception("the engine ends")
        os._exit(1)  # a store call that hangs must not keep a dead engine's socket open


if __name__ == "__main__":
    main()
