"""Index scores, tiles and batches."""

from __future__ import annotations

import math

import pytest
import torch

import naive_ops
from dsv4_tierd.kernels.layout import RowFormat, RowKind, Rows
from dsv4_tierd.kernels.ref.hadamard import to_key_basis
from dsv4_tierd.kernels.ref.index_scores import index_scores, index_scores_decode, scores_topk
from dsv4_tierd.kernels.ref.topk import topk

KINDS = pytest.mark.parametrize("kind", [RowKind.FP32, RowKind.KEY_FP8])
HEADS, DIM = 16, 32


def session(rng: torch.Generator, kind: RowKind, entries: int) -> tuple[Rows, torch.Tensor]:
    """A pool of 61 pages, NaN but for one session's ``entries`` keys, and its pages."""
    keys = naive_ops.nan_pool(RowFormat(kind, DIM), 61 * 64, 64)
    pages = torch.randperm(61, generator=rng)[: -(-entries // 64)]
    flat = torch.arange(entries)
    x = torch.randn(entries, DIM, generator=rng)
    keys.write(pages[flat // 64] * 64 + flat % 64, to_key_basis(x, kind))
    return keys, pages


def queries(rng: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.randn(count, HEADS, generator=rng) * DIM**-0.5 * HEADS**-0.5
    return torch.randn(count, HEADS, DIM, generator=rng), g


@KINDS
@pytest.mark.parametrize("entries", [1, 63, 64, 65, 200])
def test_scores_follow_the_formula(rng: torch.Generator, kind: RowKind, entries: int) -> None:
    """Gated sums of clipped products with the decoded keys; -inf where not visible, NaN nowhere."""
    keys, pages = session(rng, kind, entries)
    q, g = queries(rng, 5)
    visible = torch.tensor([0, 1, entries // 2, entries, entries])
    scores = index_scores(q, g, keys, pages, visible)
    assert scores.shape == (5, len(pages) * 64)
    for t, count in enumerate(visible.tolist()):
        assert bool((scores[t, count:] == -math.inf).all())
        for w in range(count):
            key = keys.read(pages[w // 64] * 64 + w % 64)
            expected = naive_ops.index_score(*map(naive_ops.as_array, (q[t], g[t], key)))
            assert abs(float(scores[t, w]) - expected) < 1e-5


def test_fp8_keys_rank_like_exact_ones(rng: torch.Generator) -> None:
    """The Hadamard basis cancels: FP8 scores are the exact ones within the format's error."""
    x = torch.randn(64, DIM, generator=rng)
    q, g = queries(rng, 3)
    scores = []
    for kind in (RowKind.FP32, RowKind.KEY_FP8):
        keys = naive_ops.nan_pool(RowFormat(kind, DIM), 64, 64)
        keys.write(torch.arange(64), to_key_basis(x, kind))
        basis = to_key_basis(q, kind)
        scores.append(index_scores(basis, g, keys, torch.tensor([0]), torch.full((3,), 64)))
    assert 0 < float((scores[0] - scores[1]).abs().max()) < 0.05 * float(scores[0].std()) * 4


@KINDS
def test_a_session_does_not_feel_its_batch(rng: torch.Generator, kind: RowKind) -> None:
    """Alone or beside longer sessions, with any padding of the table, the bits are the same."""
    keys, pages = session(rng, kind, 64 * 20)
    q, g = queries(rng, 4)
    visible = torch.tensor([5, 1280, 0, 700])
    table = torch.stack([pages, pages, pages.flip(0), pages])
    table[0, 1:], table[2, :], table[3, 11:] = -1, -1, -1
    batch = index_scores_decode(q, g, keys, table, visible)
    for row, count in enumerate(visible.tolist()):
        one = slice(row, row + 1)
        tight = -(-count // 64)
        alone = index_scores_decode(q[one], g[one], keys, table[one, :tight], visible[one])
        assert torch.equal(alone[0, :count], batch[row, :count])
        assert bool((batch[row, count:] == -math.inf).all())
    assert not bool(batch.isnan().any())


@pytest.mark.parametrize("workspace_bytes", [1, 1 << 16, 1 << 26])
def test_workspace_changes_no_choice(rng: torch.Generator, workspace_bytes: int) -> None:
    """The tiled choice is the choice from the whole table, however small the tiles."""
    keys, pages = session(rng, RowKind.FP32, 2100)
    q, g = queries(rng, 40)
    visible = torch.arange(40) * 53
    whole = topk(index_scores(q, g, keys, pages, visible), visible, 24)
    tiled = scores_topk(q, g, keys, pages, visible, 24, workspace_bytes)
    assert torch.equal(tiled, whole)


def test_no_entries_and_no_queries(rng: torch.Generator) -> None:
    """Before the first group closes nothing is chosen; no queries give no rows."""
    keys, _ = session(rng, RowKind.FP32, 1)
    q, g = queries(rng, 3)
    none = torch.empty(0, dtype=torch.int64)
    assert scores_topk(q, g, keys, none, torch.zeros(3).long(), 4).tolist() == [[-1] * 4] * 3
    assert scores_topk(q[:0], g[:0], keys, none, none, 4).shape == (0, 4)
    assert index_scores(q[:0], g[:0], keys, none, none).shape == (0, 0)
