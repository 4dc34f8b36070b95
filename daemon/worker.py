"""Supervision of the engine worker: start it, watch it, start it again.

The worker is a process on the other end of a socket pair. It exits when the socket closes, so
a daemon that dies takes it along; a worker that dies is replaced, with growing pauses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from dsv4_tierd.daemon.bridge import Bridge, WorkerProtocolError, restarting
from dsv4_tierd.daemon.config import CannotStart
from dsv4_tierd.engine.config import EngineConfig
from dsv4_tierd.engine.messages import AskStats, LoadProgress, Ready, Stats
from dsv4_tierd.tiering.errors import TierError

log = logging.getLogger("dsv4_tierd.daemon")

WORKER_COMMAND = (sys.executable, "-m", "dsv4_tierd.engine.worker")
BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 10.0
HEALTHY_S = 30.0  # alive this long: the next death is a new story
STOP_S = 10.0


class WorkerState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    STALLED = "stalled"
    RESTARTING = "restarting"
    STOPPED = "stopped"


class WorkerFailed(CannotStart):
    """The first worker died before it was ever ready: the settings cannot work."""


@dataclass(frozen=True, slots=True)
class Probing:
    """How the loop's health is asked: every ``period_s``, unanswered for ``stall_s`` is stalled."""

    period_s: float = 2.0
    stall_s: float = 60.0


class Worker:
    """The engine worker as the rest of the daemon sees it: a bridge, or none just now."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        command: Sequence[str] = WORKER_COMMAND,
        probing: Probing = Probing(),
        on_ready: Callable[[Bridge], Awaitable[None]] | None = None,
    ) -> None:
        self.state = WorkerState.LOADING
        self.model: Ready | None = None
        self.load: LoadProgress | None = None
        self.stats: Stats | None = None
        self.restarts = 0
        self.pid: int | None = None
        self._config = config
        self._command = tuple(command)
        self._probing = probing
        self.on_ready = on_ready
        self._bridge: Bridge | None = None  # a ready one
        self._current: Bridge | None = None  # ready or still loading
        self._stopping = False
        self._first_ready = asyncio.Event()
        self._old_counters: dict[str, float] = {}

    def bridge(self) -> Bridge:
        """The connection to a ready worker. Raises EngineRestarting while there is none."""
        if self._bridge is None or self._bridge.closed or self._stopping:
            raise restarting()
        return self._bridge

    @property
    def is_up(self) -> bool:
        return self._bridge is not None and not self._bridge.closed

    @property
    def current(self) -> Bridge | None:
        """The connection to a worker, also while it is told what it must know at once."""
        return None if self._current is None or self._current.closed else self._current

    def identity(self) -> str | None:
        """What cached bytes depend on, in hex; None until the model was loaded once."""
        return None if self.model is None else self.model.identity

    async def wait_ready(self) -> None:
        await self._first_ready.wait()

    async def run(self) -> None:
        """Supervise until ``stop``. Raises WorkerFailed if the first start cannot succeed."""
        backoff_s = BACKOFF_FIRST_S
        incarnation = 0
        while not self._stopping:
            incarnation += 1
            started_s = time.monotonic()
            code = await self._run_one(incarnation)
            if self._stopping:
                break
            if self.model is None:
                raise WorkerFailed(f"the engine worker ended with exit code {code} while loading")
            self.restarts += 1
            self.state = WorkerState.RESTARTING
            if time.monotonic() - started_s > HEALTHY_S:
                backoff_s = BACKOFF_FIRST_S
            log.warning("engine worker ended code=%s restart_in_s=%.1f", code, backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
        self.state = WorkerState.STOPPED

    async def _run_one(self, incarnation: int) -> int:
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                "--socket-fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_fd(sys.stderr) else asyncio.subprocess.DEVNULL,
                # Threads that spin while they wait starve whatever shares their cores.
                env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ,
                start_new_session=True,  # a Ctrl-C at the terminal is the daemon's to handle
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = process.pid
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            self._current = Bridge(reader, writer, incarnation, self._loading)
            self._current.configure(self._engine_config())
            if self._stopping:
                self._current.fail_all(restarting())
            await self._serve(self._current)
        finally:
            self._bridge = self._current = None
            code = await _end(process)
            self.pid = None
        return code

    def _engine_config(self) -> EngineConfig:
        """As given; what ran before comes back without its store if it must."""
        return msgspec.structs.replace(self._config, store_may_wait=self.model is not None)

    async def _serve(self, bridge: Bridge) -> None:
        async with asyncio.TaskGroup() as group:
            attending = group.create_task(self._attend(bridge))
            try:
                await bridge.run()
            except WorkerProtocolError as error:
                log.error("engine worker broke the protocol: %s", error)  # noqa: TRY400  no bug of ours
            finally:
                if self.model is not None and not self._stopping:
                    self.state = WorkerState.RESTARTING
                self._keep_counters()
                attending.cancel()

    async def _attend(self, bridge: Bridge) -> None:
        """Shake hands, announce the bridge, then probe it for ever."""
        with contextlib.suppress(TierError):
            self.model = await bridge.ready()
            if self.on_ready is not None:
                await self.on_ready(bridge)
            self._bridge = bridge
            self.state = WorkerState.READY
            self._first_ready.set()
            log.info("engine ready incarnation=%d pid=%s", bridge.incarnation, self.pid)
            while True:
                await self._probe(bridge)
                await asyncio.sleep(self._probing.period_s)

    async def _probe(self, bridge: Bridge) -> None:
        asked = asyncio.ensure_future(bridge.ask(lambda op: AskStats(op_id=op)))
        try:
            done, _ = await asyncio.wait({asked}, timeout=self._probing.stall_s)
            if not done:
                self.state = WorkerState.STALLED
                log.error("engine loop stalled stall_s=%.1f", self._probing.stall_s)
            ack = await asked
        finally:
            asked.cancel()
        self.state = WorkerState.READY
        if ack.stats is not None:
            self.stats = ack.stats

    async def refresh_stats(self, timeout_s: float) -> None:
        """Fresh numbers if the engine answers in time; the last ones otherwise."""
        with contextlib.suppress(TierError, TimeoutError):
            ack = await asyncio.wait_for(
                self.bridge().ask(lambda op: AskStats(op_id=op)), timeout_s
            )
            self.stats = ack.stats or self.stats

    def counters(self) -> dict[str, float]:
        """The engine's counters over all incarnations: they never go down."""
        now = {} if self.stats is None else self.stats.counters
        names = set(now) | set(self._old_counters)
        return {name: now.get(name, 0.0) + self._old_counters.get(name, 0.0) for name in names}

    def gauges(self) -> dict[str, float]:
        return {} if self.stats is None else dict(self.stats.gauges)

    def _keep_counters(self) -> None:
        self._old_counters = self.counters()
        self.stats = None

    def _loading(self, progress: LoadProgress) -> None:
        self.load = progress

    async def stop(self) -> None:
        """End the worker by closing its socket; ``run`` returns once it is gone."""
        self._stopping = True
        if self._current is not None:
            self._current.fail_all(restarting())


def _has_fd(stream: object) -> bool:
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True


async def _end(process: asyncio.subprocess.Process) -> int:
    """Wait for a process whose socket is closed; kill it if it does not go."""
    try:
        return await asyncio.wait_for(process.wait(), STOP_S)
    except (TimeoutError, asyncio.CancelledError):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        return await process.wait()
