"""A Redis whose replies come wrong: no wrong bytes, errors of ours only, and back by itself."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import pytest

import redis_servers
from dsv4_tierd.tiering.errors import PreconditionFailed, StoreUnavailable, TransferFailed
from dsv4_tierd.tiering.store.protocol import StoredObject
from dsv4_tierd.tiering.store.redis import RedisStore
from proxy import QUIET, Fault, Proxy
from redis_cases import eventually, open_hasty, open_redis
from store_cases import chain, page, present, read, resume

BRISK_S = 0.3  # a reply that is one byte too long is waited for

pytestmark = pytest.mark.usefixtures("quick_keeper")


@pytest.mark.parametrize("byte", [0, 1, 3, 8, 100, 230, 300, 5000, 10_199])
def test_a_wrong_bit_is_never_served(proxy: Proxy, byte: int) -> None:
    """In the frame of the reply, the record's header or its payload: an error, counted once."""
    store = open_hasty(proxy.url)
    item = page("a")
    store.put([item])
    proxy.arm(Fault.CORRUPT_REPLY, 1, byte)
    with pytest.raises((TransferFailed, StoreUnavailable)) as caught:
        read(store, item)
    wrong = caught.type is TransferFailed
    assert wrong == (byte >= 8)
    eventually(lambda: store.link.up)
    assert store.usage().checksum_failures == wrong
    assert present(store, [item]) == [not wrong]
    store.put([item])
    assert read(store, item) == item.payload
    store.close()


@pytest.mark.parametrize("byte", [0, 3, 10, 30, 100])
@pytest.mark.parametrize("phase", ["open", "put", "delete"])
def test_a_wrong_bit_at_every_command(proxy: Proxy, phase: str, byte: int) -> None:
    """Of opening, writing and deleting: an error of ours or nothing, right bytes, and back."""
    url = f"redis://127.0.0.1:{proxy.target}"
    witness = open_redis(url)
    witness.put(chain("there", 2))
    for n in count(1):
        items = [*chain(f"{n}-", 2), resume(f"{n}-1")]
        proxy.quiet = frozenset() if phase == "open" else QUIET
        if phase == "open":
            proxy.arm(Fault.CORRUPT_REPLY, n, byte)
        store = open_redis(proxy.url, deadline_s=BRISK_S, connect_timeout_s=BRISK_S)
        if phase == "put":
            proxy.arm(Fault.CORRUPT_REPLY, n, byte)
        _try(lambda store=store, items=items: store.put(items))
        _all_healed(store, witness, items)
        if phase == "delete":
            proxy.arm(Fault.CORRUPT_REPLY, n, byte)
            _try(lambda store=store, items=items: store.delete([items[1].key]))
        reached = len(proxy.commands) >= n
        proxy.arm()
        eventually(lambda store=store: store.usage().up)
        eventually(lambda store=store, items=items: _deleted(store, witness, items))
        store.close()
        if not reached:
            break
    assert n > 4
    assert witness.verify().bad == ()
    witness.close()


def _try(call: Callable[[], object]) -> None:
    """What a caller expects of a store whose server lies: these errors, and no other."""
    with contextlib.suppress(StoreUnavailable, PreconditionFailed):
        call()


def _right(store: RedisStore, items: Sequence[StoredObject]) -> bool:
    """Whether all is there; what is read is right in any case."""
    found = []
    for item in items:
        try:
            found.append(read(store, item))
        except (StoreUnavailable, TransferFailed):
            found.append(None)
        assert found[-1] in (None, item.payload)
    return None not in found


def _all_healed(store: RedisStore, witness: RedisStore, items: Sequence[StoredObject]) -> None:
    """Before long everything can be put, and read here and elsewhere."""

    def healed() -> bool:
        _try(lambda: store.put(items))
        return _right(store, items) and _right(witness, items)

    eventually(healed)


def _deleted(store: RedisStore, witness: RedisStore, items: Sequence[StoredObject]) -> bool:
    _try(lambda: store.delete([item.key for item in items]))
    return not any(present(witness, items))


@pytest.mark.parametrize("seed", [1, 2])
def test_wrong_bits_anywhere(seed: int) -> None:
    """Any bit of any reply, while opening, writing, reading or deleting: as above."""
    chance = random.Random(seed)
    server = redis_servers.emptied()
    witness = open_redis(server.url)
    for n in range(20):
        proxy = Proxy(server.port, quiet=frozenset())
        items = [*chain(f"{seed}-{n}-", 6), resume(f"{seed}-{n}-5")]
        phase = chance.choice(["open", "put", "get", "delete"])
        reach = {"get": 12_000, "open": 500}.get(phase, 200)
        fault = chance.randrange(1, 14), chance.randrange(reach), chance.randrange(8)
        if phase == "open":
            witness.put(items)
            proxy.arm(Fault.CORRUPT_REPLY, *fault)
        store = open_redis(proxy.url, deadline_s=BRISK_S, connect_timeout_s=BRISK_S)
        if phase == "put":
            proxy.arm(Fault.CORRUPT_REPLY, *fault)
        _try(lambda store=store, items=items: store.put(items))
        if phase == "get":
            proxy.arm(Fault.CORRUPT_REPLY, *fault)
        _right(store, items)
        if phase == "delete":
            proxy.arm(Fault.CORRUPT_REPLY, *fault)
            _try(lambda store=store, items=items: store.delete([items[4].key]))
        proxy.arm()
        eventually(lambda store=store: store.usage().up)
        _all_healed(store, witness, items)
        store.close()
        proxy.close()
    assert witness.verify().bad == ()
    witness.close()


def test_a_log_that_is_not_so_far(proxy: Proxy) -> None:
    """A wrong id made the mirror wait for entries of a far future: it is read anew."""
    witness = open_redis(f"redis://127.0.0.1:{proxy.target}")
    store = open_hasty(proxy.url)
    store.put(chain("a", 2))
    store.shelf.mirror.last_id = (1 << 50, 0)
    witness.put([page("b")])
    eventually(lambda: present(store, [page("b")]) == [True])
    store.close()
    witness.close()


def test_a_wrong_reply_has_the_mirror_read_anew(proxy: Proxy) -> None:
    """What it holds by then may have come wrong as well, and by counting alone it does not show."""
    store = open_hasty(proxy.url)
    item = page("a")
    store.put([item])
    row = store.shelf.mirror.find(item.key)
    assert row is not None
    row.place = replace(row.place, offset=row.place.offset + 1)
    proxy.arm(Fault.CORRUPT_REPLY, 1, 0)
    with pytest.raises(StoreUnavailable, match="wrong reply to XREAD"):
        store.put([page("b")])
    assert not store.link.up
    eventually(lambda: store.usage().up)
    assert read(store, item) == item.payload
    assert store.usage().checksum_failures == 0
    store.close()
