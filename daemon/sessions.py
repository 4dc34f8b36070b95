"""Sessions as this process sees them: names, states, who owns them, what runs on them."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from dsv4_tierd.daemon.ledger import Ledger, Record
from dsv4_tierd.daemon.run import Run
from dsv4_tierd.daemon.transcript import Transcript
from dsv4_tierd.tiering.errors import (
    InvalidRequest,
    SessionBusy,
    SessionExists,
    SessionExpired,
    SessionNotFound,
)
from dsv4_tierd.tiering.store.lease import Lease

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
SALT_CHARS_MAX = 128
EVENTS_WAITING_MAX = 256


class SessionState(StrEnum):
    OPEN = "open"
    ACTIVE = "active"
    IDLE = "idle"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    CLOSING = "closing"
    EXPIRED = "expired"


def check_id(text: str) -> str:
    """Raises InvalidRequest: ids are names, never paths."""
    if not _ID.fullmatch(text):
        raise InvalidRequest(
            "a session id is 1 to 128 letters, digits and . _ : -, a letter or digit first",
            param="id",
        )
    return text


def check_salt(text: str) -> str:
    """Raises InvalidRequest. A header's bytes that are not UTF-8 arrive as lone surrogates."""
    if len(text) > SALT_CHARS_MAX or any(ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in text):
        raise InvalidRequest("cache_salt is at most 128 printable characters", param="cache_salt")
    return text


class Subscriber:
    """One reader of a session's events; the oldest are dropped when it is slow, and counted."""

    def __init__(self) -> None:
        self.dropped = 0
        self._waiting: deque[tuple[str, dict[str, Any]]] = deque()
        self._wake = asyncio.Event()

    def offer(self, name: str, data: dict[str, Any]) -> None:
        if len(self._waiting) >= EVENTS_WAITING_MAX:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append((name, data))
        self._wake.set()

    async def next(self, timeout_s: float) -> tuple[str, dict[str, Any]] | None:
        try:
            async with asyncio.timeout(timeout_s):
                while not self._waiting:
                    self._wake.clear()
                    await self._wake.wait()
        except TimeoutError:
            return None
        return self._waiting.popleft()


class Session:
    """A session in this process. Its facts are the ledger's; this adds what runs now.

    ``opened_in``: the worker incarnation that knows it, 0 for none. ``lease``: the last claim on
    it among daemons that share a store; it may have run out since. ``version_seen``: of a newer
    shared record with the same words as the journal's.
    """

    def __init__(self, ledger: Ledger, uid: str, id: str, salt: str) -> None:
        self.uid = uid
        self.id = id
        self.salt = salt
        self.opened_in = 0
        self.ephemeral = False
        self.ephemeral_tokens = 0
        self.run: Run | None = None
        self.lease: Lease | None = None
        self.version_seen = 0
        self.changing = asyncio.Lock()  # of its metadata and time to live
        self.pending_ids = b""  # appended by the running request, not yet journalled
        self.subscribers: set[Subscriber] = set()
        self._ledger = ledger
        self._busy: SessionState | None = None

    @property
    def record(self) -> Record:
        record = self._ledger.records.get(self.uid)
        if record is None:
            raise SessionNotFound(f"there is no session {self.id!r}")
        return record

    @property
    def transcript(self) -> Transcript:
        """Journalled tokens; an ephemeral session has none."""
        return Transcript() if self.ephemeral else self.record.transcript

    @property
    def length(self) -> int:
        """Tokens of the session, those of a running request not counted."""
        return self.ephemeral_tokens if self.ephemeral else self.record.transcript.length

    @property
    def shareable(self) -> bool:
        """Whether it may be handed to another daemon: its words may leave this one."""
        record = self._ledger.records.get(self.uid)
        return not self.ephemeral and (record is None or record.write_policy != "never")

    @property
    def is_anybodys(self) -> bool:
        """Whether it waits in the shared store for whoever resumes it."""
        record = self._ledger.records.get(self.uid)
        suspended = record is not None and record.suspended_tier == "store"
        return suspended and not self.is_busy and bool(self.record.shared_version)

    @property
    def state(self) -> SessionState:
        if self._busy is not None:
            return self._busy
        record = self.record
        if record.suspended_tier is not None:
            return SessionState.SUSPENDED
        return SessionState.IDLE if record.transcript.length else SessionState.OPEN

    @property
    def is_busy(self) -> bool:
        return self._busy is not None

    @property
    def expires_s(self) -> float | None:
        record = self.record
        return None if record.ttl_s is None else record.used_s + record.ttl_s

    def refuse_busy(self) -> None:
        """Raises SessionBusy."""
        if self._busy is not None:
            raise SessionBusy(f"session {self.id!r} is {self._busy.value}: one request at a time")

    def refuse_closing(self) -> None:
        """Raises SessionBusy: what is opened in the engine now would stay there for ever."""
        if self._busy is SessionState.CLOSING:
            self.refuse_busy()

    def enter(self, state: SessionState) -> None:
        """Take the session for one request. Raises SessionBusy."""
        self.refuse_busy()
        self._busy = state
        self.tell("state", {"state": state.value})

    def leave(self) -> None:
        assert self._busy is not None
        self._busy = None
        self.run, self.pending_ids = None, b""
        if self.ephemeral or self.uid in self._ledger.records:
            state = SessionState.IDLE if self.ephemeral else self.state
            self.tell("state", {"state": state.value})

    @contextmanager
    def taken(self, state: SessionState) -> Iterator[None]:
        self.enter(state)
        try:
            yield
        finally:
            self.leave()

    def tell(self, name: str, data: dict[str, Any]) -> None:
        for subscriber in self.subscribers:
            subscriber.offer(name, data)

    def tokens_now(self) -> tuple[Transcript, bytes]:
        """Journalled tokens, and those of the running request that the engine has too."""
        generated = b"" if self.run is None else self.run.generated.tobytes()
        return self.transcript, self.pending_ids + generated


