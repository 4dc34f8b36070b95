"""What can be done with a session besides generating: create, fork, rewind, suspend, close ..."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from typing import Any, Literal

from dsv4_tierd.daemon import handover
from dsv4_tierd.daemon.bridge import Bridge
from dsv4_tierd.daemon.config import Policy
from dsv4_tierd.daemon.encoding import ENCODING_VERSION
from dsv4_tierd.daemon.ledger import AnyEvent, Created, Deleted, Pinned, Resumed, Turn
from dsv4_tierd.daemon.service import Service
from dsv4_tierd.daemon.sessions import Session, SessionState
from dsv4_tierd.daemon.transcript import ID_BYTES, Transcript, common_prefix
from dsv4_tierd.engine.messages import (
    AskResidency,
    AskResumePoints,
    CloseSession,
    Drain,
    ForkSession,
    PinSession,
    ResumeSession,
    SuspendSession,
    TierBytes,
)
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.errors import (
    InvalidRequest,
    NotPinned,
    PreconditionFailed,
    SessionBusy,
    SessionNotFound,
    TierError,
)

log = logging.getLogger("dsv4_tierd.daemon")

SWEEP_S = 0.5
DRAIN_PARALLEL = 4


async def create(
    service: Service,
    salt: str,
    id: str | None,
    *,
    ttl_s: float | None = None,
    metadata: dict[str, Any] | None = None,
    write_policy: Policy | None = None,
) -> Session:
    """An empty session, durable. Needs no engine. Raises SessionExists, StoreUnavailable."""
    session = service.sessions.add(salt, id)
    policy = write_policy or service.config.default_policy
    if id is not None and policy != "never":
        try:
            await service.shared.claim_new(session)
        except BaseException:
            service.sessions.remove(session)
            raise
    await _commit_new(
        service,
        session,
        [
            Created(
                uid=session.uid,
                id=session.id,
                salt=salt,
                created_s=time.time(),
                ttl_s=ttl_s,
                metadata=metadata or {},
                encoding=ENCODING_VERSION,
                write_policy=policy,
            )
        ],
    )
    return session


async def _commit_new(
    service: Service,
    session: Session,
    events: Sequence[AnyEvent],
    words: Transcript | None = None,
) -> None:
    """Keep the session exactly if its events are kept, even if the caller does not wait.

    ``words``: what they build on. Its source may let go of them before the events are applied.
    """

    def unmake() -> None:
        service.sessions.remove(session)
        service.forget_in_worker(session)
        if session.lease is not None:
            service.spawn(service.shared.release(session), f"release {session.id}")

    try:
        kept = service.journal.queue(events)
    except TierError:
        unmake()
        raise

    def ended(done: asyncio.Future[None]) -> None:
        nonlocal words
        words = None  # held until now
        if done.exception() is not None:
            unmake()

    kept.add_done_callback(ended)
    await asyncio.shield(kept)


async def fork(service: Service, source: Session, id: str | None, at: int | None) -> Session:
    """A session with the source's first ``at`` tokens (all it has now for None). Copies none.

    Allowed in any state. The engine copies the live tail if it has one; if not, or if the
    engine is away, the fork is opened from its words when first used.
    """
    kept, more = source.tokens_now()
    total = kept.length + len(more) // ID_BYTES
    if at is not None and not 0 <= at <= total:
        raise InvalidRequest(f"at is 0 to {total}, the tokens of the session", param="at")
    length = total if at is None else at
    record, turn = source.record, _turn_at(source, length, total)
    new = service.sessions.add(source.salt, id)
    events, head = _head_at(service, kept, more, length)
    created = Created(
        uid=new.uid,
        id=new.id,
        salt=source.salt,
        created_s=time.time(),
        ttl_s=record.ttl_s,
        metadata=record.metadata,
        encoding=record.encoding,
        run=None if head.run is None else head.run.run_id,
        length=length,
        turn=turn,
        tail_key=record.tail_key if length == record.transcript.length and not more else None,
        write_policy=record.write_policy,
    )
    _fork_in_worker(service, source, new, length)
    await _commit_new(service, new, [*events, created], head)
    return new


def _turn_at(source: Session, length: int, total: int) -> Turn:
    if length != total:
        return Turn.NONE
    return source.record.turn if source.run is None else Turn.ANSWERING


def _head_at(
    service: Service, kept: Transcript, more: bytes, length: int
) -> tuple[list[AnyEvent], Transcript]:
    if length <= kept.length:
        return [], kept.cut(length)
    return service.journal.ledger.grow(kept, more[: (length - kept.length) * ID_BYTES])


def _fork_in_worker(service: Service, source: Session, new: Session, length: int) -> None:
    """Ask for a copy of the live tail; what is sent for the fork later comes after it."""
    if not service.worker.is_up:
        return
    bridge = service.worker.bridge()
    if source.opened_in != bridge.incarnation or length == 0:
        return
    new.opened_in = bridge.incarnation
    asked = bridge.start_ask(
        lambda op: ForkSession(op_id=op, source_id=source.uid, session_id=new.uid, at=length)
    )

    async def check() -> None:
        try:
            await asked
        except TierError as error:
            log.info("session=%s forks by its words: %s", new.id, error.message)
            if new.opened_in == bridge.incarnation:
                new.opened_in = 0

    service.spawn(check(), f"fork {new.id}")


async def rewind(service: Service, session: Session, to: int) -> None:
    """Forget tokens from ``to`` on. Raises InvalidRequest, SessionBusy, StoreUnavailable."""
    with session.taken(SessionState.ACTIVE):
        await service.shared.claim(session)
        await service.rewind_taken(session, to)


async def suspend(service: Service, session: Session, tier: Literal["host", "store"]) -> int | None:
    """Write the session down; durable when it returns.

    Returns how many of its tokens the store has, where that is the tier: the rest, if any, was
    given up before it was written and is computed again from the words.
    """
    bridge = service.bridge()
    with session.taken(SessionState.SUSPENDING):
        return await suspend_taken(service, bridge, session, tier)


async def suspend_taken(
    service: Service, bridge: Bridge, session: Session, tier: Literal["host", "store"]
) -> int | None:
    """``suspend`` for a caller that holds the session."""
    await service.shared.claim(session)
    await service.ensure_open(bridge, session)
    ack = await bridge.ask(lambda op: SuspendSession(op_id=op, session_id=session.uid, tier=tier))
    await handover.write_down(service, session, tier, ack.tail_key)
    return ack.stored_tokens


async def resume(service: Service, session: Session) -> None:
    """Bring the session's pages and tail to the device, as whoever had it last left it."""
    bridge = service.bridge()
    with session.taken(SessionState.RESUMING):
        await handover.catch_up(service, session)
        await service.ensure_open(bridge, session)
        await bridge.ask(lambda op: ResumeSession(op_id=op, session_id=session.uid))
        await service.journal.commit([Resumed(uid=session.uid)])


