"""Sessions on the engine: open them where they are not known, run requests, keep their words.

A request that fails leaves its session as it was, so it can be sent again. One that is
cancelled keeps what was appended and drawn. Nothing is answered as done before it is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from dsv4_tierd.daemon.bridge import NOBODY, Bridge
from dsv4_tierd.daemon.config import Policy, ServeConfig
from dsv4_tierd.daemon.diagnosis import RecentPrompts
from dsv4_tierd.daemon.journal import Journal
from dsv4_tierd.daemon.ledger import AnyEvent, Moved, Resumed, Suspended, Turn
from dsv4_tierd.daemon.metrics import Metrics
from dsv4_tierd.daemon.operations import Operations
from dsv4_tierd.daemon.run import NO_LIMIT, Run, error_of
from dsv4_tierd.daemon.sessions import Registry, Session, SessionState
from dsv4_tierd.daemon.shared import SharedSessions
from dsv4_tierd.daemon.tokenize import TextService
from dsv4_tierd.daemon.transcript import ID_BYTES, Transcript, common_bytes
from dsv4_tierd.daemon.worker import Worker
from dsv4_tierd.engine.messages import (
    CloseSession,
    Done,
    Failed,
    ForkSession,
    OpenSession,
    PinSession,
    Progress,
    Ready,
    RewindSession,
    Sampling,
    Submit,
)
from dsv4_tierd.tiering.errors import (
    BadRequest,
    ContextLengthExceeded,
    Draining,
    ExceedsCapacity,
    InvalidRequest,
    PreconditionFailed,
    Refused,
    SessionBusy,
    SessionNotFound,
    StoreUnavailable,
    TierError,
    TransferFailed,
)

log = logging.getLogger("dsv4_tierd.daemon")

# The worker does not know the session as the daemon does: tell it again, once.
_REOPEN = frozenset({PreconditionFailed.code, SessionNotFound.code})


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one request adds to a session and asks for. ``max_tokens`` 0: only compute."""

    append_ids: bytes = b""
    prompt_ids: bytes | None = None  # instead of append_ids: all the session's words
    max_tokens: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    credit: int = NO_LIMIT
    turn: Turn = Turn.NONE
    close_after: bool = False  # an ephemeral session's last request


