"""The wire: whatever a peer sends, a reply is whole, or an error comes within the deadline."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dsv4_tierd.tiering.store.resp import ProtocolBroken, ReplyError, Wire


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    """A wire and what is at its other end."""
    ours, theirs = socket.socketpair()
    yield Wire(ours), theirs
    ours.close()
    theirs.close()


def soon(seconds: float = 2.0) -> float:
    return time.monotonic() + seconds


@pytest.mark.parametrize(
    ("data", "reply"),
    [
        (b"+OK\r\n", b"OK"),
        (b":-12\r\n", -12),
        (b"$-1\r\n", None),
        (b"*-1\r\n", None),
        (b"$0\r\n\r\n", b""),
        (b"$6\r\na\r\nb\r\n\r\n", b"a\r\nb\r\n"),
        (b"*0\r\n", []),
        (b"*3\r\n:1\r\n*2\r\n$1\r\nx\r\n$-1\r\n+y\r\n", [1, [b"x", None], b"y"]),
    ],
)
def test_every_kind_of_reply(ends: tuple[Wire, socket.socket], data: bytes, reply) -> None:
    """In one piece, a byte at a time, and two in a row."""
    wire, peer = ends
    peer.sendall(data + data)
    assert wire.call(["X"], soon()) == reply
    assert wire.call(["X"], soon()) == reply

    def drip() -> None:
        for i in range(len(data)):
            peer.sendall(data[i : i + 1])
            time.sleep(0.001)

    thread = threading.Thread(target=drip)
    thread.start()
    assert wire.call(["X"], soon()) == reply
    thread.join()


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"?\r\n",
        b":one\r\n",
        b"$x\r\n",
        b"$999999999999\r\n",
        b"*99999999\r\n",
        b"*1\r\n" * 20,
        b"$3\r\nabcde\r\n",
        b"+" + b"x" * 70_000,
        b"\r\n",
    ],
)
def test_what_is_not_a_reply(ends: tuple[Wire, socket.socket], data: bytes) -> None:
    """Nonsense is refused before anything is allocated for it."""
    wire, peer = ends
    thread = threading.Thread(target=lambda: peer.sendall(data))
    thread.start()
    with pytest.raises(ProtocolBroken):
        wire.call(["X"], soon())
    thread.join()


def test_an_error_reply_leaves_the_wire_usable(ends: tuple[Wire, socket.socket]) -> None:
    """Its code is its first word; the next reply is the next."""
    wire, peer = ends
    peer.sendall(b"-OOM too much\r\n+OK\r\n*2\r\n")
    with pytest.raises(ReplyError) as caught:
        wire.call(["X"], soon())
    assert caught.value.code == "OOM"
    assert wire.call(["X"], soon()) == b"OK"


def test_the_deadline_holds_for_a_trickle(ends: tuple[Wire, socket.socket]) -> None:
    """A byte every 20 ms never ends, and the call does."""
    wire, peer = ends
    stop = threading.Event()

    def drip() -> None:
        peer.sendall(b"$1000\r\n")
        while not stop.wait(0.02):
            peer.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        wire.call_into(["X"], [memoryview(bytearray(1000))], soon(0.2))
    assert time.monotonic() - begun < 3
    stop.set()
    thread.join()


def test_a_peer_that_does_not_read(ends: tuple[Wire, socket.socket]) -> None:
    """Sending ends at the deadline as well."""
    wire, _ = ends
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        wire.call(["SET", "k", bytes(8 << 20)], soon(0.2))
    assert time.monotonic() - begun < 3


def test_a_peer_that_goes(ends: tuple[Wire, socket.socket]) -> None:
    """In the middle of a reply: a connection error, at once."""
    wire, peer = ends
    peer.sendall(b"$10\r\nabc")
    peer.close()
    with pytest.raises(ConnectionError):
        wire.call(["X"], soon())


@pytest.mark.parametrize("seed", range(8))
def test_bytes_go_where_they_belong(ends: tuple[Wire, socket.socket], seed: int) -> None:
    """Any split into targets, any chunking by the network; then an ordinary reply."""
    wire, peer = ends
    chance = random.Random(seed)
    payload = chance.randbytes(chance.choice([0, 1, 100, 70_000, 300_000]))
    sizes = sorted(chance.randint(0, len(payload)) for _ in range(3))
    targets = [
        memoryview(bytearray(b - a))
        for a, b in zip([0, *sizes], [*sizes, len(payload)], strict=True)
    ]
    data = b"$%d\r\n" % len(payload) + payload + b"\r\n+OK\r\n"

    def send() -> None:
        at = 0
        while at < len(data):
            size = chance.choice([1, 7, 4000, 100_000])
            peer.sendall(data[at : at + size])
            at += size

    thread = threading.Thread(target=send)
    thread.start()
    assert wire.call_into(["X"], targets, soon()) == len(payload)
    assert b"".join(targets) == payload
    assert wire.call(["X"], soon()) == b"OK"
    thread.join()


def test_less_than_asked_for_is_dropped(ends: tuple[Wire, socket.socket]) -> None:
    """A shorter value is told by its length, a longer one is no reply to this question."""
    wire, peer = ends
    target = memoryview(bytearray(b"-" * 10))
    peer.sendall(b"$4\r\nabcd\r\n$-1\r\n$11\r\n")
    assert wire.call_into(["X"], [target], soon()) == 4
    assert bytes(target) == b"-" * 10
    assert wire.call_into(["X"], [target], soon()) == 0
    with pytest.raises(ProtocolBroken):
        wire.call_into(["X"], [target], soon())


@pytest.mark.parametrize("seed", range(4))
def test_commands_arrive_as_they_are(ends: tuple[Wire, socket.socket], seed: int) -> None:
    """Small and large arguments, values in pieces, text and numbers: one well-formed command."""
    wire, peer = ends
    chance = random.Random(seed)
    pieces = [chance.randbytes(chance.choice([0, 10, 20_000, 200_000])) for _ in range(300)]
    args = ["SET", b"key", [memoryview(piece) for piece in pieces], "ä", -7]
    parts = [b"SET", b"key", b"".join(pieces), "ä".encode(), b"-7"]
    expected = b"*5\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
    got = bytearray()

    def receive() -> None:
        while len(got) < len(expected):
            got.extend(peer.recv(1 << 20))
        peer.sendall(b"+OK\r\n")

    thread = threading.Thread(target=receive)
    thread.start()
    assert wire.call(args, soon(10)) == b"OK"
    thread.join()
    assert got == expected
