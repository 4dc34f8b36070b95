"""What warming runs meets every kernel that a chunk or a batch of any size would have compiled.

Seen without a GPU: ops of V4-Flash's dimensions run on tensors without memory, and what stands in
for their Triton kernels notes what each launch would be compiled for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_tierd.engine.gpu.warm import chunk_sizes
from dsv4_tierd.kernels import experts, experts_wide, hyper, linear, queries, rms_norm, route
from dsv4_tierd.kernels import row_store as row_store_op
from dsv4_tierd.kernels.experts import Experts, expert_scratch
from dsv4_tierd.kernels.layout import RowFormat, RowKind, row_pool
from dsv4_tierd.kernels.ref.hyper import Mix
from dsv4_tierd.kernels.route import Router
from dsv4_tierd.kernels.scratch import scratch
from dsv4_tierd.kernels.weight import Weight
from interpreted import needs_triton

META, FP32, INT32 = torch.device("meta"), torch.float32, torch.int32
OPS = (linear, hyper, experts, experts_wide, route, queries, row_store_op, rms_norm)
CHUNK, BATCH = 8192, 32
DIM, INNER, HEADS, LOW, INDEX = 4096, 2048, 64, 1024, 128
HEAD = 512

Variants = set[tuple[object, ...]]


class Noted:
    """Stands in for a Triton kernel: notes what makes two launches two kernels."""

    def __init__(self, kernel: Any, found: Variants) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        return self.launch

    def launch(self, *arguments: object, **named: object) -> None:
        names = [one.name for one in self.kernel.params]
        given = dict(zip(names, arguments, strict=False)) | named
        key: list[object] = [self.kernel.__name__]
        for one in self.kernel.params:
            value = given.pop(one.name)
            if isinstance(value, Tensor):
                at = value.storage_offset() * value.element_size()
                key.append((value.dtype, one.do_not_specialize_on_alignment or at % 16 == 0))
            elif one.is_constexpr:
                key.append(value)
            elif isinstance(value, int) and not one.do_not_specialize:
                key.append("one" if value == 1 else value % 16 == 0)
        self.found.add((*key, *sorted(given.items())))


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def fp8(*shape: int) -> Weight:
    tiles = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    values = empty(*shape, dtype=torch.float8_e4m3fn)
    return Weight(values, empty(*tiles, dtype=torch.float8_e8m0fnu))


def fp4(*shape: int) -> Weight:
    values = empty(*shape[:-1], shape[-1] // 2, dtype=torch.int8)
    return Weight(values, empty(*shape[:-1], shape[-1] // 32, dtype=torch.float8_e8m0fnu))


class Flash:
    """The step ops of every kind of layer, at Flash's sizes, of some tokens; what they launch."""

    def __init__(self, number: int, found: Variants) -> None:
        self.found, self.held = found, scratch(META)
        self.down, self.wo_b = fp8(LOW + HEAD, DIM), fp8(DIM, 8 * LOW)
        self.up = [fp8(HEADS * HEAD, LOW), fp8(HEADS * (HEAD + INDEX), LOW)]
        self.small = [Weight(empty(rows, DIM)) for rows in (2 * HEAD, 4 * HEAD + 4 * INDEX + HEADS)]
        self.wo_a, self.lm_head = fp8(8, LOW, DIM), Weight(empty(129_280, DIM))
        self.mix, self.head = self._mix(24, 3), self._mix(4, 1)
        self.experts = (
            Experts(fp4(number, 2, INNER, DIM), fp4(number, DIM, INNER)),
            Experts(fp8(2, INNER, DIM), fp8(DIM, INNER)),
        )
        gate, table = empty(number, DIM), empty(129_280, 6, dtype=torch.int64)
        bias = empty(number, dtype=FP32)
        self.routers = (Router(gate, None, table, 6, 1.5), Router(gate, bias, None, 6, 1.5))
        self.scratch = expert_scratch(CHUNK, 6, self.experts[0], META)

    def _mix(self, rows: int, scales: int) -> Mix:
        fn, base = empty(rows, 4 * DIM, dtype=FP32), empty(rows, dtype=FP32)
        return Mix(fn, base, empty(scales, dtype=FP32), empty(DIM), 1e-6, 1e-6, 20)

    def of(self, tokens: int, drawn: int, dropped: int = 0) -> Variants:
        """Every kernel of a chunk or batch of ``tokens``, ``drawn`` rows of logits of it.

        dropped: tokens before them that a replay has left behind.
        """
        self.found.clear()
        held, x = self.held, empty(tokens, 4, DIM, dtype=FP32)
        mixed = hyper.hyper_pre(x, self.mix, held=held)
        other = hyper.hyper_pre(x, self.mix, held=held)
        h, ids = mixed.h, empty(dropped + tokens, dtype=INT32)[dropped:]
        hyper.hyper_post_pre(h, x, mixed.post, mixed.comb, self.mix, mixed=other, held=held)
        hyper.hyper_post(h, x, mixed.post, mixed.comb, out=x)
        self._attention(h, ids)
        for router in self.routers:
            chosen, shares = route.route(h, ids, router, held=held)
        experts.experts(h, chosen, shares, *self.experts, 10.0, held=self.scratch)
        if drawn:
            last = hyper.hyper_head(x[:drawn], self.head, held=held)
            linear.linear(last, self.lm_head, dtype=FP32, held=held)
        return set(self.found)

    def _attention(self, h: Tensor, positions: Tensor) -> None:
        tokens, inverse, held = len(h), empty(32, dtype=FP32), self.held
        down = linear.linear(h, self.down, held=held)
        for matrix in self.up:
            up = linear.linear(down[:, :LOW], matrix, norm=empty(LOW), eps=1e-6, held=held)
        for matrix in self.small:
            small = linear.linear(h, matrix, dtype=FP32, held=held)
        q = up[:, : HEADS * HEAD].unflatten(1, (HEADS, HEAD))
        index_q = up[:, HEADS * HEAD :].unflatten(1, (HEADS, INDEX))
        queries.rotate_queries(q, 1e-6, positions, inverse)
        queries.index_queries(index_q, small[:, -HEADS:], 1.0, positions, inverse)
        rows = row_pool(RowFormat(RowKind.FP8, HEAD, 64), 127 + tokens, 127 + tokens, META)
        norm = empty(HEAD)
        row_store_op.row_store(down[:, LOW:], norm, 1e-6, positions, inverse, rows, positions)
        low = linear.linear(empty(tokens, 8, DIM), self.wo_a, held=held)
        linear.linear(low.flatten(1), self.wo_b, held=held)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Variants:
    """What has been launched; every op runs its kernels from here on."""
    import triton

    noted: Variants = set()
    for module in OPS:
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.runtime.JITFunction):
                monkeypatch.setattr(module, name, Noted(value, noted))
        if hasattr(module, "runs_kernels"):
            monkeypatch.setattr(module, "runs_kernels", lambda _: True)

    def grouped(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:  # noqa: ARG001  the name it is given
        return a.new_empty(a.shape[0], b.shape[-1])

    monkeypatch.setattr(experts_wide.functional, "grouped_mm", grouped)
    return noted


@needs_triton
@pytest.mark.parametrize("number", [16, 256])
def test_warming_meets_every_kernel(found: Variants, number: int) -> None:
    """Of a mini Flash and of the real one: any chunk up to the largest, any batch, its logits."""
    flash = Flash(number, found)
    sizes = chunk_sizes(CHUNK, 1 << 20)
    warmed = set().union(*(flash.of(size, min(size, BATCH)) for size in sizes))
    warmed |= set().union(*(flash.of(size, 1) for size in sizes))
    for tokens in (*range(1, 140), *range(140, CHUNK, 61), 496, 512, 682, 1365, 2730, 8128):
        assert flash.of(tokens, 1) <= warmed, tokens
        assert flash.of(tokens, 1, dropped=127) <= warmed, tokens
    for batch in range(1, BATCH + 1):
        assert flash.of(batch, batch) <= warmed, batch


def test_a_small_context_is_warmed_as_far_as_it_goes() -> None:
    """The text never outgrows the plan; chunks that are never cut are never run."""
    assert sum(chunk_sizes(8192, 511)) <= 511
    assert chunk_sizes(8192, 1) == [1]
    assert max(chunk_sizes(100, 1 << 20)) == 100
    assert chunk_sizes(8192, 1 << 20)[0] == 8192
