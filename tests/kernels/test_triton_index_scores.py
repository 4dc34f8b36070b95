"""The Triton kernels of the index scan, interpreted at tiny sizes, equal their twin."""

from __future__ import annotations

import numpy as np
import torch

from dsv4_tierd.kernels import index_scores as op
from interpreted import needs_triton, run_interpreted

SCRIPT = """
import torch
from dsv4_tierd.kernels import index_scores as op
from dsv4_tierd.kernels.layout import RowFormat, RowKind, row_pool
from dsv4_tierd.kernels.ref import index_scores as ref

torch.manual_seed(7)
cpu = torch.device("cpu")
keys = row_pool(RowFormat(RowKind.KEY_FP8, 128), 640, 64, cpu)
keys.write(torch.arange(640), torch.randn(640, 128))
keys.data[9], keys.scale[9] = 0xFF, 0xFF
table = torch.tensor([[3, 1, 4], [3, 1, 5], [3, -1, -1]], dtype=torch.int32)
visible = torch.tensor([192, 130, 1], dtype=torch.int32)
q = op.Queries(
    torch.randn(3, 8, 128).to(torch.float8_e4m3fn), torch.randn(3, 8)
)
codes = q.codes.float()

def same(got, want):
    seen = want > -torch.inf
    assert torch.equal(got > -torch.inf, seen)
    assert ((got - want)[seen].abs().max() / want[seen].abs().max()).item() < 1e-5

want = ref.index_scores_decode(codes, q.gates, keys, table, visible)
plan = op.new_plan(3, 3, cpu)
op.fill_plan(plan, table.numpy(), 64)
same(op.index_scores_decode(q, None, keys, table, visible), want)
same(op.index_scores_decode(q, None, keys, table, visible, plan=plan), want)
pages = torch.tensor([7, 2, 0, 9], dtype=torch.int32)
visible = torch.tensor([0, 65, 192], dtype=torch.int32)
same(
    op.index_scores(q, None, keys, pages, visible),
    ref.index_scores(codes, q.gates, keys, pages, visible),
)
"""


@needs_triton
def test_decode_and_prefill_equal_the_twin() -> None:
    """Alone, on a shared scan, and in prefill; pages past the last visible entry are NaN."""
    run_interpreted(SCRIPT)


def test_a_plan_is_the_sessions_prefix_tree() -> None:
    """Each run of columns that the same sessions share stands once, with its sessions."""
    table = np.array([[3, 1, 4, -1], [3, 1, 5, 6], [3, 1, 5, 7], [8, -1, -1, -1]], np.int32)
    plan = op.new_plan(4, 4, torch.device("cpu"))
    op.fill_plan(plan, table, 64)
    found = set()
    for first, end, begin, last in plan.segments.tolist():
        if end > first:
            found.add((first, end, tuple(plan.members[begin:last].tolist())))
    assert found == {
        (0, 2, (0, 1, 2)),
        (2, 3, (0,)),
        (2, 3, (1, 2)),
        (3, 4, (1,)),
        (3, 4, (2,)),
        (0, 1, (3,)),
    }


def test_a_plan_fits_its_buffers_on_the_worst_tree() -> None:
    """A comb, in which every column parts one session from the rest, needs the most room."""
    batch = 9
    table = np.full((batch, batch), -1, np.int32)
    for row in range(batch):
        table[row, : row + 1] = np.arange(row + 1)
        table[row, row] = 100 + row
    plan = op.new_plan(batch, batch, torch.device("cpu"))
    op.fill_plan(plan, table, 64)
    covered = np.zeros((batch, batch), np.int64)
    for first, end, begin, last in plan.segments.tolist():
        for row in plan.members[begin:last].tolist():
            covered[row, first:end] += 1
    assert (covered == (table >= 0)).all()
