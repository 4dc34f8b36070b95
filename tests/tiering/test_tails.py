"""Packed tails: exact at every position, and refused when they are not what they say."""

from __future__ import annotations

import msgspec
import pytest
import torch

from dsv4_tierd.tiering.errors import TransferFailed
from dsv4_tierd.tiering.tails import TAIL_FORMAT_VERSION, TailPool, split_packed
from tiny_tiers import CPU, PAGES, TAIL


def filled(seed: int = 0, slots: int = 3) -> TailPool:
    """Slots of random bytes (whole fp32 values, so that views are comparable)."""
    pool = TailPool(TAIL, slots, CPU)
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(slots, TAIL.slot_bytes // 4, generator=generator)
    pool.slots.copy_(values.view(torch.uint8))
    return pool


def page(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (PAGES.mirror_bytes,), generator=generator, dtype=torch.uint8)


POSITIONS = [1, 3, 4, 5, 7, 8, 127, 128, 129, 252, 255, 256, 257, 260, 383, 384, 511, 1000, 65537]


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("with_page", [False, True])
def test_unpack_is_the_inverse_of_pack(position: int, with_page: bool) -> None:
    """Windows, C4 and index rings, the pending C128 rows and the page come back bit for bit."""
    pool, source = filled(), page() if with_page else None
    packed = pool.pack(0, position, source)
    target = torch.zeros_like(page()) if with_page else None
    assert pool.unpack(packed, 2, target) == position
    fixed = TAIL.c128_rings[0].offset
    assert torch.equal(pool.slots[2, :fixed], pool.slots[0, :fixed])
    pending = position % 128
    for ring in pool.c128_rings:
        assert torch.equal(ring[2, :pending], ring[0, :pending])
        assert not ring[2, pending:].any(), "state that is not pending is not inherited"
    if source is not None:
        assert target is not None and torch.equal(target, source)


def test_only_what_is_pending_is_packed() -> None:
    """At a multiple of 128 the long ring costs nothing."""
    pool = filled()
    sizes = [len(pool.pack(0, position, None)) for position in (256, 257, 383)]
    row = TAIL.c128_rings[0].format.row_bytes
    assert sizes[1] - sizes[0] == pytest.approx(row, abs=8)
    assert sizes[2] - sizes[0] == pytest.approx(127 * row, abs=8)


def test_any_changed_byte_is_refused() -> None:
    """A flipped bit anywhere, header or body, raises and is never a tail."""
    pool, source = filled(), page()
    packed = pool.pack(0, 300, source)
    for at in [*range(40), *range(40, len(packed), 97), len(packed) - 1]:
        bad = bytearray(packed)
        bad[at] ^= 4
        with pytest.raises(TransferFailed):
            pool.unpack(bytes(bad), 2, torch.zeros_like(source))


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 20, 1000, -1])
def test_cut_off_bytes_are_refused(size: int) -> None:
    """A tail cut anywhere raises; so does one with bytes too many."""
    pool = filled()
    packed = pool.pack(0, 300, None)
    with pytest.raises(TransferFailed):
        pool.unpack(packed[:size], 2, None)
    with pytest.raises(TransferFailed):
        pool.unpack(packed + b"x", 2, None)


def test_another_version_is_refused_by_name() -> None:
    """The error names both versions."""
    pool = filled()
    header, body = split_packed(pool.pack(0, 300, None))
    other = msgspec.msgpack.encode([TAIL_FORMAT_VERSION + 1, *msgspec.to_builtins(header)[1:]])
    packed = len(other).to_bytes(4, "little") + other + bytes(body)
    with pytest.raises(TransferFailed, match=f"{TAIL_FORMAT_VERSION + 1}, not"):
        pool.unpack(packed, 2, None)


def test_a_page_that_is_missing_or_too_many_is_refused() -> None:
    """A tail packed with its page is not unpacked without it, nor the other way round."""
    pool, source = filled(), page()
    with pytest.raises(TransferFailed):
        pool.unpack(pool.pack(0, 300, source), 2, None)
    with pytest.raises(TransferFailed):
        pool.unpack(pool.pack(0, 300, None), 2, source)


def test_a_cleared_slot_remembers_nothing() -> None:
    """Compressor state is never inherited; other slots are left alone."""
    pool = filled()
    others = pool.slots[[0, 2]].clone()
    pool.clear(1)
    assert not pool.slots[1].any() and torch.equal(pool.slots[[0, 2]], others)


def test_a_slot_is_freed_once() -> None:
    """Freeing a free slot is a bug, and found."""
    pool = filled()
    with pytest.raises(AssertionError):
        pool.free(0)
