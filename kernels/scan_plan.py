"""Who reads which pages in an index scan: the paths of the sessions' prefix tree.

Made on the host from the page table, when pages change; read by the scan on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GROUP_KEYS = 256  # of the unit of work, as in csrc/index_scan.cu


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """Who reads which pages, on the device, in fixed buffers for B sessions.

    segments: [2B, 4] int32 (first page column, end column, first member, end member), unused
    rows empty; tile_ends: [2B] int32, key tiles up to and including each segment; members:
    [B * depth] int32 batch rows, a segment's in order.
    """

    segments: Tensor
    tile_ends: Tensor
    members: Tensor


def new_plan(batch: int, columns: int, device: torch.device) -> ScanPlan:
    """Buffers that a plan for ``batch`` sessions of up to ``columns`` pages always fits."""
    most = 2 * batch
    depth = min(batch, columns) + 1
    return ScanPlan(
        torch.zeros(most, 4, dtype=torch.int32, device=device),
        torch.zeros(most, dtype=torch.int32, device=device),
        torch.zeros(batch * depth, dtype=torch.int32, device=device),
    )


def fill_plan(plan: ScanPlan, page_table: NDArray[np.int32], rows_per_page: int) -> None:
    """Write the plan of a host page table [B, Pmax] int (-1 padded) into ``plan``.

    A segment is a run of columns in which the same sessions name the same pages: the paths of
    the sessions' prefix tree. Cost: O(B * Pmax) on the host and three small copies; needed only
    when the table changes.
    """
    found = _segments(page_table)
    segments = np.zeros(plan.segments.shape, np.int32)
    members: list[int] = []
    for i, (first, end, rows) in enumerate(found):
        segments[i] = (first, end, len(members), len(members) + len(rows))
        members += rows
    pages = (segments[:, 1] - segments[:, 0]).astype(np.int64)
    ends = np.cumsum(-(-pages * rows_per_page // GROUP_KEYS)).astype(np.int32)
    plan.segments.copy_(torch.from_numpy(segments), non_blocking=True)
    plan.tile_ends.copy_(torch.from_numpy(ends), non_blocking=True)
    if members:
        plan.members[: len(members)].copy_(
            torch.tensor(members, dtype=torch.int32), non_blocking=True
        )


def _segments(page_table: NDArray[np.int32]) -> list[tuple[int, int, list[int]]]:
    """(first column, end column, batch rows) of every run of columns shared by the same rows."""
    columns = page_table.shape[1]
    open_groups = [(0, list(range(page_table.shape[0])))]
    found = []
    while open_groups:
        column, group = open_groups.pop()
        if column == columns:
            continue
        heads: dict[int, list[int]] = {}
        for row in group:
            heads.setdefault(int(page_table[row, column]), []).append(row)
        for page, rows in heads.items():
            if page < 0:
                continue
            path = page_table[rows, column:]
            same = (path == path[0]).all(0) & (path[0] >= 0)
            end = columns if same.all() else column + int(np.argmin(same))
            found.append((column, end, rows))
            open_groups.append((end, rows))
    return found
