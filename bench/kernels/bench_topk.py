"""Top-k of N fp32 scores, cold: the cases and goals of docs/PERFORMANCE.md."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from harness import Case, Work, floor_us, set_count, tensor_bytes

from dsv4_tierd.kernels.ref import topk as ref
from dsv4_tierd.kernels.topk import topk

K = 512
# columns, batch, goal in us
CASES = (
    (16 << 10, 1, 4.5),
    (64 << 10, 1, 5.0),
    (256 << 10, 1, 6.5),
    (256 << 10, 8, 8.5),
    (256 << 10, 32, 18.0),
    (256 << 10, 64, 25.0),
    (1024 << 10, 1, 11.0),
)


def cases(toy: bool) -> Iterator[Case]:
    """One case a line of the table; on a CPU a toy size through the twin."""
    for columns, batch, goal in ((2048, 2, None),) if toy else CASES:
        bytes_moved = batch * (columns + K) * 4
        name = f"N={columns // 1024}K batch={batch} k={K}"
        yield Case(name, partial(_build, columns, batch), goal, floor_us(bytes_moved))


def _build(columns: int, batch: int, device: torch.device) -> Work:
    count = set_count(batch * columns * 4) if device.type == "cuda" else 2
    scores = [torch.randn(batch, columns, device=device) for _ in range(count)]
    visible = torch.full((batch,), columns, dtype=torch.int32, device=device)
    ids = torch.empty(batch, K, dtype=torch.int32, device=device)

    def check() -> None:
        for given in scores[:2]:
            ids.fill_(-7)
            topk(given, visible, K, ids)
            wrong = (ids != ref.topk(given, visible, K)).sum().item()
            assert not wrong, f"{wrong} of {ids.numel()} positions differ from the twin's"

    runs = [partial(topk, given, visible, K, ids) for given in scores]
    return Work(runs, check, tensor_bytes(scores[0], ids), result=lambda: [ids])
