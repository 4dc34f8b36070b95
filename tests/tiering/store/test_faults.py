"""Bad bytes and bad disks: a miss or an error, never wrong bytes, never a lost promise."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from dsv4_tierd.tiering.errors import PreconditionFailed, StoreUnavailable, TransferFailed
from dsv4_tierd.tiering.store.disk import DiskStore
from store_cases import (
    PAGE_BYTES,
    FaultyFiles,
    chain,
    folder_bytes,
    open_disk,
    page,
    present,
    read,
    resume,
)


def segment_files(folder: Path) -> list[Path]:
    return sorted((folder / "segments").iterdir())


def assert_forgotten(store: DiskStore, folder: Path) -> None:
    """The second page of a run is bad: one failure, then a miss, until it is written anew."""
    items = chain("a", 4)
    with pytest.raises(TransferFailed):
        read(store, items[1])
    assert store.usage().checksum_failures == 1
    assert present(store, items) == [True, False, True, True]
    assert read(store, items[1]) is None
    assert store.usage().checksum_failures == 1
    store.close()
    store = open_disk(folder)
    assert present(store, items) == [True, False, True, True]
    store.put(items)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    store.close()


def test_a_flipped_bit_is_a_miss_ever_after(tmp_path: Path) -> None:
    """A record whose bytes rotted is reported once and forgotten; others are untouched."""
    store = open_disk(tmp_path)
    items = chain("a", 4)
    store.put(items)
    path = segment_files(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[data.index(items[1].payload) + 777] ^= 0x10
    path.write_bytes(data)
    assert_forgotten(store, tmp_path)


def test_a_flipped_bit_in_a_header_is_a_miss_ever_after(tmp_path: Path) -> None:
    """The same for a record that lies about its name."""
    store = open_disk(tmp_path)
    items = chain("a", 4)
    store.put(items)
    path = segment_files(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[data.index(items[1].payload) - 100] ^= 0x01
    path.write_bytes(data)
    assert_forgotten(store, tmp_path)


def test_a_read_error_is_a_miss_ever_after(tmp_path: Path) -> None:
    """EIO on a record is treated like bad bytes."""
    files = FaultyFiles()
    store = open_disk(tmp_path, files=files)
    store.put(chain("a", 4))
    files.errors["read"] = [0, errno.EIO]  # the header is read, the payload is not
    assert_forgotten(store, tmp_path)


def test_two_readers_of_one_bad_record_count_it_once(tmp_path: Path) -> None:
    """Both are refused; the counter goes up by one."""
    together = threading.Barrier(2, timeout=5)

    class MeetingFiles(FaultyFiles):
        def read(self, fd, buffers, offset):
            done = super().read(fd, buffers, offset)
            if done == PAGE_BYTES:
                together.wait()
            return done

    store = open_disk(tmp_path, files=MeetingFiles())
    item = page("a")
    store.put([item])
    path = segment_files(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[data.index(item.payload)] ^= 1
    path.write_bytes(data)
    refused = []

    def look() -> None:
        try:
            read(store, item)
        except TransferFailed as error:
            refused.append(error)

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 2
    assert store.usage().checksum_failures == 1
    store.close()


@pytest.mark.parametrize("by", [1, 5000, 1 << 20])
def test_a_short_read_is_a_miss_ever_after(tmp_path: Path, by: int) -> None:
    """Fewer bytes than asked for are never taken for the rest."""
    files = FaultyFiles()
    store = open_disk(tmp_path, files=files)
    store.put(chain("a", 4))
    files.short_by = by
    with pytest.raises(TransferFailed):
        read(store, page("a1", "a0"))
    files.short_by = 0
    assert present(store, chain("a", 4)) == [True, False, True, True]
    store.close()


def test_a_truncated_segment_loses_only_what_was_cut(tmp_path: Path) -> None:
    """At the next start the cut records are misses and counted, the rest is served."""
    store = open_disk(tmp_path)
    items = chain("a", 8)
    store.put(items)
    store.close()
    path = segment_files(tmp_path)[-1]
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    store = open_disk(tmp_path)
    held = present(store, items)
    assert 0 < sum(held) < 8
    assert held == sorted(held, reverse=True)
    assert store.usage().checksum_failures == 8 - sum(held)
    store.put(items)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    store.close()


def test_a_missing_segment_loses_only_its_own(tmp_path: Path) -> None:
    """A file that vanished takes its records along, and nothing fails over it."""
    store = open_disk(tmp_path)
    items = [page(f"p{i}") for i in range(60)]
    store.put(items)
    store.close()
    files = segment_files(tmp_path)
    assert len(files) > 2
    files[1].unlink()
    store = open_disk(tmp_path)
    assert 0 < sum(present(store, items)) < 60
    assert store.verify().bad == ()
    store.close()


@pytest.mark.parametrize("damage", ["missing", "garbage", "empty", "page", "cut"])
def test_a_damaged_index_is_rebuilt(tmp_path: Path, damage: str) -> None:
    """Without an index the segments say what they hold; deleted objects stay deleted."""
    store = open_disk(tmp_path)
    items = [*chain("a", 60), resume("a59")]
    gone = chain("gone", 5, "tenant")
    store.put(items[:30])
    store.put(gone)
    store.put(items[30:])
    store.delete_tenant("tenant")
    store.close()
    index = tmp_path / "index.sqlite"
    if damage == "missing":
        index.unlink()
    elif damage == "garbage":
        index.write_bytes(b"\x5a" * index.stat().st_size)
    elif damage == "empty":
        index.write_bytes(b"")
    elif damage == "page":
        data = bytearray(index.read_bytes())
        data[4096:] = b"\xff" * len(data[4096:])
        index.write_bytes(data)
    else:
        index.write_bytes(index.read_bytes()[:5000])
    store = open_disk(tmp_path)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    assert not any(present(store, gone))
    store.put(chain("b", 3))
    store.close()
    store = open_disk(tmp_path)
    assert all(present(store, [*items, *chain("b", 3)]))
    store.close()


def test_no_space_is_a_state_that_passes(tmp_path: Path) -> None:
    """While the disk is full puts are refused and reads served; then it goes on by itself."""
    files = FaultyFiles()
    store = open_disk(tmp_path, files=files)
    items = chain("a", 6)
    store.put(items[:2])
    used = store.usage().bytes_used
    files.errors["write"] = [errno.ENOSPC, 0, errno.ENOSPC]
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="No space"):
            store.put(items)
        assert store.usage().bytes_used == used
        assert items[2].payload[:64] not in folder_bytes(tmp_path)
        assert not store.usage().up
        assert present(store, items) == [True, True, *[False] * 4]
        assert read(store, items[1]) == items[1].payload
    store.put(items)
    assert store.usage().up
    assert [read(store, item) for item in items] == [item.payload for item in items]
    store.close()


def test_the_free_space_floor_is_kept(tmp_path: Path) -> None:
    """The store stops writing before it has taken the last bytes of the disk."""
    files = FaultyFiles()
    store = open_disk(tmp_path, files=files)
    files.free = 100 << 10
    with pytest.raises(StoreUnavailable, match="free"):
        store.put([page("a")])
    assert not store.usage().up
    files.free = None
    store.put([page("a")])
    assert store.usage().up
    store.close()


def test_a_full_disk_under_the_index_is_the_same(tmp_path: Path) -> None:
    """When the bytes fit and the index row does not, nothing is published."""
    store = open_disk(tmp_path)
    items = chain("a", 3)
    store.put(items[:1])
    database = store._vault.index._db
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}").fetchall()
    many = [page(f"p{i}") for i in range(100)]
    with pytest.raises(StoreUnavailable, match="full"):
        store.put(many)
    assert not store.usage().up
    visible = [item for item, held in zip(many, present(store, many), strict=True) if held]
    assert len(visible) < 100
    database.execute("PRAGMA max_page_count = 100000").fetchall()
    store.put(many)
    assert [read(store, item) for item in many] == [item.payload for item in many]
    store.close()


def test_every_call_to_the_disk_may_fail(quick_folder: Path) -> None:
    """Fail the Nth call, then the next, until none is left: promises hold after each."""
    failed_at = 0
    for n in range(1, 500):
        folder = quick_folder / str(n)
        files = FaultyFiles()
        files.fail_at = n
        try:
            store = open_disk(folder, files=files)
        except StoreUnavailable:
            failed_at = n
            continue
        promised, gone = _work(store)
        _assert_promises(store, folder, promised, gone)
        store.close()
        store = open_disk(folder)
        _assert_promises(store, folder, promised, gone)
        assert store.verify().bad == ()
        store.close()
        if files.calls < n:
            break
        failed_at = n
    assert failed_at > 20, "the faults were not reached"
    assert files.calls < n, "there were calls left to fail"


def _work(store: DiskStore) -> tuple[list, list]:
    """Puts and deletes that may fail; what was acknowledged as stored, and as gone."""
    runs = [chain(f"r{i}-", 12) for i in range(3)]
    promised: list = []
    gone: list = []
    for run in runs:
        for start in (0, 6):
            try:
                store.put(run[start : start + 6])
                promised += run[start : start + 6]
            except (StoreUnavailable, TransferFailed):
                break
            except PreconditionFailed:  # an earlier page was found bad
                break
    doomed = [item for item in promised if item in runs[1][2:]]
    promised = [item for item in promised if item not in doomed]
    try:
        store.delete([item.key for item in doomed])
        gone = doomed
    except StoreUnavailable:
        assert not any(present(store, doomed))
    return promised, gone


def _assert_promises(store: DiskStore, folder: Path, promised: list, gone: list) -> None:
    assert [read(store, item) for item in promised] == [item.payload for item in promised]
    assert not any(present(store, gone))
    everything = folder_bytes(folder)
    assert not any(item.payload[:64] in everything for item in gone)
