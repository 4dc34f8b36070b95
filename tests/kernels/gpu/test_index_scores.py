"""Index scores on the GPU equal the twin's on the same FP8 queries and keys.

Tolerance: products of e4m3 are exact, but the matrix units add them with about 14 bits below
the largest, and a score is a sum of 64 heads of either sign: 5e-3 of a query's largest score.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4_tierd.kernels import index_scores as op
from dsv4_tierd.kernels.layout import RowFormat, RowKind, Rows, row_pool
from dsv4_tierd.kernels.ref import index_scores as ref

Poison = Callable[[Tensor], Tensor]
DEVICE = torch.device("cuda")
KEY = RowFormat(RowKind.KEY_FP8, 128)
TOLERANCE = 5e-3


def make_keys(pages: int, rng: torch.Generator, rows_per_page: int = 64) -> Rows:
    rows = row_pool(KEY, pages * rows_per_page, rows_per_page, DEVICE)
    width = torch.rand(rows.row_count, 1, generator=rng, device=DEVICE) * 4
    rows.write(
        torch.arange(rows.row_count, device=DEVICE),
        torch.randn(rows.row_count, 128, generator=rng, device=DEVICE) * width,
    )
    return rows


def make_queries(tokens: int, heads: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    q = torch.randn(tokens, heads, 128, generator=rng, device=DEVICE) * 5
    return q, torch.randn(tokens, heads, generator=rng, device=DEVICE) * (128 * heads) ** -0.5


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    seen = want > -torch.inf
    assert torch.equal(got > -torch.inf, seen), "what is visible differs"
    assert not bool(got.isnan().any())
    most = want.masked_fill(~seen, 0.0).abs().amax(-1, keepdim=True).clamp_min(1e-6)
    wrong = ((got - want).masked_fill(~seen, 0.0).abs() / most).max().item() if want.numel() else 0
    assert wrong < TOLERANCE, wrong


def nan_pages(keys: Rows, pages: Tensor) -> None:
    keys.data[pages] = 0xFF
    assert keys.scale is not None
    keys.scale[pages] = 0xFF


def test_encoded_queries(rng: torch.Generator, poison: Poison) -> None:
    """Codes and scales are the key format's; gates carry the scale."""
    q, g = make_queries(37, 64, rng)
    q[3, 5] = 0.0
    q[4, 0] = 1e-7
    out = op.Queries(
        torch.empty(37, 64, 128, dtype=torch.float8_e4m3fn, device=DEVICE),
        poison(torch.empty(37, 64, device=DEVICE)),
    )
    poison(out.codes)
    op.encode_queries(q, g, out)
    # On the CPU, where a division by 448 is one and not a product with its inverse.
    data, scale = KEY.encode(q.cpu())
    assert scale is not None
    assert torch.equal(out.codes.view(torch.uint8).cpu(), data)
    assert torch.equal(out.gates.cpu(), g.cpu() * scale.view(torch.float32).squeeze(-1))


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("tokens", [1, 2, 3, 65, 200])
def test_prefill(heads: int, tokens: int, rng: torch.Generator, poison: Poison) -> None:
    """Odd page counts, queries that see 0, 1, all; pages past the last visible are NaN."""
    keys = make_keys(40, rng)
    page_ids = torch.randperm(40, generator=rng, device=DEVICE)[:37].int()
    visible = torch.randint(0, 33 * 64 + 3, (tokens,), generator=rng, device=DEVICE).int()
    visible[0], visible[-1] = 33 * 64 + 3, (1 if tokens > 1 else 33 * 64 + 3)
    nan_pages(keys, page_ids[34:])
    q, g = make_queries(tokens, heads, rng)
    queries = op.encode_queries(q, g)
    want = ref.index_scores(queries.codes.float(), queries.gates, keys, page_ids, visible)
    out = poison(torch.empty_like(want))
    assert_close(op.index_scores(queries, None, keys, page_ids, visible, out=out), want)
    assert_close(op.index_scores(q, g, keys, page_ids, visible), want)
    poison(out)
    partly = op.index_scores(queries, None, keys, page_ids, visible, out=out, fill=False)
    seen = want > -torch.inf
    assert torch.equal(partly[seen], op.index_scores(q, g, keys, page_ids, visible)[seen])


