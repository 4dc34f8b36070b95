"""Window rows on the GPU are the twin's bytes, but for values on a rounding border.

Tolerance: the norm and the angles round differently by a few ulp, which moves a value across a
border of e4m3 or bf16 now and then: at most 1 byte in 200 may differ, and decoded rows agree to
1e-2 of the largest value. Scales (powers of two) may differ in 1 of 1,000.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4_tierd.kernels import row_store as op
from dsv4_tierd.kernels.layout import RowFormat, RowKind, Rows, row_pool
from dsv4_tierd.kernels.ref import row_store as ref

Poison = Callable[[Tensor], Tensor]
DEVICE = torch.device("cuda")
INV_FREQ = 160000.0 ** (-torch.arange(32) / 32)


def same_rows(got: Rows, want: Rows) -> None:
    """Stored bytes agree but for a few neighbours in rounding."""
    wrong = (got.data != want.data).float().mean().item()
    assert wrong < 1 / 200, f"{wrong:.2%} of the data bytes differ"
    if got.scale is not None:
        assert want.scale is not None
        assert (got.scale != want.scale).float().mean().item() < 1e-3


@pytest.mark.parametrize("kind", [RowKind.FP8, RowKind.BF16])
@pytest.mark.parametrize("tokens", [0, 1, 3, 64, 8192])
def test_rows(kind: RowKind, tokens: int, rng: torch.Generator, poison: Poison) -> None:
    """Any batch, odd pages, positions to a million; absent ids touch nothing."""
    fmt = RowFormat(kind, 512, 64)
    got, want = (row_pool(fmt, 9000, 61, DEVICE) for _ in range(2))
    for rows in (got, want):
        poison(rows.data)
        if rows.scale is not None:
            poison(rows.scale)
    width = torch.rand(tokens, 1, generator=rng, device=DEVICE) * 30
    x = torch.randn(tokens, 1024, generator=rng, device=DEVICE)[:, :512] * width
    weight = torch.rand(512, generator=rng, device=DEVICE) + 0.5
    positions = torch.randint(0, 1 << 20, (tokens,), generator=rng, device=DEVICE)
    ids = torch.randperm(9000, generator=rng, device=DEVICE)[:tokens].int()
    ids[1::5] = -1
    absent = ids.clone()
    absent[1::10] = -(2**31)
    absent[6::10] = 2**31 - 1
    op.row_store(x, weight, 1e-6, positions, INV_FREQ.to(DEVICE), got, absent)
    ref.row_store(x, weight, 1e-6, positions, INV_FREQ.to(DEVICE), want, ids)
    stored = ids[ids >= 0].long()
    if stored.numel():
        a, b = got.read(stored), want.read(stored)
        assert ((a - b).norm() / b.norm()).item() < 5e-3
    same_rows(Rows(fmt, got.data.view(torch.uint8), got.scale),
              Rows(fmt, want.data.view(torch.uint8), want.scale))  # fmt: skip


def test_a_rows_bytes_depend_on_itself_alone(rng: torch.Generator) -> None:
    """Alone or in a batch, the same bytes."""
    fmt = RowFormat(RowKind.FP8, 512, 64)
    batch, alone = (row_pool(fmt, 64, 64, DEVICE) for _ in range(2))
    x = torch.randn(64, 512, generator=rng, device=DEVICE)
    weight = torch.rand(512, generator=rng, device=DEVICE)
    positions = torch.arange(64, device=DEVICE) * 1000
    ids = torch.arange(64, device=DEVICE, dtype=torch.int32)
    freq = INV_FREQ.to(DEVICE)
    op.row_store(x, weight, 1e-6, positions, freq, batch, ids)
    for i in range(64):
        one = slice(i, i + 1)
        op.row_store(x[one], weight, 1e-6, positions[one], freq, alone, ids[one])
    assert torch.equal(batch.data, alone.data)
    assert batch.scale is not None and alone.scale is not None
    assert torch.equal(batch.scale, alone.scale)


def test_extreme_rows_keep_the_formats_promise(rng: torch.Generator) -> None:
    """Zeros, denormals, one huge value in a row: scales as layout.encode has them."""
    fmt = RowFormat(RowKind.FP8, 512, 64)
    got, want = (row_pool(fmt, 4, 4, DEVICE) for _ in range(2))
    x = torch.zeros(4, 512, device=DEVICE)
    x[1] = 1e-42
    x[2] = torch.randn(512, generator=rng, device=DEVICE) * 1e-3
    x[2, 7] = 3e18
    x[3] = torch.randn(512, generator=rng, device=DEVICE) * 1e15
    weight, ids = torch.ones(512, device=DEVICE), torch.arange(4, device=DEVICE)
    positions = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    op.row_store(x, weight, 1e-6, positions, INV_FREQ.to(DEVICE), got, ids)
    ref.row_store(x, weight, 1e-6, positions, INV_FREQ.to(DEVICE), want, ids)
    same_rows(got, want)
