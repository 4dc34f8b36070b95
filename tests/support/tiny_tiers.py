"""Tiers without a model: every row follows from the tokens before it, so it can be checked.

``Puppet`` writes the rows that a model would compute, through the same calls as the engine's
runner, and ``verify`` compares every byte that anything names with what it must be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from dsv4_tierd.kernels.layout import PageLayout, RowFormat, RowKind
from dsv4_tierd.kernels.tail_layout import TailLayout
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS, Transcript
from dsv4_tierd.tiering.hot_set import C4Place
from dsv4_tierd.tiering.manager import TierConfig, TierManager
from dsv4_tierd.tiering.plan import Plan
from dsv4_tierd.tiering.radix import NO_PAGE, Node
from dsv4_tierd.tiering.sequence import Sequence
from dsv4_tierd.tiering.store.protocol import PrefixStore
from dsv4_tierd.tiering.tails import Tail

DIM, WINDOW, LAYERS, C4_COUNT = 4, 16, 4, 2
LATENT = RowFormat(RowKind.FP32, DIM, 2)
PAGES = PageLayout(LATENT, LATENT, (1, 3), (2,))
TAIL = TailLayout(LATENT, LATENT, WINDOW, LAYERS, C4_COUNT, 1)
CPU = torch.device("cpu")
KIND_WINDOW, KIND_C4, KIND_INDEX, KIND_C128 = range(4)


def tiny_plan(**changes: int) -> Plan:
    """Pools so small that evictions and misses really happen."""
    return replace(
        Plan(
            mirror_pages=14,
            device_pages=10,
            tail_slots=5,
            hot_rows=128,
            resume_slots=6,
            idle_tail_bytes=40_000,
            staging_rows=8 * 64,
            context_tokens=8 * BLOCK_TOKENS,
            bytes_by_pool=(),
        ),
        **changes,
    )


def tiny_tiers(
    plan: Plan | None = None, store: PrefixStore | None = None, tiered: bool = True
) -> TierManager:
    """A manager over the tiny layouts; a bounded replay is 256 tokens."""
    config = TierConfig(
        plan=plan or tiny_plan(),
        pages=PAGES,
        tail=TAIL,
        identity=store.identity if store is not None else bytes(32),
        device=CPU,
        replay_layers=LAYERS,
        tiered=tiered,
    )
    return TierManager(config, store)


# ---------------------------------------------------------------- content
def prefix_states(tokens: np.ndarray) -> np.ndarray:
    """[T] uint64: a number that follows from tokens[:t + 1]."""
    state, out = 0x9E3779B97F4A7C15, np.empty(len(tokens), np.uint64)
    for i, token in enumerate(tokens.tolist()):
        state = (state * 6364136223846793005 + token + 1442695040888963407) & (1 << 64) - 1
        out[i] = state
    return out


def rows_of(states: np.ndarray, kind: int, layer: int, width: int = DIM) -> Tensor:
    """[n, width] fp32 whole numbers that name state, kind and layer."""
    mixed = states * np.uint64(2 * (kind * 16 + layer) + 1)
    shifts = np.arange(width, dtype=np.uint64) * np.uint64(7) % np.uint64(47)
    return torch.from_numpy(((mixed[:, None] >> shifts) & np.uint64(0xFFFF)).astype(np.float32))


def page_bytes(states: np.ndarray) -> bytes:
    """What the mirror page of a block holds. states: [256], of the block's tokens."""
    return _page_bytes(states.tobytes())


@cache
def _page_bytes(packed: bytes) -> bytes:
    states = np.frombuffer(packed, np.uint64)
    page = torch.zeros(1, PAGES.mirror_bytes, dtype=torch.uint8)
    device = page[:, PAGES.c4_bytes :]
    entries, long_entries = states[3::4], states[127::128]
    for rank in range(C4_COUNT):
        ids = torch.arange(64)
        PAGES.c4[rank].view(page[:, : PAGES.c4_bytes]).write(ids, rows_of(entries, KIND_C4, rank))
        PAGES.index[rank].view(device).write(ids, rows_of(entries, KIND_INDEX, rank))
    PAGES.c128[0].view(device).write(torch.arange(2), rows_of(long_entries, KIND_C128, 0))
    return page.numpy().tobytes()


