"""Rotary positions against complex numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import naive_ops
from dsv4_tierd.kernels.ref.rope import rotate


@pytest.mark.parametrize("shape", [(5, 80), (5, 3, 32), (1, 16)])
def test_rotates_pairs_of_the_last_channels(rng: torch.Generator, shape: tuple[int, ...]) -> None:
    """Interleaved pairs turn by the fp32 product of position and frequency, up to a million."""
    x = torch.randn(shape, generator=rng)
    inv_freq = torch.rand(8, generator=rng)
    positions = torch.randint(0, 1 << 20, (shape[0],), generator=rng)
    rotated = naive_ops.as_array(rotate(x, positions, inv_freq))
    for row in range(shape[0]):
        expected = naive_ops.rotate(
            naive_ops.as_array(x[row]), int(positions[row]), inv_freq.numpy()
        )
        assert np.abs(rotated[row] - expected).max() < 1e-6


def test_inverse_undoes(rng: torch.Generator) -> None:
    """Rotating back at the same position gives the row again; the other channels never move."""
    x, inv_freq = torch.randn(9, 4, 40, generator=rng), torch.rand(16, generator=rng)
    positions = torch.arange(9) * 1000
    there = rotate(x, positions, inv_freq)
    assert torch.equal(there[..., :8], x[..., :8])
    assert not torch.allclose(there, x, atol=1e-2)
    assert torch.allclose(rotate(there, positions, inv_freq, inverse=True), x, atol=1e-6)


def test_no_rows() -> None:
    """Zero rows give zero rows."""
    assert rotate(torch.empty(0, 3, 32), torch.empty(0).long(), torch.ones(4)).shape == (0, 3, 32)
