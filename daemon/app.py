"""The daemon: lock the state, open the journal, start the engine, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from aiohttp import web
from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.http_exceptions import HttpProcessingError

from dsv4_tierd.daemon import verbs
from dsv4_tierd.daemon.bridge import Bridge
from dsv4_tierd.daemon.config import ServeConfig
from dsv4_tierd.daemon.journal import Journal, StateLock
from dsv4_tierd.daemon.metrics import ServiceCollector
from dsv4_tierd.daemon.middleware import (
    SERVICE,
    authenticator,
    errors,
    idempotency,
    limit_body,
    read_keys,
)
from dsv4_tierd.daemon.routes import (
    chat,
    completions,
    explain,
    generate,
    operations,
    prefixes,
    sessions,
)
from dsv4_tierd.daemon.service import Service
from dsv4_tierd.daemon.shared import SharedSessions, holder_name
from dsv4_tierd.daemon.stream import ClientStalled
from dsv4_tierd.daemon.tokenize import TextCodec, TextService
from dsv4_tierd.daemon.worker import WORKER_COMMAND, Probing, Worker
from dsv4_tierd.engine.vocabulary import find_tokenizer
from dsv4_tierd.tiering.store.lease_server import LeaseServer, open_leases

log = logging.getLogger("dsv4_tierd.daemon")


_FAULTS = (HttpProcessingError, web.RequestPayloadError, ClientPayloadError, ClientStalled)


class _ClientsFault(logging.Filter):
    """What is no HTTP, or is not read, is the fault of the other end: one line, and no trace."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, _FAULTS):
            why = str(error).partition("\n\n")[0].replace("\n", " ")
            record.msg, record.args = f"{record.getMessage()}: {why}".replace("%", "%%"), ()
            record.levelno, record.levelname = logging.INFO, "INFO"
            record.exc_info = None
        return True


_CLIENTS_FAULT = _ClientsFault()  # one, however many daemons a process has

OnListening = Callable[[Service, int], Coroutine[Any, Any, None]]


def make_app(service: Service) -> web.Application:
    """All routes on one service."""
    app = web.Application(
        client_max_size=service.config.body_bytes_max,
        middlewares=[
            errors,
            authenticator(read_keys(service.config.api_key_file)),
            limit_body,
            idempotency(),
        ],
    )
    app[SERVICE] = service
    for routes in (operations, sessions, prefixes, generate, chat, completions, explain):
        routes.add_routes(app)
    return app


def load_text(config: ServeConfig, vocab_size: int) -> TextCodec | None:
    """The checkpoint's tokenizer, or DeepSeek's if its vocabulary is that. Blocking."""
    file = find_tokenizer(config.model, vocab_size)
    if file is None:
        return None
    return TextCodec(file.read_text(encoding="utf-8"), config.token_cache_budget)


async def serve(
    config: ServeConfig,
    *,
    command: Sequence[str] = WORKER_COMMAND,
    on_listening: OnListening | None = None,
    signals: bool = True,
) -> None:
    """Run until drained. Raises BadConfig, JournalDamaged, StateDirBusy, WorkerFailed, OSError.

    ``on_listening`` is called with the service and the port once HTTP answers; the engine may
    still be loading. Errors come inside an ExceptionGroup when they end a running daemon.
    """
    read_keys(config.api_key_file)
    logging.getLogger("aiohttp.server").addFilter(_CLIENTS_FAULT)
    lock = StateLock(config.state_dir)
    try:
        journal = await asyncio.to_thread(Journal, config.state_dir)
        try:
            await _serve(config, command, journal, on_listening, signals)
        finally:
            journal.release()
    finally:
        lock.release()


async def _serve(
    config: ServeConfig,
    command: Sequence[str],
    journal: Journal,
    on_listening: OnListening | None,
    signals: bool,
) -> None:
    text = TextService(None)
    worker = Worker(
        config.engine(), command=command, probing=Probing(config.probe_s, config.stall_s)
    )
    leases = await asyncio.to_thread(_leases, config)
    holder = holder_name(config.state_dir, config.name)
    shared = SharedSessions(leases, holder, config.lease_s, worker.identity)
    try:
        async with asyncio.TaskGroup() as group:
            service = Service(config, worker, journal, text, group, shared)
            if signals:
                _stop_on_signals(service)
            worker.on_ready = _OnReady(service)
            service.metrics.registry.register(ServiceCollector(service))
            writing = group.create_task(journal.run(), name="journal")
            supervising = group.create_task(worker.run(), name="worker")
            helpers = [group.create_task(verbs.sweep(service), name="sweep")]
            async with _listening(config, service) as port:
                if on_listening is not None:
                    announcing = on_listening(service, port)
                    helpers.append(group.create_task(announcing, name="announce"))
                await service.stop_asked.wait()
                log.info("draining deadline_s=%.1f", config.drain_s)
                await verbs.drain(service, config.drain_s)
            for helper in helpers:  # one may wait for an engine that never came up
                helper.cancel()
            await worker.stop()
            await supervising
            await service.all_ended()  # their ends are journalled before the journal closes
            journal.close()
            await writing
    finally:
        text.close()
        await asyncio.to_thread(shared.close)


def _leases(config: ServeConfig) -> LeaseServer | None:
    return open_leases(config.store) if config.share_sessions else None


class _OnReady:
    """What a new worker incarnation needs before it is announced."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, bridge: Bridge) -> None:
        service = self._service
        if service.text.codec is None:
            service.text.codec = await asyncio.to_thread(
                load_text, service.config, service.model.vocab_size
            )
        await service.on_worker_ready(bridge)


@contextlib.asynccontextmanager
async def _listening(config: ServeConfig, service: Service) -> AsyncIterator[int]:
    runner = web.AppRunner(
        make_app(service), handler_cancellation=True, access_log=None, shutdown_timeout=2.0
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port, reuse_address=True)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def _stop_on_signals(service: Service) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        service.draining = True
        service.stop_asked.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