@dataclass(slots=True)
class Actor:
    """A session as the engine keeps it."""

    transcript: Transcript
    tenant: str = ""
    tail: Tail | None = None
    seq: Sequence | None = None


class Puppet:
    """Runs sequences without a model, and checks what the tiers hold."""

    def __init__(self, tiers: TierManager) -> None:
        self.tiers = tiers

    def actor(self, tokens: np.ndarray, tenant: str = "") -> Actor:
        return Actor(Transcript(self.tiers.root(tenant), tokens.astype(np.int32)), tenant)

    # ------------------------------------------------------------ the engine's part
    def open(self, actor: Actor, more: int = 0) -> Sequence:
        """Admission. The actor's tail is taken over when the sequence is ready."""
        reserve = len(actor.transcript) + more
        actor.seq = self.tiers.open(actor.transcript, actor.tenant, actor.tail, reserve)
        return actor.seq

    def ready(self, actor: Actor) -> bool:
        """May raise StaleStart, as the manager does."""
        assert actor.seq is not None
        uses_tail = actor.seq.tail is not None
        if not self.tiers.ready(actor.seq):
            return False
        if not uses_tail:
            self.drop_tail(actor)
        actor.tail = None
        return True

    def drop_tail(self, actor: Actor) -> None:
        if actor.tail is not None:
            self.tiers.idle.release(actor.tail)
            actor.tail = None

    def close(self, actor: Actor, keep_tail: bool = True) -> None:
        assert actor.seq is not None
        began = actor.seq.began
        tail = self.tiers.close(actor.seq, keep_tail)
        if began:
            actor.tail = tail
        actor.seq = None

    def run(self, tokens: np.ndarray, tenant: str = "", decode: int = 0) -> Actor:
        """A whole request with everything in memory: open, prefill, decode, close."""
        actor = self.actor(tokens, tenant)
        self.turn(actor, decode)
        return actor

    def turn(self, actor: Actor, decode: int = 0) -> Sequence:
        """One request over what the transcript holds now; the last ``decode`` tokens decoded."""
        seq = self.open(actor)
        assert self.ready(actor)
        stop = len(actor.transcript) - decode
        if seq.position < stop:
            self.prefill(seq, stop)
        for _ in range(len(actor.transcript) - seq.position):
            self.decode(seq)
        self.close(actor)
        return seq

    # ------------------------------------------------------------ the runner's part
    def prefill(self, seq: Sequence, stop: int, commit: bool = True) -> None:
        """Tokens up to ``stop``, cut where the engine cuts.

        That is where a page's rows begin to be written, and at the last block boundary.

        commit False: give the chunk up just before its end.
        """
        while seq.position < stop:
            cuts = (seq.emit_from, stop // BLOCK_TOKENS * BLOCK_TOKENS, stop)
            cut = min(cut for cut in cuts if cut > seq.position)
            self._chunk(seq, cut)
            if not commit:
                return
            self.tiers.swap_tail(seq)
            self.tiers.commit(seq, cut, decoded=False)

    def _chunk(self, seq: Sequence, stop: int) -> None:
        tiers, first = self.tiers, seq.position
        tiers.begin_chunk(seq)
        tiers.extend(seq, stop)
        states = prefix_states(seq.transcript.tokens[:stop])
        begin = min(max(first, seq.emit_from), stop)
        numbers = torch.arange(begin // 4, stop // 4)
        place = C4Place(seq.mirror_pages, seq.device_pages, tiers.scratch_slot, stop // 4)
        for rank in range(C4_COUNT):
            rows = rows_of(states[3::4][begin // 4 : stop // 4], KIND_C4, rank)
            start = int(numbers[0]) if len(numbers) else stop // 4
            tiers.c4.store_prefilled(rank, place, start, rows, stop // 4)
        self._device_rows(seq, states, begin, stop)
        old, new = tiers.tails.slots[seq.tail_slot], tiers.tails.slots[tiers.scratch_slot]
        new.copy_(old)
        self._tail_rows(tiers.scratch_slot, states, first, stop)

    def decode(self, seq: Sequence) -> None:
        """One token in place."""
        tiers, position = self.tiers, seq.position
        tiers.extend(seq, position + 1)
        states = prefix_states(seq.transcript.tokens[: position + 1])
        closed = torch.tensor([position // 4 if position % 4 == 3 else -1])
        for rank in range(C4_COUNT):
            tiers.c4.store_decoded(rank, [seq.place], closed, rows_of(states[-1:], KIND_C4, rank))
        self._device_rows(seq, states, position, position + 1)
        self._tail_rows(seq.tail_slot, states, position, position + 1)
        tiers.commit(seq, position + 1, decoded=True)

    def _device_rows(self, seq: Sequence, states: np.ndarray, begin: int, stop: int) -> None:
        pages = seq.device_pages.long()
        numbers = torch.arange(begin // 4, stop // 4)
        ids = pages[numbers // 64] * 64 + numbers % 64
        for rank, keys in enumerate(self.tiers.memory.index_keys):
            keys.write(ids, rows_of(states[3::4][begin // 4 : stop // 4], KIND_INDEX, rank))
        numbers = torch.arange(begin // 128, stop // 128)
        ids = pages[numbers // 2] * 2 + numbers % 2
        rows = rows_of(states[127::128][begin // 128 : stop // 128], KIND_C128, 0)
        self.tiers.memory.c128[0].write(ids, rows)

    def _tail_rows(self, slot: int, states: np.ndarray, first: int, stop: int) -> None:
        tails = self.tiers.tails
        kept = np.arange(max(first, stop - WINDOW), stop)
        for layer, window in enumerate(tails.windows):
            ids = torch.from_numpy(slot * WINDOW + kept % WINDOW)
            window.write(ids, rows_of(states[kept], KIND_WINDOW, layer))
        for ring, length in self._rings():
            kept = np.arange(max(first, stop - length), stop)
            ring[slot, torch.from_numpy(kept % length)] = self._ring_rows(states[kept], ring)

    def _rings(self) -> list[tuple[Tensor, int]]:
        tails = self.tiers.tails
        rings = [*tails.c4_rings, *tails.index_rings, *tails.c128_rings]
        return [(ring, ring.shape[1]) for ring in rings]

    @staticmethod
    def _ring_rows(states: np.ndarray, ring: Tensor) -> Tensor:
        return rows_of(states, KIND_WINDOW, LAYERS, ring.shape[2])

    # ------------------------------------------------------------ what must be so
    def verify(self, actors: list[Actor], blocks: dict[bytes, np.ndarray], step: int) -> None:
        """Every byte that a table, a node, a point or a tail names is that of its own tokens.

        blocks: block hash to the states of all tokens up to its end. ``step``: of the hot set.
        """
        for key, node in self.tiers.tree.nodes.items():
            self._verify_node(node, blocks[key])
        for actor in actors:
            states = prefix_states(actor.transcript.tokens)
            if actor.seq is not None and actor.seq.began:
                self._verify_running(actor.seq, states, step)
            if actor.tail is not None and actor.tail.slot is not None:
                self._verify_tail(actor.tail.slot, states[: actor.tail.position], 0)
        self._verify_hot_rows()

    def _verify_node(self, node: Node, states: np.ndarray) -> None:
        memory, expected = self.tiers.memory, page_bytes(states[-BLOCK_TOKENS:])
        if node.mirror != NO_PAGE:
            assert memory.blob(node.mirror).numpy().tobytes() == expected, "a mirror page is wrong"
        if node.device != NO_PAGE:
            there = memory.device[node.device].numpy().tobytes()
            assert there == expected[PAGES.c4_bytes :], "a device page is wrong"
        if node.resume != NO_PAGE:
            self._verify_point(self.tiers.points.slot(node.resume), states)

    def _verify_point(self, point: Tensor, states: np.ndarray) -> None:
        slot = torch.zeros(1, TAIL.slot_bytes, dtype=torch.uint8)
        TAIL.restore(point, len(states), slot[0])
        for layer, window in enumerate(TAIL.window_rows(slot)):
            kept = np.arange(len(states) - WINDOW, len(states))
            there = window.read(torch.from_numpy(kept % WINDOW))
            assert torch.equal(there, rows_of(states[kept], KIND_WINDOW, layer)), "point: window"
        kept = np.arange(len(states) - 4, len(states))
        for sections in (TAIL.c4_rings, TAIL.index_rings):
            for ring in TAIL.rings(sections, slot):
                there = ring[0, torch.from_numpy(kept % 8)]
                assert torch.equal(there, self._ring_rows(states[kept], ring)), "point: overlap"

    def _verify_tail(self, slot: int, states: np.ndarray, lowest: int) -> None:
        count, tails = len(states), self.tiers.tails
        for layer, window in enumerate(tails.windows):
            kept = np.arange(max(lowest, count - WINDOW), count)
            there = window.read(torch.from_numpy(slot * WINDOW + kept % WINDOW))
            assert torch.equal(there, rows_of(states[kept], KIND_WINDOW, layer)), "tail: window"
        for ring, length in self._rings():
            back = count % 128 if length == 128 else count % 4 + 4
            kept = np.arange(max(lowest, count - back), count)
            there = ring[slot, torch.from_numpy(kept % length)]
            assert torch.equal(there, self._ring_rows(states[kept], ring)), "tail: ring"

    def _verify_running(self, seq: Sequence, states: np.ndarray, step: int) -> None:
        position = seq.position
        if position < seq.emit_from:
            return  # the window is being made again
        self._verify_tail(seq.tail_slot, states[:position], 0)
        self._verify_device(seq, states[:position])
        entries = torch.arange(position // 4)
        for rank in range(C4_COUNT):
            expected = rows_of(states[3::4][: position // 4], KIND_C4, rank)
            # As a step would: no more rows at once than the hot set can hold.
            for part in entries.split(64):
                rows, ids = self.tiers.c4.lookup(rank, [seq.place], part.unsqueeze(0), step)
                assert torch.equal(rows.read(ids[0]), expected[part]), "a C4 row is wrong"
                step += 1

    def _verify_device(self, seq: Sequence, states: np.ndarray) -> None:
        pages, numbers = seq.device_pages.long(), torch.arange(len(states) // 4)
        for rank, keys in enumerate(self.tiers.memory.index_keys):
            there = keys.read(pages[numbers // 64] * 64 + numbers % 64)
            assert torch.equal(there, rows_of(states[3::4], KIND_INDEX, rank)), "an index key"
        numbers = torch.arange(len(states) // 128)
        there = self.tiers.memory.c128[0].read(pages[numbers // 2] * 2 + numbers % 2)
        assert torch.equal(there, rows_of(states[127::128], KIND_C128, 0)), "a C128 row is wrong"

    def _verify_hot_rows(self) -> None:
        """A hot row of a page that is in the tree equals the mirror row that it is keyed by."""
        owner = getattr(self.tiers.c4, "owner", None)
        if owner is None:
            return
        mirrored = [node.mirror for node in self.tiers.tree.nodes.values()]
        for rank in range(C4_COUNT):
            slots = (owner[rank] >= 0).nonzero().flatten()
            rows = owner[rank][slots].long()
            known = torch.isin(rows // 64, torch.tensor(mirrored, dtype=torch.int64))
            hot = self.tiers.c4.rows[rank].read(slots[known])
            mirror = self.tiers.memory.mirror_c4[rank].read(rows[known])
            assert torch.equal(hot, mirror), "a hot row differs from its mirror row"
