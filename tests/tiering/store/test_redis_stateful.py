"""Any history of calls by two daemons on one Redis, and of its losses: as one dict would answer."""

from __future__ import annotations

from collections.abc import Callable

import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import redis_servers
from dsv4_tierd.tiering.errors import PreconditionFailed, TransferFailed
from dsv4_tierd.tiering.store import redis_keeper
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, PrefixStore, StoredObject
from naive_store import NaiveStore
from redis_cases import eventually, open_redis
from store_cases import IDENTITY, content, digest

NAMES = st.integers(0, 15)
TENANTS = st.sampled_from(["", "one"])
WHO = st.integers(0, 1)
KEYS = [
    ObjectKey(kind, tenant, digest(f"{name}"))
    for kind in ObjectKind
    for tenant in ("", "one")
    for name in range(16)
]


class Twins(RuleBasedStateMachine):
    """A tree of sixteen pages (page n hangs on page n // 2), their resume points, some tails."""

    @initialize()
    def begin(self) -> None:
        self.back_off, redis_keeper.BACK_OFF_S = redis_keeper.BACK_OFF_S, (0.001, 0.01)
        self.server = redis_servers.emptied()
        self.naive = NaiveStore(IDENTITY.digest)
        self.stores = [self._opened() for _ in range(2)]
        self.client: redis.Redis = self.server.client

    def teardown(self) -> None:
        for store in getattr(self, "stores", []):
            store.close()
        if hasattr(self, "back_off"):
            redis_keeper.BACK_OFF_S = self.back_off

    @rule(who=WHO, first=NAMES, tenant=TENANTS, count=st.integers(1, 4))
    def put_pages(self, who: int, first: int, tenant: str, count: int) -> None:
        items = []
        for name in range(first, min(first + count, 16)):
            key = ObjectKey(ObjectKind.PAGE, tenant, digest(f"{name}"))
            parent = digest(f"{name // 2}") if name > 1 else None
            items.append(StoredObject(key, parent, content(key, 100 + 3000 * (name % 3))))
        self._both(who, lambda store: store.put(items))

    @rule(who=WHO, name=NAMES, kind=st.sampled_from([ObjectKind.RESUME, ObjectKind.TAIL]))
    def put_other(self, who: int, name: int, kind: ObjectKind) -> None:
        key = ObjectKey(kind, "", digest(f"{name}"))
        item = StoredObject(key, digest(f"{name}"), content(key, 5000))
        self._both(who, lambda store: store.put([item]))

    @rule(who=WHO, name=NAMES, tenant=TENANTS, kind=st.sampled_from(ObjectKind))
    def delete(self, who: int, name: int, tenant: str, kind: ObjectKind) -> None:
        self._both(who, lambda store: store.delete([ObjectKey(kind, tenant, digest(f"{name}"))]))

    @rule(who=WHO, tenant=TENANTS)
    def delete_tenant(self, who: int, tenant: str) -> None:
        self._both(who, lambda store: store.delete_tenant(tenant))

    @rule(who=WHO, name=NAMES, tenant=TENANTS, kind=st.sampled_from(ObjectKind))
    def get(self, who: int, name: int, tenant: str, kind: ObjectKind) -> None:
        key = ObjectKey(kind, tenant, digest(f"{name}"))
        size = len(self.naive.objects[key][1]) if key in self.naive.objects else 1
        buffers = [bytearray(size), bytearray(size)]
        pending = iter(buffers)
        self._both(who, lambda store: store.get(key, memoryview(next(pending))))
        assert buffers[0] == buffers[1] or key not in self.naive.objects

    @precondition(lambda self: self.naive.objects)
    @rule(choice=st.integers(0, 1000), place=st.integers(0, 1000))
    def spoil(self, choice: int, place: int) -> None:
        """One byte of a record rots."""
        keys = list(self.naive.objects)
        key = keys[choice % len(keys)]
        if key in self.naive.bad:
            return
        payload = self.naive.objects[key][1]
        for name in self.client.keys("tierd:1:x:*"):
            data = self.client.get(name)
            start = data.find(payload)
            if start >= 0:
                at = start + place % len(payload)
                self.client.setrange(name, at, bytes([data[at] ^ 0xFF]))
                self.naive.spoil(key)
                return
        raise AssertionError("a stored object's bytes are in no value")

    @rule(who=WHO)
    def reopen(self, who: int) -> None:
        self.stores[who].close()
        self.stores[who] = self._opened()

    @rule(who=WHO)
    def reconnect(self, who: int) -> None:
        self.stores[who].link.trip("for the test")
        eventually(lambda: self.stores[who].link.up)

    @rule(who=WHO)
    def tidy(self, who: int) -> None:
        self.stores[who].gc(grace_s=-1)

    @rule(who=WHO)
    def verify(self, who: int) -> None:
        report = self.stores[who].verify()
        assert len(report.bad) == len(self.naive.bad)
        assert report.objects == len(self.naive.objects)
        for key in list(self.naive.bad):
            self.naive.forget(key)

    @invariant()
    def same_catalogue(self) -> None:
        for store in getattr(self, "stores", []):
            store.shelf.catch_up()
            assert store.has(KEYS) == self.naive.has(KEYS)
            assert store.usage().objects == len(self.naive.objects)

    @invariant()
    def nothing_is_left_over(self) -> None:
        """As many extents as the rows name; each mirror counts their bytes alike."""
        if not hasattr(self, "stores"):
            return
        names = set(self.client.keys("tierd:1:x:*"))
        for store in self.stores:
            store.shelf.catch_up()
            assert set(store.shelf.mirror.held) == names
        one, two = (store.usage().bytes_used for store in self.stores)
        assert one == two
        assert self.client.hlen(self.stores[0].shelf.names.live) == len(names)
        assert self.client.hlen(self.stores[0].shelf.names.doomed) == 0

    def _opened(self):
        return open_redis(self.server.url)

    def _both(self, who: int, call: Callable[[PrefixStore], object]) -> None:
        outcomes: list[object] = []
        pair: tuple[PrefixStore, PrefixStore] = (self.naive, self.stores[who])
        self.stores[who].shelf.catch_up()
        for store in pair:
            try:
                outcomes.append(call(store))
            except (PreconditionFailed, TransferFailed) as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1]


Twins.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestTwins = Twins.TestCase
TestTwins.__doc__ = __doc__
