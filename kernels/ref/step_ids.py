"""Row ids of a decode step, from positions and page tables: what every layer reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.kernels.layout import PAGE_TOKENS, Rows

_C4, _C128 = 4, 128
_C4_ROWS, _C128_ROWS = PAGE_TOKENS // _C4, PAGE_TOKENS // _C128


@dataclass(frozen=True, slots=True)
class StepIds:
    """Ids of B tokens, all int32. W: window rows; P: page columns.

    window: [B, W] rows of a window pool, oldest first, -1 before the text; own: [B] the token's.
    c4, c128: [B] rows that the token's groups have in the token's device page; c128_all:
    [B, 2*P] rows of all closed C128 groups, -1 after them; visible: [B] closed C4 groups.
    """

    window: Tensor
    own: Tensor
    c4: Tensor
    c128: Tensor
    c128_all: Tensor
    visible: Tensor

    @classmethod
    def empty(cls, batch: int, window: int, columns: int, device: torch.device) -> StepIds:
        """Buffers for ``batch`` tokens and page tables of ``columns`` pages."""
        wide = torch.zeros(batch, window + _C128_ROWS * columns, dtype=torch.int32, device=device)
        one = torch.zeros(4, batch, dtype=torch.int32, device=device)
        return cls(wide[:, :window], one[0], one[1], one[2], wide[:, window:], one[3])


def step_ids(positions: Tensor, slots: Tensor, pages: Tensor, out: StepIds) -> None:
    """Fill ``out``. positions, slots (of the tail): [B] int32; pages: [B, P] int32 device pages."""
    window, columns = out.window.shape[1], pages.shape[1]
    reached = positions.unsqueeze(1) - torch.arange(window - 1, -1, -1, device=positions.device)
    ids = slots.unsqueeze(1) * window + reached % window
    out.window.copy_(torch.where(reached >= 0, ids, -1))
    out.own.copy_(slots * window + positions % window)
    last = (positions // PAGE_TOKENS).long()
    page = pages.gather(1, last.clamp_max(columns - 1).unsqueeze(1)).squeeze(1)
    out.c4.copy_(page * _C4_ROWS + positions // _C4 % _C4_ROWS)
    out.c128.copy_(page * _C128_ROWS + positions // _C128 % _C128_ROWS)
    numbers = torch.arange(_C128_ROWS * columns, device=positions.device)
    rows = pages[:, numbers // _C128_ROWS] * _C128_ROWS + numbers % _C128_ROWS
    closed = ((positions + 1) // _C128).unsqueeze(1)
    out.c128_all.copy_(torch.where(numbers < closed, rows, -1))
    out.visible.copy_((positions + 1) // _C4)


def leave_tail(ids: Tensor, rows: Tensor, tail_from: Tensor) -> None:
    """Take the entries that lie in tails out of what is swapped in: ``rows`` becomes -1 there.

    ids: [B, K] int32 chosen entries; rows: [B, K] int32 their mirror rows; tail_from: [B] int32.
    """
    rows.masked_fill_(ids >= tail_from.unsqueeze(1), -1)


def join_tail(
    ids: Tensor, slots: Tensor, tail_from: Tensor, tail_slots: Tensor, first: int, tail_rows: int
) -> None:
    """Name the tail rows of entries that lie in tails: ``slots`` becomes their row there.

    ids: [B, K] int32 chosen entries; slots: [B, K] int32 hot rows; tail_from, tail_slots: [B]
    int32; ``first``: the pool's first tail row; ``tail_rows``: rows of a tail slot.
    """
    base = (first + tail_slots * tail_rows).unsqueeze(1)
    inside = ids >= tail_from.unsqueeze(1)
    slots.copy_(torch.where(inside, base + ids % tail_rows, slots))


def fetch_rows(wanted: Tensor, pages: Tensor, mirror: Rows, staged: Rows) -> None:
    """Copy wanted rows of a text to their place in staging.

    wanted: [n] bool, by entry number; pages: [ceil(n/64)] int32 mirror pages of the text, on the
    device of ``wanted``; staged row ``e`` is entry e. Formats are equal.
    """
    entries = wanted.nonzero().flatten()
    per_page = mirror.rows_per_page
    rows = pages[entries // per_page].long() * per_page + entries % per_page
    staged.copy_from(entries, mirror, rows)
