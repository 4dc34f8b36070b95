"""A store is checked and tidied under a running engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_tierd.engine import messages as m
from dsv4_tierd.tiering.errors import StoreUnavailable
from dsv4_tierd.tiering.store.protocol import PrefixStore
from hostile_store import HostileStore
from small_models import Model, text
from store_cases import chain, open_disk
from tiered_cases import open_settled
from truth import assert_true, make_world
from world import World, ids_bytes

WORDS = text(7, 1100)
OPENERS = {"disk": open_disk, "tiered": open_settled}


def tended(world: World, verb: str) -> dict[str, object]:
    ack = world.op(m.TendStore, verb=verb)
    assert ack.code is None, ack
    assert ack.tended is not None
    return ack.tended


@pytest.mark.parametrize("kind", OPENERS)
def test_every_object_of_every_tier_is_read(micro: Model, tmp_path: Path, kind: str) -> None:
    """Four pages and their resume point, a tier; tidying loses none, and the second has no work."""
    world = make_world(micro, OPENERS[kind](tmp_path))
    session = world.open()
    world.generate(session, WORDS, 1)
    world.settle()
    usage = world.tiers.coordinator.store_usage()
    assert usage is not None
    found = tended(world, "verify")
    copies = 2 if kind == "tiered" else 1
    assert found["objects"] == copies * usage.objects >= 4
    assert found["bad"] == []
    first, second = tended(world, "gc"), tended(world, "gc")
    assert first["bytes_after"] == second["bytes_before"] == second["bytes_after"]
    assert tended(world, "verify") == found
    world.tiers.coordinator.close()


@pytest.mark.parametrize("kind", OPENERS)
def test_a_purged_tenant_has_nothing_anywhere(micro: Model, tmp_path: Path, kind: str) -> None:
    """Its blocks are in no tier and in no file; those of others stay, and it may begin anew."""
    world = make_world(micro, OPENERS[kind](tmp_path))
    for salt in ("a", "b"):
        session = world.open(salt=salt)
        world.generate(session, WORDS, 1)
        world.settle()
        world.op(m.CloseSession, session_id=session)
    count = world.op(m.PurgeSalt, salt="a").removed
    assert count is not None
    assert count >= 4
    asked = {"token_ids": ids_bytes(WORDS)}
    matched = [world.op(m.LookupPrefix, salt=salt, **asked).matched for salt in ("a", "b")]
    assert [found and found.matched_tokens for found in matched] == [0, 1024]
    usage = world.tiers.coordinator.store_usage()
    assert usage is not None
    assert tended(world, "verify")["objects"] == (2 if kind == "tiered" else 1) * usage.objects
    assert world.op(m.PurgeSalt, salt="a").removed == 0
    assert world.generate(world.open(salt="a"), WORDS, 1).usage.computed_tokens == len(WORDS)
    world.settle()
    world.tiers.coordinator.close()


def test_what_it_finds_bad_is_computed_again(micro: Model, tmp_path: Path) -> None:
    """A wrong bit on the disk: verify names it and drops it, and a request has the right tokens."""
    first = make_world(micro, open_disk(tmp_path))
    first.generate(first.open(), WORDS, 1)
    first.settle()
    first.tiers.coordinator.close()
    segment = max(tmp_path.rglob("*.seg"), key=lambda path: path.stat().st_size)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    world = make_world(micro, open_disk(tmp_path))
    bad = tended(world, "verify")["bad"]
    assert isinstance(bad, list) and len(bad) == 1
    assert tended(world, "verify")["bad"] == []
    session = world.open()
    answer = world.generate(session, WORDS, 3)
    assert answer.usage.store_tokens < 1024
    assert_true(micro, world, session, answer)
    world.settle()
    world.tiers.coordinator.close()


def test_requests_go_on_while_it_is_checked(micro: Model, tmp_path: Path) -> None:
    """A check that takes for ever stops no request, and closing ends it."""
    store = SlowToCheck(tmp_path)
    world = make_world(micro, store.disk)
    world.verbs.handle(m.TendStore(op_id=900, verb="verify"))
    session = world.open()
    answer = world.generate(session, WORDS, 2)
    assert_true(micro, world, session, answer)
    world.settle()
    assert 900 not in world.acks
    assert store.objects_read
    world.tiers.coordinator.close()
    world.verbs.poll()
    assert world.acks[900].code == "store_unavailable"


class SlowToCheck:
    """A folder whose check, once it has begun, goes round until the store is closed."""

    def __init__(self, folder: Path) -> None:
        self.disk, self.objects_read = open_disk(folder), 0
        self.disk.put(chain("a", 3))
        plain = self.disk.verify

        def verify(advance=None):
            while True:
                self.objects_read += plain(advance).objects

        self.disk.verify = verify


@pytest.mark.parametrize(
    ("store", "code"),
    [(None, "unsupported_combination"), (HostileStore(bytes(32)), "unsupported_combination")],
)
def test_without_one_that_can_be_checked_it_is_refused(
    micro: Model, store: PrefixStore | None, code: str
) -> None:
    """No store, or one of a kind that has no such care: the reason is said."""
    world = make_world(micro, store)
    assert world.op(m.TendStore, verb="verify").code == code
    world.tiers.coordinator.close()


def test_a_store_that_fails_meanwhile_says_so(micro: Model, tmp_path: Path) -> None:
    """Whatever goes wrong on that thread is an answer, and the engine goes on."""
    disk = open_disk(tmp_path)
    world = make_world(micro, disk)
    for error in (StoreUnavailable("away"), OSError("no such device")):

        def gc(error=error):
            raise error

        disk.gc = gc
        assert world.op(m.TendStore, verb="gc").code == "store_unavailable"
    world.tiers.coordinator.close()
