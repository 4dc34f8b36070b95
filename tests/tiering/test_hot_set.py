"""The hot set against its plain twin: whatever is asked for, both give the same rows."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4_tierd.tiering.hot_set import C4Place, C4Rows, DirectRows, HotSet
from dsv4_tierd.tiering.mirror import PageMemory
from dsv4_tierd.tiering.sequence import page_table
from tiny_tiers import C4_COUNT, CPU, DIM, PAGES, tiny_plan

PAGES_MAX = 12


@dataclass(slots=True)
class Walker:
    """A session in both twins: its pages, its slot, how many entries it has."""

    pages: list[int]
    slot: int
    entries: int = 0
    tail_from: int = 0

    def place(self) -> C4Place:
        table = page_table(len(self.pages))
        table[:] = torch.tensor(self.pages)
        return C4Place(table, table, self.slot, self.tail_from)


class Twins:
    """Hot set and direct rows, each over its own memory, driven alike."""

    def __init__(self, seed: int, hot_rows: int = 128) -> None:
        plan = tiny_plan(mirror_pages=PAGES_MAX, hot_rows=hot_rows, tail_slots=3)
        self.memory = [PageMemory(PAGES, PAGES_MAX, 2, CPU) for _ in range(2)]
        self.hot = HotSet(self.memory[0], plan, CPU)
        self.both: list[C4Rows] = [self.hot, DirectRows(self.memory[1])]
        for page in range(PAGES_MAX):  # as they are taken the first time
            self.hot.forget_page(page)
        self.generator = torch.Generator().manual_seed(seed)
        self.step = 0

    def random_rows(self, count: int) -> Tensor:
        return torch.rand(count, DIM, generator=self.generator)

    def read(self, layer: int, places: list[C4Place], entries: Tensor) -> None:
        """Both twins give the same rows where an entry was asked for."""
        self.step += 1
        values = []
        for rows in self.both:
            pool, ids = rows.lookup(layer, places, entries, self.step)
            assert ((ids >= 0) == (entries >= 0)).all()
            values.append(pool.read(ids.clamp_min(0))[entries >= 0])
        assert torch.equal(values[0], values[1])

    def prefill_read(self, layer: int, place: C4Place, chosen: Tensor, count: int) -> None:
        values = []
        for rows in self.both:
            pool, ids = rows.prefill_lookup(layer, place, chosen, count)
            assert ((ids >= 0) == (chosen >= 0)).all()
            values.append(pool.read(ids.clamp_min(0))[chosen >= 0])
        assert torch.equal(values[0], values[1])

    def grow(self, walker: Walker, count: int) -> None:
        """Decode: one entry after another, a page flushed when it is full."""
        for _ in range(count):
            entry = walker.entries
            for layer in range(C4_COUNT):
                row = self.random_rows(1)
                for rows in self.both:
                    rows.store_decoded(layer, [walker.place()], torch.tensor([entry]), row)
            walker.entries += 1
            if walker.entries % 64 == 0:
                for rows in self.both:
                    rows.flush(walker.place(), walker.entries - 64, walker.entries)
                walker.tail_from = max(walker.tail_from, walker.entries - 64)

    def prefill(self, walker: Walker, count: int) -> None:
        """A chunk of ``count`` entries, written through."""
        first, end = walker.entries, walker.entries + count
        for rows in self.both:
            if walker.entries % 64:
                rows.flush(walker.place(), first - first % 64, first)
        for layer in range(C4_COUNT):
            new = self.random_rows(count)
            pages = walker.place().mirror_pages
            place = C4Place(pages, pages, walker.slot, end)
            for rows in self.both:
                rows.store_prefilled(layer, place, first, new, end)
        walker.entries, walker.tail_from = end, end - end % 64


def choose(draw: random.Random, walker: Walker, count: int) -> list[int]:
    """Entries to ask for, some twice, some of nothing."""
    return [draw.randrange(-1, walker.entries) if walker.entries else -1 for _ in range(count)]


@pytest.mark.parametrize("seed", range(6))
def test_any_history_reads_as_the_direct_rows_do(seed: int) -> None:
    """Two sessions that share pages, decode, prefill and page reuse: the same rows from both."""
    draw, twins = random.Random(seed), Twins(seed)
    order = draw.sample(range(PAGES_MAX), PAGES_MAX)
    walkers = [Walker(order[:6], 0), Walker(order[6:], 1)]
    for _ in range(120):
        walker = draw.choice(walkers)
        room = 6 * 64 - walker.entries
        action = draw.randrange(6)
        if action == 0 and room:
            twins.grow(walker, min(room, draw.randrange(1, 40)))
        elif action == 1 and room:
            twins.prefill(walker, min(room, draw.randrange(1, 100)))
        elif action == 2 and walker.entries == 6 * 64:
            _start_again(twins, walker)
        else:
            entries = torch.tensor([choose(draw, each, 32) for each in walkers])
            places = [each.place() for each in walkers]
            twins.read(draw.randrange(C4_COUNT), places, entries)
        _check_inverse(twins.hot)
    assert twins.hot.counters.misses > 150 and twins.hot.counters.hits > 0


def _start_again(twins: Twins, walker: Walker) -> None:
    """The session's pages get other content, under the same numbers."""
    for page in walker.pages:
        for rows in twins.both:
            rows.forget_page(page)
    walker.entries = walker.tail_from = 0
    twins.prefill(walker, 200)


