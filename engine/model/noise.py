"""Random bits that are a function of a name and a place: the same on every device and version.

A library's generators differ between CPU and GPU, and between GPUs; these are SplitMix64 in whole
numbers, so a model made on one machine is the model made on another, bit for bit.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
from blake3 import blake3
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def words(name: str, first: int, count: int, device: torch.device) -> Tensor:
    """[count] int64, uniform over all 64 bits: places first .. first+count-1 of ``name``'s stream.

    Source: SplitMix64 (Steele, Lea, Flood 2014), the formula.
    """
    key = int.from_bytes(blake3(name.encode()).digest(8), "little")
    x = torch.arange(first, first + count, dtype=torch.int64, device=device)
    return mix(x.mul_(_signed(_STEP)).add_(_signed(key)))


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finish of a counter [n] int64, in place."""
    for shift, factor in _MIX:
        x ^= (x >> shift) & ((1 << (64 - shift)) - 1)  # a logical shift
        x.mul_(_signed(factor))
    return x


def fill(out: Tensor, name: str, table: Tensor) -> Tensor:
    """Fill ``out`` (contiguous) with entries of ``table`` [256] of its dtype, chosen at random."""
    flat = out.view(-1)
    for start in range(0, flat.numel(), _SPAN):
        part = flat[start : start + _SPAN]
        count = -(-part.numel() // 8)
        choice = words(name, start // 8, count, out.device).view(torch.uint8)[: part.numel()]
        torch.index_select(table, 0, choice.int(), out=part)
    return out


def normal_levels() -> Tensor:
    """[256] fp32: the middles of 256 equally likely parts of a normal distribution."""
    normal = NormalDist()
    return torch.tensor([normal.inv_cdf((level + 0.5) / 256) for level in range(256)])


_SPAN = 1 << 25
"""Values made at a time: what bounds the scratch memory, 0.6 GB."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