def forked_table(batch: int, pages: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sessions that fork from one another at random depths: (page table, visible)."""
    table = torch.full((batch, pages), -1, dtype=torch.int32)
    pool = torch.randperm(
        batch * pages, generator=torch.Generator().manual_seed(rng.initial_seed())
    )
    visible = torch.zeros(batch, dtype=torch.int32)
    for row in range(batch):
        depth = int(torch.randint(0, pages, (1,))) if row else 0
        length = int(torch.randint(max(1, depth), pages + 1, (1,)))
        table[row, :length] = pool[row * pages : row * pages + length].int()
        if row:
            shared = table[int(torch.randint(0, row, (1,)))][:depth]
            shared = shared[shared >= 0][:length]
            table[row, : len(shared)] = shared
        visible[row] = length * 64 - int(torch.randint(0, 64, (1,)))
    visible[-1] = 0
    return table, visible.to(DEVICE)


@pytest.mark.parametrize("batch", [1, 3, 32])
@pytest.mark.parametrize("pages", [1, 7, 150])
def test_decode(batch: int, pages: int, rng: torch.Generator, poison: Poison) -> None:
    """Forked sessions, with and without a plan: the twin's scores, and the same bits both ways."""
    table, visible = forked_table(batch, pages, rng)
    keys = make_keys(batch * pages, rng)
    unused = torch.ones(batch * pages, dtype=torch.bool)
    unused[table[table >= 0].long()] = False
    nan_pages(keys, unused.nonzero().squeeze(-1).to(DEVICE))
    q, g = make_queries(batch, 64, rng)
    queries = op.encode_queries(q, g)
    want = ref.index_scores_decode(
        queries.codes.float(), queries.gates, keys, table.to(DEVICE), visible
    )
    plan = op.new_plan(batch, pages, DEVICE)
    op.fill_plan(plan, table.numpy(), 64)
    alone = op.index_scores_decode(
        queries, None, keys, table.to(DEVICE), visible, out=poison(torch.empty_like(want))
    )
    assert_close(alone, want)
    together = op.index_scores_decode(
        queries,
        None,
        keys,
        table.to(DEVICE),
        visible,
        plan=plan,
        out=poison(torch.empty_like(want)),
    )
    assert_close(together, want)
    assert torch.equal(alone, together)


@pytest.mark.usefixtures("portable")
def test_decode_without_hoppers_products(rng: torch.Generator, poison: Poison) -> None:
    """The products by mma.sync, which sm_100a is compiled with, give the twin's scores too."""
    test_decode(3, 150, rng, poison)


def test_a_sessions_bits_depend_on_no_neighbour(rng: torch.Generator) -> None:
    """Alone, in a batch, on a shared scan: a query and a key give the same bits."""
    keys = make_keys(60, rng)
    q, g = make_queries(5, 64, rng)
    queries = op.encode_queries(q, g)
    page_ids = torch.arange(60, device=DEVICE, dtype=torch.int32)
    visible = torch.full((5,), 3800, dtype=torch.int32, device=DEVICE)
    table = page_ids.expand(5, 60).contiguous()
    batch = op.index_scores_decode(queries, None, keys, table, visible)
    plan = op.new_plan(5, 60, DEVICE)
    op.fill_plan(plan, table.cpu().numpy(), 64)
    shared = op.index_scores_decode(queries, None, keys, table, visible, plan=plan)
    assert torch.equal(batch, shared)
    whole = op.index_scores(queries, None, keys, page_ids, visible)
    assert torch.equal(whole, batch)
    for cut in (1, 2, 4):
        first = op.Queries(queries.codes[:cut], queries.gates[:cut])
        part = op.index_scores(first, None, keys, page_ids, visible[:cut])
        assert torch.equal(part, whole[:cut])
    for row in range(5):
        one = op.Queries(queries.codes[row : row + 1], queries.gates[row : row + 1])
        alone = op.index_scores_decode(one, None, keys, table[:1], visible[:1])
        assert torch.equal(alone[0], batch[row])


def test_pages_past_two_to_the_31_bytes(rng: torch.Generator) -> None:
    """Addresses are 64-bit: pages of a wide pitch, as a device page has."""
    pitch, count = 1 << 20, 2300
    memory = torch.zeros(count, pitch, dtype=torch.uint8, device=DEVICE)
    data = memory[:, : 64 * 128].unflatten(1, (64, 128))
    scale = memory[:, 64 * 128 : 64 * 132].unflatten(1, (64, 4))
    keys = Rows(KEY, data, scale)
    page_ids = count - 1 - torch.arange(10, device=DEVICE, dtype=torch.int32)
    ids = (page_ids.long().unsqueeze(-1) * 64 + torch.arange(64, device=DEVICE)).flatten()
    keys.write(ids, torch.randn(640, 128, generator=rng, device=DEVICE))
    q, g = make_queries(2, 64, rng)
    queries = op.encode_queries(q, g)
    visible = torch.tensor([640, 600], dtype=torch.int32, device=DEVICE)
    want = ref.index_scores(queries.codes.float(), queries.gates, keys, page_ids, visible)
    assert_close(op.index_scores(queries, None, keys, page_ids, visible), want)
    table = page_ids.expand(2, 10).contiguous()
    assert_close(op.index_scores_decode(queries, None, keys, table, visible), want)
