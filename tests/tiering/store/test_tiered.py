"""A local tier in front of a remote one: the remote helps when it can, and never hurts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4_tierd.tiering.errors import StoreUnavailable, TransferFailed
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, StoredObject, WritePolicy
from dsv4_tierd.tiering.store.tiered import TieredStore
from hostile_store import HostileStore
from store_cases import chain, digest, open_disk, page, present, read, resume, tail
from tiered_cases import DEADLINE_S, RETRY_S, hostile, open_tiered

SLACK_S = 2.0  # for a machine whose cores others use too


@pytest.fixture
def remote() -> Iterator[HostileStore]:
    """A remote that is well."""
    store = hostile()
    yield store
    store.gate.set()


@pytest.fixture
def store(remote: HostileStore, tmp_path: Path) -> Iterator[TieredStore]:
    """A folder in front of it, written through."""
    store = open_tiered(tmp_path / "local", remote)
    yield store
    store.close()


def far(remote: HostileStore, items: list[StoredObject]) -> list[bool]:
    """What the remote has, asked behind the store's back."""
    return remote.naive.has([item.key for item in items])


def seconds(call: object) -> float:
    """How long a call takes."""
    begun = time.monotonic()
    call()  # type: ignore[operator]
    return time.monotonic() - begun


def test_both_tiers_get_what_is_written_through(store: TieredStore, remote: HostileStore) -> None:
    """Pages, points and tails reach the remote in the background, byte for byte."""
    items = [*chain("a", 30), resume("a29"), tail("s", "a29")]
    store.put(items)
    assert store.flush(30.0)
    assert [read(remote.naive, item) for item in items] == [item.payload for item in items]


def test_another_machine_reads_what_one_wrote(remote: HostileStore, tmp_path: Path) -> None:
    """A second folder in front of the same remote sees all, reads it, and keeps copies."""
    items = [*chain("a", 12), resume("a11")]
    one = open_tiered(tmp_path / "one", remote)
    one.put(items)
    one.close()
    two = open_tiered(tmp_path / "two", remote)
    assert all(present(two, items))
    assert [two.find(item.key).parent for item in items] == [item.parent for item in items]
    assert [read(two, item) for item in reversed(items)] == [i.payload for i in reversed(items)]
    assert two.flush(30.0)
    two.close()
    local = open_disk(tmp_path / "two")
    assert [read(local, item) for item in items] == [item.payload for item in items]
    local.close()


def test_what_follows_a_remote_prefix_brings_it_in(remote: HostileStore, tmp_path: Path) -> None:
    """A page on pages that only the remote has is stored, with all of those before it."""
    items = chain("a", 9)
    remote.put(items[:8])
    store = open_tiered(tmp_path / "local", remote, WritePolicy.NEVER)
    store.put(items[8:])
    store.close()
    local = open_disk(tmp_path / "local")
    assert all(present(local, items))
    local.close()


def test_a_dead_remote_costs_nothing(store: TieredStore, remote: HostileStore) -> None:
    """With the remote away everything local goes on; what it missed is sent when it is back."""
    before, after = chain("a", 5), chain("b", 5)
    store.put(before)
    assert store.flush(30.0)
    remote.down = True
    assert seconds(lambda: store.put(after)) < SLACK_S
    assert all(present(store, [*before, *after]))
    assert present(store, [page("none")]) == [False]
    assert [read(store, item) for item in after] == [item.payload for item in after]
    assert read(store, page("none")) is None
    assert store.usage().up
    assert not store.flush(0.1)
    assert not any(far(remote, after))
    remote.down = False
    assert store.flush(30.0)
    assert all(far(remote, after))


def test_a_remote_that_hangs_costs_one_deadline(remote: HostileStore, tmp_path: Path) -> None:
    """Reads of twenty pages that hang take one deadline, not twenty, and are misses."""
    items = chain("a", 20)
    remote.put(items)
    store = open_tiered(tmp_path / "local", remote)
    remote.gate.clear()
    mine = chain("mine", 2)
    begun = time.monotonic()
    assert [read(store, item) for item in items] == [None] * 20
    assert time.monotonic() - begun < 2 * DEADLINE_S + SLACK_S
    assert present(store, items) == [False] * 20, "it is not offered while it is left alone"
    assert seconds(lambda: store.put(mine)) < SLACK_S
    assert read(store, mine[0]) == mine[0].payload
    remote.gate.set()
    time.sleep(RETRY_S)
    assert [read(store, item) for item in items] == [item.payload for item in items]
    store.close()


