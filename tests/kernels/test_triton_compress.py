"""The Triton compressor, interpreted at tiny sizes, equals its twin.

Rows are stored as fp32 and bf16 here: the interpreter's e4m3 conversion is not the hardware's.
"""

from __future__ import annotations

import pytest

from interpreted import needs_triton, run_interpreted

SCRIPT = """
import torch
from dsv4_tierd.kernels import compress as op
from dsv4_tierd.kernels.layout import RowFormat, RowKind, row_pool
from dsv4_tierd.kernels.ref import compress as ref

torch.manual_seed(7)
ratio, dim, halves = {shape}
params = ref.CompressParams(
    torch.randn(ratio, halves * dim), torch.rand(dim) + 0.5, 1e-6,
    160000.0 ** (-torch.arange(32) / 32), ratio,
)
width = halves * dim

def near(got, want):
    assert got.shape == want.shape
    assert ((got - want).norm() <= 2e-6 * want.norm()).item()

for start, tokens in {chunks}:
    ring = torch.randn(params.ring_len, params.ring_dim)
    if not start:
        ring.fill_(torch.nan)
    kv, gate = torch.randn(tokens, width), torch.randn(tokens, width)
    want_ring, got_ring = ring.clone(), ring.clone()
    want = ref.compress_prefill(kv, gate, start, ring, params, want_ring)
    near(op.compress_prefill(kv, gate, start, got_ring, params, got_ring), want)
    assert torch.equal(got_ring.view(torch.int32), want_ring.view(torch.int32))
rings = torch.randn(4, params.ring_len, params.ring_dim)
positions, slots = torch.tensor([ratio - 1, ratio, 8 * ratio - 1]), torch.tensor([3, 0, 2])
kv, gate = torch.randn(3, width), torch.randn(3, width)
want_rings = rings.clone()
want = ref.compress_decode(kv, gate, positions, want_rings, slots, params)
rows = row_pool(RowFormat(RowKind.FP32, dim), 6, 3, torch.device("cpu"))
ids = torch.tensor([4, 1, 2**31 - 1], dtype=torch.int32)
op.compress_decode(kv, gate, positions, rings, slots, params, rows=rows, ids=ids)
assert torch.equal(rings, want_rings)
stored = rows.read(torch.arange(6))
near(stored[4], want[0])
stored[4] = 0
assert not stored.any()
"""


@needs_triton
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ("4, 512, 2", "((0, 9), (5, 2), (7, 10))"),
        ("4, 128, 2", "((0, 9), (126, 3), (3, 5))"),
        ("128, 64, 1", "((0, 130), (126, 3), (5, 2))"),
    ],
)
def test_prefill_and_decode_equal_the_twin(shape: str, chunks: str) -> None:
    """Entries, rings bit by bit, and rows stored where they belong and nowhere else."""
    run_interpreted(SCRIPT.format(shape=shape, chunks=chunks))
