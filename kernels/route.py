"""The router on the GPU: scores, choice and shares in one launch up to 16 tokens.

Scored layers: programs share a token by experts; the last to arrive picks. Hash layers: only the
logits of the token's own experts are made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4_tierd.kernels.linear import linear
from dsv4_tierd.kernels.ref import route as ref
from dsv4_tierd.kernels.ref.route import Router
from dsv4_tierd.kernels.route_triton import hashed_kernel, pick_kernel, scored_kernel
from dsv4_tierd.kernels.scratch import Scratch, scratch
from dsv4_tierd.kernels.step_triton import launch_order
from dsv4_tierd.kernels.triton_rows import runs_kernels, triton
from dsv4_tierd.kernels.weight import Weight

__all__ = ["Router", "route"]

TOGETHER_MAX = 16


def route(
    x: Tensor,
    ids: Tensor | None,
    router: Router,
    *,
    experts: Tensor | None = None,
    shares: Tensor | None = None,
    held: Scratch | None = None,
) -> tuple[Tensor, Tensor]:
    """(experts [T, k] int32, shares [T, k] fp32); see the twin in ref/.

    x: [T, d] fp32 or bf16 (bf16 above 16 tokens unless the gate is fp32); ids: [T] int, for hash
    layers; an id outside the table gets experts -1 and shares 0. ``experts``, ``shares``:
    written, else allocated; ``held``: see scratch.py, else allocated. Cost: the gate's bytes.
    """
    tokens = x.shape[0]
    if experts is None:
        experts = torch.empty(tokens, router.k, dtype=torch.int32, device=x.device)
    if shares is None:
        shares = torch.empty(tokens, router.k, dtype=torch.float32, device=x.device)
    assert experts.dtype is torch.int32 and experts.is_contiguous() and shares.is_contiguous()
    if not runs_kernels(x.device):
        found = ref.route(x, ids, router)
        return experts.copy_(found[0]), shares.copy_(found[1])
    assert x.stride(1) == 1 and router.gate.is_contiguous()
    assert router.k <= router.gate.shape[0] < 65536
    if tokens:
        if router.tid2eid is not None:
            _hashed(x, ids, router, experts, shares)
        else:
            _scored(x, router, experts, shares, held)
    return experts, shares


def _hashed(x: Tensor, ids: Tensor | None, router: Router, experts: Tensor, shares: Tensor) -> None:
    assert ids is not None and router.tid2eid is not None and router.tid2eid.is_contiguous()
    number, dim = router.gate.shape
    hashed_kernel[(x.shape[0],)](
        x,
        x.stride(0),
        router.gate,
        router.tid2eid,
        ids,
        experts,
        shares,
        router.scaling,
        router.tid2eid.shape[0],
        E=number,
        DIM=dim,
        BK=min(1024, triton.next_power_of_2(dim)),
        PICKS=router.k,
        K2=triton.next_power_of_2(router.k),
        num_warps=4,
        **launch_order(x.device),
    )


def _scored(
    x: Tensor, router: Router, experts: Tensor, shares: Tensor, held: Scratch | None
) -> None:
    assert router.bias is not None
    tokens, (number, dim) = x.shape[0], router.gate.shape
    shape = {"E": number, "E2": triton.next_power_of_2(number), "PICKS": router.k}
    shape["K2"] = triton.next_power_of_2(router.k)
    order = launch_order(x.device)
    if tokens > TOGETHER_MAX:
        logits = linear(x, Weight(router.gate), dtype=torch.float32, held=held)
        pick_kernel[(tokens,)](
            logits, router.bias, experts, shares, router.scaling, num_warps=1, **shape, **order
        )
        return
    held = scratch(x.device) if held is None else held
    columns = triton.next_power_of_2(dim)
    block = max(1, min(4, 16384 // columns)) if number >= 64 else 1
    scored_kernel[(triton.cdiv(number, block), tokens)](
        x,
        x.stride(0),
        router.gate,
        router.bias,
        experts,
        shares,
        router.scaling,
        held.partials,
        held.arrivals,
        DIM=dim,
        BE=block,
        BK=columns,
        num_warps=4,
        **shape,
        **order,
    )
