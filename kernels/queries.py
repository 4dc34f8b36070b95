"""Queries between their projection and their use, on the GPU: one program a head, one launch."""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_tierd.kernels.index_scores import Queries, encode_queries
from dsv4_tierd.kernels.ref import queries as ref
from dsv4_tierd.kernels.step_triton import follow, launch_order, output
from dsv4_tierd.kernels.triton_rows import (
    hadamard_row,
    rotate_row,
    runs_kernels,
    tl,
    triton,
    turn_row,
)


def rotate_queries(
    q: Tensor,
    eps: float,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Norm each head without a weight, then rotate its last channels; see the twin in ref/.

    q: [T, H, D] fp32 or bf16, heads dense, any token stride; positions: [T] int; inv_freq: [R/2]
    fp32. ``out``: [T, H, D] contiguous fp32 or bf16, else allocated in ``dtype``; may be q.
    Raises ValueError for a D that is no power of two. Cost: q once, out once.
    """
    tokens, heads, dim = q.shape
    _check_heads(q, inv_freq)
    out = output(q, tuple(q.shape), out, dtype)
    if not runs_kernels(q.device):
        return out.copy_(ref.rotate_queries(q, eps, positions, inv_freq, out.dtype))
    assert out.stride(1) == dim
    if tokens:
        _rotate_queries[(heads, tokens)](
            q,
            q.stride(0),
            eps,
            positions,
            inv_freq,
            out,
            out.stride(0),
            DIM=dim,
            ROPE=2 * inv_freq.shape[0],
            num_warps=max(1, dim // 256),
            **launch_order(q.device),
        )
    return out


def index_queries(
    q: Tensor,
    g: Tensor,
    scale: float,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    out: Queries | None = None,
) -> Queries:
    """Index queries as the scan reads them: rotated, transformed, in FP8, scales in the gates.

    q: [T, Hi, Di] fp32 or bf16, heads dense, any token stride; g: [T, Hi] fp32 or bf16, raw head
    weights, any token stride; scale: Di**-0.5 * Hi**-0.5. ``out`` is overwritten, else allocated.
    Twin: ref/queries.py, then index_scores.encode_queries. Cost: q once.
    """
    tokens, heads, dim = q.shape
    _check_heads(q, inv_freq)
    if out is None:
        codes = torch.empty(tokens, heads, dim, dtype=torch.float8_e4m3fn, device=q.device)
        out = Queries(codes, torch.empty(tokens, heads, dtype=torch.float32, device=q.device))
    if not runs_kernels(q.device):
        return encode_queries(*ref.index_queries(q, g, scale, positions, inv_freq), out)
    assert out.codes.is_contiguous() and out.gates.is_contiguous() and g.stride(1) == 1
    if tokens:
        _index_queries[(heads, tokens)](
            q,
            q.stride(0),
            g,
            g.stride(0),
            scale,
            positions,
            inv_freq,
            out.codes.view(torch.uint8),
            out.gates,
            DIM=dim,
            ROPE=2 * inv_freq.shape[0],
            num_warps=1,
            **launch_order(q.device),
        )
    return out


def _check_heads(q: Tensor, inv_freq: Tensor) -> None:
    dim, rope = q.shape[2], 2 * inv_freq.shape[0]
    if dim & (dim - 1) or dim < 16 or rope & (rope - 1) or not 2 <= rope <= dim:
        raise ValueError(f"heads of {dim} values with {rope} rotated: powers of two are needed")
    if q.stride(2) != 1 or q.stride(1) != dim:
        raise ValueError(f"q: strides {q.stride()}, a token's heads must be contiguous")


@triton.jit
def _rotate_queries(
    q_ptr,
    q_token,
    eps,
    position_ptr,
    inv_freq_ptr,
    out_ptr,
    out_token,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * DIM + tl.arange(0, DIM)
    follow(PDL)
    cos, sin = turn_row(tl.load(position_ptr + token), inv_freq_ptr, ROPE)
    x = tl.load(q_ptr + token * q_token + at).to(tl.float32)
    x = tl.div_rn(x, tl.sqrt_rn(tl.sum(x * x, 0) / DIM + eps))
    x = rotate_row(x, cos, sin, DIM, ROPE)
    tl.store(out_ptr + token * out_token + at, x.to(out_ptr.dtype.element_ty))


@triton.jit
def _index_queries(
    q_ptr,
    q_token,
    g_ptr,
    g_token,
    scale,
    position_ptr,
    inv_freq_ptr,
    codes_ptr,
    gates_ptr,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    at = head * DIM + tl.arange(0, DIM)
    follow(PDL)
    cos, sin = turn_row(tl.load(position_ptr + token), inv_freq_ptr, ROPE)
    gate = tl.load(g_ptr + token * g_token + head).to(tl.float32)
    x = tl.load(q_ptr + token * q_token + at).to(tl.float32)
    x = hadamard_row(rotate_row(x, cos, sin, DIM, ROPE), DIM)
    factor = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 0), 1e-4), 448.0)
    bounded = tl.minimum(tl.maximum(tl.div_rn(x, factor), -448.0), 448.0)
    codes = bounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    place = token * tl.num_programs(0) + head
    tl.store(codes_ptr + place * DIM + tl.arange(0, DIM), codes)
    tl.store(gates_ptr + place, gate * scale * factor)
