"""What is kept, and for how long: pins, suspension to the store, and forgetting."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from blake3 import blake3

from dsv4_tierd.tiering.blocks import BLOCK_TOKENS, Transcript
from dsv4_tierd.tiering.coordinator import Coordinator
from dsv4_tierd.tiering.errors import (
    HostPoolExhausted,
    InvalidRequest,
    NotPinned,
    PinBudgetExhausted,
    PreconditionFailed,
    QueueFull,
    StoreUnavailable,
    UnsupportedCombination,
)
from dsv4_tierd.tiering.idle import IdleTails
from dsv4_tierd.tiering.manager import TierManager
from dsv4_tierd.tiering.radix import NO_PAGE, Node
from dsv4_tierd.tiering.store.protocol import (
    ObjectKey,
    ObjectKind,
    PrefixStore,
    StoredObject,
    WritePolicy,
    parts_of,
    pins_of,
)
from dsv4_tierd.tiering.tails import Tail
from dsv4_tierd.tiering.warm import Warming

SENT_WITHIN_S = 10.0
TRIES = 3  # of blocks that the store gives up meanwhile
WARMINGS_MAX = 16


@dataclass(slots=True)
class Suspension:
    """A suspend under way: blocks first, then the tail that hangs on the last of them.

    A block that every tier gave up meanwhile cannot be written: those before it are, the rest is
    computed again from its words. ``tail``: what hangs on all ``blocks``; without one, the last
    block is sent to the far tier by itself. ``sent_by``: until then it waits for the far tier.
    """

    coordinator: Coordinator
    tenant: str
    policy: WritePolicy | None
    path: list[Node]
    blocks: int
    tail: StoredObject | None = None
    tail_position: int = 0
    sent_by: float = field(default_factory=lambda: time.monotonic() + SENT_WITHIN_S)
    tries: int = TRIES
    checked: bool = False
    future: Future[None] | Future[int] | None = None

    @property
    def tail_key(self) -> bytes | None:
        """Name of the stored tail, if there is one."""
        return None if self.tail is None else self.tail.key.digest

    @property
    def stored_tokens(self) -> int:
        """Tokens that need not be computed again: the blocks', or with a tail its own."""
        return len(self.path) * BLOCK_TOKENS if self.tail is None else self.tail_position

    def advance(self) -> bool:
        """Go on; True once all is durable, and where other daemons look for it.

        Raises StoreUnavailable if something could not be written.
        """
        if self.future is None:
            self._shorten()
            if not all(node.stored and not self._point_waits(node) for node in self.path):
                return False
            self.future = self._write_end()
        if not self.future.done():
            return False
        error = self.future.exception()
        if error is not None:
            raise StoreUnavailable(f"the tail could not be written: {error}")
        if not self.checked:
            self.write_blocks()
            self.checked = True
        if not all(node.stored for node in self.path):
            self._begin_again()
            return False
        return not self.coordinator.unsent_count or time.monotonic() > self.sent_by

    def _shorten(self) -> None:
        lost = (n.key is None or not (n.stored or n.mirror != NO_PAGE) for n in self.path)
        whole = next((i for i, gone in enumerate(lost) if gone), len(self.path))
        if whole < self.blocks:
            self.path, self.blocks, self.tail = self.path[:whole], whole, None

    def _point_waits(self, node: Node) -> bool:
        return self.coordinator.pending(node, ObjectKind.RESUME)

    def _write_end(self) -> Future[None] | Future[int]:
        if self.tail is not None:
            return self.coordinator.submit_tail(self.tail)
        leaf = self.path[-1].key if self.path else None
        if leaf is None or self.policy is WritePolicy.NEVER:
            return _nothing()
        key = ObjectKey(ObjectKind.PAGE, self.tenant, leaf)
        return self.coordinator.submit_chain(key) or _nothing()

    def _begin_again(self) -> None:
        self.tries -= 1
        if not self.tries:
            raise StoreUnavailable("the store gives up blocks as soon as they are written")
        self.future, self.checked = None, False

    def write_blocks(self) -> None:
        """Queue what the store lacks, and what it gave up without telling."""
        self.coordinator.recheck(dict.fromkeys(self.path, self.policy))
        for node in self.path:
            if node.key is None:
                break
            self.coordinator.queue(node, ObjectKind.PAGE, self.policy)
            if node.resume != NO_PAGE:
                self.coordinator.queue(node, ObjectKind.RESUME, self.policy)

    def is_of(self, name: str, transcript: Transcript) -> bool:
        """Whether its tail is of these tokens: they may have been rewound since."""
        return len(transcript) >= self.tail_position and self.tail_key == tail_digest(
            name, transcript, self.tail_position
        )