async def _opened(service: Service, session: Session) -> Bridge:
    """The engine, which knows the session now, for a verb that does not hold it.

    Raises SessionBusy: the session is being closed.
    """
    bridge = service.bridge()
    session.refuse_closing()
    await service.ensure_open(bridge, session)
    return bridge


async def pin(service: Service, session: Session, tier: str, ttl_s: float | None) -> None:
    """Promise host memory. Raises PinBudgetExhausted."""
    bridge = await _opened(service, session)
    await bridge.ask(lambda op: PinSession(op_id=op, session_id=session.uid, pinned=True))
    until_s = None if ttl_s is None else time.time() + ttl_s
    await service.journal.commit([Pinned(uid=session.uid, tier=tier, until_s=until_s)])


async def unpin(service: Service, session: Session) -> None:
    """Raises NotPinned, and then nothing has changed."""
    if session.record.pinned_tier is None:
        raise NotPinned(f"session {session.id!r} is not pinned")
    told = await _unpin_in_engine(service, session)
    await service.journal.commit([Pinned(uid=session.uid)])
    if session.opened_in != told:  # by one that came up meanwhile, with the pin
        with contextlib.suppress(TierError):
            await _unpin_in_engine(service, session)


async def _unpin_in_engine(service: Service, session: Session) -> int:
    """Which incarnation was told; 0: none that is there knows the session."""
    bridge = service.worker.current
    if bridge is None or session.opened_in != bridge.incarnation:
        return 0
    with contextlib.suppress(NotPinned):  # a restarted engine may not have it pinned yet
        await bridge.ask(lambda op: PinSession(op_id=op, session_id=session.uid, pinned=False))
    return bridge.incarnation


async def resume_points(service: Service, session: Session) -> tuple[int, ...]:
    """Token positions where the session can be continued without replay."""
    bridge = await _opened(service, session)
    ack = await bridge.ask(lambda op: AskResumePoints(op_id=op, session_id=session.uid))
    return ack.positions


async def residency(service: Service, session: Session) -> tuple[TierBytes, ...]:
    """Tokens and bytes by group and tier."""
    bridge = await _opened(service, session)
    ack = await bridge.ask(lambda op: AskResidency(op_id=op, session_id=session.uid))
    return ack.residency


