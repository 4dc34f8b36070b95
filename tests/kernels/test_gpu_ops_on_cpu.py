"""The GPU ops on a CPU: the twin's answer through the op's interface, wrong arguments refused."""

from __future__ import annotations

import pytest
import torch

from dsv4_tierd.kernels import swap_in as swap
from dsv4_tierd.kernels import topk as top
from dsv4_tierd.kernels.layout import RowFormat, RowKind, row_pool
from dsv4_tierd.kernels.page_copy import copy_pages
from dsv4_tierd.kernels.ref import topk as ref

CPU = torch.device("cpu")
FORMAT = RowFormat(RowKind.FP8, 128, 64)


def test_topk_gives_the_twins_positions_and_their_mirror_rows() -> None:
    """Positions 64 p + i of a request stand in its page p, place i; padding stays -1."""
    scores = torch.randn(4, 256)
    visible = torch.tensor([256, 3, 0, 100], dtype=torch.int32)
    pages = torch.tensor([[7, 5, 9, 1], [2, 8, 0, 3]], dtype=torch.int32)
    rows = torch.empty(4, 16, dtype=torch.int32)
    ids = top.topk(scores, visible, 16, mirror=top.MirrorRows(pages, rows, tokens_per_request=2))
    assert torch.equal(ids, ref.topk(scores, visible, 16))
    for t in range(4):
        expected = [
            -1 if i < 0 else int(pages[t // 2, i // 64]) * 64 + i % 64 for i in ids[t].tolist()
        ]
        assert rows[t].tolist() == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 0}, "k 0"),
        ({"k": 4096}, "k 4096"),
        ({"visible": torch.zeros(2, dtype=torch.int64)}, "visible: torch.int64"),
        ({"visible": torch.zeros(3, dtype=torch.int32)}, "visible: shape"),
        ({"scores": torch.zeros(2, 64, dtype=torch.bfloat16)}, "scores: torch.bfloat16"),
        ({"ids": torch.zeros(2, 4)}, "ids: torch.float32"),
    ],
)
def test_topk_refuses_wrong_arguments_by_name(change: dict[str, object], words: str) -> None:
    """The message names the argument and what it must be."""
    given: dict[str, object] = {
        "scores": torch.zeros(2, 64),
        "visible": torch.zeros(2, dtype=torch.int32),
        "k": 4,
        **change,
    }
    with pytest.raises(ValueError, match=words):
        top.topk(**given)  # type: ignore[arg-type]


def test_pages_must_cover_the_scores() -> None:
    """A page list that is too short would be read past its end."""
    mirror = top.MirrorRows(
        torch.zeros(1, 1, dtype=torch.int32), torch.empty(1, 4, dtype=torch.int32)
    )
    with pytest.raises(ValueError, match="do not cover"):
        top.topk(torch.zeros(1, 65), torch.zeros(1, dtype=torch.int32), 4, mirror=mirror)


def _hot(slot_count: int, mirror_rows: int) -> swap.HotSet:
    def none(count: int) -> torch.Tensor:
        return torch.full((count,), -1, dtype=torch.int32)

    return swap.HotSet(
        row_pool(FORMAT, slot_count, 64, CPU), none(mirror_rows), none(slot_count), none(slot_count)
    )


def test_swap_in_and_evict_keep_the_tables_and_counters() -> None:
    """A first step copies, a second finds, a third copies again what was evicted."""
    mirror = row_pool(FORMAT, 256, 64, CPU)
    mirror.data.random_(0, 256)
    hot, counters = _hot(64, 256), torch.zeros(2, dtype=torch.int64)
    rows = torch.tensor([[1, 5, -1], [5, 200, 7]], dtype=torch.int32)
    slots = torch.empty_like(rows)
    for step in range(3):
        if step == 2:
            swap.evict_rows(torch.tensor([5, 9, -1], dtype=torch.int32), hot)
        swap.swap_in(rows, hot, mirror, torch.tensor([step], dtype=torch.int32), slots, counters)
        assert slots[0, 2] == -1
        assert torch.equal(hot.owner[slots[rows >= 0].long()], rows[rows >= 0])
        place = slots[1].long()
        assert torch.equal(hot.rows.data[0, place], mirror.data.flatten(0, 1)[rows[1].long()])
    assert counters.tolist() == [0 + 4 + 3, 4 + 0 + 1]


def test_swap_in_refuses_what_does_not_fit() -> None:
    """Too few slots, tables that do not belong together, other row formats."""
    mirror, step = row_pool(FORMAT, 256, 64, CPU), torch.zeros(1, dtype=torch.int32)
    rows, counters = torch.zeros(1, 40, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="twice as many"):
        swap.swap_in(rows, _hot(64, 256), mirror, step, torch.empty_like(rows), counters)
    few = rows[:, :8].contiguous()
    with pytest.raises(ValueError, match="residency of 300 rows"):
        swap.swap_in(few, _hot(64, 300), mirror, step, torch.empty_like(few), counters)
    other = row_pool(RowFormat(RowKind.BF16, 128), 256, 64, CPU)
    with pytest.raises(ValueError, match="mirror: rows of"):
        swap.swap_in(few, _hot(64, 256), other, step, torch.empty_like(few), counters)


def test_page_copies_take_lists_and_tensors() -> None:
    """Ids in either form; other pages and columns stay."""
    src, dst = (
        torch.randint(1, 256, (4, 32), dtype=torch.uint8),
        torch.zeros(5, 32, dtype=torch.uint8),
    )
    copy_pages(dst, [4, 0], src, torch.tensor([1, 3]), slice(8, 24))
    assert torch.equal(dst[4, 8:24], src[1, 8:24])
    assert torch.equal(dst[0, 8:24], src[3, 8:24])
    assert int(dst.count_nonzero()) == 32
