"""Redis goes away under a running engine: every request is answered, rightly and soon."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest

from dsv4_tierd.engine import messages as m
from dsv4_tierd.tiering.coordinator import StoreLimits
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind
from dsv4_tierd.tiering.store.redis import RedisStore
from dsv4_tierd.tiering.store.redis_rows import PUBLISH
from proxy import Fault, Proxy
from redis_cases import eventually, open_hasty, open_redis
from redis_servers import Server
from small_models import Model, text
from store_cases import IDENTITY
from truth import assert_true, assert_usage_adds_up, at_rest
from world import World, ids_bytes

WORDS = text(17, 1100)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


def engine(model: Model, store: RedisStore) -> World:
    world = model.world(store=store, identity=IDENTITY.digest)
    # Longer than the store's own, so that it is the store that ends a wait.
    world.tiers.coordinator._limits = StoreLimits(
        deadline_s=2 * store.config.deadline_s, retry_after_s=0.2
    )
    return world


def fill(model: Model, server: Server) -> None:
    """Another daemon has computed WORDS and is gone."""
    world = engine(model, open_redis(server.url))
    world.generate(world.open(), WORDS, 1)
    world.settle()
    world.tiers.coordinator.close()


def kill(server: Server, proxy: Proxy) -> None:
    server.kill()
    proxy.cut_all()


FAULTS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "hung": (lambda server, proxy: server.pause(), lambda server, proxy: server.go_on()),
    "silent network": (lambda server, proxy: proxy.stop(), lambda server, proxy: proxy.go()),
    "killed": (kill, lambda server, proxy: server.start()),
    "connections cut": (lambda server, proxy: proxy.cut_all(), lambda server, proxy: None),
    "emptied": (lambda server, proxy: server.client.flushall(), lambda server, proxy: None),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("moment", ["before", "restoring"])
def test_requests_are_answered_and_it_comes_back(
    micro: Model, server: Server, fault: str, moment: str
) -> None:
    """Right tokens whatever happens, within seconds; afterwards the store is used again."""
    fill(micro, server)
    proxy = Proxy(server.port)
    store = open_hasty(proxy.url)
    world = engine(micro, store)
    begin, end = FAULTS[fault]
    if moment == "restoring":
        proxy.delay_s = 0.005
    session = world.open()
    if moment == "before":
        begin(server, proxy)
    request = world.submit(session, WORDS, 3)
    if moment == "restoring":
        world.run_until(lambda: world.tiers.coordinator.load_targets)
        begin(server, proxy)
    begun = time.monotonic()
    [answer] = world.run(request)
    assert time.monotonic() - begun < 20
    assert_true(micro, world, session, answer)
    assert_usage_adds_up(answer, len(WORDS))
    proxy.delay_s = 0.0
    end(server, proxy)
    eventually(lambda: store.usage().up)
    eventually(lambda: world.tiers.coordinator.up)
    world.settle()  # what could not be written is written now
    # And another daemon has all of it from there.
    other = engine(micro, open_redis(server.url))
    if fault not in ("killed", "emptied"):
        fresh = other.open()
        again = other.generate(fresh, WORDS, 3)
        assert again.usage.store_tokens == 1024
        assert_true(micro, other, fresh, again)
    other.settle()
    for each in (world, other):
        each.tiers.coordinator.close()
    proxy.close()


def test_the_gauge_says_so_before_anybody_asks(micro: Model, server: Server) -> None:
    """An idle engine's ``store_up`` is 0 while its server is away, and 1 again after."""
    world = engine(micro, open_redis(server.url))

    def up() -> float:
        stats = world.op(m.AskStats).stats
        assert stats is not None
        return stats.gauges["store_up"]

    eventually(lambda: up() == 1)
    server.kill()
    eventually(lambda: up() == 0)
    server.start()
    eventually(lambda: up() == 1)
    world.tiers.coordinator.close()


REQUEST_FAULTS = {
    Fault.CUT_BEFORE: 0,
    Fault.CUT_AFTER: 0,
    Fault.CUT_REPLY: 1,
    Fault.CORRUPT_REPLY: 300,
    Fault.STALL: 0,
}


