"""An end at every call to the disk: what was acknowledged is there, what is visible is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dsv4_tierd.tiering.store.disk import DiskStore
from store_cases import Crash, FaultyFiles, chain, folder_bytes, open_disk, present, read


@pytest.mark.parametrize("holes", [True, False])
def test_an_end_at_every_call_to_the_disk(quick_folder: Path, holes: bool) -> None:
    """The process ends at the Nth call, half way through a write: for every N, all is well."""
    for n in range(1, 500):
        folder, after = quick_folder / f"{n}", quick_folder / f"{n}-after"
        files = FaultyFiles(holes=holes)
        files.crash_at = n
        stored: list = []
        gone: list = []
        in_flight: list = []
        try:
            _work(folder, files, stored, gone, in_flight)
        except Crash:
            crashed = True
        else:
            crashed = False
        if folder.exists():
            shutil.copytree(folder, after)
        store = open_disk(after)
        _check(store, after, stored, gone, in_flight)
        store.close()
        _check_without_index(folder, quick_folder / f"{n}-rebuilt", stored, gone)
        if not crashed:
            break
    assert n > 20, "the ends were not reached"
    assert not crashed, "there were calls left to end at"


def _check_without_index(folder: Path, after: Path, stored: list, gone: list) -> None:
    """The index is lost as well: what was promised is found in the segments, once."""
    if folder.exists():
        shutil.copytree(folder, after, ignore=shutil.ignore_patterns("index.sqlite*"))
    store = open_disk(after)
    assert [read(store, item) for item in stored] == [item.payload for item in stored]
    assert not any(present(store, gone))
    assert store.verify().bad == ()
    store.close()


def _work(folder: Path, files: FaultyFiles, stored: list, gone: list, in_flight: list) -> None:
    """Two runs put in turn, one deleted, the folder tidied; lists follow what is promised."""
    store = open_disk(folder, files=files, segment_bytes=100 << 10)
    try:
        _change(store, stored, gone, in_flight)
    finally:  # what the end of a process does by itself
        store._vault.index._db.close()
        store._owner.release()


def _change(store: DiskStore, stored: list, gone: list, in_flight: list) -> None:
    kept, doomed = chain("kept", 9), chain("doomed", 9)
    for start in range(0, 9, 3):
        for run in (kept, doomed):
            in_flight[:] = run[start : start + 3]
            store.put(in_flight)
            stored += in_flight
    in_flight[:] = doomed
    stored[:] = kept
    store.delete([item.key for item in doomed])
    in_flight.clear()
    gone += doomed
    store.gc()


def _check(store: DiskStore, folder: Path, stored: list, gone: list, in_flight: list) -> None:
    assert store.usage().checksum_failures == 0
    assert [read(store, item) for item in stored] == [item.payload for item in stored]
    assert not any(present(store, gone))
    everything = folder_bytes(folder)
    assert not any(item.payload[:64] in everything for item in gone)
    unsure = {item.key.digest.hex() for item in in_flight}
    visible = {info.digest for info in store.list_objects()}
    assert visible - unsure <= {item.key.digest.hex() for item in stored}
    for item in in_flight:
        assert read(store, item) in (None, item.payload)
        # What is not visible is not left behind in a file either.
        assert present(store, [item]) == [item.payload[:64] in everything]
