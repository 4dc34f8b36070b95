"""What the journal says: session records, changed only by applying events.

Every event is a fact that was acknowledged. A batch of events is applied whole or not at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgspec

from dsv4_tierd.daemon.transcript import TokenRun, Transcript

TOMBSTONES_MAX = 10_000


class Turn(StrEnum):
    """Where a chat stands at the end of the transcript, as far as the daemon knows."""

    NONE = "none"  # raw tokens
    ASKED = "asked"  # messages, without the header of an answer
    ANSWERING = "answering"  # inside an answer, or just after it


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base; ``uid`` names a session for ever, ids may be used again."""


class Created(Event, frozen=True, tag="c"):
    """A session, at ``length`` tokens of an existing run (a fork) or empty.

    ``tail_key``: a fork's, of a stored tail that is its source's. ``write_policy`` "": of before
    there were any.
    """

    uid: str
    id: str
    salt: str
    created_s: float
    ttl_s: float | None = None
    metadata: dict[str, Any] = {}
    encoding: str = ""
    run: int | None = None
    length: int = 0
    turn: str = Turn.NONE
    tail_key: bytes | None = None
    write_policy: str = ""


class Run(Event, frozen=True, tag="r"):
    """New tokens after the first ``start`` ones of ``parent``."""

    run: int
    parent: int | None
    start: int
    ids: bytes


class Moved(Event, frozen=True, tag="m"):
    """The session's head is now here. A tail written earlier may not fit, and is still its own."""

    uid: str
    run: int | None
    length: int
    used_s: float
    turn: str = Turn.NONE


class Suspended(Event, frozen=True, tag="s"):
    """``shared_version``: of the record that daemons share; 0: it is as before."""

    uid: str
    tier: str
    tail_key: bytes | None = None
    shared_version: int = 0


class Resumed(Event, frozen=True, tag="u"):
    uid: str


class Pinned(Event, frozen=True, tag="p"):
    """``until_s`` None and ``tier`` None: unpinned."""

    uid: str
    tier: str | None = None
    until_s: float | None = None


class Changed(Event, frozen=True, tag="x"):
    """New metadata and time to live, both whole."""

    uid: str
    metadata: dict[str, Any]
    ttl_s: float | None


class Deleted(Event, frozen=True, tag="d"):
    """Gone; ``expired`` keeps the name, so that it is 410 and not 404."""

    uid: str
    expired: bool = False


class Tombstone(Event, frozen=True, tag="t"):
    """An expired session's name (compacted form)."""

    id: str
    salt: str


AnyEvent = Created | Run | Moved | Suspended | Resumed | Pinned | Changed | Deleted | Tombstone


@dataclass(frozen=True, slots=True)
class Record:
    """One session as journalled. Times are Unix seconds.

    ``tail_borrowed``: the stored tail is another session's, and stays when this one goes.
    ``shared_version``: of the record in the shared store that these words go on from; 0: none.
    """

    uid: str
    id: str
    salt: str
    created_s: float
    used_s: float
    ttl_s: float | None
    metadata: dict[str, Any]
    encoding: str
    transcript: Transcript
    turn: Turn = Turn.NONE
    suspended_tier: str | None = None
    tail_key: bytes | None = None
    tail_borrowed: bool = False
    pinned_tier: str | None = None
    pinned_until_s: float | None = None
    shared_version: int = 0
    write_policy: str = ""


