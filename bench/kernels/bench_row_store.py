"""The window row: norm, rotation, FP8 and the store."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from harness import Case, Work, floor_us

from dsv4_tierd.kernels.layout import RowFormat, RowKind, row_pool
from dsv4_tierd.kernels.ref import row_store as ref
from dsv4_tierd.kernels.row_store import row_store

ROW = RowFormat(RowKind.FP8, 512, 64)
GOALS = ((1, 2.0), (64, 2.5), (8192, None))


def cases(toy: bool) -> Iterator[Case]:
    """Decode batches, and a prefill chunk."""
    for batch, goal in ((2, None),) if toy else GOALS:
        floor = floor_us(batch * (512 * 4 + ROW.row_bytes))
        yield Case(f"batch={batch}", partial(_build, batch), goal, floor)


def _build(batch: int, device: torch.device) -> Work:
    rows, twin = (row_pool(ROW, batch, 64, device) for _ in range(2))
    sets = [torch.randn(batch, 512, device=device) for _ in range(24)]
    weight = torch.rand(512, device=device) + 0.5
    freq = 10000.0 ** (-torch.arange(32, device=device) / 32)
    positions = torch.randint(0, 1 << 20, (batch,), device=device)
    ids = torch.randperm(batch, device=device).int()

    def run(x: torch.Tensor) -> None:
        row_store(x, weight, 1e-6, positions, freq, rows, ids)

    def check() -> None:
        run(sets[0])
        ref.row_store(sets[0], weight, 1e-6, positions, freq, twin, ids)
        wrong = (rows.data != twin.data).float().mean().item()
        assert wrong < 1 / 200, f"{wrong:.2%} of the bytes differ"

    bytes_moved = batch * (512 * 4 + ROW.row_bytes)
    return Work([partial(run, x) for x in sets], check, bytes_moved, result=lambda: [rows.data])
