"""The Triton kernels of sparse attention, interpreted at tiny sizes, equal their twin."""

from __future__ import annotations

from interpreted import needs_triton, run_interpreted

SCRIPT = """
import torch
from dsv4_tierd.kernels import sparse_attention as op
from dsv4_tierd.kernels.layout import row_pool
from dsv4_tierd.kernels.ref import sparse_attention as ref
from dsv4_tierd.kernels.ref.rope import rotate

torch.manual_seed(7)
cpu = torch.device("cpu")
window, extra = row_pool(op.ROW, 90, 5, cpu), row_pool(op.ROW, 130, 64, cpu)
for rows in (window, extra):
    rows.write(torch.arange(80), torch.randn(80, 512))
    rows.data.view(torch.uint8)[-1] = 0xFF
near = torch.randint(0, 80, (2, 70), dtype=torch.int32)
far = torch.randint(0, 80, (2, 66), dtype=torch.int32)
near[:, ::3], near[0, 1], far[1, 5] = -1, 2**31 - 1, -(2**31)
far[0, 2:] = -1
q, sink = torch.randn(2, 3, 512).bfloat16().float(), torch.tensor([0.5, torch.inf, -torch.inf])
positions, freq = torch.tensor([5, 70_000]), 160000.0 ** (-torch.arange(32) / 32)
near_ids = torch.where(near < window.row_count, near, -1)
want = ref.sparse_attention(q, window, near_ids, extra, far, sink, 512**-0.5)
want = rotate(want, positions, freq, inverse=True)
for split in (64, 1 << 14):
    held = op.workspace(2, 3, 256, cpu, split)
    held.sums.fill_(torch.nan), held.logs.fill_(torch.nan)
    out = torch.full_like(q, torch.nan)
    op.sparse_attention(
        q, window, near, extra, far, sink, 512**-0.5, out=out, scratch=held,
        inverse=op.InverseRope(positions, freq),
    )
    error = ((out - want).norm() / want.norm()).item()
    assert error < 1e-5, (split, error)
"""

PREFILL = """
import torch
from dsv4_tierd.kernels import sparse_attention as op
from dsv4_tierd.kernels.layout import row_pool
from dsv4_tierd.kernels.ref import sparse_attention as ref

torch.manual_seed(7)
cpu = torch.device("cpu")
size, tokens = 6, 5
window, extra = row_pool(op.ROW, size - 1 + tokens, 4, cpu), row_pool(op.ROW, 30, 2, cpu)
window.write(torch.arange(10), torch.randn(10, 512))
extra.write(torch.arange(30), torch.randn(30, 512))
seen = torch.tensor([1, 2, 6, 6, 0])
q, sink = torch.randn(tokens, 2, 512).bfloat16().float(), torch.randn(2)
ids = torch.tensor([[3, -1, 7], [1, 2, -1], [-1, -1, -1], [9, 0, 4], [5, 5, 6]])
listed = ref.Listed(extra, torch.tensor([8, 1, 29]), torch.tensor([0, 1, 2, 3, 3]))
for scope in (None, ref.Picked(extra, ids), listed):
    want = ref.sparse_attention_prefill(q, window, seen, scope, sink, 512**-0.5, size)
    out = torch.full_like(q, torch.nan)
    op.sparse_attention_prefill(
        q, window, seen, scope, sink, 512**-0.5, size, tile_rows=3, out=out
    )
    assert ((out - want).norm() < 1e-5 * want.norm()).item(), type(scope)
"""


@needs_triton
def test_split_and_whole_equal_the_twin() -> None:
    """Strange ids, infinite sinks, NaN beside the named rows, rotation back: fp32 all through."""
    run_interpreted(SCRIPT)


@needs_triton
def test_prefill_in_tiles_equals_the_twin() -> None:
    """Window rows by token order, chosen or listed entries, queries in tiles."""
    run_interpreted(PREFILL)
