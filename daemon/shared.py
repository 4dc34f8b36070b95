"""Who owns a session among the daemons that share a Redis store.

A daemon claims a session before it uses it, holds the claim while it may use it, and gives it up
when the session is suspended to the store, together with a record of its words. What one holds
no other daemon runs. A holder that is gone for the lease's time loses it; the next one goes on
from the last record, and the old one is refused from then on: it can neither write the record nor
end a request.

While the server is away nobody can claim anything, so a daemon goes on with what it holds.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from msgspec.structs import replace

from dsv4_tierd.daemon.session_record import (
    HEAD_BYTES,
    SessionRecord,
    decode,
    encode,
    version_of,
)
from dsv4_tierd.daemon.sessions import Session
from dsv4_tierd.tiering.errors import (
    PreconditionFailed,
    SessionBusy,
    SessionExists,
    SessionNotFound,
    StoreUnavailable,
    TransferFailed,
)
from dsv4_tierd.tiering.store.lease import (
    HeldByAnother,
    Lease,
    LeaseKeeper,
    LeaseLost,
    RedisLeases,
)
from dsv4_tierd.tiering.store.lease_server import LeaseServer

log = logging.getLogger("dsv4_tierd.daemon")

T = TypeVar("T")
CALLS_MAX = 8
RECORD_GRACE_S = 3600.0  # a record outlives its session, so that the name stays "expired"
TOMBSTONE_S = 7 * 86_400.0  # so long other daemons learn that a session was deleted


class SharedSessions:
    """Claims on sessions, and their records. Without a server it claims nothing and allows all.

    Of one event loop; calls to the server run on threads of its own.
    """

    def __init__(
        self,
        server: LeaseServer | None,
        holder: str,
        ttl_s: float,
        identity: Callable[[], str | None],
    ) -> None:
        """``identity``: of the weights and formats, once they are known."""
        self.holder = holder
        self.lost: Callable[[Session], None] = lambda _session: None
        self._server, self._ttl_s, self._identity = server, ttl_s, identity
        self.deleted_elsewhere: set[Session] = set()  # what is left of them here is to go
        self._claimed: dict[str, Session] = {}
        self._left_over: set[Session] = set()
        if server is not None:
            self._loop = asyncio.get_running_loop()
            self._pool = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="lease-call")
            self._keeper = LeaseKeeper(server.leases, self._lost_on_thread)

    def close(self) -> None:
        """End the threads. What is held runs out by itself, or is claimed by this daemon again."""
        if self._server is not None:
            self._keeper.close()
            self._server.close()
            self._pool.shutdown(wait=True, cancel_futures=True)

    def applies(self, session: Session) -> bool:
        """Whether other daemons may ask for this session."""
        return self._server is not None and self._identity() is not None and session.shareable

    def owns(self, session: Session) -> bool:
        """Whether nobody else can hold it now."""
        return self.applies(session) and self._keeper.current(self._name(session)) is not None

    @property
    def count(self) -> int:
        """Sessions that this daemon holds, or held and still uses."""
        return len(self._claimed)

    @property
    def up(self) -> bool:
        """Whether there is a server, and it can be asked."""
        return self._server is not None and self._server.up

    def adrift(self) -> list[Session]:
        """Sessions in use whose claim has run out, if the server can be asked."""
        if not self.up:
            return []
        return [session for session in self._claimed.values() if not self.owns(session)]

    def left_over(self) -> list[Session]:
        """Sessions held at the last call too that are anybody's: what was to be done failed."""
        found = {session for session in self._claimed.values() if session.is_anybodys}
        before, self._left_over = self._left_over, found
        return list(before & found)

    # ------------------------------------------------------------ claims
    async def claim(self, session: Session, *, newer_is_fine: bool = False) -> None:
        """Own a session of this daemon from now on; at once if it is held already.

        Raises SessionBusy (another daemon owns it), PreconditionFailed (it went on elsewhere),
        SessionNotFound (it was deleted elsewhere), StoreUnavailable (it was given up, and whether
        another took it cannot be asked now).
        """
        if not self.applies(session) or self.owns(session):
            return
        version = session.record.shared_version
        try:
            lease = await self._acquire(session)
            newest = version_of(await self._head(session))
        except StoreUnavailable as error:
            if not version or session.lease is not None:
                return  # never seen by others, or ours when the server went away
            raise StoreUnavailable(
                f"session {session.id!r} was suspended to the shared store, which is away: "
                f"another daemon may have it ({error.message})"
            ) from error
        if newest > version and not newer_is_fine:
            found = await self.read(session)
            if found is not None and (
                found[0].deleted or found[0].token_ids != session.transcript.read()
            ):
                await self._call(self._leases.release, lease)
                self._let_go(session)
                if found[0].deleted:
                    raise self.was_deleted(session, found[0])
                raise _went_on(session, found[0])
            if found is not None:  # what goes on here goes on from that one
                session.version_seen = found[1]
        self._keep(session, lease)

    def was_deleted(self, session: Session, record: SessionRecord) -> SessionNotFound:
        """What one is told who asks for it; this daemon's own words of it are to go."""
        self.deleted_elsewhere.add(session)
        return SessionNotFound(
            f"session {session.id!r} was deleted at the daemon {record.holder!r}"
        )

    async def claim_new(self, session: Session) -> None:
        """Own a name that is to be new. Raises SessionExists: it is another daemon's, or stored."""
        if not self.applies(session):
            return
        try:
            lease = await self._acquire(session)
            there = version_of(await self._head(session)) and await self.read(session)
            if there and not there[0].deleted:
                await self._call(self._leases.release, lease)
                raise SessionExists(
                    f"session {session.id!r} is in the shared store: resume it", param="id"
                )
        except SessionBusy as error:
            raise SessionExists(error.message, param="id") from error
        except StoreUnavailable:
            return  # the first use asks again
        self._keep(session, lease)

    async def take(self, session: Session) -> None:
        """Own a name that this daemon does not know yet. Raises SessionBusy, StoreUnavailable."""
        self._keep(session, await self._acquire(session))

    async def release(self, session: Session) -> None:
        """Give a claim up. Never fails: one that is not given up runs out."""
        lease = session.lease
        self._let_go(session)
        if lease is not None:
            try:
                await self._call(self._leases.release, lease)
            except StoreUnavailable as error:
                log.info("session=%s is released when its lease ends: %s", session.id, error)

    def _keep(self, session: Session, lease: Lease) -> None:
        session.lease = lease
        self._claimed[lease.name] = session
        self._keeper.keep(lease)

    def _let_go(self, session: Session) -> None:
        if session.lease is not None:
            self._keeper.drop(session.lease.name)
            self._claimed.pop(session.lease.name, None)
            session.lease = None

    def _lost_on_thread(self, lease: Lease) -> None:
        self._loop.call_soon_threadsafe(self._lost, lease.name)

    def _lost(self, name: str) -> None:
        session = self._claimed.get(name)
        if session is not None:
            self.lost(session)

    # ------------------------------------------------------------ records
    async def publish(self, session: Session, tail_key: bytes | None) -> int:
        """Write what another daemon needs to go on; its version, or 0: nobody may ask for it.

        The caller has claimed the session. Raises PreconditionFailed (another took it),
        StoreUnavailable.
        """
        if not self.applies(session):
            return 0
        await self.claim(session)
        lease = self._keeper.current(self._name(session))
        if lease is None:
            raise StoreUnavailable("the shared store is away")
        version = await self._next_version(session)
        record = self._record_of(session, tail_key)
        ttl_s = None
        if session.expires_s is not None:
            ttl_s = max(0.0, session.expires_s - time.time()) + RECORD_GRACE_S
        data = await self._call(encode, record, version)
        try:
            await self._call(self._leases.write, lease, data, ttl_s)
        except LeaseLost as error:
            self._let_go(session)
            raise PreconditionFailed(
                f"session {session.id!r} was taken over by another daemon"
            ) from error
        session.version_seen = version  # also should the journal not take it
        return version

    async def read(self, session: Session) -> tuple[SessionRecord, int] | None:
        """What is recorded under a session's name, and its version.

        Raises TransferFailed (it is damaged), StoreUnavailable.
        """
        data = await self._call(self._leases.read, self._name(session))
        if data is None:
            return None
        record, version = await self._call(decode, data)
        if (record.identity, record.salt, record.id) != (
            self._identity(),
            session.salt,
            session.id,
        ):
            raise TransferFailed(f"the record of session {session.id!r} is of another")
        return record, version

    async def forget(self, session: Session, *, deleted: bool) -> None:
        """Remove the record and the claim, which the caller holds. Raises StoreUnavailable.

        ``deleted``: where other daemons may have words of it, a record without any tells them.
        """
        lease = session.lease
        if lease is not None:
            try:
                if deleted and session.record.shared_version:
                    await self._call(self._leases.write, lease, *await self._tombstone(session))
                    await self._call(self._leases.release, lease)
                else:
                    await self._call(self._leases.forget, lease)
            except StoreUnavailable:
                if session.record.shared_version:
                    raise
            self._let_go(session)

    async def _tombstone(self, session: Session) -> tuple[bytes, float]:
        version = await self._next_version(session)
        record = replace(
            self._record_of(session, None), token_ids=b"", metadata={}, ttl_s=None, deleted=True
        )
        return encode(record, version), TOMBSTONE_S

    async def _next_version(self, session: Session) -> int:
        newest = version_of(await self._head(session))
        return max(newest, session.record.shared_version) + 1

    def _record_of(self, session: Session, tail_key: bytes | None) -> SessionRecord:
        record, identity = session.record, self._identity()
        assert identity is not None
        return SessionRecord(
            identity=identity,
            id=session.id,
            salt=session.salt,
            holder=self.holder,
            written_s=time.time(),
            created_s=record.created_s,
            used_s=record.used_s,
            token_ids=record.transcript.read(),
            ttl_s=record.ttl_s,
            metadata=record.metadata,
            encoding=record.encoding,
            turn=record.turn,
            tail_key=tail_key,
            write_policy=record.write_policy,
        )

    # ------------------------------------------------------------ the server
    @property
    def _leases(self) -> RedisLeases:
        assert self._server is not None
        return self._server.leases

    def _name(self, session: Session) -> str:
        # Neither an identity nor an id holds a slash.
        return f"{self._identity()}/{session.salt}/{session.id}"

    async def _acquire(self, session: Session) -> Lease:
        """Raises SessionBusy, StoreUnavailable."""
        name = self._name(session)
        try:
            return await self._call(self._leases.acquire, name, self.holder, self._ttl_s)
        except HeldByAnother as error:
            self._let_go(session)
            left_s = math.ceil(error.retry_after_s or 0)
            raise SessionBusy(
                f"session {session.id!r} is owned by the daemon {error.owner!r}: suspend it there "
                f"first, or, if that daemon is gone, come back in {left_s} s"
            ) from error

    async def _head(self, session: Session) -> bytes | None:
        return await self._call(self._leases.read, self._name(session), HEAD_BYTES)

    async def _call(self, what: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, what, *args)


def _went_on(session: Session, record: SessionRecord) -> PreconditionFailed:
    count = len(record.token_ids) // 4
    return PreconditionFailed(
        f"session {session.id!r} went on at the daemon {record.holder!r}: it has {count} tokens "
        f"there and {session.length} here; resume it to take those"
    )


def holder_name(state_dir: Path, name: str) -> str:
    """This daemon's name as an owner: ``name``, and what stays the same on one state folder.

    The folder is locked, so an earlier life under that name is dead: its claims are this one's.
    """
    file = state_dir / "holder"
    mark = file.read_text().strip() if file.exists() else ""
    if not mark:  # new, or a power cut emptied it
        mark = uuid4().hex[:12]
        part = file.with_suffix(".new")
        part.write_text(mark + "\n")
        part.replace(file)
    return f"{name}-{mark}"
