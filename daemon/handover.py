"""From one daemon to another: write a session down for others, and go on with one of theirs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from dsv4_tierd.daemon.ledger import AnyEvent, Changed, Created, Moved, Suspended
from dsv4_tierd.daemon.service import Service
from dsv4_tierd.daemon.session_record import SessionRecord
from dsv4_tierd.daemon.sessions import Session, SessionState
from dsv4_tierd.daemon.transcript import ID_BYTES, Transcript, common_bytes
from dsv4_tierd.tiering.errors import (
    SessionBusy,
    SessionExists,
    SessionExpired,
    SessionNotFound,
)

log = logging.getLogger("dsv4_tierd.daemon")


async def write_down(service: Service, session: Session, tier: str, tail_key: bytes | None) -> None:
    """What was suspended is a fact; one suspended to a shared store is anybody's from now on.

    The record for others comes first: a daemon that dies in between finds its own words there.
    Raises PreconditionFailed (another daemon took the session over), StoreUnavailable.
    """
    version = 0
    if tier == "store":
        version = await service.shared.publish(session, tail_key or session.record.tail_key)
    suspended = Suspended(uid=session.uid, tier=tier, tail_key=tail_key, shared_version=version)
    await service.journal.commit([suspended])
    if version:
        await service.shared.release(session)


async def adopt(service: Service, salt: str, id: str) -> Session:
    """A session of another daemon, suspended, in this one's journal, and claimed.

    Raises SessionNotFound (no daemon has suspended one of this name), SessionExpired, SessionBusy
    (a daemon owns it, or this one is taking it over), TransferFailed, StoreUnavailable.
    """
    try:
        session = service.sessions.add(salt, id)
    except SessionExists as error:
        raise SessionBusy(f"session {id!r} is being taken over") from error
    try:
        record, version = await _taken(service, session)
        events, transcript = service.journal.ledger.grow(Transcript(), record.token_ids)
        run = None if transcript.run is None else transcript.run.run_id
        created = Created(
            uid=session.uid,
            id=id,
            salt=salt,
            created_s=record.created_s,
            ttl_s=record.ttl_s,
            metadata=record.metadata,
            encoding=record.encoding,
            run=run,
            length=transcript.length,
            turn=record.turn,
            write_policy=record.write_policy,
        )
        # Its used_s is now: resuming is a use.
        moved = Moved(
            uid=session.uid,
            run=run,
            length=transcript.length,
            used_s=time.time(),
            turn=record.turn,
        )
        await service.journal.commit(
            [*events, created, moved, _suspended(session, record, version)]
        )
    except BaseException:
        if session.uid not in service.journal.ledger.records:
            service.sessions.remove(session)
            await service.shared.release(session)
        raise
    log.info("session=%s is taken over from %s: %d tokens", id, record.holder, session.length)
    return session


async def _taken(service: Service, session: Session) -> tuple[SessionRecord, int]:
    """Claim a name that is new here; its record and version. Raises as ``adopt``."""
    if not service.shared.applies(session):
        raise SessionNotFound(f"there is no session {session.id!r}")
    await service.shared.take(session)
    found = await service.shared.read(session)
    if found is None or found[0].deleted:
        raise SessionNotFound(f"there is no session {session.id!r}, here or in the shared store")
    if found[0].ttl_s is not None and found[0].used_s + found[0].ttl_s <= time.time():
        raise SessionExpired(f"session {session.id!r} has expired")
    return found


async def catch_up(service: Service, session: Session) -> None:
    """Claim a session, with the words that it got elsewhere, if it went on there.

    Raises SessionBusy (a daemon owns it), SessionNotFound (it was deleted elsewhere),
    TransferFailed, StoreUnavailable.
    """
    await service.shared.claim(session, newer_is_fine=True)
    if not service.shared.owns(session):
        return
    found = await service.shared.read(session)
    if found is None or found[1] <= session.record.shared_version:
        return
    record, version = found
    if record.deleted:
        await service.shared.release(session)
        raise service.shared.was_deleted(session, record)
    mine = session.transcript
    common = common_bytes(mine.read(), record.token_ids) // ID_BYTES
    if common < mine.length:
        log.warning(
            "session=%s: %d tokens of this daemon's own are given up for those of %s",
            session.id,
            mine.length - common,
            record.holder,
        )
    service.forget_in_worker(session)
    events, transcript = service.journal.ledger.grow(
        mine.cut(common), record.token_ids[common * ID_BYTES :]
    )
    facts: Sequence[AnyEvent] = (
        *events,
        Moved(
            uid=session.uid,
            run=None if transcript.run is None else transcript.run.run_id,
            length=transcript.length,
            used_s=time.time(),
            turn=record.turn,
        ),
        Changed(uid=session.uid, metadata=record.metadata, ttl_s=record.ttl_s),
        _suspended(session, record, version),
    )
    await service.journal.commit(facts)


async def change(service: Service, session: Session, changed: Callable[[], Changed]) -> None:
    """New metadata and time to live; a session that waits in a shared store has them there too.

    ``changed`` is asked once what was changed before is a fact: it says what stays, too.
    """
    async with session.changing:
        if session.record.shared_version and session.state is SessionState.SUSPENDED:
            with session.taken(SessionState.SUSPENDING):
                await service.shared.claim(session)
                await service.journal.commit([changed()])
                await write_down(service, session, "store", None)
        else:
            await service.journal.commit([changed()])


def _suspended(session: Session, record: SessionRecord, version: int) -> Suspended:
    return Suspended(
        uid=session.uid, tier="store", tail_key=record.tail_key, shared_version=version
    )
