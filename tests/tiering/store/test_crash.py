"""Ends without warning: what was acknowledged is there, what is visible is whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv4_tierd.tiering.store.disk import DiskStore
from store_cases import Crash, FaultyFiles, chain, folder_bytes, open_disk, page, present, read

WRITER = Path(__file__).parents[2] / "support" / "crash_writer.py"


@pytest.mark.parametrize("seed", range(4))
def test_kill_nine_while_writing(tmp_path: Path, seed: int) -> None:
    """A writer is killed several times over; each time the folder keeps all its promises."""
    chance = random.Random(seed)
    acknowledged: dict[str, int] = {}
    gone: set[str] = set()
    for life in range(3):
        for line in _live_and_die(tmp_path / "store", 10 * seed + life, chance.uniform(0.05, 0.4)):
            verb, name, size = line.split()
            if verb == "put":
                acknowledged[name] = int(size)
            elif verb == "dropping":  # neither promised nor gone until it is said
                del acknowledged[name]
            else:
                gone.add(name)
        store = open_disk(tmp_path / "store", bytes_max=1 << 30, segment_bytes=512 << 10)
        assert store.usage().checksum_failures == 0
        for name, size in acknowledged.items():
            item = page(name, size=size)
            assert read(store, item) == item.payload, name
        assert not any(present(store, [page(name) for name in gone]))
        listed = list(store.list_objects())
        in_flight = 12 * (life + 1)
        assert len(listed) <= len(acknowledged) + in_flight, "more is visible than was ever put"
        by_digest = {info.digest for info in listed}
        assert all(info.parent is None or info.parent in by_digest for info in listed)
        report = store.verify()
        assert report.bad == ()
        assert report.objects == len(listed)
        store.close()
    assert acknowledged, "no writer lived long enough to say anything"


def _live_and_die(folder: Path, seed: int, life_s: float) -> list[str]:
    """Lines that a writer printed before it was killed."""
    process = subprocess.Popen(
        [sys.executable, str(WRITER), str(folder), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(life_s)
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read()
    process.wait()
    process.stdout.close()
    whole, _, _ = (first + rest).rpartition("\n")  # a line cut by the end was not said
    return whole.splitlines()


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
