"""A session while it runs: its pages, its tail, what it holds and what it was promised."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4_tierd.tiering.admit import Reservation
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS, Transcript
from dsv4_tierd.tiering.hot_set import C4Place
from dsv4_tierd.tiering.plan import C4_ROWS_PER_PAGE
from dsv4_tierd.tiering.radix import NO_PAGE, Node
from dsv4_tierd.tiering.replay import Start
from dsv4_tierd.tiering.store.protocol import WritePolicy
from dsv4_tierd.tiering.tails import Tail


@dataclass(frozen=True, slots=True)
class Reused:
    """Prompt tokens by where they were found; they sum to what was not computed anew."""

    device: int = 0
    host: int = 0
    store: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.store


@dataclass(slots=True)
class Sequence:
    """One running session in the tiers.

    ``path``: its blocks in the tree, held. ``mirror``/``device``: pages of every block so far,
    the unfinished one last ([capacity] int32 with ``page_count`` in use).
    Tokens below ``emit_from`` have pages already and emit none. ``tail``: the idle tail that it
    will start from, until it is ready.
    """

    transcript: Transcript
    tenant: str
    root: Node
    start: Start
    reused: Reused
    emit_from: int
    position: int
    window_start: int
    triangle: bool
    tail_slot: int
    tail: Tail | None
    mirror: Tensor
    device: Tensor
    path: list[Node] = field(default_factory=list)
    reservation: Reservation = field(default_factory=Reservation)
    page_count: int = 0
    tail_from: int = 0
    restored: int = 0  # blocks whose device pages are taken; ``incoming``: when they are filled
    incoming: torch.cuda.Event | None = None
    rolling_slot: int | None = None
    rolling_at: int = 0
    tail_dirty: bool = False  # rows of the unfinished page that only the tail has
    write_policy: WritePolicy | None = None
    closed: bool = False

    @property
    def leaf(self) -> Node:
        """Deepest held block, or the tenant's root."""
        return self.path[-1] if self.path else self.root

    @property
    def began(self) -> bool:
        """Whether its tail is in a slot, so that it may compute."""
        return self.tail_slot != NO_PAGE

    @property
    def mirror_pages(self) -> Tensor:
        return self.mirror[: self.page_count]

    @property
    def device_pages(self) -> Tensor:
        return self.device[: self.page_count]

    @property
    def place(self) -> C4Place:
        """Where its C4 rows lie; valid until the next extend or commit."""
        return C4Place(self.mirror_pages, self.device_pages, self.tail_slot, self.tail_from)

    def first_token(self, layer: int, window: int) -> int:
        """First position that this layer computes, and that its window holds."""
        return self.window_start + (window - 1) * layer if self.triangle else self.window_start

    @property
    def unfinished_page(self) -> bool:
        """Whether the last page is private: begun and not in the tree."""
        return self.page_count > len(self.path)

    @property
    def page_start_entry(self) -> int:
        """First C4 entry of the page that ``position`` lies in."""
        return self.position // BLOCK_TOKENS * C4_ROWS_PER_PAGE


def page_table(capacity: int) -> Tensor:
    """[capacity] int32 of NO_PAGE."""
    return torch.full((capacity,), NO_PAGE, dtype=torch.int32)
