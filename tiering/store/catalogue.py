"""The catalogue in memory: what is stored, how it hangs together, what goes first.

Every object hangs on a page: a page on the page before it, a resume point on the page of its
own digest, a tail on the last page of its session. Only objects that carry nothing are evicted,
so a prefix always outlives what was built on it. When the last child goes, its last use is
handed to the page it hung on: the order is that of "reading an object uses the whole chain
above it", without walking the chain on every read.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind


@dataclass(frozen=True, slots=True)
class Extent:
    """A record's place: segment number, byte offset and bytes (a multiple of 4 KiB)."""

    segment: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + self.size


@dataclass(slots=True, eq=False)
class Entry:
    """One stored object. ``readers``: reads in flight, which keep its bytes in place."""

    row: int
    identity: bytes
    key: ObjectKey
    parent: bytes | None
    extent: Extent
    payload_bytes: int
    used: int
    readers: int = 0
    live: bool = True
    queued: bool = False

    @property
    def anchor(self) -> bytes | None:
        """Digest of the page that this hangs on."""
        return self.key.digest if self.key.kind is ObjectKind.RESUME else self.parent


Space = tuple[bytes, str]  # identity and tenant: digests mean something only within both


class Catalogue:
    """Entries by name. Lookups need no lock (one dict read each); changes need the store's."""

    def __init__(self) -> None:
        self._objects: dict[Space, tuple[dict[bytes, Entry], ...]] = {}
        self._children: dict[tuple[Space, bytes], list[Entry]] = {}
        self._queue: list[tuple[int, int, Entry]] = []
        self._clock = 0
        self.count = 0
        self.payload_bytes: dict[Space, int] = {}

    def find(self, identity: bytes, key: ObjectKey) -> Entry | None:
        """The entry of that name, or None."""
        kinds = self._objects.get((identity, key.tenant))
        return None if kinds is None else kinds[key.kind].get(key.digest)

    def __iter__(self) -> Iterator[Entry]:
        for kinds in list(self._objects.values()):
            for entries in kinds:
                yield from list(entries.values())

    def of_tenant(self, tenant: str) -> list[Entry]:
        """Every entry of a tenant, whatever its identity."""
        spaces = [kinds for (_, name), kinds in self._objects.items() if name == tenant]
        return [entry for kinds in spaces for entries in kinds for entry in entries.values()]

    def tick(self) -> int:
        """The next moment of the store's own clock, which orders uses."""
        self._clock += 1
        return self._clock

    def touch(self, entry: Entry) -> None:
        """The entry was used now."""
        entry.used = self.tick()

    def add(self, entry: Entry) -> None:
        """A new entry; one of that name must not be there."""
        space = (entry.identity, entry.key.tenant)
        if space not in self._objects:
            self._objects[space] = tuple({} for _ in range(max(ObjectKind) + 1))
        kinds = self._objects[space]
        assert entry.key.digest not in kinds[entry.key.kind], entry.key
        kinds[entry.key.kind][entry.key.digest] = entry
        if entry.anchor is not None:
            self._children.setdefault((space, entry.anchor), []).append(entry)
        self._clock = max(self._clock, entry.used)
        self.count += 1
        self._weigh(space, entry.payload_bytes)
        self._offer(entry)

    def remove(self, entry: Entry) -> None:
        """Take an entry out; what it hung on inherits its last use."""
        space = (entry.identity, entry.key.tenant)
        kinds = self._objects[space]
        del kinds[entry.key.kind][entry.key.digest]
        entry.live = False
        self.count -= 1
        self._weigh(space, -entry.payload_bytes)
        if not any(kinds):
            del self._objects[space]
        if entry.anchor is None:
            return
        siblings = self._children[space, entry.anchor]
        siblings.remove(entry)
        if not siblings:
            del self._children[space, entry.anchor]
        page = self.find(entry.identity, ObjectKey(ObjectKind.PAGE, space[1], entry.anchor))
        if page is not None:
            page.used = max(page.used, entry.used)
            self._offer(page)

    def children(self, entry: Entry) -> list[Entry]:
        """What hangs directly on a page; nothing hangs on other objects."""
        if entry.key.kind is not ObjectKind.PAGE:
            return []
        return self._children.get(((entry.identity, entry.key.tenant), entry.key.digest), [])

    def subtree(self, roots: Iterable[Entry]) -> list[Entry]:
        """The entries and all that hangs on them, children first, each once."""
        seen: set[int] = set()
        found: list[Entry] = []
        pending = [(entry, False) for entry in roots]
        while pending:
            entry, expanded = pending.pop()
            if expanded:
                found.append(entry)
            elif id(entry) not in seen:
                seen.add(id(entry))
                pending.append((entry, True))
                pending.extend((child, False) for child in self.children(entry))
        return found

    def pop_victim(self, protected: frozenset[bytes], tenant: str | None = None) -> Entry | None:
        """Remove and return the least recently used entry that carries nothing.

        None where there is none: the rest is being read, its digest is ``protected``, or it
        belongs to another than the ``tenant`` that was asked for.
        """
        held: list[Entry] = []
        victim = None
        while self._queue and victim is None:
            used, _, entry = heapq.heappop(self._queue)
            entry.queued = False
            if not entry.live or self.children(entry):
                continue  # offered again once it carries nothing
            if entry.used != used:
                self._offer(entry)
            elif (
                entry.readers
                or entry.key.digest in protected
                or (tenant is not None and entry.key.tenant != tenant)
            ):
                held.append(entry)
            else:
                victim = entry
        for entry in held:
            self._offer(entry)
        if victim is not None:
            self.remove(victim)
        return victim

    def _weigh(self, space: Space, change: int) -> None:
        self.payload_bytes[space] = self.payload_bytes.get(space, 0) + change
        if not self.payload_bytes[space]:
            del self.payload_bytes[space]

    def _offer(self, entry: Entry) -> None:
        if entry.live and not entry.queued and not self.children(entry):
            entry.queued = True
            heapq.heappush(self._queue, (entry.used, entry.row, entry))
