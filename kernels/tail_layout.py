"""Byte layout of what only its own session reads: the tail, and the resume point cut from it.

A *tail slot* is one run of bytes::

    | window rows, layer by layer | C4 rings | index rings | C128 rings |

The window holds the last ``window`` rows of every layer, row ``position % window``. A ring
holds the compressor's raw inputs of recent tokens (kv | gate, fp32), row ``position % length``.

A *resume point* at a block boundary holds the window section as it is and, of the two C4
rings, the 4 rows before the boundary; nothing is pending in C128 there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dsv4_tierd.kernels.layout import RowFormat, RowKind, Rows, Section

C4_RING = 8
C4_OVERLAP = 4
C128_RING = 128


@dataclass(frozen=True)
class TailLayout:
    """Sections of a tail slot; layers by rank within their kind, windows by layer number."""

    latent: RowFormat
    key: RowFormat
    window: int
    layer_count: int
    c4_count: int
    c128_count: int

    @cached_property
    def windows(self) -> tuple[Section, ...]:
        return self._run(self.latent, self.window, self.layer_count, 0)

    @cached_property
    def c4_rings(self) -> tuple[Section, ...]:
        """Rows of 4 x dim: kv (low | high half), gate (low | high half)."""
        return self._run(_fp32(4 * self.latent.dim), C4_RING, self.c4_count, self.window_bytes)

    @cached_property
    def index_rings(self) -> tuple[Section, ...]:
        start = self.window_bytes + _size(self.c4_rings)
        return self._run(_fp32(4 * self.key.dim), C4_RING, self.c4_count, start)

    @cached_property
    def c128_rings(self) -> tuple[Section, ...]:
        """Rows of 2 x dim: kv, gate."""
        start = self.window_bytes + _size(self.c4_rings) + _size(self.index_rings)
        return self._run(_fp32(2 * self.latent.dim), C128_RING, self.c128_count, start)

    @property
    def window_bytes(self) -> int:
        return _size(self.windows)

    @property
    def slot_bytes(self) -> int:
        return (
            self.window_bytes
            + _size(self.c4_rings)
            + _size(self.index_rings)
            + _size(self.c128_rings)
        )

    @property
    def resume_bytes(self) -> int:
        return (
            self.window_bytes
            + (_size(self.c4_rings) + _size(self.index_rings)) * C4_OVERLAP // C4_RING
        )

    def rings(self, sections: tuple[Section, ...], slots: Tensor) -> tuple[Tensor, ...]:
        """Each layer's ring of every slot: [slots, length, width] fp32 views."""
        return tuple(section.view(slots).data for section in sections)

    def capture(self, slot: Tensor, boundary: int, out: Tensor) -> None:
        """Cut a resume point out of a tail at ``boundary`` (a multiple of 4).

        slot: [slot_bytes] uint8 of a tail whose position is ``boundary``; out: [resume_bytes].
        """
        rows = [ring.reshape(-1).view(torch.uint8) for ring in self._overlap(slot, boundary)]
        out.copy_(torch.cat([slot[: self.window_bytes], *rows]))

    def restore(self, point: Tensor, boundary: int, slot: Tensor) -> None:
        """Start a tail from a resume point: the inverse of ``capture``."""
        point = point.to(slot.device)  # one copy
        slot[self.window_bytes :].zero_()
        slot[: self.window_bytes] = point[: self.window_bytes]
        offset = self.window_bytes
        for ring in self._overlap(slot, boundary):
            size = ring.numel() * ring.element_size()
            ring.copy_(point[offset : offset + size].view(ring.dtype).view_as(ring))
            offset += size

    def _overlap(self, slot: Tensor, boundary: int) -> list[Tensor]:
        """Views of the rows that both C4 rings hold of the 4 tokens before ``boundary``."""
        first, sections = (boundary - C4_OVERLAP) % C4_RING, self.c4_rings + self.index_rings
        rings = [section.view(slot.unsqueeze(0)).data[0] for section in sections]
        return [ring[first : first + C4_OVERLAP] for ring in rings]

    def window_rows(self, slots: Tensor) -> tuple[Rows, ...]:
        """Each layer's window of every slot: Rows of ``window`` rows a page."""
        return tuple(section.view(slots) for section in self.windows)

    @staticmethod
    def _run(fmt: RowFormat, rows: int, count: int, start: int) -> tuple[Section, ...]:
        size = Section(fmt, rows, 0).bytes
        return tuple(Section(fmt, rows, start + i * size) for i in range(count))


def _fp32(width: int) -> RowFormat:
    return RowFormat(RowKind.FP32, width)


def _size(sections: tuple[Section, ...]) -> int:
    return sum(section.bytes for section in sections)
