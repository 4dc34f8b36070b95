"""``POST /v1/chat/completions``, stream or not; the answer is parsed by the official package."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

import deepseek_recipe as recipe
import msgspec
from aiohttp import web

from dsv4_tierd.daemon.diagnosis import Comparison, Words, examine, message_digests
from dsv4_tierd.daemon.encoding import Chat, encode_chat
from dsv4_tierd.daemon.ledger import Turn
from dsv4_tierd.daemon.middleware import json_response, refuse_key_on_stream
from dsv4_tierd.daemon.routes import openai
from dsv4_tierd.daemon.routes.common import service_of
from dsv4_tierd.daemon.run import Run
from dsv4_tierd.daemon.service import Service
from dsv4_tierd.daemon.stream import EventStream
from dsv4_tierd.daemon.tokenize import TextCodec
from dsv4_tierd.daemon.wire import LOGPROBS_MAX, error_json
from dsv4_tierd.engine.messages import Done, Progress, TokenLogprob, Tokens, Usage
from dsv4_tierd.tiering.errors import InvalidRequest, TierError, UnsupportedCombination

OWN = frozenset(
    [
        "messages",
        "tools",
        "tool_choice",
        "thinking",
        "reasoning_effort",
        "top_logprobs",
        "chat_template_kwargs",
        "prompt_cache_diagnostics",
    ]
)
TO_RECIPE = frozenset(
    ["messages", "tools", "tool_choice", "thinking", "reasoning_effort", "stop", "stream"]
)


class Choice:
    """One answer on its way: text in, OpenAI chunks out."""

    def __init__(self, index: int, chat: Chat, id: str, model: str, codec: TextCodec) -> None:
        self.index = index
        self.end: Done | None = None
        self._codec = codec
        self._logprobs: list[dict[str, Any]] = []
        generator = recipe.ChatCompletionRequest.chunk_generator(chat.request, id, model)
        self._parser = recipe.StreamProcessor(generator, chat.request.parsing_options)
        self.response = recipe.ChatCompletionResponse(id, model, 0, 0, 0)
        self.all_logprobs: list[dict[str, Any]] = []

    def open(self) -> list[dict[str, Any]]:
        return self._push(recipe.InferenceChunk.ready(prompt_usage=recipe.PromptUsage()))

    def tokens(self, event: Tokens) -> list[dict[str, Any]]:
        self._logprobs += [_logprob_json(p, self._codec) for p in event.logprobs]
        return self._push(recipe.InferenceChunk.text(event.text, len(event.token_ids)))

    def done(self, event: Done) -> list[dict[str, Any]]:
        self.end = event
        last = self._push(recipe.InferenceChunk.text(event.text, 0)) if event.text else []
        reason = recipe.InferenceFinishReason
        kind = reason.Length if event.finish_reason == "length" else reason.Stop
        last += self._push(recipe.InferenceChunk.finish(kind))
        return last + self._chunks(self._parser.finish())

    def _push(self, chunk: recipe.InferenceChunk) -> list[dict[str, Any]]:
        if self._parser.finished:
            return []  # the parser saw a stop sequence itself
        return self._chunks(self._parser.push(chunk))

    def _chunks(self, chunks: Sequence[Any]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for chunk in chunks:
            data: dict[str, Any] = msgspec.json.decode(chunk.to_json())
            self.response.accumulate(chunk)
            data.pop("usage", None)
            for choice in data["choices"]:
                choice["index"] = self.index
                if self._logprobs:
                    choice["logprobs"] = {"content": self._logprobs}
                    self.all_logprobs += self._logprobs
                    self._logprobs = []
            found.append(data)
        return found

    def whole(self) -> dict[str, Any]:
        """The choice of a response that is not streamed."""
        data = msgspec.json.decode(self.response.to_json())
        choice: dict[str, Any] = data["choices"][0]
        choice["index"] = self.index
        choice["logprobs"] = {"content": self.all_logprobs} if self.all_logprobs else None
        return choice


def _logprob_json(value: TokenLogprob, codec: TextCodec) -> dict[str, Any]:
    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": codec.decode([token_id]),
            "logprob": openai.finite(logprob),
            "bytes": list(codec.token_bytes(token_id)),
            "token_id": token_id,
        }

    top = [one(i, p) for i, p in value.top]
    return {**one(value.token_id, value.logprob), "top_logprobs": top}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Chat in OpenAI's form, in a session or without."""
    service = service_of(request)
    body = openai.read_object(await request.read())
    openai.check_fields(body, OWN)
    chat, ask = await _read(request, service, body)
    if ask.stream:
        refuse_key_on_stream(request)
    id = f"chatcmpl-{uuid.uuid4().hex}"
    codec = service.text.require()
    compared = await _compare(service, body, ask)
    choices = [Choice(i, chat, id, ask.model, codec) for i in range(ask.choices)]
    runs, usage = await openai.start_runs(service, ask)
    try:
        if ask.stream:
            return await _stream(request, service, ask, runs, choices, usage, compared)
        return await _whole(service, id, ask, runs, choices, usage, compared)
    finally:
        openai.cancel_all(runs)


