"""The embedded store: durable, bounded, erasing, owned by one, and frank about identities."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4_tierd.tiering.errors import StoreUnavailable
from dsv4_tierd.tiering.store.disk import DiskStore
from dsv4_tierd.tiering.store.open import known_identities
from dsv4_tierd.tiering.store.vault import DiskConfig
from store_cases import (
    IDENTITY,
    PAGE_BYTES,
    FaultyFiles,
    chain,
    disk_usage,
    folder_bytes,
    open_disk,
    page,
    present,
    read,
    resume,
    tail,
)


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    """A reopened folder has all that was put, and goes on taking more."""
    items = [*chain("a", 50), resume("a49"), tail("s", "a49", "")]
    for _ in range(3):
        store = open_disk(tmp_path)
        store.put(items)
        assert [read(store, item) for item in items] == [item.payload for item in items]
        assert store.verify().bad == ()
        store.close()
        items += chain(f"more{len(items)}-", 5)


def test_one_process_owns_a_folder(tmp_path: Path) -> None:
    """A second open fails at once and names the owner; after close it succeeds."""
    store = open_disk(tmp_path)
    code = (
        "from pathlib import Path; from store_cases import open_disk;"
        f"open_disk(Path({str(tmp_path)!r}))"
    )
    second = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path = {sys.path!r}; {code}"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert second.returncode == 1
    assert "StoreUnavailable" in second.stderr
    assert "is in use by process" in second.stderr
    with pytest.raises(StoreUnavailable, match=r"in use by process \d+"):
        open_disk(tmp_path)
    store.close()
    open_disk(tmp_path).close()


def test_a_put_costs_what_it_brings(tmp_path: Path) -> None:
    """Bytes written per put depend on the new objects, not on what is stored already."""
    store = open_disk(tmp_path)
    costs = []
    for run in range(30):
        before = store.usage().bytes_written
        store.put(chain(f"r{run}-", 4))
        costs.append(store.usage().bytes_written - before)
    assert len(set(costs)) == 1
    assert costs[0] <= 4 * (PAGE_BYTES + 4096)
    store.close()


@pytest.mark.parametrize("holes", [True, False])
def test_the_folder_never_outgrows_its_bound(tmp_path: Path, holes: bool) -> None:
    """Whatever is put, gauge and du stay within bytes_max, and runs stay contiguous."""
    bound = 2 << 20
    store = open_disk(tmp_path, files=FaultyFiles(holes=holes), bytes_max=bound)
    runs = [chain(f"run{i}-", 30) for i in range(12)]
    for run in runs:
        for start in range(0, 30, 5):
            store.put(run[start : start + 5])
            assert store.usage().bytes_used <= bound
            assert disk_usage(tmp_path) <= bound
        assert all(present(store, run))
    assert store.usage().evicted_objects > 0
    for run in runs:
        held = present(store, run)
        assert held == sorted(held, reverse=True), "a page is stored without the one before it"
    assert store.verify().bad == ()
    store.close()


def test_the_least_recently_used_run_goes_first_and_from_its_end(tmp_path: Path) -> None:
    """Reading the end of a run keeps all of it; the unread run loses its last pages first."""
    store = open_disk(tmp_path, bytes_max=2 << 20)
    used, unread = chain("used", 40), chain("unread", 40)
    store.put(used)
    store.put(unread)
    read(store, used[-1])
    for i in range(3):
        store.put(chain(f"new{i}-", 28))
    assert all(present(store, used))
    held = present(store, unread)
    assert not all(held)
    assert held == sorted(held, reverse=True)
    store.close()


def test_putting_again_is_a_use(tmp_path: Path) -> None:
    """A run that another session computed and put again outlives one put after it."""
    store = open_disk(tmp_path, bytes_max=2 << 20)
    first, second = chain("first", 40), chain("second", 40)
    store.put(first)
    store.put(second)
    store.put(first)
    store.put(chain("third", 90))
    assert all(present(store, first))
    assert not all(present(store, second))
    store.close()


def test_a_lookup_does_not_extend_a_life(tmp_path: Path) -> None:
    """Only reading and writing count as use."""
    store = open_disk(tmp_path, bytes_max=2 << 20)
    first = page("first")
    store.put([first])
    for i in range(10):
        present(store, [first] * 50)
        store.put(chain(f"n{i}-", 20))
    assert present(store, [first]) == [False]
    store.close()


def test_uses_survive_a_restart(tmp_path: Path) -> None:
    """What was read last before a clean stop is what is evicted last after it."""
    store = open_disk(tmp_path, bytes_max=2 << 20)
    first, second = chain("first", 40), chain("second", 40)
    store.put(first)
    store.put(second)
    read(store, first[-1])
    store.close()
    store = open_disk(tmp_path, bytes_max=2 << 20)
    store.put(chain("third", 90))
    assert all(present(store, first))
    assert not all(present(store, second))
    store.close()


def test_a_batch_larger_than_the_store_is_refused(tmp_path: Path) -> None:
    """What cannot fit without giving up its own beginning is refused; the store goes on."""
    store = open_disk(tmp_path, bytes_max=1 << 20)
    with pytest.raises(StoreUnavailable, match="full"):
        store.put(chain("a", 200))
    assert store.usage().up
    held = present(store, chain("a", 200))
    assert held == sorted(held, reverse=True)
    store.delete_tenant("")
    store.put(chain("b", 10))
    assert all(present(store, chain("b", 10)))
    store.close()


def test_a_smaller_bound_is_kept_from_the_first_put_on(tmp_path: Path) -> None:
    """A folder that was larger shrinks to its new bound."""
    store = open_disk(tmp_path)
    store.put(chain("a", 300))
    store.close()
    store = open_disk(tmp_path, bytes_max=1 << 20)
    store.put([page("b")])
    assert store.usage().bytes_used <= 1 << 20
    assert disk_usage(tmp_path) <= 1 << 20
    store.close()


@pytest.mark.parametrize("holes", [True, False])
@pytest.mark.parametrize("by", ["keys", "tenant", "eviction"])
def test_removed_bytes_are_gone_from_the_folder(tmp_path: Path, holes: bool, by: str) -> None:
    """Once removed, neither payload nor tenant is found in any file; what stays is whole."""
    store = open_disk(tmp_path, files=FaultyFiles(holes=holes), bytes_max=2 << 20)
    secret, other = chain("s", 20, "tenant-with-a-name"), chain("o", 20)
    for mine, theirs in zip(secret, other, strict=True):  # interleaved in every segment
        store.put([mine, theirs])
    assert secret[7].payload in folder_bytes(tmp_path)
    if by == "keys":
        assert store.delete([item.key for item in secret]) == 20
    elif by == "tenant":
        assert store.delete_tenant("tenant-with-a-name") == 20
    else:
        while any(present(store, secret)):
            [read(store, item) for item in other]
            store.put([page(f"fill{store.usage().bytes_written}")])
        store.gc()
    everything = folder_bytes(tmp_path)
    for item in secret:
        assert bytes(item.payload)[:64] not in everything
        assert bytes(item.payload)[-64:] not in everything
    assert b"tenant-with-a-name" not in everything
    assert [read(store, item) for item in other] == [item.payload for item in other]
    store.close()


def test_delete_waits_for_a_reader(tmp_path: Path) -> None:
    """A read that is under way ends well; the bytes go after it, before delete returns."""
    reading, go_on = threading.Event(), threading.Event()

    class SlowFiles(FaultyFiles):
        def read(self, fd, buffers, offset):
            reading.set()
            go_on.wait(5)
            return super().read(fd, buffers, offset)

    store = open_disk(tmp_path, files=SlowFiles())
    item = page("a")
    store.put([item, page("b", "a")])
    results: list[object] = []
    reader = threading.Thread(target=lambda: results.append(read(store, item)))
    reader.start()
    reading.wait(5)
    deleter = threading.Thread(target=lambda: results.append(store.delete([item.key])))
    deleter.start()
    deleter.join(0.1)
    assert deleter.is_alive()
    assert present(store, [item]) == [False]  # and has() did not wait for either
    go_on.set()
    reader.join()
    deleter.join()
    assert results == [item.payload, 1]
    store.close()


def test_has_never_waits_for_the_disk(tmp_path: Path) -> None:
    """While a write hangs in the disk, lookups and usage answer."""
    hanging, go_on = threading.Event(), threading.Event()

    class HungFiles(FaultyFiles):
        def sync(self, fd: int) -> None:
            hanging.set()
            go_on.wait(5)
            super().sync(fd)

    store = open_disk(tmp_path, files=HungFiles())
    writer = threading.Thread(target=lambda: store.put([page("a")]))
    writer.start()
    hanging.wait(5)
    assert present(store, [page("a")]) == [False]  # not published before it is durable
    assert store.usage().objects == 0
    assert writer.is_alive()
    go_on.set()
    writer.join()
    assert present(store, [page("a")]) == [True]
    store.close()


def test_another_identity_sees_nothing_and_is_told_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two identities share a folder without a hit; the log names the field that differs."""
    store = open_disk(tmp_path)
    items = [*chain("a", 5), resume("a4")]
    store.put(items)
    store.close()
    other = replace(IDENTITY, row_format="bf16", layout_version=2)
    with caplog.at_level(logging.INFO):
        store = open_disk(tmp_path, other)
    assert not any(present(store, items))
    assert [read(store, item) for item in items] == [None] * 6
    [record] = [r for r in caplog.records if "cannot be used" in r.message]
    assert record.levelno == logging.WARNING
    assert "6 objects" in record.message
    assert "row_format: 'fp8' there, 'bf16' here" in record.message
    assert "layout_version: 1 there, 2 here" in record.message
    assert "weights_digest" not in record.message
    store.put(items)
    assert store.usage().objects == 12
    store.delete([items[0].key])
    assert store.usage().objects == 6
    store.close()
    store = open_disk(tmp_path)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    store.close()


