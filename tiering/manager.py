"""The tiers as the engine sees them: open a sequence, extend, commit, close.

Calls come from the engine thread alone. A sequence's life::

    open      match the tree and the store, choose a start, hold the path, reserve to the end
    ready     stored pages have come in; device pages restored, tail in its slot
    extend    pages for the tokens about to be computed
    commit    those tokens are done: finished pages into the tree, written back, written through
    close     the window is published as a resume point, the tail goes idle, holds are released
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from dsv4_tierd.kernels.layout import PageLayout
from dsv4_tierd.kernels.tail_layout import TailLayout
from dsv4_tierd.tiering.admit import admit
from dsv4_tierd.tiering.begin import Begin
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS, Transcript, chain_root
from dsv4_tierd.tiering.coordinator import Coordinator
from dsv4_tierd.tiering.errors import ExceedsCapacity, HostPoolExhausted, TierError, TransferFailed
from dsv4_tierd.tiering.evict import Evictor
from dsv4_tierd.tiering.hot_set import C4Rows, DirectRows, HotSet
from dsv4_tierd.tiering.idle import IdleTails
from dsv4_tierd.tiering.mirror import PageMemory
from dsv4_tierd.tiering.pages import PagePool
from dsv4_tierd.tiering.pinned import Progress
from dsv4_tierd.tiering.plan import C4_ROWS_PER_PAGE, Plan
from dsv4_tierd.tiering.radix import NO_PAGE, Node, RadixTree
from dsv4_tierd.tiering.replay import Start, choose_start, replay_tokens
from dsv4_tierd.tiering.resume import ResumePoints
from dsv4_tierd.tiering.sequence import Reused, Sequence, page_table
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, PrefixStore
from dsv4_tierd.tiering.tails import Tail, TailPool, split_packed

log = logging.getLogger("dsv4_tierd.tiering")


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Everything the tiers are made from. ``reuse`` False: every request computes all of it."""

    plan: Plan
    pages: PageLayout
    tail: TailLayout
    identity: bytes
    device: torch.device
    replay_layers: int  # the model's layers and its MTP block
    tiered: bool = True
    reuse: bool = True
    whole_pages: bool = False  # device pages hold C4 rows too: where they are not swapped in


