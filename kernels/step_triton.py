"""What the Triton kernels of the step ops share: the order of launches, scales, sums, outputs."""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# ruff: noqa: ANN201, RET505

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dsv4_tierd.kernels.triton_rows import INTERPRETED, tl, triton
from dsv4_tierd.kernels.weight import Weight, WeightKind

_WIDE = tl.constexpr(INTERPRETED)
W_FP32 = tl.constexpr(0)
W_BF16 = tl.constexpr(1)
W_FP8 = tl.constexpr(2)
W_FP4 = tl.constexpr(3)
WEIGHT_CODE = {WeightKind.FP32: 0, WeightKind.BF16: 1, WeightKind.FP8: 2, WeightKind.FP4: 3}


@cache
def _overlaps(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def launch_order(device: torch.device) -> dict[str, bool]:
    """Keywords of a launch whose kernel calls ``follow``: its start overlaps its predecessor."""
    if INTERPRETED or device.type != "cuda":
        return {"PDL": False}
    overlaps = _overlaps(torch.cuda.current_device() if device.index is None else device.index)
    return {"PDL": overlaps, "launch_pdl": overlaps}


def output(x: Tensor, shape: tuple[int, ...], out: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``out``, checked, or a new tensor. Raises ValueError."""
    if out is None:
        return torch.empty(shape, dtype=dtype, device=x.device)
    fits = tuple(out.shape) == shape and out.dtype in (torch.float32, torch.bfloat16)
    if not fits or out.device != x.device or (out.shape[-1] > 1 and out.stride(-1) != 1):
        raise ValueError(
            f"out: {out.dtype} {list(out.shape)} on {out.device}, must be fp32 or bf16"
            f" {list(shape)} on {x.device}, dense in its last axis"
        )
    return out


def weight_arguments(weight: Weight) -> tuple[Tensor, Tensor]:
    """(values, scales) as kernels address them: bytes where quantised; no scales: the values."""
    values, scales = weight.values, weight.scales
    if not values.is_contiguous() or (scales is not None and not scales.is_contiguous()):
        raise ValueError("a weight's values and scales must be contiguous")
    if weight.kind in (WeightKind.FP8, WeightKind.FP4):
        values = values.view(torch.uint8)
    return values, values if scales is None else scales.view(torch.uint8)


@triton.jit
def announce(PDL: tl.constexpr):
    """Let the next launch start (it waits in ``follow`` before it reads or writes anything)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def follow(PDL: tl.constexpr):
    """Wait for all that the launches before this one wrote.

    What stands before this call may only read what no launch of the step writes. Every program
    of an overlapping launch calls it, so that a launch that has ended implies all before it.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_ahead(at, BYTES: tl.constexpr, COUNT: tl.constexpr, last, PDL: tl.constexpr):
    """Ask for BYTES (COUNT: the next power of two) of weights from address ``at`` into the L2.

    at, last: int64 addresses; nothing past ``last`` is asked for.
    """
    if PDL:
        line = tl.arange(0, COUNT // 128) * 128
        line = tl.minimum(at + tl.minimum(line, BYTES - 128), last)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], tl.int32, False, 1
        )


@triton.jit
def operand(x):
    """x rounded to bf16, for tl.dot (whose interpreter does not multiply bf16: fp32 there)."""
    if _WIDE:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def scale_value(byte):
    """fp32 of ue8m0 bytes: 2 ** (byte - 127); 255 is NaN."""
    code = byte.to(tl.int32)
    bits = tl.where(code == 0, 0x00400000, code << 23)
    bits = tl.where(code == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def fp4_low(byte):
    """fp32 of the e2m1 code in the low nibble, times 2 ** -14."""
    code = byte.to(tl.int16)
    bits = ((code & 7) << 9) | ((code & 8) << 12)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def fp4_high(byte):
    """fp32 of the e2m1 code in the high nibble, times 2 ** -14."""
    return fp4_low((byte.to(tl.int16) >> 4) & 15)
