"""Write window rows on the GPU: norm, rotate, encode and store in one launch, one program a row."""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_tierd.kernels.layout import Rows
from dsv4_tierd.kernels.ref import row_store as ref
from dsv4_tierd.kernels.triton_rows import (
    KIND_CODE,
    check_row_format,
    rms_norm_row,
    rotate_row,
    row_arguments,
    runs_kernels,
    store_row,
    tl,
    triton,
    turn_row,
)


def row_store(
    x: Tensor,
    weight: Tensor,
    eps: float,
    positions: Tensor,
    inv_freq: Tensor,
    rows: Rows,
    ids: Tensor,
) -> None:
    """Store one K = V row a token; see the twin in ref/.

    x: [T, D] fp32 or bf16, raw projection, any row stride; weight: [D]; positions: [T] int;
    inv_freq: [R/2] fp32; ids: [T] int row ids, distinct; an id below 0, or at or past the rows'
    count, stores nothing. Writes ``rows``; a row's bytes depend on its own x and position alone.
    Raises ValueError for a row format without a GPU encoder. Cost: x once, the rows once.
    """
    if not runs_kernels(x.device):
        present = (ids >= 0) & (ids < rows.row_count)
        ref.row_store(x, weight, eps, positions, inv_freq, rows, torch.where(present, ids, -1))
        return
    check_row_format(rows.format)
    tokens, dim = x.shape
    assert dim == rows.format.dim and x.stride(1) == 1, (x.shape, x.stride(), rows.format)
    if not tokens:
        return
    _row_store[(tokens,)](
        x,
        x.stride(0),
        weight,
        eps,
        positions,
        inv_freq,
        *row_arguments(rows),
        ids,
        DIM=dim,
        ROPE=2 * inv_freq.shape[0],
        KIND=KIND_CODE[rows.format.kind],
        num_warps=max(1, dim // 256),
    )


@triton.jit(
    do_not_specialize=["page_rows", "row_count"],
    do_not_specialize_on_alignment=["position_ptr", "ids_ptr"],
)
def _row_store(
    x_ptr,
    x_token,
    weight_ptr,
    eps,
    position_ptr,
    inv_freq_ptr,
    data_ptr,
    scale_ptr,
    data_page,
    data_row,
    scale_page,
    scale_row,
    page_rows,
    row_count,
    ids_ptr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    KIND: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + token).to(tl.int64)
    position = tl.load(position_ptr + token)
    value = tl.arange(0, DIM)
    x = tl.load(x_ptr + token * x_token + value).to(tl.float32)
    weight = tl.load(weight_ptr + value).to(tl.float32)
    cos, sin = turn_row(position, inv_freq_ptr, ROPE)
    x = rotate_row(rms_norm_row(x, weight, eps, DIM), cos, sin, DIM, ROPE)
    store_row(
        x,
        row,
        data_ptr,
        scale_ptr,
        data_page,
        data_row,
        scale_page,
        scale_row,
        page_rows,
        row_count,
        DIM,
        KIND,
    )