class TierManager:
    """Owner of all tier state. See the module docstring for the order of calls."""

    def __init__(
        self,
        config: TierConfig,
        store: PrefixStore | None = None,
        pinning: Progress | None = None,
    ) -> None:
        plan, device = config.plan, config.device
        self.config = config
        self.replay = replay_tokens(config.tail.window, config.replay_layers)
        self.tree = RadixTree()
        self.memory = PageMemory(
            config.pages,
            plan.mirror_pages,
            plan.device_pages,
            device,
            config.whole_pages,
            pinning,
        )
        self.mirror_pool = PagePool("mirror", plan.mirror_pages)
        self.device_pool = PagePool("device", plan.device_pages)
        self.tails = TailPool(config.tail, plan.tail_slots, device)
        self.points = ResumePoints(
            plan.resume_slots,
            config.tail.resume_bytes,
            self.tree,
            self.replay,
            device.type == "cuda",
        )
        self.c4: C4Rows = (
            HotSet(self.memory, plan, device) if config.tiered else DirectRows(self.memory)
        )
        self.evictor = Evictor(self.tree, self.mirror_pool, self.device_pool, self.points, self.c4)
        self.idle = IdleTails(self.tails, self.memory, self.c4, self.evictor, plan.idle_tail_bytes)
        self.coordinator = Coordinator(store, self.tree, self.memory, self.mirror_pool, self.points)
        self.begin = Begin(
            config.tail,
            self.tree,
            self.memory,
            self.c4,
            self.tails,
            self.points,
            self.evictor,
            self.idle,
            self.coordinator,
            (self.mirror_pool, self.device_pool),
        )
        self.running: list[Sequence] = []
        self.scratch_slot = self.tails.take()  # the prefill in progress writes its new tail here

    @property
    def restoring(self) -> bool:
        """Whether a sequence waits for nothing but copies to its device pages."""
        return any(
            seq.incoming is not None and seq.restored == len(seq.path) and not seq.began
            for seq in self.running
        )

    def root(self, salt: str) -> bytes:
        """The hash that a tenant's transcripts start from."""
        return chain_root(self.config.identity, salt)

    # ------------------------------------------------------------ matching
    def match(self, transcript: Transcript, tenant: str, tokens: int) -> list[Node]:
        """Blocks of the first ``tokens`` tokens that need not be computed, root first.

        Blocks that only the store has become nodes without a page. Holds nothing.
        """
        if not self.config.reuse:
            return []
        hashes = transcript.hashes[: tokens // BLOCK_TOKENS]
        path = self.tree.match(hashes)
        rest = hashes[len(path) :]
        for key in rest[: self.coordinator.known(tenant, rest)]:
            node = self.tree.nodes.get(key) or self.tree.add(
                key, path[-1] if path else self.tree.root(tenant)
            )
            node.stored = True
            path.append(node)
        io = self.coordinator
        for i, node in enumerate(path):
            if node.mirror == NO_PAGE and not io.reachable(node, ObjectKind.PAGE):
                return path[:i]
        return path

    def lookup(self, transcript: Transcript, tenant: str) -> tuple[Start, Reused]:
        """What a request with these tokens would reuse. Changes nothing that matters."""
        path = self.match(transcript, tenant, max(len(transcript) - 1, 0))
        start = self._choose(path)
        return start, _by_tier(path, None, 0)

    def _choose(self, path: list[Node]) -> Start:
        # A point further back than this could not beat a bounded replay.
        for node in path[-(self.replay // 2 // BLOCK_TOKENS + 1) :]:
            if node.resume == NO_PAGE and not node.resume_stored:
                node.resume_stored = self.coordinator.has_point(node)
        return choose_start(path, self.replay, self._can_start_at)

    def _can_start_at(self, node: Node) -> bool:
        """Whether the resume point of a node is here, or can be read now."""
        return node.resume != NO_PAGE or (
            node.resume_stored
            and self.points.can_take
            and self.coordinator.reachable(node, ObjectKind.RESUME)
        )

    # ------------------------------------------------------------ opening
    def open(
        self, transcript: Transcript, tenant: str, tail: Tail | None, reserve_tokens: int
    ) -> Sequence:
        """Start a sequence on ``transcript``, at least whose last token is computed.

        Reserves every page up to ``reserve_tokens``. ``tail``: an idle tail of exactly this
        transcript's first ``tail.position`` tokens; it is consumed if the start uses it.
        Raises ExceedsCapacity, HostPoolExhausted; then nothing has changed.
        """
        if reserve_tokens > self.config.plan.context_tokens:
            raise ExceedsCapacity(
                f"{reserve_tokens} tokens (prompt and max_tokens) exceed the "
                f"{self.config.plan.context_tokens} that the budgets hold"
            )
        if not self.config.reuse:
            transcript = Transcript(os.urandom(32), transcript.tokens)
        path = self.match(transcript, tenant, len(transcript) - 1)
        start = self._choose(path)
        usable = tail is not None and self.config.reuse and not IdleTails.lost(tail)
        if usable and tail is not None:
            blocks = tail.position // BLOCK_TOKENS
            if (
                blocks <= len(path)
                and tail.position < len(transcript)
                and start.begin <= tail.position
            ):
                path = path[:blocks]
                start = Start(tail.position, tail.position, None, triangle=False)
                return self._open(transcript, tenant, path, start, tail, reserve_tokens)
        return self._open(transcript, tenant, path, start, None, reserve_tokens)

    def _open(
        self,
        transcript: Transcript,
        tenant: str,
        path: list[Node],
        start: Start,
        tail: Tail | None,
        reserve: int,
    ) -> Sequence:
        root = self.tree.root(tenant)
        leaf = path[-1] if path else root
        self.tree.hold(leaf)
        total = -(-reserve // BLOCK_TOKENS)
        try:
            reservation = admit(
                path,
                total,
                self.mirror_pool,
                self.device_pool,
                lambda node: self.coordinator.in_flight(node, ObjectKind.PAGE),
            )
        except HostPoolExhausted:
            self.tree.release(leaf)
            raise
        seq = Sequence(
            transcript=transcript,
            tenant=tenant,
            root=root,
            start=start,
            reused=_by_tier(path, tail, start.reused - len(path) * BLOCK_TOKENS),
            emit_from=start.reused,
            position=start.begin,
            window_start=start.begin if start.triangle else 0,
            triangle=start.triangle,
            tail_slot=NO_PAGE,
            tail=tail,
            mirror=page_table(total),
            device=page_table(total),
            path=path,
            reservation=reservation,
        )
        self.running.append(seq)
        return seq

    def ready(self, seq: Sequence) -> bool:
        """Bring in what the sequence lacks; True once it may compute. See Begin."""
        return self.begin.ready(seq)

    # ------------------------------------------------------------ stored tails
    def fetch_tail(self, tenant: str, digest: bytes, size: int) -> Future[bytes] | None:
        """Start reading a suspended session's tail; None: the store is away, compute instead."""
        if not self.coordinator.up:
            return None
        return self.coordinator.fetch_tail(ObjectKey(ObjectKind.TAIL, tenant, digest), size)

    def accept_tail(self, fetch: Future[bytes] | None, transcript: Transcript) -> Tail | None:
        """A finished read to an idle tail; None, and a line in the log, if it brought none."""
        if fetch is None:
            return None
        try:
            words, packed = fetch.result()[:32], fetch.result()[32:]
            position = split_packed(packed)[0].position
            if position >= len(transcript) or words != transcript.digest(position):
                raise TransferFailed("the stored tail is of other words")
        except TierError as error:
            self.coordinator.counters.loads_failed += 1
            log.warning("stored tail is not used, recomputing: %s", error)
            return None
        return self.idle.add(Tail(position=position, slot=None, packed=packed, from_store=True))

    # ------------------------------------------------------------ running
    def extend(self, seq: Sequence, upto: int) -> None:
        """Give the sequence pages for its tokens up to ``upto``, out of its reservation."""
        self.begin.extend(seq, upto)

    def begin_chunk(self, seq: Sequence) -> None:
        """Before a prefill chunk: the mirror page gets the rows of the unfinished page.

        The scratch slot begins as the sequence's own: what a chunk does not write, a window's later
        rows for one, must not be another tenant's, since it is stored with the tail.
        """
        if seq.tail_dirty and seq.unfinished_page:
            self.c4.flush(seq.place, seq.page_start_entry, seq.position // 4)
        seq.tail_dirty = False
        self.tails.slots[self.scratch_slot].copy_(self.tails.slots[seq.tail_slot])

    def swap_tail(self, seq: Sequence) -> None:
        """After a prefill chunk: the scratch slot, which it wrote, is the sequence's now."""
        seq.tail_slot, self.scratch_slot = self.scratch_slot, seq.tail_slot

    def commit(self, seq: Sequence, upto: int, decoded: bool) -> None:
        """Tokens up to ``upto`` are computed: finished pages are written back, enter the tree."""
        seq.position = upto
        seq.tail_dirty = seq.tail_dirty or decoded
        while len(seq.path) < upto // BLOCK_TOKENS and upto > seq.emit_from:
            self._finish_page(seq, len(seq.path), decoded)
        if not decoded:
            seq.tail_from = seq.page_start_entry
        elif upto % BLOCK_TOKENS == 0:
            # The page just finished is still in the tail; the one before it is not any more.
            seq.tail_from = max(seq.tail_from, seq.page_start_entry - C4_ROWS_PER_PAGE)
            seq.tail_dirty = False
        if upto % BLOCK_TOKENS == 0 and upto >= seq.emit_from:
            self._capture(seq)
            if upto == seq.emit_from:  # a branch point: the next session here need not replay
                self.publish(seq)

    def _finish_page(self, seq: Sequence, block: int, decoded: bool) -> None:
        mirror, device = int(seq.mirror[block]), int(seq.device[block])
        if decoded:
            first = block * C4_ROWS_PER_PAGE
            self.c4.flush(seq.place, first, first + C4_ROWS_PER_PAGE)
        self.memory.write_back(device, mirror)
        key = seq.transcript.hashes[block]
        node = self.tree.nodes.get(key) or self.tree.add(key, seq.leaf)
        self.tree.hold_node(node)
        if node.mirror == NO_PAGE:
            self.tree.set_mirror(node, mirror)
        else:  # another session computed the same block: one copy is enough
            self.mirror_pool.free(mirror)
        if node.device != NO_PAGE:
            self.memory.await_restores()  # another sequence's copy to this page may be under way
            self.device_pool.free(device)
        else:
            if node.mirror != mirror:
                self.memory.restore(node.mirror, device)  # both tiers hold the same bits
            self.tree.set_device(node, device)
        seq.mirror[block], seq.device[block] = node.mirror, node.device
        seq.path.append(node)
        self.coordinator.queue(node, ObjectKind.PAGE, seq.write_policy)

    def _capture(self, seq: Sequence) -> None:
        """Keep the window at this boundary in the rolling slot."""
        if seq.rolling_slot is not None:
            slot = self.tails.slots[seq.tail_slot]
            self.config.tail.capture(slot, seq.position, self.points.slot(seq.rolling_slot))
            seq.rolling_at = seq.position

    def publish(self, seq: Sequence) -> None:
        """Make the rolling window the resume point of its block, for every later session."""
        if seq.rolling_slot is None or not seq.rolling_at:
            return
        node = seq.path[seq.rolling_at // BLOCK_TOKENS - 1]
        seq.rolling_at = 0
        if node.resume == NO_PAGE:
            self.points.publish(seq.rolling_slot, node)
            self.coordinator.queue(node, ObjectKind.RESUME, seq.write_policy)
            seq.rolling_slot = self.points.take()

    # ------------------------------------------------------------ closing
    def close(self, seq: Sequence, keep_tail: bool = True) -> Tail | None:
        """End a sequence in any state; returns its tail if it can be continued from."""
        assert not seq.closed
        seq.closed = True
        if seq.incoming is not None:
            seq.incoming.synchronize()  # whoever gets these pages next may write them at once
        self.running.remove(seq)
        tail = seq.tail  # never consumed: it is as it was
        if seq.began:
            self.publish(seq)
            tail = self._leave_tail(seq, keep_tail and self.config.reuse)
        else:
            self._free_private(seq, len(seq.path))
        if seq.rolling_slot is not None:
            self.points.give_back(seq.rolling_slot)
        self.mirror_pool.unreserve(seq.reservation.mirror)
        self.device_pool.unreserve(seq.reservation.device)
        self.tree.release(seq.leaf)
        if not self.config.reuse and seq.path:
            self.evictor.drop_subtree(seq.path[0])
        return tail

    def _leave_tail(self, seq: Sequence, keep: bool) -> Tail | None:
        """Pages beyond the position go; so does everything if the tail is not to be kept."""
        keep = keep and seq.position >= seq.emit_from
        wanted = seq.position // BLOCK_TOKENS + (seq.position % BLOCK_TOKENS >= 4)
        kept = max(wanted, len(seq.path)) if keep else len(seq.path)
        self._free_private(seq, kept)
        if not keep:
            self.tails.free(seq.tail_slot)
            return None
        tail = Tail(position=seq.position, slot=seq.tail_slot)
        if seq.unfinished_page:
            tail.mirror, tail.device = (
                int(seq.mirror[seq.page_count - 1]),
                int(seq.device[seq.page_count - 1]),
            )
        return self.idle.add(tail)

    def _free_private(self, seq: Sequence, kept: int) -> None:
        while seq.page_count > kept:
            seq.page_count -= 1
            self.evictor.free_pair(int(seq.mirror[seq.page_count]), int(seq.device[seq.page_count]))

    def snapshot(self, seq: Sequence) -> Tail | None:
        """A tail of a running sequence as it is now, packed, for a fork. None: mid-replay."""
        if not seq.began or seq.position < seq.emit_from:
            return None
        mirror, device = NO_PAGE, NO_PAGE
        if seq.position % BLOCK_TOKENS >= 4:
            last = seq.position // BLOCK_TOKENS
            mirror, device = int(seq.mirror[last]), int(seq.device[last])
        packed = self.idle.pack_slot(
            seq.tail_slot, seq.position, mirror, device, dirty=seq.tail_dirty
        )
        return self.idle.add(Tail(position=seq.position, slot=None, packed=packed))


def _by_tier(path: list[Node], tail: Tail | None, tail_tokens: int) -> Reused:
    device = sum(node.device != NO_PAGE for node in path) * BLOCK_TOKENS
    host = sum(node.device == NO_PAGE and node.mirror != NO_PAGE for node in path) * BLOCK_TOKENS
    store = len(path) * BLOCK_TOKENS - device - host
    if tail is None or tail.slot is not None:
        return Reused(device + tail_tokens, host, store)
    if tail.from_store:
        return Reused(device, host, store + tail_tokens)
    return Reused(device, host + tail_tokens, store)
