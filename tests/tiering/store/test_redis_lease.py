"""A session has one owner at a time, and one that was away too long cannot write any more."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import redis_servers
from dsv4_tierd.tiering.errors import SessionBusy, StoreUnavailable
from dsv4_tierd.tiering.store import lease as lease_module
from dsv4_tierd.tiering.store.lease import (
    HeldByAnother,
    Lease,
    LeaseKeeper,
    LeaseLost,
    RedisLeases,
)
from dsv4_tierd.tiering.store.redis import RedisStore
from proxy import Proxy
from redis_cases import eventually, open_redis
from redis_servers import BINARIES

HOLDER = """
import sys, time
from redis_cases import open_redis
from dsv4_tierd.tiering.store.lease import LeaseLost, RedisLeases
leases = RedisLeases(open_redis(sys.argv[1]).link)
lease = leases.acquire("s", "paused", 1.5)
leases.write(lease, b"mine")
print("held", flush=True)
while lease.valid:
    time.sleep(0.01)
try:
    leases.write(lease, b"too late")
    print("wrote", flush=True)
except LeaseLost:
    print("fenced", flush=True)
"""


@pytest.fixture(params=BINARIES)
def store(request: pytest.FixtureRequest) -> Iterator[RedisStore]:
    """A store on an empty server of each kind."""
    if BINARIES[request.param] is None:
        pytest.skip(f"this machine has no {request.param}-server")
    store = open_redis(redis_servers.emptied(request.param).url)
    yield store
    store.close()


@pytest.fixture
def leases(store: RedisStore) -> RedisLeases:
    return RedisLeases(store.link)


def test_one_owner(leases: RedisLeases) -> None:
    """A second claim is refused with the owner's name and the time left; release lets it in."""
    mine = leases.acquire("s", "a", 30)
    assert mine.valid
    with pytest.raises(HeldByAnother, match="held by a") as caught:
        leases.acquire("s", "b", 30)
    assert caught.value.owner == "a"
    assert caught.value.retry_after_s == pytest.approx(30, abs=1)
    assert leases.holder_of("s") == "a"
    assert leases.acquire("other", "b", 30).token
    assert leases.release(mine)
    assert leases.holder_of("s") is None
    assert not leases.release(mine)
    theirs = leases.acquire("s", "b", 30)
    assert theirs.token > mine.token


def test_asking_again_is_harmless(leases: RedisLeases) -> None:
    """A claim whose answer was lost is made again: the same token, renewed."""
    first = leases.acquire("s", "a", 30)
    again = leases.acquire("s", "a", 30)
    assert again.token == first.token
    assert again.until >= first.until
    assert leases.renew(first).token == first.token


def test_expiry_hands_over_and_fences(leases: RedisLeases) -> None:
    """After its time another owns it: the first can neither write, renew, release nor forget."""
    old = leases.acquire("s", "a", 1.0)
    leases.write(old, b"a's")
    eventually(lambda: not old.valid)
    eventually(lambda: leases.holder_of("s") is None)
    with pytest.raises(LeaseLost):
        leases.write(old, b"nobody's")
    new = leases.acquire("s", "b", 30)
    assert leases.read("s") == b"a's"
    leases.write(new, b"b's")
    for call in (
        lambda: leases.write(old, b"late"),
        lambda: leases.renew(old),
        lambda: leases.forget(old),
    ):
        with pytest.raises(LeaseLost):
            call()
    assert not leases.release(old)
    assert leases.holder_of("s") == "b"
    assert leases.read("s") == b"b's"
    leases.forget(new)
    assert leases.read("s") is None
    assert leases.holder_of("s") is None


def test_a_record_may_have_an_end(leases: RedisLeases) -> None:
    """It lasts for its time or for ever, and its first bytes can be read alone."""
    mine = leases.acquire("s", "a", 30)
    assert leases.read("s", 4) is None
    leases.write(mine, bytes(range(9)), 1.0)
    assert leases.read("s", 4) == bytes(range(4))
    eventually(lambda: leases.read("s") is None)
    leases.write(mine, bytes(6 << 20), 30)
    leases.write(mine, bytes(6 << 20))
    assert leases.read("s") == bytes(6 << 20)


def test_the_same_holder_after_expiry_is_another_claim(leases: RedisLeases) -> None:
    """An earlier claim of one's own name is as dead as anybody's."""
    old = leases.acquire("s", "a", 0.1)
    eventually(lambda: leases.holder_of("s") is None)
    new = leases.acquire("s", "a", 30)
    assert new.token > old.token
    with pytest.raises(LeaseLost):
        leases.write(old, b"late")


