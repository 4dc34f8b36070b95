"""Two stores as one: a local one in front of a remote one.

Reading asks the tiers in order, and what only the remote has is copied into the local one.
Writing is durable once the local tier has it; the remote gets it in the background, read back
from the local tier, so that what waits costs no memory. A remote that is away, slow or wrong
costs one deadline, and then nothing: the local tier serves on, and what the remote missed is
sent when it is back.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dsv4_tierd.tiering.errors import PreconditionFailed, StoreUnavailable, TransferFailed
from dsv4_tierd.tiering.store.bounded import Bounded
from dsv4_tierd.tiering.store.protocol import (
    Facts,
    ObjectKey,
    ObjectKind,
    PrefixStore,
    StoredObject,
    StoreUsage,
    WritePolicy,
)
from dsv4_tierd.tiering.store.tiered_copies import CopyUp, Outbox, chain_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TieredConfig:
    """How the remote tier is treated. ``policy``: of objects that come with none.

    A remote call may take ``deadline_s``, and a second more for every ``rate_min`` bytes. After
    a failure it is left alone for ``retry_after_s``. ``batch_bytes``: of one remote write.
    ``copy_bytes_max``: copies that wait for the local tier. ``close_s``: how long closing waits
    for the remote to get what it lacks.
    """

    policy: WritePolicy = WritePolicy.THROUGH
    deadline_s: float = 2.0
    rate_min: int = 32 << 20
    retry_after_s: float = 5.0
    batch_bytes: int = 32 << 20
    copy_bytes_max: int = 128 << 20
    close_s: float = 5.0


class Remote:
    """The remote tier behind its deadlines.

    Reads and writes have a breaker each: a full remote can be read, and a slow one written.
    """

    def __init__(self, store: PrefixStore, config: TieredConfig) -> None:
        self.store, self._config = store, config
        self.reads = Bounded("remote reads", config.retry_after_s)
        self.writes = Bounded("remote writes", config.retry_after_s)
        self._changing = threading.Lock()
        # Deleted here, and perhaps still there: never served, and deleted before the next write.
        self.doomed: dict[ObjectKey, None] = {}
        self.doomed_tenants: dict[str, None] = {}

    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """From the remote's memory; nothing while it is away."""
        if not self.reads.closed:
            return [False] * len(keys)
        try:
            found = self.store.has(keys)
        except StoreUnavailable as error:
            self.reads.trip(error.message)
            return [False] * len(keys)
        if not self.doomed and not self.doomed_tenants:
            return found
        return [there and not self._is_doomed(key) for key, there in zip(keys, found, strict=True)]

    def find(self, key: ObjectKey) -> Facts | None:
        """From the remote's memory; None while it is away."""
        try:
            return self.store.find(key) if self.has([key])[0] else None
        except StoreUnavailable:
            return None

    def get(self, key: ObjectKey, size: int) -> bytearray | None:
        """A read into memory of its own: one that is late must not write to the caller's.

        Raises StoreUnavailable, TransferFailed.
        """
        if self._is_doomed(key):
            return None
        own = bytearray(size)
        there = self.reads.call(lambda: self.store.get(key, memoryview(own)), self._deadline(size))
        return own if there else None

    def put(
        self, objects: Sequence[StoredObject], wanted: Callable[[ObjectKey], bool] | None = None
    ) -> None:
        """Write what is ``wanted`` still. Raises StoreUnavailable, PreconditionFailed."""
        with self._changing:
            self._purge()
            # Asked here: whoever deletes says so first, and then waits for this lock.
            objects = [item for item in objects if wanted is None or wanted(item.key)]
            size = sum(memoryview(item.payload).nbytes for item in objects)
            self.writes.call(lambda: self.store.put(objects), self._deadline(size))

    def delete(self, keys: Sequence[ObjectKey], tenants: Sequence[str] = ()) -> int:
        """Remove, or remember to remove. Raises StoreUnavailable: it is not done yet."""
        self.doomed.update(dict.fromkeys(keys))
        self.doomed_tenants.update(dict.fromkeys(tenants))
        return self.purge()

    def purge(self) -> int:
        """Delete what is doomed; how many objects that were. Raises StoreUnavailable."""
        with self._changing:
            return self._purge()

    def _purge(self) -> int:
        keys, tenants = list(self.doomed), list(self.doomed_tenants)
        gone = 0
        if keys:
            gone += self.writes.call(lambda: self.store.delete(keys), self._deadline(0))
        for tenant in tenants:
            erase = functools.partial(self.store.delete_tenant, tenant)
            gone += self.writes.call(erase, self._deadline(0))
        for key in keys:
            self.doomed.pop(key, None)
        for tenant in tenants:
            self.doomed_tenants.pop(tenant, None)
        return gone

    def _is_doomed(self, key: ObjectKey) -> bool:
        return key in self.doomed or key.tenant in self.doomed_tenants

    def _deadline(self, size: int) -> float:
        return self._config.deadline_s + size / self._config.rate_min


