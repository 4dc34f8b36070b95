"""A session in the worker: its words, and the tail it left. Caches only; the daemon owns it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsv4_tierd.tiering.blocks import Transcript
from dsv4_tierd.tiering.store.protocol import WritePolicy
from dsv4_tierd.tiering.tails import Tail

if TYPE_CHECKING:
    from dsv4_tierd.engine.request import Request


@dataclass(slots=True)
class StoredTail:
    """A tail in the prefix store: 32-byte digest and size in bytes.

    ``usable``: of the transcript as it is, and not yet fetched. ``owned``: goes when the session is
    deleted; a fork only borrows its source's.
    """

    digest: bytes
    size: int
    usable: bool = True
    owned: bool = True
    fetch: Future[bytes] | None = None
    since: float = 0.0

    @property
    def key(self) -> bytes:
        """What the daemon keeps: 40 bytes."""
        return self.digest + self.size.to_bytes(8, "little")

    @classmethod
    def from_key(cls, key: bytes) -> StoredTail:
        return cls(key[:32], int.from_bytes(key[32:], "little"))


@dataclass(slots=True)
class Session:
    """``tail`` is of the first ``tail.position`` tokens; None: computed from the transcript.

    ``stored_tail``: what suspend wrote last.
    """

    id: str
    salt: str
    transcript: Transcript
    tail: Tail | None = None
    stored_tail: StoredTail | None = None
    write_policy: WritePolicy | None = None
    request: Request | None = None
