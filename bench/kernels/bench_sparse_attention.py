"""Sparse attention decode: window 128 and chosen C4 rows, or all C128 rows of a long context.

C128 rows lie two to a device page, at the pitch that such a page has; C4 rows in a hot set.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from harness import Case, Work, floor_us, set_count

from dsv4_tierd.kernels import sparse_attention as op
from dsv4_tierd.kernels.layout import PAGE_TOKENS, PageLayout, RowFormat, RowKind, Rows, row_pool
from dsv4_tierd.kernels.ref import sparse_attention as ref

WINDOW = 128
SCALE = 512**-0.5
# extra rows -> goals in us at batch 1, 8, 32, 64 heads
GOALS = {
    0: (7, 8, 9),
    512: (10, 12, 20),
    1024: (11, 13, 27),
    4096: (12, 16, 40),
    7040: (14, 22, 60),
    8192: (14, 24, 66),
}
BATCHES = (1, 8, 32)
PAGE = PageLayout(op.ROW, RowFormat(RowKind.KEY_FP8, 128), tuple(range(21)), tuple(range(20)))


def cases(toy: bool) -> Iterator[Case]:
    """Each batch and number of extra rows of the table; 128 heads and a prefill chunk beside."""
    if toy:
        yield _case(2, 64, 512, None)
        return
    for extra, goals in GOALS.items():
        for batch, goal in zip(BATCHES, goals, strict=True):
            yield _case(batch, 64, extra, goal)
    for extra in (512, 7040):
        for batch in BATCHES:
            yield _case(batch, 128, extra, None)
    yield _case(4096, 64, 512, None)


def _case(batch: int, heads: int, extra: int, goal: float | None) -> Case:
    read = batch * (WINDOW + extra) * op.ROW.row_bytes
    name = f"batch={batch} heads={heads} window={WINDOW} extra={extra}"
    return Case(name, partial(_build, batch, heads, extra), goal, floor_us(read))


def _rows(extra: int, device: torch.device) -> Rows:
    if device.type == "cpu":
        rows = row_pool(op.ROW, 1024, 64, device)
    elif extra <= 1024:
        rows = row_pool(op.ROW, 1 << 20, 64, device)
    else:
        pages = torch.empty(1 << 14, PAGE.device_bytes, dtype=torch.uint8, device=device)
        rows = PAGE.c128[7].view(pages)
    for ids in torch.arange(rows.row_count, device=device).split(1 << 16):
        rows.write(ids, torch.randn(len(ids), 512, device=device))
    return rows


def _ids(batch: int, count: int, rows: Rows, device: torch.device) -> torch.Tensor:
    """Whole pages in any order for dense rows, any rows for chosen ones."""
    if rows.rows_per_page != PAGE_TOKENS // 128:
        return torch.randint(0, rows.row_count, (batch, count), dtype=torch.int32, device=device)
    pages = torch.randint(0, rows.data.shape[0], (batch, count // 2, 1), device=device)
    ids = pages * 2 + torch.arange(2, device=device)
    return ids.flatten(1).to(torch.int32)


def _build(batch: int, heads: int, extra: int, device: torch.device) -> Work:
    read = batch * (WINDOW + extra) * op.ROW.row_bytes
    rows = _rows(extra, device)
    window = row_pool(op.ROW, batch * WINDOW, WINDOW, device)
    window.write(
        torch.arange(batch * WINDOW, device=device),
        torch.randn(batch * WINDOW, 512, device=device),
    )
    near = torch.arange(batch * WINDOW, device=device, dtype=torch.int32).view(batch, WINDOW)
    sink = torch.randn(heads, device=device)
    freq = 160000.0 ** (-torch.arange(32, device=device) / 32)
    turn = op.InverseRope(torch.randint(0, 1 << 20, (batch,), device=device), freq)
    scratch = op.workspace(batch, heads, WINDOW + -(-extra // 64) * 64, device)
    sets = []
    for _ in range(set_count(read, most=24) if device.type == "cuda" else 1):
        q = torch.randn(batch, heads, 512, device=device, dtype=torch.bfloat16)
        sets.append((q, _ids(batch, extra, rows, device), torch.empty_like(q)))

    def run(q: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        op.sparse_attention(
            q, window, near, rows, ids, sink, SCALE, out=out, scratch=scratch, inverse=turn
        )

    def check() -> None:
        q, ids, out = sets[0]
        run(q, ids, out)
        few = slice(0, 4)
        want = ref.sparse_attention(q[few].float(), window, near[few], rows, ids[few], sink, SCALE)
        want = op.rotate(want, turn.positions[few], freq, inverse=True)
        error = ((out[few].float() - want).norm() / want.norm()).item()
        assert error < 6e-3, f"relative error {error:.2e}"

    return Work([partial(run, *one) for one in sets], check, read, result=lambda: [sets[0][2]])