class Retention:
    """Promises about idle sessions. Pins are counted in mirror pages against a budget."""

    def __init__(self, manager: TierManager, pin_pages_max: int) -> None:
        self._manager = manager
        self.pin_pages_max = pin_pages_max
        self._pins: dict[str, Node] = {}
        self._warming: list[Warming] = []

    @property
    def pinned_pages(self) -> int:
        """Mirror pages under at least one pin."""
        return sum(1 for node in self._manager.tree.nodes.values() if node.pins)

    # ------------------------------------------------------------ pins
    def pin(self, name: str, transcript: Transcript, tenant: str) -> None:
        """Keep the session's finished pages in host memory until unpinned; pinning again moves it.

        Raises PinBudgetExhausted, HostPoolExhausted; then nothing has changed.
        """
        path = [
            n
            for n in self._manager.match(transcript, tenant, len(transcript))
            if n.mirror != NO_PAGE
        ]
        fresh = sum(1 for node in path if not node.pins)
        if self.pinned_pages + fresh > self.pin_pages_max:
            raise PinBudgetExhausted(
                f"{fresh} more pages on {self.pinned_pages} pinned exceed the budget of "
                f"{self.pin_pages_max}"
            )
        promised = sum(1 for node in path if not node.pins and not node.refs)
        if promised > self._manager.mirror_pool.available:
            raise HostPoolExhausted(
                f"{promised} pages to pin are promised to running requests, "
                f"{self._manager.mirror_pool.available} are not"
            )
        leaf = path[-1] if path else self._manager.tree.root(tenant)
        self._manager.tree.pin(leaf)
        previous = self._pins.pop(name, None)
        if previous is not None:
            self._manager.tree.unpin(previous)
        self._pins[name] = leaf

    def follow(self, name: str, transcript: Transcript, tenant: str) -> None:
        """A request has ended: a pinned session's pin covers its pages as they are now.

        Where they do not fit, it stays on what it covered.
        """
        if name in self._pins:
            with contextlib.suppress(PinBudgetExhausted, HostPoolExhausted):
                self.pin(name, transcript, tenant)

    def unpin(self, name: str) -> None:
        """Withdraw a session's pin. Raises NotPinned, changing nothing."""
        leaf = self._pins.pop(name, None)
        if leaf is None:
            raise NotPinned(f"session {name} is not pinned")
        self._manager.tree.unpin(leaf)

    def is_pinned(self, name: str) -> bool:
        return name in self._pins

    def pin_counts(self) -> Counter[Node]:
        """How often each node is pinned, for the audit."""
        leaves = [*self._pins.values(), *(warming.leaf for warming in self._warming)]
        return Counter(node for leaf in leaves for node in leaf.path())

    # ------------------------------------------------------------ warm-up
    def warm(self, transcript: Transcript, tenant: str) -> Warming:
        """Bring a prefix from the store to host memory; call ``advance_warming`` until it is there.

        Raises StoreUnavailable.
        """
        coordinator = self._manager.coordinator
        if not coordinator.up:
            raise StoreUnavailable(coordinator.why_down)
        if len(self._warming) >= WARMINGS_MAX:
            raise QueueFull(f"{WARMINGS_MAX} prefixes are being warmed up already")
        warming = Warming.begin(self._manager, transcript, tenant)
        self._warming.append(warming)
        return warming

    def advance_warming(self, warming: Warming) -> bool:
        """Whether it has ended."""
        ended = warming.advance()
        if ended:
            self._warming.remove(warming)
        return ended

    # ------------------------------------------------------------ pins in the store
    def pin_stored(self, transcript: Transcript, tenant: str, *, on: bool) -> Future[int]:
        """Keep the blocks of these words in the store, whatever it gives up; or take that back.

        The future's result is how many tokens those are. Raises InvalidRequest (not a block),
        UnsupportedCombination (this store has no pins); the future PreconditionFailed (not all
        are stored), NotPinned, PinBudgetExhausted, StoreUnavailable.
        """
        hashes = transcript.hashes
        if not hashes:
            raise InvalidRequest(f"a pin needs at least {BLOCK_TOKENS} tokens")
        leaf = ObjectKey(ObjectKind.PAGE, tenant, hashes[-1])
        point = ObjectKey(ObjectKind.RESUME, tenant, hashes[-1])

        def call(store: PrefixStore) -> int:
            pins = pins_of(store)
            try:
                if on:
                    pins.pin([leaf, point] if all(store.has([point])) else [leaf])
                else:
                    pins.unpin([leaf])
            except PreconditionFailed as error:
                raise PreconditionFailed(_too_few(store, tenant, hashes)) from error
            except NotPinned as error:
                raise NotPinned("these words are not pinned") from error
            if not on:
                with contextlib.suppress(NotPinned):
                    pins.unpin([point])
            return len(hashes) * BLOCK_TOKENS

        coordinator = self._manager.coordinator
        coordinator.require_pins()
        return coordinator.submit(call)

    # ------------------------------------------------------------ suspend
    def suspend_to_host(self, tail: Tail | None) -> None:
        """Pack an idle tail, so that it holds nothing on the device."""
        if tail is not None and tail.slot is not None:
            self._manager.idle.pack_away(tail)

    def may_be_stored(self, policy: WritePolicy | None) -> bool:
        """Whether a session of this policy can be suspended to the store at all."""
        return policy is not WritePolicy.NEVER or self._manager.coordinator.has_near_tier

    def suspend_to_store(
        self,
        name: str,
        transcript: Transcript,
        tenant: str,
        tail: Tail | None,
        policy: WritePolicy | None = None,
    ) -> Suspension:
        """Write everything that the store lacks; call ``advance`` after the coordinator's poll.

        Raises StoreUnavailable, UnsupportedCombination (the session is never to be stored).
        """
        manager = self._manager
        if not self.may_be_stored(policy):
            raise UnsupportedCombination(
                "this session's write policy is never, and there is no near tier: suspend it to "
                "the host",
                param="tier",
            )
        if not manager.coordinator.up:
            raise StoreUnavailable(manager.coordinator.why_down)
        if not manager.coordinator.has_near_tier:
            policy = WritePolicy.THROUGH  # what was held back is written now
        # Without a tail the last token is still to be computed, and its block with it.
        position = tail.position if tail is not None else max(len(transcript) - 1, 0)
        path = manager.match(transcript, tenant, position)
        suspension = Suspension(manager.coordinator, tenant, policy, path, position // BLOCK_TOKENS)
        suspension.write_blocks()
        if tail is not None and not IdleTails.lost(tail):
            # The words first, so that a tail is never taken for another transcript's.
            packed = transcript.digest(tail.position) + manager.idle.pack(tail)
            key = tail_digest(name, transcript, tail.position)
            leaf = transcript.hashes[suspension.blocks - 1] if suspension.blocks else None
            tail_name = ObjectKey(ObjectKind.TAIL, tenant, key)
            suspension.tail = StoredObject(tail_name, leaf, packed, policy)
            suspension.tail_position = tail.position
        return suspension

    # ------------------------------------------------------------ forgetting
    def drop(
        self, transcript: Transcript, tenant: str, from_block: int, tails: Collection[bytes] = ()
    ) -> Future[int] | None:
        """Forget a session's blocks from ``from_block`` on, in every tier, and its stored tails.

        Blocks that a running sequence holds or a pin keeps are another's words too: they stay.
        The future is done when the stored bytes are gone; None: there is nothing stored.
        """
        manager = self._manager
        hashes = transcript.hashes[from_block:]
        node = manager.tree.nodes.get(hashes[0]) if hashes else None
        gone = set(manager.evictor.drop_subtree(node)) if node is not None else set()
        gone |= {key for key in hashes if key not in manager.tree.nodes}
        keys = {
            ObjectKey(kind, tenant, key)
            for key in gone
            for kind in (ObjectKind.PAGE, ObjectKind.RESUME)
        }
        keys |= {ObjectKey(ObjectKind.TAIL, tenant, digest) for digest in tails}
        if not keys or not manager.coordinator.has_store:
            return None
        return manager.coordinator.submit_delete(
            sorted(keys, key=lambda key: (key.kind, key.digest))
        )

    def drop_tail(self, tenant: str, digest: bytes) -> None:
        """Remove a stored tail that a newer one replaced."""
        self._manager.coordinator.submit_delete([ObjectKey(ObjectKind.TAIL, tenant, digest)])

    def purge(self, tenant: str) -> Future[int] | None:
        """Forget everything of one tenant; the future is done when its stored bytes are gone."""
        manager = self._manager
        for node in list(manager.tree.root(tenant).children):
            manager.evictor.drop_subtree(node)

        def delete(store: PrefixStore) -> int:
            return store.delete_tenant(tenant)

        return manager.coordinator.submit(delete) if manager.coordinator.has_store else None


def _nothing() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


def tail_digest(name: str, transcript: Transcript, position: int) -> bytes:
    """Name of a session's tail after ``position`` tokens: 32 bytes."""
    hasher = blake3(derive_key_context="dsv4-tierd tail v1")
    hasher.update(name.encode())
    hasher.update(transcript.digest(position))
    return hasher.digest()


def _too_few(store: PrefixStore, tenant: str, hashes: Sequence[bytes]) -> str:
    """How many tokens the far tier has of what is to be pinned there."""
    found = parts_of(store)[-1].has([ObjectKey(ObjectKind.PAGE, tenant, h) for h in hashes])
    stored = next((i for i, there in enumerate(found) if not there), len(found))
    tokens = f"{stored * BLOCK_TOKENS:,} of {len(found) * BLOCK_TOKENS:,} tokens"
    return f"{tokens} are stored; a pin needs them all"
