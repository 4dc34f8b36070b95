"""Plan + swap-in on the GPU: the tables, slots and bytes that the twin's contract asks for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4_tierd.kernels import swap_in as op
from dsv4_tierd.kernels.layout import RowFormat, RowKind, Rows, Section

DEVICE = torch.device("cuda")
LATENT = RowFormat(RowKind.FP8, 512, 64)
Poison = Callable[[Tensor], Tensor]


def _random_pool(fmt: RowFormat, pages: int, rows_per_page: int, pitch_extra: int = 0) -> Rows:
    """Pinned pages of random bytes, rows not used are as random as the others."""
    section = Section(fmt, rows_per_page, 64)
    memory = torch.randint(
        0, 256, (pages, section.offset + section.bytes + pitch_extra), dtype=torch.uint8
    )
    return section.view(memory.pin_memory())


class World:
    """A mirror, a hot set, and the naive account of what a step must do to them."""

    def __init__(
        self,
        pages: int,
        slot_count: int,
        fmt: RowFormat = LATENT,
        mirror_rows: int = 64,
        hot_rows: int = 64,
    ):
        self.mirror = _random_pool(fmt, pages, mirror_rows, 48)
        section = Section(fmt, hot_rows, 0)
        memory = torch.full(
            (-(-slot_count // hot_rows), section.bytes), 0xFF, dtype=torch.uint8, device=DEVICE
        )
        count = self.mirror.row_count
        self.hot = op.HotSet(
            section.view(memory),
            torch.full((count,), -1, dtype=torch.int32, device=DEVICE),
            torch.full((slot_count,), -1, dtype=torch.int32, device=DEVICE),
            torch.full((slot_count,), -1, dtype=torch.int32, device=DEVICE),
        )
        self.counters = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        self.step = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def swap_in(self, rows: Tensor, cluster: int = 8) -> Tensor:
        """One step, checked against the state before it; returns the slots."""
        hot, self.step[0] = self.hot, int(self.step) + 1
        residency, owner, before = hot.residency.cpu(), hot.owner.cpu(), self.counters.cpu()
        stamp = hot.stamp.cpu()
        slots = torch.full_like(rows, -99)
        op.swap_in(rows, hot, self.mirror, self.step, slots, self.counters, cluster=cluster)
        self.check()
        chosen, given = rows.cpu().flatten(), slots.cpu().flatten().long()
        assert bool((given[chosen < 0] == -1).all()), "padding got a slot"
        valid, given = chosen[chosen >= 0].long(), given[chosen >= 0]
        assert bool((hot.owner.cpu()[given] == valid).all()), "a slot does not hold its row"
        assert bool((hot.stamp.cpu()[given] == int(self.step)).all()), "a used slot is not stamped"
        distinct = torch.unique(valid)
        was = residency[distinct].long()
        found = int((was >= 0).sum())
        assert (self.counters.cpu() - before).tolist() == [found, distinct.numel() - found]
        moved = hot.residency.cpu()[distinct[was >= 0]].long() != was[was >= 0]
        assert not bool(moved.any()), "a row that was there moved"
        taken = hot.residency.cpu()[distinct[was < 0]].long()
        assert taken.unique().numel() == taken.numel(), "two rows share a slot"
        gone = owner[taken]
        assert not bool(torch.isin(gone[gone >= 0], distinct.int()).any()), (
            "a row of this step was evicted"
        )
        untouched = torch.ones_like(owner, dtype=torch.bool)
        untouched[given] = False
        assert torch.equal(hot.owner.cpu()[untouched], owner[untouched])
        assert torch.equal(hot.stamp.cpu()[untouched], stamp[untouched])
        return slots

    def check(self) -> None:
        """Tables are each other's inverse, and every owned slot holds its row's bytes."""
        hot = self.hot
        owner, residency = hot.owner.cpu().long(), hot.residency.cpu().long()
        slots = (owner >= 0).nonzero().flatten()
        assert torch.equal(residency[owner[slots]], slots)
        assert int((residency >= 0).sum()) == slots.numel()
        assert int(residency.min()) >= -1, "a claim was left behind"
        rows = owner[slots]
        for part in ("data", "scale"):
            here, there = getattr(hot.rows, part), getattr(self.mirror, part)
            if there is None:
                continue
            have = here.cpu()[slots // hot.rows.rows_per_page, slots % hot.rows.rows_per_page]
            want = there[rows // self.mirror.rows_per_page, rows % self.mirror.rows_per_page]
            same = have.view(torch.uint8) == want.contiguous().view(torch.uint8)
            assert bool(same.all()), (
                f"{part} of {int((~same.flatten(1).all(1)).sum())} rows differs"
            )


def _choose(batch: int, k: int, count: int, rng: torch.Generator) -> Tensor:
    picks = [torch.randperm(count, generator=rng, device=DEVICE)[:k] for _ in range(batch)]
    return torch.stack(picks).sort(-1).values.to(torch.int32)


@pytest.mark.parametrize(
    ("batch", "k"), [(1, 512), (8, 512), (32, 512), (3, 2048), (5, 1), (2, 511)]
)
@pytest.mark.parametrize("cluster", [1, 8, 16])
def test_steps_of_random_choices(batch: int, k: int, cluster: int, rng: torch.Generator) -> None:
    """Ten steps over a mirror several times the hot set: hits, misses and evictions in each."""
    if batch * k > 8192 * cluster:
        pytest.skip("more rows than the cluster takes")
    slot_count = max(8, -(-2 * batch * k // 8) * 8)
    world = World(max(4, 6 * slot_count // 64 // 4), slot_count)
    for _ in range(10):
        world.swap_in(
            _choose(batch, min(k, world.mirror.row_count), world.mirror.row_count, rng), cluster
        )


def test_slots_are_exactly_enough(rng: torch.Generator) -> None:
    """Twice as many slots as rows, every step all new rows: a victim is found each time."""
    world = World(256, 2 * 1024)
    for step in range(12):
        first = step * 1024 % (world.mirror.row_count - 1024)
        rows = torch.arange(first, first + 1024, dtype=torch.int32, device=DEVICE)
        world.swap_in(rows[torch.randperm(1024, generator=rng, device=DEVICE)].view(2, 512))


def test_sessions_that_choose_alike_fetch_once(rng: torch.Generator) -> None:
    """32 sessions with one choice: as many misses as one of them has."""
    world = World(512, 2 * 32 * 512)
    rows = _choose(1, 512, world.mirror.row_count, rng).expand(32, 512).contiguous()
    slots = world.swap_in(rows)
    assert world.counters.tolist() == [0, 512]
    assert bool((slots == slots[0]).all())
    world.swap_in(rows)
    assert world.counters.tolist() == [512, 512]


def test_padding_and_drafts(rng: torch.Generator) -> None:
    """-1 anywhere stays -1, for drafts of three tokens a session too; all padding is a no-op."""
    world = World(64, 4096)
    rows = _choose(6, 300, world.mirror.row_count, rng)
    rows[torch.rand(rows.shape, generator=rng, device=DEVICE) < 0.4] = -1
    world.swap_in(rows.view(2, 3, 300))
    world.swap_in(torch.full((2, 3, 300), -1, dtype=torch.int32, device=DEVICE))


def test_a_step_keeps_its_own_rows_and_evicts_the_oldest() -> None:
    """Rows used each step survive while others pass through; evicted slots are old ones."""
    world = World(512, 4096)
    kept = torch.arange(512, dtype=torch.int32, device=DEVICE)
    world.swap_in(kept.view(1, -1))
    for step in range(20):
        first = 512 + step * 512
        rows = torch.stack(
            [kept, torch.arange(first, first + 512, dtype=torch.int32, device=DEVICE)]
        )
        world.swap_in(rows)
    assert world.counters.tolist() == [512 * 20, 512 * 21]


@pytest.mark.parametrize(
    ("fmt", "mirror_rows", "hot_rows"),
    [
        (LATENT, 61, 69),
        (RowFormat(RowKind.BF16, 512), 64, 64),
        (RowFormat(RowKind.FP32, 64), 3, 64),
        (RowFormat(RowKind.KEY_FP8, 128), 64, 5),
    ],
)
def test_other_rows_and_odd_pages(
    fmt: RowFormat, mirror_rows: int, hot_rows: int, rng: torch.Generator
) -> None:
    """Any row format, any rows a page on either side."""
    world = World(-(-4096 // mirror_rows), 2048, fmt, mirror_rows, hot_rows)
    for _ in range(4):
        world.swap_in(_choose(2, 512, world.mirror.row_count, rng))


def test_evicted_rows_are_fetched_again(rng: torch.Generator) -> None:
    """After evict_rows a row misses, and its slot is among the free ones."""
    world = World(64, 2048)
    rows = _choose(1, 512, world.mirror.row_count, rng)
    world.swap_in(rows)
    gone = torch.cat([rows[0, ::2], torch.full((3,), -1, dtype=torch.int32, device=DEVICE)])
    world.mirror.data.random_(0, 256)
    op.evict_rows(rows[0], world.hot)
    assert int((world.hot.owner >= 0).sum()) == 0 and int(world.hot.stamp.max()) == -1
    world.swap_in(rows)
    op.evict_rows(gone, world.hot)
    world.check()
    world.swap_in(rows)
    assert world.counters.tolist() == [256, 512 + 512 + 256]


def test_a_captured_graph_reads_the_step_and_rows_of_now(rng: torch.Generator) -> None:
    """A replay plans with the rows, tables and step that are there then."""
    world = World(256, 4096)
    rows, slots = (
        _choose(2, 512, world.mirror.row_count, rng),
        torch.empty(2, 512, dtype=torch.int32, device=DEVICE),
    )
    world.swap_in(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.swap_in(rows, world.hot, world.mirror, world.step, slots, world.counters)
    for _ in range(5):
        rows.copy_(_choose(2, 512, world.mirror.row_count, rng))
        world.step += 1
        graph.replay()
        world.check()
        assert torch.equal(world.hot.owner[slots.long()], rows)
