"""A TCP proxy in front of a Redis that misbehaves at a chosen command or byte.

Commands are counted over all connections from ``arm`` on, but for those that the store's
background thread sends (``QUIET``), so that the n-th command of a call is always the same one.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from enum import Enum

QUIET = frozenset([b"GET", b"TIME", b"HLEN", b"XREVRANGE", b"AUTH", b"CLIENT", b"SELECT", b"INFO"])
CHUNK_BYTES = 256 << 10


class Fault(Enum):
    """What happens at the chosen command."""

    CUT_BEFORE = "the connection ends before the command goes out"
    CUT_WITHIN = "the connection ends when `byte` bytes of the command have gone out"
    CUT_AFTER = "the command is carried out, its reply never comes"
    CUT_REPLY = "the connection ends when `byte` bytes of the reply have come"
    CORRUPT_REPLY = "one bit of the reply's byte `byte` comes wrong"
    STALL = "the reply waits until `release`"
    TRICKLE = "the reply comes a byte at a time, ten a second"


@dataclass(slots=True)
class Plan:
    """``command``: its number, from 1, among those that hold the bytes ``words``.

    ``byte``: within the command or the reply, ``bit``: of that byte.
    """

    fault: Fault
    command: int
    byte: int = 0
    bit: int = 0
    words: bytes = b""


class _Pair:
    """One client's connection and ours to the server. ``replies`` is what befalls its reply."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self.proxy, self.client = proxy, client
        self.server = socket.create_connection(("127.0.0.1", proxy.target))
        self.replies: Plan | None = None
        self.passed = 0
        for work in (self._up, self._down):
            threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        for sock in (self.client, self.server):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _up(self) -> None:
        buffer = bytearray()
        try:
            while data := self.client.recv(CHUNK_BYTES):
                buffer += data
                while size := command_size(buffer):
                    self._command(bytes(buffer[:size]))
                    del buffer[:size]
        except OSError:
            pass
        self.close()

    def _command(self, data: bytes) -> None:
        plan = self.proxy.counted(data)
        if plan is not None and plan.fault is Fault.CUT_BEFORE:
            raise ConnectionAbortedError
        if plan is not None and plan.fault is Fault.CUT_WITHIN:
            self.server.sendall(data[: plan.byte])
            raise ConnectionAbortedError
        if plan is not None:
            self.replies, self.passed = plan, 0
        self.server.sendall(data)

    def _down(self) -> None:
        try:
            while data := self.server.recv(CHUNK_BYTES):
                self.proxy.open_gate.wait()
                if self.proxy.delay_s:
                    time.sleep(self.proxy.delay_s)
                self._reply(data)
        except OSError:
            pass
        self.close()
        self.client.close()
        self.server.close()

    def _reply(self, data: bytes) -> None:
        plan = self.replies
        if plan is None:
            self.client.sendall(data)
            return
        if plan.fault is Fault.CUT_AFTER:
            raise ConnectionAbortedError
        if plan.fault is Fault.CUT_REPLY:
            self.client.sendall(data[: max(0, plan.byte - self.passed)])
            self.passed += len(data)
            if self.passed >= plan.byte:
                raise ConnectionAbortedError
            return
        if plan.fault is Fault.STALL:
            self.proxy.released.wait()
        if plan.fault is Fault.TRICKLE:
            for i in range(len(data)):
                self.client.sendall(data[i : i + 1])
                if self.proxy.released.wait(0.1):
                    break
            raise ConnectionAbortedError
        at = plan.byte - self.passed
        if plan.fault is Fault.CORRUPT_REPLY and 0 <= at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << plan.bit]) + data[at + 1 :]
            self.replies = None
        self.passed += len(data)
        self.client.sendall(data)


class Proxy:
    """Listens on loopback. ``commands``: the verbs that were counted."""

    def __init__(self, target: int, quiet: frozenset[bytes] = QUIET) -> None:
        self.target, self.quiet = target, quiet
        self.commands: list[bytes] = []
        self.delay_s = 0.0
        self.open_gate, self.released = threading.Event(), threading.Event()
        self.open_gate.set()
        self._plan: Plan | None = None
        self._left = 0  # commands of the plan's until its own
        self._lock = threading.Lock()
        self._pairs: list[_Pair] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def arm(
        self,
        fault: Fault | None = None,
        command: int = 1,
        byte: int = 0,
        bit: int = 0,
        words: bytes = b"",
    ) -> None:
        """Count from here on; ``fault`` happens once, at that command."""
        with self._lock:
            self.commands = []
            self.released.clear()
            self._left = command
            self._plan = None if fault is None else Plan(fault, command, byte, bit, words)

    @property
    def armed(self) -> bool:
        """Whether the fault is still to come."""
        return self._plan is not None

    def stop(self) -> None:
        """Nothing comes back any more, on any connection, until ``go``."""
        self.open_gate.clear()

    def go(self) -> None:
        self.open_gate.set()

    def release(self) -> None:
        """What is stalled goes on."""
        self.released.set()

    def cut_all(self) -> None:
        """Every connection ends now."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.close()

    def counted(self, data: bytes) -> Plan | None:
        """The fault that is due at this command."""
        words = data.split(b"\r\n", 6)
        verb = words[2]
        if verb in self.quiet or (verb == b"XREAD" and b"BLOCK" in data[:120]):
            return None
        with self._lock:
            self.commands.append(verb)
            plan = self._plan
            if plan is None or plan.words not in data:
                return None
            self._left -= 1
            if self._left:
                return None
            self._plan = None
            return plan

    def close(self) -> None:
        self.go()
        self.release()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.cut_all()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                pair = _Pair(self, client)
            except OSError:  # the server is away: so is the proxy
                client.close()
                continue
            with self._lock:
                self._pairs.append(pair)


def command_size(buffer: bytearray) -> int:
    """Bytes of the whole command at the buffer's start; 0 while it is not all there."""
    end = buffer.find(b"\r\n")
    if end < 0:
        return 0
    assert buffer[:1] == b"*", bytes(buffer[:32])
    count, at = int(buffer[1:end]), end + 2
    for _ in range(count):
        end = buffer.find(b"\r\n", at)
        if end < 0:
            return 0
        at = end + 2 + int(buffer[at + 1 : end]) + 2
    return at if at <= len(buffer) else 0