def test_a_late_read_does_not_touch_the_buffer(remote: HostileStore, tmp_path: Path) -> None:
    """When a read that was given up comes in after all, the caller's memory is another's."""
    item = page("a")
    remote.put([item])
    store = open_tiered(tmp_path / "local", remote)
    remote.gate.clear()
    buffer = bytearray(len(item.payload))
    assert not store.get(item.key, memoryview(buffer))
    buffer[:] = b"x" * len(buffer)
    remote.gate.set()
    time.sleep(0.1)
    assert buffer == b"x" * len(buffer)
    store.close()


def test_wrong_bytes_of_the_remote_are_not_served(remote: HostileStore, tmp_path: Path) -> None:
    """A remote object that fails its check raises, and the next ask misses; locals stay."""
    items = chain("a", 2)
    remote.put(items)
    store = open_tiered(tmp_path / "local", remote)
    remote.broken = 1
    with pytest.raises(TransferFailed):
        read(store, items[0])
    assert read(store, items[0]) is None
    assert read(store, items[1]) == items[1].payload
    store.close()


def test_the_remote_stands_in_for_wrong_local_bytes(
    store: TieredStore, remote: HostileStore, tmp_path: Path
) -> None:
    """A local object that fails its check is read from the remote, and whole again after."""
    item = page("a")
    store.put([item])
    assert store.flush(30.0)
    [segment] = (tmp_path / "local" / "segments").iterdir()
    data = bytearray(segment.read_bytes())
    at = data.index(item.payload[:64])
    data[at] ^= 1
    segment.write_bytes(data)
    assert read(store, item) == item.payload
    assert store.flush(30.0)
    remote.down = True
    assert read(store, item) == item.payload


def test_the_remote_stands_in_for_a_full_folder(remote: HostileStore, tmp_path: Path) -> None:
    """What the local tier cannot take at all is written through, and read back."""
    store = TieredStore(open_disk(tmp_path / "local", bytes_max=1 << 20), remote)
    item = page("large", size=2 << 20)
    store.put([item])
    assert far(remote, [item]) == [True]
    assert read(store, item) == item.payload
    store.close()


def test_deletes_reach_both(store: TieredStore, remote: HostileStore) -> None:
    """Nothing deleted is left in either tier, nor comes back from the queue between them."""
    items = chain("a", 6)
    store.put(items)
    assert store.delete([items[2].key, page("none").key]) == 1
    assert store.flush(30.0)
    assert far(remote, items) == [True, True, False, False, False, False]
    assert present(store, items) == far(remote, items)
    store.put([page("t", tenant="me")])
    assert store.delete_tenant("me") == 1
    assert store.flush(30.0)
    assert far(remote, [page("t", tenant="me")]) == [False]


def test_a_delete_that_the_remote_misses_is_made_up_for(
    store: TieredStore, remote: HostileStore
) -> None:
    """It says that it is not done, serves nothing of it, and does it when the remote is back."""
    items, other = chain("a", 2), page("t", tenant="me")
    store.put([*items, other])
    assert store.flush(30.0)
    remote.down = True
    with pytest.raises(StoreUnavailable):
        store.delete([items[0].key])
    with pytest.raises(StoreUnavailable):
        store.delete_tenant("me")
    assert present(store, [items[0], other]) == [False, False]
    remote.down = False
    time.sleep(RETRY_S)
    assert present(store, [items[0], other]) == [False, False]
    assert read(store, items[0]) is None
    store.put([items[0]])  # written anew after the delete: it stays
    assert store.flush(30.0)
    assert far(remote, [*items, other]) == [True, False, False]


def test_a_policy_of_never_sends_nothing(remote: HostileStore, tmp_path: Path) -> None:
    """The remote is read, not written."""
    remote.put([page("theirs")])
    store = open_tiered(tmp_path / "local", remote, WritePolicy.NEVER)
    items = [*chain("a", 3), tail("s", "a2")]
    store.put(items)
    assert store.flush(1.0)
    assert not any(far(remote, items))
    assert read(store, page("theirs")) == page("theirs").payload
    store.close()


