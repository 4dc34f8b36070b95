"""A Redis that misbehaves: bounded waits, nothing wrong ever read, and back by itself."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from itertools import count

import pytest
import redis

import redis_servers
from dsv4_tierd.tiering.errors import PreconditionFailed, StoreUnavailable
from dsv4_tierd.tiering.store.redis_rows import EXTENTS, Doom
from proxy import Fault, Proxy
from redis_cases import DEADLINE_S, SLACK_S, eventually, open_hasty, open_redis
from redis_servers import BINARIES, Server
from store_cases import chain, page, present, read, resume

pytestmark = pytest.mark.usefixtures("quick_keeper")


@pytest.fixture(params=BINARIES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of its own, of each kind that this machine has."""
    if BINARIES[request.param] is None:
        pytest.skip(f"this machine has no {request.param}-server")
    with Server(request.param) as server:
        yield server


@pytest.mark.parametrize(
    ("fault", "byte"),
    [
        (Fault.CUT_BEFORE, 0),
        (Fault.CUT_WITHIN, 9),
        (Fault.CUT_AFTER, 0),
        (Fault.CUT_REPLY, 1),
        (Fault.STALL, 0),
    ],
)
def test_a_fault_at_every_command_of_a_put(proxy: Proxy, fault: Fault, byte: int) -> None:
    """Whole or not at all, at once or again: another daemon agrees, and no bytes are left over."""
    items = [*chain("a", 10), resume("a9")]
    witness = open_redis(f"redis://127.0.0.1:{proxy.target}")
    store = open_hasty(proxy.url)
    for n in count(1):
        proxy.arm(fault, n, byte)
        begun = time.monotonic()
        try:
            store.put(items)
            failed = False
        except StoreUnavailable:
            failed = True
        assert time.monotonic() - begun < 2 * DEADLINE_S + SLACK_S
        reached = len(proxy.commands) >= n
        proxy.arm()
        proxy.release()
        eventually(lambda: store.usage().up or store.link.up)
        if not failed:
            assert all(present(store, items))
            assert [read(store, item) for item in items] == [item.payload for item in items]
        store.put(items)
        eventually(lambda: all(present(witness, items)))
        assert [read(witness, item) for item in items] == [item.payload for item in items]
        report = witness.verify()
        assert report.bad == ()
        assert report.objects == len(items)
        store.delete([items[0].key])
        eventually(lambda: not any(present(witness, items)))
        witness.gc(grace_s=0)
        with redis.Redis(port=proxy.target) as client:
            assert client.keys("tierd:1:x:*") == []
        if not reached:
            break
    assert n > 5
    store.close()
    witness.close()


@pytest.mark.parametrize(
    ("fault", "byte"),
    [
        (Fault.CUT_BEFORE, 0),
        (Fault.CUT_AFTER, 0),
        (Fault.CUT_REPLY, 3),
        (Fault.CUT_REPLY, 5000),
        (Fault.STALL, 0),
        (Fault.TRICKLE, 0),
    ],
)
def test_a_fault_within_a_get(proxy: Proxy, fault: Fault, byte: int) -> None:
    """The read ends within its deadline, with the right bytes or none; the next ones are right."""
    store = open_hasty(proxy.url)
    item = page("a")
    store.put([item])
    proxy.arm(fault, 1, byte)
    begun = time.monotonic()
    with contextlib.suppress(StoreUnavailable):
        assert read(store, item) == item.payload  # a kept connection was replaced
    assert time.monotonic() - begun < DEADLINE_S + SLACK_S
    proxy.release()
    eventually(lambda: store.link.up)
    assert present(store, [item]) == [True]
    assert read(store, item) == item.payload
    assert store.usage().checksum_failures == 0
    store.close()


def test_a_dead_server_costs_one_deadline(proxy: Proxy) -> None:
    """A hundred reads of a server that says nothing take as long as one."""
    store = open_hasty(proxy.url)
    items = chain("a", 10)
    store.put(items)
    proxy.stop()
    begun = time.monotonic()
    for item in items * 10:
        with pytest.raises(StoreUnavailable):
            read(store, item)
    assert time.monotonic() - begun < DEADLINE_S + SLACK_S
    assert not store.usage().up
    begun = time.monotonic()
    for call in (lambda: store.put(items), lambda: present(store, items)):
        with pytest.raises(StoreUnavailable):
            call()
    assert time.monotonic() - begun < DEADLINE_S / 2
    proxy.go()
    eventually(lambda: store.usage().up)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    store.close()


