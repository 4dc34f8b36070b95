"""Pages move byte for byte, and only the columns asked for."""

from __future__ import annotations

import torch

from dsv4_tierd.kernels.ref.page_copy import copy_pages


def test_copies_named_pages_and_columns(rng: torch.Generator) -> None:
    """Chosen columns of chosen pages arrive; every other byte stays; pitches may differ."""
    src = torch.randint(0, 256, (9, 128), generator=rng, dtype=torch.uint8)
    wide = torch.randint(0, 256, (61, 300), generator=rng, dtype=torch.uint8)
    dst = wide[:, 100:228]  # a device page is the tail of a mirror page
    expected = wide.clone()
    dst_ids, src_ids = torch.tensor([60, 0, 17]), torch.tensor([3, 3, 8], dtype=torch.int32)
    for d, s in zip(dst_ids.tolist(), src_ids.tolist(), strict=True):
        expected[d, 110:140] = src[s, 10:40]
    copy_pages(dst, dst_ids, src, src_ids, slice(10, 40))
    assert torch.equal(wide, expected)
    copy_pages(dst, dst_ids, src, src_ids)
    assert torch.equal(dst[17], src[8]) and torch.equal(wide[:, :100], expected[:, :100])


def test_no_pages() -> None:
    """An empty list copies nothing."""
    dst, none = torch.zeros(2, 4, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)
    copy_pages(dst, none, torch.ones(2, 4, dtype=torch.uint8), none)
    assert not bool(dst.any())
