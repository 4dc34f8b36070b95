"""The store over L2 adapters, on an object store that may be as bad as the real ones get."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from dsv4_tierd.tiering.errors import (
    BadRequest,
    StoreUnavailable,
    TransferFailed,
    UnsupportedCombination,
)
from dsv4_tierd.tiering.store.lmcache import LMCacheStore, open_lmcache
from dsv4_tierd.tiering.store.lmcache_kit import secrets_of
from dsv4_tierd.tiering.store.lmcache_log import (
    LOG_BYTES,
    LOG_GROUP,
    LogRow,
    pack_rows,
    split_rows,
    unpack_rows,
)
from dsv4_tierd.tiering.store.lmcache_shelf import Name
from fake_l2 import DEADLINE_S, POLL_S, Bucket, FakeKit, open_fake
from redis_cases import eventually
from store_cases import IDENTITY, chain, page, present, read, resume, tail

SLACK_S = 1.0


@pytest.fixture(params=["first_wins", "last_wins"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """Both ways of treating a second write."""
    return Bucket(replaces=request.param == "last_wins")


@pytest.fixture
def kit(bucket: Bucket) -> FakeKit:
    """Adapters on it."""
    return FakeKit(bucket)


@pytest.fixture
def store(kit: FakeKit) -> Iterator[LMCacheStore]:
    """A store that is closed in the end."""
    store = open_fake(kit)
    yield store
    store.close()


def frames(bucket: Bucket) -> list[Name]:
    """Names of the payloads in a bucket."""
    return [name for name in bucket.objects if name.group < LOG_GROUP]


def test_a_restart_finds_everything(bucket: Bucket) -> None:
    """Objects, what they hang on, and their bytes are counted as before."""
    items = [*chain("a", 30), resume("a29"), tail("s", "a29")]
    first = open_fake(bucket)
    first.put(items)
    used = first.usage()
    first.close()
    again = open_fake(bucket)
    assert [read(again, item) for item in items] == [item.payload for item in items]
    assert (again.usage().objects, again.usage().bytes_used) == (used.objects, used.bytes_used)
    assert again.delete([items[10].key]) == 1
    again.close()
    last = open_fake(bucket)
    assert present(last, items) == [True] * 10 + [False] * 22
    assert last.usage().objects == 10
    last.close()


def test_what_is_secret_in_a_specification() -> None:
    """Whatever stands under a name like a secret's, at any depth, longest first; nothing else."""
    spec = {"type": "s3", "password": "pw", "x": {"auth_token": "pwpw", "keys": ["k1", 7], "n": 1}}
    assert secrets_of(spec) == ["pwpw", "pw", "k1"]


def test_one_sees_what_another_stores_and_removes(store: LMCacheStore, bucket: Bucket) -> None:
    """Within some polls, in both directions, without asking for keys."""
    other = open_fake(bucket)
    items = chain("a", 5)
    store.put(items[:3])
    eventually(lambda: all(present(other, items[:3])))
    other.put(items[3:])
    eventually(lambda: all(present(store, items)))
    assert [read(store, item) for item in items] == [item.payload for item in items]
    other.delete([items[1].key])
    eventually(lambda: present(store, items) == [True] + [False] * 4)
    other.close()


