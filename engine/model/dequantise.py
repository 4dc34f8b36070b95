"""Block formats of the released checkpoints, back to numbers (exact in fp32).

Block FP8: e4m3 values, one ue8m0 scale for each tile of 128 x 128. MXFP4: two e2m1 codes a byte,
the low nibble is the even column; one ue8m0 scale for 32 columns of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_TILE = 128
FP4_GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def stored_shape(shape: tuple[int, ...], stored: torch.dtype) -> tuple[int, ...]:
    """Shape of a tensor of ``shape`` when it is kept in dtype ``stored``."""
    return (*shape[:-1], shape[-1] // 2) if stored is torch.int8 else shape


def dequantise(tensor: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Stored values in ``dtype``.

    tensor: any shape, plain or integer with no scale; [out, in] e4m3 or [out, in/2] int8 with
    their scale. Raises ValueError (without the tensor's name) for what does not go together.
    """
    quantised = tensor.dtype in (torch.float8_e4m3fn, torch.int8)
    if quantised != (scale is not None):
        raise ValueError(f"{tensor.dtype} {'lacks' if quantised else 'has'} a .scale")
    if scale is None:
        if dtype is torch.int64 or tensor.dtype in _PLAIN:
            return tensor.to(dtype)
        raise ValueError(f"{tensor.dtype} is not a known storage")
    fp4 = tensor.dtype is torch.int8
    values = _fp4_values(tensor) if fp4 else tensor.float()
    tile = (1, FP4_GROUP) if fp4 else (FP8_TILE, FP8_TILE)
    rows, columns = values.shape
    expected = (-(-rows // tile[0]), -(-columns // tile[1]))
    if tuple(scale.shape) != expected:
        raise ValueError(f"its .scale has shape {list(scale.shape)}, expected {list(expected)}")
    factors = scale.float().repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)
    return (values * factors[:rows, :columns]).to(dtype)


def _fp4_values(packed: Tensor) -> Tensor:
    """[out, in/2] int8 to [out, in] fp32."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    codes = packed.view(torch.uint8).int()
    return table[torch.stack([codes & 15, codes >> 4], -1)].flatten(-2)
