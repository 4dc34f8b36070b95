"""``/v1/sessions``: create, list, change, end; and the verbs below one."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from msgspec import UnsetType

from dsv4_tierd.daemon import handover, verbs, wire
from dsv4_tierd.daemon.ledger import Changed, Turn
from dsv4_tierd.daemon.middleware import json_response
from dsv4_tierd.daemon.operations import Operation
from dsv4_tierd.daemon.routes.common import (
    check_expected,
    check_unmoved,
    flag,
    ids_of,
    is_octets,
    long_verb,
    operation_json,
    operation_on,
    salt_of,
    service_of,
    session_json,
    session_of,
)
from dsv4_tierd.daemon.run import Run
from dsv4_tierd.daemon.service import Service, Work
from dsv4_tierd.daemon.sessions import Session, SessionState, Subscriber, check_id
from dsv4_tierd.daemon.stream import EventStream
from dsv4_tierd.engine.messages import Done, Progress
from dsv4_tierd.tiering.errors import (
    InvalidRequest,
    QueueFull,
    SessionExpired,
    SessionNotFound,
)

LIST_MAX = 1_000
SUBSCRIBERS_MAX = 16


async def create(request: web.Request) -> web.Response:
    """A session, empty or with first words; 201."""
    service = service_of(request)
    octets = await request.read() if is_octets(request) else None
    if octets is None:
        body = wire.decode(await request.read(), wire.CreateSession)
    else:
        body = wire.from_query(_without(request, "wait", "cache_salt"), wire.CreateSession)
    salt = salt_of(request, body.cache_salt or None)
    wait = flag(request, "wait")
    ttl_s, metadata = wire.check_ttl(body.ttl), wire.check_metadata(body.metadata)
    ids, turn = b"", None
    if body.given() or octets is not None:
        ids, turn = await ids_of(service, None, body, octets)
    if ids:
        service.bridge()  # refuse before anything is made
    policy = body.write_policy
    session = await verbs.create(
        service, salt, body.id, ttl_s=ttl_s, metadata=metadata, write_policy=policy
    )
    made: dict[str, Any] = {"operation": None}
    try:
        if body.pin:
            await verbs.pin(service, session, "host", None)
        if ids:
            operation = operation_on(session, "append")
            await _start_append(service, session, operation, Work(append_ids=ids, turn=_turn(turn)))
            if wait:
                await operation.finished.wait()
                made.update(operation.outcome())
            made["operation"] = operation_json(operation)
    except BaseException:
        if not session.is_busy:
            await verbs.close(service, session)
        raise
    return json_response(session_json(session) | made, 201)


def _turn(turn: Turn | None) -> Turn:
    return Turn.NONE if turn is None else turn


def _without(request: web.Request, *names: str) -> dict[str, str]:
    return {name: text for name, text in request.query.items() if name not in names}


async def _start_append(
    service: Service, session: Session, operation: Operation, work: Work
) -> None:
    service.operations.make_room()
    run = await service.submit(session, work)
    service.operations.start(operation, _appended(service, session, operation, run))


async def _appended(
    service: Service, session: Session, operation: Operation, run: Run
) -> dict[str, Any]:
    while True:
        event = await run.next()
        if isinstance(event, Progress):
            operation.progress = (event.done, event.total)
            service.follow(session, event)
        elif isinstance(event, Done):
            return {
                "session_id": session.id,
                "tokens": session.length,
                "usage": wire.usage_json(event.usage),
            }


async def append(request: web.Request) -> web.Response:
    """Compute new words; an operation, or ?wait=true."""
    service = service_of(request)
    data = await request.read()
    octets = data if is_octets(request) else None
    if octets is None:
        body = wire.decode(data, wire.Append)
    else:
        body = wire.from_query(_without(request, "wait", "cache_salt"), wire.Append)
    session = session_of(request, body.cache_salt)
    check_expected(session, body.expected_tokens)
    if not body.given() and octets is None:
        raise InvalidRequest("give one of messages, text, token_ids")
    before = session.transcript
    ids, turn = await ids_of(service, session, body, octets)
    check_unmoved(session, before)
    if not ids:
        raise InvalidRequest("there is nothing to append: the input has no tokens")
    flag(request, "wait")  # a bad one is refused before anything starts
    service.operations.make_room()  # what is refused has changed nothing
    run = await service.submit(session, Work(append_ids=ids, turn=_turn(turn)))
    operation = operation_on(session, "append")
    return await long_verb(request, operation, _appended(service, session, operation, run))


async def list_sessions(request: web.Request) -> web.Response:
    """A page of the caller's sessions."""
    query = request.query
    try:
        limit = int(query.get("limit", "100"))
    except ValueError as error:
        raise InvalidRequest("limit is a number", param="limit") from error
    if not 1 <= limit <= LIST_MAX:
        raise InvalidRequest(f"limit is 1 to {LIST_MAX}", param="limit")
    state = query.get("state")
    if state is not None and state not in set(SessionState):
        raise InvalidRequest(f"state is one of {', '.join(SessionState)}", param="state")
    page, more = service_of(request).sessions.page(
        salt_of(request), limit=limit, after=query.get("after"), state=state
    )
    return json_response(
        {
            "object": "list",
            "data": [session_json(s) for s in page],
            "has_more": more,
            "last_id": page[-1].id if page else None,
        }
    )


async def get_one(request: web.Request) -> web.Response:
    """One session."""
    return json_response(session_json(session_of(request)))