def test_threads_in_flight_end_together(proxy: Proxy) -> None:
    """When one call finds the server dead, those that began later do not wait for theirs."""
    store = open_hasty(proxy.url)
    items = chain("a", 6)
    store.put(items)
    proxy.stop()
    begun = time.monotonic()

    def late(i: int) -> None:
        time.sleep(i * 0.15)
        with pytest.raises(StoreUnavailable):
            read(store, items[i])

    threads = [threading.Thread(target=late, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begun < DEADLINE_S + SLACK_S
    proxy.go()
    store.close()


def test_a_hung_server(server: Server) -> None:
    """SIGSTOP: noticed without a call, calls are bounded, and SIGCONT brings everything back."""
    store = open_hasty(server.url)
    items = chain("a", 10)
    store.put(items)
    server.pause()
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable):
        read(store, items[0])
    assert time.monotonic() - begun < DEADLINE_S + SLACK_S
    assert not store.usage().up
    server.go_on()
    eventually(lambda: store.usage().up)
    assert all(present(store, items))
    server.pause()
    eventually(lambda: not store.usage().up)  # nobody asked
    server.go_on()
    eventually(lambda: store.usage().up)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    store.close()


def test_restarted_empty(server: Server) -> None:
    """What the server lost is a miss, here and at another daemon, and is taken again."""
    store, other = open_redis(server.url), open_redis(server.url)
    items = chain("a", 10)
    store.put(items)
    eventually(lambda: all(present(other, items)))
    server.kill()
    with pytest.raises(StoreUnavailable):
        read(store, items[0])
    server.start()
    for each in (store, other):
        eventually(lambda each=each: each.usage().up)
        assert not any(present(each, items))
        assert read(each, items[0]) is None
    with pytest.raises(PreconditionFailed):
        store.put(items[5:])
    store.put(items)
    eventually(lambda: all(present(other, items)))
    assert [read(other, item) for item in items] == [item.payload for item in items]
    for each in (store, other):
        each.close()


def test_emptied_while_running(server: Server) -> None:
    """FLUSHALL is noticed, and a write in between is not believed."""
    store = open_redis(server.url)
    store.put(chain("a", 4))
    with server.client as client:
        client.flushall()
    with pytest.raises((StoreUnavailable, PreconditionFailed)):
        store.put([page("a4", "a3")])
    eventually(lambda: store.usage().up and store.usage().objects == 0)
    store.put(chain("a", 5))
    assert all(present(store, chain("a", 5)))
    store.close()


def test_a_server_that_comes_late() -> None:
    """A daemon starts without its Redis, and has it once it is there."""
    port = redis_servers.free_port()
    begun = time.monotonic()
    store = open_hasty(f"redis://127.0.0.1:{port}")
    assert time.monotonic() - begun < DEADLINE_S + SLACK_S
    assert not store.usage().up
    with pytest.raises(StoreUnavailable):
        present(store, [page("a")])
    with Server(port=port):
        eventually(lambda: store.usage().up)
        store.put([page("a")])
        assert read(store, page("a")) == page("a").payload
        store.close()


def test_killed_connections(server: Server) -> None:
    """CLIENT KILL, and a server's idle timeout, cost nobody an error."""
    store = open_redis(server.url)
    items = chain("a", 5)
    store.put(items)
    for _ in range(5):
        with server.client as client:
            client.execute_command("CLIENT KILL TYPE normal SKIPME yes")
        for item in items:
            try:
                assert read(store, item) == item.payload
            except StoreUnavailable:  # the thread that follows the log was cut off: it reconnects
                eventually(lambda: store.link.up)
    with server.client as client:
        client.config_set("timeout", 1)
    time.sleep(2.2)
    eventually(lambda: store.link.up)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    store.close()


def test_evicted_between_lookup_and_read(server: Server) -> None:
    """The server evicts what it likes: a miss, not an error, and the row goes everywhere."""
    store, other = open_redis(server.url), open_redis(server.url)
    items = chain("a", 12)
    store.put(items)
    eventually(lambda: all(present(other, items)))
    with server.client as client:
        [lost, *_] = sorted(client.keys("tierd:1:x:*"))
        client.delete(lost)
    outcomes = [read(store, item) for item in items]
    assert None in outcomes
    for item, data in zip(items, outcomes, strict=True):
        assert data in (None, item.payload)
        assert present(store, [item]) == [data is not None]
    eventually(lambda: present(other, items) == present(store, items))
    assert store.usage().checksum_failures == 0
    assert store.verify().bad == ()
    store.close()
    other.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru"])
def test_maxmemory_with_eviction(policy: str) -> None:
    """Far more than the server holds, under its own eviction: what is read is right, or a miss."""
    with Server(maxmemory="24mb", maxmemory_policy=policy) as server:
        store = open_redis(server.url, bytes_max=0, ttl_s=3600)
        runs = [chain(f"r{i}-", 20, size=100_000) for i in range(20)]
        for run in runs:
            try:
                store.put(run)
            except (StoreUnavailable, PreconditionFailed):
                eventually(lambda: store.link.up)
        missed = 0
        for item in [item for run in runs for item in run]:
            try:
                data = read(store, item)
            except StoreUnavailable:
                eventually(lambda: store.link.up)
                continue
            assert data in (None, item.payload)
            missed += data is None
        assert missed
        assert store.usage().checksum_failures == 0
        store.close()


def test_out_of_memory() -> None:
    """noeviction and full: writes make room or fail at once, reads go on, and it says so."""
    with Server(maxmemory="24mb", maxmemory_policy="noeviction") as server:
        store = open_redis(server.url, bytes_max=0)
        runs = [chain(f"r{i}-", 20, size=100_000) for i in range(16)]
        for run in runs:
            store.put(run)  # by giving up older ones
        assert all(present(store, runs[-1]))
        assert store.usage().evicted_objects > 0
        assert store.usage().up
        with server.client as client:
            client.config_set("maxmemory", "3mb")
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable, match="out of memory"):
            store.put([page("huge", size=4_000_000)])
        assert time.monotonic() - begun < 2 * DEADLINE_S + SLACK_S
        assert not store.usage().up
        assert store.link.up
        with server.client as client:
            client.config_set("maxmemory", "64mb")
        store.put(chain("again", 5))
        assert store.usage().up
        store.close()