def test_many_claim_at_once(leases: RedisLeases) -> None:
    """Of twenty at the same moment one gets it."""
    start = threading.Barrier(20)
    got: list[Lease] = []

    def claim(i: int) -> None:
        start.wait()
        with contextlib.suppress(SessionBusy):
            got.append(leases.acquire("s", f"holder {i}", 30))

    threads = [threading.Thread(target=claim, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    assert leases.holder_of("s") == got[0].holder


def test_a_paused_process_is_fenced(store: RedisStore, leases: RedisLeases) -> None:
    """SIGSTOP past the lease, another takes over, SIGCONT: the first writes nothing."""
    url = f"{store.config.url}"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, url],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: leases.holder_of("s") is None)
    mine = leases.acquire("s", "next", 30)
    assert leases.read("s") == b"mine"
    leases.write(mine, b"next's")
    process.send_signal(signal.SIGCONT)
    assert process.stdout.read() == "fenced\n"
    process.wait()
    process.stdout.close()
    assert leases.read("s") == b"next's"


def test_wall_clocks_do_not_matter(leases: RedisLeases, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder's wall clock jumps by a day either way: nothing changes."""
    real = time.time
    for jump in (86_400, -86_400):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        lease = leases.acquire("s", "a", 30)
        assert lease.valid
        assert leases.renew(lease).valid
        assert leases.release(lease)


def test_tokens_grow_through_a_lost_server() -> None:
    """A server that comes back empty does not hand out a token that was used before."""
    with redis_servers.Server() as server:
        store = open_redis(server.url)
        leases = RedisLeases(store.link)
        old = [leases.acquire(f"s{i}", "a", 30) for i in range(3)]
        server.kill()
        server.start()
        eventually(lambda: store.link.up)
        for lease in old:
            with pytest.raises(LeaseLost):
                leases.write(lease, b"late")
            assert leases.acquire(lease.name, "b", 30).token > lease.token
        store.close()


def test_the_keeper_renews(leases: RedisLeases) -> None:
    """A kept lease outlives its time over and over; a dropped one runs out."""
    lost: list[Lease] = []
    keeper = LeaseKeeper(leases, lost.append)
    keeper.keep(leases.acquire("s", "a", 1.5))
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        assert leases.holder_of("s") == "a"
        assert keeper.current("s") is not None
        time.sleep(0.02)
    dropped = keeper.drop("s")
    assert dropped is not None
    eventually(lambda: leases.holder_of("s") is None)
    assert not lost
    keeper.close()


def test_the_keeper_says_what_is_lost(leases: RedisLeases) -> None:
    """Taken away at the server: the holder is told at the next renewal, once."""
    lost: list[Lease] = []
    keeper = LeaseKeeper(leases, lost.append)
    mine = leases.acquire("s", "a", 0.3)
    keeper.keep(mine)
    leases.release(mine)
    theirs = leases.acquire("s", "b", 30)
    eventually(lambda: lost)
    assert [each.name for each in lost] == ["s"]
    assert keeper.current("s") is None
    assert leases.holder_of("s") == theirs.holder
    keeper.close()
    assert len(lost) == 1


def test_an_unreachable_server_loses_the_lease_in_time() -> None:
    """Cut off, a holder stops believing before another can begin."""
    server = redis_servers.emptied()
    proxy = Proxy(server.port)
    store, other = open_redis(proxy.url, deadline_s=0.5), open_redis(server.url)
    leases, others = RedisLeases(store.link), RedisLeases(other.link)
    lost: list[float] = []
    keeper = LeaseKeeper(leases, lambda _: lost.append(lease_module.clock()))
    keeper.keep(leases.acquire("s", "a", 2.0))
    proxy.stop()
    taken = 0.0

    def take() -> bool:
        nonlocal taken
        try:
            others.acquire("s", "b", 30)
        except SessionBusy:
            return False
        taken = lease_module.clock()
        return True

    last_valid = 0.0
    while not take():
        if keeper.current("s") is not None:
            last_valid = lease_module.clock()
        time.sleep(0.005)
    assert last_valid < taken
    assert keeper.current("s") is None
    eventually(lambda: lost)
    with pytest.raises(StoreUnavailable):
        leases.acquire("s", "a", 1.0)
    proxy.go()
    keeper.close()
    for each in (store, other):
        each.close()
    proxy.close()