def first_private_block(mine: Transcript, others: Sequence[Transcript]) -> int:
    """The first block that none of the other transcripts has too."""
    shared = max((common_prefix(mine, other) for other in others), default=0)
    return shared // BLOCK_TOKENS


async def close(
    service: Service, session: Session, *, expired: bool = False, elsewhere: bool = False
) -> None:
    """Delete a session, and every cached and stored byte that was its alone.

    One that has expired here and went on at another daemon, or was deleted ``elsewhere``, is
    forgotten here only.
    Raises SessionBusy, EngineRestarting (it has computed something, and the engine is away).
    """
    with session.taken(SessionState.CLOSING):
        record = session.record
        is_mine = not elsewhere and await _claimed_to_close(service, session, expired)
        if record.transcript.length or record.tail_key is not None:
            bridge = service.worker.bridge()
            others = [
                other.record.transcript
                for other in service.sessions
                if other is not session
                and other.salt == session.salt
                and other.uid in service.journal.ledger.records
            ]
            drop_from = await asyncio.to_thread(first_private_block, record.transcript, others)
            await service.ensure_open(bridge, session)
            session.opened_in = 0  # whatever becomes of the answer
            await bridge.ask(
                lambda op: CloseSession(
                    op_id=op, session_id=session.uid, drop_from=drop_from if is_mine else None
                )
            )
        else:  # it has no words, and the engine may have been asked about it
            service.forget_in_worker(session)
        if is_mine:
            await service.shared.forget(session, deleted=not expired)
        kept = service.journal.queue([Deleted(uid=session.uid, expired=expired)])
        kept.add_done_callback(
            lambda done: _closed(service, session, expired) if done.exception() is None else None
        )
        service.shared.deleted_elsewhere.discard(session)
        await asyncio.shield(kept)


async def _claimed_to_close(service: Service, session: Session, expired: bool) -> bool:
    """Whether it is this daemon's to delete. Raises SessionBusy, unless it expired here."""
    try:
        await service.shared.claim(session, newer_is_fine=not expired)
    except (SessionBusy, PreconditionFailed, SessionNotFound):
        if not expired:
            raise
        return False
    return True


def _closed(service: Service, session: Session, expired: bool) -> None:
    service.sessions.remove(session)
    session.tell("closed", {"expired": expired})


async def sweep(service: Service) -> None:
    """For ever: end what has outlived its time to live, or was deleted at another daemon."""
    while True:
        await asyncio.sleep(SWEEP_S)
        for session in service.shared.adrift():
            await service.regain(session)
        for session in service.shared.left_over():
            with contextlib.suppress(SessionBusy), session.taken(SessionState.SUSPENDING):
                await service.shared.release(session)
        now_s = time.time()
        for session in service.sessions:
            if session.is_busy or session.uid not in service.journal.ledger.records:
                continue
            with contextlib.suppress(TierError):  # away or busy now: the next round tries again
                if session in service.shared.deleted_elsewhere:
                    await close(service, session, elsewhere=True)
                elif (session.expires_s or math.inf) <= now_s:
                    await close(service, session, expired=True)
                elif (session.record.pinned_until_s or math.inf) <= now_s:
                    await unpin(service, session)


async def drain(service: Service, deadline_s: float) -> None:
    """Take nothing new, let requests end, write every session down; at most ``deadline_s``."""
    service.draining = True
    ends_s = time.monotonic() + deadline_s
    if not service.worker.is_up:
        return
    bridge = service.worker.bridge()
    await service.all_ended(deadline_s / 2)
    service.cancel_all()
    await service.all_ended(max(0.1, ends_s - time.monotonic()) / 2)
    with contextlib.suppress(TimeoutError, TierError):
        async with asyncio.timeout(max(0.1, ends_s - time.monotonic())):
            await _suspend_all(service, bridge)
            left_s = max(0.1, ends_s - time.monotonic())
            await bridge.ask(lambda op: Drain(op_id=op, deadline_s=left_s))


async def _suspend_all(service: Service, bridge: Bridge) -> None:
    if service.config.store == "none":
        return
    room = asyncio.Semaphore(DRAIN_PARALLEL)

    async def one(session: Session) -> None:
        async with room:
            if (
                session.is_busy
                or not service.may_be_stored(session)
                or session.opened_in != bridge.incarnation
                or session.state is SessionState.SUSPENDED
            ):
                return
            try:
                with session.taken(SessionState.SUSPENDING):
                    await suspend_taken(service, bridge, session, "store")
            except TierError as error:
                log.warning("session=%s was not suspended: %s", session.id, error.message)

    known = service.journal.ledger.records
    await asyncio.gather(*(one(s) for s in service.sessions if s.uid in known))
