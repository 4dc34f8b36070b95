"""Byte layouts of everything that is cached: the one place that knows them.

A *row* is one entry of one KV group. A *section* is the rows of one layer in one page: all
data parts first, then all scale parts (the order that FlashMLA reads). A *page* holds the
entries of 256 tokens, section after section, as one contiguous run of bytes::

    | C4 rows, layer by layer | index keys, layer by layer | C128 rows, layer by layer |
    |<------------------------------- mirror page -------------------------------------->|
                              |<------------------ device page ------------------------->|

so a device page is the tail of a mirror page, and copying it is one copy.

Row kinds (``dim`` values, the last ``rope`` of them rotated):

========  =============================================  =======================
kind      data part                                      scale part
========  =============================================  =======================
fp32      dim x 4 B                                      none
bf16      dim x 2 B                                      none
fp8       (dim - rope) e4m3, then rope x bf16            one ue8m0 byte for 64 values,
                                                         padded to 8 B
key_fp8   dim e4m3 (after a Hadamard transform)          one fp32, 4 B
========  =============================================  =======================

For DeepSeek-V4 (512, 64) an fp8 row is 576 + 8 = 584 B, an index key (128) 132 B.
Source: the V4 cache format of FlashMLA and SGLang (layout only).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

PAGE_TOKENS = 256
FP8_GROUP = 64
FP8_MAX = 448.0
FP8_AMAX_FLOOR = 1e-4
SECTION_ALIGN_BYTES = 16


class RowKind(Enum):
    """How the values of one row are stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    KEY_FP8 = "key_fp8"


