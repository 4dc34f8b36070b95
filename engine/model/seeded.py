"""A model's tensors made of a seed, straight on the device, in the form of a released checkpoint.

Nothing is read and nothing is drawn from a library's generator: the weights' name is their recipe.
"""

from __future__ import annotations

import json
import math
import re

import torch
from blake3 import blake3
from torch import Tensor

from dsv4_tierd.engine.model.noise import fill, normal_levels, words
from dsv4_tierd.engine.model.presets import SeededModel, describe
from dsv4_tierd.engine.model.shapes import Stored, stored_in
from dsv4_tierd.kernels.weight import E2M1, FP4_GROUP, FP8_TILE

RECIPE = 1
"""Goes up with any change of the values that a seed stands for."""

# (mean, deviation) of what is no matrix; constants that training starts from are random here, so
# that a term left out shows.
_VECTORS = (
    (re.compile(r"norm\.weight$"), (1.0, 0.2)),
    (re.compile(r"_scale$"), (1.0, 0.3)),
    (re.compile(r"(\.ape|_base)$"), (0.0, 0.7)),
    (re.compile(r"gate\.bias$"), (0.0, 0.2)),
    (re.compile(r"(attn_sink|embed\.weight)$"), (0.0, 1.0)),
)
# Deviation of a matrix' output for inputs of deviation 1. Sublayers add less than the embedding
# brought, and the head is wide: so the next token depends on the last ones, and greedy text goes
# on moving instead of settling on one word.
_GAINS = (
    (re.compile(r"^head\.weight$"), 3.0),
    (re.compile(r"(wo_b|w2)\.weight$"), 0.5),
    (re.compile(r"_fn$"), 1.0),
    (re.compile(""), 1.5),
)
_EXPONENT_STEPS = (-1, 0, 0, 1)  # of scales around their middle: every tile has its own
_STEPS_RMS = math.sqrt(sum(4.0**step for step in _EXPONENT_STEPS) / 4)
_FP8_DEVIATION = 64.0  # at least, of e4m3 codes: the outermost level, 2.9 of them, stays below 448
_FP4_RMS = math.sqrt(sum(value * value for value in E2M1) / len(E2M1))


def seeded_digest(model: SeededModel) -> bytes:
    """32 bytes that name the weights, wherever they are made."""
    recipe = json.dumps([RECIPE, describe(model)], sort_keys=True)
    return blake3(b"dsv4-tierd seeded weights" + recipe.encode()).digest()


class Seeded:
    """The tensors of a seeded model by official name; see ``weights.StoredTensors``."""

    def __init__(self, model: SeededModel, device: torch.device) -> None:
        self.model, self.device = model, device
        self._levels = normal_levels()

    @property
    def has_mtp(self) -> bool:
        return self.model.preset.mtp

    def read(self, name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """The tensor as a checkpoint stores it, and its scale if it has one."""
        stored = stored_in(name, self.model.preset.storage)
        if stored is Stored.INTEGERS:
            return self._experts_of_tokens(name, shape), None
        mean, deviation = _moments(name, shape)
        if stored is Stored.FP8:
            return self._fp8(name, shape, deviation)
        if stored is Stored.FP4:
            return self._fp4(name, shape, deviation)
        dtype = torch.bfloat16 if stored is Stored.BF16 else torch.float32
        table = (mean + deviation * self._levels).to(dtype)
        return self._fill(name, table, shape), None

    def finish(self) -> None:
        """A seed has no tensor too many."""

    def _fill(self, name: str, table: Tensor, shape: tuple[int, ...]) -> Tensor:
        out = torch.empty(shape, dtype=table.dtype, device=self.device)
        return fill(out, f"{self.model.seed}/{name}", table.to(self.device))

    def _fp8(self, name: str, shape: tuple[int, ...], deviation: float) -> tuple[Tensor, Tensor]:
        exponent = math.floor(math.log2(deviation / _STEPS_RMS / _FP8_DEVIATION))
        spread = deviation / _STEPS_RMS / 2.0**exponent
        table = (spread * self._levels).to(torch.float8_e4m3fn).view(torch.uint8)
        scale = tuple(-(-size // FP8_TILE) for size in shape)
        codes = self._fill(name, table, shape).view(torch.float8_e4m3fn)
        return codes, self._scales(name, exponent, scale)

    def _fp4(self, name: str, shape: tuple[int, ...], deviation: float) -> tuple[Tensor, Tensor]:
        """All codes are equally likely, so a packed byte is any byte."""
        exponent = round(math.log2(deviation / _STEPS_RMS / _FP4_RMS))
        table = torch.arange(256, dtype=torch.uint8).view(torch.int8)
        codes = self._fill(name, table, (shape[0], shape[1] // 2))
        return codes, self._scales(name, exponent, (shape[0], shape[1] // FP4_GROUP))

    def _scales(self, name: str, exponent: int, shape: tuple[int, ...]) -> Tensor:
        steps = [127 + exponent + step for step in _EXPONENT_STEPS]
        table = torch.tensor(steps * 64, dtype=torch.uint8)
        filled = self._fill(name.removesuffix("weight") + "scale", table, shape)
        return filled.view(torch.float8_e8m0fnu)

    def _experts_of_tokens(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """[vocab, k] int64: for each token k different experts."""
        experts = self.model.preset.experts
        count = shape[0] * experts
        ranks = words(f"{self.model.seed}/{name}", 0, count, self.device)
        return ranks.view(shape[0], experts).argsort(1)[:, : shape[1]].contiguous()


def _moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    for pattern, moments in _VECTORS:
        if pattern.search(name):
            return moments
    gain = next(gain for pattern, gain in _GAINS if pattern.search(name))
    return 0.0, gain / math.sqrt(shape[-1])
