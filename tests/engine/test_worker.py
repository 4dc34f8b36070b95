"""The engine's process at its edges: what is no message, and an end while the store hangs."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dsv4_tierd.engine.messages import FRAME_BYTES_MAX, AskStats
from dsv4_tierd.engine.worker import LENGTH, Channel
from small_models import Model

DYING = """
import threading
from concurrent.futures import ThreadPoolExecutor
from dsv4_tierd.engine import worker

hanging = ThreadPoolExecutor(1)

def serve(channel, engine, verbs):
    hanging.submit(threading.Event().wait)
    raise AssertionError("a bug in a step")

worker.load = lambda channel, config: (None, None)
worker.serve = serve
worker.main()
"""


@pytest.mark.parametrize(
    "frame", [LENGTH.pack(3) + b"xyz", LENGTH.pack(FRAME_BYTES_MAX + 1)], ids=["junk", "huge"]
)
def test_what_is_no_message_ends_the_connection(frame: bytes) -> None:
    """Messages before it are taken; then the inbox says that the socket is closed."""
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    message = msgspec.msgpack.encode(AskStats(op_id=7))
    ours.sendall(LENGTH.pack(len(message)) + message + frame)
    assert channel.inbox.get(timeout=60) == AskStats(op_id=7)
    assert channel.inbox.get(timeout=60) is None
    ours.close()


def run_worker(theirs: socket.socket) -> subprocess.CompletedProcess[str]:
    """A worker on its end of a connection, until it has ended."""
    return subprocess.run(
        [sys.executable, "-m", "dsv4_tierd.engine.worker", "--socket-fd", str(theirs.fileno())],
        pass_fds=(theirs.fileno(),),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_an_engine_whose_daemon_is_gone_ends_quietly() -> None:
    """Before it was told what to be: nothing is loaded, nothing is said, exit code 0."""
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        done = run_worker(theirs)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "none"}, "none/config.json does not exist"),
        ({"device_budget_bytes": 1024}, "device budget 1024 B holds no session"),
        ({"host_budget_bytes": 0}, "host budget 0 B holds no session"),
        ({"store": "disk:/dev/null/x"}, "/dev/null/x"),
    ],
)
def test_what_an_engine_cannot_start_with_is_one_line(
    models: Callable[..., Model], settings: dict[str, Any], said: str
) -> None:
    """A missing checkpoint, a budget, a store folder: named, without a trace; exit code 1."""
    ours, theirs = socket.socketpair()
    config = msgspec.json.encode({"model": str(models().folder), "device": "cpu"} | settings)
    ours.sendall(LENGTH.pack(len(config)) + config)
    with ours, theirs:
        done = run_worker(theirs)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert said in done.stderr


def test_an_engine_that_fails_ends_though_the_store_hangs() -> None:
    """Its socket closes at once, so that the daemon starts another."""
    ours, theirs = socket.socketpair()
    config = b'{"model": "none"}'
    ours.sendall(LENGTH.pack(len(config)) + config)
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-c", DYING, "--socket-fd", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert "a bug in a step" in done.stderr
