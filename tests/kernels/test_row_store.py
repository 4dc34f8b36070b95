"""Window rows: norm, rotation, encoding, and only where asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import naive_ops
from dsv4_tierd.kernels.layout import RowFormat, RowKind
from dsv4_tierd.kernels.ref.row_store import row_store

# Relative to the row's largest value: fp32 rounding; half a bf16 step; half an e4m3 step (2**-4).
TOLERANCE = {RowKind.FP32: 2e-6, RowKind.BF16: 2**-8, RowKind.FP8: 2**-4}


@pytest.mark.parametrize("kind", TOLERANCE)
def test_rows_are_normed_rotated_and_stored(rng: torch.Generator, kind: RowKind) -> None:
    """Each stored row decodes to the formula's value; rows not named keep their bytes."""
    fmt = RowFormat(kind, 80, 16)
    rows = naive_ops.nan_pool(fmt, 61 * 3, 61)
    before = rows.data.clone()
    x, weight = torch.randn(7, 80, generator=rng) * 5, torch.rand(80, generator=rng) + 0.5
    positions = torch.randint(0, 1 << 20, (7,), generator=rng)
    inv_freq = torch.rand(8, generator=rng)
    ids = torch.tensor([182, -1, 0, 61, 60, -1, 100], dtype=torch.int32)
    row_store(x, weight, 1e-6, positions, inv_freq, rows, ids)
    for i, row in enumerate(ids.tolist()):
        if row < 0:
            continue
        normed = naive_ops.rms(naive_ops.as_array(x[i]), naive_ops.as_array(weight), 1e-6)
        expected = naive_ops.rotate(normed, int(positions[i]), inv_freq.numpy())
        stored = naive_ops.as_array(rows.read(torch.tensor([row])))[0]
        assert np.abs(stored - expected).max() <= TOLERANCE[kind] * np.abs(expected).max()
    untouched = torch.ones(183, dtype=torch.bool)
    untouched[ids[ids >= 0].long()] = False
    after = rows.data.flatten(0, 1)[untouched].contiguous().view(torch.uint8)
    assert torch.equal(after, before.flatten(0, 1)[untouched].contiguous().view(torch.uint8))


@pytest.mark.parametrize("kind", TOLERANCE)
def test_bytes_do_not_depend_on_the_batch(rng: torch.Generator, kind: RowKind) -> None:
    """A row stored alone has the bytes it has in a batch."""
    fmt = RowFormat(kind, 80, 16)
    together, alone = naive_ops.nan_pool(fmt, 64, 64), naive_ops.nan_pool(fmt, 64, 64)
    x, weight, inv_freq = torch.randn(33, 80, generator=rng), torch.ones(80), torch.rand(8)
    positions = torch.arange(33) * 31
    row_store(x, weight, 1e-6, positions, inv_freq, together, torch.arange(33))
    for i in range(33):
        one = slice(i, i + 1)
        row_store(x[one], weight, 1e-6, positions[one], inv_freq, alone, torch.tensor([i]))
    ids = torch.arange(33)
    assert torch.equal(together.read(ids), alone.read(ids))


def test_nothing_to_store() -> None:
    """No tokens, or none that is to be stored, write nothing."""
    rows = naive_ops.nan_pool(RowFormat(RowKind.FP32, 32, 16), 8, 8)
    for count in (0, 3):
        ids = torch.full((count,), -1)
        row_store(torch.ones(count, 32), torch.ones(32), 1e-6, ids, torch.ones(8), rows, ids)
    assert bool(rows.data.isnan().all())
