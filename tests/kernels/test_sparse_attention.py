"""Attention over window and entries, with rows that must not be read full of NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import naive_ops
from dsv4_tierd.kernels.layout import RowFormat, RowKind, Rows
from dsv4_tierd.kernels.ref.sparse_attention import (
    Listed,
    Picked,
    sparse_attention,
    sparse_attention_prefill,
)

HEADS, DIM, SCALE = 4, 80, 80**-0.5
KINDS = pytest.mark.parametrize("kind", [RowKind.FP32, RowKind.FP8])


def pool(rng: torch.Generator, kind: RowKind, live: Tensor, count: int, page: int) -> Rows:
    """NaN rows but for those in ``live``."""
    rows = naive_ops.nan_pool(RowFormat(kind, DIM, 16), count, page)
    rows.write(live, torch.randn(len(live), DIM, generator=rng) * 2)
    return rows


def naive(q: Tensor, lists: list[list[Tensor]], sink: Tensor) -> np.ndarray:
    out = np.zeros(q.shape)
    for t in range(q.shape[0]):
        keys = [naive_ops.as_array(key) for key in lists[t]]
        for h in range(q.shape[1]):
            out[t, h] = naive_ops.attend(naive_ops.as_array(q[t, h]), keys, float(sink[h]), SCALE)
    return out


def scattered(rng: torch.Generator, tokens: int, width: int, live: Tensor, full: int) -> Tensor:
    """ids [tokens, width] into ``live`` with -1 in any place; the last row has ``full`` of them."""
    ids = live[torch.randint(0, len(live), (tokens, width), generator=rng)]
    ids = ids.masked_fill(torch.rand(tokens, width, generator=rng) < 0.4, -1)
    ids[-1, full:] = -1
    return ids


@KINDS
@pytest.mark.parametrize(("window", "width"), [(16, 5), (128, 200), (1, 0)])
def test_equals_a_loop(rng: torch.Generator, kind: RowKind, window: int, width: int) -> None:
    """Any ids, -1 in any place, odd pages, hostile sinks: the formula's value and never a NaN."""
    live = torch.randperm(300, generator=rng)[:50]
    near, far = pool(rng, kind, live, 300, 61), pool(rng, kind, live, 300, 3)
    q = torch.randn(6, HEADS, DIM, generator=rng)
    sink = torch.tensor([0.5, -math.inf, math.inf, -3.0])
    near_ids = scattered(rng, 6, window, live, 0)
    far_ids = scattered(rng, 6, width, live, 0)
    near_ids[0], far_ids[1] = -1, -1
    out = sparse_attention(q, near, near_ids, far, far_ids, sink, SCALE)
    lists = [
        [near.read(i) for i in near_ids[t] if i >= 0] + [far.read(i) for i in far_ids[t] if i >= 0]
        for t in range(6)
    ]
    assert np.abs(naive_ops.as_array(out) - naive(q, lists, sink)).max() < 1e-5
    only_near = sparse_attention(q, near, near_ids, None, None, sink, SCALE)
    lists = [[near.read(i) for i in near_ids[t] if i >= 0] for t in range(6)]
    assert np.abs(naive_ops.as_array(only_near) - naive(q, lists, sink)).max() < 1e-5


@KINDS
def test_a_query_does_not_feel_its_batch(rng: torch.Generator, kind: RowKind) -> None:
    """Alone, in a batch, and with more padding, a query's bits are the same."""
    live = torch.arange(300)
    near, far = pool(rng, kind, live, 300, 61), pool(rng, kind, live, 300, 64)
    widths = [300, 0, 1, 7, 70, 129, 131, 200, 255, 256, 257]
    count = len(widths)
    q, sink = torch.randn(count, HEADS, DIM, generator=rng), torch.randn(HEADS, generator=rng)
    near_ids = torch.randint(0, 300, (count, 128), generator=rng)
    far_ids = torch.randint(0, 300, (count, 300), generator=rng)
    far_ids = far_ids.masked_fill(torch.arange(300) >= torch.tensor(widths).unsqueeze(-1), -1)
    batch = sparse_attention(q, near, near_ids, far, far_ids, sink, SCALE)
    small = sparse_attention(q, near, near_ids, far, far_ids, sink, SCALE, workspace_bytes=1)
    assert torch.equal(batch, small)
    for row, width in enumerate(widths):
        one = slice(row, row + 1)
        for padded in (width, width + 1, width + 37):
            ids = far_ids[one, :padded]
            alone = sparse_attention(q[one], near, near_ids[one], far, ids, sink, SCALE)
            assert torch.equal(alone[0], batch[row]), (width, padded)


