"""The transcript journal survives what a crash can do to a file."""

from __future__ import annotations

import asyncio
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dsv4_tierd.daemon import journal as journal_module
from dsv4_tierd.daemon.journal import (
    FILE_MAGIC,
    Journal,
    JournalDamaged,
    JournalFile,
    StateDirBusy,
    StateLock,
)
from dsv4_tierd.daemon.ledger import (
    AnyEvent,
    Changed,
    Created,
    Deleted,
    Ledger,
    Moved,
    Pinned,
    Resumed,
    Suspended,
    Turn,
)
from dsv4_tierd.tiering.errors import StoreUnavailable


def pack(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def view(ledger: Ledger) -> dict[str, Any]:
    """Everything a ledger says, as plain values."""
    return {
        uid: (
            r.id,
            r.salt,
            r.metadata,
            r.ttl_s,
            r.transcript.read(),
            r.turn,
            r.suspended_tier,
            r.tail_key,
            r.tail_borrowed,
            r.pinned_tier,
        )
        for uid, r in ledger.records.items()
    } | {f"expired {salt}/{id}": None for salt, id in ledger.expired}


def created(uid: str, **more: Any) -> Created:
    return Created(uid=uid, id=f"name-{uid}", salt="s", created_s=1.0, **more)


def append(ledger: Ledger, uid: str, ids: list[int], cut: int | None = None) -> list[AnyEvent]:
    at = ledger.records[uid].transcript
    events, head = ledger.grow(at if cut is None else at.cut(cut), pack(ids))
    run = None if head.run is None else head.run.run_id
    return [*events, Moved(uid=uid, run=run, length=head.length, used_s=2.0, turn=Turn.ASKED)]


def write(file: JournalFile, ledger: Ledger, events: list[AnyEvent]) -> None:
    file.write(events)
    ledger.apply(events)


def small_history(file: JournalFile, ledger: Ledger) -> list[tuple[int, dict[str, Any]]]:
    """(file size, what is true) after each acknowledged batch."""
    seen = [(len(FILE_MAGIC), view(ledger))]
    steps: list[Any] = [
        lambda: [created("a", metadata={"k": [1, "x"]})],
        lambda: append(ledger, "a", [1, 2, 3]),
        lambda: [
            created("b", run=0, length=2),
            Suspended(uid="a", tier="store", tail_key=b"t" * 32),
        ],
        lambda: append(ledger, "b", [7, 8]),
        lambda: append(ledger, "a", [9], cut=1),
        lambda: [
            Pinned(uid="b", tier="host", until_s=9.0),
            Changed(uid="b", metadata={}, ttl_s=5.0),
        ],
        lambda: [Deleted(uid="a", expired=True)],
        lambda: append(ledger, "b", [4, 4, 4, 4]),
    ]
    for step in steps:
        write(file, ledger, step())
        seen.append((file.size_bytes, view(ledger)))
    return seen


def test_a_stored_tail_is_known_until_its_session_goes(tmp_path: Path) -> None:
    """Going on, or suspending to the host, leaves it to be replaced or deleted later."""
    ledger = Ledger()
    file = JournalFile(tmp_path, ledger)
    write(file, ledger, [created("a")])
    write(file, ledger, append(ledger, "a", [1, 2, 3]))
    write(file, ledger, [Suspended(uid="a", tier="store", tail_key=b"t" * 40)])
    write(file, ledger, append(ledger, "a", [4]))
    assert ledger.records["a"].suspended_tier is None
    write(file, ledger, [Suspended(uid="a", tier="host")])
    file.close()
    for _ in range(2):  # as written, and as a snapshot
        again = Ledger()
        again.apply(list(ledger.snapshot()))
        assert again.records["a"].tail_key == b"t" * 40
        ledger = Ledger()
        JournalFile(tmp_path, ledger).close()


def test_a_fork_borrows_its_sources_tail_until_it_has_its_own(tmp_path: Path) -> None:
    """Whose a stored tail is survives a restart and a snapshot."""
    ledger = Ledger()
    file = JournalFile(tmp_path, ledger)
    write(file, ledger, [created("a", tail_key=b"t" * 40)])
    write(file, ledger, append(ledger, "a", [1, 2, 3]))
    write(file, ledger, [Suspended(uid="a", tier="host")])
    assert ledger.records["a"].tail_borrowed
    write(file, ledger, [Suspended(uid="a", tier="store", tail_key=b"t" * 40)])  # none of its own
    for key, borrowed in ((b"t" * 40, True), (b"u" * 40, False)):
        write(file, ledger, [Suspended(uid="a", tier="store", tail_key=key)])
        file.close()
        again = Ledger()
        again.apply(list(ledger.snapshot()))
        assert view(again) == view(ledger)
        ledger = Ledger()
        file = JournalFile(tmp_path, ledger)
        record = ledger.records["a"]
        assert (record.tail_key, record.tail_borrowed) == (key, borrowed)
    file.close()


def test_what_daemons_share_of_a_session_is_kept(tmp_path: Path) -> None:
    """Version and write policy survive words, a host suspend, a restart and a snapshot."""
    ledger = Ledger()
    file = JournalFile(tmp_path, ledger)
    write(file, ledger, [created("a", write_policy="on_suspend"), created("b")])
    write(file, ledger, [Suspended(uid="a", tier="store", shared_version=3)])
    write(file, ledger, append(ledger, "a", [1, 2, 3]))
    write(file, ledger, [Suspended(uid="a", tier="host"), Resumed(uid="a")])
    file.close()
    for _ in range(2):  # as written, and as a snapshot
        again = Ledger()
        again.apply(list(ledger.snapshot()))
        for uid, kept in (("a", (3, "on_suspend", None)), ("b", (0, "", None))):
            record = again.records[uid]
            assert (record.shared_version, record.write_policy, record.suspended_tier) == kept
        ledger = Ledger()
        JournalFile(tmp_path, ledger).close()


def test_every_cut_of_the_file_gives_the_last_acknowledged_state(tmp_path: Path) -> None:
    """Truncated at any byte, the journal holds exactly what the last whole batch said."""
    (tmp_path / "whole").mkdir()
    ledger = Ledger()
    file = JournalFile(tmp_path / "whole", ledger)
    seen = small_history(file, ledger)
    data = file.path.read_bytes()
    file.close()
    assert len(data) == seen[-1][0]
    for size in range(len(data) + 1):
        folder = tmp_path / str(size)
        folder.mkdir()
        (folder / "journal").write_bytes(data[:size])
        again = Ledger()
        cut = JournalFile(folder, again)
        want = [state for end, state in seen if end <= size] or [{}]
        assert view(again) == want[-1], size
        if size % 8 == 0:  # and it can be written on
            write(cut, again, [created("after")])
        cut.close()
        reread = Ledger()
        JournalFile(folder, reread).close()
        assert view(reread) == view(again)


@pytest.mark.parametrize("garbage", [b"\0" * 100, b"\xff" * 17, BATCH := b"VBTJ" + b"\1" * 40])
def test_garbage_after_the_last_batch_is_cut_off(tmp_path: Path, garbage: bytes) -> None:
    """A torn last batch of any content is dropped, and counted."""
    ledger = Ledger()
    file = JournalFile(tmp_path, ledger)
    seen = small_history(file, ledger)
    file.close()
    file.path.write_bytes(file.path.read_bytes() + garbage)
    again = Ledger()
    reopened = JournalFile(tmp_path, again)
    assert reopened.torn_bytes == len(garbage)
    assert view(again) == seen[-1][1]
    reopened.close()


def test_damage_before_a_good_batch_is_refused(tmp_path: Path) -> None:
    """A flipped byte that whole batches follow is damage, not a crash: nothing is dropped."""
    ledger = Ledger()
    file = JournalFile(tmp_path, ledger)
    seen = small_history(file, ledger)
    file.close()
    data = bytearray(file.path.read_bytes())
    data[seen[2][0] - 1] ^= 1
    file.path.write_bytes(data)
    with pytest.raises(JournalDamaged, match="unreadable"):
        JournalFile(tmp_path, Ledger())
    assert file.path.read_bytes() == bytes(data)


def test_a_fork_copies_no_token(tmp_path: Path) -> None:
    """A fork of a long session costs a few bytes in the file and shares its runs."""
    ledger = Ledger()
    file = JournalFile(tmp_path, ledger)
    write(file, ledger, [created("a")])
    write(file, ledger, append(ledger, "a", list(range(100_000))))
    before = file.size_bytes
    write(file, ledger, [created("b", run=0, length=99_999)])
    assert file.size_bytes - before < 200
    assert ledger.records["b"].transcript.run is ledger.records["a"].transcript.run
    file.close()


def test_a_turn_writes_only_its_new_tokens(tmp_path: Path) -> None:
    """The tenth turn of a long session costs as much as the first of a short one."""
    ledger = Ledger()
    file = JournalFile(tmp_path, ledger)
    write(file, ledger, [created("a")])
    write(file, ledger, append(ledger, "a", list(range(50_000))))
    sizes = []
    for _ in range(10):
        before = file.size_bytes
        write(file, ledger, append(ledger, "a", [5] * 20))
        sizes.append(file.size_bytes - before)
    assert max(sizes) < 20 * 4 + 120
    file.close()


def test_compaction_keeps_what_is_true_and_drops_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead sessions leave the file; shared runs of live forks stay, once."""
    monkeypatch.setattr(journal_module, "DEAD_BYTES_MIN", 1000)
    ledger = Ledger()
    file = JournalFile(tmp_path, ledger)
    write(file, ledger, [created("a")])
    write(file, ledger, append(ledger, "a", list(range(500))))
    write(file, ledger, [created("b", run=0, length=400)])
    for n in range(20):
        write(file, ledger, [created(f"dead{n}")])
        write(file, ledger, append(ledger, f"dead{n}", [n] * 500))
        write(file, ledger, [Deleted(uid=f"dead{n}")])
    write(file, ledger, [Deleted(uid="a")])
    assert file.is_due()
    assert file.compact(list(ledger.snapshot()))
    assert file.size_bytes < 500 * 4 + 600
    want = view(ledger)
    file.close()
    again = Ledger()
    JournalFile(tmp_path, again).close()
    assert view(again) == want


async def test_writers_wait_for_durability_and_share_batches(tmp_path: Path) -> None:
    """Many commits at once all return applied; a reopened journal has them."""
    journal = Journal(tmp_path)
    task = asyncio.create_task(journal.run())
    await asyncio.gather(*(journal.commit([created(str(n))]) for n in range(50)))
    assert len(journal.ledger.records) == 50
    journal.close()
    await task
    journal.release()
    with pytest.raises(StoreUnavailable):
        await journal.commit([created("late")])
    again = Ledger()
    JournalFile(tmp_path, again).close()
    assert len(again.records) == 50


async def test_a_full_disk_fails_the_commit_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails half-way leaves file and records as they were; the next works."""
    journal = Journal(tmp_path)
    task = asyncio.create_task(journal.run())
    await journal.commit([created("a")])
    size = journal.size_bytes
    whole = journal_module._write_all

    def half(fd: int, data: bytes, offset: int) -> int:
        whole(fd, data[: len(data) // 2], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal_module, "_write_all", half)
    with pytest.raises(StoreUnavailable, match="No space"):
        await journal.commit([created("b")])
    monkeypatch.setattr(journal_module, "_write_all", whole)
    assert set(journal.ledger.records) == {"a"}
    assert (tmp_path / "journal").stat().st_size == size
    await journal.commit([created("c")])
    journal.close()
    await task
    journal.release()
    again = Ledger()
    JournalFile(tmp_path, again).close()
    assert set(again.records) == {"a", "c"}


def _half_dead(folder: Path) -> tuple[JournalFile, Ledger]:
    """A journal whose compaction pays."""
    ledger = Ledger()
    file = JournalFile(folder, ledger)
    write(file, ledger, [created("kept", metadata={"k": "x" * 2000})])
    for n in range(20):
        write(file, ledger, [created(f"dead{n}")])
        write(file, ledger, append(ledger, f"dead{n}", [n] * 500))
        write(file, ledger, [Deleted(uid=f"dead{n}")])
    assert file.is_due()
    return file, ledger


def test_a_copy_whose_name_cannot_be_synced_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written after a compaction goes to the file that has the name, or is refused."""
    monkeypatch.setattr(journal_module, "DEAD_BYTES_MIN", 1000)
    file, ledger = _half_dead(tmp_path)

    def refuses(_folder: Path) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(journal_module, "_sync_folder", refuses)
        with pytest.raises(OSError, match="Too many"):
            file.compact(list(ledger.snapshot()))
        with pytest.raises(OSError, match="Too many"):
            file.write([created("refused")])
    write(file, ledger, [created("acknowledged")])
    file.close()
    again = Ledger()
    JournalFile(tmp_path, again).close()
    assert set(again.records) == {"kept", "acknowledged"}


def test_no_room_for_a_copy_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written of it is removed, and it is not tried again at every commit."""
    monkeypatch.setattr(journal_module, "DEAD_BYTES_MIN", 1000)
    file, ledger = _half_dead(tmp_path)
    whole, fds = journal_module._write_all, len(list(Path("/dev/fd").iterdir()))

    def half(fd: int, data: bytes, offset: int) -> int:
        whole(fd, data[: len(data) // 2], offset)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(journal_module, "_write_all", half)
        with pytest.raises(OSError, match="No space"):
            file.compact(list(ledger.snapshot()))
    assert not file.is_due()
    assert len(list(Path("/dev/fd").iterdir())) == fds
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
    write(file, ledger, [created("after")])
    file.close()
    (tmp_path / "journal.new").write_bytes(b"of a daemon that was killed")
    again = Ledger()
    JournalFile(tmp_path, again).close()
    assert set(again.records) == {"kept", "after"}
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


def test_one_daemon_a_state_folder(tmp_path: Path) -> None:
    """The second lock on a folder is refused, and free again after the first is gone."""
    lock = StateLock(tmp_path)
    with pytest.raises(StateDirBusy):
        StateLock(tmp_path)
    lock.release()
    StateLock(tmp_path).release()


class JournalAgainstDict(RuleBasedStateMachine):
    """Random histories, reopened and compacted at random, against plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.ledger = Ledger()
        self.file = JournalFile(self.path, self.ledger)
        self.model: dict[str, list[int]] = {}
        self.count = 0

    def teardown(self) -> None:
        self.file.close()
        self.folder.cleanup()

    def pick(self, index: int) -> str | None:
        return sorted(self.model)[index % len(self.model)] if self.model else None

    @rule()
    def create(self) -> None:
        uid = f"u{self.count:04}"
        self.count += 1
        write(self.file, self.ledger, [created(uid)])
        self.model[uid] = []

    @rule(index=st.integers(0, 99), ids=st.lists(st.integers(0, 9), min_size=1, max_size=5))
    def grow(self, index: int, ids: list[int]) -> None:
        if uid := self.pick(index):
            write(self.file, self.ledger, append(self.ledger, uid, ids))
            self.model[uid] += ids

    @rule(index=st.integers(0, 99), at=st.integers(0, 99))
    def fork(self, index: int, at: int) -> None:
        if source := self.pick(index):
            at %= len(self.model[source]) + 1
            head = self.ledger.records[source].transcript.cut(at)
            uid = f"u{self.count:04}"
            self.count += 1
            run = None if head.run is None else head.run.run_id
            write(self.file, self.ledger, [created(uid, run=run, length=at)])
            self.model[uid] = self.model[source][:at]

    @rule(index=st.integers(0, 99), to=st.integers(0, 99))
    def rewind(self, index: int, to: int) -> None:
        if uid := self.pick(index):
            to %= len(self.model[uid]) + 1
            write(self.file, self.ledger, append(self.ledger, uid, [], cut=to))
            self.model[uid] = self.model[uid][:to]

    @rule(index=st.integers(0, 99))
    def delete(self, index: int) -> None:
        if uid := self.pick(index):
            write(self.file, self.ledger, [Deleted(uid=uid)])
            del self.model[uid]

    @rule(torn=st.binary(max_size=20))
    def crash(self, torn: bytes) -> None:
        self.file.close()
        with (self.path / "journal").open("ab") as end:
            end.write(torn)
        self.ledger = Ledger()
        self.file = JournalFile(self.path, self.ledger)

    @rule()
    def compact(self) -> None:
        self.file._size += 1 << 40  # as if most of the file were dead
        assert self.file.compact(list(self.ledger.snapshot()))

    @invariant()
    def equal(self) -> None:
        assert {u: r.transcript.read() for u, r in self.ledger.records.items()} == {
            u: pack(ids) for u, ids in self.model.items()
        }


TestJournalAgainstDict = JournalAgainstDict.TestCase
TestJournalAgainstDict.settings = settings(max_examples=30, stateful_step_count=30)
