"""A process that writes to a Redis store until it is killed, and says what was acknowledged.

Run as a script: URL, seed. Its lines are those of ``crash_writer``.
"""

from __future__ import annotations

import random
import sys

from crash_writer import say
from redis_cases import open_redis
from store_cases import chain


def main(url: str, seed: int) -> None:
    """Put runs, delete some, for ever."""
    chance = random.Random(seed)
    store = open_redis(url, bytes_max=0, deadline_s=5.0)
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


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
