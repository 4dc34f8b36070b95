"""A writer is killed at any moment: what was acknowledged is there, what is visible is whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import redis_servers
from dsv4_tierd.tiering.store.redis import RedisStore
from redis_cases import open_redis
from store_cases import page, present, read

WRITER = Path(__file__).parents[2] / "support" / "redis_crash_writer.py"
KILLS = int(os.environ.get("TEST_KILLS", "4"))
KILLS_PER_STORE = 10


@pytest.mark.timeout(60 + 5 * KILLS)
def test_kill_nine_while_writing() -> None:
    """After every kill: nothing acknowledged is missing, nothing is visible that is not whole.

    ``$TEST_KILLS`` says how often (4).
    """
    server = redis_servers.Server()
    chance = random.Random(KILLS)
    acknowledged: dict[str, int] = {}
    gone: set[str] = set()
    witness = open_redis(server.url, bytes_max=0, deadline_s=5.0)
    for life in range(KILLS):
        _tell(_live_and_die(server.url, life, chance.uniform(0.02, 0.4)), acknowledged, gone)
        later = open_redis(server.url, bytes_max=0, deadline_s=5.0)
        _check(later, acknowledged, gone, life + 1)
        _check(witness, acknowledged, gone, life + 1)
        later.close()
        if life % KILLS_PER_STORE == KILLS_PER_STORE - 1:  # or reading all takes for ever
            witness.delete_tenant("")
            acknowledged.clear()
    assert acknowledged or gone, "no writer lived long enough to say anything"
    witness.gc(grace_s=0)
    witness.delete_tenant("")
    with server.client as client:
        assert client.keys("tierd:1:x:*") == [], "bytes are left that nothing points to"
    witness.close()
    server.close()


def _live_and_die(url: str, seed: int, life_s: float) -> list[str]:
    """Lines that a writer printed before it was killed."""
    process = subprocess.Popen(
        [sys.executable, str(WRITER), url, str(seed)],
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


def _tell(lines: list[str], acknowledged: dict[str, int], gone: set[str]) -> None:
    for line in lines:
        verb, name, size = line.split()
        if verb == "put":
            acknowledged[name] = int(size)
        elif verb == "dropping":  # neither promised nor gone until it is said
            del acknowledged[name]
        else:
            gone.add(name)


def _check(store: RedisStore, acknowledged: dict[str, int], gone: set[str], lives: int) -> None:
    store.shelf.catch_up()
    for name, size in acknowledged.items():
        item = page(name, size=size)
        assert read(store, item) == item.payload, name
    assert not any(present(store, [page(name) for name in gone]))
    listed = list(store.list_objects())
    in_flight = 12 * lives
    assert len(listed) <= len(acknowledged) + in_flight, "more is visible than was ever put"
    by_digest = {info.digest for info in listed}
    assert all(info.parent is None or info.parent in by_digest for info in listed)
    report = store.verify()
    assert report.bad == ()
    assert report.objects == len(listed)
    assert store.usage().checksum_failures == 0
