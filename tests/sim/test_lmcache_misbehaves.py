"""An LMCache adapter goes bad under a running engine: requests are answered, rightly and soon."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from dsv4_tierd.tiering.coordinator import StoreLimits
from dsv4_tierd.tiering.store.lmcache import LMCacheStore
from dsv4_tierd.tiering.store.protocol import ObjectKind
from fake_l2 import Bucket, FakeKit, open_fake
from redis_cases import eventually
from small_models import Model, text
from store_cases import IDENTITY
from truth import assert_true, assert_usage_adds_up
from world import World

WORDS = text(17, 1100)


def engine(model: Model, store: LMCacheStore) -> World:
    world = model.world(store=store, identity=IDENTITY.digest)
    world.tiers.coordinator._limits = StoreLimits(deadline_s=3.0, retry_after_s=0.2)
    return world


def hang(kit: FakeKit) -> None:
    kit.hangs = True


def lose(kit: FakeKit) -> None:
    kit.adapters[-1].dead = True


def lose_a_worker(kit: FakeKit) -> None:
    kit.adapters[-1].dead_worker = True


def rot(kit: FakeKit) -> None:
    for name, data in kit.bucket.objects.items():
        if name.group == ObjectKind.PAGE:
            kit.bucket.objects[name] = data[:-1] + bytes([data[-1] ^ 1])


def empty(kit: FakeKit) -> None:
    kit.bucket.objects.clear()


FAULTS: dict[str, Callable[[FakeKit], None]] = {
    "tasks never end": hang,
    "client lost its server": lose,
    "a worker lost its server": lose_a_worker,
    "bytes went bad": rot,
    "emptied": empty,
}


@pytest.mark.parametrize("moment", ["before", "restoring"])
@pytest.mark.parametrize("fault", FAULTS)
def test_requests_are_answered_and_it_comes_back(micro: Model, fault: str, moment: str) -> None:
    """Right tokens whatever happens; the store is used again without a restart."""
    kit = FakeKit(Bucket(replaces=True))
    first = engine(micro, open_fake(kit))
    first.generate(first.open(), WORDS, 1)
    first.settle()
    first.tiers.coordinator.close()
    store = open_fake(kit)
    world = engine(micro, store)
    session = world.open()
    if moment == "before":
        FAULTS[fault](kit)
    request = world.submit(session, WORDS + text(5, 300), 3)
    if moment == "restoring":
        world.step()
        FAULTS[fault](kit)
    begun = time.monotonic()
    [answer] = world.run(request)
    assert time.monotonic() - begun < 15
    assert_true(micro, world, session, answer)
    assert_usage_adds_up(answer, 1400)
    kit.hangs = False
    eventually(lambda: store.usage().up, 10)
    eventually(lambda: world.tiers.coordinator.up, 10)
    world.settle()
    world.tiers.coordinator.close()
    later = engine(micro, open_fake(kit))
    fresh = later.open()
    again = later.generate(fresh, WORDS + text(5, 300), 3)
    assert_true(micro, later, fresh, again)
    # What was lost or went bad after it had been read is not known to be, and not written again.
    assert again.usage.store_tokens >= 1024 or fault in ("emptied", "bytes went bad")
    later.settle()
    later.tiers.coordinator.close()
