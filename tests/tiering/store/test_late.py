"""A store that cannot be opened yet is away, and then there."""

from __future__ import annotations

import threading

import pytest

from dsv4_tierd.tiering.errors import StoreUnavailable
from dsv4_tierd.tiering.store.late import LateStore
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, StoredObject
from naive_store import NaiveStore

IDENTITY = bytes(range(32))
KEY = ObjectKey(ObjectKind.PAGE, "", bytes(32))


class Door:
    """Opens the store at the third try."""

    def __init__(self) -> None:
        self.store = NaiveStore(IDENTITY)
        self.tries = 0
        self.opened = threading.Event()

    def __call__(self) -> NaiveStore:
        self.tries += 1
        if self.tries < 3:
            raise StoreUnavailable("locked") if self.tries == 1 else ValueError("unforeseen")
        self.opened.set()
        return self.store


def test_it_is_away_until_it_opens_and_then_itself() -> None:
    """Calls raise StoreUnavailable at once, and later reach the store; usage never raises."""
    door = Door()
    store = LateStore(door, IDENTITY, 1 << 20, retry_s=0.05)
    with pytest.raises(StoreUnavailable):
        store.has([KEY])
    assert not store.usage().up
    assert store.usage().bytes_max == 1 << 20
    assert store.identity == IDENTITY
    assert door.opened.wait(10)
    store._thread.join(10)
    store.put([StoredObject(KEY, None, b"words")])
    into = bytearray(5)
    assert store.get(KEY, memoryview(into))
    assert (bytes(into), store.has([KEY]), store.usage().objects) == (b"words", [True], 1)
    store.close()
    with pytest.raises(StoreUnavailable):
        store.has([KEY])
    with pytest.raises(StoreUnavailable):
        door.store.has([KEY])


def test_it_closes_before_it_ever_opened() -> None:
    """Nothing is waited for, and nothing is opened afterwards."""
    door = Door()
    store = LateStore(door, IDENTITY, 1 << 20, retry_s=60.0)
    store.close()
    assert not store._thread.is_alive()
    assert door.tries == 0
    with pytest.raises(StoreUnavailable):
        store.delete([KEY])