def test_writers_that_begin_at_once_are_all_heard(bucket: Bucket) -> None:
    """Eight stores that claim a slot at the same moment: a ninth sees what each stored."""
    stores = [open_fake(bucket) for _ in range(8)]
    start = threading.Barrier(8)
    runs = [chain(f"w{i}-", 3) for i in range(8)]

    def work(index: int) -> None:
        start.wait()
        stores[index].put(runs[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ninth = open_fake(bucket)
    eventually(lambda: all(present(ninth, [item for run in runs for item in run])))
    for each in (*stores, ninth):
        each.close()


def test_two_that_store_the_same_keep_it_once(bucket: Bucket) -> None:
    """Whoever comes first: in the end there is one copy, and both read it."""
    one, two = (open_fake(bucket) for _ in range(2))
    items = chain("a", 20)
    threads = [threading.Thread(target=store.put, args=(items,)) for store in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: len(frames(bucket)) == len(items))
    time.sleep(5 * POLL_S)
    for store in (one, two):
        assert [read(store, item) for item in items] == [item.payload for item in items]
        assert store.usage().objects == len(items)
        store.close()


def test_nothing_is_visible_before_its_bytes_are_there(bucket: Bucket) -> None:
    """When the write of a row fails after the bytes were written, nobody sees the object."""
    kit = FakeKit(bucket)
    store = open_fake(kit)
    store.put([page("before")])

    def fail_rows(names: list[Name]) -> None:
        if names[0].group == LOG_GROUP:
            kit.adapters[-1].dead = True

    kit.before_store = fail_rows
    with pytest.raises(StoreUnavailable):
        store.put([page("after")])
    kit.before_store = lambda names: None
    other = open_fake(bucket)
    assert present(other, [page("before"), page("after")]) == [True, False]
    eventually(lambda: store.usage().up)
    store.put([page("after")])
    eventually(lambda: present(other, [page("after")]) == [True])
    for each in (store, other):
        each.close()


@pytest.mark.parametrize("taken", [True, False])
def test_tasks_that_never_end_cost_one_deadline(
    store: LMCacheStore, kit: FakeKit, taken: bool
) -> None:
    """Taken or not, every call then fails at once until a new adapter answers; no restart."""
    items = chain("a", 10)
    store.put(items)
    kit.hangs = True
    if not taken:
        kit.takes_tasks.clear()
    begun = time.monotonic()
    for item in items:
        with pytest.raises(StoreUnavailable):
            read(store, item)
    with pytest.raises(StoreUnavailable):
        present(store, items)
    assert time.monotonic() - begun < 2 * DEADLINE_S + SLACK_S
    assert not store.usage().up
    kit.hangs = False
    kit.takes_tasks.set()
    eventually(lambda: store.usage().up)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    assert len(kit.adapters) > 1
    eventually(lambda: kit.adapters[0].closed)


def test_a_client_that_lost_its_server_is_replaced(store: LMCacheStore, kit: FakeKit) -> None:
    """An adapter that says "not there" to all is not believed: nothing is forgotten for it."""
    items = chain("a", 3)
    store.put(items)
    kit.adapters[-1].dead = True
    with pytest.raises(StoreUnavailable):
        read(store, items[0])
    eventually(lambda: store.usage().up)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    assert store.usage().objects == 3


def test_a_client_of_which_a_part_lost_its_server(store: LMCacheStore, kit: FakeKit) -> None:
    """One worker of several says "not there" to what it is asked: it is found out, and replaced."""
    items = chain("a", 3)
    store.put(items)
    kit.adapters[-1].dead_worker = True
    with pytest.raises(StoreUnavailable):
        read(store, items[0])
    eventually(lambda: store.usage().up)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    assert store.usage().objects == 3
    [*_, adapter] = kit.adapters
    adapter.dead_worker = True
    with pytest.raises(StoreUnavailable):
        store.gc()
    eventually(lambda: store.usage().up)
    assert store.usage().objects == 3


def test_starting_without_a_server(kit: FakeKit) -> None:
    """A store that nobody answers starts down, says so at once, and comes up by itself."""
    kit.refuses = True
    store = open_fake(kit)
    assert not store.usage().up
    with pytest.raises(StoreUnavailable):
        present(store, [page("a")])
    kit.refuses, kit.stays_dead = False, True
    time.sleep(5 * POLL_S)
    assert not store.usage().up
    kit.stays_dead = False
    eventually(lambda: store.usage().up)
    store.put([page("a")])
    assert read(store, page("a")) == page("a").payload
    store.close()


def test_a_server_that_lost_everything(store: LMCacheStore, bucket: Bucket) -> None:
    """What is gone is not offered for long, and can be stored again."""
    items = chain("a", 3)
    store.put(items)
    bucket.objects.clear()
    eventually(lambda: store.usage().up and not store.usage().objects)
    store.put(items)
    assert [read(store, item) for item in items] == [item.payload for item in items]


def test_bytes_that_went_bad_are_never_served(store: LMCacheStore, bucket: Bucket) -> None:
    """One flipped bit anywhere, a shorter or a longer object: refused, forgotten, storable."""
    item = page("a")
    for spoil in (
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
        lambda data: data[:-1] + bytes([data[-1] ^ 0x80]),
    ):
        store.put([item])
        [name] = frames(bucket)
        bucket.objects[name] = spoil(bucket.objects[name])
        failures = store.usage().checksum_failures
        with pytest.raises(TransferFailed):
            read(store, item)
        assert store.usage().checksum_failures == failures + 1
        assert present(store, [item]) == [False]
        assert read(store, item) is None
    store.put([item])
    [name] = frames(bucket)
    bucket.objects[name] = bucket.objects[name][:-1]
    assert read(store, item) is None
    assert present(store, [item]) == [False]


def test_objects_of_other_names_are_not_served(store: LMCacheStore, bucket: Bucket) -> None:
    """Bytes that are whole, under the name of others, are refused."""
    store.put([page("a"), page("b")])
    one, two = frames(bucket)
    bucket.objects[one], bucket.objects[two] = bucket.objects[two], bucket.objects[one]
    with pytest.raises(TransferFailed):
        read(store, page("a"))


def test_a_lost_log_object_costs_what_it_named(bucket: Bucket) -> None:
    """The objects of the others are found; a damaged one counts as lost."""
    store = open_fake(bucket)
    for index in range(5):
        store.put([page(f"p{index}")])
    store.close()
    by_number = {
        int.from_bytes(name.digest[16:], "little"): name
        for name in bucket.objects
        if name.group == LOG_GROUP
    }
    del bucket.objects[by_number[1]]
    data = bytearray(bucket.objects[by_number[3]])
    data[100] ^= 1
    bucket.objects[by_number[3]] = bytes(data)
    again = open_fake(bucket)
    assert present(again, [page(f"p{i}") for i in range(5)]) == [True, False, True, False, True]
    again.close()


def test_the_budget_holds_across_writers(bucket: Bucket) -> None:
    """What others stored counts; the least recently used goes first, its bytes too."""
    other = open_fake(bucket)
    other.put(chain("old", 4))
    store = open_fake(bucket, bytes_max=100_000)
    for index in range(12):
        store.put([page(f"p{index}")])
        assert store.usage().bytes_used <= 100_000
    assert store.usage().evicted_objects
    assert sum(len(bucket.objects[name]) for name in frames(bucket)) <= 100_000
    assert present(store, [page("p11")]) == [True]
    eventually(lambda: not any(present(other, chain("old", 4))))
    with pytest.raises(StoreUnavailable, match="full"):
        store.put([page("large", size=200_000)])
    assert store.usage().up
    store.close()
    other.close()


def test_another_identity_sees_nothing_and_is_told(
    bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    """A store of other weights holds nothing for this model, and the log says what differs."""
    store = open_fake(bucket)
    store.put([page("a", tenant="me")])
    other = open_fake(bucket, replace(IDENTITY, weights_digest="00" * 32))
    assert "weights_digest" in caplog.text
    assert present(other, [page("a", tenant="me")]) == [False]
    assert other.delete_tenant("me") == 1, "a tenant is removed under every identity"
    eventually(lambda: present(store, [page("a", tenant="me")]) == [False])
    assert not frames(bucket)
    for each in (store, other):
        each.close()


def test_verify_reads_everything(store: LMCacheStore, bucket: Bucket) -> None:
    """Bad and missing objects are named and forgotten."""
    items = chain("a", 4)
    store.put(items)
    names = {name.digest: name for name in frames(bucket)}
    spoiled = names[items[3].key.digest]
    bucket.objects[spoiled] = bucket.objects[spoiled][:-1] + b"\0"
    del bucket.objects[names[items[2].key.digest]]
    report = store.verify()
    assert (report.objects, len(report.bad)) == (4, 2)
    assert present(store, items) == [True, True, False, False]
    assert store.verify().bad == ()
    assert [item.digest for item in store.list_objects()] == [i.key.digest.hex() for i in items[:2]]


def test_log_objects_hold_what_they_were_given() -> None:
    """Rows of every kind survive; another's, an older number's or a damaged one is refused."""
    rows = [
        LogRow(item.key, index, len(item.payload), item.parent, removed=index % 3 == 0)
        for index, item in enumerate([*chain("a", 300, "tenant é"), resume("a1"), tail("s")])
    ]
    groups = list(split_rows(rows))
    assert [row for group in groups for row in group] == rows
    identity, writer = bytes(32), bytes(range(16))
    for number, group in enumerate(groups):
        data = pack_rows(identity, writer, number, group)
        assert len(data) == LOG_BYTES
        assert unpack_rows(identity, writer, number, data) == group
        wrong: list[Callable[[], object]] = [
            lambda data=data, number=number: unpack_rows(identity, bytes(16), number, data),
            lambda data=data, number=number: unpack_rows(identity, writer, number + 1, data),
            lambda data=data, number=number: unpack_rows(b"x" * 32, writer, number, data),
        ]
        for call in wrong:
            with pytest.raises(ValueError, match="not the log object"):
                call()
        data[len(data) // 2] ^= 4
        with pytest.raises(ValueError, match="checksum"):
            unpack_rows(identity, writer, number, data)


def test_without_lmcache_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is named before anything is opened."""
    known = [name for name in sys.modules if name.partition(".")[0] == "lmcache"]
    for name in {*known, "lmcache"}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedCombination, match=r"dsv4-tierd\[lmcache\]"):
        open_lmcache({"type": "fs_native", "base_path": "x"}, IDENTITY, 0)


@pytest.mark.parametrize("spec", [{"type": "fs", "deadline_s": "soon"}, {"type": "../x"}])
def test_wrong_specifications(spec: dict[str, object]) -> None:
    """They are refused, with or without LMCache."""
    with pytest.raises(BadRequest):
        open_lmcache(spec, IDENTITY, 0)
