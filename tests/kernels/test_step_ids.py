"""The ids of a decode step, and what is taken from a tail; kernels against twins."""

from __future__ import annotations

import textwrap

import pytest
import torch

from dsv4_tierd.kernels.layout import RowFormat, RowKind, row_pool
from dsv4_tierd.kernels.step_ids import StepIds, fetch_rows, join_tail, leave_tail, step_ids
from interpreted import needs_triton, run_interpreted

CPU = torch.device("cpu")


def test_ids_name_what_a_token_reads_and_writes() -> None:
    """Window, own rows and closed groups of two tokens, counted by hand."""
    pages = torch.tensor([[7, -1, -1], [3, 9, 4]], dtype=torch.int32)
    out = StepIds.empty(2, 4, 3, CPU)
    positions = torch.tensor([2, 600], dtype=torch.int32)
    step_ids(positions, torch.tensor([1, 5], dtype=torch.int32), pages, out)
    assert out.window.tolist() == [[-1, 4, 5, 6], [21, 22, 23, 20]]
    assert out.own.tolist() == [6, 20]
    assert out.c4.tolist() == [7 * 64, 4 * 64 + 22]
    assert out.c128.tolist() == [14, 8]
    assert out.c128_all.tolist() == [[-1] * 6, [6, 7, 18, 19, -1, -1]]
    assert out.visible.tolist() == [0, 150]


def test_rows_in_a_tail_are_not_swapped_in() -> None:
    """Entries from tail_from on leave the swap-in and come back as the tail's rows."""
    ids = torch.tensor([[3, 130, 140, -1]], dtype=torch.int32)
    rows = torch.tensor([[67, 200, 210, -1]], dtype=torch.int32)
    begin = torch.tensor([128], dtype=torch.int32)
    leave_tail(ids, rows, begin)
    assert rows.tolist() == [[67, -1, -1, -1]]
    slots = torch.tensor([[11, -1, -1, -1]], dtype=torch.int32)
    join_tail(ids, slots, begin, torch.tensor([2], dtype=torch.int32), 640, 128)
    assert slots.tolist() == [[11, 640 + 256 + 2, 640 + 256 + 12, -1]]


def test_wanted_rows_are_fetched_to_their_place(rng: torch.Generator) -> None:
    """A wanted entry has its mirror row's bytes; another keeps what was there."""
    fmt = RowFormat(RowKind.FP8, 512, 64)
    mirror, staged = row_pool(fmt, 5 * 64, 64, CPU), row_pool(fmt, 2 * 64, 64, CPU)
    mirror.write(torch.arange(320), torch.randn(320, 512, generator=rng))
    wanted = torch.rand(100, generator=rng) < 0.3
    fetch_rows(wanted, torch.tensor([4, 1], dtype=torch.int32), mirror, staged)
    order = torch.cat([torch.arange(256, 320), torch.arange(64, 128)])[:100]
    expected = torch.where(wanted.unsqueeze(1), mirror.read(order), 0.0)
    assert torch.equal(staged.read(torch.arange(100)), expected)


def test_wrong_arguments_are_refused_by_name() -> None:
    """A table of another width, or staging that is too short, raises ValueError."""
    out = StepIds.empty(1, 4, 2, CPU)
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="c128_all"):
        step_ids(one, one, torch.zeros(1, 3, dtype=torch.int32), out)
    rows = row_pool(RowFormat(RowKind.FP8, 512, 64), 64, 64, CPU)
    with pytest.raises(ValueError, match="staged rows"):
        fetch_rows(torch.ones(65, dtype=torch.bool), torch.zeros(2, dtype=torch.int32), rows, rows)


@needs_triton
def test_kernels_equal_their_twins() -> None:
    """Every id and every byte, in Triton's interpreter."""
    run_interpreted(
        textwrap.dedent("""
        import torch
        from dsv4_tierd.kernels import step_ids as ops
        from dsv4_tierd.kernels.layout import RowFormat, RowKind, row_pool
        from dsv4_tierd.kernels.ref import step_ids as ref

        torch.manual_seed(0)
        cpu, i32 = torch.device("cpu"), torch.int32
        for columns in (1, 2, 300):
            positions = torch.tensor([0, 3, 127, 128, 256 * columns - 1], dtype=i32)
            positions = positions.clamp_max(256 * columns - 1)
            slots = torch.randperm(5).to(i32)
            pages = torch.randint(0, 900, (5, columns)).to(i32)
            got, want = (ops.StepIds.empty(5, 128, columns, cpu) for _ in range(2))
            ops.step_ids(positions, slots, pages, got)
            ref.step_ids(positions, slots, pages, want)
            for name in ("window", "own", "c4", "c128", "c128_all", "visible"):
                assert torch.equal(getattr(got, name), getattr(want, name)), (columns, name)
        ids = torch.randint(-1, 900, (3, 300)).to(i32)
        begin = torch.tensor([0, 450, 900], dtype=i32)
        rows, twin = (torch.arange(900).view(3, 300).to(i32) for _ in range(2))
        ops.leave_tail(ids, rows, begin)
        ref.leave_tail(ids, twin, begin)
        assert torch.equal(rows, twin)
        ops.join_tail(ids, rows, begin, begin // 450, 640, 128)
        ref.join_tail(ids, twin, begin, begin // 450, 640, 128)
        assert torch.equal(rows, twin)
        fmt = RowFormat(RowKind.FP8, 512, 64)
        mirror = row_pool(fmt, 320, 64, cpu)
        mirror.write(torch.arange(320), torch.randn(320, 512))
        got, want = (row_pool(fmt, 128, 64, cpu) for _ in range(2))
        wanted, table = torch.rand(100) < 0.3, torch.tensor([4, 1], dtype=i32)
        ops.fetch_rows(wanted, table, mirror, got)
        ref.fetch_rows(wanted, table, mirror, want)
        assert torch.equal(got.data, want.data) and torch.equal(got.scale, want.scale)
        """)
    )
