"""Sums and functions whose bits do not depend on where an element stands."""

from __future__ import annotations

import pytest
import torch

from dsv4_tierd.kernels.ref import steady


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 80, 127, 128])
def test_fold_sum_is_a_sum(rng: torch.Generator, length: int) -> None:
    """Every element counts once, on any axis and at odd lengths."""
    x = torch.randn(5, length, 3, generator=rng)
    assert torch.allclose(steady.fold_sum(x, 1), x.double().sum(1).float(), atol=1e-5)
    x = torch.randint(-9, 9, (4, length), generator=rng).float()
    assert torch.equal(steady.fold_sum(x, -1), x.sum(-1))


def test_bits_do_not_depend_on_the_other_rows(rng: torch.Generator) -> None:
    """A row gives the same bits alone, in any place, and among any number of rows."""
    x = torch.randn(37, 80, generator=rng) * 3
    weight = torch.randn(80, generator=rng)
    for f in (
        steady.exp,
        lambda r: steady.cos_sin(r)[0],
        lambda r: steady.cos_sin(r)[1],
        lambda r: steady.rms_norm(r, weight, 1e-6),
        lambda r: steady.fold_sum(r, -1),
    ):
        whole = f(x)
        for row in (0, 1, 17, 36):
            assert torch.equal(f(x[row : row + 1])[0], whole[row])
            assert torch.equal(f(x[row : row + 3])[0], whole[row])


def test_rms_norm_formula(rng: torch.Generator) -> None:
    """weight * x / sqrt(mean(x**2) + eps), and zeros stay zeros."""
    x, weight = torch.randn(6, 33, generator=rng), torch.randn(33, generator=rng)
    x[2] = 0
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    assert torch.allclose(steady.rms_norm(x, weight, 1e-6), expected.float(), rtol=1e-5, atol=1e-6)
    assert torch.equal(steady.rms_norm(x, None, 1e-6)[2], torch.zeros(33))
