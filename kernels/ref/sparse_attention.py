"""Attention of one latent head (K = V) over window rows and chosen entries, with a sink.

o[t, h] = sum_j e**s_j key_j / (e**sink_h + sum_j e**s_j), s_j = scale * q[t, h] . key_j, over
the union of both scopes. Rows that nothing names never reach a result, NaN or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.kernels.layout import Rows

WORKSPACE_BYTES = 32 << 20
# Keys are taken in blocks of this many, so trailing padding changes no bit of a result.
_BLOCK_KEYS = 128
_QUERY_TILE = 64
_LIMIT = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Picked:
    """Entries chosen per query: ids [T, K] int rows of ``rows``, -1 padded."""

    rows: Rows
    ids: Tensor


@dataclass(frozen=True, slots=True)
class Listed:
    """Entries in order, a prefix visible to each query: ids [n] int, visible [T] int."""

    rows: Rows
    ids: Tensor
    visible: Tensor


def sparse_attention(
    q: Tensor,
    window: Rows,
    window_ids: Tensor,
    extra: Rows | None,
    extra_ids: Tensor | None,
    sink: Tensor,
    scale: float,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Tensor:
    """Attention of T independent queries (a decode batch) over rows that ids name.

    q: [T, H, D] fp32, rotated; window_ids: [T, W] and extra_ids: [T, K] int rows, -1 = none, in
    any place; sink: [H] fp32, infinities allowed; scale: D**-0.5. Returns [T, H, D] fp32, before
    the inverse rotation; zeros where nothing is visible. A query's bits depend on its own q and
    the order of its ids, not on other queries nor on how many -1 follow its ids.
    """
    out = torch.empty_like(q)
    scopes = [(window, window_ids)]
    if extra is not None:
        assert extra_ids is not None
        scopes.append((extra, extra_ids))
    tile_rows = max(1, workspace_bytes // (4 * _BLOCK_KEYS * (2 * q.shape[2] + 3 * q.shape[1])))
    for start in range(0, q.shape[0], tile_rows):
        tile = slice(start, min(q.shape[0], start + tile_rows))
        running = _Softmax(q[tile], sink)
        for rows, ids in scopes:
            for block in torch.split(ids[tile], _BLOCK_KEYS, 1):
                running.add_picked(rows, block, scale)
        out[tile] = running.result()
    return out


def sparse_attention_prefill(
    q: Tensor,
    window: Rows,
    window_visible: Tensor,
    scope: Picked | Listed | None,
    sink: Tensor,
    scale: float,
    window_size: int,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Tensor:
    """Attention of T consecutive queries of one session, as sparse_attention.

    q: [T, H, D] fp32; window: the first window_size - 1 + T rows of the view, in token order,
    query i's own row at window_size - 1 + i; window_visible: [T] int, how many rows, ending with
    its own, query i sees (0 .. window_size). Returns [T, H, D] fp32. Equals sparse_attention on
    the same rows up to the rounding of another order; bits depend on T. Scratch: the decoded
    window and listed rows, and tiles of about ``workspace_bytes``.
    """
    tokens, heads, dim = q.shape
    count = window_size - 1 + tokens
    ends = torch.arange(window_size, window_size + tokens, device=q.device)
    starts = ends - window_visible
    window_keys = _read_seen(window, count, starts, ends)
    entries = _Entries(scope, workspace_bytes)
    scored = heads * (window_size + _QUERY_TILE + entries.width)
    per_query = 4 * (3 * scored + 2 * entries.gathered * dim)
    size = max(1, min(_QUERY_TILE, workspace_bytes // per_query))
    out = torch.empty_like(q)
    columns = torch.arange(count, device=q.device)
    for start in range(0, tokens, size):
        stop = min(tokens, start + size)
        tile, span = slice(start, stop), slice(start, stop + window_size - 1)
        keys = window_keys[span]
        seen = (columns[span] >= starts[tile, None]) & (columns[span] < ends[tile, None])
        scores = (q[tile].reshape(-1, dim) @ keys.T).view(stop - start, heads, -1)
        scores = (scores * scale).masked_fill_(~seen.unsqueeze(1), -torch.inf)
        if scope is None:
            weights = _weights(scores, sink)
            out[tile] = (weights.flatten(0, 1) @ keys).view(-1, heads, dim)
            continue
        chosen, chosen_scores = entries.score(q[tile], tile, scale)
        weights = _weights(torch.cat([scores, chosen_scores], -1), sink)
        near, far = weights[..., : keys.shape[0]], weights[..., keys.shape[0] :]
        out[tile] = (near.flatten(0, 1) @ keys).view(-1, heads, dim) + torch.matmul(far, chosen)
    return out


def _weights(scores: Tensor, sink: Tensor) -> Tensor:
    """Softmax over the last axis of [t, H, n] with a sink a head; zeros where nothing weighs."""
    sink = sink.view(-1, 1)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink).clamp_(-_LIMIT, _LIMIT)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True) + torch.exp(sink.clamp_max(_LIMIT) - top)
    # Nothing visible and sink -inf gives 0 / 0; otherwise the total is at least about 1.
    return weights.div_(total.masked_fill_(total == 0, 1.0))


def _read_seen(window: Rows, count: int, starts: Tensor, ends: Tensor) -> Tensor:
    """Window rows 0 .. count-1 [count, D] fp32, zeros for those that no query sees."""
    edges = torch.zeros(count + 1, dtype=torch.int64, device=starts.device)
    edges.index_add_(0, starts.long(), torch.ones_like(starts, dtype=torch.int64))
    edges.index_add_(0, ends.long(), -torch.ones_like(ends, dtype=torch.int64))
    unseen = (edges.cumsum(0)[:count] == 0).unsqueeze(-1)
    return window.read(torch.arange(count, device=starts.device)).masked_fill(unseen, 0.0)


class _Entries:
    """The keys beside the window, read so that each is decoded as seldom as memory allows."""

    def __init__(self, scope: Picked | Listed | None, workspace_bytes: int) -> None:
        self.scope = scope
        self.table: Tensor | None = None
        self.width = self.gathered = 0
        if isinstance(scope, Listed):
            self.width = int(scope.visible.max()) if scope.visible.numel() else 0
            self.table = scope.rows.read(scope.ids[: self.width])
        elif isinstance(scope, Picked):
            self.width = self.gathered = scope.ids.shape[1]
            rows = scope.rows
            fits = rows.row_count * rows.format.dim * 4 <= 2 * workspace_bytes
            if fits and rows.row_count <= scope.ids.numel():
                self.table = rows.read(torch.arange(rows.row_count, device=scope.ids.device))

    def score(self, q: Tensor, tile: slice, scale: float) -> tuple[Tensor, Tensor]:
        """(keys [n, D] or [t, n, D], scores [t, H, n]) of a tile's entries, masked both."""
        if isinstance(self.scope, Listed):
            assert self.table is not None
            limit = self.scope.visible[tile]
            keys = self.table[: int(limit.max())]
            hidden = torch.arange(keys.shape[0], device=q.device) >= limit.unsqueeze(-1)
            scores = (q.flatten(0, 1) @ keys.T).view(*q.shape[:2], -1) * scale
        else:
            assert self.scope is not None
            ids = self.scope.ids[tile]
            hidden, safe = ids < 0, ids.clamp_min(0).long()
            keys = self.scope.rows.read(safe) if self.table is None else self.table[safe]
            keys = keys.masked_fill_(hidden.unsqueeze(-1), 0.0)
            scores = torch.bmm(q, keys.transpose(1, 2)) * scale
        return keys, scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)


