"""The page memory: mirror pages (all groups, host) and device pages (index keys and C128).

Both are page-first, one contiguous run of bytes a page, so that a page is one blob for the
store and one copy between tiers. Allocated once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dsv4_tierd.kernels.layout import PageLayout, Rows


def host_memory(rows: int, row_bytes: int, pinned: bool) -> Tensor:
    """[rows, row_bytes] uint8 of zeros on the host; not pinned, it costs nothing until used."""
    if pinned:
        return torch.zeros(rows, row_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.from_numpy(np.zeros((rows, row_bytes), np.uint8))


class PageMemory:
    """Mirror and device pages, and the Rows views of every layer.

    mirror: [mirror_pages, mirror_bytes] uint8 host; device: [device_pages, device_bytes] uint8.
    """

    def __init__(
        self, layout: PageLayout, mirror_pages: int, device_pages: int, device: torch.device
    ) -> None:
        self.layout = layout
        pinned = device.type == "cuda"
        self.mirror = host_memory(mirror_pages, layout.mirror_bytes, pinned)
        self.device = torch.zeros(
            device_pages, layout.device_bytes, dtype=torch.uint8, device=device
        )
        c4_part = self.mirror[:, : layout.c4_bytes]
        self.mirror_c4: tuple[Rows, ...] = tuple(section.view(c4_part) for section in layout.c4)
        self.index_keys: tuple[Rows, ...] = tuple(
            section.view(self.device) for section in layout.index
        )
        self.c128: tuple[Rows, ...] = tuple(section.view(self.device) for section in layout.c128)

    def write_back(self, device_page: int, mirror_page: int) -> None:
        """Device page to its mirror page (index keys and C128 rows)."""
        self.mirror[mirror_page, self.layout.c4_bytes :].copy_(self.device[device_page])

    def restore(self, mirror_page: int, device_page: int) -> None:
        """Mirror page's index keys and C128 rows to a device page."""
        self.device[device_page].copy_(self.mirror[mirror_page, self.layout.c4_bytes :])

    def blob(self, mirror_page: int) -> Tensor:
        """All bytes of a mirror page: [mirror_bytes] uint8 view."""
        return self.mirror[mirror_page]
