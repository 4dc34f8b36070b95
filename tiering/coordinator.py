"""Moves bytes between the host tier and the prefix store, in the background and bounded.

Reads and writes run on I/O threads; what they bring is applied by ``poll`` on the engine
thread, the only one that writes tier state. A read that is late is no longer waited for, and
lands (or is dropped) when it comes. A store that fails or is late is left alone for a while,
so that a dead one costs one deadline and not one a page.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from dsv4_tierd.tiering.errors import (
    PreconditionFailed,
    StoreUnavailable,
    TierError,
    TransferFailed,
    UnsupportedCombination,
)
from dsv4_tierd.tiering.mirror import PageMemory
from dsv4_tierd.tiering.pages import PagePool
from dsv4_tierd.tiering.radix import NO_PAGE, Node, RadixTree
from dsv4_tierd.tiering.resume import ResumePoints
from dsv4_tierd.tiering.store.protocol import (
    ObjectKey,
    ObjectKind,
    PrefixStore,
    StoredObject,
    StoreUsage,
    TwoTiers,
    WritePolicy,
    pins_of,
)

log = logging.getLogger("dsv4_tierd.tiering")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of the traffic with the store.

    ``loads_max`` reads are in flight, ``readers`` of them being read and checked at once: more
    than there are cores to check them only get in each other's way.
    """

    write_bytes_max: int = 64 << 20
    loads_max: int = 32
    readers: int = min(4, max(2, len(os.sched_getaffinity(0)) // 2))
    deadline_s: float = 10.0
    retry_after_s: float = 5.0


@dataclass(slots=True)
class StoreCounters:
    """Counters never go down."""

    pages_loaded: int = 0
    pages_written: int = 0
    loads_failed: int = 0
    loads_late: int = 0
    writes_failed: int = 0


@dataclass(slots=True)
class _Load:
    node: Node
    kind: ObjectKind
    target: int
    future: Future[bool]
    deadline: float
    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class _Dirty:
    node: Node
    policy: WritePolicy | None


@dataclass(slots=True)
class _Write:
    nodes: dict[ObjectKey, _Dirty]
    byte_count: int
    future: Future[None] = field(default_factory=Future)


class Coordinator:
    """Loads into mirror pages and resume slots; writes of finished pages and points.

    ``has_near_tier``: the store takes everything into a near tier and knows itself what its far
    one is sent; without one, only what a policy lets through is written.
    """

    def __init__(
        self,
        store: PrefixStore | None,
        tree: RadixTree,
        memory: PageMemory,
        pool: PagePool,
        points: ResumePoints,
        limits: StoreLimits | None = None,
    ) -> None:
        self.counters = StoreCounters()
        self.has_near_tier = isinstance(store, TwoTiers)
        self._store, self._tree, self._memory = store, tree, memory
        self._pool, self._points = pool, points
        self._limits = limits or StoreLimits()
        self._loads: dict[ObjectKey, _Load] = {}
        self._writes: deque[_Write] = deque()
        self._dirty: dict[ObjectKey, _Dirty] = {}
        self._retry_at = 0.0
        self._trouble = ""
        self._readers = ThreadPoolExecutor(self._limits.readers, thread_name_prefix="store-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self._carer = ThreadPoolExecutor(1, thread_name_prefix="store-care")

    # ------------------------------------------------------------ state
    @property
    def up(self) -> bool:
        """Whether there is a store and it is being asked; not while late reads fill every place."""
        return (
            self._store is not None
            and time.monotonic() >= self._retry_at
            and (self.can_load or not all(load.abandoned for load in self._loads.values()))
        )

    @property
    def why_down(self) -> str:
        """Why ``up`` is False, for people."""
        if self._store is None:
            return "no prefix store is configured"
        return f"the prefix store is left alone for a while: {self._trouble}"

    @property
    def has_store(self) -> bool:
        return self._store is not None

    @property
    def load_targets(self) -> list[tuple[ObjectKind, int]]:
        """Mirror pages and resume slots that reads in flight own, for the audit."""
        return [(load.kind, load.target) for load in self._loads.values()]

    @property
    def dirty_count(self) -> int:
        """Objects waiting to be written."""
        return len(self._dirty) + sum(len(write.nodes) for write in self._writes)

    @property
    def can_load(self) -> bool:
        return len(self._loads) < self._limits.loads_max

    def store_usage(self) -> StoreUsage | None:
        """The store's gauges; None without one."""
        return self._store.usage() if self._store is not None else None

    def known(self, tenant: str, hashes: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, the store has."""
        found = self._has([ObjectKey(ObjectKind.PAGE, tenant, key) for key in hashes])
        return next((i for i, there in enumerate(found) if not there), len(found))

    def has_point(self, node: Node) -> bool:
        """Whether the store has a resume point at the end of this block."""
        return any(self._has([_key(node, ObjectKind.RESUME)]))

    def _has(self, keys: list[ObjectKey]) -> list[bool]:
        """What the store says it has; nothing, and it is left alone, if it does not say."""
        if self._store is None or not self.up or not keys:
            return []
        try:
            return self._store.has(keys)
        except StoreUnavailable as error:
            self._back_off(str(error))
            return []

    # ------------------------------------------------------------ loads
    def loading(self, node: Node, kind: ObjectKind) -> bool:
        """Whether a read that is still waited for brings this object."""
        load = self._loads.get(_key(node, kind)) if node.key is not None else None
        return load is not None and not load.abandoned

    def load(self, node: Node, kind: ObjectKind, target: int) -> None:
        """Read a stored page into mirror page ``target``, or a point into that resume slot.

        The target belongs to the read until it ends, whatever becomes of the asker.
        """
        assert self._store is not None
        key = _key(node, kind)
        assert key not in self._loads, "object is being read already"
        future = self._readers.submit(self._store.get, key, _bytes_of(self._target(kind, target)))
        deadline = time.monotonic() + self._limits.deadline_s
        self._loads[key] = _Load(node, kind, target, future, deadline)

    def in_flight(self, node: Node, kind: ObjectKind) -> bool:
        """Whether a read of it is under way, waited for or not."""
        return node.key is not None and _key(node, kind) in self._loads

    def reachable(self, node: Node, kind: ObjectKind) -> bool:
        """Whether a stored object could come in: the store is up, and no late read of it hangs."""
        return self.up and (self.loading(node, kind) or not self.in_flight(node, kind))

    # ------------------------------------------------------------ writes
    def writes(self, policy: WritePolicy | None) -> bool:
        """Whether what a session finishes is written before the session is suspended."""
        return self.has_near_tier or policy in (None, WritePolicy.THROUGH)

    def queue(self, node: Node, kind: ObjectKind, policy: WritePolicy | None = None) -> None:
        """Write the block's page or point to the store, soon, if its session's policy says so.

        So are the pages before it that another session's policy kept from it.
        """
        if self._store is None or not self.writes(policy):
            return
        behind = [node] if kind is ObjectKind.PAGE else []
        while behind and (before := behind[-1].parent) is not None and before.key is not None:
            if before.stored or self.pending(before, ObjectKind.PAGE):
                break
            behind.append(before)
        for each in reversed(behind):
            self._queue(each, ObjectKind.PAGE, policy)
        if kind is ObjectKind.RESUME:
            self._queue(node, kind, policy)

    def _queue(self, node: Node, kind: ObjectKind, policy: WritePolicy | None) -> None:
        stored = node.stored if kind is ObjectKind.PAGE else node.resume_stored
        if stored:
            return
        key = _key(node, kind)
        known = self._dirty.get(key)
        if known is None or known.node is not node:
            self._dirty.pop(key, None)  # an older node of that name: it is pruned
            self._dirty[key] = _Dirty(node, policy)
        elif known.policy is not WritePolicy.THROUGH:
            self._dirty[key] = _Dirty(node, policy)

    def pending(self, node: Node, kind: ObjectKind) -> bool:
        """Whether it is to be written, or being written."""
        key = _key(node, kind)
        known = self._dirty.get(key)
        if known is not None and known.node is node:
            return True
        return any(key in write.nodes for write in self._writes)

    def submit_tail(self, tail: StoredObject) -> Future[None]:
        """Write a packed tail; the future is done when it is durable."""
        if self._store is None:
            raise StoreUnavailable("no prefix store is configured")
        return self._writer.submit(self._store.put, [tail])

    def submit_chain(self, leaf: ObjectKey) -> Future[int] | None:
        """Send what a session without a tail hangs on to the far tier; None: there is none."""
        if not self.has_near_tier:
            return None

        def send(store: PrefixStore) -> int:
            assert isinstance(store, TwoTiers)
            store.send_chain(leaf)
            return 0

        return self.submit(send)

    @property
    def unsent_count(self) -> int:
        """Objects that the far tier is still to get, if it can be written."""
        return self._store.waiting if isinstance(self._store, TwoTiers) else 0

    def submit_delete(self, keys: Sequence[ObjectKey]) -> Future[int]:
        """Remove objects, after the writes that are queued before."""
        assert self._store is not None
        return self._writer.submit(self._store.delete, keys)

    def submit(self, call: Callable[[PrefixStore], int]) -> Future[int]:
        """Run any other call on the writer thread."""
        assert self._store is not None
        return self._writer.submit(call, self._store)

    def require_pins(self) -> None:
        """Raises UnsupportedCombination: there is no store, or it has no pins."""
        pins_of(self._configured())

    def submit_care(self, call: Callable[[PrefixStore], T]) -> Future[T]:
        """Run what takes minutes beside reads and writes, one at a time; closing ends it."""
        return self._carer.submit(call, self._configured())

    def _configured(self) -> PrefixStore:
        if self._store is None:
            raise UnsupportedCombination("no prefix store is configured")
        return self._store

    def fetch_tail(self, key: ObjectKey, size: int) -> Future[bytes]:
        """Read a packed tail of ``size`` bytes."""
        store = self._store
        if store is None:
            raise StoreUnavailable("no prefix store is configured")

        def read() -> bytes:
            buffer = bytearray(size)
            if not store.get(key, memoryview(buffer)):
                raise TransferFailed("the suspended tail is not in the store")
            return bytes(buffer)

        return self._readers.submit(read)

    # ------------------------------------------------------------ engine thread
    def poll(self) -> None:
        """Apply what finished, give up what is late, start what is waiting. Never blocks."""
        if self._store is None:
            return
        self._apply_loads()
        while self._writes and self._writes[0].future.done():
            self._apply_write(self._writes.popleft())
        if self.up:
            self._start_writes()

    def drain(self, deadline_s: float) -> bool:
        """Write everything that waits; False if the deadline came first."""
        end = time.monotonic() + deadline_s
        while self.dirty_count and time.monotonic() < end:
            self.poll()
            time.sleep(0.002)
        return self.dirty_count == 0

    def close(self) -> None:
        """End the I/O threads and the store."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True)
        self._carer.shutdown(wait=False, cancel_futures=True)
        if self._store is not None:
            self._store.close()
        self._carer.shutdown(wait=True)  # what it does finds the store closed

    # ------------------------------------------------------------ details
    def _target(self, kind: ObjectKind, number: int) -> Tensor:
        return self._memory.blob(number) if kind is ObjectKind.PAGE else self._points.slot(number)

    def _apply_loads(self) -> None:
        for key, load in list(self._loads.items()):
            if load.future.done() and not self._before(load):
                del self._loads[key]
                self._apply_load(load)
            elif not load.abandoned and time.monotonic() > load.deadline:
                load.abandoned = True
                self.counters.loads_late += 1
                self._back_off("a read is late")

    def _before(self, load: _Load) -> bool:
        """Whether it must wait for the page it hangs on, whose read is still under way.

        Reads end in any order; a page without the one before it, or a point without its page, could
        not be kept.
        """
        needed = load.node.parent if load.kind is ObjectKind.PAGE else load.node
        return needed is not None and self.loading(needed, ObjectKind.PAGE)

    def _apply_load(self, load: _Load) -> None:
        error = load.future.exception()
        found = error is None and load.future.result()
        if not found:
            self.counters.loads_failed += 1
            if error is not None:
                log.warning("store read failed, recomputing: %s", error)
            if isinstance(error, StoreUnavailable):
                self._back_off("it is away")
            elif load.kind is ObjectKind.PAGE:
                load.node.stored = False
            else:
                load.node.resume_stored = False
        self._land(load, found)
        self._tree.prune(load.node)

    def _land(self, load: _Load, found: bool) -> None:
        node = load.node
        if load.kind is ObjectKind.RESUME:
            if found and node.key is not None and node.mirror != NO_PAGE:
                self._points.publish(load.target, node)
            else:
                self._points.give_back(load.target)
            return
        parent = node.parent
        rooted = parent is not None and (
            (parent.key is None and parent.parent is None) or parent.mirror != NO_PAGE
        )
        if found and node.key is not None and rooted and node.mirror == NO_PAGE:
            self._tree.set_mirror(node, load.target)
            self.counters.pages_loaded += 1
        else:
            self._pool.free(load.target)

    def _start_writes(self) -> None:
        batch: dict[ObjectKey, _Dirty] = {}
        objects: list[StoredObject] = []
        size = sum(write.byte_count for write in self._writes)
        for key, dirty in list(self._dirty.items()):
            node = dirty.node
            if not _in_memory(node, key.kind):
                del self._dirty[key]  # given up before it was written
                continue
            there = node.mirror if key.kind is ObjectKind.PAGE else node.resume
            source = _bytes_of(self._target(key.kind, there))
            if size and size + len(source) > self._limits.write_bytes_max:
                break
            payload = bytes(source)
            size += len(payload)
            del self._dirty[key]
            parent = node.parent.key if node.parent is not None else None
            batch[key] = dirty
            hangs_on = node.key if key.kind is ObjectKind.RESUME else parent
            objects.append(StoredObject(key, hangs_on, payload, dirty.policy))
        if objects:
            assert self._store is not None
            write = _Write(batch, sum(len(item.payload) for item in objects))
            write.future = self._writer.submit(self._store.put, objects)
            self._writes.append(write)

    def _apply_write(self, write: _Write) -> None:
        error = write.future.exception()
        for key, dirty in write.nodes.items():
            if dirty.node.key is None:
                continue
            if error is not None:
                self._dirty.setdefault(key, dirty)
            elif key.kind is ObjectKind.PAGE:
                dirty.node.stored = True
                self.counters.pages_written += 1
            else:
                dirty.node.resume_stored = True
        if error is not None:
            if not isinstance(error, TierError | OSError):
                raise error
            self.counters.writes_failed += 1
            if isinstance(error, PreconditionFailed):  # it answers: no reason to leave it alone
                self.recheck({n: d.policy for d in write.nodes.values() for n in d.node.path()})
            else:
                self._back_off(str(error))
            # What was given up meanwhile goes, or it would pile up while the store is away.
            held = (item for item in self._dirty.items() if _in_memory(item[1].node, item[0].kind))
            self._dirty = dict(sorted(held, key=lambda item: item[1].node.depth))

    def recheck(self, blocks: Mapping[Node, WritePolicy | None]) -> None:
        """What the store gave up of these without telling is no longer thought to be stored.

        Where it is in memory it is written again.
        """
        path = [node for node in blocks if node.stored]
        found = self._has([_key(node, ObjectKind.PAGE) for node in path])
        for node, there in zip(path, found, strict=False):  # none is found if it went away
            if not there:
                node.stored = node.resume_stored = False
                if node.mirror != NO_PAGE:
                    self._queue(node, ObjectKind.PAGE, blocks[node])
                self._tree.prune(node)

    def _back_off(self, why: str) -> None:
        self._retry_at = time.monotonic() + self._limits.retry_after_s
        self._trouble = why
        log.warning("store is left alone for %.0f s: %s", self._limits.retry_after_s, why)


def _key(node: Node, kind: ObjectKind) -> ObjectKey:
    assert node.key is not None
    return ObjectKey(kind, node.tenant, node.key)


def _in_memory(node: Node, kind: ObjectKind) -> bool:
    """Whether the block is known and its bytes are in host memory."""
    place = node.mirror if kind is ObjectKind.PAGE else node.resume
    return node.key is not None and place != NO_PAGE


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a host tensor, without a copy."""
    return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
