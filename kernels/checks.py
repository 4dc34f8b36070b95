"""Argument checks at the border of the GPU ops: a wrong tensor is refused by name, not read."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tensor(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    dims: tuple[int | None, ...],
    device: torch.device,
) -> None:
    """Raise ValueError unless ``tensor`` has this dtype, device and shape (None: any size)."""
    if tensor.dtype is not dtype:
        raise ValueError(f"{name}: {tensor.dtype}, must be {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: on {tensor.device}, must be on {device}")
    fits = tensor.dim() == len(dims) and all(
        want is None or have == want for have, want in zip(tensor.shape, dims, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in dims)
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, must be ({wanted})")


def check_dense(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the elements stand without gaps, in order."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()}, must be contiguous")


def check_rows_aligned(name: str, tensor: Tensor, bytes_: int) -> None:
    """Raise ValueError unless every row starts at a multiple of ``bytes_`` and is dense."""
    pitch = tensor.stride(0) * tensor.element_size()
    rows_aligned = tensor.shape[0] < 2 or pitch % bytes_ == 0
    dense = tensor.shape[-1] < 2 or tensor.stride(-1) == 1
    if tensor.data_ptr() % bytes_ or not rows_aligned or not dense:
        raise ValueError(
            f"{name}: at {tensor.data_ptr():#x} with a pitch of {pitch} B, rows must be dense and"
            f" start at multiples of {bytes_} B"
        )
