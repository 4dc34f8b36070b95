"""Watches an engine from inside, and makes its memory as unlucky as it may be."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from dsv4_tierd.engine.runner import Chunk
from dsv4_tierd.kernels.layout import Rows
from dsv4_tierd.tiering.hot_set import HotSet
from dsv4_tierd.tiering.pages import PagePool
from dsv4_tierd.tiering.plan import TAIL_C4_ROWS
from dsv4_tierd.tiering.sequence import Sequence
from world import World


class Probe:
    """Logits of a world's requests, by request and position, and where its chunks were cut.

    ``rows[request][p]``: [vocab] fp32, what the engine thinks of the token after token ``p``.
    ``chunks[request]``: (first, stop) of every chunk of prefill. ``decoded``: decode steps' rows.
    """

    def __init__(self, world: World) -> None:
        self.rows: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self.chunks: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.decoded: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self._engine, runner = world.engine, world.engine.runner
        self._finish, self._decode = runner.finish, runner.decode
        runner.finish, runner.decode = self.finish, self.decode  # type: ignore[method-assign]

    def finish(self, chunk: Chunk, want_logits: bool) -> Tensor | None:
        name, first = self._name(chunk.seq), chunk.seq.position
        logits = self._finish(chunk, want_logits)
        with torch.no_grad():
            every = self._engine.runner.model.logits(chunk.x)
        # The last row as the engine itself computes it: its bits are what is drawn from.
        self.rows[name] |= dict(zip(range(chunk.first, chunk.stop), every, strict=True))
        if logits is not None:
            self.rows[name][chunk.stop - 1] = logits
        self.chunks[name].append((first, chunk.stop))
        return logits

    def decode(self, seqs: Seq[Sequence]) -> Tensor:
        places = [(self._name(seq), seq.position) for seq in seqs]
        logits = self._decode(seqs)
        for (name, position), row in zip(places, logits, strict=True):
            self.rows[name][position] = self.decoded[name][position] = row.clone()
        return logits

    def table(self, name: str, first: int, stop: int) -> Tensor:
        """[stop - first, vocab]: a request's logits at these positions; it computed them all."""
        return torch.stack([self.rows[name][position] for position in range(first, stop)])

    def _name(self, seq: Sequence) -> str:
        return next(r.id for r in self._engine.scheduler.running if r.seq is seq)


def make_hostile(world: World, seed: int) -> None:
    """Nothing is right by luck in a new world: free memory is NaN, places are dealt at random.

    Mirror and device pages are dealt in different orders, so a number of one pool means nothing
    in the other. What is freed becomes NaN again.
    """
    tiers, draw = world.tiers, random.Random(seed)
    for memory in (tiers.memory.mirror, tiers.memory.device, tiers.tails.slots, tiers.points.slots):
        memory.fill_(0xFF)  # all ones is a NaN in every row format
    if isinstance(tiers.c4, HotSet):
        for pool in (*tiers.c4.rows, *tiers.c4._staging):
            _spoil(pool, slice(None))
    for pages, memory in (
        (tiers.mirror_pool, tiers.memory.mirror),
        (tiers.device_pool, tiers.memory.device),
    ):
        _deal_at_random(pages, random.Random(draw.random()))
        _spoil_when_freed(pages, memory)
    draw.shuffle(tiers.tails.free_slots())
    draw.shuffle(tiers.points.free_slots())
    _spoil_tails(world)


def _spoil(rows: Rows, pages: slice) -> None:
    rows.data[pages].fill_(0xFF if rows.data.dtype is torch.uint8 else float("nan"))
    if rows.scale is not None:
        rows.scale[pages].fill_(0xFF)


def _spoil_when_freed(pool: PagePool, memory: Tensor) -> None:
    free = pool.free

    def freed(page: int) -> None:
        free(page)
        memory[page].fill_(0xFF)

    pool.free = freed  # type: ignore[method-assign]


def _spoil_tails(world: World) -> None:
    """Freed tail slots, and the scratch slot after each chunk, with their C4 rows."""
    tiers, free, swap = world.tiers, world.tiers.tails.free, world.tiers.swap_tail

    def spoil(slot: int) -> None:
        tiers.tails.slots[slot].fill_(0xFF)
        if isinstance(tiers.c4, HotSet):
            for rows in tiers.c4.rows:
                first = tiers.c4._tail_base(slot) // rows.rows_per_page
                _spoil(rows, slice(first, first + TAIL_C4_ROWS // rows.rows_per_page))

    def freed(slot: int) -> None:
        free(slot)
        spoil(slot)

    def swapped(seq: Sequence) -> None:
        swap(seq)
        spoil(tiers.scratch_slot)

    tiers.tails.free, tiers.swap_tail = freed, swapped  # type: ignore[method-assign]


def _deal_at_random(pool: PagePool, draw: random.Random) -> None:
    """Make every later ``take`` hand out a random free page."""
    take, free = pool.take, pool._free

    def taken() -> int:
        if free:
            # The pool pops its first entry; any order is a valid set of free pages.
            at = draw.randrange(len(free))
            free[0], free[at] = free[at], free[0]
        return take()

    pool.take = taken  # type: ignore[method-assign]


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest |a - b|; infinite if either holds a NaN."""
    difference = (a - b).abs().max()
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")


def record_choices(world: World) -> list[Tensor]:
    """Every [rows, top-k] choice of C4 entries from now on, in order of layers and steps."""
    rows, choices = world.tiers.c4, []
    lookup, prefill_lookup = rows.lookup, rows.prefill_lookup

    def decoded(layer, places, entries, step):  # type: ignore[no-untyped-def]
        choices.append(entries.clone())
        return lookup(layer, places, entries, step)

    def prefilled(layer, place, chosen, count):  # type: ignore[no-untyped-def]
        choices.append(chosen.clone())
        return prefill_lookup(layer, place, chosen, count)

    rows.lookup, rows.prefill_lookup = decoded, prefilled  # type: ignore[method-assign]
    return choices


def miss_every_row(world: World) -> None:
    """Empty the hot set before every lookup, so that each row is fetched each time it is chosen."""
    rows, lookup = world.tiers.c4, world.tiers.c4.lookup

    def missed(layer, places, entries, step):  # type: ignore[no-untyped-def]
        for page in range(world.tiers.mirror_pool.capacity):
            if bool((rows.residency[:, page * 64 : page * 64 + 64] >= 0).any()):
                rows.forget_page(page)
        return lookup(layer, places, entries, step)

    rows.lookup = missed  # type: ignore[method-assign]
