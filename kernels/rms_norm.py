"""Root-mean-square norm of rows on the GPU: one program a row."""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_tierd.kernels.ref import rms_norm as ref
from dsv4_tierd.kernels.step_triton import announce, follow, launch_order, output
from dsv4_tierd.kernels.triton_rows import runs_kernels, tl, triton


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """weight * x / sqrt(mean(x ** 2) + eps), in fp32; see the twin in ref/.

    x: [T, D] fp32 or bf16, any row stride; weight: [D] fp32 or bf16. ``out``: [T, D] fp32 or
    bf16, else allocated in ``dtype``; may be x. Cost: x once, out once.
    """
    assert x.dim() == 2 and x.stride(1) == 1, (x.shape, x.stride())
    out = output(x, tuple(x.shape), out, dtype)
    if not runs_kernels(x.device):
        return out.copy_(ref.rms_norm(x, weight, eps, out.dtype))
    rows, dim = x.shape
    if rows:
        block = triton.next_power_of_2(dim)
        _rms_norm[(rows,)](
            x,
            x.stride(0),
            x if weight is None else weight,
            eps,
            out,
            out.stride(0),
            DIM=dim,
            BLOCK=block,
            WEIGHTED=weight is not None,
            num_warps=min(8, max(1, block // 512)),
            **launch_order(x.device),
        )
    return out


@triton.jit
def _rms_norm(
    x_ptr,
    x_row,
    weight_ptr,
    eps,
    out_ptr,
    out_row,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PDL: tl.constexpr,
):
    announce(PDL)
    row = tl.program_id(0).to(tl.int64)
    value = tl.arange(0, BLOCK)
    here = value < DIM
    if WEIGHTED:
        weight = tl.load(weight_ptr + value, mask=here, other=0.0).to(tl.float32)
    follow(PDL)
    x = tl.load(x_ptr + row * x_row + value, mask=here, other=0.0).to(tl.float32)
    normed = tl.div_rn(x, tl.sqrt_rn(tl.sum(x * x, 0) / DIM + eps))
    if WEIGHTED:
        normed *= weight
    tl.store(out_ptr + row * out_row + value, normed.to(out_ptr.dtype.element_ty), mask=here)
