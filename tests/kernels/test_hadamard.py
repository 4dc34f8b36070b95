"""The basis of index keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import naive_ops
from dsv4_tierd.kernels.layout import RowKind
from dsv4_tierd.kernels.ref.hadamard import hadamard, to_key_basis


@pytest.mark.parametrize("n", [1, 2, 32, 128])
def test_is_the_sylvester_matrix(rng: torch.Generator, n: int) -> None:
    """The transform is the orthonormal matrix of bit parities, and undoes itself."""
    x = torch.randn(3, 2, n, generator=rng)
    y = hadamard(x)
    assert np.abs(naive_ops.as_array(y) - naive_ops.hadamard(naive_ops.as_array(x))).max() < 1e-5
    assert torch.allclose(hadamard(y), x, atol=1e-5)


def test_odd_sizes_are_refused() -> None:
    """A size that is no power of two is an error that says so."""
    with pytest.raises(ValueError, match="power of two, got 48"):
        hadamard(torch.ones(48))


def test_only_fp8_keys_are_transformed(rng: torch.Generator) -> None:
    """Exact formats keep the model's own basis."""
    x = torch.randn(4, 32, generator=rng)
    assert to_key_basis(x, RowKind.FP32) is x
    assert torch.equal(to_key_basis(x, RowKind.KEY_FP8), hadamard(x))
