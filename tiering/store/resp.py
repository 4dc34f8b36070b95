"""RESP2 over a connected socket: payloads go from the caller's buffers and into them.

redis-py reads a reply into its parser, then into ``bytes``, and the caller copies it out again;
here a record lands where it belongs. Every call has an absolute deadline (``time.monotonic``),
also against a peer that sends one byte at a time. What arrives is bounded and checked: a peer
that talks anything else raises ``ProtocolBroken``.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator, Sequence

Buffer = bytes | bytearray | memoryview
Argument = Buffer | str | int | Sequence[Buffer]  # a sequence is one value in pieces
Reply = int | bytes | None | list["Reply"]

_BUFFER_BYTES = 64 << 10
_JOIN_BYTES = 16 << 10  # below this a copy is cheaper than another piece
_PIECES_MAX = 256
_CHUNK_BYTES = 1 << 20
_REPLY_BYTES_MAX = 256 << 20
_ITEMS_MAX = 1 << 22
_DEPTH_MAX = 8
_CRLF = b"\r\n"


class ProtocolBroken(OSError):
    """The peer sent what no Redis sends; nothing that follows on the connection can be trusted."""


class ReplyError(Exception):
    """An error reply. ``code`` is its first word."""

    @property
    def code(self) -> str:
        """Such as ``OOM``, ``MOVED`` or ``WRONGTYPE``."""
        return str(self).partition(" ")[0]


class Wire:
    """One connection's replies and commands. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._store = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._store)
        self._start = self._end = 0

    def call(self, args: Sequence[Argument], deadline: float) -> Reply:
        """Send a command and return its reply.

        Raises ReplyError, TimeoutError, ProtocolBroken, OSError. After any but ReplyError the
        connection is of no use.
        """
        self._send(args, deadline)
        return self._reply(deadline, 0)

    def batch(
        self, commands: Sequence[Sequence[Argument]], deadline: float
    ) -> list[Reply | ReplyError]:
        """Send small commands at once; their replies in order, errors among them.

        Raises TimeoutError, ProtocolBroken, OSError.
        """
        self._write([piece for args in commands for piece in _pieces(args)], deadline)
        replies: list[Reply | ReplyError] = []
        for _ in commands:
            try:
                replies.append(self._reply(deadline, 0))
            except ReplyError as error:
                replies.append(error)
        return replies

    def call_into(
        self, args: Sequence[Argument], targets: Sequence[memoryview], deadline: float
    ) -> int:
        """Like ``call`` for a bulk reply, which fills ``targets`` in turn.

        Returns its length; one that is shorter than ``targets`` is read and dropped.
        """
        self._send(args, deadline)
        line = self._line(deadline)
        if line[:1] == b"-":
            raise ReplyError(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise ProtocolBroken(f"a bulk reply was expected, got {line[:16]!r}")
        size = _number(line[1:])
        if size < 0:
            return 0
        wanted = sum(len(target) for target in targets)
        if size > wanted:
            raise ProtocolBroken(f"{size} bytes came, {wanted} were asked for")
        for target in targets if size == wanted else [memoryview(bytearray(size))]:
            self._fill(target, deadline)
        self._end_of_bulk(deadline)
        return size

    def check_end(self) -> None:
        """Raises ProtocolBroken: more has come than was asked for, so something came wrong."""
        if self._start != self._end:
            raise ProtocolBroken(f"{self._end - self._start} bytes more than the reply")

    def _send(self, args: Sequence[Argument], deadline: float) -> None:
        self._write(list(_pieces(args)), deadline)

    def _write(self, pieces: Sequence[Buffer], deadline: float) -> None:
        if isinstance(self._sock, ssl.SSLSocket):
            for piece in pieces:
                self._send_one(memoryview(piece).cast("B"), deadline)
            return
        views = [memoryview(piece).cast("B") for piece in pieces]
        while views:
            self._arm(deadline)
            sent = self._sock.sendmsg(views[:_PIECES_MAX])
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if sent:
                views[0] = views[0][sent:]

    def _send_one(self, view: memoryview, deadline: float) -> None:
        while len(view):
            self._arm(deadline)
            view = view[self._sock.send(view[:_CHUNK_BYTES]) :]

    def _reply(self, deadline: float, depth: int) -> Reply:
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-" and depth == 0:  # within a list it would leave the rest unread
            raise ReplyError(rest.decode(errors="replace"))
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            return self._bulk(_number(rest), deadline)
        if kind == b"*" and depth < _DEPTH_MAX:
            count = _number(rest)
            if count > _ITEMS_MAX:
                raise ProtocolBroken(f"an array of {count} items")
            return None if count < 0 else [self._reply(deadline, depth + 1) for _ in range(count)]
        raise ProtocolBroken(f"not a reply: {line[:16]!r}")

    def _bulk(self, size: int, deadline: float) -> bytes | None:
        if size < 0:
            return None
        if size > _REPLY_BYTES_MAX:
            raise ProtocolBroken(f"a reply of {size} bytes")
        if size + 2 <= self._end - self._start:  # the usual case, once a buffer is full
            data = bytes(self._view[self._start : self._start + size])
            self._start += size
        else:
            whole = bytearray(size)
            self._fill(memoryview(whole), deadline)
            data = bytes(whole)
        self._end_of_bulk(deadline)
        return data

    def _end_of_bulk(self, deadline: float) -> None:
        end = bytearray(2)
        self._fill(memoryview(end), deadline)
        if end != _CRLF:
            raise ProtocolBroken("a bulk reply does not end where it should")

    def _line(self, deadline: float) -> bytes:
        while True:
            at = self._store.find(_CRLF, self._start, self._end)
            if at >= 0:
                line = bytes(self._view[self._start : at])
                self._start = at + 2
                return line
            self._receive(deadline)

    def _fill(self, target: memoryview, deadline: float) -> None:
        """Buffered bytes first, then straight from the socket."""
        at = min(len(target), self._end - self._start)
        target[:at] = self._view[self._start : self._start + at]
        self._start += at
        while at < len(target):
            if len(target) - at < _JOIN_BYTES:
                self._receive(deadline)
                count = min(len(target) - at, self._end - self._start)
                target[at : at + count] = self._view[self._start : self._start + count]
                self._start += count
            else:
                self._arm(deadline)
                count = _some(self._sock.recv_into(target[at:]))
            at += count

    def _receive(self, deadline: float) -> None:
        """More bytes into the buffer."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            rest = self._end - self._start
            self._view[:rest] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, rest
        if self._end == _BUFFER_BYTES:
            raise ProtocolBroken(f"a line of more than {_BUFFER_BYTES} bytes")
        self._arm(deadline)
        self._end += _some(self._sock.recv_into(self._view[self._end :]))

    def _arm(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer within the deadline")
        self._sock.settimeout(left)


def _some(count: int) -> int:
    if count == 0:
        raise ConnectionResetError("the server closed the connection")
    return count


def _number(digits: bytes) -> int:
    try:
        return int(digits)
    except ValueError:
        raise ProtocolBroken(f"not a number: {digits[:16]!r}") from None


def _pieces(args: Sequence[Argument]) -> Iterator[Buffer]:
    """The command's bytes; small parts are joined, large ones are the caller's own."""
    small = bytearray(b"*%d\r\n" % len(args))
    for arg in args:
        buffers = _buffers(arg)
        small += b"$%d\r\n" % sum(memoryview(each).nbytes for each in buffers)
        for each in buffers:
            if memoryview(each).nbytes < _JOIN_BYTES:
                small += each
            else:
                yield small
                yield each
                small = bytearray()
        small += _CRLF
    yield small


def _buffers(arg: Argument) -> Sequence[Buffer]:
    if isinstance(arg, str):
        return (arg.encode(),)
    if isinstance(arg, int):
        return (b"%d" % arg,)
    if isinstance(arg, bytes | bytearray | memoryview):
        return (arg,)
    return arg
