"""Queries between their projection and their use, on the GPU: one program a head, one launch."""

# Kernel arguments are what Triton makes of them: they carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_tierd.kernels.index_scores import Queries, encode_queries
from dsv4_tierd.kernels.ref import queries as ref
from dsv4_tierd.kernels.step_triton import announce, follow, launch_order, output
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
    out = _queries_like(q) if out is None else out
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


def layer_queries(
    q: Tensor,
    index_q: Tensor,
    g: Tensor,
    eps: float,
    scale: float,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    out: Tensor | None = None,
    index_out: Queries | None = None,
) -> tuple[Tensor, Queries]:
    """rotate_queries and index_queries of one layer in one launch; arguments as of both."""
    tokens, heads, dim = q.shape
    index_heads, index_dim = index_q.shape[1:]
    out = output(q, tuple(q.shape), out, torch.bfloat16)
    index_out = _queries_like(index_q) if index_out is None else index_out
    if not runs_kernels(q.device):
        rotate_queries(q, eps, positions, inv_freq, out=out)
        return out, index_queries(index_q, g, scale, positions, inv_freq, out=index_out)
    _check_heads(q, inv_freq)
    _check_heads(index_q, inv_freq)
    assert out.stride(1) == dim and g.stride(1) == 1
    assert index_out.codes.is_contiguous() and index_out.gates.is_contiguous()
    if tokens:
        _layer_queries[(heads + index_heads, tokens)](
            q,
            q.stride(0),
            eps,
            out,
            out.stride(0),
            index_q,
            index_q.stride(0),
            g,
            g.stride(0),
            scale,
            index_out.codes.view(torch.uint8),
            index_out.gates,
            positions,
            inv_freq,
            HEADS=heads,
            DIM=dim,
            INDEX_DIM=index_dim,
            ROPE=2 * inv_freq.shape[0],
            num_warps=1,
            **launch_order(q.device),
        )
    return out, index_out


def _queries_like(q: Tensor) -> Queries:
    return Queries(
        torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device),
        torch.empty(q.shape[:2], dtype=torch.float32, device=q.device),
    )


def _check_heads(q: Tensor, inv_freq: Tensor) -> None:
    dim, rope = q.shape[2], 2 * inv_freq.shape[0]
    if dim & (dim - 1) or dim < 16 or rope & (rope - 1) or not 2 <= rope <= dim:
        raise ValueError(f"heads of {dim} values with {rope} rotated: powers of two are needed")
    if q.stride(2) != 1 or q.stride(1) != dim:
        raise ValueError(f"q: strides {q.stride()}, a token's heads must be contiguous")


@triton.jit
def _rotate_head(x, cos, sin, eps, DIM: tl.constexpr, ROPE: tl.constexpr):
    x = tl.div_rn(x, tl.sqrt_rn(tl.sum(x * x, 0) / DIM + eps))
    return rotate_row(x, cos, sin, DIM, ROPE)


@triton.jit
def _encode_head(x, cos, sin, DIM: tl.constexpr, ROPE: tl.constexpr):
    """(codes [DIM] as bytes, their scale)."""
    x = hadamard_row(rotate_row(x, cos, sin, DIM, ROPE), DIM)
    factor = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 0), 1e-4), 448.0)
    bounded = tl.minimum(tl.maximum(tl.div_rn(x, factor), -448.0), 448.0)
    return bounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True), factor


@triton.jit(do_not_specialize_on_alignment=["position_ptr"])
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
    announce(PDL)
    token = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * DIM + tl.arange(0, DIM)
    follow(PDL)
    x = tl.load(q_ptr + token * q_token + at).to(tl.float32)
    cos, sin = turn_row(tl.load(position_ptr + token), inv_freq_ptr, ROPE)
    x = _rotate_head(x, cos, sin, eps, DIM, ROPE)
    tl.store(out_ptr + token * out_token + at, x.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize_on_alignment=["position_ptr"])
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
    announce(PDL)
    token = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    value = tl.arange(0, DIM)
    follow(PDL)
    x = tl.load(q_ptr + token * q_token + head * DIM + value).to(tl.float32)
    gate = tl.load(g_ptr + token * g_token + head).to(tl.float32)
    cos, sin = turn_row(tl.load(position_ptr + token), inv_freq_ptr, ROPE)
    codes, factor = _encode_head(x, cos, sin, DIM, ROPE)
    place = token * tl.num_programs(0) + head
    tl.store(codes_ptr + place * DIM + value, codes)
    tl.store(gates_ptr + place, gate * scale * factor)


@triton.jit
def _layer_queries(
    q_ptr,
    q_token,
    eps,
    out_ptr,
    out_token,
    index_ptr,
    index_token,
    g_ptr,
    g_token,
    scale,
    codes_ptr,
    gates_ptr,
    position_ptr,
    inv_freq_ptr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    ROPE: tl.constexpr,
    PDL: tl.constexpr,
):
    announce(PDL)
    token = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0)
    follow(PDL)
    position = tl.load(position_ptr + token)
    if head < HEADS:
        at = head * DIM + tl.arange(0, DIM)
        x = tl.load(q_ptr + token * q_token + at).to(tl.float32)
        cos, sin = turn_row(position, inv_freq_ptr, ROPE)
        x = _rotate_head(x, cos, sin, eps, DIM, ROPE)
        tl.store(out_ptr + token * out_token + at, x.to(out_ptr.dtype.element_ty))
    else:
        head -= HEADS
        value = tl.arange(0, INDEX_DIM)
        raw = tl.load(index_ptr + token * index_token + head * INDEX_DIM + value).to(tl.float32)
        gate = tl.load(g_ptr + token * g_token + head).to(tl.float32)
        cos, sin = turn_row(position, inv_freq_ptr, ROPE)
        codes, factor = _encode_head(raw, cos, sin, INDEX_DIM, ROPE)
        place = token * (tl.num_programs(0) - HEADS) + head
        tl.store(codes_ptr + place * INDEX_DIM + value, codes)
        tl.store(gates_ptr + place, gate * scale * factor)
