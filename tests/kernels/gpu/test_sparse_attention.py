"""Sparse attention on the GPU equals its twin on the same quantised rows.

Tolerance: weights and the operands of the products are bf16 (2**-9 each, averaged over many
keys), sums are fp32: relative Frobenius error below 4e-3 of the twin in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4_tierd.kernels import sparse_attention as op
from dsv4_tierd.kernels.layout import Rows, row_pool
from dsv4_tierd.kernels.ref import sparse_attention as ref
from dsv4_tierd.kernels.ref.rope import rotate

Poison = Callable[[Tensor], Tensor]
DEVICE = torch.device("cuda")
SCALE = 512**-0.5
TOLERANCE = 4e-3


@dataclass(frozen=True, slots=True)
class Inputs:
    q: Tensor
    window: Rows
    window_ids: Tensor
    extra: Rows
    extra_ids: Tensor
    sink: Tensor

    def part(self, tokens: slice) -> Inputs:
        return Inputs(
            self.q[tokens],
            self.window,
            self.window_ids[tokens],
            self.extra,
            self.extra_ids[tokens],
            self.sink,
        )


def rows_with_nan(count: int, rows_per_page: int, named: Tensor, rng: torch.Generator) -> Rows:
    """A pool whose rows are NaN, data and scales, but for those named."""
    rows = row_pool(op.ROW, count, rows_per_page, DEVICE)
    rows.data.fill_(0xFF)
    assert rows.scale is not None
    rows.scale.fill_(0xFF)
    ids = named[(named >= 0) & (named < rows.row_count)].unique()
    width = torch.rand(len(ids), 1, generator=rng, device=DEVICE) * 4
    rows.write(ids, torch.randn(len(ids), 512, generator=rng, device=DEVICE) * width)
    return rows


def hostile_ids(shape: tuple[int, int], rows: int, rng: torch.Generator) -> Tensor:
    """Row ids, a quarter of them absent: -1, both int32 extremes, one past the end."""
    ids = torch.randint(0, rows, shape, generator=rng, device=DEVICE, dtype=torch.int32)
    strange = torch.tensor([-1, -(2**31), 2**31 - 1, 1 << 30], dtype=torch.int32, device=DEVICE)
    which = torch.randint(0, 16, shape, generator=rng, device=DEVICE)
    return torch.where(which < 4, strange[which % 4], ids)


def make(
    tokens: int, heads: int, counts: tuple[int, int], pages: tuple[int, int], rng: torch.Generator
) -> Inputs:
    window_ids = hostile_ids((tokens, counts[0]), 40 * pages[0], rng)
    extra_ids = hostile_ids((tokens, counts[1]), 900 * pages[1], rng)
    sink = torch.randn(heads, generator=rng, device=DEVICE) * 3
    sink[0], sink[heads // 2] = torch.inf, -torch.inf
    q = torch.randn(tokens, heads, 512, generator=rng, device=DEVICE) * 2
    return Inputs(
        q.bfloat16().float(),
        rows_with_nan(40 * pages[0], pages[0], window_ids, rng),
        window_ids,
        rows_with_nan(900 * pages[1], pages[1], extra_ids, rng),
        extra_ids,
        sink,
    )


def attend(given: Inputs, poison: Poison, split: int | None = None, **options: object) -> Tensor:
    capacity = 64 * sum(-(-ids.shape[1] // 64) for ids in (given.window_ids, given.extra_ids))
    tokens, heads, _ = given.q.shape
    scratch = op.workspace(tokens, heads, capacity, DEVICE, split)
    poison(scratch.sums)
    poison(scratch.logs)
    out = poison(torch.empty_like(given.q))
    op.sparse_attention(
        given.q,
        given.window,
        given.window_ids,
        given.extra,
        given.extra_ids,
        given.sink,
        SCALE,
        out=out,
        scratch=scratch,
        **options,
    )
    return out


def expected(given: Inputs) -> Tensor:
    near = torch.where(given.window_ids < given.window.row_count, given.window_ids, -1)
    far = torch.where(given.extra_ids < given.extra.row_count, given.extra_ids, -1)
    return ref.sparse_attention(
        given.q, given.window, near, given.extra, far, given.sink, SCALE, 1 << 28
    )


def assert_close(got: Tensor, want: Tensor) -> None:
    assert bool(got.isfinite().all()), "NaN or infinity in the result"
    error = ((got - want).norm() / want.norm().clamp_min(1e-20)).item()
    assert error < TOLERANCE, error


@pytest.mark.parametrize("heads", [1, 16, 64, 128])
@pytest.mark.parametrize("counts", [(1, 1), (128, 0), (128, 512), (61, 1033), (128, 7040)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_grid(
    heads: int, counts: tuple[int, int], tokens: int, rng: torch.Generator, poison: Poison
) -> None:
    """Any head count, odd page sizes, strange ids, NaN beside the named rows, any split."""
    given = make(tokens, heads, counts, (61, 69), rng)
    want = expected(given)
    for split in (None, 64, 256, 1 << 14):
        assert_close(attend(given, poison, split), want)


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("counts", [(128, 0), (61, 1033)])
def test_without_hoppers_products(
    heads: int, counts: tuple[int, int], rng: torch.Generator, poison: Poison
) -> None:
    """The products by mma.sync, which sm_100a is compiled with, give the same result."""
    given = make(3, heads, counts, (61, 69), rng)
    want = expected(given)
    for split in (64, 320, 1 << 14):
        assert_close(attend(given, poison, split), want)


@pytest.mark.parametrize("tokens", [32, 300])
def test_batches(tokens: int, rng: torch.Generator, poison: Poison) -> None:
    """A full decode batch and a prefill chunk."""
    given = make(tokens, 64, (128, 512), (128, 64), rng)
    assert_close(attend(given, poison), expected(given))


def test_a_querys_bits_depend_on_no_neighbour(rng: torch.Generator, poison: Poison) -> None:
    """With the same rows per split, alone or in a batch, and whatever -1 follow its ids."""
    given = make(9, 64, (128, 700), (128, 2), rng)
    for split in (64, 512, 1 << 14):
        batch = attend(given, poison, split)
        for token in (0, 8):
            one = given.part(slice(token, token + 1))
            assert torch.equal(attend(one, poison, split)[0], batch[token])
        longer = torch.nn.functional.pad(given.extra_ids, (0, 2000), value=-1)
        padded = Inputs(given.q, given.window, given.window_ids, given.extra, longer, given.sink)
        assert torch.equal(attend(padded, poison, split), batch)


def test_nothing_visible_is_zero(rng: torch.Generator, poison: Poison) -> None:
    """A query without a row gives zeros, whatever the sink, beside one that sees rows."""
    given = make(3, 64, (128, 512), (128, 64), rng)
    given.window_ids[1] = -1
    given.extra_ids[1] = -1
    for split in (None, 1 << 14):
        out = attend(given, poison, split)
        assert_close(out, expected(given))
        assert bool((out[1] == 0).all())


def test_inverse_rotation_and_bf16(rng: torch.Generator, poison: Poison) -> None:
    """The result is rotated back at the query's position, up to a million; bf16 in and out."""
    given = make(4, 64, (128, 512), (128, 64), rng)
    positions = torch.tensor([0, 5, 70_000, 1_048_575], device=DEVICE)
    inv_freq = 160000.0 ** (-torch.arange(32, device=DEVICE) / 32)
    want = rotate(expected(given), positions, inv_freq, inverse=True)
    inverse = op.InverseRope(positions, inv_freq)
    for split in (64, 1 << 14):
        assert_close(attend(given, poison, split, inverse=inverse), want)
    out = op.sparse_attention(
        given.q.bfloat16(),
        given.window,
        given.window_ids,
        given.extra,
        given.extra_ids,
        given.sink,
        SCALE,
        inverse=inverse,
    )
    assert out.dtype is torch.bfloat16
    error = ((out.float() - want).norm() / want.norm()).item()
    assert error < TOLERANCE + 2**-9, error


