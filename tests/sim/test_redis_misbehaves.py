"""Redis goes away under a running engine: every request is answered, rightly and soon."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from dsv4_tierd.engine import messages as m
from dsv4_tierd.tiering.coordinator import StoreLimits
from dsv4_tierd.tiering.store.redis import RedisStore
from proxy import Proxy
from redis_cases import eventually, open_redis
from redis_servers import Server
from small_models import Model, text
from store_cases import IDENTITY
from truth import assert_true, assert_usage_adds_up
from world import World

WORDS = text(17, 1100)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


def engine(model: Model, store: RedisStore) -> World:
    world = model.world(store=store, identity=IDENTITY.digest)
    world.tiers.coordinator._limits = StoreLimits(deadline_s=1.0, retry_after_s=0.2)
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
    store = open_redis(proxy.url)
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
    assert time.monotonic() - begun < 10
    assert_true(micro, world, session, answer)
    assert_usage_adds_up(answer, len(WORDS))
    proxy.delay_s = 0.0
    end(server, proxy)
    eventually(lambda: store.usage().up, 10)
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
