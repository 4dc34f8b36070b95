"""Random weights and constants for the step ops' tests and benches, in the checkpoint's storage."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_tierd.kernels.ref.experts import Experts
from dsv4_tierd.kernels.ref.hyper import Mix
from dsv4_tierd.kernels.weight import FP4_GROUP, FP8_TILE, Weight, WeightKind


def weight(kind: WeightKind, shape: tuple[int, ...], device: torch.device) -> Weight:
    """A weight of [..., N, K] whose products with normal values are near 1."""
    *lead, rows, columns = shape
    if kind in (WeightKind.FP32, WeightKind.BF16):
        dtype = torch.float32 if kind is WeightKind.FP32 else torch.bfloat16
        return Weight(torch.randn(shape, device=device).mul_(columns**-0.5).to(dtype))
    if kind is WeightKind.FP8:
        # Any e4m3 code below 2: no NaN.
        codes = random_bytes((*lead, rows, columns), device) & 0xBF
        tiles = (*lead, -(-rows // FP8_TILE), -(-columns // FP8_TILE))
        return Weight(codes.view(torch.float8_e4m3fn), scales(tiles, columns, device))
    codes = random_bytes((*lead, rows, columns // 2), device)
    groups = (*lead, rows, columns // FP4_GROUP)
    return Weight(codes.view(torch.int8), scales(groups, 9 * columns, device))


def random_bytes(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Uniform bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)


def scales(shape: tuple[int, ...], columns: int, device: torch.device) -> Tensor:
    """e8m0 near columns ** -0.5, four binades of them."""
    middle = 127 - round(0.5 * torch.log2(torch.tensor(float(columns))).item())
    drawn = torch.randint(middle - 2, middle + 2, shape, dtype=torch.uint8, device=device)
    return drawn.view(torch.float8_e8m0fnu)


def expert_weights(
    kind: WeightKind, lead: tuple[int, ...], inner: int, dim: int, device: torch.device
) -> Experts:
    """SwiGLUs, ``lead`` = (E,) of them or () for one."""
    return Experts(
        weight(kind, (*lead, 2, inner, dim), device), weight(kind, (*lead, dim, inner), device)
    )


def mix(n: int, dim: int, device: torch.device, head: bool = False) -> Mix:
    """A hyper-connection whose gates are neither open nor shut."""
    rows = n if head else (2 + n) * n
    return Mix(
        torch.randn(rows, n * dim, device=device) * (n * dim) ** -0.5,
        torch.randn(rows, device=device),
        torch.rand(1 if head else 3, device=device) + 0.5,
        torch.rand(dim, device=device) + 0.5,
    )


def inverse_frequencies(rope_dim: int, device: torch.device) -> Tensor:
    """A plain table, theta 160,000."""
    steps = torch.arange(rope_dim // 2, device=device) / (rope_dim // 2)
    return 160000.0**-steps


def error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; NaN never passes a bound."""
    got, want = got.double(), want.double()
    return ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