class Ledger:
    """All records, and the token runs that anything in this process still refers to.

    Runs are held weakly: a run is live while a record, or a transcript in somebody's hands,
    needs it. So a snapshot never lacks a run that an event still to be written builds on.
    """

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.expired: dict[tuple[str, str], None] = {}
        self._runs: weakref.WeakValueDictionary[int, TokenRun] = weakref.WeakValueDictionary()
        self._next_run = 0

    def apply(self, events: Sequence[AnyEvent], hold: list[TokenRun] | None = None) -> None:
        """Take facts in, in order. A fact about a session that is gone is moot.

        ``hold`` keeps new runs alive until the records that need them have come too.
        Raises KeyError or AssertionError if runs contradict each other: a damaged journal.
        """
        hold = [] if hold is None else hold
        for event in events:
            match event:
                case Run():
                    hold.append(self._add_run(event))
                case Created():
                    self._create(event)
                case Tombstone():
                    self._bury(event.salt, event.id)
                case Deleted():
                    self._delete(event)
                case _:
                    self._update(event)

    def _update(self, event: Moved | Suspended | Resumed | Pinned | Changed) -> None:
        record = self.records.get(event.uid)
        if record is not None:
            self.records[event.uid] = self._updated(record, event)

    def _updated(
        self, record: Record, event: Moved | Suspended | Resumed | Pinned | Changed
    ) -> Record:
        match event:
            case Moved():
                return replace(
                    record,
                    transcript=self.head(event.run, event.length),
                    used_s=event.used_s,
                    turn=Turn(event.turn),
                    suspended_tier=None,
                )
            case Suspended():
                key = event.tail_key or record.tail_key
                borrowed = record.tail_borrowed and key == record.tail_key
                return replace(
                    record,
                    suspended_tier=event.tier,
                    tail_key=key,
                    tail_borrowed=borrowed,
                    shared_version=event.shared_version or record.shared_version,
                )
            case Resumed():
                return replace(record, suspended_tier=None)
            case Pinned():
                return replace(record, pinned_tier=event.tier, pinned_until_s=event.until_s)
            case Changed():
                return replace(record, metadata=event.metadata, ttl_s=event.ttl_s)

    def _create(self, event: Created) -> None:
        assert event.uid not in self.records, f"{event.uid} was created twice"
        self.expired.pop((event.salt, event.id), None)
        self.records[event.uid] = Record(
            uid=event.uid,
            id=event.id,
            salt=event.salt,
            created_s=event.created_s,
            used_s=event.created_s,
            ttl_s=event.ttl_s,
            metadata=event.metadata,
            encoding=event.encoding,
            transcript=self.head(event.run, event.length),
            turn=Turn(event.turn),
            tail_key=event.tail_key,
            tail_borrowed=event.tail_key is not None,
            write_policy=event.write_policy,
        )

    def _delete(self, event: Deleted) -> None:
        record = self.records.pop(event.uid, None)
        if record is not None and event.expired:
            self._bury(record.salt, record.id)

    def _bury(self, salt: str, id: str) -> None:
        self.expired[salt, id] = None
        while len(self.expired) > TOMBSTONES_MAX:
            del self.expired[next(iter(self.expired))]

    def _add_run(self, event: Run) -> TokenRun:
        known = self._runs.get(event.run)
        if known is not None:  # made by grow() in this process, or in a snapshot before its event
            assert (known.start, known.ids) == (event.start, event.ids), f"two runs {event.run}"
            return known
        parent = None if event.parent is None else self._runs[event.parent]
        assert parent is None or parent.start < event.start <= parent.end
        run = TokenRun(event.run, parent, event.start, event.ids)
        self._runs[event.run] = run
        self._next_run = max(self._next_run, event.run + 1)
        return run

    def head(self, run: int | None, length: int) -> Transcript:
        """The transcript that ends at ``length`` in ``run``."""
        if run is None:
            assert length == 0
            return Transcript()
        found = self._runs[run]
        assert found.start < length <= found.end, f"run {run} does not hold token {length}"
        return Transcript(found, length)

    def grow(self, at: Transcript, ids: bytes) -> tuple[list[AnyEvent], Transcript]:
        """Events for new tokens after ``at``, and the transcript they will make. O(new tokens).

        The caller holds the transcript until the events are committed.
        """
        if not ids:
            return [], at
        run = TokenRun(self._next_run, at.run, at.length, ids)
        self._runs[run.run_id] = run
        self._next_run += 1
        return [_run_event(run)], at.grown(run)

    def live_runs(self) -> list[TokenRun]:
        """Parents first."""
        return sorted(self._runs.values(), key=lambda run: run.run_id)

    def snapshot(self) -> Iterator[AnyEvent]:
        """Events that make an equal ledger from nothing."""
        yield from map(_run_event, self.live_runs())
        for salt, id in self.expired:
            yield Tombstone(id=id, salt=salt)
        for record in self.records.values():
            yield from _record_events(record)


def _run_event(run: TokenRun) -> Run:
    parent = None if run.parent is None else run.parent.run_id
    return Run(run=run.run_id, parent=parent, start=run.start, ids=run.ids)


def _record_events(record: Record) -> Iterator[AnyEvent]:
    transcript = record.transcript
    run = None if transcript.run is None else transcript.run.run_id
    yield Created(
        uid=record.uid,
        id=record.id,
        salt=record.salt,
        created_s=record.created_s,
        ttl_s=record.ttl_s,
        metadata=record.metadata,
        encoding=record.encoding,
        tail_key=record.tail_key if record.tail_borrowed else None,
        write_policy=record.write_policy,
    )
    yield Moved(
        uid=record.uid, run=run, length=transcript.length, used_s=record.used_s, turn=record.turn
    )
    own_tail = None if record.tail_borrowed else record.tail_key
    if record.suspended_tier is not None or own_tail is not None or record.shared_version:
        yield Suspended(
            uid=record.uid,
            tier=record.suspended_tier or "",
            tail_key=own_tail,
            shared_version=record.shared_version,
        )
        if record.suspended_tier is None:
            yield Resumed(uid=record.uid)
    if record.pinned_tier is not None:
        yield Pinned(uid=record.uid, tier=record.pinned_tier, until_s=record.pinned_until_s)