class Registry:
    """Sessions by (salt, id). A name of another salt does not exist."""

    def __init__(self, ledger: Ledger, sessions_max: int) -> None:
        self._ledger = ledger
        self._sessions_max = sessions_max
        self._by_name: dict[tuple[str, str], Session] = {}
        for record in ledger.records.values():
            self._by_name[record.salt, record.id] = Session(
                ledger, record.uid, record.id, record.salt
            )

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, salt: str, id: str) -> Session | None:
        return self._by_name.get((salt, id))

    def get(self, salt: str, id: str) -> Session:
        """Raises SessionNotFound, SessionExpired, InvalidRequest."""
        check_id(id)
        session = self._by_name.get((salt, id))
        if session is None or session.uid not in self._ledger.records:
            if (salt, id) in self._ledger.expired:
                raise SessionExpired(f"session {id!r} has expired")
            raise SessionNotFound(f"there is no session {id!r}")
        expires_s = session.expires_s
        if expires_s is not None and expires_s <= time.time() and not session.is_busy:
            raise SessionExpired(f"session {id!r} has expired")
        return session

    def add(self, salt: str, id: str | None) -> Session:
        """Reserve a name (a new one for None). Raises SessionExists, InvalidRequest."""
        name = f"s-{uuid.uuid4().hex[:20]}" if id is None else check_id(id)
        if (salt, name) in self._by_name:
            raise SessionExists(f"session {name!r} exists", param="id")
        if len(self._by_name) >= self._sessions_max:
            raise InvalidRequest(f"there are {self._sessions_max} sessions: delete some")
        session = Session(self._ledger, uuid.uuid4().hex, name, salt)
        self._by_name[salt, name] = session
        return session

    def remove(self, session: Session) -> None:
        if self._by_name.get((session.salt, session.id)) is session:
            del self._by_name[session.salt, session.id]

    def ephemeral(self, salt: str) -> Session:
        """A session that no one can name and that ends with its request."""
        uid = "e-" + uuid.uuid4().hex
        session = Session(self._ledger, uid, uid, salt)
        session.ephemeral = True
        return session

    def page(
        self, salt: str, *, limit: int, after: str | None, state: str | None
    ) -> tuple[list[Session], bool]:
        """Sessions of a salt in order of creation, after the one named; and whether more follow."""
        mine = [s for s in self if s.salt == salt and s.uid in self._ledger.records]
        mine.sort(key=lambda s: (s.record.created_s, s.uid))
        if after is not None:
            names = [s.id for s in mine]
            if after not in names:
                raise InvalidRequest(f"after: there is no session {after!r}", param="after")
            mine = mine[names.index(after) + 1 :]
        if state is not None:
            mine = [s for s in mine if s.state.value == state]
        return mine[:limit], len(mine) > limit

    def by_state(self) -> dict[str, int]:
        counts = {state.value: 0 for state in SessionState}
        for session in self:
            if session.uid in self._ledger.records:
                counts[session.state.value] += 1
        counts[SessionState.EXPIRED.value] = len(self._ledger.expired)
        return counts
