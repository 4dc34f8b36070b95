"""Rows of a prefill in staging: whatever copies are still under way, a chunk finds its own."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from dsv4_tierd.tiering import staging as module
from dsv4_tierd.tiering.mirror import PageMemory
from dsv4_tierd.tiering.staging import Staging, StreamWaits, Text
from late_copies import LateCopier
from tiny_tiers import C4_COUNT, CPU, DIM, PAGES

MIRROR_PAGES = 4


class Desk:
    """Staging over a mirror of known rows, with a copy stream whose copies land late."""

    def __init__(self) -> None:
        self.memory = PageMemory(PAGES, MIRROR_PAGES, 1, CPU)
        self.staging = Staging(self.memory, MIRROR_PAGES * 64, CPU)
        self.copier = LateCopier(random.Random(1), most=1_000)
        self.staging._copier = self.copier  # type: ignore[assignment]
        self.pages = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.rand(C4_COUNT, MIRROR_PAGES * 64, DIM, generator=generator)
        for layer in range(C4_COUNT):
            self.memory.mirror_c4[layer].write(self.mirror_ids(MIRROR_PAGES * 64), self.rows[layer])

    def mirror_ids(self, count: int) -> Tensor:
        numbers = torch.arange(count)
        return self.pages[numbers // 64].long() * 64 + numbers % 64

    def begin(self, known: int, end: int, tokens: int) -> Text:
        return self.staging.begin(self.pages, known, end, tokens)

    def pass_layer(self, layer: int, text: Text, chosen: Tensor, own: Tensor) -> Tensor:
        """As a prefill does: own rows in, chosen ones there, attention; what that would read."""
        rows = self.staging.rows(layer, text)
        rows.write(torch.arange(text.known, text.end), own)
        self.staging.fetch(layer, text, chosen)
        found = rows.read(chosen[chosen >= 0].long())
        self.staging.done(layer, text)
        return found


def test_copies_of_a_chunk_that_was_given_up_never_land_on_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next chunk reads few rows and waits for no copy of its own: nor may any other land."""
    desk = Desk()
    given_up = desk.begin(known=200, end=200, tokens=8)
    assert given_up.streamed and desk.copier.waiting
    monkeypatch.setattr(module, "STREAM_TOKENS_PER_QUERY", 0)
    text = desk.begin(known=130, end=133, tokens=12)
    assert not text.streamed
    own = torch.rand(3, DIM)
    rows = desk.staging.rows(0, text)
    rows.write(torch.arange(130, 133), own)
    desk.staging.fetch(0, text, torch.tensor([[5, 129, 132]], dtype=torch.int32))
    for late in list(desk.copier.waiting):
        late.synchronize()
    assert rows.read(torch.arange(130, 133)).equal(own)
    desk.staging.done(0, text)
    assert desk.memory.mirror_c4[0].read(desk.mirror_ids(133)[130:]).equal(own)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("known", "end"), [(0, 3), (3, 3), (63, 65), (64, 64), (64, 200), (100, 101), (127, 128)]
)
def test_a_chunk_reads_and_writes_back_its_rows(
    monkeypatch: pytest.MonkeyPatch, streamed: bool, known: int, end: int
) -> None:
    """At any border of pages, streamed or fetched: all entries are read and in the mirror after."""
    monkeypatch.setattr(module, "STREAM_TOKENS_PER_QUERY", 10_000 if streamed else 0)
    desk = Desk()
    text = desk.begin(known, end, 4 * (end - known) or 1)
    assert text.streamed is (streamed or known == 0)
    own = torch.rand(C4_COUNT, end - known, DIM)
    chosen = torch.arange(-1, end, dtype=torch.int32).unsqueeze(0)
    for layer in range(C4_COUNT):
        expected = torch.cat([desk.rows[layer][:known], own[layer]])
        assert desk.pass_layer(layer, text, chosen, own[layer]).equal(expected)
        assert desk.memory.mirror_c4[layer].read(desk.mirror_ids(end)).equal(expected)


class Mark:
    """An event that is over, or not yet."""

    def __init__(self, over: bool) -> None:
        self.over = over

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True

    def elapsed_time(self, _end: Mark) -> float:
        return 500.0


def test_waits_are_added_up_as_they_end() -> None:
    """However many chunks pass unasked, no event stands longer than its wait."""
    waits = StreamWaits(CPU)
    for over in (True, True, False):
        mark = Mark(over)
        waits._marks.append((mark, mark))  # type: ignore[arg-type]
        waits.collect()
    assert len(waits._marks) == 1
    assert waits.total_s() == 1.5
    assert not waits._marks
