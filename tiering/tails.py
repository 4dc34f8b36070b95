"""Tails: what only its own session reads, in device slots while in use, packed when it must move.

A running sequence owns its tail's slot and its unfinished page. When the request ends the tail
becomes *idle*: an immutable value that forks share by counting. Whoever runs next takes it over
if nobody else refers to it, and copies it otherwise. Under pressure, and on suspend, an idle
tail is packed to the bytes in use; losing one costs a recomputation, never an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from dsv4_tierd.kernels.tail_layout import C128_RING, TailLayout
from dsv4_tierd.tiering.errors import TransferFailed
from dsv4_tierd.tiering.radix import NO_PAGE

TAIL_FORMAT_VERSION = 1


@dataclass(slots=True)
class Tail:
    """An idle tail after ``position`` tokens. Exactly one of ``slot`` and ``packed`` is set.

    ``mirror`` and ``device``: the unfinished page's, NO_PAGE if it has no entry yet or when packed.
    ``from_store``: it was just read from there.
    """

    position: int
    slot: int | None
    mirror: int = NO_PAGE
    device: int = NO_PAGE
    packed: bytes | None = None
    refs: int = 1
    stamp: int = 0
    from_store: bool = False


class _Header(msgspec.Struct, frozen=True, array_like=True):
    version: int
    position: Annotated[int, msgspec.Meta(ge=0)]
    ring_rows: int
    page_bytes: int
    checksum: int  # XXH3 of the body, seeded with the position


class TailPool:
    """Tail slots [slot_count, slot_bytes] uint8 on the device, and each layer's views of them."""

    def __init__(self, layout: TailLayout, slot_count: int, device: torch.device) -> None:
        self.layout = layout
        self.slots = torch.zeros(slot_count, layout.slot_bytes, dtype=torch.uint8, device=device)
        self.windows = layout.window_rows(self.slots)
        self.c4_rings = layout.rings(layout.c4_rings, self.slots)
        self.index_rings = layout.rings(layout.index_rings, self.slots)
        self.c128_rings = layout.rings(layout.c128_rings, self.slots)
        self._free = list(range(slot_count))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def free_slots(self) -> list[int]:
        return self._free

    def take(self) -> int:
        return self._free.pop()

    def free(self, slot: int) -> None:
        assert slot not in self._free, slot
        self._free.append(slot)

    def clear(self, slot: int) -> None:
        """Start from nothing: compressor state is never inherited."""
        self.slots[slot].zero_()

    def pack(self, slot: int, position: int, page: Tensor | None) -> bytes:
        """The slot's bytes in use, and the unfinished page's ([mirror_bytes] uint8, or None)."""
        ring_rows = position % C128_RING
        parts = [self.slots[slot, : self._fixed_bytes]]
        parts += [ring[slot, :ring_rows].reshape(-1).view(torch.uint8) for ring in self.c128_rings]
        page_bytes = 0 if page is None else page.numel()
        body = torch.cat(parts).cpu().numpy().tobytes()
        if page is not None:
            body += page.numpy().tobytes()
        checksum = xxh3_64_intdigest(body, position)
        header = msgspec.msgpack.encode(
            _Header(TAIL_FORMAT_VERSION, position, ring_rows, page_bytes, checksum)
        )
        return len(header).to_bytes(4, "little") + header + body

    def unpack(self, packed: bytes, slot: int, page: Tensor | None) -> int:
        """The inverse of ``pack``: fills the slot and the page; returns the tail's position.

        Raises TransferFailed if the bytes are not a tail of this layout.
        """
        header, body = split_packed(packed)
        ring_bytes = sum(header.ring_rows * ring.shape[2] * 4 for ring in self.c128_rings)
        if len(body) != self._fixed_bytes + ring_bytes + header.page_bytes:
            raise TransferFailed(f"packed tail has {len(body)} bytes, not what its header says")
        if header.page_bytes != (0 if page is None else page.numel()):
            raise TransferFailed(f"packed tail has a page of {header.page_bytes} bytes")
        if xxh3_64_intdigest(body, header.position) != header.checksum:
            raise TransferFailed("packed tail has a wrong checksum")
        data = torch.frombuffer(bytearray(body), dtype=torch.uint8).to(self.slots.device)
        self.clear(slot)
        self.slots[slot, : self._fixed_bytes] = data[: self._fixed_bytes]
        offset = self._fixed_bytes
        for ring in self.c128_rings:
            size = header.ring_rows * ring.shape[2] * 4
            ring[slot, : header.ring_rows] = (
                data[offset : offset + size].view(torch.float32).view(-1, ring.shape[2])
            )
            offset += size
        if page is not None:
            page.copy_(data[offset:])
        return header.position

    @property
    def _fixed_bytes(self) -> int:
        """Windows, C4 and index rings: always whole."""
        layout = self.layout
        return layout.c128_rings[0].offset if layout.c128_rings else layout.slot_bytes


def split_packed(packed: bytes) -> tuple[_Header, memoryview]:
    """Header and body of a packed tail. Raises TransferFailed if it is not one."""
    size = int.from_bytes(packed[:4], "little")
    try:
        header = msgspec.msgpack.decode(packed[4 : 4 + size], type=_Header)
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"packed tail has no readable header: {error}") from error
    if header.version != TAIL_FORMAT_VERSION:
        raise TransferFailed(f"packed tail is version {header.version}, not {TAIL_FORMAT_VERSION}")
    return header, memoryview(packed)[4 + size :]