class TieredStore:
    """``PrefixStore`` over a local and a remote one of the same identity. Owns both."""

    def __init__(
        self, local: PrefixStore, remote: PrefixStore, config: TieredConfig | None = None
    ) -> None:
        """Raises ValueError: the tiers hold objects of different identities."""
        if local.identity != remote.identity:
            raise ValueError("the tiers of a store must have one identity")
        self.config = config or TieredConfig()
        self._local = local
        self._remote = Remote(remote, self.config)
        self._outbox = Outbox(local, self._remote, self.config.batch_bytes)
        self._copies = CopyUp(local, self.config.copy_bytes_max)
        self._counting = threading.Lock()
        self._bytes_read = 0
        self._open = True

    @property
    def identity(self) -> bytes:
        """The tiers' own."""
        return self._local.identity

    def parts(self) -> tuple[PrefixStore, ...]:
        """See ``InParts``."""
        return self._local, self._remote.store

    # ------------------------------------------------------------ reading
    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Whether any tier that answers has each; memory only. Raises StoreUnavailable (closed)."""
        self._check()
        try:
            found = self._local.has(keys)
        except StoreUnavailable:
            found = [False] * len(keys)
        missing = [index for index, there in enumerate(found) if not there]
        if missing:
            there = self._remote.has([keys[index] for index in missing])
            for index, is_there in zip(missing, there, strict=True):
                found[index] = is_there
        return found

    def find(self, key: ObjectKey) -> Facts | None:
        """What the first tier that has it says."""
        self._check()
        return _local_facts(self._local, key) or self._remote.find(key)

    def get(self, key: ObjectKey, into: memoryview) -> bool:
        """From the first tier that gives it whole. False: none has it, or the one is away.

        Raises TransferFailed (a tier had it, and nobody could give it).
        """
        self._check()
        into = into.cast("B")
        epoch = self._copies.epoch
        wrong: TransferFailed | None = None
        try:
            if self._local.get(key, into):
                self._count(len(into))
                return True
        except StoreUnavailable as error:
            log.debug("store: the local tier does not answer: %s", error)
        except TransferFailed as error:
            wrong = error
        facts = self._remote.find(key)
        if facts is not None:
            try:
                found = self._remote.get(key, len(into))
                if found is not None:
                    into[:] = found
                    self._copies.offer(StoredObject(key, facts.parent, memoryview(found)), epoch)
                    self._count(len(into))
                    return True
            except StoreUnavailable as error:
                log.debug("store: the remote tier does not answer: %s", error)
            except TransferFailed as error:
                wrong = error
        if wrong is not None:
            raise wrong
        return False

    # ------------------------------------------------------------ writing
    def put(self, objects: Sequence[StoredObject]) -> None:
        """Durable in the local tier when it returns; sent to the remote as the policy says.

        Objects that hang on pages which only the remote has bring those in first. A local tier
        that takes nothing (full, failing) is stood in for by a remote written through.
        Raises as ``PrefixStore.put``.
        """
        self._check()
        try:
            try:
                self._local.put(objects)
            except PreconditionFailed:
                self._bring_ancestors(objects)
                self._local.put(objects)
        except StoreUnavailable as error:
            if any(self._policy(item) is not WritePolicy.THROUGH for item in objects):
                raise
            try:
                self._remote.put(objects)
            except PreconditionFailed:
                raise error from None  # the pages before these are on their way there
            return
        self._send(objects)

    def _send(self, objects: Sequence[StoredObject]) -> None:
        wanted = [item for item in objects if self._policy(item) is not WritePolicy.NEVER]
        for item in wanted:
            if item.key.kind is ObjectKind.TAIL:
                if item.parent is not None:  # it may hang on what another session held back
                    self.send_chain(ObjectKey(ObjectKind.PAGE, item.key.tenant, item.parent))
                self._outbox.send([item.key])
        self._outbox.send(
            [item.key for item in wanted if self._policy(item) is WritePolicy.THROUGH]
        )

    def send_chain(self, leaf: ObjectKey) -> None:
        """See ``TwoTiers``."""
        self._outbox.send_chain(leaf)

    def _policy(self, item: StoredObject) -> WritePolicy:
        return item.policy or self.config.policy

    def _bring_ancestors(self, objects: Sequence[StoredObject]) -> None:
        """Copy pages that only the remote has, and that ``objects`` hang on, into the local tier.

        Raises PreconditionFailed: they are nowhere to be had.
        """
        coming = {item.key for item in objects}
        lacking: dict[ObjectKey, Facts] = {}
        for item in objects:
            if item.parent is None:
                continue
            start = ObjectKey(ObjectKind.PAGE, item.key.tenant, item.parent)
            for key, facts in chain_of(start, self._remote.find):
                if key in coming or key in lacking or self._local.has([key])[0]:
                    break
                lacking[key] = facts
        # Each walk went upwards; shallower pages first is what the local tier wants.
        for key, facts in reversed(lacking.items()):
            try:
                payload = self._remote.get(key, facts.payload_bytes)
            except (StoreUnavailable, TransferFailed) as error:
                raise PreconditionFailed(f"a page before these cannot be had: {error}") from error
            if payload is None:
                raise PreconditionFailed("a page before these is gone from the remote tier")
            self._local.put([StoredObject(key, facts.parent, memoryview(payload))])

    # ------------------------------------------------------------ removing
    def delete(self, keys: Iterable[ObjectKey]) -> int:
        """Remove from both tiers. Returns how many of ``keys`` there were.

        Raises StoreUnavailable: gone here and not served any more, but the remote did not say
        yet that it deleted them; it is told again as soon as it answers.
        """
        self._check()
        wanted = dict.fromkeys(keys)
        count = sum(self.has(list(wanted)))
        self._outbox.forget(wanted.__contains__)
        self._copies.forget(wanted.__contains__)
        try:
            self._local.delete(wanted)
        finally:
            self._remote.delete(list(wanted))
        return count

    def delete_tenant(self, tenant: str) -> int:
        """Remove a tenant from both tiers; how many objects the tier that had more had."""
        self._check()
        self._outbox.forget(lambda key: key.tenant == tenant)
        self._copies.forget(lambda key: key.tenant == tenant)
        here = there = 0
        try:
            here = self._local.delete_tenant(tenant)
        finally:
            there = self._remote.delete([], [tenant])
        return max(here, there)

    # ------------------------------------------------------------ state
    def flush(self, timeout_s: float) -> bool:
        """Wait until both tiers have what they shall have; False: time ran out first."""
        end = time.monotonic() + timeout_s
        return self._copies.flush(end) and self._outbox.flush(end)

    @property
    def waiting(self) -> int:
        """Objects that the remote tier is still to get; 0 while it takes none."""
        return self._outbox.waiting if self._remote.writes.closed else 0

    def tier_usage(self) -> dict[str, StoreUsage]:
        """Each tier's own gauges, by ``local`` and ``remote``."""
        remote = self._remote.store.usage()
        up = remote.up and self._remote.reads.closed
        return {"local": self._local.usage(), "remote": replace(remote, up=up)}

    def usage(self) -> StoreUsage:
        """Bytes and counters of both tiers together; objects of the tier that has more."""
        local, remote = self.tier_usage().values()
        return StoreUsage(
            up=self._open and (local.up or remote.up),
            objects=max(local.objects, remote.objects),
            bytes_used=local.bytes_used + remote.bytes_used,
            bytes_max=local.bytes_max + remote.bytes_max,
            bytes_written=local.bytes_written + remote.bytes_written,
            bytes_read=self._bytes_read,
            checksum_failures=local.checksum_failures + remote.checksum_failures,
            evicted_objects=local.evicted_objects + remote.evicted_objects,
        )

    def close(self) -> None:
        """Give the remote a moment to catch up, and close both. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        self.flush(self.config.close_s if self._remote.writes.closed else 0.0)
        if self._outbox.waiting:
            log.warning("store: %d objects never reached the remote tier", self._outbox.waiting)
        self._copies.close()
        self._outbox.close()
        self._local.close()
        closing = threading.Thread(target=self._remote.store.close, daemon=True)
        closing.start()
        closing.join(self.config.close_s)

    def _check(self) -> None:
        if not self._open:
            raise StoreUnavailable("the store is closed", retry_after_s=None)

    def _count(self, size: int) -> None:
        with self._counting:
            self._bytes_read += size


def _local_facts(local: PrefixStore, key: ObjectKey) -> Facts | None:
    try:
        return local.find(key)
    except StoreUnavailable:
        return None
