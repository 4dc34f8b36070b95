"""The Triton row store, interpreted at tiny sizes, equals its twin.

The interpreter's e4m3 conversion is not the hardware's: fp8 codes may be off by one step there,
so that kind is compared by value, and bf16 is cut there, not rounded.
"""

from __future__ import annotations

from interpreted import needs_triton, run_interpreted

SCRIPT = """
import torch
from dsv4_tierd.kernels import row_store as op
from dsv4_tierd.kernels.layout import RowFormat, RowKind, row_pool
from dsv4_tierd.kernels.ref import row_store as ref

torch.manual_seed(7)
freq = 160000.0 ** (-torch.arange(32) / 32)
x, weight = torch.randn(4, 600)[:, :512] * 3, torch.rand(512) + 0.5
positions = torch.tensor([0, 5, 1_048_575, 77])
for kind, tolerance in ((RowKind.FP32, 1e-6), (RowKind.BF16, 1e-2), (RowKind.FP8, 0.1)):
    got, want = (row_pool(RowFormat(kind, 512, 64), 64, 7, torch.device("cpu")) for _ in range(2))
    ids = torch.tensor([3, 2**31 - 1, 50, -(2**31)], dtype=torch.int32)
    op.row_store(x, weight, 1e-6, positions, freq, got, ids)
    ref.row_store(x, weight, 1e-6, positions, freq, want, torch.where(ids < 64, ids, -1))
    a, b = got.read(torch.arange(64)), want.read(torch.arange(64))
    assert ((a - b).norm() <= tolerance * b.norm()).item(), kind
    assert torch.equal(a.any(-1), b.any(-1))
    if got.scale is not None:
        assert torch.equal(got.scale, want.scale)
"""


@needs_triton
def test_every_kind_equals_the_twin() -> None:
    """Norm, rotation up to a million, scales exactly; absent ids store nothing."""
    run_interpreted(SCRIPT)
