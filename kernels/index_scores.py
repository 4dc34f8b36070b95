"""Index scores on the GPU: FP8 queries against paged FP8 keys, relu, weighted sum over heads.

One program takes a tile of keys and runs every query that reads it past it. In decode, a *plan*
(made on the host, from the page table, when pages change) names the page ranges and who reads
them, so sessions that share a prefix share its scan. A score's bits depend on its query and its
key alone: not on the tile, the group or the neighbours.
"""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4_tierd.kernels import nvrtc
from dsv4_tierd.kernels.layout import FP8_AMAX_FLOOR, FP8_MAX, RowKind, Rows
from dsv4_tierd.kernels.ref import index_scores as ref
from dsv4_tierd.kernels.topk import topk
from dsv4_tierd.kernels.triton_rows import row_arguments, runs_kernels, tl, triton

_GROUP_KEYS = 256  # of a plan's unit of work, as in csrc/index_scan.cu
_SEGMENTS_MAX = 1024
_PREFILL_KEYS = 256
_QUERY_BLOCK = 64


@dataclass(frozen=True, slots=True)
class Queries:
    """Index queries as the scan reads them: codes [T, Hi, Di] e4m3, gates [T, Hi] fp32.

    gates are the head weights times each head's fp32 query scale.
    """

    codes: Tensor
    gates: Tensor


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
    ends = np.cumsum(-(-pages * rows_per_page // _GROUP_KEYS)).astype(np.int32)
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


def encode_queries(q: Tensor, g: Tensor, out: Queries | None = None) -> Queries:
    """Queries in FP8: one fp32 scale a head, folded into the gates.

    q: [T, Hi, Di] fp32 or bf16 in the keys' basis; g: [T, Hi] fp32. ``out`` is overwritten, else
    allocated. Cost: q once. The scale is amax / 448, amax at least 1e-4, as for keys.
    """
    tokens, heads, dim = q.shape
    assert q.stride(2) == 1 and g.stride(1) == 1
    if out is None:
        codes = torch.empty(tokens, heads, dim, dtype=torch.float8_e4m3fn, device=q.device)
        out = Queries(codes, torch.empty(tokens, heads, dtype=torch.float32, device=q.device))
    if not runs_kernels(q.device):
        factor = q.float().abs().amax(-1).clamp_min(FP8_AMAX_FLOOR) / FP8_MAX
        out.codes.copy_((q.float() / factor.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX))
        out.gates.copy_(g * factor)
    elif tokens:
        block = min(16, heads)
        _encode_queries[(tokens, triton.cdiv(heads, block))](
            q,
            q.stride(0),
            q.stride(1),
            g,
            g.stride(0),
            out.codes.view(torch.uint8),
            out.gates,
            heads,
            BLOCK=block,
            DIM=dim,
            num_warps=1,
        )
    return out


def index_scores(
    q: Tensor | Queries,
    g: Tensor | None,
    keys: Rows,
    page_ids: Tensor,
    visible: Tensor,
    *,
    out: Tensor | None = None,
    fill: bool = True,
) -> Tensor:
    """Scores of one session's queries against its index keys; see the twin in ref/.

    q: [T, Hi, Di] fp32 or bf16, or encoded Queries (then g is None); g: [T, Hi] fp32, scaled by
    Di**-0.5 * Hi**-0.5; keys: FP8 pool; page_ids: [P] int pages in order; visible: [T] int.
    Returns ``out`` or new [T, P * rows_per_page] fp32, -inf where not visible; with ``fill``
    False, tiles that a query sees nothing of are left as they were. Raises ValueError for other
    key formats or head counts. Cost: FP8 matrix work, 2 * Hi * Di operations a score.
    """
    queries = _checked(q, g, keys)
    tokens, columns = queries.codes.shape[0], page_ids.shape[0] * keys.rows_per_page
    out = _output(out, tokens, columns, queries, fill)
    if not runs_kernels(out.device):
        codes = queries.codes.float()
        out.copy_(ref.index_scores(codes, queries.gates, keys, page_ids, visible))
    elif tokens and columns and _hopper(queries, keys):
        _launch_hopper(queries, keys, (page_ids, 0), visible, _QUERY_BLOCK, None, out)
    elif tokens and columns:
        _scan_queries[(triton.cdiv(tokens, _QUERY_BLOCK), triton.cdiv(columns, _PREFILL_KEYS))](
            *_common(queries, keys, visible, out),
            page_ids,
            page_ids.shape[0],
            tokens,
            QUERY_BLOCK=_QUERY_BLOCK,
            **_shape(queries, keys, _PREFILL_KEYS, 2 if tokens > 1 else 1),
            num_warps=8,
            num_stages=3,
        )
    return out


def index_scores_decode(
    q: Tensor | Queries,
    g: Tensor | None,
    keys: Rows,
    page_table: Tensor,
    visible: Tensor,
    *,
    plan: ScanPlan | None = None,
    out: Tensor | None = None,
    fill: bool = True,
) -> Tensor:
    """Scores of one query for each of B sessions; see the twin in ref/.

    q, g, keys as in index_scores, T = B; page_table: [B, Pmax] int, -1 padded; visible: [B] int.
    ``plan``: made by fill_plan from this page table; pages that several sessions read are then
    scanned once for all. Returns ``out`` or new [B, Pmax * rows_per_page] fp32, -inf where not
    visible (``fill`` as in index_scores). Cost: 132 B a key of each page run, read once.
    """
    queries = _checked(q, g, keys)
    batch, pages = page_table.shape
    assert page_table.stride(1) == 1
    out = _output(out, batch, pages * keys.rows_per_page, queries, fill)
    if not batch or not pages:
        return out
    if not runs_kernels(out.device):
        codes = queries.codes.float()
        return out.copy_(ref.index_scores_decode(codes, queries.gates, keys, page_table, visible))
    if _hopper(queries, keys):
        table = (page_table, page_table.stride(0))
        _launch_hopper(queries, keys, table, visible, 1, plan, out)
    else:
        _launch_triton(queries, keys, page_table, visible, plan, out)
    return out


def _hopper(queries: Queries, keys: Rows) -> bool:
    """Whether csrc/index_scan.cu takes this: a Hopper card, 64 heads of 128, pages of 64."""
    device = queries.codes.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return queries.codes.shape[1:] == (64, 128) and keys.rows_per_page == 64


def _launch_hopper(
    queries: Queries,
    keys: Rows,
    table: tuple[Tensor, int],
    visible: Tensor,
    together: int,
    plan: ScanPlan | None,
    out: Tensor,
) -> None:
    """table: (pages, row stride); without a plan ``together`` queries in a row share a scan."""
    tokens = queries.codes.shape[0]
    data, scale, data_page, _, scale_page, _, _, row_count = row_arguments(keys)
    if data.data_ptr() % 16 or data_page % 16:
        raise ValueError("pages of keys must start at multiples of 16 bytes")
    count = -(-tokens // together) if plan is None else 2 * tokens
    if count > _SEGMENTS_MAX:
        raise ValueError(f"the scan takes up to {_SEGMENTS_MAX} page runs, got {count}")
    assert visible.dtype is torch.int32 and table[0].dtype is torch.int32
    assert queries.codes.is_contiguous() and queries.gates.is_contiguous()
    nvrtc.load("index_scan.cu", "index_scan", out.device).launch(
        nvrtc.Shape(2 * _processors(out.device), 256),
        queries.codes,
        queries.gates,
        data,
        scale,
        data_page,
        scale_page,
        row_count // keys.rows_per_page,
        visible,
        out,
        out.stride(0),
        *table,
        out.shape[1] // keys.rows_per_page,
        tokens,
        together,
        count,
        None if plan is None else plan.segments,
        None if plan is None else plan.members,
    )


def _launch_triton(
    queries: Queries,
    keys: Rows,
    page_table: Tensor,
    visible: Tensor,
    plan: ScanPlan | None,
    out: Tensor,
) -> None:
    batch, pages = page_table.shape
    tiles = -(-pages * keys.rows_per_page // _GROUP_KEYS)
    segments, tile_ends, members = (
        (visible,) * 3 if plan is None else (plan.segments, plan.tile_ends, plan.members)
    )
    _scan_sessions[(min(batch * tiles, 2 * _processors(out.device)),)](
        *_common(queries, keys, visible, out),
        page_table,
        page_table.stride(0),
        pages,
        tiles,
        batch,
        segments,
        tile_ends,
        members,
        PLAN=plan is not None,
        SEGMENTS=triton.next_power_of_2(2 * batch),
        **_shape(queries, keys, _GROUP_KEYS, 1),
        num_warps=8,
        num_stages=3,
    )


def scores_topk(
    q: Tensor | Queries,
    g: Tensor | None,
    keys: Rows,
    page_ids: Tensor,
    visible: Tensor,
    k: int,
    *,
    tile_rows: int = 256,
    scratch: Tensor | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """topk(index_scores(...)) in tiles of ``tile_rows`` queries; see the twin in ref/.

    Arguments as index_scores; ``scratch``: [tile_rows, P * rows_per_page] fp32, else allocated,
    so the workspace does not grow with T; ``ids``: [T, k] int32, written and returned, else
    allocated. Entry numbers ascending, -1 padded.
    """
    queries = _checked(q, g, keys)
    tokens, columns = queries.codes.shape[0], page_ids.shape[0] * keys.rows_per_page
    device = queries.codes.device
    if ids is None:
        ids = torch.empty(tokens, k, dtype=torch.int32, device=device)
    if scratch is None:
        scratch = torch.empty(min(tile_rows, tokens), columns, dtype=torch.float32, device=device)
    for start in range(0, tokens, tile_rows):
        tile = slice(start, min(tokens, start + tile_rows))
        part = Queries(queries.codes[tile], queries.gates[tile])
        scores = scratch[: part.codes.shape[0]]
        index_scores(part, None, keys, page_ids, visible[tile], out=scores, fill=False)
        topk(scores, visible[tile], k, ids[tile])
    return ids


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _checked(q: Tensor | Queries, g: Tensor | None, keys: Rows) -> Queries:
    codes = q.codes if isinstance(q, Queries) else q
    heads, dim = codes.shape[1:]
    if keys.format.kind is not RowKind.KEY_FP8 or keys.format.dim != dim:
        raise ValueError(f"the scan reads fp8 keys of {dim} values, got {keys.format}")
    if heads & (heads - 1) or heads < 8 or dim & (dim - 1) or dim < 32:
        raise ValueError(f"the scan takes powers of two, from 8 heads of 32, got {heads} of {dim}")
    if isinstance(q, Queries):
        return q
    assert g is not None
    return encode_queries(q, g)


def _output(out: Tensor | None, rows: int, columns: int, queries: Queries, fill: bool) -> Tensor:
    if out is None:
        out = torch.empty(rows, columns, dtype=torch.float32, device=queries.codes.device)
    assert out.shape == (rows, columns) and (not columns or out.stride(1) == 1), out.shape
    return out.fill_(-torch.inf) if fill else out


def _common(queries: Queries, keys: Rows, visible: Tensor, out: Tensor) -> tuple[object, ...]:
    assert queries.codes.is_contiguous() and queries.gates.is_contiguous()
    data, scale, data_page, data_row, scale_page, scale_row, _, row_count = row_arguments(keys)
    assert data_row == data.shape[2] and scale_row == 4, "a page's keys must be contiguous"
    codes = queries.codes.view(torch.uint8)
    paged = (data, scale, data_page, scale_page, row_count)
    return codes, queries.gates, *paged, visible, out, out.stride(0)


def _shape(queries: Queries, keys: Rows, block_keys: int, together: int) -> dict[str, int]:
    """Constants of a launch; ``together``: queries of one matrix product."""
    return {
        "HEADS": queries.codes.shape[1],
        "DIM": queries.codes.shape[2],
        "PAGE_ROWS": keys.rows_per_page,
        "BLOCK_KEYS": block_keys,
        "TOGETHER": together,
    }


@triton.jit
def _encode_queries(
    q_ptr,
    q_token,
    q_head,
    g_ptr,
    g_token,
    codes_ptr,
    gates_ptr,
    heads,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = head < heads
    value = tl.arange(0, DIM)[None, :]
    source = q_ptr + token * q_token + head[:, None] * q_head + value
    q = tl.load(source, mask=here[:, None], other=0.0).to(tl.float32)
    factor = tl.div_rn(tl.maximum(tl.max(tl.abs(q), 1), 1e-4), 448.0)
    bounded = tl.minimum(tl.maximum(tl.div_rn(q, factor[:, None]), -448.0), 448.0)
    codes = bounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(codes_ptr + (token * heads + head[:, None]) * DIM + value, codes, mask=here[:, None])
    gate = tl.load(g_ptr + token * g_token + head, mask=here, other=0.0)
    tl.store(gates_ptr + token * heads + head, gate * factor, mask=here)


@triton.jit
def _load_keys(
    data_ptr,
    scale_ptr,
    data_page,
    scale_page,
    row_count,
    page,
    slot,
    DIM: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
):
    """Keys [N, DIM] e4m3 and scales [N] fp32 of page ids [N]; zeros where the page is absent."""
    there = (page >= 0) & (page < row_count // PAGE_ROWS)
    page = tl.where(there, page, 0).to(tl.int64)
    data = data_ptr + tl.multiple_of(page * data_page, 16)[:, None]
    data += slot[:, None] * DIM + tl.arange(0, DIM)[None, :]
    codes = tl.load(data, mask=there[:, None], other=0)
    scale = (scale_ptr + tl.multiple_of(page * scale_page, 4)).to(tl.pointer_type(tl.float32))
    scales = tl.load(scale + slot, mask=there, other=0.0)
    return codes.to(tl.float8e4nv, bitcast=True), scales


@triton.jit
def _score(
    q_ptr,
    g_ptr,
    keys,
    scales,
    rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Scores [BLOCK_KEYS, TOGETHER] of queries ``rows`` [TOGETHER] int64 against a tile of keys."""
    flat = tl.arange(0, HEADS)[None, :] + rows[:, None] * HEADS
    flat = tl.reshape(flat, (TOGETHER * HEADS,))
    codes = tl.load(q_ptr + flat[:, None] * DIM + tl.arange(0, DIM)[None, :])
    gates = tl.load(g_ptr + flat)
    heads = tl.dot(keys, tl.trans(codes.to(tl.float8e4nv, bitcast=True)))
    wanted = tl.maximum(heads, 0.0) * gates[None, :]
    wanted = tl.sum(tl.reshape(wanted, (BLOCK_KEYS, TOGETHER, HEADS)), 2)
    return wanted * scales[:, None]


@triton.jit
def _scan_queries(
    q_ptr,
    g_ptr,
    data_ptr,
    scale_ptr,
    data_page,
    scale_page,
    row_count,
    visible_ptr,
    out_ptr,
    out_row,
    page_ids,
    pages,
    tokens,
    QUERY_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    begin = tl.program_id(0) * QUERY_BLOCK
    end = tl.minimum(tokens, begin + QUERY_BLOCK)
    query = begin + tl.arange(0, QUERY_BLOCK)
    most = tl.max(tl.load(visible_ptr + query, mask=query < tokens, other=0), 0)
    first = tl.program_id(1) * BLOCK_KEYS
    if first < most:
        entry = first + tl.arange(0, BLOCK_KEYS)
        column = entry // PAGE_ROWS
        page = tl.load(page_ids + column, mask=(column < pages) & (entry < most), other=-1)
        keys, scales = _load_keys(
            data_ptr,
            scale_ptr,
            data_page,
            scale_page,
            row_count,
            page,
            entry % PAGE_ROWS,
            DIM,
            PAGE_ROWS,
        )
        lane = tl.arange(0, TOGETHER)
        for start in range(begin, end, TOGETHER):
            row = tl.minimum(start + lane, end - 1).to(tl.int64)
            scores = _score(q_ptr, g_ptr, keys, scales, row, HEADS, DIM, BLOCK_KEYS, TOGETHER)
            limit = tl.load(visible_ptr + row)
            scores = tl.where(entry[:, None] < limit[None, :], scores, float("-inf"))
            inside = (column < pages)[:, None] & (first < limit)[None, :]
            tl.store(out_ptr + row[None, :] * out_row + entry[:, None], scores, mask=inside)


@triton.jit
def _scan_sessions(
    q_ptr,
    g_ptr,
    data_ptr,
    scale_ptr,
    data_page,
    scale_page,
    row_count,
    visible_ptr,
    out_ptr,
    out_row,
    page_table,
    table_row,
    pages,
    tiles,
    batch,
    segments_ptr,
    tile_ends_ptr,
    members_ptr,
    PLAN: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    total = tiles * batch
    if PLAN:
        segment = tl.arange(0, SEGMENTS)
        ends = tl.load(tile_ends_ptr + segment, mask=segment < 2 * batch, other=0)
        total = tl.max(ends, 0)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        if PLAN:
            before = tl.where((ends <= item) & (segment < 2 * batch), 1, 0)
            which = tl.sum(before, 0)
            tile = item - tl.max(tl.where(before > 0, ends, 0), 0)
            first_page = tl.load(segments_ptr + which * 4)
            end_page = tl.load(segments_ptr + which * 4 + 1)
            begin = tl.load(segments_ptr + which * 4 + 2)
            end = tl.load(segments_ptr + which * 4 + 3)
            leader = tl.load(members_ptr + begin)
        else:
            leader = item // tiles
            tile = item % tiles
            first_page = 0
            end_page = pages
            begin = leader
            end = leader + 1
        entry = first_page * PAGE_ROWS + tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        first = first_page * PAGE_ROWS + tile * BLOCK_KEYS
        column = entry // PAGE_ROWS
        inside = column < end_page
        # The leader's own limit does not bound the others', so a group reads whole pages.
        wanted = inside
        if not PLAN:
            wanted = inside & (entry < tl.load(visible_ptr + leader))
        table = page_table + leader.to(tl.int64) * table_row
        page = tl.load(table + column, mask=wanted, other=-1)
        keys, scales = _load_keys(
            data_ptr,
            scale_ptr,
            data_page,
            scale_page,
            row_count,
            page,
            entry % PAGE_ROWS,
            DIM,
            PAGE_ROWS,
        )
        lane = tl.arange(0, TOGETHER)
        for start in range(begin, end, TOGETHER):
            member = tl.minimum(start + lane, end - 1)
            row = member.to(tl.int64)
            if PLAN:
                row = tl.load(members_ptr + member).to(tl.int64)
            scores = _score(q_ptr, g_ptr, keys, scales, row, HEADS, DIM, BLOCK_KEYS, TOGETHER)
            limit = tl.load(visible_ptr + row)
            scores = tl.where(entry[:, None] < limit[None, :], scores, float("-inf"))
            kept = inside[:, None] & (first < limit)[None, :]
            tl.store(out_ptr + row[None, :] * out_row + entry[:, None], scores, mask=kept)
