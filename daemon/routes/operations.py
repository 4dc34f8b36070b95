"""Health, readiness, metrics, version, models, tiers, tokenising, operations, drain."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

from aiohttp import web

from dsv4_tierd.daemon import metrics, wire
from dsv4_tierd.daemon.encoding import ENCODING_VERSION, encode_chat
from dsv4_tierd.daemon.middleware import json_response
from dsv4_tierd.daemon.operations import new_operation
from dsv4_tierd.daemon.routes.common import long_verb, operation_json, salt_of, service_of
from dsv4_tierd.daemon.service import Service
from dsv4_tierd.daemon.worker import WorkerState
from dsv4_tierd.engine.messages import TendStore
from dsv4_tierd.tiering.errors import InvalidRequest, UnsupportedCombination

STATS_WAIT_S = 1.0


def version_text() -> str:
    """The installed version."""
    return metadata.version("dsv4-tierd")


async def health(_: web.Request) -> web.Response:
    """The daemon's own loop answers: that is all that this says."""
    return json_response({"status": "ok"})


def readiness(service: Service) -> dict[str, Any]:
    """What /ready says: whether, why not, and how far loading is."""
    worker = service.worker
    state = "draining" if service.draining else worker.state.value
    load = worker.load
    return {
        "ready": state == WorkerState.READY.value,
        "state": state,
        "engine_restarts": worker.restarts,
        "engine_pid": worker.pid,
        "load": None
        if load is None or state != WorkerState.LOADING.value
        else {"stage": load.stage, "done": load.done, "total": load.total},
    }


async def ready(request: web.Request) -> web.Response:
    """200 when the engine serves, 503 otherwise."""
    found = readiness(service_of(request))
    response = json_response(found, 200 if found["ready"] else 503)
    if not found["ready"]:
        response.headers["Retry-After"] = "1"
    return response


async def metrics_page(request: web.Request) -> web.Response:
    """Prometheus text, with the engine's numbers if it answers in time."""
    service = service_of(request)
    await service.worker.refresh_stats(STATS_WAIT_S)
    return web.Response(
        body=metrics.render(service),
        headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
    )


async def version(_: web.Request) -> web.Response:
    """Versions of the daemon, Python and the chat encoding."""
    return json_response(
        {
            "version": version_text(),
            "python": platform.python_version(),
            "encoding": ENCODING_VERSION,
        }
    )


def model_names(service: Service) -> list[str]:
    """Names that a request may use, the first one the answer's."""
    named = service.config.served_model_name
    return [named, service.model.model_id] if named else [service.model.model_id]


async def models(request: web.Request) -> web.Response:
    """The one model that is served."""
    service = service_of(request)
    data = [
        {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "dsv4-tierd",
            "max_model_len": service.model.context_length,
            "vocab_size": service.model.vocab_size,
        }
        for name in dict.fromkeys(model_names(service))
    ]
    return json_response({"object": "list", "data": data})


async def tiers(request: web.Request) -> web.Response:
    """Bytes of every pool, and the engine's gauges now."""
    service = service_of(request)
    await service.worker.refresh_stats(STATS_WAIT_S)
    return json_response(
        {
            "pools": [{"name": name, "bytes": size} for name, size in service.model.plan],
            "gauges": service.worker.gauges(),
            "counters": service.worker.counters(),
            "identity": service.model.identity,
        }
    )


async def tokenize(request: web.Request) -> web.Response:
    """Text or a chat to token ids."""
    service = service_of(request)
    body = wire.decode(await request.read(), wire.Tokenize)
    given = [v for v in (body.text, body.prompt, body.messages) if v is not None]
    if len(given) != 1:
        raise InvalidRequest("give one of text, prompt, messages")
    service.text.require()
    if body.messages is not None:
        chat = encode_chat(
            {"messages": body.messages}, thinking_default=service.config.thinking_default
        )
        ids = await service.text.encode(chat.pieces)
    else:
        ids = await service.text.encode_text(body.text or body.prompt or "")
    numbers = memoryview(ids).cast("i").tolist()
    return json_response(
        {
            "token_ids": numbers,
            "tokens": numbers,
            "count": len(numbers),
            "max_model_len": service.model.context_length,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """Token ids to text, special tokens spelt out."""
    service = service_of(request)
    body = wire.decode(await request.read(), wire.Detokenize)
    ids = body.token_ids if body.token_ids is not None else body.tokens
    if ids is None:
        raise InvalidRequest("token_ids is missing", param="token_ids")
    wire.pack_ids(ids, service.model.vocab_size)
    text = await service.text.decode(ids)
    return json_response({"text": text, "prompt": text})


async def get_operation(request: web.Request) -> web.Response:
    """One long verb's state, progress and result."""
    service = service_of(request)
    found = service.operations.get(salt_of(request), request.match_info["id"])
    return json_response(operation_json(found))


async def tend_store(request: web.Request) -> web.Response:
    """Check every stored byte (bad ones are dropped), or remove what nobody can use."""
    service = service_of(request)
    verb: Any = request.match_info["verb"]
    wire.decode(await request.read(), wire.Body)  # it has no fields
    if service.config.store == "none":
        raise UnsupportedCombination("there is no store to look after")
    bridge = service.bridge()

    async def work() -> dict[str, Any]:
        ack = await bridge.ask(lambda op: TendStore(op_id=op, verb=verb))
        assert ack.tended is not None, "its Ack has the report"
        return ack.tended

    operation = new_operation(f"store {verb}", salt_of(request), None)
    return await long_verb(request, operation, work())


async def drain(request: web.Request) -> web.Response:
    """As SIGTERM: no new work, sessions written down, then the daemon ends."""
    service = service_of(request)
    service.draining = True
    service.stop_asked.set()
    return json_response({"state": "draining", "deadline_s": service.config.drain_s}, 202)


def add_routes(app: web.Application) -> None:
    """Register this module's routes."""
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/ready", ready),
            web.get("/metrics", metrics_page),
            web.get("/version", version),
            web.get("/v1/models", models),
            web.get("/v1/tiers", tiers),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/v1/operations/{id}", get_operation),
            web.post("/v1/store/{verb:verify|gc}", tend_store),
            web.post("/admin/drain", drain),
        ]
    )
