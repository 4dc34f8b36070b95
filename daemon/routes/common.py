"""What the route modules share: the service, whose request it is, and its words as ids."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from aiohttp import web

from dsv4_tierd.daemon.encoding import answer_header, encode_messages
from dsv4_tierd.daemon.ledger import Turn
from dsv4_tierd.daemon.middleware import SERVICE, error_response, json_response
from dsv4_tierd.daemon.operations import Operation, OperationState, new_operation
from dsv4_tierd.daemon.service import Service
from dsv4_tierd.daemon.sessions import Session, check_salt
from dsv4_tierd.daemon.tokenize import Piece
from dsv4_tierd.daemon.transcript import Transcript
from dsv4_tierd.daemon.wire import Input, bytes_ids, error_json, pack_ids
from dsv4_tierd.tiering.errors import InvalidRequest, PreconditionFailed, SessionBusy

OCTETS = "application/octet-stream"


def service_of(request: web.Request) -> Service:
    """The service behind this app."""
    return request.app[SERVICE]


def salt_of(request: web.Request, in_body: str | None = None) -> str:
    """The caller's salt: body, header X-Cache-Salt, or query; they must not disagree."""
    header = request.headers.get("X-Cache-Salt")
    given = {s for s in (in_body, header, request.query.get("cache_salt")) if s is not None}
    if len(given) > 1:
        raise InvalidRequest("cache_salt is given twice, differently", param="cache_salt")
    return check_salt(given.pop() if given else "")


def session_of(request: web.Request, salt_in_body: str | None = None) -> Session:
    """The session that the path names. Raises SessionNotFound, SessionExpired."""
    salt = salt_of(request, salt_in_body)
    return service_of(request).sessions.get(salt, request.match_info["id"])


def is_octets(request: web.Request) -> bool:
    """Only when it says so: a body without a type, or with one that is none, is JSON."""
    said, _, _ = request.headers.get("Content-Type", "").partition(";")
    return said.strip().lower() == OCTETS


def flag(request: web.Request, name: str) -> bool:
    """A query parameter that is true or false. Raises InvalidRequest."""
    text = request.query.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name} is true or false", param=name)
    return text in ("true", "1")


async def ids_of(
    service: Service, session: Session | None, given: Input, octets: bytes | None
) -> tuple[bytes, Turn | None]:
    """New words as ids, and where the chat then stands (None: as before).

    ``session`` None: the words start a session. Raises InvalidRequest, InvalidTokenIds.
    """
    names = given.given() + (["body"] if octets is not None else [])
    if len(names) > 1:
        raise InvalidRequest(f"give one of messages, text, token_ids, not {' and '.join(names)}")
    if octets is not None:
        return bytes_ids(octets, service.model.vocab_size), Turn.NONE
    if given.token_ids is not None:
        return pack_ids(given.token_ids, service.model.vocab_size), Turn.NONE
    if given.text is not None:
        return await service.text.encode_text(given.text), Turn.NONE
    if given.messages is not None:
        empty = session is None or session.length == 0
        turn = Turn.NONE if session is None else session.record.turn
        last = None if session is None else session.transcript.last_token()
        eos = last in service.model.eos_token_ids
        service.text.require()
        pieces, turn = encode_messages(given.messages, turn=turn, empty=empty, ends_with_eos=eos)
        return await service.text.encode(pieces), turn
    return b"", None


async def with_answer_header(
    service: Service, session: Session, ids: bytes, turn: Turn | None, *, thinking: bool
) -> tuple[bytes, Turn]:
    """Ids of a generate request: messages that wait for an answer get its header first."""
    now = session.record.turn if turn is None else turn
    if now is Turn.ASKED:
        header: tuple[Piece, ...] = answer_header(thinking=thinking)
        return ids + await service.text.encode(header), Turn.ANSWERING
    return ids, now


def check_expected(session: Session, expected: int | None) -> None:
    """Raises PreconditionFailed: the session is not as long as the caller thinks."""
    if expected is not None and expected != session.length:
        raise PreconditionFailed(
            f"the session has {session.length} tokens, not {expected}", param="expected_tokens"
        )


def check_unmoved(session: Session, read: Transcript) -> None:
    """Raises SessionBusy: the session is not at ``read`` any more, which new words are to follow.

    To be called when they are encoded: that takes its time, and nobody holds the session meanwhile.
    """
    if session.transcript is not read:
        raise SessionBusy(f"session {session.id!r} went on meanwhile: one request at a time")


def session_json(session: Session) -> dict[str, Any]:
    """A session as the API shows it."""
    record = session.record
    return {
        "id": session.id,
        "object": "session",
        "state": session.state.value,
        "tokens": session.length,
        "created_at": record.created_s,
        "used_at": record.used_s,
        "ttl": record.ttl_s,
        "expires_at": session.expires_s,
        "metadata": record.metadata,
        "cache_salt": record.salt,
        "encoding": record.encoding,
        "write_policy": record.write_policy,
        "suspended_tier": record.suspended_tier,
        "pin": None
        if record.pinned_tier is None
        else {"tier": record.pinned_tier, "until": record.pinned_until_s},
    }


def operation_json(operation: Operation) -> dict[str, Any]:
    """An operation as the API shows it."""
    return {
        "id": operation.id,
        "object": "operation",
        "verb": operation.verb,
        "session_id": operation.session_id,
        "state": operation.state.value,
        "created_at": operation.created_s,
        "ended_at": operation.ended_s,
        "progress": None
        if operation.progress is None
        else dict(zip(("done", "total"), operation.progress, strict=True)),
        "result": operation.result,
        "error": None if operation.error is None else error_json(operation.error)["error"],
    }


async def long_verb(
    request: web.Request,
    operation: Operation,
    work: Coroutine[Any, Any, dict[str, Any]],
) -> web.Response:
    """202 and an operation; with ?wait=true its result. A waiter who leaves stops nothing."""
    service = service_of(request)
    try:
        wait = flag(request, "wait")
        service.operations.start(operation, work)
    except BaseException:
        work.close()
        raise
    if not wait:
        response = json_response(operation_json(operation), 202)
        response.headers["Location"] = f"/v1/operations/{operation.id}"
        return response
    await operation.finished.wait()
    if operation.state is OperationState.FAILED:
        assert operation.error is not None
        return error_response(operation.error)
    return json_response(operation.result)


def operation_on(session: Session, verb: str) -> Operation:
    """A fresh operation on a session."""
    return new_operation(verb, session.salt, session.id)
