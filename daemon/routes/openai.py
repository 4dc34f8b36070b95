"""What chat and plain completions share: which fields are taken, choices, merged streams."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from aiohttp import web

from dsv4_tierd.daemon import handover, verbs, wire
from dsv4_tierd.daemon.ledger import Turn
from dsv4_tierd.daemon.routes.common import salt_of
from dsv4_tierd.daemon.routes.operations import model_names
from dsv4_tierd.daemon.run import NO_LIMIT, Run, RunEvent
from dsv4_tierd.daemon.service import Service, Work
from dsv4_tierd.daemon.sessions import Session, SessionState, check_id
from dsv4_tierd.daemon.transcript import ID_BYTES
from dsv4_tierd.engine.messages import Done, Sampling, Tokens, Usage
from dsv4_tierd.tiering.errors import (
    Draining,
    InvalidRequest,
    NotFound,
    SessionBusy,
    SessionExists,
    TierError,
    UnsupportedCombination,
)

# Fields that change no token of the answer: taken, and not needed.
IGNORED = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "stream_options",
        "parallel_tool_calls",
        "verbosity",
        "extra_headers",
    ]
)
# Fields that would change the answer and are not done here: only the value that means "off".
OFF: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "logit_bias": ({}, None),
    "min_p": (0, None),
    "min_tokens": (0, None),
    "best_of": (1, None),
    "suffix": ("", None),
    "echo": (False, None),
    "modalities": (["text"], None),
    "audio": (None,),
    "prediction": (None,),
    "functions": ([], None),
    "function_call": ("none", None),
    "web_search_options": (None,),
    "response_format": ({"type": "text"}, None),
}
SHARED = frozenset(
    [
        "model",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "stream",
        "stream_options",
        "n",
        "logprobs",
        "session_id",
        "cache_salt",
    ]
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion request, checked."""

    model: str
    prompt_ids: bytes
    sampling: Sampling
    max_tokens: int | None
    choices: int
    stream: bool
    include_usage: bool
    salt: str
    session_id: str | None
    turn: Turn


def check_fields(body: dict[str, Any], own: Iterable[str]) -> None:
    """Raises InvalidRequest for unknown fields, UnsupportedCombination for ones not done here."""
    known = SHARED | set(own)
    for name, value in body.items():
        if name in OFF and value not in OFF[name]:
            raise UnsupportedCombination(f"{name} is not supported by this server", param=name)
        if name not in known and name not in IGNORED and name not in OFF:
            raise InvalidRequest(f"unknown field {name!r}", param=name)


def read_object(data: bytes) -> dict[str, Any]:
    """A JSON object without its nulls: OpenAI's clients send null for what is not given."""
    found = wire.decode(data, dict[str, Any])
    return {name: value for name, value in found.items() if value is not None}


def typed(body: dict[str, Any], name: str, kinds: type | tuple[type, ...], default: Any) -> Any:
    """A field of one of these types. bool is not a number. Raises InvalidRequest."""
    value = body.get(name, default)
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    is_stray_bool = isinstance(value, bool) and bool not in allowed
    if value is not default and (is_stray_bool or not isinstance(value, allowed)):
        wanted = " or ".join(kind.__name__ for kind in allowed)
        raise InvalidRequest(f"{name} must be {wanted}", param=name)
    return value


def _number(body: dict[str, Any], name: str, default: float) -> float:
    """A field as a float. Raises InvalidRequest."""
    try:
        return float(typed(body, name, (int, float), default))
    except OverflowError as error:
        raise InvalidRequest(f"{name} is too large a number", param=name) from error


def check_model(service: Service, body: dict[str, Any]) -> str:
    """The model's name in the answer. Raises NotFound for one that is not served."""
    names = model_names(service)
    model = typed(body, "model", str, names[0])
    if model not in names:
        raise NotFound(f"there is no model {model!r}; this server has {names[0]!r}", param="model")
    return str(model)


