"""The indexer: how much each query wants each visible entry, and its k best.

score(t, w) = sum_h g[t, h] * relu(q[t, h] . key[w]). Queries come in the basis that the keys are
stored in (see hadamard.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4_tierd.kernels.layout import Rows
from dsv4_tierd.kernels.ref.topk import topk_masked

WORKSPACE_BYTES = 64 << 20
# Score blocks of this size stay in a core's cache between the product, the relu and the sum.
_BLOCK_BYTES = 1 << 19
_BLOCK_KEYS = 1024
_TILE_BYTES = 4 << 20


def index_scores(
    q: Tensor,
    g: Tensor,
    keys: Rows,
    page_ids: Tensor,
    visible: Tensor,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Tensor:
    """Scores of one session's queries against its index keys.

    q: [T, Hi, Di] fp32; g: [T, Hi] fp32, scaled by Di**-0.5 * Hi**-0.5; keys: the pool;
    page_ids: [P] int, pages of ``keys`` in order; visible: [T] int, entries each query may see.
    Returns [T, P * rows_per_page] fp32, -inf where not visible; entries that no query sees are
    not read. Scratch: the decoded keys and blocks of at most ``workspace_bytes``.
    """
    scores = q.new_full((q.shape[0], page_ids.shape[0] * keys.rows_per_page), -torch.inf)
    table = _read_keys(keys, page_ids, _count(visible))
    _score_into(scores, q, g, table, visible, workspace_bytes)
    return scores


def index_scores_decode(
    q: Tensor, g: Tensor, keys: Rows, page_table: Tensor, visible: Tensor
) -> Tensor:
    """Scores of one query for each of B sessions.

    q: [B, Hi, Di] fp32; g: [B, Hi] fp32, scaled; page_table: [B, Pmax] int, -1 padded; visible:
    [B] int. Returns [B, Pmax * rows_per_page] fp32, -inf where not visible. A session's bits
    depend neither on its neighbours nor on Pmax.
    """
    scores = q.new_full((q.shape[0], page_table.shape[1] * keys.rows_per_page), -torch.inf)
    for row, count in enumerate(visible.tolist()):
        one = slice(row, row + 1)
        table = _read_keys(keys, page_table[row], count)
        _score_into(scores[one], q[one], g[one], table, visible[one], WORKSPACE_BYTES)
    return scores


def scores_topk(
    q: Tensor,
    g: Tensor,
    keys: Rows,
    page_ids: Tensor,
    visible: Tensor,
    k: int,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Tensor:
    """topk(index_scores(...)) in query tiles, so that the [T, N] scores are never whole.

    Arguments as index_scores; k: entries to choose. Returns [T, k] int32 entry numbers,
    ascending, -1 padded. Scratch: the decoded keys and at most about ``workspace_bytes``.
    """
    ids = torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
    table = _read_keys(keys, page_ids, _count(visible))
    # A tile's scores, and topk's integer keys and masks at worst; small tiles stay in cache.
    tile_bytes = min(workspace_bytes // 8, _TILE_BYTES)
    tile_rows = max(1, min(q.shape[0], tile_bytes // (4 * max(1, table.shape[0]))))
    scores = q.new_empty(tile_rows, table.shape[0])
    for tile in _tiles(q.shape[0], tile_rows):
        count, rows = _count(visible[tile]), tile.stop - tile.start
        part = scores[:rows, :count]
        _score_into(part, q[tile], g[tile], table[:count], visible[tile], workspace_bytes)
        ids[tile] = topk_masked(part, visible[tile], k)
    return ids


def _score_into(
    scores: Tensor, q: Tensor, g: Tensor, table: Tensor, visible: Tensor, workspace_bytes: int
) -> None:
    """Write scores[:, :len(table)], block by block; -inf where not visible."""
    heads, dim = q.shape[1:]
    block_bytes = min(workspace_bytes, _BLOCK_BYTES)
    tile_rows = max(1, block_bytes // (4 * heads * _BLOCK_KEYS))
    columns = torch.arange(table.shape[0], device=q.device)
    for tile in _tiles(q.shape[0], tile_rows):
        queries, gates = q[tile].reshape(-1, dim), g[tile].unsqueeze(1)
        limit = visible[tile].unsqueeze(-1)
        shortest = int(limit.min())
        for block in _tiles(table.shape[0], _BLOCK_KEYS):
            logits = (queries @ table[block].T).relu_().view(-1, heads, columns[block].shape[0])
            wanted = torch.bmm(gates, logits).squeeze(1)
            if block.stop > shortest:
                wanted.masked_fill_(columns[block] >= limit, -torch.inf)
            scores[tile, block] = wanted


def _read_keys(keys: Rows, page_ids: Tensor, count: int) -> Tensor:
    """The first ``count`` keys of a session: [count, Di] fp32."""
    entries = torch.arange(count, device=page_ids.device)
    pages = page_ids[entries // keys.rows_per_page].long()
    return keys.read(pages * keys.rows_per_page + entries % keys.rows_per_page)


def _count(visible: Tensor) -> int:
    return int(visible.max()) if visible.numel() else 0


def _tiles(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(total, start + size))
