"""Exact selection on every distribution of scores."""

from __future__ import annotations

import time

import pytest
import torch

import naive_ops
from dsv4_tierd.kernels.ref.topk import topk

NAN, INF = float("nan"), float("inf")


def check(scores: torch.Tensor, visible: torch.Tensor, k: int) -> None:
    ids = topk(scores, visible, k)
    assert ids.dtype is torch.int32 and ids.shape == (scores.shape[0], k)
    table = naive_ops.as_array(scores)
    for row, count in enumerate(visible.tolist()):
        expected = naive_ops.topk(table[row], count, k)
        assert ids[row].tolist() == expected + [-1] * (k - len(expected)), f"row {row}"


@pytest.mark.parametrize("k", [1, 2, 16, 64])
@pytest.mark.parametrize("kind", ["normal", "few values", "equal", "zeros", "hostile"])
def test_equals_a_sort(rng: torch.Generator, kind: str, k: int) -> None:
    """The chosen set is a stable sort's, whatever the scores, at every count around k."""
    count = 150
    scores = torch.randn(40, count, generator=rng)
    if kind == "few values":
        scores = torch.randint(-2, 3, (40, count), generator=rng).float()
    if kind == "equal":
        scores = scores[:, :1].expand(-1, count)
    if kind == "zeros":
        scores = torch.where(scores > 0, 0.0, -0.0)
    if kind == "hostile":
        values = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 3e38, -3e38, 1.0])
        scores = values[torch.randint(0, 10, (40, count), generator=rng)]
    visible = torch.randint(0, count + 1, (40,), generator=rng)
    visible[:6] = torch.tensor([0, 1, k - 1, k, k + 1, count])
    check(scores, visible, k)


def test_what_is_not_visible_is_never_chosen(rng: torch.Generator) -> None:
    """+inf and NaN beyond the visible count change nothing."""
    scores = torch.randn(10, 100, generator=rng)
    visible = torch.arange(10) * 7
    clean = topk(scores, visible, 8)
    hidden = torch.arange(100) >= visible.unsqueeze(-1)
    assert torch.equal(topk(scores.masked_fill(hidden, INF), visible, 8), clean)
    assert torch.equal(topk(scores.masked_fill(hidden, NAN), visible, 8), clean)


def test_visible_minus_infinity_beats_invisible() -> None:
    """-inf scores that are visible are chosen before NaN and before anything invisible."""
    scores = torch.tensor([[NAN, -INF, NAN, -INF, 2.0, INF, INF]])
    assert topk(scores, torch.tensor([5]), 3).tolist() == [[1, 3, 4]]
    assert topk(scores, torch.tensor([5]), 4).tolist() == [[0, 1, 3, 4]]


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 1)])
def test_no_queries_or_entries(shape: tuple[int, int]) -> None:
    """Empty tables give padding alone."""
    ids = topk(torch.ones(shape), torch.zeros(shape[0], dtype=torch.int64), 4)
    assert ids.tolist() == [[-1] * 4] * shape[0]


def test_is_a_selection_not_a_sort(rng: torch.Generator) -> None:
    """256 x 32,768 scores take less time than sorting them."""
    scores = torch.randn(256, 32768, generator=rng)
    visible = torch.full((256,), 32768)
    begin = time.perf_counter()
    topk(scores, visible, 64)
    selected = time.perf_counter()
    scores.sort(-1)
    assert selected - begin < (time.perf_counter() - selected) / 2
