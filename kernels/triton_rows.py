"""What the Triton kernels share: row addresses, norm, rotation, transform and encoding.

Importing this needs no GPU and no Triton: without Triton the decorators are inert and calling a
kernel raises. The device functions work on one row held by one program.
"""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: ANN201

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4_tierd.kernels.layout import FP8_GROUP, RowFormat, RowKind, Rows

if TYPE_CHECKING:
    triton: Any
    tl: Any
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        from types import SimpleNamespace

        def _absent(function: Any = None, **_: Any) -> Any:
            return function or _absent

        triton = SimpleNamespace(jit=_absent, cdiv=lambda a, b: -(-a // b))
        tl = SimpleNamespace(constexpr=lambda value: value)

FP32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
FP8 = tl.constexpr(2)
KEY_FP8 = tl.constexpr(3)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def runs_kernels(device: torch.device) -> bool:
    """Whether ops on this device launch their kernel (GPU, Triton's interpreter), or the twin."""
    return device.type == "cuda" or INTERPRETED


KIND_CODE = {RowKind.FP32: 0, RowKind.BF16: 1, RowKind.FP8: 2, RowKind.KEY_FP8: 3}


def row_arguments(rows: Rows) -> tuple[Tensor, Tensor, int, int, int, int, int, int]:
    """What a kernel needs to address ``rows``.

    (data, scale, data page stride, data row stride, scale page stride, scale row stride,
    rows_per_page, row_count); strides in elements of each tensor. Rows without scales pass data
    twice, never read as scales.
    """
    data, scale = rows.data, rows.data if rows.scale is None else rows.scale
    assert data.stride(2) == 1 and scale.stride(2) == 1, "a row's bytes must be contiguous"
    return (
        data,
        scale,
        data.stride(0),
        data.stride(1),
        scale.stride(0),
        scale.stride(1),
        rows.rows_per_page,
        rows.row_count,
    )


def check_row_format(fmt: RowFormat) -> None:
    """Raise ValueError for a format that the Triton row encoder does not take."""
    if fmt.dim & (fmt.dim - 1) or fmt.dim < 16:
        raise ValueError(f"GPU rows need a power of two of values, at least 16, got {fmt.dim}")
    if fmt.kind is RowKind.FP8 and (fmt.rope_dim != FP8_GROUP):
        raise ValueError(f"GPU fp8 rows need {FP8_GROUP} rotated values, got {fmt.rope_dim}")


@triton.jit
def rms_norm_row(x, weight, eps, DIM: tl.constexpr):
    """weight * x / sqrt(mean(x ** 2) + eps); x and weight: [DIM] fp32."""
    mean = tl.sum(x * x, 0) / DIM
    return tl.div_rn(x, tl.sqrt_rn(mean + eps)) * weight


@triton.jit
def turn_row(position, inv_freq_ptr, ROPE: tl.constexpr):
    """(cos, sin) [ROPE // 2] of fp32 position * inv_freq."""
    angle = position.to(tl.float32) * tl.load(inv_freq_ptr + tl.arange(0, ROPE // 2))
    # 2 pi in parts whose products with the turns (below 2**19) are exact: no slow reduction.
    turns = tl.floor(angle * 0.15915494309189535 + 0.5)
    rest = angle - turns * 6.25
    rest = rest - turns * 0.033203125
    rest = rest + turns * 1.7817820413768004e-05
    return tl.cos(rest), tl.sin(rest)


@triton.jit
def rotate_row(x, cos, sin, DIM: tl.constexpr, ROPE: tl.constexpr):
    """Rotate the pairs of the last ROPE of [DIM] values; DIM a multiple of ROPE."""
    rotated = (tl.arange(0, DIM // ROPE) == DIM // ROPE - 1)[:, None]
    cos = tl.where(rotated, cos[None, :], 1.0)
    sin = tl.where(rotated, sin[None, :], 0.0)
    even, odd = tl.split(tl.reshape(x, (DIM // ROPE, ROPE // 2, 2)))
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, (DIM,))


@triton.jit
def _signs(N: tl.constexpr):
    """The Sylvester matrix of order N (at most 16) as fp32 signs [N, N]."""
    both = tl.arange(0, N)[:, None] & tl.arange(0, N)[None, :]
    both = both ^ (both >> 2)
    both = both ^ (both >> 1)
    return 1.0 - 2.0 * (both & 1).to(tl.float32)


@triton.jit
def hadamard_row(x, DIM: tl.constexpr):
    """Orthonormal Walsh-Hadamard transform of [DIM] fp32, DIM = 16 to 256: H = H_high (x) H_8."""
    HIGH: tl.constexpr = DIM // 8
    grid = tl.reshape(x, (HIGH, 8, 1))
    low = tl.sum(grid * _signs(8)[None, :, :], 1)
    high = tl.sum(low[:, None, :] * _signs(HIGH)[:, :, None], 0)
    return tl.reshape(high, (DIM,)) * (1.0 / tl.sqrt_rn(tl.full((), DIM, tl.float32)))


@triton.jit
def store_row(
    x,
    row,
    data_ptr,
    scale_ptr,
    data_page,
    data_row,
    scale_page,
    scale_row,
    page_rows,
    row_count,
    DIM: tl.constexpr,
    KIND: tl.constexpr,
):
    """Encode [DIM] fp32 as layout.RowFormat does; store it as row ``row`` (int64) if it is one."""
    # As a number: the interpreter cannot spread a scalar truth over a tensor.
    kept = tl.where((row >= 0) & (row < row_count), 1, 0)
    row = row * kept
    page = row // page_rows
    slot = row % page_rows
    data = data_ptr + page * data_page + slot * data_row
    scale = scale_ptr + page * scale_page + slot * scale_row
    value = tl.arange(0, DIM)
    here = value < DIM * kept
    if KIND == FP8:
        _store_fp8(x, data, scale, kept, DIM)
    elif KIND == KEY_FP8:
        amax = tl.maximum(tl.max(tl.abs(x), 0), 1e-4)
        factor = tl.div_rn(amax, 448.0)
        bounded = tl.minimum(tl.maximum(tl.div_rn(x, factor), -448.0), 448.0)
        tl.store(data + value, bounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=here)
        one = tl.arange(0, 1)
        place = scale.to(tl.pointer_type(tl.float32)) + one
        tl.store(place, factor + one.to(tl.float32), mask=one < kept)
    elif KIND == BF16:
        tl.store(data + value, x.to(tl.bfloat16), mask=here)
    else:
        tl.store(data + value, x, mask=here)


@triton.jit
def _store_fp8(x, data, scale, kept, DIM: tl.constexpr):
    """DIM - 64 e4m3 in groups of 64 with ue8m0 scales, then 64 bf16."""
    GROUPS: tl.constexpr = DIM // 64
    grouped = tl.reshape(x, (GROUPS, 64))
    group = tl.arange(0, GROUPS)
    inside = tl.arange(0, 64)[None, :]
    latent = group < GROUPS - 1
    rounded = grouped.to(tl.bfloat16).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(rounded), 1), 1e-4)
    # Smallest e with 448 * 2**e >= amax, read off the bits: 448 is 1.75 * 2**8.
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    factor = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.maximum(rounded * factor[:, None], -448.0), 448.0)
    codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(
        data + group[:, None] * 64 + inside, codes, mask=(group < (GROUPS - 1) * kept)[:, None]
    )
    rope = (data + (DIM - 64)).to(tl.pointer_type(tl.bfloat16))
    beside = tl.zeros((GROUPS, 1), tl.int32)
    last = (group * kept == GROUPS - 1)[:, None]
    tl.store(rope + beside + inside, rounded.to(tl.bfloat16), mask=last)
    byte = tl.where(latent, exponent + 127, 0)
    tl.store(scale + group, byte.to(tl.uint8), mask=group < GROUPS * kept)
    if GROUPS < 8:
        padding = tl.arange(0, 8)
        tl.store(scale + padding, tl.zeros((8,), tl.uint8), mask=padding * kept >= GROUPS)
