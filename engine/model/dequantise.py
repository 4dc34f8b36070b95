"""Block formats of the released checkpoints (``kernels.weight``), back to numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_tierd.kernels.weight import FP4_GROUP, FP8_TILE, Weight

_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def stored_shape(shape: tuple[int, ...], stored: torch.dtype) -> tuple[int, ...]:
    """Shape of a tensor of ``shape`` when it is kept in dtype ``stored``."""
    return (*shape[:-1], shape[-1] // 2) if stored is torch.int8 else shape


def dequantise(tensor: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Stored values in ``dtype`` (exact in fp32).

    tensor: any shape, plain or integer with no scale; [out, in] e4m3 or [out, in/2] int8 with
    their scale, of any floating dtype. Raises ValueError (without the tensor's name) for what
    does not go together.
    """
    quantised = tensor.dtype in (torch.float8_e4m3fn, torch.int8)
    if quantised != (scale is not None):
        raise ValueError(f"{tensor.dtype} {'lacks' if quantised else 'has'} a .scale")
    if scale is None:
        if dtype is torch.int64 or tensor.dtype in _PLAIN:
            return tensor.to(dtype)
        raise ValueError(f"{tensor.dtype} is not a known storage")
    tile = _check_scale(tensor, scale)
    if scale.dtype is torch.float8_e8m0fnu:
        return Weight(tensor, scale).dense().to(dtype)
    values = Weight(tensor, torch.ones_like(scale).to(torch.float8_e8m0fnu)).dense()
    factors = scale.float().repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)
    return (values * factors[: values.shape[0], : values.shape[1]]).to(dtype)


def kept(tensor: Tensor, scale: Tensor) -> Weight:
    """A quantised matrix as it is stored; a scale of another dtype becomes the same powers of two.

    Raises ValueError (without the tensor's name) where the scale is another tensor's, or a factor
    is no power of two.
    """
    _check_scale(tensor, scale)
    powers = scale.to(torch.float8_e8m0fnu)
    if powers.dtype is not scale.dtype and not torch.equal(powers.float(), scale.float()):
        raise ValueError("its .scale holds factors that are no powers of two")
    return Weight(tensor, powers)


def _check_scale(tensor: Tensor, scale: Tensor) -> tuple[int, int]:
    """The tile (rows, columns) of one factor. Raises ValueError."""
    if tensor.dim() != 2:
        raise ValueError(f"only matrices are quantised, this has shape {list(tensor.shape)}")
    packed = tensor.dtype is torch.int8
    tile = (1, FP4_GROUP) if packed else (FP8_TILE, FP8_TILE)
    columns = tensor.shape[1] * (2 if packed else 1)
    expected = [-(-tensor.shape[0] // tile[0]), -(-columns // tile[1])]
    if list(scale.shape) != expected:
        raise ValueError(f"its .scale has shape {list(scale.shape)}, expected {expected}")
    return tile
