"""Page copies move the named columns of the named pages, and nothing else."""

from __future__ import annotations

import pytest
import torch

from dsv4_tierd.kernels import page_copy as op
from dsv4_tierd.kernels.ref import page_copy as ref

DEVICE = torch.device("cuda")
WIDE, NARROW = 9000, 5000


def _pools(way: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(dst, src): device pages are the tail of mirror pages, each of odd pitch."""
    host = torch.randint(0, 256, (61, WIDE), dtype=torch.uint8).pin_memory()[:, WIDE - NARROW :]
    device = torch.randint(0, 256, (69, NARROW + 7), dtype=torch.uint8, device=DEVICE)[:, :NARROW]
    return (host, device) if way == "d2h" else (device, host)


@pytest.mark.parametrize("way", ["h2d", "d2h"])
@pytest.mark.parametrize("columns", [slice(None), slice(1000, 3001), slice(0, 1)])
def test_copies_equal_the_twins(way: str, columns: slice, seed: int) -> None:
    """Runs, single pages and repeats of a source page; untouched bytes stay."""
    del seed
    for count in (0, 1, 2, 30, 61):
        dst, src = _pools(way)
        dst_ids = torch.randperm(dst.shape[0])[:count].sort().values
        src_ids = torch.randint(0, src.shape[0], (count,)) if count % 2 else torch.arange(count)
        expected = dst.cpu().clone()
        ref.copy_pages(expected, dst_ids, src.cpu(), src_ids, columns)
        op.copy_pages(dst, dst_ids, src, src_ids, columns)
        torch.cuda.synchronize()
        assert torch.equal(dst.cpu(), expected)


@pytest.mark.parametrize("way", ["h2d", "d2h"])
def test_scattered_pages_on_a_side_stream_equal_the_twins(way: str, seed: int) -> None:
    """Single pages, short runs and a long run at once: batch and 2D copies side by side."""
    del seed
    copier = op.PageCopier(DEVICE)
    for count in (1, 3, 40):
        dst, src = _pools(way)
        dst_ids = torch.cat([torch.arange(45, 57), torch.randperm(44)[:count]])
        src_ids = torch.cat([torch.arange(12), torch.randint(0, src.shape[0], (count,))])
        expected = dst.cpu().clone()
        ref.copy_pages(expected, dst_ids, src.cpu(), src_ids, slice(3, 4990))
        copier.copy(dst, dst_ids, src, src_ids, slice(3, 4990)).synchronize()
        assert torch.equal(dst.cpu(), expected)


@pytest.mark.parametrize("way", ["h2d", "d2h"])
def test_side_stream_waits_for_the_work_before_it(way: str, seed: int) -> None:
    """A copy sees what the current stream wrote before, and the event tells when it is done."""
    del seed
    dst, src = _pools(way)
    copier = op.PageCopier(DEVICE)
    if way == "d2h":
        torch.cuda._sleep(20_000_000)
        src.fill_(42)
    done = copier.copy(dst, [3, 4, 5], src, [7, 8, 9])
    torch.cuda.current_stream().wait_event(done)
    done.synchronize()
    assert torch.equal(dst[3:6].cpu(), src[7:10].cpu())


def test_device_to_device(seed: int) -> None:
    """Both sides on the card."""
    del seed
    src = torch.randint(0, 256, (8, 4096), dtype=torch.uint8, device=DEVICE)
    dst = torch.zeros_like(src)
    op.copy_pages(dst, [0, 1, 5], src, [2, 3, 0])
    assert torch.equal(dst[[0, 1, 5]], src[[2, 3, 0]])


def test_pageable_memory_is_refused() -> None:
    """A copy that would block is an error, not a slow success."""
    with pytest.raises(ValueError, match="pageable"):
        op.copy_pages(
            torch.zeros(2, 64, dtype=torch.uint8, device=DEVICE),
            [0],
            torch.zeros(2, 64).byte(),
            [0],
        )
