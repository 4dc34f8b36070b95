"""Top-k on the GPU equals its twin, position by position, whatever the scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4_tierd.kernels import topk as op
from dsv4_tierd.kernels.ref import topk as ref

Poison = Callable[[Tensor], Tensor]
DEVICE = torch.device("cuda")


def _narrow(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    return 1.0 + torch.randint(0, 40000, shape, generator=rng, device=DEVICE) * 2.0**-23


def _specials(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38]
    table = torch.tensor([*values, *[0.0] * 7], device=DEVICE)
    return table[torch.randint(0, len(table), shape, generator=rng, device=DEVICE)]


def _nan_heavy(shape: tuple[int, int], rng: torch.Generator) -> Tensor:
    scores = torch.full(shape, float("nan"), device=DEVICE)
    some = torch.rand(shape, generator=rng, device=DEVICE) < 200 / shape[1]
    return torch.where(some, -torch.inf, scores)


DISTRIBUTIONS: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "normal": lambda shape, rng: torch.randn(shape, generator=rng, device=DEVICE),
    "uniform": lambda shape, rng: torch.rand(shape, generator=rng, device=DEVICE),
    "narrow": _narrow,
    "all_equal": lambda shape, rng: torch.full(shape, 0.25, device=DEVICE),
    "all_nan": lambda shape, rng: torch.full(shape, float("nan"), device=DEVICE),
    "all_minus_inf": lambda shape, rng: torch.full(shape, -torch.inf, device=DEVICE),
    "few_values": lambda shape, rng: torch.randint(
        0, 5, shape, generator=rng, device=DEVICE
    ).float(),
    "denormal": lambda shape, rng: torch.randint(
        0, 1 << 23, shape, generator=rng, device=DEVICE, dtype=torch.int32
    ).view(torch.float32),
    "any_bits": lambda shape, rng: (
        torch.randint(-(2**31), 2**31 - 1, shape, generator=rng, device=DEVICE)
        .int()
        .view(torch.float32)
    ),
    "signed_zero": lambda shape, rng: torch.where(
        torch.rand(shape, generator=rng, device=DEVICE) < 0.5, 0.0, -0.0
    ),
    "specials": _specials,
    "nan_heavy": _nan_heavy,
    "ascending": lambda shape, rng: (
        torch.arange(shape[1], device=DEVICE).float().expand(shape).contiguous()
    ),
    "descending": lambda shape, rng: (
        -torch.arange(shape[1], device=DEVICE).float().expand(shape).contiguous()
    ),
    "relu": lambda shape, rng: torch.randn(shape, generator=rng, device=DEVICE).sub(2.6).relu(),
    "peaked": lambda shape, rng: (
        torch.randn(shape, generator=rng, device=DEVICE)
        + (torch.arange(shape[1], device=DEVICE) > shape[1] * 0.98) * 8.0
    ),
}


def _assert_same(
    scores: Tensor, visible: Tensor, k: int, poison: Poison, cluster: int | None = None
) -> None:
    ids = poison(torch.empty(scores.shape[0], k, dtype=torch.int32, device=DEVICE))
    op.topk(scores, visible, k, ids, cluster=cluster)
    expected = ref.topk(scores, visible, k)
    rows = (ids != expected).any(-1).nonzero().flatten().tolist()
    assert not rows, (
        f"rows {rows[:4]} of {scores.shape}, k {k}, cluster {cluster},"
        f" visible {visible[rows[:4]].tolist()}:"
        f" {ids[rows[0]].tolist()[:8]} ... is not {expected[rows[0]].tolist()[:8]} ..."
    )


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("k", [1, 512, 2048])
def test_every_distribution_gives_the_twins_positions(
    name: str, k: int, rng: torch.Generator, poison: Poison
) -> None:
    """Ties, narrow ranges, NaN, infinities, denormals and signed zeros change nothing."""
    for columns in (3000, 16384, 262144):
        scores = DISTRIBUTIONS[name]((3, columns), rng)
        visible = torch.tensor(
            [columns, columns - 1, columns // 2], dtype=torch.int32, device=DEVICE
        )
        _assert_same(scores, visible, k, poison)


@pytest.mark.parametrize("cluster", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", ["normal", "few_values", "ascending", "peaked", "narrow"])
def test_every_cluster_size_gives_the_twins_positions(
    name: str, cluster: int, rng: torch.Generator, poison: Poison
) -> None:
    """Chunks of one tile and of many, through the candidates and through the radix path."""
    for columns in (4004, 131072 + 4, 1 << 20):
        scores = DISTRIBUTIONS[name]((2, columns), rng)
        visible = torch.tensor([columns, columns - 3], dtype=torch.int32, device=DEVICE)
        _assert_same(scores, visible, 512, poison, cluster)


@pytest.mark.parametrize("k", [1, 2, 511, 512, 1024, 2048])
def test_ragged_lengths(k: int, rng: torch.Generator, poison: Poison) -> None:
    """0, 1, k, k + 1 and 2**20 visible, in one batch; scores past the visible are NaN and +inf."""
    columns = 1 << 20
    lengths = [0, 1, k - 1, k, k + 1, k + 2, 4 * k + 3, 65537, 262143, columns - 1, columns]
    visible = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    scores = torch.randn(len(lengths), columns, generator=rng, device=DEVICE)
    past = torch.arange(columns, device=DEVICE) >= visible.unsqueeze(-1)
    scores = torch.where(past, torch.where(past.cumsum(-1) % 2 == 0, torch.inf, torch.nan), scores)
    _assert_same(scores, visible, k, poison)


@pytest.mark.parametrize("batch", [1, 7, 64, 256])
def test_batches(batch: int, rng: torch.Generator, poison: Poison) -> None:
    """From one row over a whole cluster to several rows a multiprocessor."""
    columns = 65536
    visible = torch.randint(
        0, columns + 1, (batch,), generator=rng, device=DEVICE, dtype=torch.int32
    )
    _assert_same(torch.randn(batch, columns, generator=rng, device=DEVICE), visible, 512, poison)


def test_rows_past_two_to_the_31_bytes(rng: torch.Generator, poison: Poison) -> None:
    """Addresses are 64-bit: a wide pitch puts the last row past 2**31 scores."""
    pitch = 1 << 28
    memory = torch.empty(9 * pitch, device=DEVICE)
    scores = memory.as_strided((9, 5000), (pitch, 1))
    scores.copy_(torch.randn(9, 5000, generator=rng, device=DEVICE))
    _assert_same(scores, torch.full((9,), 5000, dtype=torch.int32, device=DEVICE), 512, poison)


def test_mirror_rows_come_with_the_positions(rng: torch.Generator, poison: Poison) -> None:
    """Fused rows equal a gather through the page list, for drafts of two tokens a request."""
    columns, k, width = 64 * 61, 512, 2
    scores = torch.randn(6, columns, generator=rng, device=DEVICE)
    visible = torch.tensor([columns, 100, 0, 513, 3000, 512], dtype=torch.int32, device=DEVICE)
    pages = torch.randint(0, 1 << 24, (3, 69), generator=rng, device=DEVICE, dtype=torch.int32)
    rows = poison(torch.empty(6, k, dtype=torch.int32, device=DEVICE))
    ids = op.topk(scores, visible, k, mirror=op.MirrorRows(pages, rows, width))
    assert torch.equal(ids, ref.topk(scores, visible, k))
    assert torch.equal(rows, op.mirror_rows(ids, pages, width))


def test_a_captured_graph_sees_new_scores(rng: torch.Generator) -> None:
    """A replay reads the scores and lengths that are there then; nothing is allocated."""
    scores = torch.randn(2, 131072, generator=rng, device=DEVICE)
    visible = torch.tensor([131072, 1000], dtype=torch.int32, device=DEVICE)
    ids = torch.empty(2, 512, dtype=torch.int32, device=DEVICE)
    op.topk(scores, visible, 512, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.topk(scores, visible, 512, ids)
    for _ in range(3):
        scores.normal_(generator=rng)
        visible.copy_(torch.randint(0, 131073, (2,), generator=rng, device=DEVICE))
        graph.replay()
        assert torch.equal(ids, ref.topk(scores, visible, 512))


def test_same_result_every_time(rng: torch.Generator) -> None:
    """Atomics order candidates at random; the result does not depend on it."""
    scores = torch.randint(0, 3000, (8, 262144), generator=rng, device=DEVICE).float()
    visible = torch.full((8,), 262144, dtype=torch.int32, device=DEVICE)
    first = op.topk(scores, visible, 2048)
    for _ in range(20):
        assert torch.equal(op.topk(scores, visible, 2048), first)