def _check_inverse(hot: HotSet) -> None:
    for layer in range(C4_COUNT):
        for slot, row in enumerate(hot.owner[layer].tolist()):
            assert row < 0 or hot.residency[layer, row] == slot


def test_a_page_with_new_content_is_fetched_anew() -> None:
    """Rows of the page's former life are not hits, in any layer."""
    twins, walker = Twins(3), Walker([4, 7], 0)
    twins.prefill(walker, 128)
    asked = torch.arange(64).unsqueeze(0)
    for layer in range(C4_COUNT):
        twins.read(layer, [walker.place()], asked)
    for rows in twins.both:
        rows.forget_page(4)
    again = Walker([4, 7], 0)
    twins.prefill(again, 128)
    before = twins.hot.counters.misses
    for layer in range(C4_COUNT):
        twins.read(layer, [again.place()], asked)
    assert twins.hot.counters.misses == before + 64 * C4_COUNT


def test_sessions_on_one_prefix_share_hot_rows() -> None:
    """The second session's choice of the same pages is all hits, and copied once if together."""
    twins = Twins(5)
    first = Walker([2, 3], 0)
    twins.prefill(first, 128)
    second = Walker([2, 3], 1, 128, 128)
    asked = torch.arange(32).repeat(2, 1)
    twins.read(0, [first.place(), second.place()], asked)
    assert (twins.hot.counters.misses, twins.hot.counters.hits) == (32, 0)
    twins.read(0, [second.place()], asked[:1])
    assert (twins.hot.counters.misses, twins.hot.counters.hits) == (32, 32)
    assert twins.hot.counters.bytes_fetched == 32 * PAGES.latent.row_bytes


def test_a_page_is_flushed_whole_and_its_tail_loaded_back() -> None:
    """Tail rows of an unfinished page survive a flush and a load into another slot."""
    twins, walker = Twins(6), Walker([1, 5], 0)
    twins.grow(walker, 64 + 17)
    twins.hot.flush(walker.place(), 64, 81)
    moved = Walker([1, 5], 2, 81, 64)
    twins.hot.load_tail(moved.place(), 64, 81)
    twins.read(1, [moved.place()], torch.arange(81).unsqueeze(0))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_prefill_streams_or_reads_and_gives_the_same_rows(queries: int, count: int) -> None:
    """Both ways of a chunk, whole layers and single rows, equal the mirror."""
    twins, walker, draw = Twins(7), Walker([9, 0, 3, 6], 0), random.Random(count)
    twins.prefill(walker, count)
    chosen = torch.tensor([choose(draw, walker, 16) for _ in range(queries)])
    twins.prefill_read(0, walker.place(), chosen, count)
    pool, ids = twins.hot._read_chosen(1, walker.place(), chosen)
    direct, direct_ids = twins.both[1].prefill_lookup(1, walker.place(), chosen, count)
    there = chosen >= 0
    assert torch.equal(pool.read(ids[there]), direct.read(direct_ids[there]))


def test_a_short_append_may_choose_every_row_of_the_longest_session() -> None:
    """Staging has room for all rows, and padding takes none."""
    twins = Twins(9)
    full = tiny_plan().staging_rows
    walker = Walker(list(range(8)), 0)
    twins.prefill(walker, full)
    chosen = torch.cat([torch.tensor([-1]), torch.arange(full)]).unsqueeze(0)
    pool, ids = twins.hot._read_chosen(0, walker.place(), chosen)
    assert int(ids.max()) < pool.row_count and int(ids[0, 0]) == -1
    expected, expected_ids = twins.both[1].lookup(0, [walker.place()], chosen, 1)
    assert torch.equal(pool.read(ids[0, 1:]), expected.read(expected_ids[0, 1:]))
