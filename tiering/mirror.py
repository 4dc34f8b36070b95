"""The page memory: mirror pages (all groups, host) and device pages (index keys and C128).

Both are page-first, one contiguous run of bytes a page, so that a page is one blob for the
store and one copy between tiers. Allocated once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from dsv4_tierd.kernels.layout import PageLayout, Rows, Section
from dsv4_tierd.kernels.page_copy import PageCopier
from dsv4_tierd.tiering.pinned import Progress, host_memory


class PageMemory:
    """Mirror and device pages, and the Rows views of every layer.

    mirror: [mirror_pages, mirror_bytes] uint8 host; device: [device_pages, device_bytes] uint8,
    or with ``whole`` [device_pages, mirror_bytes]: device pages then hold their C4 rows too.
    """

    def __init__(
        self,
        layout: PageLayout,
        mirror_pages: int,
        device_pages: int,
        device: torch.device,
        whole: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.layout = layout
        pinned = device.type == "cuda"
        self.mirror = host_memory(mirror_pages, layout.mirror_bytes, pinned, progress)
        self._copied = slice(0 if whole else layout.c4_bytes, None)
        page_bytes = self.mirror[:1, self._copied].shape[1]
        self.device = torch.zeros(device_pages, page_bytes, dtype=torch.uint8, device=device)
        self._copier = PageCopier(device) if device.type == "cuda" else None
        self._restoring: torch.cuda.Event | None = None  # the latest copies of restore_all
        self.mirror_c4 = _views(layout.c4, self.mirror[:, : layout.c4_bytes])
        self.device_c4: tuple[Rows, ...] | None = None
        if whole:
            self.device_c4 = _views(layout.c4, self.device[:, : layout.c4_bytes])
        behind = self.device[:, page_bytes - layout.device_bytes :]
        self.index_keys = _views(layout.index, behind)
        self.c128 = _views(layout.c128, behind)

    def write_back(self, device_page: int, mirror_page: int) -> None:
        """Device page to its mirror page."""
        self.mirror[mirror_page, self._copied].copy_(self.device[device_page])

    def restore(self, mirror_page: int, device_page: int) -> None:
        """What a device page holds, from its mirror page."""
        self.device[device_page].copy_(self.mirror[mirror_page, self._copied])

    def restore_all(
        self, mirror_pages: Seq[int], device_pages: Seq[int]
    ) -> torch.cuda.Event | None:
        """``restore`` of many pages beside the engine's stream; the event tells when it is done.

        After it every copy of earlier calls is done too. None: done already.
        """
        if self._copier is not None:
            source = self.mirror[:, self._copied]
            self._restoring = self._copier.copy(self.device, device_pages, source, mirror_pages)
            return self._restoring
        for mirror_page, device_page in zip(mirror_pages, device_pages, strict=True):
            self.restore(mirror_page, device_page)
        return None

    def await_restores(self) -> None:
        """What the engine's stream is given from now on finds the copies of restore_all done."""
        if self._restoring is not None:
            self._restoring.wait()
            self._restoring = None

    def duplicate(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Copy a private page: (mirror, device) page numbers."""
        self.mirror[target[0]].copy_(self.mirror[source[0]])
        self.device[target[1]].copy_(self.device[source[1]])

    def blob(self, mirror_page: int) -> Tensor:
        """All bytes of a mirror page: [mirror_bytes] uint8 view."""
        return self.mirror[mirror_page]

    def blob_until(self, mirror_page: int, tokens: int) -> Tensor:
        """As ``blob``, a copy: the entries of the page's first ``tokens`` tokens, and then zeros.

        What follows them is what the page held before, another tenant's for one.
        """
        source = self.mirror[mirror_page : mirror_page + 1]
        page, layout = torch.zeros_like(source), self.layout
        behind = layout.c4_bytes
        groups = ((layout.c4, 0, 4), (layout.index, behind, 4), (layout.c128, behind, 128))
        for sections, start, ratio in groups:
            count = tokens // ratio
            into, out_of = (_views(sections, pages[:, start:]) for pages in (page, source))
            for new, old in zip(into, out_of, strict=True):
                new.data[:, :count] = old.data[:, :count]
                if new.scale is not None and old.scale is not None:
                    new.scale[:, :count] = old.scale[:, :count]
        return page[0]


def _views(sections: tuple[Section, ...], pages: Tensor) -> tuple[Rows, ...]:
    return tuple(section.view(pages) for section in sections)
