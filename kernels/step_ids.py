"""Row ids of a decode step on the GPU, and which rows lie in tails: small launches, no host.

Also ``fetch_rows``: the rows that a short prefill chose, straight from pinned memory. On a CPU
the twins in ``kernels/ref/step_ids.py`` run; they are the specification.
"""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_tierd.kernels.checks import check_dense, check_tensor
from dsv4_tierd.kernels.layout import Rows
from dsv4_tierd.kernels.ref import step_ids as ref
from dsv4_tierd.kernels.ref.step_ids import StepIds
from dsv4_tierd.kernels.triton_rows import runs_kernels, tl, triton

__all__ = ["StepIds", "fetch_rows", "join_tail", "leave_tail", "step_ids"]

_BLOCK = 256


def step_ids(positions: Tensor, slots: Tensor, pages: Tensor, out: StepIds) -> None:
    """Fill ``out`` from positions, slots [B] int32 and pages [B, P] int32; see the twin.

    Raises ValueError on a wrong argument. Cost: one launch, the ids once.
    """
    batch, columns = pages.shape
    device = pages.device
    check_tensor("positions", positions, torch.int32, (batch,), device)
    check_tensor("slots", slots, torch.int32, (batch,), device)
    check_tensor("pages", pages, torch.int32, (None, None), device)
    check_tensor("c128_all", out.c128_all, torch.int32, (batch, 2 * columns), device)
    if not runs_kernels(device):
        ref.step_ids(positions, slots, pages, out)
        return
    window = out.window.shape[1]
    grid = (batch, triton.cdiv(max(window, 2 * columns), _BLOCK))
    _step_ids[grid](
        positions,
        slots,
        pages,
        pages.stride(0),
        columns,
        out.window,
        out.window.stride(0),
        window,
        out.c128_all,
        out.c128_all.stride(0),
        out.own,
        out.c4,
        out.c128,
        out.visible,
        BLOCK=_BLOCK,
    )


def leave_tail(ids: Tensor, rows: Tensor, tail_from: Tensor) -> None:
    """``rows`` [B, K] int32 becomes -1 where ``ids`` lie in tails; see the twin."""
    _check_chosen(ids, rows, tail_from)
    if not runs_kernels(ids.device):
        ref.leave_tail(ids, rows, tail_from)
        return
    _leave_tail[(ids.shape[0], triton.cdiv(ids.shape[1], _BLOCK))](
        ids, rows, tail_from, ids.shape[1], BLOCK=_BLOCK
    )


def join_tail(
    ids: Tensor, slots: Tensor, tail_from: Tensor, tail_slots: Tensor, first: int, tail_rows: int
) -> None:
    """``slots`` [B, K] int32 becomes the tail's row where ``ids`` lie in tails; see the twin."""
    _check_chosen(ids, slots, tail_from)
    check_tensor("tail_slots", tail_slots, torch.int32, (ids.shape[0],), ids.device)
    if not runs_kernels(ids.device):
        ref.join_tail(ids, slots, tail_from, tail_slots, first, tail_rows)
        return
    _join_tail[(ids.shape[0], triton.cdiv(ids.shape[1], _BLOCK))](
        ids, slots, tail_from, tail_slots, first, tail_rows, ids.shape[1], BLOCK=_BLOCK
    )


def fetch_rows(wanted: Tensor, pages: Tensor, mirror: Rows, staged: Rows) -> None:
    """Copy wanted rows of a text from the mirror to their place in staging; see the twin.

    mirror: pinned memory, or on the device. Raises ValueError on a wrong argument. Cost: the
    wanted rows once over the link, and a program for each entry.
    """
    (count,), per_page = wanted.shape, mirror.rows_per_page
    check_tensor("wanted", wanted, torch.bool, (None,), staged.data.device)
    check_tensor("pages", pages, torch.int32, (None,), wanted.device)
    if mirror.format != staged.format or staged.rows_per_page != per_page:
        raise ValueError(f"mirror: rows of {mirror.format}, staging of {staged.format}")
    if pages.shape[0] * per_page < count or staged.row_count < count:
        raise ValueError(f"{count} entries: {len(pages)} pages, {staged.row_count} staged rows")
    if not runs_kernels(wanted.device):
        ref.fetch_rows(wanted, pages, mirror, staged)
        return
    if not count:
        return
    source, source_scale = _words(mirror)
    target, target_scale = _words(staged)
    _fetch_rows[(count,)](
        wanted.view(torch.uint8),
        pages,
        per_page,
        source,
        source.stride(0),
        source_scale,
        source_scale.stride(0),
        target,
        target.stride(0),
        target_scale,
        target_scale.stride(0),
        DATA=source.shape[2],
        SCALE=0 if mirror.scale is None else source_scale.shape[2],
        num_warps=1,
    )


