"""A prefix pinned in a shared Redis stays there, whatever else is written and however long."""

from __future__ import annotations

from pathlib import Path

import pytest

import redis_servers
from dsv4_tierd.engine import messages as m
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, PrefixStore
from dsv4_tierd.tiering.store.tiered import TieredStore
from redis_cases import eventually, open_redis
from small_models import Model, text
from store_cases import open_disk
from tiered_cases import tiered_config
from truth import make_world
from world import World, ids_bytes

WORDS = text(7, 4 * 256 + 40)
BUDGET = 1_200_000  # some twenty pages


def pin(world: World, words: list[int], pinned: bool = True) -> m.Ack:
    return world.op(m.PinPrefix, token_ids=ids_bytes(words), pinned=pinned)


def stored(store: PrefixStore, world: World, session: str) -> list[bool]:
    hashes = world.engine.sessions[session].transcript.hashes
    return store.has([ObjectKey(ObjectKind.PAGE, "", key) for key in hashes])


@pytest.mark.parametrize("near", [False, True])
def test_pinned_words_stay_and_unpinned_go(micro: Model, tmp_path: Path, near: bool) -> None:
    """Alone or behind a folder; a part of a block is not counted; forty other pages come by."""
    url = redis_servers.emptied().url
    far = open_redis(url, bytes_max=BUDGET)
    store = TieredStore(open_disk(tmp_path), far, tiered_config()) if near else far
    world = make_world(micro, store)
    session = world.open()
    world.generate(session, WORDS, 1)
    world.settle()
    eventually(lambda: all(stored(far, world, session)))
    assert pin(world, WORDS).stored_tokens == 1024
    assert pin(world, WORDS).stored_tokens == 1024, "again is as well"
    press(world, far, 0)
    assert all(stored(far, world, session))
    assert pin(world, WORDS, pinned=False).stored_tokens == 1024
    assert pin(world, WORDS, pinned=False).code == "not_pinned"
    press(world, far, 8)
    assert not all(stored(far, world, session))
    world.tiers.coordinator.close()


def press(world: World, far: PrefixStore, seed: int) -> None:
    """Twice the store's budget of other sessions."""
    before = far.usage().evicted_objects
    for number in range(8):
        world.generate(world.open(), text(100 + seed + number, 5 * 256 + 9), 1)
        world.settle()
    eventually(lambda: far.usage().evicted_objects > before)


def test_what_cannot_be_pinned_says_why(micro: Model, tmp_path: Path) -> None:
    """Less than a block, words that are not stored, more than the budget, a store without pins."""
    far = open_redis(redis_servers.emptied().url, bytes_max=BUDGET)
    world = make_world(micro, far)
    assert pin(world, WORDS[:255]).code == "invalid_request"
    world.generate(world.open(), WORDS[:600], 1)
    world.settle()
    eventually(lambda: far.usage().objects > 1)
    failed = pin(world, WORDS)
    assert failed.code == "precondition_failed"
    assert failed.message == "512 of 1,024 tokens are stored; a pin needs them all"
    assert pin(world, WORDS, False).message == "these words are not pinned"
    many = text(9, 14 * 256 + 1)
    world.generate(world.open(), many, 1)
    world.settle()
    assert pin(world, many).code == "pin_budget_exhausted"
    assert pin(world, [-1] * 300).code == "invalid_token_ids"
    world.tiers.coordinator.close()
    for store in (None, open_disk(tmp_path)):
        world = make_world(micro, store)
        assert pin(world, WORDS).code == "unsupported_combination"
        world.tiers.coordinator.close()
