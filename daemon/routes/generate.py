"""``POST /v1/sessions/{id}/generate``: one JSON, or a stream of events."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from dsv4_tierd.daemon import wire
from dsv4_tierd.daemon.middleware import json_response, refuse_key_on_stream
from dsv4_tierd.daemon.routes.common import (
    check_expected,
    check_unmoved,
    ids_of,
    is_octets,
    service_of,
    session_of,
    with_answer_header,
)
from dsv4_tierd.daemon.run import NO_LIMIT, Run
from dsv4_tierd.daemon.service import Service, Work
from dsv4_tierd.daemon.sessions import Session
from dsv4_tierd.daemon.stream import EventStream, events_of
from dsv4_tierd.daemon.transcript import ID_BYTES
from dsv4_tierd.daemon.wire import done_json, error_json, logprob_json
from dsv4_tierd.engine.messages import Done, Progress, Tokens
from dsv4_tierd.tiering.errors import InvalidTokenIds, TierError


async def generate(request: web.Request) -> web.StreamResponse:
    """Append, then draw; the answer whole or as events."""
    service = service_of(request)
    data = await request.read()
    octets = data if is_octets(request) else None
    if octets is None:
        body = wire.decode(data, wire.Generate)
    else:
        query = {k: v for k, v in request.query.items() if k != "cache_salt"}
        body = wire.from_query(query, wire.Generate)
    session = session_of(request, body.cache_salt)
    if body.stream:
        refuse_key_on_stream(request)
    check_expected(session, body.expected_tokens)
    before = session.transcript
    work = await _work(service, session, body, octets)
    check_unmoved(session, before)
    run = await service.submit(session, work)
    try:
        if not body.stream:
            return json_response(await _whole(service, session, run) | _seed(work))
        return await _stream(request, service, session, run, work)
    finally:
        run.cancel()


def _seed(work: Work) -> dict[str, Any]:
    return {"seed": work.sampling.seed}


async def _work(
    service: Service, session: Session, body: wire.Generate, octets: bytes | None
) -> Work:
    asked = wire.check_max_tokens(body.max_tokens)
    sampling = wire.sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        logprobs=body.logprobs,
    )
    if any(i >= service.model.vocab_size for i in sampling.stop_token_ids):
        raise InvalidTokenIds("stop_token_ids are outside the vocabulary", param="stop_token_ids")
    if sampling.stop:
        service.text.require()
    ids, turn = await ids_of(service, session, body, octets)
    ids, turn = await with_answer_header(service, session, ids, turn, thinking=body.thinking)
    return Work(
        append_ids=ids,
        max_tokens=asked or service.default_max_tokens(session.length + len(ids) // ID_BYTES),
        sampling=sampling,
        credit=service.config.stream_credit_tokens if body.stream else NO_LIMIT,
        turn=turn,
    )


async def _whole(service: Service, session: Session, run: Run) -> dict[str, Any]:
    text: list[str] = []
    logprobs: list[dict[str, Any]] = []
    while True:
        event = await run.next()
        match event:
            case Tokens():
                text.append(event.text)
                logprobs += map(logprob_json, event.logprobs)
            case Progress():
                service.follow(session, event)
            case Done():
                text.append(event.text)
                answer = {
                    "object": "session.generation",
                    "text": "".join(text),
                    "token_ids": list(run.generated),
                    **done_json(event, session.id, session.length),
                }
                return answer | ({"logprobs": logprobs} if logprobs else {})


async def _stream(
    request: web.Request, service: Service, session: Session, run: Run, work: Work
) -> web.StreamResponse:
    first = await run.next(service.config.keepalive_s)  # an early refusal keeps its status
    stream = EventStream(request, service.config.client_stall_s)
    await stream.open()
    try:
        async for event in events_of(run, first, service.config.keepalive_s):
            match event:
                case None:
                    await stream.comment("keep-alive")
                case Progress():
                    service.follow(session, event)
                    await stream.event({"done": event.done, "total": event.total}, "progress")
                case Tokens():
                    await stream.event(_tokens_json(event), "tokens")
                case Done():
                    end = {"text": event.text, **done_json(event, session.id, session.length)}
                    await stream.event(end | _seed(work), "done")
    except TierError as error:
        await stream.event(error_json(error), "error")
    await stream.close()
    return stream.response


def _tokens_json(event: Tokens) -> dict[str, Any]:
    found: dict[str, Any] = {"token_ids": event.token_ids, "text": event.text}
    if event.logprobs:
        found["logprobs"] = [logprob_json(p) for p in event.logprobs]
    return found


def add_routes(app: web.Application) -> None:
    """Register this module's route."""
    app.router.add_post("/v1/sessions/{id}/generate", generate)