def session_name(request: web.Request, body: dict[str, Any]) -> str | None:
    """The session that body or headers name, or None. Raises InvalidRequest."""
    headers = request.headers
    given = typed(body, "session_id", str, None)
    name = given or headers.get("X-Session-Id") or headers.get("x-claude-code-session-id")
    return None if name is None else check_id(name)


def read_max_tokens(body: dict[str, Any]) -> int | None:
    """Either spelling; both only if equal. Raises InvalidRequest."""
    found = None
    for name in ("max_tokens", "max_completion_tokens"):
        value = wire.check_max_tokens(typed(body, name, int, None), name)
        if found is not None and value is not None and value != found:
            raise InvalidRequest("max_tokens and max_completion_tokens differ", param=name)
        found = value if value is not None else found
    return found


def read_sampling(body: dict[str, Any], logprobs: int | None) -> Sampling:
    """Checked sampling settings, OpenAI's defaults. Raises InvalidRequest."""
    stop = typed(body, "stop", (str, list), None)
    if isinstance(stop, list) and not all(isinstance(s, str) for s in stop):
        raise InvalidRequest("stop must be strings", param="stop")
    ids = typed(body, "stop_token_ids", list, [])
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise InvalidRequest("stop_token_ids must be numbers", param="stop_token_ids")
    return wire.sampling(
        temperature=_number(body, "temperature", 1.0),
        top_p=_number(body, "top_p", 1.0),
        top_k=max(0, typed(body, "top_k", int, 0)),  # -1 is "off" elsewhere
        seed=typed(body, "seed", int, None),
        stop=stop,
        stop_token_ids=ids,
        ignore_eos=typed(body, "ignore_eos", bool, False),
        logprobs=logprobs,
    )


def read_ask(
    request: web.Request,
    service: Service,
    body: dict[str, Any],
    *,
    prompt_ids: bytes,
    logprobs: int | None,
    turn: Turn,
) -> Ask:
    """The checked request. Raises InvalidRequest and its like."""
    choices = typed(body, "n", int, 1)
    if not 1 <= choices <= service.config.choices_max:
        raise InvalidRequest(f"n is 1 to {service.config.choices_max}", param="n")
    options = typed(body, "stream_options", dict, {})
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    return Ask(
        model=check_model(service, body),
        prompt_ids=prompt_ids,
        sampling=read_sampling(body, logprobs),
        max_tokens=read_max_tokens(body),
        choices=choices,
        stream=typed(body, "stream", bool, False),
        include_usage=bool(options.get("include_usage", False)),
        salt=salt_of(request, typed(body, "cache_salt", str, None)),
        session_id=session_name(request, body),
        turn=turn,
    )


async def start_runs(service: Service, ask: Ask) -> tuple[list[Run], Usage | None]:
    """The runs of all choices; for several, the prompt's usage. The caller cancels them.

    One choice runs where its prompt is. Several first compute the prompt, then fork: choice 0
    goes on in the session, the others in copies that end with their request.
    """
    session = await _place(service, ask)
    prompt_tokens = len(ask.prompt_ids) // ID_BYTES
    work = Work(
        prompt_ids=None if session.ephemeral else ask.prompt_ids,
        append_ids=ask.prompt_ids if session.ephemeral else b"",
        max_tokens=ask.max_tokens or service.default_max_tokens(prompt_tokens),
        sampling=ask.sampling,
        credit=service.config.stream_credit_tokens if ask.stream else NO_LIMIT,
        turn=ask.turn,
        close_after=session.ephemeral,
    )
    if ask.choices == 1:
        return [await service.submit(session, work)], None
    service.check_context(prompt_tokens, work.max_tokens, "max_tokens")
    prompt = await service.submit(session, replace(work, max_tokens=0, close_after=False))
    try:
        usage = (await service.finish_run(prompt)).usage
    except BaseException:
        if session.ephemeral:
            service.forget_in_worker(session)
        raise
    if session.ephemeral:
        session.ephemeral_tokens = prompt_tokens
    return await _start_choices(service, session, work, ask), usage