@dataclass(frozen=True, slots=True)
class RowFormat:
    """Bytes of one row: ``dim`` values of which the last ``rope_dim`` are rotated."""

    kind: RowKind
    dim: int
    rope_dim: int = 0

    def __post_init__(self) -> None:
        nope = self.dim - self.rope_dim
        if self.kind is RowKind.FP8 and (nope % FP8_GROUP or nope // FP8_GROUP > 8):
            raise ValueError(
                f"fp8 rows need an unrotated part of at most 8 groups of {FP8_GROUP} values, "
                f"got {nope}"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the data part."""
        return {RowKind.FP32: torch.float32, RowKind.BF16: torch.bfloat16}.get(
            self.kind, torch.uint8
        )

    @property
    def data_elems(self) -> int:
        """Elements (of ``dtype``) in the data part."""
        return self.dim + self.rope_dim if self.kind is RowKind.FP8 else self.dim

    @property
    def data_bytes(self) -> int:
        return self.data_elems * self.dtype.itemsize

    @property
    def scale_bytes(self) -> int:
        return {RowKind.FP8: 8, RowKind.KEY_FP8: 4}.get(self.kind, 0)

    @property
    def row_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows to their stored parts.

        x: [..., dim] fp32. Returns (data [..., data_elems] of ``dtype``, scale
        [..., scale_bytes] uint8 or None). Rounds to nearest even; fp8 values saturate.
        """
        if self.kind is RowKind.FP8:
            return self._encode_fp8(x)
        if self.kind is RowKind.KEY_FP8:
            scale = x.abs().amax(-1, keepdim=True).clamp_min(FP8_AMAX_FLOOR) / FP8_MAX
            data = (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
            # Flat first: torch views no [0, 1] of other strides.
            return data, scale.flatten().view(torch.uint8).view(*x.shape[:-1], 4)
        return x.to(self.dtype), None

    def decode(self, data: Tensor, scale: Tensor | None) -> Tensor:
        """Stored parts back to rows [..., dim] fp32; the exact inverse of what is stored."""
        if self.kind is RowKind.FP8:
            assert scale is not None
            nope = self.dim - self.rope_dim
            groups = nope // FP8_GROUP
            values = data[..., :nope].contiguous().view(torch.float8_e4m3fn).float()
            exponents = scale[..., :groups].to(torch.int32) - 127
            factors = _exp2(exponents)
            values = (values.unflatten(-1, (groups, FP8_GROUP)) * factors.unsqueeze(-1)).flatten(-2)
            rope = data[..., nope:].contiguous().view(torch.bfloat16).float()
            return torch.cat([values, rope], -1)
        if self.kind is RowKind.KEY_FP8:
            assert scale is not None
            return data.contiguous().view(torch.float8_e4m3fn).float() * scale.contiguous().view(
                torch.float32
            )
        return data.float()

    def _encode_fp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        nope = self.dim - self.rope_dim
        # Rounded to bf16 first, as the model's own cache does, so both give the same bytes.
        grouped = (
            x[..., :nope].to(torch.bfloat16).float().unflatten(-1, (nope // FP8_GROUP, FP8_GROUP))
        )
        amax = grouped.abs().amax(-1).clamp_min(FP8_AMAX_FLOOR)
        exponents = _ceil_log2(amax / FP8_MAX)
        factors = _exp2(-exponents)
        values = (grouped * factors.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        rope = x[..., nope:].to(torch.bfloat16).contiguous().view(torch.uint8)
        data = torch.cat([values.flatten(-2).view(torch.uint8), rope], -1)
        scale = torch.zeros((*x.shape[:-1], self.scale_bytes), dtype=torch.uint8, device=x.device)
        scale[..., : exponents.shape[-1]] = (exponents + 127).to(torch.uint8)
        return data, scale


def _ceil_log2(x: Tensor) -> Tensor:
    """Smallest integer e with 2**e >= x, exact for every positive normal fp32."""
    mantissa, exponent = torch.frexp(x)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def _exp2(exponents: Tensor) -> Tensor:
    """2 ** exponents in fp32, exact."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


@dataclass(frozen=True, slots=True)
class Rows:
    """A view of rows in some memory: [pages, rows_per_page], addressed by flat row id.

    Row id = page * rows_per_page + slot. ``data``: [pages, rows_per_page, data_elems],
    ``scale``: [pages, rows_per_page, scale_bytes] uint8 or None; both may be strided.
    """

    format: RowFormat
    data: Tensor
    scale: Tensor | None

    @property
    def rows_per_page(self) -> int:
        return self.data.shape[1]

    @property
    def row_count(self) -> int:
        return self.data.shape[0] * self.data.shape[1]

    def read(self, ids: Tensor) -> Tensor:
        """Rows [*ids.shape, dim] fp32. ``ids``: integer row ids, all in range."""
        page, slot = self._split(ids)
        return self.format.decode(
            self.data[page, slot], None if self.scale is None else self.scale[page, slot]
        )

    def write(self, ids: Tensor, x: Tensor) -> None:
        """Encode and store rows ``x`` [n, dim] fp32 at ``ids`` [n] (distinct)."""
        data, scale = self.format.encode(x)
        page, slot = self._split(ids)
        self.data[page, slot] = data.to(self.data.device)
        if self.scale is not None:
            assert scale is not None
            self.scale[page, slot] = scale.to(self.scale.device)

    def copy_from(self, ids: Tensor, source: Rows, source_ids: Tensor) -> None:
        """Copy stored bytes of ``source`` rows to rows ``ids``; formats must be equal."""
        assert self.format == source.format, (self.format, source.format)
        page, slot = self._split(ids)
        source_page, source_slot = source._split(source_ids)
        self.data[page, slot] = source.data[source_page, source_slot].to(self.data.device)
        if self.scale is not None:
            assert source.scale is not None
            self.scale[page, slot] = source.scale[source_page, source_slot].to(self.scale.device)

    def _split(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ids = ids.to(self.data.device, torch.int64)
        return ids // self.rows_per_page, ids % self.rows_per_page


@dataclass(frozen=True, slots=True)
class Section:
    """The rows of one layer of one group inside a page of bytes."""

    format: RowFormat
    rows: int
    offset: int

    @property
    def bytes(self) -> int:
        return -(-self.rows * self.format.row_bytes // SECTION_ALIGN_BYTES) * SECTION_ALIGN_BYTES

    def view(self, pages: Tensor) -> Rows:
        """The section of every page. ``pages``: [n, page_bytes] uint8, any pitch."""
        data_end = self.offset + self.rows * self.format.data_bytes
        data = pages[:, self.offset : data_end].view(self.format.dtype)
        data = data.unflatten(1, (self.rows, self.format.data_elems))
        if not self.format.scale_bytes:
            return Rows(self.format, data, None)
        scale = pages[:, data_end : data_end + self.rows * self.format.scale_bytes]
        return Rows(self.format, data, scale.unflatten(1, (self.rows, self.format.scale_bytes)))


@dataclass(frozen=True)
class PageLayout:
    """Where each layer's section stands in a page.

    ``c4_layers`` and ``c128_layers`` are the model's layer numbers, in order; sections are
    indexed by rank in those lists.
    """

    latent: RowFormat
    key: RowFormat
    c4_layers: tuple[int, ...]
    c128_layers: tuple[int, ...]

    @cached_property
    def c4(self) -> tuple[Section, ...]:
        return _sections(self.latent, PAGE_TOKENS // 4, len(self.c4_layers), 0)

    @cached_property
    def index(self) -> tuple[Section, ...]:
        """Offsets are within the device page."""
        return _sections(self.key, PAGE_TOKENS // 4, len(self.c4_layers), 0)

    @cached_property
    def c128(self) -> tuple[Section, ...]:
        """Offsets are within the device page."""
        return _sections(self.latent, PAGE_TOKENS // 128, len(self.c128_layers), _end(self.index))

    @property
    def c4_bytes(self) -> int:
        """Bytes of the C4 part of a mirror page; the device page follows it."""
        return _end(self.c4)

    @property
    def device_bytes(self) -> int:
        return max(_end(self.c128), _end(self.index))

    @property
    def mirror_bytes(self) -> int:
        return self.c4_bytes + self.device_bytes


def _sections(fmt: RowFormat, rows: int, count: int, start: int) -> tuple[Section, ...]:
    size = Section(fmt, rows, 0).bytes
    return tuple(Section(fmt, rows, start + i * size) for i in range(count))


def _end(sections: Sequence[Section]) -> int:
    return sections[-1].offset + sections[-1].bytes if sections else 0


def row_pool(fmt: RowFormat, row_count: int, rows_per_page: int, device: torch.device) -> Rows:
    """A new pool of at least ``row_count`` rows, laid out in pages like a C4 section."""
    page_count = -(-row_count // rows_per_page)
    section = Section(fmt, rows_per_page, 0)
    return section.view(torch.zeros(page_count, section.bytes, dtype=torch.uint8, device=device))