class _Softmax:
    """Running maximum, denominator and weighted sum of a tile of queries."""

    def __init__(self, q: Tensor, sink: Tensor) -> None:
        self.q = q
        # The sink opens the sum: value 0, weight e**sink. Clamped so that infinities work out.
        sinks = sink.clamp_max(_LIMIT).expand(q.shape[0], -1).unsqueeze(-1)
        self.top = sinks.clamp_min(-_LIMIT)
        self.total = torch.exp(sinks - self.top)
        self.sum = torch.zeros_like(q)

    def add_picked(self, rows: Rows, ids: Tensor, scale: float) -> None:
        """Add keys [t, <= block] by id. Blocks with no id at all change nothing and are skipped."""
        seen = ids >= 0
        if not bool(seen.any()):
            return
        if ids.shape[1] < _BLOCK_KEYS:
            missing = _BLOCK_KEYS - ids.shape[1]
            ids = torch.nn.functional.pad(ids, (0, missing), value=-1)
            seen = torch.nn.functional.pad(seen, (0, missing), value=False)
        keys = rows.read(ids.clamp_min(0)).masked_fill(~seen.unsqueeze(-1), 0.0)
        scores = torch.bmm(self.q, keys.transpose(1, 2)) * scale
        self._add(scores.masked_fill(~seen.unsqueeze(1), -torch.inf), keys)

    def _add(self, scores: Tensor, keys: Tensor) -> None:
        top = torch.maximum(self.top, scores.amax(-1, keepdim=True)).clamp(-_LIMIT, _LIMIT)
        shrink = torch.exp(self.top - top)
        weights = torch.exp(scores - top)
        self.total = self.total * shrink + weights.sum(-1, keepdim=True)
        self.sum = self.sum * shrink + torch.bmm(weights, keys)
        self.top = top

    def result(self) -> Tensor:
        # The total is 0 (nothing visible, sink -inf) or at least about 1: the top weighs 1.
        return torch.where(self.total == 0, 0.0, self.sum / self.total)
