"""What stands beside FlashMLA in one attention: ids as it takes them, and the inverse rotation."""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_tierd.kernels.ref.rope import rotate
from dsv4_tierd.kernels.sparse_attention_triton import Call, InverseRope
from dsv4_tierd.kernels.triton_rows import rotate_row, runs_kernels, tl, triton, turn_row

_DIM, _ROPE = 512, 64
_COLUMNS = 512


def prepare_ids(call: Call, block: int) -> tuple[Tensor, Tensor]:
    """Window and extra ids, -1 where they name no row, both widths padded to whole blocks."""
    tokens = call.q.shape[0]
    counts = (call.window_ids.shape[1], call.extra_count)
    widths = [-(-count // block) * block for count in counts]
    widths[0] = max(widths[0], block)  # FlashMLA takes no empty window
    both = torch.empty(tokens, sum(widths), dtype=torch.int32, device=call.q.device)
    near, far = both[:, : widths[0]], both[:, widths[0] :]
    limits = (call.window.row_count, call.extra.row_count)
    if not runs_kernels(call.q.device):
        for to, ids, count, limit in zip(
            (near, far), (call.window_ids, call.extra_ids), counts, limits, strict=True
        ):
            given = ids[:, :count]
            to.fill_(-1)
            to[:, :count] = torch.where((given >= 0) & (given < limit), given, -1)
    else:
        _prepare[(tokens, triton.cdiv(both.shape[1], _COLUMNS))](
            call.window_ids,
            call.window_ids.stride(0),
            counts[0],
            limits[0],
            widths[0],
            call.extra_ids,
            call.extra_ids.stride(0),
            counts[1],
            limits[1],
            both,
            both.stride(0),
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
    return near, far


def turn_back(x: Tensor, out: Tensor, inverse: InverseRope | None) -> None:
    """x [T, H, 512] to ``out``, in its type, rotated back at the queries' positions."""
    tokens, heads, _ = x.shape
    if not runs_kernels(x.device):
        turned = x.float()
        if inverse is not None:
            turned = rotate(turned, inverse.positions, inverse.inv_freq, inverse=True)
        out.copy_(turned)
        return
    _turn_back[(tokens, heads)](
        x,
        x.stride(0),
        x.stride(1),
        out,
        out.stride(0),
        out.stride(1),
        call_positions(inverse, out),
        out if inverse is None else inverse.inv_freq,
        TURN=inverse is not None,
        DIM=_DIM,
        ROPE=_ROPE,
        num_warps=1,
    )


def call_positions(inverse: InverseRope | None, instead: Tensor) -> Tensor:
    """The queries' positions, or any tensor where nothing is rotated."""
    return instead if inverse is None else inverse.positions


@triton.jit
def _prepare(
    near_ptr,
    near_token,
    near_count,
    near_limit,
    near_width,
    far_ptr,
    far_token,
    far_count,
    far_limit,
    out_ptr,
    out_token,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    near = column < near_width
    place = column - near_width
    first = tl.load(near_ptr + token * near_token + column, mask=column < near_count, other=-1)
    second = tl.load(
        far_ptr + token * far_token + place, mask=(place >= 0) & (place < far_count), other=-1
    )
    ids = tl.where(near, first, second)
    limit = tl.where(near, near_limit, far_limit)
    ids = tl.where((ids >= 0) & (ids < limit), ids, -1)
    tl.store(out_ptr + token * out_token + column, ids, mask=column < out_token)


@triton.jit
def _turn_back(
    x_ptr,
    x_token,
    x_head,
    out_ptr,
    out_token,
    out_head,
    position_ptr,
    inv_freq_ptr,
    TURN: tl.constexpr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, DIM)
    x = tl.load(x_ptr + token * x_token + head * x_head + column).to(tl.float32)
    if TURN:
        cos, sin = turn_row(tl.load(position_ptr + token), inv_freq_ptr, ROPE)
        x = rotate_row(x, cos, -sin, DIM, ROPE)
    to = out_ptr + token * out_token + head * out_head + column
    tl.store(to, x.to(out_ptr.dtype.element_ty))
