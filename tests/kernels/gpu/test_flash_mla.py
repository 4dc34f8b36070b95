"""The installed FlashMLA, called as this project calls it, equals the twin on the same rows.

Tolerance: queries, operands and result are bf16 (2**-9 each): relative Frobenius error below 8e-3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from dsv4_tierd.kernels import flash_mla
from dsv4_tierd.kernels import sparse_attention as op
from dsv4_tierd.kernels.layout import Rows, row_pool
from dsv4_tierd.kernels.ref import sparse_attention as ref
from dsv4_tierd.kernels.ref.rope import rotate
from dsv4_tierd.kernels.sparse_attention_triton import Call

DEVICE = torch.device("cuda")
SCALE = 512**-0.5
TOLERANCE = 8e-3
FOUND = flash_mla.examine()
pytestmark = pytest.mark.skipif(isinstance(FOUND, str), reason=f"flash_mla: {FOUND}")


def filled(count: int, per_page: int, rng: torch.Generator) -> Rows:
    rows = row_pool(op.ROW, count, per_page, DEVICE)
    ids = torch.arange(count, device=DEVICE)
    rows.write(ids, torch.randn(count, 512, generator=rng, device=DEVICE))
    return rows


def some(tokens: int, count: int, rows: Rows, rng: torch.Generator) -> Tensor:
    """Row ids, a quarter of them absent."""
    within = partial(torch.randint, generator=rng, device=DEVICE, dtype=torch.int32)
    strange = torch.tensor([-1, -(2**31), 2**31 - 1, 1 << 30], dtype=torch.int32, device=DEVICE)
    which = within(0, 16, (tokens, count))
    return torch.where(which < 4, strange[which % 4], within(0, rows.row_count, (tokens, count)))


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("extra", [0, 512, 1000])
def test_grid(
    heads: int, extra: int, rng: torch.Generator, poison: Callable[[Tensor], Tensor]
) -> None:
    """Padded heads and ids, absent rows, one query that sees nothing, the inverse rotation."""
    window, rows = filled(384, 128, rng), filled(4096, 64, rng)
    near, far = some(5, 128, window, rng), some(5, extra, rows, rng)
    near[3], far[3] = -1, -1
    q = torch.randn(5, heads, 512, generator=rng, device=DEVICE, dtype=torch.bfloat16)
    sink = torch.randn(heads, generator=rng, device=DEVICE)
    sink[0] = torch.inf
    positions = torch.tensor([0, 5, 70_000, 9, 1_048_575], device=DEVICE)
    inv_freq = 160000.0 ** (-torch.arange(32, device=DEVICE) / 32)
    turn = op.InverseRope(positions, inv_freq)
    out = poison(torch.empty_like(q, dtype=torch.float32))
    scratch = op.workspace(5, heads, 128 + 64 * -(-extra // 64), DEVICE)
    call = Call(q, window, near, rows, far, extra, sink, SCALE, out, scratch, turn)
    assert flash_mla.refusal(call, torch.cuda.get_device_capability()) is None
    flash_mla.attend(call)
    seen = [
        torch.where((i >= 0) & (i < r.row_count), i, -1) for i, r in ((near, window), (far, rows))
    ]
    want = ref.sparse_attention(q.float(), window, seen[0], rows, seen[1], sink, SCALE)
    want = rotate(want, positions, inv_freq, inverse=True)
    assert bool((out[3] == 0).all())
    assert ((out - want).norm() / want.norm()).item() < TOLERANCE
