"""Matrix products with stored weights on the GPU, from one token to a prefill chunk.

Up to 4 tokens: rows times vectors in fp32, near the rate of memory. Up to 128: the matrix units,
the weights decoded to bf16 on the way. Above: the weight is decoded once into bf16 (exact), then
the library multiplies. Weights stay as the checkpoint has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.kernels.linear_triton import dense_kernel, dot_kernel, gemv_kernel
from dsv4_tierd.kernels.ref import linear as ref
from dsv4_tierd.kernels.rms_norm import rms_norm
from dsv4_tierd.kernels.scratch import Scratch, scratch
from dsv4_tierd.kernels.step_triton import WEIGHT_CODE, launch_order, output, weight_arguments
from dsv4_tierd.kernels.triton_rows import INTERPRETED, runs_kernels, triton
from dsv4_tierd.kernels.weight import Weight, WeightKind

DOT_TOKENS_MAX = 128
_TARGET_PROGRAMS = (
    264  # two a multiprocessor of an H200; fixed, so that bits do not follow the card
)
_VECTOR_PROGRAMS = 500
_LOADS = 16  # in flight a thread
_WARPS = 4
_DOT_ROWS, _DOT_ROWS_FEW, _DOT_STAGES = 64, 64, 4
_DOT_BYTES = 100 << 10  # of shared memory: two programs a multiprocessor
GEMV_TOKENS_MAX = 4


@dataclass(frozen=True, slots=True)
class _Call:
    """x: [T, G, K]; out: [T, G, N]; the weight's rows and columns of one group."""

    x: Tensor
    weight: Weight
    out: Tensor
    rows: int
    columns: int


def linear(
    x: Tensor,
    weight: Weight,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    held: Scratch | None = None,
) -> Tensor:
    """weight x, x RMS-normed first where ``norm`` [K] is given; see the twin in ref/.

    x: [T, K] with weight [N, K], or [T, G, K] with [G, N, K], fp32 or bf16, dense in its last
    axis; rounded to bf16 unless the weight is fp32. ``out``: [T, N] or [T, G, N] fp32 or bf16,
    any token stride, else allocated in ``dtype``; ``held``: see scratch.py, else allocated.
    Raises ValueError for shapes that do not fit. Cost: the weight's bytes once.
    """
    *lead, rows, columns = weight.shape
    grouped = len(lead) == 1
    if len(lead) > 1 or tuple(x.shape[1:]) != (*lead, columns) or x.stride(-1) != 1:
        raise ValueError(f"x: {list(x.shape)} {x.stride()} for a weight of {list(weight.shape)}")
    if columns % _granule(weight) or (norm is not None and grouped):
        raise ValueError(
            f"{weight.kind.value} weight of {columns} columns, norm {norm is not None}"
        )
    out = output(x, (*x.shape[:-1], rows), out, dtype)
    if not runs_kernels(x.device):
        return out.copy_(ref.linear(x, weight, norm, eps, out.dtype))
    tokens = x.shape[0]
    if not tokens:
        return out
    vectors = tokens <= GEMV_TOKENS_MAX
    if norm is not None and not vectors:
        x, norm = rms_norm(x, norm, eps, dtype=_operand(weight)), None
    wide = x if grouped else x.unsqueeze(1)
    call = _Call(wide, weight, out if grouped else out.unsqueeze(1), rows, columns)
    if vectors:
        _gemv(call, norm, eps)
    elif tokens <= DOT_TOKENS_MAX and weight.kind is not WeightKind.FP32:
        _dot(call, held)
    else:
        _library(call)
    return out


def _granule(weight: Weight) -> int:
    """Columns come in multiples of this."""
    return 32 if weight.kind is WeightKind.FP4 else 16


def _operand(weight: Weight) -> torch.dtype:
    return torch.float32 if weight.kind is WeightKind.FP32 else torch.bfloat16


