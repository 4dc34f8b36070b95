"""The store on Redis: shared, bounded, honest about its bytes, on one server or a cluster."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

import pytest
import redis

import redis_servers
from dsv4_tierd.tiering.errors import (
    NotPinned,
    PinBudgetExhausted,
    PreconditionFailed,
    StoreUnavailable,
)
from dsv4_tierd.tiering.store import redis_keeper
from dsv4_tierd.tiering.store.protocol import ObjectKind
from dsv4_tierd.tiering.store.redis import RedisStore
from dsv4_tierd.tiering.store.redis_replies import as_bytes, as_count, as_flag, as_ok, as_strings
from redis_cases import PATIENT_S, eventually, open_redis
from redis_servers import BINARIES
from store_cases import IDENTITY, chain, digest, page, present, read, resume, tail


@pytest.fixture(params=["valkey", "redis", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    """Something empty to talk to, of each kind."""
    if request.param == "cluster":
        return redis_servers.emptied_cluster().url
    if BINARIES[request.param] is None:
        pytest.skip(f"this machine has no {request.param}-server")
    return redis_servers.emptied(request.param).url


def values(url: str) -> list[bytes]:
    """Every extent's bytes that the servers hold."""
    store = open_redis(url)
    found = []
    for pool in store.link.pools():
        client = redis.Redis(connection_pool=pool)
        found += [client.get(key) for key in client.keys("tierd:1:x:*")]
    store.close()
    return [value for value in found if value is not None]


def test_daemons_see_each_other(url: str) -> None:
    """What one stores or deletes, another sees within a second, without being asked."""
    one, two = open_redis(url), open_redis(url)
    items = [*chain("a", 40), resume("a39"), tail("s", "a39")]
    one.put(items)
    waits = [eventually(lambda: all(present(two, items)))]
    assert [read(two, item) for item in items] == [item.payload for item in items]
    two.put(chain("b", 3))
    two.delete([items[20].key])
    waits.append(eventually(lambda: sum(present(one, items)) == 20))
    waits.append(eventually(lambda: all(present(one, chain("b", 3)))))
    assert min(waits) < 1
    assert one.usage().objects == two.usage().objects
    for store in (one, two):
        store.close()
    late = open_redis(url)
    assert present(late, items) == [True] * 20 + [False] * 22
    assert [read(late, item) for item in items[:20]] == [item.payload for item in items[:20]]
    late.close()


