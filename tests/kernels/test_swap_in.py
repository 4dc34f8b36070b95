"""Swap-in plans against a naive least-recently-used list."""

from __future__ import annotations

import pytest
import torch

import naive_ops
from dsv4_tierd.kernels.layout import RowFormat, RowKind
from dsv4_tierd.kernels.ref.swap_in import evict_rows, plan_swap_in, swap_in


def state(mirror_rows: int, slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    empty = torch.full((slots,), -1, dtype=torch.int32)
    return torch.full((mirror_rows,), -1, dtype=torch.int32), empty, empty.clone()


@pytest.mark.parametrize("slots", [24, 61, 200])
def test_follows_a_naive_list(rng: torch.Generator, slots: int) -> None:
    """Fifty steps with shared rows, padding and evictions leave the state of the naive list."""
    residency, owner, stamp = state(100, slots)
    naive = residency.tolist(), owner.tolist(), stamp.tolist()
    for step in range(50):
        rows = torch.randint(-3, 100, (3, 8), generator=rng).clamp_min(-1)
        chosen = {row for row in rows.flatten().tolist() if row >= 0}
        resident = {row for row in chosen if naive[0][row] >= 0}
        plan = plan_swap_in(rows, residency, owner, stamp, step)
        slots_expected, copied = naive_ops.lru_plan(rows.tolist(), *naive, step)
        assert plan.slots.tolist() == slots_expected
        assert dict(zip(plan.miss_rows.tolist(), plan.miss_slots.tolist(), strict=True)) == copied
        assert (plan.hits, plan.misses) == (len(resident), len(copied))
        if step % 7 == 3:
            gone = torch.randperm(100, generator=rng)[:20]
            evict_rows(gone, residency, owner, stamp)
            for row in gone.tolist():
                if (slot := naive[0][row]) >= 0:
                    naive[0][row], naive[1][slot], naive[2][slot] = -1, -1, -1
        assert (residency.tolist(), owner.tolist(), stamp.tolist()) == naive


@pytest.mark.parametrize("kind", [RowKind.FP32, RowKind.FP8])
def test_every_chosen_row_is_there_after_the_copy(rng: torch.Generator, kind: RowKind) -> None:
    """Hot rows have the mirror's bytes for every request, hit or miss, at odd page sizes."""
    fmt = RowFormat(kind, 80, 16)
    mirror, hot = naive_ops.nan_pool(fmt, 122, 61), naive_ops.nan_pool(fmt, 40, 8)
    mirror.write(torch.arange(122), torch.randn(122, 80, generator=rng))
    residency, owner, stamp = state(122, 40)
    for step in range(10):
        rows = torch.randint(-1, 122, (2, 15), generator=rng)
        plan = plan_swap_in(rows, residency, owner, stamp, step)
        swap_in(plan, hot, mirror)
        live = rows >= 0
        assert torch.equal(hot.read(plan.slots[live]), mirror.read(rows[live]))


def test_no_slot_of_this_step_is_a_victim() -> None:
    """Two plans of one step never take each other's slots; when none is left, it is an error."""
    residency, owner, stamp = state(50, 6)
    first = plan_swap_in(torch.tensor([[0, 1, 2]]), residency, owner, stamp, 5)
    second = plan_swap_in(torch.tensor([[3, 4, 1]]), residency, owner, stamp, 5)
    assert not set(first.miss_slots.tolist()) & set(second.miss_slots.tolist())
    before = residency.clone(), owner.clone(), stamp.clone()
    with pytest.raises(AssertionError, match="2 rows to swap in, 1 of 6 slots"):
        plan_swap_in(torch.tensor([[10, 11]]), residency, owner, stamp, 5)
    assert all(torch.equal(a, b) for a, b in zip(before, (residency, owner, stamp), strict=True))
    plan_swap_in(torch.tensor([[10, 11]]), residency, owner, stamp, 6)


def test_an_evicted_row_comes_back_with_new_content() -> None:
    """After evict_rows a mirror row is copied again, so its new bytes are the ones read."""
    fmt = RowFormat(RowKind.FP32, 8, 4)
    mirror, hot = naive_ops.nan_pool(fmt, 8, 8), naive_ops.nan_pool(fmt, 4, 4)
    residency, owner, stamp = state(8, 4)
    for step in range(2):
        mirror.write(torch.tensor([3]), torch.full((1, 8), float(step)))
        plan = plan_swap_in(torch.tensor([[3]]), residency, owner, stamp, step)
        swap_in(plan, hot, mirror)
        assert hot.read(plan.slots)[0, 0, 0] == step
        evict_rows(torch.tensor([3, 5]), residency, owner, stamp)
        assert residency.tolist() == [-1] * 8 and owner.tolist() == stamp.tolist() == [-1] * 4


def test_nothing_chosen() -> None:
    """A batch of padding is an empty plan."""
    residency, owner, stamp = state(5, 2)
    plan = plan_swap_in(torch.full((3, 4), -1), residency, owner, stamp, 0)
    assert plan.hits == plan.misses == 0 and plan.slots.tolist() == [[-1] * 4] * 3
    swap_in(plan, *(naive_ops.nan_pool(RowFormat(RowKind.FP32, 8, 4), 4, 4),) * 2)