def vector_shape(weight: Weight, rows: int, tiles: int = 1) -> dict[str, int]:
    """Constants of a launch of rows times vectors; ``rows`` in all, ``tiles`` a program."""
    step = 4 * _WARPS
    while step > _WARPS and rows // step < _VECTOR_PROGRAMS:
        step //= 2
    chunk = 128 if weight.kind is WeightKind.FP32 else 256
    unroll = max(1, _LOADS * _WARPS // (step * tiles))
    unroll = min(unroll, triton.next_power_of_2(triton.cdiv(weight.shape[-1], chunk)))
    return {"BN": step, "BK": chunk, "UNROLL": unroll, "num_warps": _WARPS}


def _gemv(call: _Call, norm: Tensor | None, eps: float) -> None:
    values, scales = weight_arguments(call.weight)
    tokens, groups = call.x.shape[:2]
    shape = vector_shape(call.weight, call.rows * groups)
    row_bytes = values.shape[-1] * values.element_size()
    gemv_kernel[(triton.cdiv(call.rows, shape["BN"]), groups)](
        call.x,
        call.x.stride(0),
        call.x.stride(1),
        call.x if norm is None else norm,
        eps,
        values,
        scales,
        scales.numel() // groups,
        call.out,
        call.out.stride(0),
        call.out.stride(1),
        call.rows,
        K=call.columns,
        KIND=WEIGHT_CODE[call.weight.kind],
        NORM=norm is not None,
        TOKENS=tokens,
        EVEN=call.rows % shape["BN"] == 0 and call.columns % (shape["BK"] * shape["UNROLL"]) == 0,
        ROW_BYTES=row_bytes,
        FETCH=triton.next_power_of_2(max(128, shape["BN"] * row_bytes)),
        **shape,
        **launch_order(call.x.device),
    )


def _dot(call: _Call, held: Scratch | None) -> None:
    values, scales = weight_arguments(call.weight)
    tokens, groups = call.x.shape[:2]
    block_t = min(64, max(16, triton.next_power_of_2(tokens)))
    tiles_t = triton.cdiv(tokens, block_t)
    block_n = _DOT_ROWS if block_t > 16 else _DOT_ROWS_FEW
    tiles = triton.cdiv(call.rows, block_n) * groups * tiles_t
    width = 2 if call.weight.kind is WeightKind.BF16 else 1
    splits = 1
    while splits < 8 and tiles * splits < _TARGET_PROGRAMS and call.columns // splits >= 1024:
        splits *= 2
    if splits > 1:
        held = scratch(call.x.device) if held is None else held
        room = held.partials.shape[0] // (block_n * block_t * tiles)
        splits = min(splits, triton.next_power_of_2(room + 1) // 2)
        assert splits > 0 and tiles <= held.arrivals.shape[0]
    dot_kernel[(triton.cdiv(call.rows, block_n), groups * splits, tiles_t)](
        call.x,
        call.x.stride(0),
        call.x.stride(1),
        values,
        scales,
        scales.numel() // groups,
        call.out,
        call.out.stride(0),
        call.out.stride(1),
        call.x if held is None else held.partials,
        call.x if held is None else held.arrivals,
        tokens,
        call.rows,
        K=call.columns,
        KIND=WEIGHT_CODE[call.weight.kind],
        SPLITS=splits,
        BN=block_n,
        BK=128,
        BT=block_t,
        STAGES=max(2, min(_DOT_STAGES, _DOT_BYTES // (256 * (block_n * width + 2 * block_t)))),
        num_warps=4,
        **launch_order(call.x.device),
    )


def _library(call: _Call) -> None:
    operand = _operand(call.weight)
    weight = dense_bf16(call.weight) if operand is torch.bfloat16 else call.weight.values
    weight = weight.view(call.x.shape[1], call.rows, call.columns)
    for group in range(call.x.shape[1]):
        multiply(call.x[:, group].to(operand), weight[group], call.out[:, group])


def multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [T, N] = x [T, K] weight^T, both bf16 or both fp32; sums in fp32."""
    if out.dtype is x.dtype:
        torch.mm(x, weight.t(), out=out)
    elif INTERPRETED or not x.is_cuda or out.dtype is torch.bfloat16:
        out.copy_(x.float() @ weight.float().t())
    else:
        torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)


def dense_bf16(weight: Weight, out: Tensor | None = None) -> Tensor:
    """[..., N, K] bf16 of a stored weight, new unless it is bf16 already or ``out`` is given."""
    if weight.kind is WeightKind.BF16 and out is None:
        return weight.values
    rows, columns = weight.shape[-2:]
    if out is None:
        out = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.values.device)
    if weight.scales is None or not runs_kernels(out.device):
        return out.copy_(weight.dense())
    values, scales = weight_arguments(weight)
    count = out.numel() // (rows * columns)
    dense_kernel[(triton.cdiv(rows, 32), triton.cdiv(columns, 128), count)](
        values,
        scales,
        out,
        rows,
        K=columns,
        KIND=WEIGHT_CODE[weight.kind],
        BN=32,
        num_warps=4,
    )
    return out
