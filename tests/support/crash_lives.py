"""Writers that are killed, and what a store still owes afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from dsv4_tierd.tiering.store.maintain import Maintained
from dsv4_tierd.tiering.store.protocol import PrefixStore
from store_cases import digest, page, present, read

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
            elif len(words) == 4 and words[3] == ".":
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


class Promises:
    """What was acknowledged: ``stored`` and ``gone``; ``unsure``: the killed writer's last call."""

    def __init__(self) -> None:
        self.stored: dict[str, int] = {}
        self.unsure: dict[str, int] = {}
        self.gone: set[str] = set()

    def tell(self, said: Iterable[list[str]]) -> None:
        """Take in what a writer said."""
        for verb, name, size, _ in said:
            self.unsure.pop(name, None)
            self.stored.pop(name, None)
            if verb == "put":
                self.stored[name] = int(size)
            elif verb == "gone":
                self.gone.add(name)
            else:
                self.unsure[name] = int(size)

    def check(self, store: PrefixStore) -> None:
        """All that is promised is there, nothing that is gone; what is unsure is whole or not.

        What turns out not to be there must never appear.
        """
        for name, size in self.stored.items():
            item = page(name, size=size)
            assert read(store, item) == item.payload, f"{name} was acknowledged"
        assert not any(present(store, [page(name) for name in self.gone]))
        runs: dict[str, set[bool]] = {}
        for name, size in self.unsure.items():
            item = page(name, size=size)
            data = read(store, item)
            assert data in (None, item.payload), f"{name} is half there"
            runs.setdefault(name.rpartition("-")[0], set()).add(data is None)
            if data is None:
                self.gone.add(name)
            else:
                self.stored[name] = size
        self.unsure.clear()

    def check_listing(self, store: Maintained) -> None:
        """Reading everything finds nothing wrong, and nothing is visible that was never put."""
        report = store.verify()
        assert report.bad == ()
        listed = list(store.list_objects())
        assert report.objects == len(listed)
        visible = {info.digest for info in listed}
        assert len(visible) == len(listed)
        assert visible <= {digest(name).hex() for name in self.stored}
        assert all(info.parent is None or info.parent in visible for info in listed)