async def _compare(service: Service, body: dict[str, Any], ask: openai.Ask) -> Comparison | None:
    """Remember the prompt; if the client asks why it is not cached, what it was compared to."""
    words = Words(ask.prompt_ids, message_digests(body["messages"]))
    compared = None
    if openai.typed(body, "prompt_cache_diagnostics", bool, False):
        codec = service.text.codec
        compared = await asyncio.to_thread(examine, service.recent, ask.salt, words, codec)
    service.recent.add(ask.salt, words)
    return compared


def _diagnosis(
    compared: Comparison | None, usage: Usage | None, choices: list[Choice]
) -> dict[str, Any]:
    ends = [choice.end for choice in choices if choice.end is not None]
    if compared is None or not ends:
        return {}
    return {"prompt_cache_diagnostics": compared.verdict(usage or ends[0].usage)}


async def _read(
    request: web.Request, service: Service, body: dict[str, Any]
) -> tuple[Chat, openai.Ask]:
    messages = openai.typed(body, "messages", list, None)
    if not messages:
        raise InvalidRequest("messages is empty or missing", param="messages")
    kwargs = openai.typed(body, "chat_template_kwargs", dict, {})
    if unknown := set(kwargs) - {"thinking"}:
        raise InvalidRequest(f"unknown field {unknown.pop()!r}", param="chat_template_kwargs")
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise UnsupportedCombination(
            "tool_choice is auto or none: output is not constrained here", param="tool_choice"
        )
    wants = openai.typed(body, "logprobs", bool, False)
    best = openai.typed(body, "top_logprobs", int, 0)
    if not 0 <= best <= LOGPROBS_MAX or (best and not wants):
        raise InvalidRequest(
            f"top_logprobs is 0 to {LOGPROBS_MAX} and needs logprobs", param="top_logprobs"
        )
    service.text.require()
    sent = {name: value for name, value in body.items() if name in TO_RECIPE}
    thinking = bool(kwargs.get("thinking", service.config.thinking_default))
    chat = encode_chat(sent, thinking_default=thinking)
    ids = await service.text.encode(chat.pieces)
    return chat, openai.read_ask(
        request,
        service,
        body,
        prompt_ids=ids,
        logprobs=best if wants else None,
        turn=Turn.ANSWERING,
    )


async def _whole(
    service: Service,
    id: str,
    ask: openai.Ask,
    runs: list[Run],
    choices: list[Choice],
    usage: Usage | None,
    compared: Comparison | None,
) -> web.Response:
    for choice in choices:
        choice.open()
    async for item in openai.merged(runs, service.config.keepalive_s):
        if item is not None:
            _advance(choices[item[0]], item[1])
    ends = [choice.end for choice in choices if choice.end is not None]
    first = msgspec.json.decode(choices[0].response.to_json())
    return json_response(
        {
            **first,
            "id": id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": ask.model,
            "choices": [choice.whole() for choice in choices],
            "usage": openai.total_usage(usage, ends),
            **_diagnosis(compared, usage, choices),
            **({} if ask.session_id is None else {"session_id": ask.session_id}),
        }
    )


def _advance(choice: Choice, event: Progress | Tokens | Done) -> list[dict[str, Any]]:
    match event:
        case Tokens():
            return choice.tokens(event)
        case Done():
            return choice.done(event)
        case Progress():
            return []


async def _stream(
    request: web.Request,
    service: Service,
    ask: openai.Ask,
    runs: list[Run],
    choices: list[Choice],
    usage: Usage | None,
    compared: Comparison | None,
) -> web.StreamResponse:
    events = openai.merged(runs, service.config.keepalive_s)
    stream = EventStream(request, service.config.client_stall_s)
    try:
        item = await anext(events, None)  # an early refusal keeps its status
        await stream.open()
        for choice in choices:
            for chunk in choice.open():
                await stream.event(chunk)
        last: dict[str, Any] = {}
        while True:
            if item is None:
                await stream.comment("keep-alive")
            elif isinstance(item[1], Progress):
                await stream.comment(f"progress {item[1].done}/{item[1].total}")
            else:
                for last in _advance(choices[item[0]], item[1]):
                    await stream.event(last)
            try:
                item = await anext(events)
            except StopAsyncIteration:
                break
        more = _diagnosis(compared, usage, choices)
        if ask.include_usage:
            ends = [choice.end for choice in choices if choice.end is not None]
            more |= {"usage": openai.total_usage(usage, ends)}
        if more:
            await stream.event({**last, "choices": [], **more})
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
    app.router.add_post("/v1/chat/completions", chat_completions)