def test_it_says_that_it_went_and_came(proxy: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    """One line when the server goes, one when it comes back, no password in either."""
    caplog.set_level(logging.INFO, logger="dsv4_tierd.tiering.store")
    store = open_hasty(proxy.url)
    caplog.clear()
    proxy.stop()
    for item in chain("a", 5):
        with pytest.raises(StoreUnavailable):
            store.put([item])
    proxy.go()
    eventually(lambda: store.usage().up)

    def said(words: str) -> int:
        return sum(words in record.message for record in caplog.records)

    eventually(lambda: said("is connected"))  # told when it is so already
    assert (said("is away"), said("is connected")) == (1, 1)
    store.close()


def test_what_becomes_unsure_during_a_sweep_is_swept_too(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer's answer is lost while what an earlier one left over is looked at."""
    store = open_redis(proxy.url)
    early, late = (Doom(EXTENTS + name, 1) for name in (b"early", b"late"))
    looked_at: list[Doom] = []

    def look(dooms: Iterable[Doom]) -> None:
        looked_at.extend(dooms)
        if len(looked_at) == 1:
            store.shelf.unsure([late])

    monkeypatch.setattr(store.shelf, "discard_unused", look)
    store.shelf.unsure([early])
    store.shelf.sweep()
    assert looked_at == [early, late]
    store.close()


def test_a_log_that_was_cut_meanwhile_promises_nothing(server: Server) -> None:
    """A process stood still while others wrote more than the log keeps, and deleted a page."""
    one, two = open_redis(server.url), open_redis(server.url)
    item = page("x")
    one.put([item])
    one.keeper._stopping = True  # as if its process was stopped
    one.keeper._thread.join()
    eventually(lambda: present(two, [item]) == [True])
    two.delete([item.key])
    for n in range(300):
        two.put([page(f"n{n}", size=10)])
    with redis.Redis(port=server.port) as client:
        client.xtrim(one.shelf.names.log, maxlen=280, approximate=False)
    with pytest.raises(StoreUnavailable, match="anew"):
        one.put([item])
    one.keeper._restore()
    one.put([item])
    eventually(lambda: present(two, [item]) == [True])
    one.close()
    two.close()