class Service:
    """Everything that routes need. One event loop; ``tasks`` owns what outlives a handler."""

    def __init__(
        self,
        config: ServeConfig,
        worker: Worker,
        journal: Journal,
        text: TextService,
        tasks: asyncio.TaskGroup,
        shared: SharedSessions,
    ) -> None:
        self.config = config
        self.worker = worker
        self.journal = journal
        self.text = text
        self.sessions = Registry(journal.ledger, config.sessions_max)
        self.operations = Operations(tasks)
        self.metrics = Metrics()
        self.recent = RecentPrompts()
        self.draining = False
        self.stop_asked = asyncio.Event()
        self.running: set[Run] = set()
        self.shared = shared
        self.shared.lost = self._lost
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks = tasks

    # ------------------------------------------------------------ other daemons
    def _lost(self, session: Session) -> None:
        self.spawn(self.regain(session), f"regain {session.id}")

    async def regain(self, session: Session) -> None:
        """Claim a session anew whose claim has run out; if it is another's now, its run ends."""
        if session.is_busy and session.run is None:
            return  # a verb holds it, and asks by itself
        try:
            await self.shared.claim(session)
        except (SessionBusy, PreconditionFailed) as error:
            log.warning("session=%s is not this daemon's any more: %s", session.id, error.message)
            if session.run is not None:
                session.run.stop()
        except (TransferFailed, StoreUnavailable, SessionNotFound) as error:
            log.warning("session=%s could not be claimed: %s", session.id, error.message)

    async def _reclaim(self) -> None:
        for session in self.sessions:
            record = self.journal.ledger.records.get(session.uid)
            if record is not None and record.shared_version and record.suspended_tier is None:
                await self.regain(session)

    # ------------------------------------------------------------ the engine
    @property
    def model(self) -> Ready:
        """The model served. Raises EngineRestarting until it was loaded once."""
        if self.worker.model is None:
            self.worker.bridge()
        assert self.worker.model is not None
        return self.worker.model

    def bridge(self) -> Bridge:
        """The engine, for new work. Raises Draining, EngineRestarting."""
        if self.draining:
            raise Draining("the daemon is draining: it takes no new work", retry_after_s=5.0)
        return self.worker.bridge()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task of the daemon; its failure is logged, and is nobody else's."""
        return self._tasks.create_task(_guarded(work, name), name=name)

    async def ensure_open(self, bridge: Bridge, session: Session) -> None:
        """Make this worker incarnation know the session, with its journalled words."""
        if session.opened_in == bridge.incarnation:
            return
        session.opened_in = bridge.incarnation
        if session.ephemeral:
            policy = self.config.default_policy
            await bridge.send(
                OpenSession(session_id=session.uid, salt=session.salt, write_policy=policy)
            )
            return
        record = session.record
        opening = OpenSession(
            session_id=session.uid,
            salt=session.salt,
            token_ids=record.transcript.read(),
            tail_key=record.tail_key,
            tail_borrowed=record.tail_borrowed,
            write_policy=self.policy_of(session),
        )
        if record.pinned_tier is None:
            await bridge.send(opening)
        else:  # both at once: an unpin that comes while the socket is full stays the last word
            bridge.send_soon(opening)
            await bridge.send(PinSession(op_id=NOBODY, session_id=session.uid, pinned=True))

    def policy_of(self, session: Session) -> Policy:
        """What is written to the store of its words, and when."""
        said: Any = session.record.write_policy  # checked when it was made
        policy: Policy = said or self.config.default_policy
        return policy

    def may_be_stored(self, session: Session) -> bool:
        """Whether the session can be suspended to the store."""
        if self.config.store == "none":
            return False
        return self.config.has_near_tier or self.policy_of(session) != "never"

    def forget_in_worker(self, session: Session) -> None:
        """The worker's idea of the session is doubtful: it is opened afresh before its next use.

        Never waits, so that a caller who is being cancelled can do it.
        """
        opened_in, session.opened_in = session.opened_in, 0
        if self.worker.is_up and (bridge := self.worker.bridge()).incarnation == opened_in:
            bridge.send_soon(CloseSession(op_id=NOBODY, session_id=session.uid))

    async def on_worker_ready(self, bridge: Bridge) -> None:
        """A new worker keeps old promises: pinned sessions are opened at once.

        Of a session that others could resume from an older record, this daemon is the owner still.
        """
        self.spawn(self._reclaim(), "reclaim")
        for session in self.sessions:
            if session.uid in self.journal.ledger.records and session.record.pinned_tier:
                await self.ensure_open(bridge, session)

    # ------------------------------------------------------------ requests
    def check_room(self, session: Session, work: Work) -> None:
        """Raises ContextLengthExceeded, ExceedsCapacity, InvalidRequest."""
        prompt = session.length + len(work.append_ids) // ID_BYTES
        if prompt == 0:
            raise InvalidRequest("there is nothing to compute: the session and the input are empty")
        self.check_context(prompt, work.max_tokens, "max_tokens")

    def check_context(self, prompt: int, new: int, param: str) -> None:
        """Refuse what the model, or what the budgets, could never hold, by its own name.

        Raises ContextLengthExceeded, ExceedsCapacity.
        """
        asked, model = f"{prompt} prompt tokens and {new} new ones", self.model
        if prompt + new > model.model_context_length:
            context = model.model_context_length
            raise ContextLengthExceeded(
                f"{asked} are more than the model's context of {context}", param=param
            )
        if prompt + new > model.context_length:
            raise ExceedsCapacity(
                f"{asked} are more than the {model.context_length} that the budgets hold",
                param=param,
            )

    def default_max_tokens(self, prompt_tokens: int) -> int:
        """What max_tokens is when it is not said: the configured default, within the context."""
        room = self.model.context_length - prompt_tokens
        return max(1, min(self.config.max_tokens_default, room))

    async def submit(self, session: Session, work: Work) -> Run:
        """Start a request; the session is busy until it has ended and is journalled.

        Raises SessionBusy, Draining, EngineRestarting, ContextLengthExceeded, ExceedsCapacity.
        """
        bridge = self.bridge()
        session.enter(SessionState.ACTIVE)
        try:
            await self.shared.claim(session)
            if work.prompt_ids is not None:
                work = await self._as_append(session, work, work.prompt_ids)
            self.check_room(session, work)
            run = Run(f"r-{uuid.uuid4().hex}", bridge, work.credit)
            session.run, session.pending_ids = run, work.append_ids
            await self._send(bridge, session, work, run)
        except BaseException:
            unread = session.run
            session.leave()
            if unread is not None:  # its frame may be under way, and nobody will read the answer
                unread.cancel()
                self.forget_in_worker(session)
            raise
        self.running.add(run)
        self._idle.clear()
        self.spawn(self._finish(session, work, run), f"finish {run.request_id}")
        return run

    async def _as_append(self, session: Session, work: Work, prompt_ids: bytes) -> Work:
        """Rewind to what the session and the prompt have in common; append the rest."""
        self.check_context(len(prompt_ids) // ID_BYTES, work.max_tokens, "messages")
        common = common_bytes(session.transcript.read(), prompt_ids) // ID_BYTES
        await self.rewind_taken(session, common)
        return replace(work, append_ids=prompt_ids[common * ID_BYTES :], prompt_ids=None)

    async def rewind_taken(self, session: Session, to: int) -> None:
        """Forget tokens from ``to`` on, for a caller that holds the session."""
        length = session.length
        if not 0 <= to <= length:
            raise InvalidRequest(f"to is 0 to {length}, the tokens of the session", param="to")
        if to == length:
            return
        if self.worker.is_up and session.opened_in == self.worker.bridge().incarnation:
            uid = session.uid
            try:
                await self.worker.bridge().ask(
                    lambda op: RewindSession(op_id=op, session_id=uid, to=to)
                )
            except TierError as error:
                log.info("session=%s is opened afresh: %s", session.id, error.message)
                self.forget_in_worker(session)
        await self.keep_tokens(session, session.transcript.cut(to), b"", Turn.NONE)

    async def _send(self, bridge: Bridge, session: Session, work: Work, run: Run) -> None:
        await self.ensure_open(bridge, session)
        bridge.listen(run.request_id, run)
        await bridge.send(
            Submit(
                request_id=run.request_id,
                session_id=session.uid,
                append_ids=work.append_ids,
                max_tokens=work.max_tokens,
                sampling=work.sampling,
                expected_tokens=session.length,
                ephemeral=work.close_after,
                credit=work.credit,
            )
        )

    async def _finish(self, session: Session, work: Work, run: Run) -> None:
        started_s = time.monotonic()
        end: Done | Failed
        try:
            end = await self._end_of(session, work, run)
            if isinstance(end, Done) and not session.ephemeral:
                end = await self._keep(session, work, run, end)
            if isinstance(end, Failed) and session.ephemeral:
                self.forget_in_worker(session)
        except TierError as error:
            end = Failed.of(run.request_id, error)
        except Exception:
            log.exception("bug in request %s", run.request_id)
            self.forget_in_worker(session)
            end = Failed.of(
                run.request_id, TierError("an error inside the daemon; its log says more")
            )
        finally:
            self.running.discard(run)
            if not self.running:
                self._idle.set()
            session.leave()
        run.publish_end(end)
        self.metrics.request_ended(end, time.monotonic() - started_s)
        log.info(
            "request id=%s session=%s end=%s drawn=%d seconds=%.3f",
            run.request_id,
            session.id,
            end.finish_reason if isinstance(end, Done) else end.code,
            len(run.generated),
            time.monotonic() - started_s,
        )

    async def _end_of(self, session: Session, work: Work, run: Run) -> Done | Failed:
        end = await asyncio.shield(run.ended)
        if isinstance(end, Failed) and end.code in _REOPEN and not session.ephemeral:
            log.warning("session=%s is told to the engine again: %s", session.id, end.message)
            self.forget_in_worker(session)
            bridge = self.bridge()
            run.restart(bridge)
            await self._send(bridge, session, work, run)
            if run.is_abandoned:  # its reader left when there was nothing to cancel
                run.stop()
            end = await asyncio.shield(run.ended)
        if isinstance(end, Failed) and (run.generated or not _was_refused(end)):
            self.forget_in_worker(session)  # it may hold words that are not kept
        if run.flooded:
            self.forget_in_worker(session)
            return Failed.of(
                run.request_id, TierError("the engine sent more than it was allowed to")
            )
        return end

    async def _keep(self, session: Session, work: Work, run: Run, end: Done) -> Done | Failed:
        try:
            await self.shared.claim(session)  # at once, unless it ran out meanwhile
            await self.keep_tokens(
                session, session.transcript, work.append_ids + run.generated.tobytes(), work.turn
            )
        except TierError as error:
            self.forget_in_worker(session)
            return Failed.of(run.request_id, error)
        return end

    def fork_ephemeral(self, source: Session, at: int) -> Session:
        """A nameless copy of a session that the engine knows; Submit may follow at once."""
        bridge = self.bridge()
        assert source.opened_in == bridge.incarnation
        new = self.sessions.ephemeral(source.salt)
        new.opened_in, new.ephemeral_tokens = bridge.incarnation, at
        bridge.send_soon(ForkSession(op_id=NOBODY, source_id=source.uid, session_id=new.uid, at=at))
        return new

    async def keep_tokens(
        self, session: Session, at: Transcript, ids: bytes, turn: Turn
    ) -> Transcript:
        """Journal the session's tokens as ``at`` and then ``ids``. Raises StoreUnavailable."""
        events, transcript = self.journal.ledger.grow(at, ids)
        head: int | None = None if transcript.run is None else transcript.run.run_id
        moved: AnyEvent = Moved(
            uid=session.uid,
            run=head,
            length=transcript.length,
            used_s=time.time(),
            turn=turn,
        )
        events += [moved]
        if session.version_seen > session.record.shared_version:
            seen = Suspended(uid=session.uid, tier="store", shared_version=session.version_seen)
            events += [seen, Resumed(uid=session.uid)]
        await self.journal.commit(events)
        return transcript

    async def finish_run(self, run: Run) -> Done:
        """Wait for a request's end without reading its tokens. Cancels it if the waiter is gone."""
        try:
            while True:
                event = await run.next()
                if isinstance(event, Done):
                    return event
        except asyncio.CancelledError:
            run.cancel()
            raise

    def follow(self, session: Session, event: Progress) -> None:
        session.tell("progress", {"done": event.done, "total": event.total})

    async def all_ended(self, timeout_s: float | None = None) -> None:
        """Wait until no request runs, or for ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    def cancel_all(self) -> None:
        for run in self.running:
            run.stop()


def _was_refused(end: Failed) -> bool:
    """Whether the engine did not even begin: then it holds what it held before."""
    return isinstance(error_of(end), BadRequest | Refused)


async def _guarded(work: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await work
    except asyncio.CancelledError:
        raise
    except Exception:
        log.exception("task failed: %s", name)
