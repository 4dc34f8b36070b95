"""A weight as checkpoints store it: plain, block FP8 or MXFP4. Kernels read it in this form.

Block FP8: e4m3 values, one ue8m0 scale for each tile of 128 x 128. MXFP4: two e2m1 codes a byte,
the low nibble is the even column; one ue8m0 scale for 32 columns of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

FP8_TILE = 128
FP4_GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class WeightKind(Enum):
    """How the values of a weight are stored."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"


_KINDS = {
    torch.float32: WeightKind.FP32,
    torch.bfloat16: WeightKind.BF16,
    torch.float8_e4m3fn: WeightKind.FP8,
    torch.int8: WeightKind.FP4,
}


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix of N rows (outputs) by K columns (inputs), or a stack of them.

    values: [..., N, K] fp32, bf16 or e4m3, or [..., N, K/2] int8 (MXFP4); scales: e8m0,
    [..., ceil(N/128), ceil(K/128)] for e4m3, [..., N, K/32] for MXFP4, else None. Raises
    ValueError for what does not go together.
    """

    values: Tensor
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        if self.values.dtype not in _KINDS:
            raise ValueError(f"a weight of {self.values.dtype}: one of {[*_KINDS]} is needed")
        want, have = self._scale_shape(), None if self.scales is None else self.scales.shape
        if want != (None if have is None else tuple(have)):
            raise ValueError(f"{self.kind.value} weight {list(self.values.shape)}: scales {have}")
        if self.scales is not None and self.scales.dtype is not torch.float8_e8m0fnu:
            raise ValueError(f"scales of {self.scales.dtype}, must be float8_e8m0fnu")

    @property
    def kind(self) -> WeightKind:
        """How the values are stored."""
        return _KINDS[self.values.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., N, K), K in values whatever they are packed in."""
        *lead, columns = self.values.shape
        return (*lead, 2 * columns if self.kind is WeightKind.FP4 else columns)

    def dense(self) -> Tensor:
        """[..., N, K] fp32, exact. Scale 255 is NaN."""
        if self.scales is None:
            return self.values.float()
        tile = (1, FP4_GROUP) if self.kind is WeightKind.FP4 else (FP8_TILE, FP8_TILE)
        factors = self.scales.float().repeat_interleave(tile[0], -2).repeat_interleave(tile[1], -1)
        rows, columns = self.shape[-2:]
        values = _codes(self.values) if self.kind is WeightKind.FP4 else self.values.float()
        return values * factors[..., :rows, :columns]

    def _scale_shape(self) -> tuple[int, ...] | None:
        *lead, rows, columns = self.shape
        if self.kind is WeightKind.FP8:
            return (*lead, -(-rows // FP8_TILE), -(-columns // FP8_TILE))
        if self.kind is WeightKind.FP4:
            return (*lead, rows, -(-columns // FP4_GROUP))
        return None


def _codes(packed: Tensor) -> Tensor:
    """[..., K/2] int8 to [..., K] fp32."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=packed.device)
    codes = packed.view(torch.uint8).int()
    return table[torch.stack([codes & 15, codes >> 4], -1)].flatten(-2)