def test_window_alone(rng: torch.Generator) -> None:
    """Layers without compression pass no extra rows."""
    given = make(2, 64, (128, 1), (128, 64), rng)
    near = torch.where(given.window_ids < given.window.row_count, given.window_ids, -1)
    want = ref.sparse_attention(given.q, given.window, near, None, None, given.sink, SCALE)
    out = op.sparse_attention(
        given.q, given.window, given.window_ids, None, None, given.sink, SCALE
    )
    assert_close(out, want)


def test_rows_past_two_to_the_31_bytes(rng: torch.Generator, poison: Poison) -> None:
    """Addresses are 64-bit."""
    count = 3_800_000
    ids = count - 1 - torch.arange(600, device=DEVICE, dtype=torch.int32).view(1, 600) * 70
    given = make(1, 64, (128, 600), (128, 64), rng)
    rows = rows_with_nan(count, 64, ids, rng)
    assert rows.data.numel() > 2**31
    far = Inputs(given.q, given.window, given.window_ids, rows, ids, given.sink)
    assert_close(attend(far, poison), expected(far))


def test_a_graph_replays_on_new_inputs(rng: torch.Generator, poison: Poison) -> None:
    """Captured once, the op follows its inputs: ids that grow, rows that change."""
    given = make(2, 64, (128, 512), (128, 64), rng)
    scratch = op.workspace(2, 64, 640, DEVICE)
    out = torch.empty_like(given.q)

    def run() -> None:
        op.sparse_attention(
            given.q,
            given.window,
            given.window_ids,
            given.extra,
            given.extra_ids,
            given.sink,
            SCALE,
            out=out,
            scratch=scratch,
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    given.extra_ids[:, 100:] = -1
    given.q.mul_(0.5)
    poison(out)
    poison(scratch.sums)
    poison(scratch.logs)
    graph.replay()
    assert_close(out, expected(given))


def test_prefill_equals_the_twin(rng: torch.Generator) -> None:
    """Tiles of queries over a window in token order, with chosen and with listed entries."""
    tokens, size = 700, 128
    given = make(tokens, 64, (1, 512), (128, 2), rng)
    window = rows_with_nan(size - 1 + tokens, 61, torch.arange(size - 1 + tokens).to(DEVICE), rng)
    seen = (torch.arange(tokens, device=DEVICE) + 1).clamp_max(size)
    far = torch.where(given.extra_ids < given.extra.row_count, given.extra_ids, -1)
    listed = ref.Listed(given.extra, far[far >= 0][:300], torch.arange(tokens, device=DEVICE) // 3)
    for scope in (None, ref.Picked(given.extra, far), listed):
        want = ref.sparse_attention_prefill(given.q, window, seen, scope, given.sink, SCALE, size)
        got = op.sparse_attention_prefill(given.q, window, seen, scope, given.sink, SCALE, size)
        assert_close(got, want)