def test_a_policy_of_on_suspend_sends_what_the_tail_hangs_on(
    remote: HostileStore, tmp_path: Path
) -> None:
    """A suspended session's pages, points and tail go; another session's stay."""
    store = open_tiered(tmp_path / "local", remote, WritePolicy.ON_SUSPEND)
    mine, other = [*chain("a", 4), resume("a3")], chain("b", 3)
    store.put([*mine, *other])
    assert store.flush(1.0)
    assert not any(far(remote, [*mine, *other]))
    store.put([tail("s", "a3")])
    assert store.flush(30.0)
    assert all(far(remote, [*mine, tail("s", "a3")]))
    assert not any(far(remote, other))
    store.put([tail("unplaced")])
    assert store.flush(30.0)
    assert all(far(remote, [tail("unplaced")]))
    assert not any(far(remote, other)), "a tail that names no page brings itself alone"
    store.close()


def test_objects_may_have_a_policy_of_their_own(store: TieredStore, remote: HostileStore) -> None:
    """Through, on suspend and never side by side; a tail brings its chain, whoever made it."""
    never, later = chain("n", 3), chain("l", 3)
    store.put([replace(item, policy=WritePolicy.NEVER) for item in never])
    store.put([replace(item, policy=WritePolicy.ON_SUSPEND) for item in later])
    store.put(chain("t", 3))
    store.put([replace(tail("s", "n2"), policy=WritePolicy.NEVER)])
    assert store.flush(30.0)
    assert far(remote, chain("t", 3)) == [True] * 3
    assert not any(far(remote, [*never, *later, tail("s", "n2")]))
    store.put([replace(tail("s", "l2"), policy=WritePolicy.ON_SUSPEND)])
    assert store.flush(30.0)
    assert all(far(remote, [*later, tail("s", "l2")]))
    assert not any(far(remote, never))
    store.put([tail("other", "n1")])
    assert store.flush(30.0)
    assert far(remote, never) == [True, True, False]
    store.send_chain(never[2].key)
    assert store.flush(30.0)
    assert all(far(remote, never))


def test_what_the_remote_gave_up_is_sent_again(store: TieredStore, remote: HostileStore) -> None:
    """Pages that the remote evicted behind our back go before the ones that follow them."""
    items = chain("a", 6)
    store.put(items[:4])
    assert store.flush(30.0)
    remote.naive.delete([items[1].key])
    store.put(items[4:])
    assert store.flush(30.0)
    assert all(far(remote, items))


def test_deletes_race_with_the_way_out(remote: HostileStore, tmp_path: Path) -> None:
    """However a delete meets a write on its way to the remote, the object is gone in the end."""
    store = open_tiered(tmp_path / "local", remote)
    for turn in range(40):
        run = chain(f"r{turn}-", 4)
        store.put(run)
        time.sleep(turn % 4 * 0.001)
        store.delete([run[0].key])
        assert store.flush(30.0)
        assert not any(far(remote, run)), turn
        assert not any(present(store, run)), turn
    store.close()


def test_readers_and_deletes_leave_no_copy(remote: HostileStore, tmp_path: Path) -> None:
    """A copy on its way up does not bring a deleted object back."""
    store = open_tiered(tmp_path / "local", remote)
    for turn in range(40):
        item = page(f"r{turn}")
        remote.put([item])
        reader = threading.Thread(target=read, args=(store, item))
        reader.start()
        time.sleep(turn % 3 * 0.0005)
        store.delete([item.key])
        reader.join()
        assert store.flush(30.0)
        assert present(store, [item]) == [False], turn
    store.close()


def test_tiers_of_two_identities_are_refused(tmp_path: Path) -> None:
    """A mistake in wiring shows at once."""
    local = open_disk(tmp_path)
    with pytest.raises(ValueError, match="one identity"):
        TieredStore(local, HostileStore(bytes(32)))
    local.close()


def test_gauges_are_told_by_tier(store: TieredStore, remote: HostileStore) -> None:
    """Each tier's own numbers, and whether it is asked."""
    store.put(chain("a", 3))
    assert store.flush(30.0)
    both = store.tier_usage()
    assert (both["local"].objects, both["remote"].objects) == (3, 3)
    assert both["remote"].up
    remote.down = True
    key = ObjectKey(ObjectKind.PAGE, "", digest("none"))
    assert store.has([key]) == [False]
    assert not store.tier_usage()["remote"].up
    assert store.usage().up


def test_closing_with_a_hanging_remote_ends(remote: HostileStore, tmp_path: Path) -> None:
    """A remote that says nothing keeps nobody from leaving."""
    store = open_tiered(tmp_path / "local", remote)
    remote.put([page("a")])
    remote.gate.clear()
    assert read(store, page("a")) is None
    assert seconds(store.close) < 3.0