def _words(rows: Rows) -> tuple[Tensor, Tensor]:
    """Data and scales as 32-bit words [pages, rows, words]; without scales data twice."""
    data = rows.data.view(torch.int32)
    scale = data if rows.scale is None else rows.scale.view(torch.int32)
    dense = data.stride(1) == data.shape[2] and scale.stride(1) == scale.shape[2]
    if not dense:
        raise ValueError("rows of a page must stand without gaps")
    return data, scale


def _check_chosen(ids: Tensor, rows: Tensor, tail_from: Tensor) -> None:
    check_tensor("ids", ids, torch.int32, (None, None), ids.device)
    check_tensor("rows", rows, torch.int32, tuple(ids.shape), ids.device)
    check_tensor("tail_from", tail_from, torch.int32, (ids.shape[0],), ids.device)
    check_dense("ids", ids)
    check_dense("rows", rows)


@triton.jit
def _step_ids(
    position_ptr,
    slot_ptr,
    page_ptr,
    page_row,
    columns,
    window_ptr,
    window_row,
    window,
    all_ptr,
    all_row,
    own_ptr,
    c4_ptr,
    c128_ptr,
    visible_ptr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    block = tl.program_id(1)
    position = tl.load(position_ptr + token)
    slot = tl.load(slot_ptr + token)
    number = block * BLOCK + tl.arange(0, BLOCK)
    reached = position - (window - 1) + number
    # Triton's % keeps the sign; below 0 the id is -1 anyway.
    ids = tl.where(reached >= 0, slot * window + reached % window, -1)
    tl.store(window_ptr + token * window_row + number, ids, number < window)
    inside = number < 2 * columns
    page = tl.load(page_ptr + token.to(tl.int64) * page_row + number // 2, inside, -1)
    closed = number < (position + 1) // 128
    rows = tl.where(closed, page * 2 + number % 2, -1)
    tl.store(all_ptr + token.to(tl.int64) * all_row + number, rows, inside)
    if block == 0:
        column = tl.minimum(position // 256, columns - 1)
        last = tl.load(page_ptr + token.to(tl.int64) * page_row + column)
        tl.store(own_ptr + token, slot * window + position % window)
        tl.store(c4_ptr + token, last * 64 + position // 4 % 64)
        tl.store(c128_ptr + token, last * 2 + position // 128 % 2)
        tl.store(visible_ptr + token, (position + 1) // 4)


@triton.jit
def _leave_tail(ids_ptr, rows_ptr, from_ptr, count, BLOCK: tl.constexpr):
    session = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + session * count + place, place < count, -1)
    inside = ids >= tl.load(from_ptr + session)
    tl.store(rows_ptr + session * count + place, tl.full([BLOCK], -1, tl.int32), inside)


@triton.jit
def _join_tail(
    ids_ptr, slots_ptr, from_ptr, slot_ptr, first, tail_rows, count, BLOCK: tl.constexpr
):
    session = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + session * count + place, place < count, -1)
    inside = ids >= tl.load(from_ptr + session)
    base = first + tl.load(slot_ptr + session) * tail_rows
    tl.store(slots_ptr + session * count + place, base + ids % tail_rows, inside)


@triton.jit
def _fetch_rows(
    wanted_ptr,
    page_ptr,
    per_page,
    source_ptr,
    source_page,
    source_scale_ptr,
    source_scale_page,
    target_ptr,
    target_page,
    target_scale_ptr,
    target_scale_page,
    DATA: tl.constexpr,
    SCALE: tl.constexpr,
):
    entry = tl.program_id(0)
    if tl.load(wanted_ptr + entry) != 0:
        own = (entry // per_page).to(tl.int64)
        page = tl.load(page_ptr + own).to(tl.int64)
        row = entry % per_page
        word = tl.arange(0, 256)
        data = tl.load(source_ptr + page * source_page + row * DATA + word, word < DATA)
        tl.store(target_ptr + own * target_page + row * DATA + word, data, word < DATA)
        if SCALE > 0:
            part = tl.arange(0, 4)
            scale_at = source_scale_ptr + page * source_scale_page + row * SCALE
            scale = tl.load(scale_at + part, part < SCALE)
            scale_to = target_scale_ptr + own * target_scale_page + row * SCALE
            tl.store(scale_to + part, scale, part < SCALE)
