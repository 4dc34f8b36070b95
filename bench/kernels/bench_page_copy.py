"""Page copies: 1,024 slices of 37,440 B of wider pages, to the device and back, and scattered."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from harness import LINK_GBS, Case, Work, gigabytes_per_second

from dsv4_tierd.kernels.page_copy import copy_pages

SLICE_BYTES = 37440
PAGE_SLICES = 4
PAGES = 1024
# direction, ids in order, goal in GB/s
CASES = (("h2d", True, 54.0), ("d2h", True, 54.0), ("h2d", False, None), ("d2h", False, None))


def cases(toy: bool) -> Iterator[Case]:
    """Each direction, in one run and in runs of one page; on a CPU a toy size through the twin."""
    pages = 8 if toy else PAGES
    for way, ordered, goal in CASES:
        name = f"{pages} slices of {SLICE_BYTES} B {way}" + ("" if ordered else " scattered")
        yield Case(
            name,
            partial(_build, pages, way, ordered),
            None if toy else goal,
            LINK_GBS,
            metric="bandwidth",
            unit="GB/s",
            better="higher",
            value=gigabytes_per_second,
        )


def _build(pages: int, way: str, ordered: bool, device: torch.device) -> Work:
    on_gpu = device.type == "cuda"
    host = torch.randint(0, 256, (pages, PAGE_SLICES * SLICE_BYTES), dtype=torch.uint8)
    host = host.pin_memory() if on_gpu else host
    there = torch.randint(0, 256, (pages, SLICE_BYTES), dtype=torch.uint8, device=device)
    part = host[:, SLICE_BYTES : 2 * SLICE_BYTES]
    dst, src = (there, part) if way == "h2d" else (part, there)
    dst_ids = torch.arange(pages)
    src_ids = dst_ids if ordered else torch.randperm(pages)

    def run() -> None:
        copy_pages(dst, dst_ids, src, src_ids)

    def check() -> None:
        dst.fill_(7)
        run()
        if on_gpu:
            torch.cuda.synchronize()
        assert torch.equal(dst[dst_ids.to(dst.device)].cpu(), src[src_ids.to(src.device)].cpu())

    return Work(
        [run] * (4 if on_gpu else 1), check, pages * SLICE_BYTES, lambda: [dst[:4]], graph=False
    )