async def patch_one(request: web.Request) -> web.Response:
    """Change ttl and metadata."""
    session = session_of(request)
    body = wire.decode(await request.read(), wire.PatchSession)

    def changed() -> Changed:
        record = session.record
        ttl_s = record.ttl_s if isinstance(body.ttl, UnsetType) else body.ttl
        metadata = record.metadata if isinstance(body.metadata, UnsetType) else body.metadata
        return Changed(
            uid=session.uid, metadata=wire.check_metadata(metadata), ttl_s=wire.check_ttl(ttl_s)
        )

    await handover.change(service_of(request), session, changed)
    return json_response(session_json(session))


async def delete_one(request: web.Request) -> web.Response:
    """End a session; its own stored bytes go."""
    session = session_of(request)
    await verbs.close(service_of(request), session)
    return json_response({"id": session.id, "object": "session.deleted", "deleted": True})


async def fork(request: web.Request) -> web.Response:
    """A session with the same first words; 201."""
    body = wire.decode(await request.read(), wire.Fork)
    source = session_of(request, body.cache_salt)
    new = await verbs.fork(service_of(request), source, body.id, body.at)
    return json_response(session_json(new), 201)


async def suspend(request: web.Request) -> web.Response:
    """Write a session down; an operation, or ?wait=true."""
    service = service_of(request)
    body = wire.decode(await request.read(), wire.Suspend)
    session = session_of(request, body.cache_salt)
    tier = body.tier or ("store" if service.may_be_stored(session) else "host")
    service.bridge()  # what would fail at once is answered at once, not in an operation
    session.refuse_busy()

    async def work() -> dict[str, Any]:
        stored_tokens = await verbs.suspend(service, session, tier)
        return session_json(session) | {"stored_tokens": stored_tokens}

    return await long_verb(request, operation_on(session, "suspend"), work())


async def resume(request: web.Request) -> web.Response:
    """Bring a session to the device; an operation, or ?wait=true.

    One that this daemon does not know is taken over from the daemon that suspended it.
    """
    service = service_of(request)
    body = wire.decode(await request.read(), wire.Resume)
    service.bridge()  # what would fail at once is answered at once, not in an operation
    try:
        session = session_of(request, body.cache_salt)
    except (SessionNotFound, SessionExpired) as unknown:
        salt = salt_of(request, body.cache_salt)
        try:
            session = await handover.adopt(service, salt, check_id(request.match_info["id"]))
        except SessionNotFound:
            raise unknown from None
    session.refuse_busy()

    async def work() -> dict[str, Any]:
        await verbs.resume(service, session)
        return session_json(session)

    return await long_verb(request, operation_on(session, "resume"), work())


async def rewind(request: web.Request) -> web.Response:
    """Forget tokens from ``to`` on."""
    body = wire.decode(await request.read(), wire.Rewind)
    session = session_of(request, body.cache_salt)
    await verbs.rewind(service_of(request), session, body.to)
    return json_response(session_json(session))


async def pin(request: web.Request) -> web.Response:
    """Promise a session's pages host memory."""
    body = wire.decode(await request.read(), wire.Pin)
    session = session_of(request, body.cache_salt)
    await verbs.pin(service_of(request), session, body.tier, wire.check_ttl(body.ttl))
    return json_response(session_json(session))


async def unpin(request: web.Request) -> web.Response:
    """Withdraw the promise."""
    session = session_of(request)
    await verbs.unpin(service_of(request), session)
    return json_response(session_json(session))


async def resume_points(request: web.Request) -> web.Response:
    """Where the session can be continued without replay."""
    session = session_of(request)
    positions = await verbs.resume_points(service_of(request), session)
    return json_response({"session_id": session.id, "positions": positions})


async def residency(request: web.Request) -> web.Response:
    """Tokens and bytes by group and tier."""
    session = session_of(request)
    cells = await verbs.residency(service_of(request), session)
    return json_response({"session_id": session.id, "residency": cells})


async def events(request: web.Request) -> web.StreamResponse:
    """State changes and progress until the session is closed or the client leaves."""
    service, session = service_of(request), session_of(request)
    if len(session.subscribers) >= SUBSCRIBERS_MAX:
        raise QueueFull(f"{SUBSCRIBERS_MAX} clients follow this session already")
    subscriber = Subscriber()
    session.subscribers.add(subscriber)
    stream = EventStream(request, service.config.client_stall_s)
    try:
        await stream.open()
        await stream.event(session_json(session), "session")
        while not service.stop_asked.is_set():
            found = await subscriber.next(service.config.keepalive_s)
            if found is None:
                await stream.comment("keep-alive")
                continue
            name, data = found
            await stream.event({**data, "dropped": subscriber.dropped}, name)
            if name == "closed":
                break
        await stream.close()
    finally:
        session.subscribers.discard(subscriber)
    return stream.response


def add_routes(app: web.Application) -> None:
    """Register this module's routes."""
    one = "/v1/sessions/{id}"
    app.add_routes(
        [
            web.post("/v1/sessions", create),
            web.get("/v1/sessions", list_sessions),
            web.get(one, get_one),
            web.patch(one, patch_one),
            web.delete(one, delete_one),
            web.post(one + "/append", append),
            web.post(one + "/fork", fork),
            web.post(one + "/suspend", suspend),
            web.post(one + "/resume", resume),
            web.post(one + "/rewind", rewind),
            web.put(one + "/pin", pin),
            web.delete(one + "/pin", unpin),
            web.get(one + "/resume_points", resume_points),
            web.get(one + "/residency", residency),
            web.get(one + "/events", events),
        ]
    )
