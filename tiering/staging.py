"""Whole layers of C4 rows on their way to the device, ahead of the prefill that reads them.

Two staging buffers of one layer each: while a layer's attention reads one, the next layer's rows
come into the other on a side stream. A short chunk chooses few rows: those alone are fetched.
New rows are written to staging by the compressor, and from there to the mirror.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.kernels.layout import Rows
from dsv4_tierd.kernels.page_copy import copy_pages
from dsv4_tierd.kernels.step_ids import fetch_rows
from dsv4_tierd.tiering.mirror import PageMemory
from dsv4_tierd.tiering.plan import C4_ROWS_PER_PAGE

# A chunk of n tokens chooses nearly every row of a context shorter than n times this.
STREAM_TOKENS_PER_QUERY = 2048


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


class Staging:
    """The two buffers, the stream that fills them, and the seconds that compute waited for it."""

    def __init__(self, memory: PageMemory, row_count: int, device: torch.device) -> None:
        self._memory = memory
        self._sections = memory.layout.c4
        pages = -(-row_count // C4_ROWS_PER_PAGE)
        self._buffers = [self._buffer(pages, device) for _ in self._sections[:2]]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._exposed_copy_s = 0.0

    def _buffer(self, pages: int, device: torch.device) -> _Buffer:
        section = self._sections[0]
        raw = torch.zeros(pages, section.bytes, dtype=torch.uint8, device=device)
        return _Buffer(raw, type(section)(section.format, section.rows, 0).view(raw))

    @property
    def exposed_copy_s(self) -> float:
        """Seconds for which the engine's stream had nothing to do but wait for a layer's rows."""
        for before, after in self._waits:
            after.synchronize()
            self._exposed_copy_s += before.elapsed_time(after) / 1000
        self._waits.clear()
        return self._exposed_copy_s

    # ------------------------------------------------------------ a chunk
    def begin(self, mirror: Tensor, known: int, end: int, tokens: int) -> Text:
        """Start a chunk of ``tokens`` that ends at entry ``end``; mirror: [P] int32 on the host."""
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
        buffer = self._buffers[layer % 2]
        pages = -(-text.known // C4_ROWS_PER_PAGE)
        if self._stream is None:
            self._copy_in(layer, text, pages)
            return
        # The mirror's rows were written on the engine's stream; so were this buffer's last readers.
        self._stream.wait_stream(torch.cuda.current_stream(buffer.bytes.device))
        with torch.cuda.stream(self._stream):
            self._copy_in(layer, text, pages)
            buffer.filled = self._stream.record_event()

    def _copy_in(self, layer: int, text: Text, pages: int) -> None:
        source = self._mirror_section(layer)
        into = self._buffers[layer % 2].bytes
        copy_pages(into, torch.arange(pages), source, text.mirror[:pages])

    def rows(self, layer: int, text: Text) -> Rows:
        """Staging of a layer: rows by entry number. The engine's stream waits for its copy."""
        buffer = self._buffers[layer % 2]
        if text.streamed and buffer.filled is not None:
            stream = torch.cuda.current_stream(buffer.bytes.device)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record(stream)
            stream.wait_event(buffer.filled)
            after.record(stream)
            self._waits.append((before, after))
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
