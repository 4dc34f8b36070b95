"""Matrices as the model holds them: plain tensors, or ``Weight``s kept as they are stored.

The plain path multiplies with a stored one by dequantising it first (exact in fp32); the ops of
``kernels`` take it as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dsv4_tierd.kernels.weight import FP8_TILE, Weight, WeightKind

Matrix = Tensor | Weight
"""[out, in], or a stack with leading axes. Weight: only where it is quantised."""


def linear(x: Tensor, matrix: Matrix) -> Tensor:
    """W x in the matrix's dtype; in fp32 where it is quantised."""
    weight = dense(matrix)
    return functional.linear(x.to(weight.dtype), weight)


def linear_fp32(x: Tensor, matrix: Tensor) -> Tensor:
    """W x in fp32, whatever the matrix is kept in: bf16 values are exact in fp32."""
    return functional.linear(x.float(), matrix.float())


def dense(matrix: Matrix) -> Tensor:
    """A plain tensor as it is, a quantised one as fp32 (exact)."""
    return matrix if isinstance(matrix, Tensor) else matrix.dense()


def as_weight(matrix: Matrix) -> Weight:
    """The same bytes as the ops take them."""
    return Weight(matrix) if isinstance(matrix, Tensor) else matrix


def pick(matrix: Matrix, index: int | Tensor) -> Matrix:
    """One matrix of a stack [E, ...] by number, or several by an index tensor."""
    if isinstance(matrix, Tensor):
        return matrix[index]
    assert matrix.scales is not None
    return Weight(matrix.values[index], matrix.scales[index])


def half(matrix: Matrix, which: int) -> Matrix:
    """The gate (0) or the up matrix (1) of [..., 2, I, d]; a view."""
    if isinstance(matrix, Tensor):
        return matrix[..., which, :, :]
    assert matrix.scales is not None
    return Weight(matrix.values[..., which, :, :], matrix.scales[..., which, :, :])


def grouped(matrix: Matrix, groups: int) -> Matrix:
    """[G*N, K] as [G, N, K]; a view, but for scales that groups share.

    Raises ValueError where a tile of scales would begin inside a group and not at its start.
    """
    if isinstance(matrix, Tensor):
        return matrix.view(groups, -1, matrix.shape[-1])
    assert matrix.scales is not None
    rows = matrix.shape[0] // groups
    values = matrix.values.view(groups, rows, -1)
    if matrix.kind is WeightKind.FP4 or rows % FP8_TILE == 0:
        return Weight(values, matrix.scales.view(groups, -1, matrix.scales.shape[-1]))
    if FP8_TILE % rows:
        raise ValueError(f"groups of {rows} rows do not fit tiles of {FP8_TILE}")
    tiles = torch.arange(groups, device=values.device) * rows // FP8_TILE
    return Weight(values, matrix.scales[tiles].unsqueeze(1))


def joined(parts: list[Matrix]) -> tuple[Weight, list[Matrix]] | None:
    """One matrix of all parts' rows, and the parts as views of it.

    parts: [N_i, K] each. None where they are stored in different ways, or where a part's rows do
    not fill whole tiles of scales.
    """
    weights = [as_weight(part) for part in parts]
    kind = weights[0].kind
    tile = FP8_TILE if kind is WeightKind.FP8 else 1
    same = all(weight.kind is kind for weight in weights)
    if not same or any(weight.shape[0] % tile for weight in weights[:-1]):
        return None
    values = torch.cat([weight.values for weight in weights])
    scales = [weight.scales for weight in weights if weight.scales is not None]
    whole = Weight(values, torch.cat(scales) if scales else None)
    views: list[Matrix] = []
    start = 0
    for part in weights:
        views.append(_rows(whole, start, start + part.shape[0], tile))
        start += part.shape[0]
    return whole, views


def _rows(whole: Weight, start: int, stop: int, tile: int) -> Matrix:
    values = whole.values[start:stop]
    if whole.scales is None:
        return values
    return Weight(values, whole.scales[start // tile : -(-stop // tile)])


def parts(matrix: Matrix) -> list[Tensor]:
    """The tensors that a matrix consists of: its values, and its scales if it has any."""
    if isinstance(matrix, Tensor):
        return [matrix]
    assert matrix.scales is not None
    return [matrix.values, matrix.scales]
