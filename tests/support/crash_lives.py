"""Writers that are killed, and what a store still owes afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from crash_writer import pages_per_commit
from dsv4_tierd.tiering.store.maintain import Maintained
from dsv4_tierd.tiering.store.open import parse_spec
from dsv4_tierd.tiering.store.protocol import PrefixStore, StoredObject, parts_of
from store_cases import chain, present, read

WRITER = Path(__file__).with_name("crash_writer.py")


class Nursery:
    """One process that forks writers quickly."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WRITER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def live_and_die(self, spec: str, seed: int, life_s: float) -> list[list[str]]:
        """Words of what a writer said from its birth to its SIGKILL, ``life_s`` after its first."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{seed} {spec}\n")
        self._process.stdin.flush()
        said: list[list[str]] = []
        pid = 0
        for line in self._process.stdout:
            words = line.split()
            if words[:1] == ["born"]:
                pid = int(words[1])
            elif words[:1] == ["buried"]:
                return said
            elif len(words) == 5 and words[4] == ".":
                said.append(words)
            if pid and said and life_s:
                time.sleep(life_s)
                life_s = 0.0
                os.kill(pid, signal.SIGKILL)
        raise AssertionError("the nursery is gone")

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Run:
    """The first ``count`` pages of a run, of ``payload_bytes`` each."""

    name: str
    count: int
    payload_bytes: int

    @property
    def pages(self) -> list[StoredObject]:
        return chain(self.name, self.count, size=self.payload_bytes)


class Promises:
    """What a store owes: ``stored`` runs are there, and no page that is ``gone``.

    ``cut_off``: the killed writer's last call and its run.
    """

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self.stored: dict[str, Run] = {}
        self.cut_off: tuple[str, Run] | None = None
        self.gone: list[StoredObject] = []

    def tell(self, said: Iterable[list[str]]) -> None:
        """Take in what a writer said."""
        for verb, name, count, size, _ in said:
            run = Run(name, int(count), int(size))
            self.cut_off = None
            self.stored.pop(name, None)
            if verb == "put":
                self.stored[name] = run
            elif verb == "gone":
                self.gone += run.pages
            else:
                self.cut_off = verb, run

    def check(self, store: PrefixStore) -> None:
        """All that is promised can be read, nothing that is gone; then the call that was cut off.

        What of that turns out to be there stays; what is not must never appear.
        """
        for run in self.stored.values():
            for item in run.pages:
                assert read(store, item) == item.payload, f"{run.name} was acknowledged"
        assert not any(present(store, self.gone))
        if self.cut_off is not None:
            verb, run = self.cut_off
            near = present(parts_of(store)[0], run.pages)  # before reading copies anything up
            found = [read(store, item) for item in run.pages]
            there = self._check_cut_off(verb, run, near, found)
            self.stored[run.name] = replace(run, count=there)
            self.gone += run.pages[there:]
            self.cut_off = None

    def _check_cut_off(
        self, verb: str, run: Run, near: list[bool], found: list[bytes | None]
    ) -> int:
        """How many of the run's pages are there: its first ones, each whole.

        A put makes them visible in commits, none in part. Deleting takes a run out of a tier at
        once: of two tiers the far one may still have what it had been sent.
        """
        there = sum(data is not None for data in found)
        whole = [item.payload for item in run.pages[:there]]
        assert found == whole + [None] * (run.count - there), f"{run.name} has holes"
        count = sum(near)
        assert near == [i < count for i in range(run.count)], f"{run.name} has holes"
        if verb == "putting":
            assert there == count, "the far tier has what the near one has not"
            step = pages_per_commit(self._spec, run.payload_bytes)
            assert count == run.count or count % step == 0, f"{run.name}: {count} by {step}"
        else:
            assert count in (0, run.count), f"{run.name} is deleted in part"
            assert there == count or len(parse_spec(self._spec)) > 1
        return there

    def check_listing(self, tiers: Sequence[Maintained]) -> None:
        """Reading everything finds nothing wrong; what is visible is what is promised, no more."""
        visible: set[str] = set()
        for tier in tiers:
            report = tier.verify()
            assert report.bad == ()
            listed = list(tier.list_objects())
            here = {info.digest for info in listed}
            assert report.objects == len(listed) == len(here)
            assert all(info.parent is None or info.parent in here for info in listed)
            visible |= here
        promised = (item for run in self.stored.values() for item in run.pages)
        assert visible == {item.key.digest.hex() for item in promised}