def test_two_that_compute_the_same_store_it_once(url: str) -> None:
    """Several daemons put one prefix at the same moment: one copy stays, all of them have it."""
    stores = [open_redis(url) for _ in range(4)]
    items = chain("a", 30)
    start = threading.Barrier(4)

    def put(store: RedisStore) -> None:
        start.wait()
        for at in range(0, 30, 3):
            store.put(items[at : at + 3])

    threads = [threading.Thread(target=put, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        assert all(present(store, items))
        assert [read(store, item) for item in items] == [item.payload for item in items]
    payloads = sum(len(item.payload) + 192 for item in items)
    # An extent of which another daemon won only a part stays whole until that part goes too.
    assert payloads <= sum(map(len, values(url))) < 2 * payloads
    eventually(lambda: len({store.usage().bytes_used for store in stores}) == 1)
    stores[0].delete([items[0].key])
    assert values(url) == []
    for store in stores:
        store.close()


def test_deleted_bytes_are_gone(url: str) -> None:
    """Of one page among others in an extent, of a branch, of a tenant: none can be found."""
    store = open_redis(url)
    items = chain("a", 12)
    mine, theirs = chain("a", 6, tenant="me"), chain("a", 6, tenant="you")
    for each in (items, mine, theirs):
        store.put(each)
    store.delete([items[3].key])
    held = b"".join(values(url))
    assert [item.payload in held for item in items] == [True] * 3 + [False] * 9
    assert store.delete_tenant("me") == 6
    held = b"".join(values(url))
    assert not any(item.payload in held for item in mine)
    assert all(item.payload in held for item in theirs)
    assert store.verify().bad == ()
    store.close()


def test_a_tenant_is_deleted_under_every_identity(url: str) -> None:
    """Also what another model's daemon has stored for it, and nothing of another tenant."""
    other = open_redis(url, replace(IDENTITY, row_format="bf16"))
    other.put(chain("a", 4, tenant="me") + chain("a", 4, tenant="you"))
    store = open_redis(url)
    store.put(chain("a", 2, tenant="me"))
    assert store.delete_tenant("me") == 6
    eventually(lambda: not any(present(other, chain("a", 4, tenant="me"))))
    assert all(present(other, chain("a", 4, tenant="you")))
    for each in (store, other):
        each.close()


def test_other_identities_are_invisible_and_named(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Another row format hits nothing, and the log says which field differs."""
    store = open_redis(url)
    store.put(chain("a", 3))
    store.close()
    other = open_redis(url, replace(IDENTITY, row_format="bf16"))
    assert not any(present(other, chain("a", 3)))
    assert "3 objects of identity" in caplog.text
    assert "row_format: 'fp8' there, 'bf16' here" in caplog.text
    assert {info.identity for info in other.list_objects()} == {IDENTITY.digest.hex()}
    other.close()
    again = open_redis(url)
    assert all(present(again, chain("a", 3)))
    again.close()


def test_the_budget_holds(url: str) -> None:
    """Least recently used runs go, from their ends; what a put hangs on never does."""
    bound = 2 << 20
    store = open_redis(url, bytes_max=bound)
    runs = [chain(f"run{i}-", 30) for i in range(12)]
    for i, run in enumerate(runs):
        for at in range(0, 30, 5):
            store.put(run[at : at + 5])
            assert store.usage().bytes_used <= bound
        assert all(present(store, run))
        if i:
            read(store, runs[0][-1])
    assert all(present(store, runs[0])), "the run that is read stays"
    assert store.usage().evicted_objects > 0
    for run in runs:
        held = present(store, run)
        assert held == sorted(held, reverse=True), "a page is stored without the one before it"
    assert sum(map(len, values(url))) <= bound
    assert store.verify().bad == ()
    with pytest.raises(StoreUnavailable):
        store.put([page("huge", size=bound)])
    store.close()


def test_a_tenant_keeps_to_its_own_budget(url: str) -> None:
    """A tenant that stores too much loses its own objects, and nobody else's."""
    store = open_redis(url, tenant_bytes_max=400_000)
    store.put(chain("a", 20, tenant="quiet"))
    for i in range(6):
        store.put(chain(f"r{i}-", 20, tenant="loud"))
    assert all(present(store, chain("a", 20, tenant="quiet")))
    assert all(present(store, chain("r5-", 20, tenant="loud")))
    assert not any(present(store, chain("r0-", 20, tenant="loud")))
    store.close()


def test_what_one_reads_another_keeps(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads are told to the other daemons, whose eviction respects them."""
    monkeypatch.setattr(redis_keeper, "TELL_S", 0.1)
    one, two = (open_redis(url, bytes_max=1 << 20) for _ in range(2))
    cold, warm = chain("cold", 40), chain("warm", 40)
    one.put(warm)
    one.put(cold)
    eventually(lambda: all(present(two, cold)))
    read(two, warm[-1])
    held = one.shelf.mirror.find(warm[-1].key)
    assert held is not None
    before = held.used
    eventually(lambda: held.used != before)
    one.put(chain("new", 30))
    assert all(present(one, warm))
    assert not all(present(one, cold))
    for store in (one, two):
        store.close()


def test_pins(url: str) -> None:
    """Pinned objects outlive any pressure, within a budget; taking back what is not there fails."""
    store = open_redis(url, bytes_max=2 << 20)
    items = chain("a", 20)
    store.put(items)
    with pytest.raises(PreconditionFailed):
        store.pin([items[-1].key, page("none").key])
    with pytest.raises(NotPinned):
        store.unpin([items[-1].key])
    store.pin([items[-1].key])
    store.pin([items[-1].key])
    for i in range(12):
        store.put(chain(f"r{i}-", 30))
    assert all(present(store, items))
    big = chain("big", 100)
    store.put(big)
    with pytest.raises(PinBudgetExhausted):
        store.pin([big[-1].key])
    store.close()
    store = open_redis(url, bytes_max=2 << 20)  # pins outlive a daemon
    store.put(chain("x", 60))
    assert all(present(store, items))
    store.unpin([items[-1].key])
    for i in range(10):
        store.put(chain(f"s{i}-", 30))
    assert not all(present(store, items))
    store.close()


def test_time_to_live(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody reads goes; a read keeps the whole chain, a pin keeps it too."""
    monkeypatch.setattr(redis_keeper, "LOOK_S", 0.1)
    store = open_redis(url, ttl_s=1.0)
    idle, used, pinned = chain("idle", 12), chain("used", 12), chain("pinned", 12)
    for each in (idle, used, pinned):
        store.put(each)
    store.pin([pinned[-1].key])
    end = time.monotonic() + 2
    while time.monotonic() < end:
        assert read(store, used[-1]) == used[-1].payload
        time.sleep(0.1)
    assert not any(present(store, idle))
    assert all(present(store, used))
    assert [read(store, item) for item in pinned] == [item.payload for item in pinned]
    eventually(lambda: store.usage().objects == 24)
    eventually(lambda: store.usage().evicted_objects == 12)
    store.unpin([pinned[-1].key])
    eventually(lambda: store.usage().objects == 0)
    assert values(url) == []
    assert store.usage().bytes_used == 0
    store.close()


def test_gc_removes_what_nobody_knows(url: str) -> None:
    """Bytes without rows and rows without bytes go; what may still be published stays."""
    store = open_redis(url)
    items = chain("a", 12)
    store.put(items)
    row = store.shelf.mirror.find(items[-1].key)
    assert row is not None
    name = store.shelf.names.extent(items[0].key, store.shelf.mirror.now_ms())
    store.link.call(name, "SET", name, b"x" * 1000, read=as_ok)
    lost = row.place.extent
    store.link.call(lost, "UNLINK", lost, read=as_flag)
    assert store.gc().segments_compacted == 0
    assert store.link.call(name, "EXISTS", name, read=as_flag)
    report = store.gc(grace_s=-1)
    assert report.segments_compacted == 1
    assert report.bytes_after < report.bytes_before
    assert not store.link.call(name, "EXISTS", name, read=as_flag)
    assert not any(row.place.extent == lost for row in store.shelf.mirror.rows())
    assert store.verify().bad == ()
    store.close()


def test_maintenance_without_an_identity(url: str) -> None:
    """`store ls | verify | gc` see every identity; one that holds nothing any more is forgotten."""
    for row_format in ("fp8", "bf16"):
        store = open_redis(url, replace(IDENTITY, row_format=row_format))
        store.put(chain("a", 4))
        store.close()
    care = open_redis(url, None)
    infos = list(care.list_objects())
    assert len(infos) == 8
    assert len({info.identity for info in infos}) == 2
    assert care.verify().objects == 8
    assert care.gc().segments_compacted == 0
    assert care.delete_tenant("") == 8
    care.gc()
    key = b"tierd:1:identities"
    assert care.shelf.link.call(key, "HKEYS", key, read=as_strings) == []
    care.close()
    store = open_redis(url)
    store.put(chain("a", 4))
    assert all(present(store, chain("a", 4)))
    store.close()


def test_verify_finds_rot(url: str) -> None:
    """One flipped bit in a record: named, forgotten, and the object can be stored again."""
    store = open_redis(url)
    items = chain("a", 5)
    store.put(items)
    row = store.shelf.mirror.find(items[2].key)
    assert row is not None
    at = row.place.offset + 3000
    data = store.link.call(row.place.extent, "GETRANGE", row.place.extent, at, at, read=as_bytes)
    flipped = bytes([data[0] ^ 4])
    where = row.place.extent
    store.link.call(where, "SETRANGE", where, at, flipped, read=as_count)
    report = store.verify()
    assert len(report.bad) == 1
    assert items[2].key.digest.hex()[:16] in report.bad[0]
    assert present(store, items) == [True, True, False, True, True]
    store.put(items)
    assert store.verify().bad == ()
    store.close()


def test_objects_larger_than_a_value(url: str) -> None:
    """An object of many values comes back whole, and goes whole."""
    store = open_redis(url)
    big = page("big", size=(64 << 10) * 5 + 17)
    store.put([big, page("next", "big")])
    assert len(values(url)) == 7
    assert read(store, big) == big.payload
    other = open_redis(url)
    assert read(other, big) == big.payload
    store.delete([big.key])
    assert values(url) == []
    for each in (store, other):
        each.close()


def test_a_lookup_of_900k_tokens_takes_milliseconds() -> None:
    """3,516 pages are looked up in memory, whatever the server does."""
    server = redis_servers.emptied()
    store = open_redis(server.url, bytes_max=0, value_bytes=4 << 20)
    items = chain("a", 3516, size=64)
    store.put(items)
    keys = [item.key for item in items]
    best = min(_timed(lambda: store.has(keys)) for _ in range(5))
    assert best < 0.01
    server.pause()
    try:
        assert _timed(lambda: store.has(keys)) < PATIENT_S / 2
    finally:
        server.go_on()
    store.close()


def _timed(call) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def test_the_log_may_be_lost() -> None:
    """A daemon that missed more than the log keeps reads the catalogue anew."""
    server = redis_servers.emptied()
    one, two = open_redis(server.url), open_redis(server.url)
    one.put(chain("a", 5))
    eventually(lambda: all(present(two, chain("a", 5))))
    two.link.trip("for the test")
    one.put(chain("b", 5))
    one.delete([page("a2").key])
    with server.client as client:
        client.xtrim(one.shelf.names.log, maxlen=0, approximate=False)
    eventually(lambda: two.link.up)
    eventually(lambda: all(present(two, chain("b", 5))))
    assert present(two, chain("a", 5)) == [True, True, False, False, False]
    for each in (one, two):
        each.close()


def test_a_lost_catalogue_is_noticed() -> None:
    """The server evicts the catalogue itself: within two seconds nobody claims what it held."""
    server = redis_servers.emptied()
    store = open_redis(server.url)
    store.put(chain("a", 5))
    with server.client as client:
        client.delete(store.shelf.names.cat)
    eventually(lambda: store.usage().objects == 0, 3)
    store.put(chain("a", 5))
    assert all(present(store, chain("a", 5)))
    store.gc(grace_s=-1)
    assert [read(store, item) for item in chain("a", 5)] == [i.payload for i in chain("a", 5)]
    with server.client as client:
        assert len(client.keys("tierd:1:x:*")) == 1
    store.close()


def test_many_kinds_of_names(url: str) -> None:
    """Tenants of any text, all kinds, digests with any byte: each is its own object."""
    store = open_redis(url)
    tenants = ["", "a", "ä|{x}.1", "tenant with spaces\r\n$5", "x" * 1000]
    items = [replace(tail("s", tenant=tenant), parent=None) for tenant in tenants]
    items += [
        replace(item, key=replace(item.key, kind=ObjectKind.RESUME, digest=digest("other")))
        for item in items
    ]
    store.put(items)
    assert [read(store, item) for item in items] == [bytes(item.payload) for item in items]
    assert {info.tenant for info in store.list_objects()} == set(tenants)
    for tenant in tenants:
        assert store.delete_tenant(tenant) == 2
    assert values(url) == []
    store.close()


def test_no_thread_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """A closed store has no thread and no connection."""
    server = redis_servers.emptied()
    before = threading.active_count()
    stores = [open_redis(server.url) for _ in range(3)]
    for store in stores:
        store.put([page("a")])
    begun = time.monotonic()
    for store in stores:
        store.close()
    assert time.monotonic() - begun < PATIENT_S / 2
    assert threading.active_count() == before
    with server.client as client:
        eventually(lambda: len(client.client_list()) == 1)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