@pytest.mark.parametrize("fault", REQUEST_FAULTS)
def test_a_fault_at_every_command_of_a_request(micro: Model, server: Server, fault: Fault) -> None:
    """Between any two commands of restoring and of writing through: right, soon, and back.

    What the request computed is in the store in the end, without a restart. A wrong bit of a
    page is counted once, and nothing of that page is served.
    """
    fill(micro, server)
    witness = open_redis(server.url)
    verbs = set()
    for n in itertools.count(1):
        proxy = Proxy(server.port)
        store = open_hasty(proxy.url)
        world = engine(micro, store)
        words = WORDS + text(100 + n, 300)  # one block more, which nobody has
        proxy.arm(fault, n, REQUEST_FAULTS[fault])
        session = world.open()
        begun = time.monotonic()
        answer = world.generate(session, words, 3)
        assert time.monotonic() - begun < 20
        assert_true(micro, world, session, answer)
        assert_usage_adds_up(answer, len(words))
        proxy.release()
        settled(world, store)
        reached = len(proxy.commands) >= n
        if reached:
            verbs.add(proxy.commands[n - 1])
        spoilt = reached and fault is Fault.CORRUPT_REPLY and proxy.commands[n - 1] == b"GETRANGE"
        assert store.usage().checksum_failures == spoilt
        hashes = world.engine.sessions[session].transcript.hashes
        assert len(hashes) == 5
        keys = [ObjectKey(ObjectKind.PAGE, "", name) for name in hashes]
        eventually(lambda keys=keys: all(witness.has(keys)))
        assert witness.verify().bad == ()
        world.tiers.coordinator.close()
        proxy.close()
        if not reached:
            break
    assert {b"GETRANGE", b"SET", b"EVAL"} <= verbs, "some kind of command was not reached"
    witness.close()


@pytest.mark.parametrize(
    ("words", "byte"),
    [(PUBLISH, 3), (PUBLISH, 30), ("XREAD", 1), ("\r\nSET\r\n", 1), ("EXISTS", 1)],
    ids=["publish-3", "publish-30", "xread-1", "set-1", "exists-1"],
)
def test_a_wrong_bit_in_what_the_server_says(
    micro: Model, server: Server, words: str, byte: int
) -> None:
    """In a reply that holds no page either: the engine goes on, and all is written in the end."""
    fill(micro, server)
    proxy = Proxy(server.port)
    store = open_hasty(proxy.url)
    world = engine(micro, store)
    proxy.arm(Fault.CORRUPT_REPLY, 1, byte, words=words.encode())
    session = world.open()
    answer = world.generate(session, WORDS + text(5, 300), 3)
    assert_true(micro, world, session, answer)
    settled(world, store)
    assert not proxy.armed
    hashes = world.engine.sessions[session].transcript.hashes
    assert all(store.has([ObjectKey(ObjectKind.PAGE, "", name) for name in hashes]))
    world.tiers.coordinator.close()
    proxy.close()


def settled(world: World, store: RedisStore) -> None:
    """The store is back, and all that could not be written is."""
    coordinator = world.tiers.coordinator
    end = time.monotonic() + 40
    while not (store.usage().up and coordinator.up and not coordinator.dirty_count):
        assert time.monotonic() < end, "it does not come back"
        world.step()
        time.sleep(0.002)
    world.settle()


def test_out_of_memory_stops_no_request(micro: Model) -> None:
    """Writes fail, which the gauge says; answers are right, and room again, all is written."""
    with Server(maxmemory_policy="noeviction") as server:
        fill(micro, server)
        store = open_redis(server.url, bytes_max=0)
        world = engine(micro, store)
        with server.client as client:
            client.config_set("maxmemory", "1mb")
        words = WORDS + text(5, 600)
        session = world.open()
        answer = world.generate(session, words, 3)
        assert answer.usage.store_tokens == 1024, "what is there can be read"
        assert_true(micro, world, session, answer)
        world.run_until(lambda: not store.usage().up)
        assert not store.link.trips, "it answers"
        with server.client as client:
            client.config_set("maxmemory", "64mb")
        settled(world, store)
        hashes = world.engine.sessions[session].transcript.hashes
        assert all(store.has([ObjectKey(ObjectKind.PAGE, "", name) for name in hashes]))
        world.tiers.coordinator.close()


def test_ten_thousand_lookups_ask_the_server_nothing(micro: Model, server: Server) -> None:
    """They are answered from memory, hold nothing anywhere, and everything can be evicted."""
    fill(micro, server)
    proxy = Proxy(server.port)
    store = open_hasty(proxy.url)
    world = engine(micro, store)
    world.audit = False
    known = ids_bytes(WORDS)
    proxy.arm()
    for number in range(10_000):
        world.verbs.handle(m.LookupPrefix(op_id=10_000 + number, token_ids=known))
    matched = world.acks[19_999].matched
    assert matched is not None and matched.matched_tokens == 1024
    assert proxy.commands == []
    assert at_rest(world)
    world.settle()
    stored = store.usage().objects
    assert len(store._mirror.give_up(1 << 40, frozenset(), None)) == stored > 4
    world.tiers.coordinator.close()
    proxy.close()


def test_suspended_here_resumed_there(micro: Model, server: Server) -> None:
    """A session suspended on one daemon: another, after the first is gone, has its pages."""
    first = engine(micro, open_redis(server.url))
    session = first.open()
    first.generate(session, WORDS, 3)
    assert first.op(m.SuspendSession, session_id=session).code is None
    words = first.tokens(session)
    first.settle()
    first.tiers.coordinator.close()
    second = engine(micro, open_redis(server.url))
    resumed = second.open(words)
    answer = second.generate(resumed, text(18, 40), 3)
    assert answer.usage.store_tokens == 1024
    assert_true(micro, second, resumed, answer)
    second.settle()
    second.tiers.coordinator.close()