def test_a_tenant_is_purged_under_every_identity(tmp_path: Path) -> None:
    """A purge reaches what an earlier model stored for the tenant."""
    for identity in (IDENTITY, replace(IDENTITY, row_format="bf16")):
        store = open_disk(tmp_path, identity)
        store.put(chain("a", 3, "me"))
        store.close()
    store = open_disk(tmp_path)
    assert store.delete_tenant("me") == 6
    assert store.usage().objects == 0
    store.close()


def test_eviction_reaches_other_identities(tmp_path: Path) -> None:
    """The bound is the folder's: what an earlier model left makes room for this one."""
    store = open_disk(tmp_path, bytes_max=1 << 20)
    store.put(chain("a", 50))
    store.close()
    store = open_disk(tmp_path, replace(IDENTITY, row_format="bf16"), bytes_max=1 << 20)
    store.put(chain("b", 50))
    assert all(present(store, chain("b", 50)))
    assert disk_usage(tmp_path) <= 1 << 20
    store.close()


def test_gc_gathers_thin_segments(tmp_path: Path) -> None:
    """Segments of which little lives are copied together; every object survives that."""
    store = open_disk(tmp_path)
    items = [page(f"p{i}") for i in range(200)]
    store.put(items)
    doomed = [item for i, item in enumerate(items) if i % 8]
    store.delete([item.key for item in doomed])
    before = len(list((tmp_path / "segments").iterdir()))
    report = store.gc()
    assert report.segments_compacted > 0
    assert len(list((tmp_path / "segments").iterdir())) < before / 3
    kept = items[::8]
    assert [read(store, item) for item in kept] == [item.payload for item in kept]
    store.close()
    store = open_disk(tmp_path)
    assert [read(store, item) for item in kept] == [item.payload for item in kept]
    store.close()


