"""``/v1/prefixes``: how much of some words is cached; to bring it nearer, keep it, forget it."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from dsv4_tierd.daemon import wire
from dsv4_tierd.daemon.middleware import json_response
from dsv4_tierd.daemon.operations import new_operation
from dsv4_tierd.daemon.routes.common import ids_of, is_octets, long_verb, salt_of, service_of
from dsv4_tierd.daemon.transcript import ID_BYTES
from dsv4_tierd.engine.messages import LookupPrefix, PinPrefix, PurgeSalt, WarmPrefix
from dsv4_tierd.tiering.errors import (
    InvalidRequest,
    PreconditionFailed,
    UnsupportedCombination,
)


async def _words(request: web.Request) -> tuple[bytes, str]:
    """The request's token ids and salt. Raises InvalidRequest and its like."""
    service = service_of(request)
    data = await request.read()
    octets = data if is_octets(request) else None
    body = wire.Lookup() if octets is not None else wire.decode(data, wire.Lookup)
    salt = salt_of(request, body.cache_salt)
    ids, _ = await ids_of(service, None, body, octets)
    if not ids:
        raise InvalidRequest("give one of messages, text, token_ids")
    service.check_context(len(ids) // ID_BYTES, 0, "messages")
    return ids, salt


async def lookup(request: web.Request) -> web.Response:
    """How much of these words is cached, and where. Holds nothing."""
    ids, salt = await _words(request)
    ack = (
        await service_of(request)
        .worker.bridge()
        .ask(lambda op: LookupPrefix(op_id=op, token_ids=ids, salt=salt))
    )
    matched = ack.matched
    assert matched is not None, "a lookup's Ack has its answer"
    return json_response(
        {
            "prompt_tokens": len(ids) // ID_BYTES,
            "matched_tokens": matched.matched_tokens,
            "reusable_tokens": matched.reusable_tokens,
            "tiers": {
                "device": matched.device_tokens,
                "host": matched.host_tokens,
                "store": matched.store_tokens,
            },
        }
    )


async def warm(request: web.Request) -> web.Response:
    """Bring what the store has of these words to host memory; an operation, or ?wait=true."""
    service = service_of(request)
    ids, salt = await _words(request)
    if service.config.store == "none":
        raise UnsupportedCombination("there is no store to bring anything from")
    bridge = service.bridge()

    async def work() -> dict[str, Any]:
        ack = await bridge.ask(lambda op: WarmPrefix(op_id=op, token_ids=ids, salt=salt))
        warmed = ack.warmed
        assert warmed is not None, "a warm-up's Ack has its answer"
        return {
            "prompt_tokens": len(ids) // ID_BYTES,
            "host_tokens": warmed.host_tokens,
            "loaded_tokens": warmed.loaded_tokens,
        }

    return await long_verb(request, new_operation("warm", salt, None), work())


async def pin(request: web.Request) -> web.Response:
    """Keep the stored whole blocks of these words in the shared store, or take that back."""
    service = service_of(request)
    ids, salt = await _words(request)
    pinned = request.match_info["verb"] == "pin"
    ack = await service.bridge().ask(
        lambda op: PinPrefix(op_id=op, token_ids=ids, salt=salt, pinned=pinned)
    )
    return json_response({"pinned": pinned, "tokens": ack.stored_tokens})


async def purge(request: web.Request) -> web.Response:
    """Forget all that is cached and stored for a tenant without sessions here; an operation."""
    service = service_of(request)
    salt = salt_of(request, wire.decode(await request.read(), wire.Purge).cache_salt)
    count = sum(session.salt == salt for session in service.sessions)
    if count:
        raise PreconditionFailed(f"the tenant has sessions here, {count}: delete them first")
    bridge = service.bridge()

    async def work() -> dict[str, Any]:
        ack = await bridge.ask(lambda op: PurgeSalt(op_id=op, salt=salt))
        return {"objects": ack.removed}

    return await long_verb(request, new_operation("purge", salt, None), work())


def add_routes(app: web.Application) -> None:
    """Register this module's routes."""
    app.add_routes(
        [
            web.post("/v1/prefixes/lookup", lookup),
            web.post("/v1/prefixes/warm", warm),
            web.post("/v1/prefixes/{verb:pin|unpin}", pin),
            web.post("/v1/prefixes/purge", purge),
        ]
    )