async def _start_choices(service: Service, session: Session, work: Work, ask: Ask) -> list[Run]:
    forks = [service.fork_ephemeral(session, session.length) for _ in range(1, ask.choices)]
    runs: list[Run] = []
    try:
        for index, one in enumerate([session, *forks]):
            sampling = replace_seed(ask.sampling, index)
            part = replace(work, append_ids=b"", prompt_ids=None, sampling=sampling)
            runs.append(await service.submit(one, replace(part, close_after=one.ephemeral)))
    except BaseException:
        cancel_all(runs)
        for one in [session, *forks][len(runs) :]:
            if one.ephemeral:
                service.forget_in_worker(one)
        raise
    return runs


def replace_seed(sampling: Sampling, index: int) -> Sampling:
    """The sampling of choice ``index``: its own noise, repeatable."""
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) % (1 << 63))


async def _place(service: Service, ask: Ask) -> Session:
    service.bridge()  # refuse before a session is made
    if ask.session_id is None:
        return service.sessions.ephemeral(ask.salt)
    found = service.sessions.find(ask.salt, ask.session_id)
    if found is None and (ask.salt, ask.session_id) not in service.journal.ledger.expired:
        try:
            return await verbs.create(service, ask.salt, ask.session_id)
        except SessionExists:
            return await handover.adopt(service, ask.salt, ask.session_id)
    if found is not None and found.uid not in service.journal.ledger.records:
        raise SessionBusy(f"session {ask.session_id!r} is being made: one request at a time")
    session = service.sessions.get(ask.salt, ask.session_id)
    if service.shared.applies(session) and not service.shared.owns(session):
        with session.taken(SessionState.RESUMING):  # all words come with the request
            await handover.catch_up(service, session)
    return session


def cancel_all(runs: Sequence[Run]) -> None:
    """Nobody reads these runs any more."""
    for run in runs:
        run.cancel()


async def merged(
    runs: Sequence[Run], keepalive_s: float
) -> AsyncIterator[tuple[int, RunEvent] | None]:
    """Events of all runs as they come, until each is Done; None for a sign of life.

    An event's credit is given back when the caller has dealt with it. OpenAI has no word for an
    answer that was cut off here, so that is an error: Draining.
    """
    queue: asyncio.Queue[tuple[int, RunEvent | TierError]] = asyncio.Queue(maxsize=1)

    async def feed(index: int, run: Run) -> None:
        try:
            while True:
                event = await run.next()
                assert event is not None
                await queue.put((index, event))
                if isinstance(event, Done):
                    return
        except TierError as error:
            await queue.put((index, error))

    tasks = [asyncio.ensure_future(feed(i, run)) for i, run in enumerate(runs)]
    left = len(runs)
    try:
        while left:
            try:
                index, event = await asyncio.wait_for(queue.get(), keepalive_s)
            except TimeoutError:
                yield None
                continue
            if isinstance(event, TierError):
                raise event
            if isinstance(event, Done) and event.finish_reason == "cancelled":
                raise Draining(
                    "the answer was cut off: the daemon drains, or its session was deleted",
                    retry_after_s=5.0,
                )
            yield index, event
            left -= isinstance(event, Done)
            if isinstance(event, Tokens):
                await runs[index].credit(len(event.token_ids))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def total_usage(prompt: Usage | None, ends: Sequence[Done]) -> dict[str, Any]:
    """One request's usage: the prompt counted once, all choices' tokens."""
    first = prompt or ends[0].usage
    drawn = sum(end.usage.completion_tokens for end in ends)
    return wire.usage_json(msgspec.structs.replace(first, completion_tokens=drawn))


def finite(value: float) -> float:
    """JSON has no infinities; OpenAI writes -9999."""
    return value if math.isfinite(value) else -9999.0


def token_name(data: bytes) -> str:
    """A token's text; of a part of a character its bytes, as OpenAI writes them: all differ."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
