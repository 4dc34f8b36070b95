"""A copier that stands in for a copy stream: bytes land when somebody waits, never before.

Until then their target holds NaN.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4_tierd.kernels.ref.page_copy import copy_pages


class LateCopier:
    """Copies land in order, each after ``draw`` queries of its event."""

    def __init__(self, draw: random.Random, most: int) -> None:
        self.draw, self.most = draw, most
        self.waiting: deque[LateCopy] = deque()

    def copy(
        self,
        dst: Tensor,
        dst_ids: Sequence[int],
        src: Tensor,
        src_ids: Sequence[int],
        columns: slice = slice(None),
    ) -> LateCopy:
        """As PageCopier's, but late."""
        for page in dst_ids:
            dst[page].fill_(0xFF)  # NaN in every format
        move = (
            dst[:, columns],
            torch.as_tensor(dst_ids),
            src[:, columns],
            torch.as_tensor(src_ids),
        )
        late = LateCopy(self, move, self.draw.randrange(self.most + 1))
        self.waiting.append(late)
        return late


class LateCopy:
    """What stands for the event."""

    def __init__(self, copier: LateCopier, move: tuple[Tensor, ...], queries: int) -> None:
        self.copier, self.move, self.queries = copier, move, queries
        self.done = False

    def query(self) -> bool:
        """Whether the bytes are there; asking brings them nearer."""
        self.queries -= 1
        if self.queries < 0:
            self.synchronize()
        return self.done

    def wait(self) -> None:
        """The engine's stream goes on after it: whatever it queues next finds the bytes."""
        self.synchronize()

    def synchronize(self) -> None:
        """Everything queued up to here lands, in order."""
        while not self.done:
            first = self.copier.waiting.popleft()
            dst, dst_ids, src, src_ids = first.move
            if len(dst_ids):
                copy_pages(dst, dst_ids, src, src_ids)
            first.done = True
