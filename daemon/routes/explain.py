"""``POST /v1/prefixes/explain``: where two prompts first differ, by message, byte and token."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

from aiohttp import web

from dsv4_tierd.daemon import wire
from dsv4_tierd.daemon.diagnosis import Words, compare, message_digests
from dsv4_tierd.daemon.middleware import json_response
from dsv4_tierd.daemon.routes.common import ids_of, service_of
from dsv4_tierd.daemon.service import Service
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.errors import InvalidRequest


async def _words(service: Service, given: wire.Input, name: str) -> Words:
    if not given.given():
        raise InvalidRequest("give one of messages, text, token_ids", param=name)
    ids, _ = await ids_of(service, None, given, None)
    return Words(ids, message_digests(given.messages or ()))


async def explain(request: web.Request) -> web.Response:
    """Nothing is computed or cached: words are compared with words."""
    service = service_of(request)
    body = wire.decode(await request.read(), wire.Explain)
    a = await _words(service, body.a, "a")
    b = await _words(service, body.b, "b")
    found = await asyncio.to_thread(compare, a, b, service.text.codec)
    common = a.count if found is None else found.common_tokens
    return json_response(
        {
            "same": found is None,
            "tokens": {"a": a.count, "b": b.count},
            "common_tokens": common,
            "reusable_tokens": common // BLOCK_TOKENS * BLOCK_TOKENS,
            "difference": None if found is None else asdict(found),
        }
    )


def add_routes(app: web.Application) -> None:
    """Register this module's route."""
    app.router.add_post("/v1/prefixes/explain", explain)
