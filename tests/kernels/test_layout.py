"""Byte layouts: sizes that other programs rely on, and rows that come back as they went in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsv4_tierd.kernels.layout import (
    PageLayout,
    RowFormat,
    RowKind,
    Rows,
    row_pool,
)
from dsv4_tierd.kernels.layout_doc import layout_page, v4_layouts
from dsv4_tierd.kernels.tail_layout import TailLayout

ROOT = Path(__file__).parents[2]


def test_v4_sizes_are_the_formats() -> None:
    """A V4 row is 584 bytes, an index key 132; Flash's page, tail and resume point follow."""
    pages, tail = v4_layouts(21, 20, 2)
    assert (pages.latent.row_bytes, pages.key.row_bytes) == (584, 132)
    assert pages.mirror_bytes == 21 * 64 * 584 + 21 * 64 * 132 + 20 * 2 * 584
    assert pages.device_bytes == pages.mirror_bytes - pages.c4_bytes
    assert tail.resume_bytes == 43 * 128 * 584 + 21 * 4 * 4 * (2048 + 512)
    assert tail.slot_bytes == 43 * 128 * 584 + 21 * 8 * 4 * (2048 + 512) + 20 * 128 * 1024 * 4


def test_the_document_is_made_from_the_layout() -> None:
    """docs/LAYOUT.md is what layout_doc prints."""
    assert (ROOT / "docs" / "LAYOUT.md").read_text() == layout_page()


@pytest.mark.parametrize("kind", list(RowKind))
def test_sections_do_not_overlap(kind: RowKind) -> None:
    """Writing any row of any section of any page changes no other row."""
    latent = RowFormat(RowKind.FP8 if kind is RowKind.KEY_FP8 else kind, 80, 16)
    key = RowFormat(RowKind.KEY_FP8 if kind is RowKind.FP8 else kind, 32, 16)
    layout = PageLayout(latent, key, (1, 3), (2,))
    memory = torch.zeros(3, layout.mirror_bytes, dtype=torch.uint8)
    c4, device = memory[:, : layout.c4_bytes], memory[:, layout.c4_bytes :]
    views: list[Rows] = [s.view(c4) for s in layout.c4]
    views += [s.view(device) for s in layout.index + layout.c128]
    generator = torch.Generator().manual_seed(3)
    expected = []
    for view in views:
        rows = torch.randn(view.row_count, view.format.dim, generator=generator)
        view.write(torch.arange(view.row_count), rows)
        expected.append(view.format.decode(*view.format.encode(rows)))
    for view, rows in zip(views, expected, strict=True):
        assert torch.equal(view.read(torch.arange(view.row_count)), rows)


@pytest.mark.parametrize("value", [0.0, 1e-9, 447.9, 448.0, 449.0, 2.0**-9, 3e38])
def test_fp8_scales_are_the_least_power_of_two_that_holds_the_group(value: float) -> None:
    """scale = 2^ceil(log2(max(amax, 1e-4) / 448)), so nothing saturates."""
    fmt = RowFormat(RowKind.FP8, 80, 16)
    x = torch.zeros(1, 80)
    x[0, 5] = value
    data, scale = fmt.encode(x)
    assert scale is not None
    amax = max(float(x.to(torch.bfloat16).float().abs().max()), 1e-4)
    exponent = int(scale[0, 0]) - 127
    assert 2.0**exponent * 448 >= amax > 2.0 ** (exponent - 1) * 448
    assert torch.allclose(fmt.decode(data, scale)[0, 5], x[0, 5], rtol=0.07, atol=2.0**-20)


def test_rows_that_fp8_cannot_hold_are_refused() -> None:
    """An unrotated part that is not whole groups of 64 has no fp8 row."""
    with pytest.raises(ValueError, match="groups of 64"):
        RowFormat(RowKind.FP8, 64, 16)


def test_copies_between_pools_keep_every_byte() -> None:
    """copy_from moves stored bytes, scales included, between pools of different page sizes."""
    fmt = RowFormat(RowKind.FP8, 80, 16)
    source = row_pool(fmt, 130, 64, torch.device("cpu"))
    target = row_pool(fmt, 70, 7, torch.device("cpu"))
    source.write(torch.arange(130), torch.randn(130, 80))
    target.copy_from(torch.tensor([3, 69]), source, torch.tensor([129, 64]))
    assert torch.equal(target.read(torch.tensor([3, 69])), source.read(torch.tensor([129, 64])))


@pytest.mark.parametrize("boundary", [256, 260, 512])
def test_a_resume_point_restores_what_it_captured(boundary: int) -> None:
    """Window rows and the 4 overlap rows before the boundary come back; the rest is cleared."""
    fmt = RowFormat(RowKind.FP32, 80, 16)
    layout = TailLayout(fmt, RowFormat(RowKind.FP32, 32, 16), 16, 3, 2, 1)
    slots = torch.randint(0, 255, (2, layout.slot_bytes), dtype=torch.uint8)
    point = torch.zeros(layout.resume_bytes, dtype=torch.uint8)
    layout.capture(slots[0], boundary, point)
    layout.restore(point, boundary, slots[1])
    assert torch.equal(slots[0, : layout.window_bytes], slots[1, : layout.window_bytes])
    for sections in (layout.c4_rings, layout.index_rings):
        for ring in layout.rings(sections, slots):
            bits = ring.view(torch.int32)
            kept = [(boundary - 4 + i) % 8 for i in range(4)]
            assert torch.equal(bits[0, kept], bits[1, kept])
            assert not bits[1, [row for row in range(8) if row not in kept]].any()
    assert not any(ring[1].any() for ring in layout.rings(layout.c128_rings, slots))
