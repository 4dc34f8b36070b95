"""Whole layers of C4 rows on their way to the device, ahead of the prefill that reads them.

Two staging buffers of one layer each: while a layer's attention reads one, the next layer's rows
come into the other on a side stream. A short chunk chooses few rows: those alone are fetched.
New rows are written to staging by the compressor, and from there to the mirror.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.kernels.layout import Rows
from dsv4_tierd.kernels.page_copy import PageCopier, copy_pages
from dsv4_tierd.kernels.step_ids import fetch_rows
from dsv4_tierd.tiering.hot_set import STREAM_TOKENS_PER_QUERY
from dsv4_tierd.tiering.mirror import PageMemory
from dsv4_tierd.tiering.plan import C4_ROWS_PER_PAGE


@dataclass(slots=True)
class Text:
    """The C4 rows of one sequence during one chunk.

    mirror: [P] int32 mirror pages on the host, device_mirror: the same on the device;
    entries [0, known) are in the mirror, [known, end) are the chunk's own. streamed: whether whole
    layers come in.
    """

    mirror: Tensor
    device_mirror: Tensor
    known: int
    end: int
    streamed: bool
    queued: int = 0  # layers whose copy has been started


@dataclass(slots=True)
class _Buffer:
    bytes: Tensor
    rows: Rows
    filled: torch.cuda.Event | None = None


class StreamWaits:
    """Seconds for which the current stream had nothing to do but wait, told by events."""

    def __init__(self, device: torch.device) -> None:
        self._timed = device.type == "cuda"
        self._marks: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._total_s = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What is queued inside is a wait."""
        if not self._timed:
            yield
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._marks.append((before, after))

    def collect(self) -> None:
        """Add up the waits that are over, so that no more events stand than waits under way."""
        while self._marks and self._marks[0][1].query():
            before, after = self._marks.popleft()
            self._total_s += before.elapsed_time(after) / 1000

    def total_s(self) -> float:
        """All waits queued so far; waits for them."""
        if self._marks:
            self._marks[-1][1].synchronize()
        self.collect()
        return self._total_s


class Staging:
    """The two buffers, the stream that fills them, and the seconds that compute waited for it."""

    def __init__(self, memory: PageMemory, row_count: int, device: torch.device) -> None:
        self._memory = memory
        self._sections = memory.layout.c4
        pages = -(-row_count // C4_ROWS_PER_PAGE)
        self._buffers = [self._buffer(pages, device) for _ in self._sections[:2]]
        self._copier = PageCopier(device) if device.type == "cuda" else None
        self._last: torch.cuda.Event | None = None
        self._waits = StreamWaits(device)

    def _buffer(self, pages: int, device: torch.device) -> _Buffer:
        section = self._sections[0]
        raw = torch.zeros(pages, section.bytes, dtype=torch.uint8, device=device)
        return _Buffer(raw, type(section)(section.format, section.rows, 0).view(raw))

    @property
    def exposed_copy_s(self) -> float:
        """Seconds for which the engine's stream had nothing to do but wait for a layer's rows."""
        return self._waits.total_s()

    # ------------------------------------------------------------ a chunk
    def begin(self, mirror: Tensor, known: int, end: int, tokens: int) -> Text:
        """Start a chunk of ``tokens`` that ends at entry ``end``; mirror: [P] int32 on the host."""
        self._waits.collect()
        # A chunk that was given up, or that no token took through every layer, left copies under
        # way: they must not land on this chunk's rows.
        if self._last is not None:
            self._last.wait()
        device = self._buffers[0].bytes.device
        text = Text(
            mirror=mirror,
            device_mirror=mirror.to(device),
            known=known,
            end=end,
            streamed=tokens * STREAM_TOKENS_PER_QUERY >= known * 4,
        )
        if text.streamed:
            for _ in self._buffers:
                self._queue(text)
        return text

    def _queue(self, text: Text) -> None:
        """Start to copy the next layer's known rows, once what read its buffer is done."""
        layer = text.queued
        if layer == len(self._sections):
            return
        text.queued += 1
        buffer, pages = self._buffers[layer % 2], -(-text.known // C4_ROWS_PER_PAGE)
        numbers, source = torch.arange(pages), self._mirror_section(layer)
        if self._copier is None:
            copy_pages(buffer.bytes, numbers, source, text.mirror[:pages])
            return
        # The mirror's rows were written on the engine's stream; so were this buffer's last readers.
        buffer.filled = self._copier.copy(buffer.bytes, numbers, source, text.mirror[:pages])
        self._last = buffer.filled

    def rows(self, layer: int, text: Text) -> Rows:
        """Staging of a layer: rows by entry number. The engine's stream waits for its copy."""
        buffer = self._buffers[layer % 2]
        if text.streamed and buffer.filled is not None:
            with self._waits.timed():
                buffer.filled.wait()
        return buffer.rows

    def fetch(self, layer: int, text: Text, chosen: Tensor) -> None:
        """Bring what a short chunk chose: chosen [T, K] int32 entries, -1 padded."""
        if text.streamed or not text.known:
            return
        wanted = torch.zeros(text.end + 1, dtype=torch.bool, device=chosen.device)
        wanted.index_fill_(0, torch.where(chosen >= 0, chosen, text.end).flatten().long(), True)
        # The page that the chunk goes on with is written back whole.
        wanted[text.known - text.known % C4_ROWS_PER_PAGE : text.known] = True
        rows = self._buffers[layer % 2].rows
        mirror = self._memory.mirror_c4[layer]
        fetch_rows(wanted[: text.known], text.device_mirror, mirror, rows)

    def done(self, layer: int, text: Text) -> None:
        """The layer's readers are queued: write its new rows back, start a later layer's copy."""
        first = text.known // C4_ROWS_PER_PAGE
        pages = torch.arange(first, -(-text.end // C4_ROWS_PER_PAGE))
        if text.end > text.known:
            source = self._buffers[layer % 2].bytes
            copy_pages(self._mirror_section(layer), text.mirror[pages], source, pages)
        if text.streamed:
            self._queue(text)

    def _mirror_section(self, layer: int) -> Tensor:
        section = self._sections[layer]
        return self._memory.mirror[:, section.offset : section.offset + section.bytes]
