"""Write window rows: norm, rotate, encode, store."""

from __future__ import annotations

from torch import Tensor

from dsv4_tierd.kernels.layout import Rows
from dsv4_tierd.kernels.ref import steady
from dsv4_tierd.kernels.ref.rope import rotate


def row_store(
    x: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    inv_freq: Tensor,
    rows: Rows,
    ids: Tensor,
) -> None:
    """Store one K = V row a token.

    x: [T, D] fp32, raw projection; weight: [D] fp32; positions: [T] int; inv_freq: [R/2] fp32;
    ids: [T] int row ids, distinct, -1 = do not store. Writes ``rows``; a row's bytes depend on
    its own x and position alone.
    """
    keep = ids >= 0
    x, positions, ids = x[keep], positions[keep], ids[keep]
    rows.write(ids, rotate(steady.rms_norm(x, weight, eps), positions, inv_freq))
