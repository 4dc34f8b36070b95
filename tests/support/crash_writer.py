"""A process that writes to a store until it is killed, and says what was acknowledged.

Run as a script: folder, seed. Prints a line ``<verb> <name> <bytes>`` for each object: ``put`` and
``gone`` after the call that stored or removed it has returned, ``dropping`` before it is made.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from store_cases import chain, open_disk


def main(folder: Path, seed: int) -> None:
    """Put runs, delete some, for ever."""
    chance = random.Random(seed)
    store = open_disk(folder, bytes_max=1 << 30, segment_bytes=512 << 10)
    number = 0
    while True:
        name = f"{seed}-{number}-"
        run = chain(name, chance.randint(1, 12), size=chance.randint(100, 40_000))
        store.put(run)
        say("put", run_name=name, run_size=len(run), payload_bytes=len(run[0].payload))
        if chance.random() < 0.3:
            say("dropping", run_name=name, run_size=len(run))
            store.delete([run[0].key])
            say("gone", run_name=name, run_size=len(run))
        number += 1


def say(verb: str, run_name: str, run_size: int, payload_bytes: int = 0) -> None:
    """A line for each object of a run, on its way before this returns."""
    for i in range(run_size):
        print(verb, f"{run_name}{i}", payload_bytes)
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
