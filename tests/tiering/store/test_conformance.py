"""What every prefix store does. New implementations join ``OPENERS`` and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

import redis_servers
from dsv4_tierd.tiering.errors import PreconditionFailed, StoreUnavailable, TransferFailed
from dsv4_tierd.tiering.store.protocol import (
    Facts,
    ObjectKey,
    ObjectKind,
    PrefixStore,
    StoredObject,
)
from fake_l2 import open_first_wins, open_last_wins
from lmcache_cases import open_fs_native, open_plugin
from naive_store import NaiveStore
from redis_cases import open_redis
from store_cases import (
    IDENTITY,
    FaultyFiles,
    chain,
    digest,
    open_disk,
    page,
    present,
    read,
    resume,
    tail,
)
from tiered_cases import open_settled

OPENERS: dict[str, Callable[[Path], PrefixStore]] = {
    "naive": lambda folder: NaiveStore(IDENTITY.digest),
    "disk": open_disk,
    "disk_without_holes": lambda folder: open_disk(folder, files=FaultyFiles(holes=False)),
    "redis": lambda folder: open_redis(redis_servers.emptied().url),
    "tiered": open_settled,
    "lmcache_first_wins": open_first_wins,
    "lmcache_last_wins": open_last_wins,
}
if find_spec("lmcache"):  # test_lmcache_adapters says so where it is not
    OPENERS |= {"lmcache_fs_native": open_fs_native, "lmcache_plugin": open_plugin}


@pytest.fixture(params=OPENERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PrefixStore]:
    """An empty store of each kind."""
    store = OPENERS[request.param](tmp_path / "store")
    yield store
    store.close()


def test_what_was_put_is_read_back(store: PrefixStore) -> None:
    """Pages, resume points and tails come back byte for byte."""
    items = [*chain("a", 40), resume("a39"), tail("session", "a39", size=3)]
    store.put(items)
    assert all(present(store, items))
    assert [read(store, item) for item in items] == [item.payload for item in items]


def test_what_is_known_of_an_object(store: PrefixStore) -> None:
    """The catalogue says what an object hangs on and how long it is, and nothing of others."""
    items = [*chain("a", 2), resume("a1", size=77), tail("s", "a1", size=0)]
    store.put(items)
    found = [store.find(item.key) for item in items]
    assert found == [Facts(item.parent, len(item.payload)) for item in items]
    assert store.find(page("b").key) is None


def test_what_was_not_put_is_not_there(store: PrefixStore) -> None:
    """A miss is False, not an error, and leaves the buffer alone."""
    store.put(chain("a", 2))
    buffer = bytearray(b"x" * 10)
    assert present(store, [page("b"), resume("a1"), tail("a1")]) == [False] * 3
    assert not store.get(page("b").key, memoryview(buffer))
    assert buffer == b"x" * 10


def test_kinds_and_tenants_are_apart(store: PrefixStore) -> None:
    """The same digest under another kind or tenant is another object."""
    store.put([page("a", tenant="one"), page("a", tenant="two"), resume("a", "one")])
    assert present(store, [page("a"), page("a", tenant="two"), resume("a", "two")]) == [
        False,
        True,
        False,
    ]
    assert read(store, page("a", tenant="one")) != read(store, page("a", tenant="two"))
    assert store.delete([page("a", tenant="two").key]) == 1
    assert present(store, [page("a", tenant="one"), page("a", tenant="two")]) == [True, False]


def test_a_page_without_its_parent_is_refused(store: PrefixStore) -> None:
    """A run with a gap is refused whole; in order, in one call or two, it is taken."""
    first, second, third = chain("a", 3)
    with pytest.raises(PreconditionFailed):
        store.put([first, third])
    with pytest.raises(PreconditionFailed):
        store.put([second, first])
    assert not any(present(store, [first, second, third]))
    store.put([first])
    store.put([second, third])
    assert all(present(store, [first, second, third]))


def test_a_parent_of_another_tenant_does_not_count(store: PrefixStore) -> None:
    """Runs are contiguous within a tenant."""
    store.put([page("a", tenant="one")])
    with pytest.raises(PreconditionFailed):
        store.put([page("b", "a", tenant="two")])


def test_objects_that_are_there_are_skipped(store: PrefixStore) -> None:
    """A second put of a name changes nothing, within one call or later, and writes nothing."""
    item = page("a")
    store.put([item, item])
    written = store.usage().bytes_written
    store.put([replace(item, payload=bytes(len(item.payload)))])
    assert read(store, item) == item.payload
    assert store.usage().objects == 1
    assert store.usage().bytes_written == written


def test_payloads_may_be_any_buffer(store: PrefixStore) -> None:
    """Bytes, and views into a larger buffer, of any length from nothing on."""
    slab = memoryview(bytearray(range(256)) * 64)
    items = [
        StoredObject(ObjectKey(ObjectKind.TAIL, "", digest(str(size))), None, slab[7 : 7 + size])
        for size in (0, 1, 4095, 4096, 4097)
    ]
    store.put(items)
    assert [read(store, item) for item in items] == [bytes(item.payload) for item in items]


def test_a_buffer_of_another_length_is_refused(store: PrefixStore) -> None:
    """A wrong length is a failed transfer, and the object stays."""
    item = page("a")
    store.put([item])
    for length in (len(item.payload) - 1, len(item.payload) + 1, 0):
        with pytest.raises(TransferFailed):
            store.get(item.key, memoryview(bytearray(length)))
    assert read(store, item) == item.payload


def test_delete_takes_what_hangs_on_it(store: PrefixStore) -> None:
    """Deleting a page ends the run there: what follows it cannot be reached any more."""
    items = chain("a", 4)
    branch = page("b", "a1")
    store.put([*items, branch, resume("a3"), tail("s", "a3")])
    assert store.delete([items[2].key, items[3].key, items[2].key, page("none").key]) == 2
    assert present(store, [*items, branch, resume("a3"), tail("s", "a3")]) == [
        *[True, True, False, False],
        *[True, False, False],
    ]
    store.put(items)
    assert all(present(store, items))


def test_delete_tenant_takes_that_tenant(store: PrefixStore) -> None:
    """A tenant's objects go, all kinds of them, and nobody else's."""
    mine = [*chain("a", 3, "me"), resume("a2", "me"), tail("s", tenant="me")]
    others = [*chain("a", 3, "you"), *chain("a", 3)]
    store.put(mine)
    store.put(others)
    assert store.delete_tenant("me") == len(mine)
    assert store.delete_tenant("me") == 0
    assert not any(present(store, mine))
    assert all(present(store, others))


def test_the_gauges_are_honest(store: PrefixStore) -> None:
    """Counts follow what happened; counters never go down."""
    items = chain("a", 3)
    store.put(items)
    read(store, items[0])
    usage = store.usage()
    assert (usage.up, usage.objects) == (True, 3)
    assert usage.bytes_read == len(items[0].payload)
    assert usage.bytes_written >= 3 * len(items[0].payload)
    store.delete([items[0].key])
    assert store.usage().objects == 0
    assert store.usage().bytes_written >= usage.bytes_written
    assert store.usage().bytes_used < usage.bytes_used


def test_a_closed_store_says_so(store: PrefixStore) -> None:
    """After close every call raises StoreUnavailable; closing again is harmless."""
    store.put([page("a")])
    store.close()
    store.close()
    calls: list[Callable[[], object]] = [
        lambda: present(store, [page("a")]),
        lambda: read(store, page("a")),
        lambda: store.put([page("b")]),
        lambda: store.delete([page("a").key]),
        lambda: store.delete_tenant(""),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable):
            call()
    assert not store.usage().up


@pytest.mark.parametrize(
    "kind", ["disk", "disk_without_holes", "redis", "tiered", "lmcache_first_wins"]
)
def test_many_threads_at_once(kind: str, tmp_path: Path) -> None:
    """Writers, readers and a deleter share a store: nothing is lost, nothing read is wrong."""
    store = OPENERS[kind](tmp_path / "store")
    runs = [chain(f"run{i}-", 12, "keep" if i % 2 else "drop") for i in range(6)]
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 a thread's failure is the test's
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def write(run: list[StoredObject]) -> None:
        for start in range(0, len(run), 3):
            try:
                store.put(run[start : start + 3])
            except PreconditionFailed:
                assert run[0].key.tenant == "drop"  # its parents were deleted meanwhile

    def look() -> None:
        for item in [item for run in runs for item in run] * 3:
            assert read(store, item) in (None, item.payload)

    threads = [guarded(lambda run=run: write(run)) for run in runs]
    threads += [guarded(look) for _ in range(3)]
    threads += [guarded(lambda: [store.delete_tenant("drop") for _ in range(10)] and None)]
    for thread in threads:
        thread.join()
    assert not failures, failures
    store.delete_tenant("drop")
    kept = [item for run in runs[1::2] for item in run]
    assert [read(store, item) for item in kept] == [item.payload for item in kept]
    assert store.usage().objects == len(kept)
    store.close()
