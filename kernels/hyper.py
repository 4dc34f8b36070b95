"""Hyper-connections on the GPU: a sublayer's input from the streams, its answer back into them.

Up to 16 tokens: one launch each way, or one for both (the answer of one sublayer, the input of
the next). Programs share a token by channels; the last to arrive mixes the streams (sums are not
atomic, so bits do not depend on the order of arrival). Above: two launches, matrix units.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_tierd.kernels.hyper_triton import (
    finish_kernel,
    mix_kernel,
    mix_many_kernel,
    post_kernel,
)
from dsv4_tierd.kernels.ref import hyper as ref
from dsv4_tierd.kernels.ref.hyper import Mix, Mixed
from dsv4_tierd.kernels.scratch import Scratch, scratch
from dsv4_tierd.kernels.step_triton import launch_order, output
from dsv4_tierd.kernels.triton_rows import runs_kernels, triton

__all__ = ["Mix", "Mixed", "hyper_head", "hyper_post", "hyper_post_pre", "hyper_pre"]

TOGETHER_MAX = 16
_PARTIAL = 32
_SPLITS = 64


def hyper_pre(
    x: Tensor, mix: Mix, *, out: Mixed | None = None, held: Scratch | None = None
) -> Mixed:
    """Streams to the sublayer's normed input, and the mix of what comes after it; twin in ref/.

    x: [T, n, d] contiguous, fp32 or bf16; kernels take n = 4 alone (else ValueError). ``out`` is
    overwritten, else allocated (h in bf16); ``held``: see scratch.py, else allocated. Cost: x and
    fn once.
    """
    if out is None:
        out = _mixed(x)
    if not runs_kernels(x.device):
        made = ref.hyper_pre(x, mix, out.h.dtype)
        out.h.copy_(made.h)
        out.post.copy_(made.post)
        out.comb.copy_(made.comb)
        return out
    _mix(x, None, mix, (out.h, out.post, out.comb), held)
    return out


def hyper_post(
    y: Tensor, x: Tensor, post: Tensor, comb: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """The next streams [T, n, d]; see the twin in ref/.

    y: [T, d] fp32 or bf16; x: [T, n, d] contiguous; post: [T, n], comb: [T, n, n] fp32. ``out``:
    like x, may be x, else allocated. Cost: y and x once, out once.
    """
    tokens, n, dim = x.shape
    if out is None:
        out = torch.empty_like(x)
    if not runs_kernels(x.device):
        return out.copy_(ref.hyper_post(y, x, post, comb))
    _check_streams(x, n)
    _check_answer(y, x, post, comb, out)
    if tokens:
        channels = min(512, triton.next_power_of_2(dim))
        post_kernel[(triton.cdiv(dim, channels), tokens)](
            y,
            y.stride(0),
            x,
            post,
            comb,
            out,
            N=n,
            DIM=dim,
            CHANNELS=channels,
            num_warps=4,
            **launch_order(x.device),
        )
    return out


def hyper_post_pre(
    y: Tensor,
    x: Tensor,
    post: Tensor,
    comb: Tensor,
    mix: Mix,
    *,
    out: Tensor | None = None,
    mixed: Mixed | None = None,
    held: Scratch | None = None,
) -> tuple[Tensor, Mixed]:
    """hyper_post, then hyper_pre of its result: one launch up to 16 tokens.

    Arguments as of both; ``mixed`` is hyper_pre's ``out`` and must not share memory with post and
    comb. Returns (the next streams, what the next sublayer takes).
    """
    tokens = x.shape[0]
    if not runs_kernels(x.device) or tokens > TOGETHER_MAX:
        streams = hyper_post(y, x, post, comb, out=out)
        return streams, hyper_pre(streams, mix, out=mixed, held=held)
    out = torch.empty_like(x) if out is None else out
    _check_answer(y, x, post, comb, out)
    mixed = _mixed(x) if mixed is None else mixed
    _mix(x, (y, post, comb, out), mix, (mixed.h, mixed.post, mixed.comb), held)
    return out, mixed


def hyper_head(
    x: Tensor,
    mix: Mix,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    held: Scratch | None = None,
) -> Tensor:
    """Streams x [T, n, d] to the language head's normed input [T, d]; see the twin in ref/."""
    out = output(x, (x.shape[0], x.shape[2]), out, dtype)
    if not runs_kernels(x.device):
        return out.copy_(ref.hyper_head(x, mix, out.dtype))
    _mix(x, None, mix, (out,), held)
    return out


def _mixed(x: Tensor) -> Mixed:
    tokens, n, dim = x.shape
    return Mixed(
        torch.empty(tokens, dim, dtype=torch.bfloat16, device=x.device),
        torch.empty(tokens, n, dtype=torch.float32, device=x.device),
        torch.empty(tokens, n, n, dtype=torch.float32, device=x.device),
    )


