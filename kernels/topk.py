"""Lightning top-k: the k best of the visible scores, exactly, in one launch (csrc/topk.cu).

On a CPU the twin in ``kernels/ref/topk.py`` runs: it is the specification.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dsv4_tierd.kernels import nvrtc
from dsv4_tierd.kernels.checks import check_dense, check_rows_aligned, check_tensor
from dsv4_tierd.kernels.ref import topk as ref

K_MAX = 2048
COLUMNS_MAX = 1 << 20
_THREADS = 512
_CTA_SCORES = 16384  # what one CTA holds in registers
# sizeof(Shared) in topk.cu, rounded up; the candidates follow it.
_SHARED_BYTES = (3 * 4096 + 256) * 4


@dataclass(frozen=True, slots=True)
class MirrorRows:
    """Also give the mirror row of each position: page * rows a page + place in the page.

    pages: [requests, page_count] int32, mirror pages in order of position; rows: [T, k] int32,
    written, -1 where the position is. ``tokens_per_request``: rows of scores that share a line
    of ``pages`` (draft width).
    """

    pages: Tensor
    rows: Tensor
    tokens_per_request: int = 1


def topk(
    scores: Tensor,
    visible: Tensor,
    k: int,
    ids: Tensor | None = None,
    mirror: MirrorRows | None = None,
    *,
    cluster: int | None = None,
) -> Tensor:
    """Positions of the k largest among the first ``visible[t]`` scores of each row.

    scores: [T, N] fp32, N up to 2**20 and on a GPU a multiple of 4, rows at multiples of 16 B; any
    values (NaN ranks below -inf, +0 equals -0). visible: [T] int32, 0 .. N. ids: [T, k] int32,
    written and returned (made when None: not inside a graph). Ascending, -1 padded; ties to the
    lowest position. k up to 2048.
    ``cluster``: CTAs a row (power of two up to 16), chosen when None. Raises ValueError on a wrong
    argument. Cost: each score is read once (heavy ties: up to five times), one launch.
    """
    tokens, columns = scores.shape
    if not 0 < k <= K_MAX or columns > COLUMNS_MAX:
        raise ValueError(f"k {k} of {columns}: at most {K_MAX} of {COLUMNS_MAX}")
    if ids is None:
        ids = torch.empty(tokens, k, dtype=torch.int32, device=scores.device)
    _check(scores, visible, ids, mirror)
    if not tokens:
        return ids
    if scores.device.type != "cuda":
        ids.copy_(ref.topk(scores, visible, k))
        if mirror is not None:
            mirror.rows.copy_(mirror_rows(ids, mirror.pages, mirror.tokens_per_request))
        return ids
    ctas = cluster or _cluster(tokens, columns, k, scores.device)
    nvrtc.load("topk.cu", "topk", scores.device).launch(
        _shape(tokens * ctas, ctas, k),
        scores,
        scores.stride(0),
        visible,
        columns,
        k,
        _candidates(ctas, k),
        ids,
        None if mirror is None else mirror.rows,
        None if mirror is None else mirror.pages,
        0 if mirror is None else mirror.pages.stride(0),
        1 if mirror is None else mirror.tokens_per_request,
    )
    return ids


def mirror_rows(ids: Tensor, pages: Tensor, tokens_per_request: int = 1) -> Tensor:
    """Mirror rows of positions, plainly: [T, k] int32, -1 where ``ids`` is."""
    per_page = nvrtc.C4_ROWS_PER_PAGE
    table = pages.repeat_interleave(tokens_per_request, 0)[: ids.shape[0]]
    place = ids.clamp_min(0).long()
    rows = table.gather(1, place // per_page) * per_page + place % per_page
    return torch.where(ids < 0, -1, rows).to(torch.int32)


def _check(scores: Tensor, visible: Tensor, ids: Tensor, mirror: MirrorRows | None) -> None:
    device, (tokens, columns), k = scores.device, scores.shape, ids.shape[1]
    check_tensor("scores", scores, torch.float32, (None, None), device)
    if device.type == "cuda":
        check_rows_aligned("scores", scores, 16)
        if columns % 4:
            raise ValueError(f"scores: {columns} a row, on a GPU a multiple of 4")
    check_tensor("visible", visible, torch.int32, (tokens,), device)
    check_tensor("ids", ids, torch.int32, (tokens, k), device)
    check_dense("visible", visible)
    check_dense("ids", ids)
    if mirror is None:
        return
    check_tensor("rows", mirror.rows, torch.int32, (tokens, k), device)
    check_dense("rows", mirror.rows)
    check_tensor("pages", mirror.pages, torch.int32, (None, None), device)
    check_rows_aligned("pages", mirror.pages, 4)
    requests, page_count = mirror.pages.shape
    if (
        requests * mirror.tokens_per_request < tokens
        or page_count * nvrtc.C4_ROWS_PER_PAGE < columns
    ):
        raise ValueError(
            f"pages: {tuple(mirror.pages.shape)} do not cover {tokens} rows of {columns} scores"
        )


@cache
def _cluster(tokens: int, columns: int, k: int, device: torch.device) -> int:
    """CTAs a row: enough to hold it in registers, as long as all clusters run at once."""
    ctas = 2 if k > 1024 else 1
    while (
        ctas < 16
        and columns > ctas * _CTA_SCORES
        and tokens <= _clusters_at_once(ctas * 2, k, device)
    ):
        ctas *= 2
    return ctas


@cache
def _clusters_at_once(ctas: int, k: int, device: torch.device) -> int:
    """What the card's groups of multiprocessors have room for, which is less than their sum."""
    kernel = nvrtc.load("topk.cu", "topk", device)
    return kernel.clusters_at_once(_shape(ctas, ctas, k))


def _shape(blocks: int, ctas: int, k: int) -> nvrtc.Shape:
    return nvrtc.Shape(
        blocks, _THREADS, ctas, _SHARED_BYTES + 4 * _candidates(ctas, k) * (1 + ctas)
    )


def _candidates(ctas: int, k: int) -> int:
    """Candidates a CTA may hold; every CTA holds everyone's keys in shared memory."""
    if ctas == 16:
        return 1024 if k <= 512 else 2048
    return {1: 8192, 2: 8192, 4: 4096, 8: 4096}[ctas]
