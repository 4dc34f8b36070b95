"""What a prefix store does, whatever is behind it.

A store holds three kinds of immutable objects, named by identity (which weights, row format
and layout made them), tenant (the caller's salt) and a 32-byte digest:

- ``PAGE``: one mirror page; the digest is the chained hash of the block.
- ``RESUME``: one resume point; the digest is that of the last block before it.
- ``TAIL``: a suspended session's tail; the digest names session and content.

Objects are published whole or not at all. Every call is thread-safe and blocks; callers bound
it with threads of their own. A store that is down raises ``StoreUnavailable`` within its
deadline; bytes that fail a check raise ``TransferFailed`` and are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol, runtime_checkable

from dsv4_tierd.tiering.errors import UnsupportedCombination


class ObjectKind(IntEnum):
    """Numbers are on disk: never change one."""

    PAGE = 1
    RESUME = 2
    TAIL = 3


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """Name of one object within a store's identity. ``digest``: 32 bytes."""

    kind: ObjectKind
    tenant: str
    digest: bytes


class WritePolicy(Enum):
    """What the farthest tier of a store is sent of a session's words.

    Everything as soon as it is finished; when it is suspended, what it hangs on; or nothing.
    """

    THROUGH = "through"
    ON_SUSPEND = "on_suspend"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object to write. ``parent`` is the digest of the block before it, or None.

    A page whose parent is not stored is refused: catalogues hold contiguous runs only.
    ``policy``: its session's, for a store of two tiers; None: as the store is told.
    """

    key: ObjectKey
    parent: bytes | None
    payload: bytes | memoryview
    policy: WritePolicy | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a catalogue knows of one object besides its name."""

    parent: bytes | None
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Gauges and counters of a store. Counters never go down while it is open."""

    up: bool
    objects: int
    bytes_used: int
    bytes_max: int
    bytes_written: int
    bytes_read: int
    checksum_failures: int
    evicted_objects: int


class PrefixStore(Protocol):
    """Durable, checksummed, bounded, content-addressed."""

    @property
    def identity(self) -> bytes:
        """Digest of everything that the bytes depend on; other identities are invisible."""

    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Whether each object can be read now. No payload is read; holds nothing."""

    def find(self, key: ObjectKey) -> Facts | None:
        """What is known of an object; None: not there. As quick as ``has``, and as ``has`` else."""

    def get(self, key: ObjectKey, into: memoryview) -> bool:
        """Read one object into ``into`` (exactly its length). False: not there.

        Raises TransferFailed (short, wrong length, wrong checksum), StoreUnavailable.
        """

    def put(self, objects: Sequence[StoredObject]) -> None:
        """Write objects, parents first; durable when it returns. Those present are skipped.

        They become visible in commits, each whole and in order: of a call that is cut off, the
        first commits.
        Raises PreconditionFailed (a page's parent is not stored: nothing is written),
        StoreUnavailable (down, or no space left).
        """

    def delete(self, keys: Iterable[ObjectKey]) -> int:
        """Remove objects, what hangs on them, and the bytes; how many of ``keys`` there were.

        A resume point hangs on the page of its digest, everything else on its parent.
        """

    def delete_tenant(self, tenant: str) -> int:
        """Remove every object of a tenant."""

    def usage(self) -> StoreUsage:
        """Current gauges."""

    def close(self) -> None:
        """Flush and release the store. Further calls raise StoreUnavailable."""


@runtime_checkable
class TwoTiers(Protocol):
    """A store that keeps things near and sends them far."""

    @property
    def waiting(self) -> int:
        """Objects that the far tier is still to get, if it can be written."""

    def send_chain(self, leaf: ObjectKey) -> None:
        """Send a page, and the pages and points before it, to the far tier, soon."""


@runtime_checkable
class InParts(Protocol):
    """A store in front of others."""

    def parts(self) -> tuple[PrefixStore, ...]:
        """Those others, nearest first. Raises StoreUnavailable: they are not open yet."""


def parts_of(store: PrefixStore) -> tuple[PrefixStore, ...]:
    """The stores that hold the objects, nearest first. Raises StoreUnavailable."""
    return store.parts() if isinstance(store, InParts) else (store,)


@runtime_checkable
class Pins(Protocol):
    """A store whose objects can be kept from being given up."""

    def pin(self, keys: Sequence[ObjectKey]) -> None:
        """Keep objects, and the pages that they hang on, from eviction and from their end of time.

        Pinning again changes nothing. Raises PreconditionFailed (not stored: nothing is pinned),
        PinBudgetExhausted, StoreUnavailable.
        """

    def unpin(self, keys: Sequence[ObjectKey]) -> None:
        """Take pins back. Raises NotPinned (one of them was not: nothing changes)."""


def pins_of(store: PrefixStore) -> Pins:
    """The farthest part that has pins. Raises UnsupportedCombination, StoreUnavailable."""
    for part in reversed(parts_of(store)):
        if isinstance(part, Pins):
            return part
    raise UnsupportedCombination("prefix pins need a Redis store; this is another kind")