def _check_streams(x: Tensor, n: int) -> None:
    if n != 4 or not x.is_contiguous():
        raise ValueError(f"streams {list(x.shape)} {x.stride()}: 4 contiguous ones are needed")


def _check_answer(y: Tensor, x: Tensor, post: Tensor, comb: Tensor, out: Tensor) -> None:
    tokens, n, dim = x.shape
    assert y.shape == (tokens, dim) and y.stride(1) == 1, (y.shape, y.stride())
    assert post.shape == (tokens, n) and comb.shape == (tokens, n, n)
    assert post.is_contiguous() and comb.is_contiguous() and out.is_contiguous()
    assert out.shape == x.shape and out.dtype is x.dtype


def _mix(
    x: Tensor,
    answer: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    mix: Mix,
    outs: tuple[Tensor, ...],
    held: Scratch | None,
) -> None:
    """answer: (y, post, comb, out) of a sublayer to spread first; outs: (h,) or h, post, comb."""
    tokens, n, dim = x.shape
    _check_streams(x, n)
    head = len(outs) == 1
    h, post, comb = (*outs, *outs, *outs)[:3]
    rows = n if head else (2 + n) * n
    assert mix.fn.shape == (rows, n * dim) and mix.fn.is_contiguous(), mix.fn.shape
    assert h.shape == (tokens, dim) and h.stride(1) == 1
    assert head or (post.is_contiguous() and comb.is_contiguous())
    if not tokens:
        return
    held = scratch(x.device) if held is None else held
    launch = _mix_few if tokens <= TOGETHER_MAX else _mix_many
    launch(x, answer, mix, (h, post, comb), head, held)


def _mix_few(
    x: Tensor,
    answer: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    mix: Mix,
    outs: tuple[Tensor, Tensor, Tensor],
    head: bool,
    held: Scratch,
) -> None:
    tokens, dim = x.shape[0], x.shape[2]
    h, post, comb = outs
    channels = triton.next_power_of_2(max(16, triton.cdiv(dim, _SPLITS)))
    y, post_in, comb_in, streams = (x, x, x, x) if answer is None else answer
    splits = triton.next_power_of_2(triton.cdiv(dim, channels))  # idle programs leave zeros
    mix_kernel[(splits + (not head), tokens)](
        x,
        y,
        y.stride(0),
        post_in,
        comb_in,
        streams,
        mix.fn,
        *(mix.base, mix.scale, mix.norm, mix.norm_eps, mix.hc_eps),
        h,
        h.stride(0),
        post,
        comb,
        held.partials,
        held.arrivals,
        CHANNELS=channels,
        SPLITS=splits,
        SPREAD=answer is not None,
        num_warps=4 if dim <= 4096 else 8,
        **_constants(x, mix, head),
        **launch_order(x.device),
    )


def _mix_many(
    x: Tensor,
    answer: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    mix: Mix,
    outs: tuple[Tensor, Tensor, Tensor],
    head: bool,
    held: Scratch,
) -> None:
    assert answer is None
    tokens, n, dim = x.shape
    h, post, comb = outs
    block = 16 if tokens <= 512 else 64
    splits = _splits(triton.cdiv(tokens, block), n * dim)
    assert tokens * splits * _PARTIAL <= held.partials.shape[0], "more tokens than a call takes"
    constants, order = _constants(x, mix, head), launch_order(x.device)
    mix_many_kernel[(splits, triton.cdiv(tokens, block))](
        x,
        mix.fn,
        held.partials,
        tokens,
        N=n,
        DIM=dim,
        ROWS=constants["ROWS"],
        TOKENS=block,
        CHANNELS=min(128, triton.next_power_of_2(n * dim // splits)),
        SPLITS=splits,
        EXACT=x.dtype is torch.float32,
        num_warps=4,
        **order,
    )
    finish_kernel[(tokens,)](
        x,
        *(mix.base, mix.scale, mix.norm, mix.norm_eps, mix.hc_eps),
        h,
        h.stride(0),
        post,
        comb,
        held.partials,
        SPLITS=splits,
        num_warps=4 if dim <= 4096 else 8,
        **constants,
        **order,
    )


def _constants(x: Tensor, mix: Mix, head: bool) -> dict[str, int]:
    _, n, dim = x.shape
    shape = {"N": n, "DIM": dim, "ROWS": mix.fn.shape[0]}
    return {**shape, "BLOCK": triton.next_power_of_2(dim), "ITERS": mix.iters, "HEAD": head}


def _splits(tiles: int, values: int) -> int:
    """A power of two that divides ``values`` and brings about two programs a multiprocessor."""
    splits = 1
    while splits * tiles < 256 and values % (4 * splits) == 0 and splits < 32:
        splits *= 2
    return splits
