"""What the daemon asks for, message by message. Every verb answers, errors included."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dsv4_tierd.engine import messages as m
from dsv4_tierd.engine.detokenize import TextStream
from dsv4_tierd.engine.loop import Engine
from dsv4_tierd.engine.report import residency, stats
from dsv4_tierd.engine.request import Purpose, Request
from dsv4_tierd.engine.session import Session, StoredTail
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS, TokenArray, Transcript
from dsv4_tierd.tiering.check import AuditError, check
from dsv4_tierd.tiering.errors import (
    ContextLengthExceeded,
    Draining,
    InvalidRequest,
    InvalidTokenIds,
    PreconditionFailed,
    SessionBusy,
    SessionExists,
    SessionNotFound,
    StoreUnavailable,
    TierError,
)
from dsv4_tierd.tiering.idle import IdleTails
from dsv4_tierd.tiering.replay import has_point
from dsv4_tierd.tiering.retention import Suspension
from dsv4_tierd.tiering.store.maintain import tidied, tiers_of, verified
from dsv4_tierd.tiering.store.protocol import WritePolicy

T = TypeVar("T")


@dataclass(slots=True)
class _Pending:
    """An operation that ends in a later step: ``poll`` returns its Ack, or None.

    ``suspends``: the session that it suspends, and how far that is.
    """

    op_id: int
    poll: Callable[[], m.Ack | None]
    suspends: tuple[Session, Suspension] | None = None


class Verbs:
    """Dispatches messages to the engine; ``poll`` finishes what takes longer than a step."""

    def __init__(self, engine: Engine, vocab_size: int, context_length: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._pending: list[_Pending] = []
        self._draining = False
        self._handlers: dict[type, Callable[..., m.Ack | None]] = {
            m.OpenSession: self._open_session,
            m.ForkSession: self._fork,
            m.Submit: self._submit,
            m.Credit: self._credit,
            m.Cancel: self._cancel,
            m.SuspendSession: self._suspend,
            m.ResumeSession: self._resume,
            m.RewindSession: self._rewind,
            m.CloseSession: self._close,
            m.PinSession: self._pin,
            m.AskResidency: self._residency,
            m.AskResumePoints: self._resume_points,
            m.LookupPrefix: self._lookup,
            m.WarmPrefix: self._warm,
            m.PinPrefix: self._pin_prefix,
            m.TendStore: self._tend,
            m.PurgeSalt: self._purge,
            m.AskStats: self._stats,
            m.Audit: self._audit,
            m.Drain: self._drain,
        }

    def handle(self, message: m.ToWorker) -> None:
        """Act on one message; its answer, or its error, is sent."""
        try:
            answer = self._handlers[type(message)](message)
        except TierError as error:
            answer = self._refuse(message, error)
        if answer is not None:
            self._engine.send(answer)

    def poll(self) -> None:
        """Finish what can be finished."""
        for pending in list(self._pending):
            try:
                answer = pending.poll()
            except TierError as error:
                answer = m.Ack.refusing(pending.op_id, error)
            if answer is not None:
                self._pending.remove(pending)
                self._engine.send(answer)

    def _refuse(self, message: m.ToWorker, error: TierError) -> m.Ack | None:
        if isinstance(message, m.Submit):
            self._engine.send(m.Failed.of(message.request_id, error))
            return None
        op_id = getattr(message, "op_id", None)
        if op_id is None:
            raise error
        return m.Ack.refusing(op_id, error)

    # ------------------------------------------------------------ sessions
    def _find(self, session_id: str, idle: bool = False) -> Session:
        session = self._engine.sessions.get(session_id)
        if session is None:
            raise SessionNotFound(f"session {session_id} is not open in the engine")
        if idle and session.request is not None:
            raise SessionBusy(f"session {session_id} has a running request")
        return session

    def _tokens(self, data: bytes) -> TokenArray:
        tokens = np.frombuffer(data, "<i4") if len(data) % 4 == 0 else None
        if tokens is None or (
            len(tokens) and not (tokens.min() >= 0 and tokens.max() < self._vocab_size)
        ):
            raise InvalidTokenIds(f"token ids are int32 from 0 to {self._vocab_size - 1}")
        return tokens.astype(np.int32, copy=False)

    def _open_session(self, message: m.OpenSession) -> None:
        known = self._engine.sessions.get(message.session_id)
        if known is not None:
            if known.request is not None:
                self._engine.end(known.request, "cancelled")
            self._engine.forget(known)
        transcript = Transcript(
            self._engine.tiers.root(message.salt), self._tokens(message.token_ids)
        )
        stored = StoredTail.from_key(message.tail_key) if message.tail_key else None
        if stored is not None:
            stored.owned = not message.tail_borrowed
        policy = None if message.write_policy is None else WritePolicy(message.write_policy)
        self._engine.sessions[message.session_id] = Session(
            message.session_id, message.salt, transcript, stored_tail=stored, write_policy=policy
        )

    def _fork(self, message: m.ForkSession) -> m.Ack:
        source = self._find(message.source_id)
        if message.session_id in self._engine.sessions:
            raise SessionExists(f"session {message.session_id} exists")
        length = len(source.transcript)
        if message.at is not None and not 0 <= message.at <= length:
            raise InvalidRequest(f"a fork at {message.at} of {length} tokens", param="at")
        twin = Session(message.session_id, source.salt, source.transcript.fork(message.at))
        twin.write_policy = source.write_policy
        tiers, request = self._engine.tiers, source.request
        if request is not None and request.seq is not None and request.seq.began:
            twin.tail = tiers.snapshot(request.seq)
        elif source.tail is not None and not IdleTails.lost(source.tail):
            twin.tail = tiers.idle.share(source.tail)
        elif len(twin.transcript) == length and source.stored_tail is not None:
            stored = source.stored_tail
            twin.stored_tail = StoredTail(stored.digest, stored.size, stored.usable, owned=False)
        if twin.tail is not None and twin.tail.position >= len(twin.transcript):
            tiers.idle.release(twin.tail)
            twin.tail = None
        self._engine.sessions[twin.id] = twin
        return m.Ack(op_id=message.op_id)

    def _rewind(self, message: m.RewindSession) -> m.Ack:
        session = self._find(message.session_id, idle=True)
        length = len(session.transcript)
        if not 0 <= message.to <= length:
            raise InvalidRequest(f"a rewind to {message.to} of {length} tokens", param="to")
        self._engine.truncate(session, message.to)
        self._engine.retention.follow(session.id, session.transcript, session.salt)
        return m.Ack(op_id=message.op_id)

    def _close(self, message: m.CloseSession) -> m.Ack | None:
        session = self._find(message.session_id)
        if session.request is not None:
            self._engine.end(session.request, "cancelled")
        retention = self._engine.retention
        if retention.is_pinned(session.id):
            retention.unpin(session.id)
        stored = session.stored_tail
        self._engine.forget(session)
        if message.drop_from is None:
            return m.Ack(op_id=message.op_id)
        tails = self._end_suspensions(session)
        if stored is not None and stored.owned:
            tails.add(stored.digest)
        return self._when_gone(
            message.op_id,
            retention.drop(session.transcript, session.salt, message.drop_from, tails),
        )

    def _end_suspensions(self, session: Session) -> set[bytes]:
        """A session is deleted: names of the tails that its suspensions may have written."""
        tails: set[bytes] = set()
        for pending in list(self._pending):
            if pending.suspends is None or pending.suspends[0].id != session.id:
                continue
            if (digest := pending.suspends[1].tail_key) is not None:
                tails.add(digest)
            self._pending.remove(pending)
            gone = SessionNotFound(f"session {session.id} was deleted meanwhile")
            self._engine.send(m.Ack.refusing(pending.op_id, gone))
        return tails

    def _when_gone(self, op_id: int, deletion: Future[int] | None) -> m.Ack | None:
        """Ack with ``removed`` once the stored bytes are gone; at once if there is no store."""
        if deletion is None:
            return m.Ack(op_id=op_id, removed=0)
        self._when_done(op_id, deletion, lambda count: m.Ack(op_id=op_id, removed=count))
        return None

    def _when_done(self, op_id: int, call: Future[T], answer: Callable[[T], m.Ack]) -> None:
        """Ack when a call to the store has ended; a TierError of it is told as it is."""

        def poll() -> m.Ack | None:
            if not call.done():
                return None
            error = call.exception()
            if error is not None and not isinstance(error, TierError):
                raise StoreUnavailable(f"the store failed: {error!r}")
            return answer(call.result())

        self._pending.append(_Pending(op_id, poll))

    # ------------------------------------------------------------ requests
    def _submit(self, message: m.Submit) -> None:
        if self._draining:
            raise Draining("the service is stopping", retry_after_s=5.0)
        session = self._find(message.session_id, idle=True)
        added = self._tokens(message.append_ids)
        base = len(session.transcript)
        if message.expected_tokens not in (None, base):
            raise PreconditionFailed(
                f"the session has {base} tokens in the engine, not {message.expected_tokens}"
            )
        total = base + len(added)
        if not total:
            raise InvalidRequest("an empty session has nothing to compute")
        if total + message.max_tokens > self._context_length:
            raise ContextLengthExceeded(
                f"{total} tokens and max_tokens {message.max_tokens} exceed the model's "
                f"{self._context_length}"
            )
        purpose = Purpose.GENERATE if message.max_tokens else Purpose.APPEND
        request = Request(
            id=message.request_id,
            session=session,
            purpose=purpose,
            base=base,
            limit=total if message.max_tokens else total - 1,
            max_tokens=message.max_tokens,
            sampling=message.sampling,
            text=TextStream(self._engine.tokenizer, message.sampling.stop),
            credit=message.credit,
            ephemeral=message.ephemeral,
        )
        self._engine.scheduler.enqueue(request)
        session.transcript.append(added)
        session.request = request
        self._engine.requests[request.id] = request

    def _credit(self, message: m.Credit) -> None:
        request = self._engine.requests.get(message.request_id)
        if request is not None:
            request.credit += message.tokens

    def _cancel(self, message: m.Cancel) -> None:
        request = self._engine.requests.get(message.request_id)
        if request is not None:
            self._engine.end(request, "cancelled")

    def _resume(self, message: m.ResumeSession) -> m.Ack | None:
        session = self._find(message.session_id, idle=True)
        if not len(session.transcript):
            return m.Ack(op_id=message.op_id)
        request = Request(
            id=f"resume-{message.op_id}",
            session=session,
            purpose=Purpose.RESUME,
            base=len(session.transcript),
            limit=0,
            max_tokens=0,
            sampling=m.Sampling(),
            text=TextStream(None),
            op_id=message.op_id,
        )
        self._engine.scheduler.enqueue(request)
        session.request = request
        self._engine.requests[request.id] = request
        return None

    # ------------------------------------------------------------ keeping
    def _suspend(self, message: m.SuspendSession) -> m.Ack | None:
        session = self._find(message.session_id, idle=True)
        if message.tier == "host":
            self._engine.retention.suspend_to_host(session.tail)
            return m.Ack(op_id=message.op_id)
        suspension = self._start_suspension(session)
        self._pending.append(
            _Pending(
                message.op_id,
                lambda: self._suspended(message.op_id, session, suspension),
                (session, suspension),
            )
        )
        return None

    def _start_suspension(self, session: Session) -> Suspension:
        return self._engine.retention.suspend_to_store(
            session.id, session.transcript, session.salt, session.tail, session.write_policy
        )

    def _suspended(self, op_id: int, session: Session, suspension: Suspension) -> m.Ack | None:
        if not suspension.advance():
            if not self._engine.tiers.coordinator.up:
                raise StoreUnavailable("the store went away before everything was written")
            return None
        tail = suspension.tail
        if tail is None:
            pass  # there was no tail to write
        elif not suspension.is_of(session.id, session.transcript):
            self._engine.retention.drop_tail(session.salt, tail.key.digest)
        else:
            previous = session.stored_tail
            if previous is not None and previous.owned and previous.digest != tail.key.digest:
                self._engine.retention.drop_tail(session.salt, previous.digest)
            session.stored_tail = StoredTail(tail.key.digest, len(tail.payload))
        if session.request is None:
            self._engine.retention.suspend_to_host(session.tail)
        stored = session.stored_tail
        key = stored.key if stored and stored.usable else None
        return m.Ack(op_id=op_id, tail_key=key, stored_tokens=suspension.stored_tokens)

    def _pin(self, message: m.PinSession) -> m.Ack:
        session = self._find(message.session_id)
        if message.pinned:
            self._engine.retention.pin(session.id, session.transcript, session.salt)
        else:
            self._engine.retention.unpin(session.id)
        return m.Ack(op_id=message.op_id)

    def _pin_prefix(self, message: m.PinPrefix) -> None:
        root = self._engine.tiers.root(message.salt)
        words = Transcript(root, self._tokens(message.token_ids))
        future = self._engine.retention.pin_stored(words, message.salt, on=message.pinned)
        self._when_done(
            message.op_id, future, lambda n: m.Ack(op_id=message.op_id, stored_tokens=n)
        )

    def _tend(self, message: m.TendStore) -> None:
        work = verified if message.verb == "verify" else tidied
        future = self._engine.tiers.coordinator.submit_care(lambda store: work(tiers_of(store)))
        self._when_done(
            message.op_id, future, lambda found: m.Ack(op_id=message.op_id, tended=dict(found))
        )

    def _purge(self, message: m.PurgeSalt) -> m.Ack | None:
        return self._when_gone(message.op_id, self._engine.retention.purge(message.salt))

    def _drain(self, message: m.Drain) -> None:
        """Let requests end until the deadline, then suspend every session to the store."""
        self._draining = True
        end = time.monotonic() + message.deadline_s
        suspensions: list[Suspension] = []

        def poll() -> m.Ack | None:
            late = time.monotonic() > end
            if self._engine.busy and not late:
                return None
            for request in list(self._engine.requests.values()):
                self._engine.end(request, "cancelled")
            if not suspensions and self._engine.tiers.coordinator.up:
                suspensions.extend(
                    self._start_suspension(s)
                    for s in self._engine.sessions.values()
                    if self._engine.retention.may_be_stored(s.write_policy)
                )
            try:
                advanced = [suspension.advance() for suspension in suspensions]
                finished = all(advanced)
            except StoreUnavailable:
                finished = True  # what the store lacks is recomputed from the journal
            return m.Ack(op_id=message.op_id) if finished or late else None

        self._pending.append(_Pending(message.op_id, poll))

    # ------------------------------------------------------------ reading
    def _residency(self, message: m.AskResidency) -> m.Ack:
        cells = residency(self._engine, self._find(message.session_id))
        return m.Ack(op_id=message.op_id, residency=cells)

    def _resume_points(self, message: m.AskResumePoints) -> m.Ack:
        session = self._find(message.session_id)
        path = self._engine.tiers.match(session.transcript, session.salt, len(session.transcript))
        positions = [node.depth * BLOCK_TOKENS for node in path if has_point(node)]
        if session.tail is not None and not IdleTails.lost(session.tail):
            positions.append(session.tail.position)
        return m.Ack(op_id=message.op_id, positions=tuple(positions))

    def _lookup(self, message: m.LookupPrefix) -> m.Ack:
        tiers = self._engine.tiers
        transcript = Transcript(tiers.root(message.salt), self._tokens(message.token_ids))
        start, reused = tiers.lookup(transcript, message.salt)
        matched = m.Matched(
            matched_tokens=start.reused,
            reusable_tokens=start.reused - start.replayed,
            device_tokens=reused.device,
            host_tokens=reused.host,
            store_tokens=reused.store,
        )
        return m.Ack(op_id=message.op_id, matched=matched)

    def _warm(self, message: m.WarmPrefix) -> None:
        root = self._engine.tiers.root(message.salt)
        retention = self._engine.retention
        warming = retention.warm(Transcript(root, self._tokens(message.token_ids)), message.salt)

        def poll() -> m.Ack | None:
            if not retention.advance_warming(warming):
                return None
            warmed = m.Warmed(host_tokens=warming.host_tokens, loaded_tokens=warming.loaded_tokens)
            return m.Ack(op_id=message.op_id, warmed=warmed)

        self._pending.append(_Pending(message.op_id, poll))

    def _stats(self, message: m.AskStats) -> m.Ack:
        return m.Ack(op_id=message.op_id, stats=stats(self._engine))

    def _audit(self, message: m.Audit) -> m.Ack:
        try:
            check(self._engine.tiers, self._engine.retention)
        except AuditError as error:
            return m.Ack(op_id=message.op_id, code="internal_error", message=str(error))
        return m.Ack(op_id=message.op_id)