@KINDS
@pytest.mark.parametrize("window", [16, 128])
@pytest.mark.parametrize("tokens", [1, 5, 150])
@pytest.mark.parametrize("scope", ["none", "picked", "listed"])
def test_prefill_equals_the_op(
    rng: torch.Generator, kind: RowKind, window: int, tokens: int, scope: str
) -> None:
    """Consecutive queries over contiguous rows give what the op gives on the same rows."""
    count = window - 1 + tokens
    history = min(7, window - 1)  # the window is not yet full: earlier rows are NaN
    near = pool(rng, kind, torch.arange(window - 1 - history, count), count, 64)
    visible = (torch.arange(tokens) + 1 + history).clamp_max(window)
    live = torch.randperm(200, generator=rng)[:40]
    far = pool(rng, kind, live, 200, 2)
    ends = torch.arange(window, window + tokens)
    columns = torch.arange(window)
    near_ids = ends.unsqueeze(-1) - visible.unsqueeze(-1) + columns
    near_ids = near_ids.masked_fill(columns >= visible.unsqueeze(-1), -1)
    picked: Picked | Listed | None = None
    far_ids = None
    if scope == "picked":
        far_ids = scattered(rng, tokens, 24, live, 3)
        picked = Picked(far, far_ids)
    if scope == "listed":
        seen = (torch.arange(tokens) // 4).clamp_max(40)
        picked = Listed(far, live, seen)
        far_ids = live.expand(tokens, -1).masked_fill(torch.arange(40) >= seen.unsqueeze(-1), -1)
    q, sink = torch.randn(tokens, HEADS, DIM, generator=rng), torch.randn(HEADS, generator=rng)
    sink[0] = -math.inf
    op = sparse_attention(q, near, near_ids, None if far_ids is None else far, far_ids, sink, SCALE)
    for workspace_bytes in (1, 1 << 25):
        out = sparse_attention_prefill(
            q, near, visible, picked, sink, SCALE, window, workspace_bytes
        )
        assert float((out - op).abs().max()) < 1e-5


def test_prefill_padding_sees_nothing(rng: torch.Generator) -> None:
    """Queries with no visible rows give zeros; their own NaN rows reach nobody."""
    near = pool(rng, RowKind.FP32, torch.arange(15, 20), 25, 64)
    q, sink = torch.randn(10, HEADS, DIM, generator=rng), torch.full((HEADS,), -math.inf)
    visible = torch.tensor([1, 2, 3, 4, 5, 0, 0, 0, 0, 0])
    out = sparse_attention_prefill(q, near, visible, None, sink, SCALE, 16)
    assert bool(out.isfinite().all()) and not bool(out[5:].any()) and bool(out[:5].any())


def test_large_logits_do_not_overflow(rng: torch.Generator) -> None:
    """Scores in the thousands pick the best key, in every block order."""
    near = pool(rng, RowKind.FP32, torch.arange(300), 300, 64)
    q, sink = torch.randn(2, HEADS, DIM, generator=rng) * 1e4, torch.zeros(HEADS)
    ids = torch.arange(300).expand(2, -1)
    out = sparse_attention(q, near, ids, None, None, sink, SCALE)
    lists = [[near.read(i) for i in ids[0]]] * 2
    assert np.abs(naive_ops.as_array(out) - naive(q, lists, sink)).max() < 1e-3
