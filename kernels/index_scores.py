"""Index scores on the GPU: FP8 queries against paged FP8 keys, relu, weighted sum over heads.

One program takes a tile of keys and runs every query that reads it past it. In decode, a *plan*
(made on the host, from the page table, when pages change) names the page ranges and who reads
them, so sessions that share a prefix share its scan. A score's bits depend on its query and its
key alone: not on the tile, the group or the neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.kernels import nvrtc
from dsv4_tierd.kernels.index_scores_triton import (
    encode_queries_kernel,
    scan_queries_kernel,
    scan_sessions_kernel,
)
from dsv4_tierd.kernels.layout import FP8_AMAX_FLOOR, FP8_MAX, RowKind, Rows
from dsv4_tierd.kernels.ref import index_scores as ref
from dsv4_tierd.kernels.scan_plan import GROUP_KEYS, ScanPlan, fill_plan, new_plan
from dsv4_tierd.kernels.topk import topk
from dsv4_tierd.kernels.triton_rows import row_arguments, runs_kernels, triton

__all__ = [
    "Queries",
    "ScanPlan",
    "encode_queries",
    "fill_plan",
    "index_scores",
    "index_scores_decode",
    "new_plan",
    "scores_topk",
]

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
        encode_queries_kernel[(tokens, triton.cdiv(heads, block))](
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
    elif tokens and columns and _compiled(queries, keys):
        _launch_compiled(queries, keys, (page_ids, 0), visible, _QUERY_BLOCK, None, out)
    elif tokens and columns:
        grid = (-(-tokens // _QUERY_BLOCK), -(-columns // _PREFILL_KEYS))
        scan_queries_kernel[grid](
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
    if _compiled(queries, keys):
        table = (page_table, page_table.stride(0))
        _launch_compiled(queries, keys, table, visible, 1, plan, out)
    else:
        _launch_triton(queries, keys, page_table, visible, plan, out)
    return out


def _compiled(queries: Queries, keys: Rows) -> bool:
    """Whether csrc/index_scan.cu takes this: 64 heads of 128, pages of 64; else Triton runs.

    With wgmma on Hopper, with mma.sync on Blackwell.
    """
    device = queries.codes.device
    if device.type != "cuda":
        return False
    if not nvrtc.compiles_for(torch.cuda.get_device_capability(device)):
        return False
    return queries.codes.shape[1:] == (64, 128) and keys.rows_per_page == 64


def _launch_compiled(
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
    tiles = -(-pages * keys.rows_per_page // GROUP_KEYS)
    segments, tile_ends, members = (
        (visible,) * 3 if plan is None else (plan.segments, plan.tile_ends, plan.members)
    )
    scan_sessions_kernel[(min(batch * tiles, 2 * _processors(out.device)),)](
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
        **_shape(queries, keys, GROUP_KEYS, 1),
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
