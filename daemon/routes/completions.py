"""``POST /v1/completions``: a prompt as text or token ids, stream or not."""

from __future__ import annotations

import time
import uuid
from typing import Any

from aiohttp import web

from dsv4_tierd.daemon import wire
from dsv4_tierd.daemon.ledger import Turn
from dsv4_tierd.daemon.middleware import json_response, refuse_key_on_stream
from dsv4_tierd.daemon.routes import openai
from dsv4_tierd.daemon.routes.common import service_of
from dsv4_tierd.daemon.run import Run
from dsv4_tierd.daemon.service import Service
from dsv4_tierd.daemon.stream import EventStream
from dsv4_tierd.daemon.wire import error_json
from dsv4_tierd.engine.messages import Done, Progress, Tokens, Usage
from dsv4_tierd.tiering.errors import InvalidRequest, TierError, UnsupportedCombination

OWN = frozenset(["prompt", "return_token_ids"])


async def completions(request: web.Request) -> web.StreamResponse:
    """Completions in OpenAI's form, in a session or without."""
    service = service_of(request)
    body = openai.read_object(await request.read())
    openai.check_fields(body, OWN)
    logprobs = openai.typed(body, "logprobs", int, None)
    ask = openai.read_ask(
        request,
        service,
        body,
        prompt_ids=await _prompt(service, body.get("prompt")),
        logprobs=logprobs,
        turn=Turn.NONE,
    )
    if ask.sampling.stop:
        service.text.require()
    if ask.stream:
        refuse_key_on_stream(request)
    head = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": ask.model,
    }
    runs, usage = await openai.start_runs(service, ask)
    try:
        if ask.stream:
            return await _stream(request, service, head, ask, runs, usage)
        return await _whole(service, head, ask, runs, usage)
    finally:
        openai.cancel_all(runs)


async def _prompt(service: Service, prompt: Any) -> bytes:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return await service.text.encode_text(prompt)
    if isinstance(prompt, list) and all(
        isinstance(i, int) and not isinstance(i, bool) for i in prompt
    ):
        return wire.pack_ids(prompt, service.model.vocab_size)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        raise UnsupportedCombination("one prompt a request", param="prompt")
    raise InvalidRequest("prompt must be text or token ids", param="prompt")


def _choice(service: Service, index: int, event: Tokens | Done, offset: int) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": event.text,
        "logprobs": None,
        "finish_reason": event.finish_reason if isinstance(event, Done) else None,
    }
    if isinstance(event, Tokens):
        choice["token_ids"] = event.token_ids
        if event.logprobs:
            choice["logprobs"] = _logprobs(service, event, offset)
    return choice


def _logprobs(service: Service, event: Tokens, offset: int) -> dict[str, Any]:
    codec = service.text.codec

    def name(token_id: int) -> str:
        if codec is None:
            return f"token_id:{token_id}"
        return openai.token_name(codec.token_bytes(token_id))

    return {
        "tokens": [name(p.token_id) for p in event.logprobs],
        "token_logprobs": [openai.finite(p.logprob) for p in event.logprobs],
        "top_logprobs": [{name(i): openai.finite(v) for i, v in p.top} for p in event.logprobs],
        "text_offset": [offset] * len(event.logprobs),
    }


async def _whole(
    service: Service,
    head: dict[str, Any],
    ask: openai.Ask,
    runs: list[Run],
    usage: Usage | None,
) -> web.Response:
    choices: list[dict[str, Any]] = [
        {"index": i, "text": "", "logprobs": None, "finish_reason": None, "token_ids": []}
        for i in range(len(runs))
    ]
    ends: list[Done] = []
    async for item in openai.merged(runs, service.config.keepalive_s):
        if item is None:
            continue
        index, event = item
        if isinstance(event, Progress):
            continue
        whole: dict[str, Any] = choices[index]
        part = _choice(service, index, event, len(whole["text"]))
        whole["text"] += part["text"]
        whole["finish_reason"] = part["finish_reason"]
        if part["logprobs"]:
            merged = whole["logprobs"] or {}
            whole["logprobs"] = {k: merged.get(k, []) + v for k, v in part["logprobs"].items()}
        if isinstance(event, Done):
            ends.append(event)
            whole["token_ids"] = list(runs[index].generated)
    answer = {**head, "choices": choices, "usage": openai.total_usage(usage, ends)}
    if ask.session_id is not None:
        answer["session_id"] = ask.session_id
    return json_response(answer)


async def _stream(
    request: web.Request,
    service: Service,
    head: dict[str, Any],
    ask: openai.Ask,
    runs: list[Run],
    usage: Usage | None,
) -> web.StreamResponse:
    events = openai.merged(runs, service.config.keepalive_s)
    stream = EventStream(request, service.config.client_stall_s)
    ends: list[Done] = []
    offsets = [0] * len(runs)
    try:
        item = await anext(events, None)  # an early refusal keeps its status
        await stream.open()
        while True:
            index, event = item or (0, None)
            if event is None:
                await stream.comment("keep-alive")
            elif isinstance(event, Progress):
                await stream.comment(f"progress {event.done}/{event.total}")
            else:
                choice = _choice(service, index, event, offsets[index])
                offsets[index] += len(event.text)
                await stream.event({**head, "choices": [choice]})
                if isinstance(event, Done):
                    ends.append(event)
            try:
                item = await anext(events)
            except StopAsyncIteration:
                break
        if ask.include_usage:
            await stream.event({**head, "choices": [], "usage": openai.total_usage(usage, ends)})
        await stream.event(b"[DONE]")
    except TierError as error:
        if not stream.response.prepared:
            raise
        await stream.event(error_json(error))
    finally:
        await events.aclose()  # type: ignore[attr-defined]
    await stream.close()
    return stream.response


def add_routes(app: web.Application) -> None:
    """Register this module's route."""
    app.router.add_post("/v1/completions", completions)
