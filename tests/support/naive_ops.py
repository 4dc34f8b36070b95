"""The ops again, as float64 loops over rows: slow, and written from the formulas alone."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4_tierd.kernels.layout import RowFormat, RowKind, Rows, row_pool

Array = NDArray[np.float64]
CPU = torch.device("cpu")


def nan_pool(fmt: RowFormat, row_count: int, rows_per_page: int) -> Rows:
    """A pool whose every row decodes to NaN until it is written."""
    rows = row_pool(fmt, row_count, rows_per_page, CPU)
    if fmt.kind in (RowKind.FP32, RowKind.BF16):
        rows.data.fill_(math.nan)
    else:
        rows.data.fill_(0x7F)  # e4m3 NaN; as bf16, 0x7f7f is a huge number
        assert rows.scale is not None
        rows.scale.fill_(0xFF)
    return rows


def rms(x: Array, weight: Array | None, eps: float) -> Array:
    y = x / math.sqrt(float((x * x).mean()) + eps)
    return y if weight is None else y * weight


def rotate(x: Array, position: int, inv_freq: NDArray[np.float32], sign: float = 1.0) -> Array:
    """One row [..., D], pair by pair, as complex numbers."""
    out = x.copy()
    first = x.shape[-1] - 2 * len(inv_freq)
    for i, frequency in enumerate(inv_freq):
        angle = float(np.float32(position) * frequency) * sign
        turned = (x[..., first + 2 * i] + 1j * x[..., first + 2 * i + 1]) * np.exp(1j * angle)
        out[..., first + 2 * i], out[..., first + 2 * i + 1] = turned.real, turned.imag
    return out


def pool_group(kv: Array, gate: Array, ape: Array, group: int, ratio: int, dim: int) -> Array:
    """The pooled (not normed) entry of one group, channel by channel. kv, gate: all tokens."""
    overlaps = kv.shape[1] == 2 * dim
    entry = np.zeros(dim)
    for channel in range(dim):
        pairs = []
        for token in range(group * ratio, group * ratio + ratio):
            column = channel + dim if overlaps else channel
            pairs.append((gate[token, column] + ape[token % ratio, column], kv[token, column]))
        if overlaps and group > 0:
            for token in range(group * ratio - ratio, group * ratio):
                z = gate[token, channel] + ape[token % ratio, channel]
                pairs.append((z, kv[token, channel]))
        top = max(z for z, _ in pairs)
        weights = [math.exp(z - top) for z, _ in pairs]
        entry[channel] = sum(w * v for w, (_, v) in zip(weights, pairs, strict=True)) / sum(weights)
    return entry


def index_score(q: Array, g: Array, key: Array) -> float:
    """q: [Hi, Di], g: [Hi], key: [Di]."""
    return float(sum(g[h] * max(0.0, float(q[h] @ key)) for h in range(len(g))))


def topk(scores: Array, visible: int, k: int) -> list[int]:
    """Ascending positions of the k best; NaN worst, then -inf; ties to the lowest position."""

    def rank(position: int) -> tuple[bool, float, int]:
        score = scores[position]
        return (bool(np.isnan(score)), 0.0 if np.isnan(score) else -float(score), position)

    return sorted(sorted(range(visible), key=rank)[:k])


def attend(q: Array, keys: list[Array], sink: float, scale: float) -> Array:
    """One head's output: q [D], keys each [D]."""
    if sink == math.inf or not keys:
        return np.zeros_like(q)
    scores = [float(q @ key) * scale for key in keys]
    top = max([*scores, sink])
    weights = [math.exp(score - top) for score in scores]
    total = sum(weights) + math.exp(sink - top)
    return sum((w * key for w, key in zip(weights, keys, strict=True)), np.zeros_like(q)) / total


def hadamard(x: Array) -> Array:
    """By its matrix: entry (i, j) is (-1) ** (number of common bits)."""
    n = x.shape[-1]
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    return x @ np.array(signs) / math.sqrt(n)


def lru_plan(
    rows: list[list[int]], residency: list[int], owner: list[int], stamp: list[int], step: int
) -> tuple[list[list[int]], dict[int, int]]:
    """Swap-in, one row after another in ascending order; (slots, copied rows to slots)."""
    wanted = sorted({row for line in rows for row in line if row >= 0})
    for row in wanted:
        if residency[row] >= 0:
            stamp[residency[row]] = step
    copied = {}
    for row in wanted:
        if residency[row] >= 0:
            continue
        slot = min((s for s in range(len(stamp)) if stamp[s] != step), key=lambda s: (stamp[s], s))
        if owner[slot] >= 0:
            residency[owner[slot]] = -1
        residency[row], owner[slot], stamp[slot] = slot, row, step
        copied[row] = slot
    return [[residency[row] if row >= 0 else -1 for row in line] for line in rows], copied


def as_array(x: Tensor) -> Array:
    return np.asarray(x.double().numpy(), dtype=np.float64)
