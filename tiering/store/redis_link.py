"""The way to the servers: routing, deadlines and a circuit breaker.

redis-py connects (TLS, passwords, Sentinel, the cluster's slots); the bytes then go over
``resp.Wire``. Nothing here waits longer than its deadline, and nothing tries twice, but for one
case: a kept connection that turns out to be closed is replaced at once.

The first call that gets no answer, or one that no Redis gives, opens the breaker: calls in flight
are cut off, later ones fail without touching the network, and one background thread tries to
reconnect. Whatever redis-py raises is said in words of our own: its texts hold passwords.
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
from dsv4_tierd.tiering.store.redis_replies import as_fields
from dsv4_tierd.tiering.store.redis_said import Unreachable, in_own_words
from dsv4_tierd.tiering.store.resp import Argument, ProtocolBroken, Reply, ReplyError, Wire

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
        self.garbled = 0  # replies that made no sense: what came before may be wrong as well
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
        reason = self.target.scrubbed(reason)
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
                self.down_reason = self.target.scrubbed(reason)

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
        self._drop()
        try:
            with self._theirs():
                self._open()
            for pool in self._pools():
                self._greet(pool)
        except OSError as error:
            raise StoreUnavailable(self._said(error)) from error
        except ReplyError as error:
            raise StoreUnavailable(f"it says {self._said(error)}") from error

    def _greet(self, pool: Any) -> None:
        """Refuse what is too old; find out that a single server is part of a cluster."""
        end = self._deadline(0)
        server = self._on(pool, _asked(("INFO", "server"), as_fields, end), True)
        version = server.get("valkey_version") or server.get("redis_version", "0")
        parts = version.split(".")[:2]
        if not all(part.isdecimal() for part in parts):
            raise ProtocolBroken(f"it says that its version is {version!r:.60}")
        if tuple(int(part) for part in parts) < VERSION_MIN:
            raise StoreUnavailable(f"Redis {version} is too old: {VERSION_MIN[0]}.0 is needed")
        mode = server.get("redis_mode") or server.get("server_mode")
        if mode == "cluster" and self._cluster is None:
            with self._theirs(discovering=True):
                self._open_cluster()

    def _open(self) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        if self.target.mode == "cluster":
            self._open_cluster()
        elif self.target.mode == "sentinel":
            own = self.target.settings
            names = {key for key in own if key.startswith("sentinel_")}
            sentinel = redis.Sentinel(  # type: ignore[no-untyped-call]
                list(self.target.hosts),
                # By default it would try each Sentinel four times, with seconds between.
                sentinel_kwargs=self._timeouts()
                | {"retry": Retry(NoBackoff(), 0)}
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
        pool = self._pool
        if self.target.mode != "sentinel" or pool is None:
            return
        before = pool.master_address
        try:
            with self._theirs():
                now = pool.get_master_address()
        except Unreachable as error:
            log.warning("store: no Sentinel answers, the master stays: %s", error)
        else:
            if before not in (None, now):
                self.trip("Sentinel names another master")

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
        return self._guarded(self._pools)

    def _pools(self) -> list[Any]:
        cluster = self._cluster
        if cluster is None:
            return [self._pool_for(b"")]
        with self._theirs():
            return [
                cluster.get_redis_connection(node).connection_pool
                for node in cluster.get_primaries()
            ]

    def _pool_for(self, key: bytes) -> Any:
        cluster, pool = self._cluster, self._pool
        if cluster is not None:
            with self._theirs():
                return cluster.get_redis_connection(cluster.get_node_from_key(key)).connection_pool
        if pool is None:
            raise StoreUnavailable(f"redis at {self.target.shown} is away")
        return pool

    # ------------------------------------------------------------ calls
    def call(
        self,
        key: bytes,
        *args: Argument,
        read: Callable[[Reply], _T],
        size: int = 0,
        wait_s: float = 0.0,
        probe: bool = False,
    ) -> _T:
        """One command to the server that holds ``key``, and what ``read`` makes of its reply.

        ``read`` raises ProtocolBroken where that is no answer to the command. ``size``: bytes that
        it carries, ``wait_s``: seconds for which the server may block: both extend the deadline.
        ``probe``: also while the breaker is open.
        Raises StoreUnavailable (OutOfMemory where that is why).
        """
        end = self._deadline(size) + wait_s
        return self._routed(key, _asked(args, read, end), end, probe=probe)

    def read(self, key: bytes, start: int, targets: Sequence[memoryview]) -> int:
        """Fill ``targets`` with a value's bytes from ``start``; returns how many there were.

        Fewer than asked for: ``targets`` hold nothing of use. 0: there is no value.
        """
        size = sum(len(target) for target in targets)
        end = self._deadline(size)
        args: list[Argument] = ["GETRANGE", key, start, start + size - 1]
        return self._routed(key, lambda wire: wire.call_into(args, targets, end), end)

    def many(
        self,
        commands: Sequence[tuple[Argument, bytes, *tuple[Argument, ...]]],
        read: Callable[[Reply], _T],
    ) -> list[_T]:
        """Small commands (verb, key, …) that may be repeated, a round trip for 128. As ``call``."""
        self.check()
        spread: dict[int, tuple[Any, list[int]]] = {}
        pools = self._guarded(lambda: [self._pool_for(command[1]) for command in commands])
        for i, pool in enumerate(pools):
            spread.setdefault(id(pool), (pool, []))[1].append(i)
        replies: dict[int, _T] = {}
        for pool, indexes in spread.values():
            for at in range(0, len(indexes), _BATCH):
                some = indexes[at : at + _BATCH]
                answers = self._batch(pool, [commands[i] for i in some], read)
                for i, answer in zip(some, answers, strict=True):
                    if isinstance(answer, ReplyError):  # moved, or worse: by itself
                        verb, key, *rest = commands[i]
                        replies[i] = self.call(key, verb, key, *rest, read=read)
                    else:
                        replies[i] = answer
        return [replies[i] for i in range(len(commands))]

    def _batch(
        self, pool: Any, commands: Sequence[Sequence[Argument]], read: Callable[[Reply], _T]
    ) -> list[_T | ReplyError]:
        end = self._deadline(0)

        def use(wire: Wire) -> list[_T | ReplyError]:
            with _answering(commands[0]):
                found = wire.batch(commands, end)
                return [each if isinstance(each, ReplyError) else read(each) for each in found]

        return self._guarded(lambda: self._on(pool, use, False))

    def ask(self, pool: Any, *args: Argument, read: Callable[[Reply], _T]) -> _T:
        """One command to one of ``pools()``. As ``call``."""
        self.check()
        use = _asked(args, read, self._deadline(0))
        return self._guarded(lambda: self._on(pool, use, False))

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
                host, port = _moved_to(error)
                with self._theirs():
                    node = cluster.get_node(host=host or None, port=port)
                    if not asking or node is None:
                        cluster.nodes_manager.initialize()
                    if asking and node is not None:
                        pool = cluster.get_redis_connection(node).connection_pool
                    else:
                        pool = self._pool_for(key)
        raise StoreUnavailable("the cluster keeps moving this slot")

    def _guarded(self, use: Callable[[], _T]) -> _T:
        """Translate what goes wrong; what is not an answer opens the breaker."""
        restores = self._restores
        try:
            return use()
        except ReplyError as error:
            said = self._said(error)
            if error.code == "OOM":
                raise OutOfMemory(f"redis at {self.target.shown} is out of memory") from error
            if error.code in _AWAY and restores == self._restores:
                self.trip(said)
            raise StoreUnavailable(f"redis at {self.target.shown} says {said}") from error
        except OSError as error:
            if isinstance(error, ProtocolBroken):
                with self._lock:
                    self.garbled += 1
            said = self._said(error)
            if restores == self._restores:  # else it is about connections of before
                self.trip(said)
            raise StoreUnavailable(f"redis at {self.target.shown} is away: {said}") from error

    @contextlib.contextmanager
    def _theirs(self, *, discovering: bool = False) -> Iterator[None]:
        """Around what redis-py does: whatever it raises is Unreachable, in words of our own.

        ``discovering``: it asks around who serves, as it always does but for a single server.
        """
        try:
            yield
        except (StoreUnavailable, Unreachable):
            raise
        except Exception as error:  # noqa: BLE001 on a reply that came wrong it raises anything
            several = discovering or self.target.mode != "server" or self._cluster is not None
            # Not chained: a traceback would show its text.
            raise Unreachable(in_own_words(error, self.target, several=several)) from None

    def _said(self, error: Exception) -> str:
        return self.target.scrubbed(str(error)) or type(error).__name__

    def _on(self, pool: Any, use: Callable[[Wire], _T], probe: bool) -> _T:
        """With a connection of the pool; one that was kept and is dead is replaced once."""
        for last in (False, True):
            with self._theirs():
                connection = pool.get_connection()
            fresh = not hasattr(connection, "tierd_used")
            connection.tierd_used = True
            try:
                with self._in_flight(connection, probe) as sock:
                    wire = Wire(sock)
                    found = use(wire)
                    wire.check_end()
                    return found
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


@contextlib.contextmanager
def _answering(command: Sequence[Argument]) -> Iterator[None]:
    """Name the command whose reply is wrong."""
    try:
        yield
    except ProtocolBroken as error:
        raise ProtocolBroken(f"a wrong reply to {command[0]!s}: {error}") from None


def _asked(
    args: Sequence[Argument], read: Callable[[Reply], _T], end: float
) -> Callable[[Wire], _T]:
    def use(wire: Wire) -> _T:
        with _answering(args):
            return read(wire.call(args, end))

    return use


def _asking(use: Callable[[Wire], _T], end: float) -> Callable[[Wire], _T]:
    def both(wire: Wire) -> _T:
        wire.call(["ASKING"], end)
        return use(wire)

    return both


def _moved_to(error: ReplyError) -> tuple[str, int]:
    """Host and port of ``MOVED slot host:port`` or ``ASK slot host:port``."""
    words = str(error).split()
    host, _, port = words[2].rpartition(":") if len(words) == 3 else ("", "", "")
    if not port.isdecimal():
        raise ProtocolBroken(f"not where a slot is: {error!s:.60}")
    return host, int(port)
