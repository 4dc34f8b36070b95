"""The way to the servers: routing, deadlines and a circuit breaker.

redis-py connects (TLS, passwords, Sentinel, the cluster's slots); the bytes then go over
``resp.Wire``. Nothing here waits longer than its deadline, and nothing tries twice, but for one
case: a kept connection that turns out to be closed is replaced at once.

The first call that gets no answer opens the breaker: calls in flight are cut off, later ones
fail without touching the network, and one background thread tries to reconnect.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from dsv4_tierd.tiering.errors import StoreUnavailable
from dsv4_tierd.tiering.store.redis_config import RedisConfig, parse
from dsv4_tierd.tiering.store.resp import Argument, Reply, ReplyError, Wire

log = logging.getLogger(__name__)

VERSION_MIN = (7, 0)
# Error replies that mean "not now", from a server that is alive but cannot serve.
_AWAY = frozenset(
    ["LOADING", "MASTERDOWN", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "NOAUTH", "BUSY", "UNKILLABLE"]
)
_REDIRECTS_MAX = 3
_BATCH = 128
_T = TypeVar("_T")


class OutOfMemory(StoreUnavailable):
    """The server answers, and has no room: reads go on."""


class Link:
    """Connections to one server, one Sentinel service or one cluster. Thread-safe."""

    def __init__(self, config: RedisConfig) -> None:
        """Takes the URL apart; connects to nothing. Raises InvalidRequest."""
        self.config, self.target = parse(config)
        self.trips = 0
        self.down_reason: str | None = "not connected yet"
        self._lock = threading.Lock()
        self._pool: Any = None
        self._cluster: Any = None
        self._busy: set[socket.socket] = set()
        self._closed = False
        self._restores = 0

    # ------------------------------------------------------------ the breaker
    @property
    def up(self) -> bool:
        """Whether calls are made at all."""
        return self.down_reason is None

    def check(self) -> None:
        """Raises StoreUnavailable, at once, while the breaker is open."""
        reason = self.down_reason
        if reason is not None:
            raise StoreUnavailable(f"redis at {self.target.shown} is away: {reason}")

    def trip(self, reason: str) -> None:
        """No more calls until ``restored``; those in flight end now."""
        with self._lock:
            if self.down_reason is None and not self._closed:
                log.warning("store: redis at %s is away: %s", self.target.shown, reason)
                self.trips += 1
            self.down_reason = reason
            busy = list(self._busy)
        for sock in busy:
            with contextlib.suppress(OSError):
                # Not SSLSocket's own, which would take the session from under a read.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def stays_down(self, reason: str) -> None:
        """Why reconnecting failed, for whoever asks."""
        with self._lock:
            if self.down_reason is not None and not self._closed:
                self.down_reason = reason

    def restored(self) -> None:
        """Calls are made again."""
        with self._lock:
            if self._closed or self.down_reason is None:
                return
            self.down_reason = None
            self._restores += 1
        log.info("store: redis at %s is connected", self.target.shown)

    def hang_up(self) -> None:
        """Every call fails from now on, and those in flight end."""
        self._closed = True
        self.trip("the store is closed")

    def close(self) -> None:
        """Let the connections go."""
        self.hang_up()
        self._drop()

    # ------------------------------------------------------------ connecting
    def connect(self) -> None:
        """Fresh connections, each primary asked once. Raises StoreUnavailable."""
        import redis

        self._drop()
        try:
            self._open()
            for pool in self.pools():
                self._greet(pool)
        except StoreUnavailable:
            raise
        except (redis.RedisError, redis.exceptions.RedisClusterException, OSError) as error:
            raise StoreUnavailable(str(error)) from error
        except ReplyError as error:
            raise StoreUnavailable(f"it says {error}") from error

    def _greet(self, pool: Any) -> None:
        """Refuse what is too old; find out that a single server is part of a cluster."""
        end = self._deadline(0)
        reply = self._on(pool, lambda wire: wire.call(["INFO", "server"], end), True)
        server = info_fields(reply)
        version = server.get("valkey_version") or server.get("redis_version", "0")
        if tuple(int(part) for part in version.split(".")[:2]) < VERSION_MIN:
            raise StoreUnavailable(f"Redis {version} is too old: {VERSION_MIN[0]}.0 is needed")
        mode = server.get("redis_mode") or server.get("server_mode")
        if mode == "cluster" and self._cluster is None:
            self._open_cluster()

    def _open(self) -> None:
        import redis

        if self.target.mode == "cluster":
            self._open_cluster()
        elif self.target.mode == "sentinel":
            own = self.target.settings
            names = {key for key in own if key.startswith("sentinel_")}
            sentinel = redis.Sentinel(  # type: ignore[no-untyped-call]
                list(self.target.hosts),
                sentinel_kwargs=self._timeouts()
                | {name.removeprefix("sentinel_"): own[name] for name in names}
                | ({"ssl": True} if self.target.tls else {}),
            )
            settings = self._settings() | {"db": self.target.db}
            for name in ("connection_class", *names):
                settings.pop(name, None)
            if self.target.tls:
                settings["ssl"] = True
            client = sentinel.master_for(self.target.service, **settings)  # type: ignore[no-untyped-call]
            self._pool = client.connection_pool
        else:
            host, port = self.target.hosts[0]
            settings = self._settings() | {"db": self.target.db}
            if "path" not in settings:
                settings |= {"host": host, "port": port}
            self._pool = redis.ConnectionPool(**settings)

    def _open_cluster(self) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.cluster import ClusterNode
        from redis.retry import Retry

        if self.target.db:
            raise StoreUnavailable("a cluster has one database: take /0 or no path")
        settings = self._settings()
        settings.pop("connection_class", None)
        self._cluster = redis.RedisCluster(
            startup_nodes=[ClusterNode(*host) for host in self.target.hosts],  # type: ignore[no-untyped-call]
            retry=Retry(NoBackoff(), 0),
            ssl=self.target.tls,
            **settings,
        )

    def check_master(self) -> None:
        """With Sentinel: open the breaker when it names another master than the one in use.

        A demoted master goes on answering for some seconds, and what it takes then is lost.
        """
        import redis

        pool = self._pool
        if self.target.mode != "sentinel" or pool is None:
            return
        before = pool.master_address
        try:
            if before not in (None, pool.get_master_address()):
                self.trip("Sentinel names another master")
        except redis.RedisError as error:
            log.warning("store: no Sentinel answers, the master stays: %s", type(error).__name__)

    def _timeouts(self) -> dict[str, Any]:
        seconds = self.config.connect_timeout_s
        return {"socket_timeout": seconds, "socket_connect_timeout": seconds, "protocol": 2}

    def _settings(self) -> dict[str, Any]:
        own = {"username": self.target.username, "password": self.target.password}
        keep_alive = {} if "path" in self.target.settings else {"socket_keepalive": True}
        return self.target.settings | self._timeouts() | keep_alive | own

    def _drop(self) -> None:
        """Idle connections only: those in use end with their calls, in their own threads."""
        pool, cluster, self._pool, self._cluster = self._pool, self._cluster, None, None
        nodes = [] if cluster is None else cluster.get_nodes()
        pools = [node.redis_connection.connection_pool for node in nodes if node.redis_connection]
        for each in [pool, *pools]:
            if each is not None:
                each.disconnect(inuse_connections=False)

    def pools(self) -> list[Any]:
        """One pool of connections a primary. Raises StoreUnavailable."""
        if self._cluster is None:
            return [self._pool_for(b"")]
        return [
            self._cluster.get_redis_connection(node).connection_pool
            for node in self._cluster.get_primaries()
        ]

    def _pool_for(self, key: bytes) -> Any:
        cluster, pool = self._cluster, self._pool
        if cluster is not None:
            return cluster.get_redis_connection(cluster.get_node_from_key(key)).connection_pool
        if pool is None:
            raise StoreUnavailable(f"redis at {self.target.shown} is away")
        return pool

    # ------------------------------------------------------------ calls
    def call(
        self, key: bytes, *args: Argument, size: int = 0, wait_s: float = 0.0, probe: bool = False
    ) -> Reply:
        """One command to the server that holds ``key``.

        ``size``: bytes that it carries, ``wait_s``: seconds for which the server may block: both
        extend the deadline. ``probe``: also while the breaker is open.
        Raises StoreUnavailable (OutOfMemory where that is why).
        """
        end = self._deadline(size) + wait_s
        return self._routed(key, lambda wire: wire.call(args, end), end, probe=probe)

    def read(self, key: bytes, start: int, targets: Sequence[memoryview]) -> int:
        """Fill ``targets`` with a value's bytes from ``start``; returns how many there were.

        Fewer than asked for: ``targets`` hold nothing of use. 0: there is no value.
        """
        size = sum(len(target) for target in targets)
        end = self._deadline(size)
        args: list[Argument] = ["GETRANGE", key, start, start + size - 1]
        return self._routed(key, lambda wire: wire.call_into(args, targets, end), end)

    def many(
        self, commands: Sequence[tuple[Argument, bytes, *tuple[Argument, ...]]]
    ) -> list[Reply]:
        """Small commands (verb, key, …) that may be repeated, a round trip for 128. As ``call``."""
        self.check()
        spread: dict[int, tuple[Any, list[int]]] = {}
        pools = self._guarded(lambda: [self._pool_for(command[1]) for command in commands])
        for i, pool in enumerate(pools):
            spread.setdefault(id(pool), (pool, []))[1].append(i)
        replies: list[Reply] = [None] * len(commands)
        for pool, indexes in spread.values():
            for at in range(0, len(indexes), _BATCH):
                some = indexes[at : at + _BATCH]
                for i, reply in zip(
                    some, self._batch(pool, [commands[i] for i in some]), strict=True
                ):
                    if isinstance(reply, ReplyError):  # moved, or worse: by itself
                        verb, key, *rest = commands[i]
                        replies[i] = self.call(key, verb, key, *rest)
                    else:
                        replies[i] = reply
        return replies

    def _batch(self, pool: Any, commands: Sequence[Sequence[Argument]]) -> list[Reply | ReplyError]:
        end = self._deadline(0)
        return self._guarded(lambda: self._on(pool, lambda w: w.batch(commands, end), False))

    def ask(self, pool: Any, *args: Argument) -> Reply:
        """One command to one of ``pools()``. Raises as ``call``."""
        self.check()
        end = self._deadline(0)
        return self._guarded(lambda: self._on(pool, lambda wire: wire.call(args, end), False))

    def _deadline(self, size: int) -> float:
        return time.monotonic() + self.config.deadline_s + size / self.config.rate_min

    def _routed(
        self, key: bytes, use: Callable[[Wire], _T], end: float, *, probe: bool = False
    ) -> _T:
        if not probe:
            self.check()
        return self._guarded(lambda: self._follow(key, use, end, probe))

    def _follow(self, key: bytes, use: Callable[[Wire], _T], end: float, probe: bool) -> _T:
        """Run on the key's server, wherever a cluster has moved it."""
        pool, asking = self._pool_for(key), False
        for _ in range(_REDIRECTS_MAX):
            try:
                return self._on(pool, _asking(use, end) if asking else use, probe)
            except ReplyError as error:
                cluster = self._cluster
                if cluster is None or error.code not in ("MOVED", "ASK"):
                    raise
                asking = error.code == "ASK"
                host, _, port = str(error).split()[2].rpartition(":")
                node = cluster.get_node(host=host or None, port=int(port))
                if not asking or node is None:
                    cluster.nodes_manager.initialize()
                if asking and node is not None:
                    pool = cluster.get_redis_connection(node).connection_pool
                else:
                    pool = self._pool_for(key)
        raise StoreUnavailable("the cluster keeps moving this slot")

    def _guarded(self, use: Callable[[], _T]) -> _T:
        """Translate what goes wrong; what is not an answer opens the breaker."""
        import redis

        restores = self._restores
        try:
            return use()
        except ReplyError as error:
            if error.code == "OOM":
                raise OutOfMemory(f"redis at {self.target.shown} is out of memory") from error
            if error.code in _AWAY and restores == self._restores:
                self.trip(str(error))
            raise StoreUnavailable(f"redis at {self.target.shown} says {error}") from error
        except (OSError, redis.RedisError, redis.exceptions.RedisClusterException) as error:
            reason = str(error) or type(error).__name__
            if restores == self._restores:  # else it is about connections of before
                self.trip(reason)
            raise StoreUnavailable(f"redis at {self.target.shown} is away: {reason}") from error

    def _on(self, pool: Any, use: Callable[[Wire], _T], probe: bool) -> _T:
        """With a connection of the pool; one that was kept and is dead is replaced once."""
        for last in (False, True):
            connection = pool.get_connection()
            fresh = not hasattr(connection, "tierd_used")
            connection.tierd_used = True
            try:
                with self._in_flight(connection, probe) as sock:
                    return use(Wire(sock))
            except (ReplyError, OutOfMemory):
                raise
            except BaseException as error:
                connection.disconnect()
                stale = isinstance(error, ConnectionError) and not fresh and self.up
                if not stale or last:
                    raise
            finally:
                pool.release(connection)
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def _in_flight(self, connection: Any, probe: bool) -> Iterator[socket.socket]:
        # redis-py has no public name for the socket of a connection.
        sock: socket.socket = connection._sock  # noqa: SLF001
        with self._lock:
            if self._closed or not (self.up or probe):  # tripped since the call began
                raise StoreUnavailable(f"redis at {self.target.shown} is away")
            self._busy.add(sock)
        try:
            yield sock
        finally:
            with self._lock:
                self._busy.discard(sock)


def _asking(use: Callable[[Wire], _T], end: float) -> Callable[[Wire], _T]:
    def both(wire: Wire) -> _T:
        wire.call(["ASKING"], end)
        return use(wire)

    return both


def info_fields(reply: Reply) -> dict[str, str]:
    """The lines of an INFO reply by name."""
    assert isinstance(reply, bytes)
    pairs = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in pairs if colon}