def test_maintenance_needs_no_model(tmp_path: Path) -> None:
    """Without an identity a folder is listed, verified and tidied, but not written to."""
    store = open_disk(tmp_path)
    items = [page("a", tenant="me"), page("b", "a", tenant="me")]
    store.put(items)
    store.close()
    store = open_disk(tmp_path, None)
    listed = list(store.list_objects())
    assert [info.digest for info in listed] == [item.key.digest.hex() for item in items]
    assert listed[1].parent == listed[0].digest
    assert {info.identity for info in listed} == {IDENTITY.digest.hex()}
    assert store.verify().objects == 2
    store.gc()
    with pytest.raises(AssertionError):
        store.put(items)
    store.close()


def test_a_folder_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    """A path that is a file is an unavailable store, not a crash."""
    path = tmp_path / "store"
    path.write_text("")
    with pytest.raises(StoreUnavailable, match="store"):
        open_disk(path)


def test_a_bound_that_cannot_work_is_refused(tmp_path: Path) -> None:
    """Below a megabyte there is no room for the index."""
    with pytest.raises(ValueError, match="at least"):
        DiskStore(DiskConfig(tmp_path, bytes_max=1000), IDENTITY)


def test_files_that_are_not_ours_stay_and_do_no_harm(tmp_path: Path) -> None:
    """Somebody's copies and notes; a power cut left a file of fields empty."""
    store = open_disk(tmp_path)
    items = chain("a", 3)
    store.put(items)
    strange = [
        tmp_path / "segments" / "00000001 (copy).seg",
        tmp_path / "segments" / "7.seg",
        tmp_path / "identities" / "notes.json",
        tmp_path / "identities" / "ab.json",
    ]
    for path in strange:
        path.write_text("mine")
    empty = tmp_path / "identities" / f"{'0' * 64}.json"
    empty.touch()
    assert known_identities(f"disk:{tmp_path}") == [IDENTITY]
    store.gc()
    assert not empty.exists()
    store.close()
    (tmp_path / "index.sqlite").unlink()
    store = open_disk(tmp_path)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    assert all(path.read_text() == "mine" for path in strange)
    store.close()


def test_a_full_disk_does_not_lock_a_folder_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not the owner's number can be noted, the lock goes when the store does."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", full)
        open_disk(tmp_path).close()
    open_disk(tmp_path).close()


def test_an_index_whose_text_is_bad_is_rebuilt(tmp_path: Path) -> None:
    """SQLite's own check does not look at it."""
    store = open_disk(tmp_path)
    items = chain("a", 3, tenant="t")
    store.put(items)
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite")) as db:
        db.execute("UPDATE objects SET tenant = CAST(x'ff' AS TEXT) WHERE id = 2")
        db.commit()
    store = open_disk(tmp_path)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    store.close()
