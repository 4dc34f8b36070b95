"""The index scan: one session, 32 apart, 32 on one prefix, and prefill with its top-k.

Keys lie in device pages, 64 a page, at the pitch that such a page has.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from harness import Case, Work, floor_us

from dsv4_tierd.kernels import index_scores as op
from dsv4_tierd.kernels.layout import PageLayout, RowFormat, RowKind, Rows
from dsv4_tierd.kernels.ref import index_scores as ref

KEY = RowFormat(RowKind.KEY_FP8, 128)
PAGE = PageLayout(RowFormat(RowKind.FP8, 512, 64), KEY, tuple(range(21)), tuple(range(20)))
HEADS = 64
PREFIX_PAGES = 3520  # of 256 tokens: 900K
# FP8 matrix rate that the floors of the compute-bound cases take.
FP8_FLOPS = 1.26e15
_apart_us: list[float] = []


def cases(toy: bool) -> Iterator[Case]:
    """The lines of the table; the ratio needs its "apart" case measured before it."""
    if toy:
        yield _decode("1 session, 1K keys", 1, 16, False, None)
        return
    yield _decode("1 session, 262144 keys", 1, 4096, False, 11)
    yield _decode("32 sessions apart, 262144 keys each", 32, 4096, False, 290)
    yield _decode("32 sessions apart, 225280 keys each", 32, PREFIX_PAGES, False, None)
    yield _decode("32 sessions on one prefix of 225280 keys", 32, PREFIX_PAGES, True, None)
    yield Case(
        "32 sessions on one prefix, share of 32 apart",
        partial(_build_decode, 32, PREFIX_PAGES, True),
        0.65,
        metric="ratio",
        unit="x",
        value=lambda run_us, _: run_us / _apart_us[-1],
    )
    operations = 4096 * PREFIX_PAGES * 64 * HEADS * 128 * 2
    yield Case(
        "prefill 4096 queries x 225280 keys, scores + top-k 512",
        _build_prefill,
        22.66,  # 2.2 times the floor at the full FP8 rate
        operations / FP8_FLOPS * 1e3,
        unit="ms",
        value=lambda run_us, _: run_us / 1e3,
    )


def _decode(name: str, batch: int, pages: int, shared: bool, goal: float | None) -> Case:
    read = (1 if shared else batch) * pages * 64 * KEY.row_bytes
    operations = batch * pages * 64 * HEADS * 128 * 2

    def value(run_us: float, _: int) -> float:
        if not shared:
            _apart_us.append(run_us)
        return run_us

    floor = max(floor_us(read), operations / FP8_FLOPS * 1e6)
    return Case(name, partial(_build_decode, batch, pages, shared), goal, floor, value=value)


def _keys(pages: int, device: torch.device) -> Rows:
    pitch = PAGE.device_bytes if device.type == "cuda" else PAGE.index[0].bytes
    memory = torch.empty(pages, pitch, dtype=torch.uint8, device=device)
    rows = PAGE.index[0].view(memory)
    for ids in torch.arange(rows.row_count, device=device).split(1 << 20):
        rows.write(ids, torch.randn(len(ids), 128, device=device))
    return rows


def _queries(tokens: int, device: torch.device) -> op.Queries:
    q = torch.randn(tokens, HEADS, 128, device=device)
    return op.encode_queries(q, torch.randn(tokens, HEADS, device=device) * (128 * HEADS) ** -0.5)


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    error = ((got - want).abs().max() / want.abs().max()).item()
    assert error < 5e-3, f"error {error:.2e} of the largest score"


def _build_decode(batch: int, pages: int, shared: bool, device: torch.device) -> Work:
    owners = 1 if shared else batch
    keys = _keys(owners * pages, device)
    order = torch.randperm(owners * pages, device=device).int().view(owners, pages)
    table = order.expand(batch, pages).contiguous()
    visible = torch.full((batch,), pages * 64, dtype=torch.int32, device=device)
    plan = op.new_plan(batch, pages, device)
    op.fill_plan(plan, table.cpu().numpy(), 64)
    used = plan if shared else None
    out = torch.empty(batch, pages * 64, device=device)
    sets = [_queries(batch, device) for _ in range(8 if batch == 1 else 2)]
    # One session's keys would stay in the L2 from run to run: take other pages each time.
    tables = [table[:, torch.randperm(pages, device=device)].contiguous() for _ in sets]
    if shared:
        tables = [table for _ in sets]

    def run(queries: op.Queries, pages_of: torch.Tensor) -> None:
        op.index_scores_decode(
            queries, None, keys, pages_of, visible, plan=used, out=out, fill=False
        )

    def check() -> None:
        run(sets[0], tables[0])
        for row in {0, batch - 1}:
            one = slice(row, row + 1)
            codes, gates = sets[0].codes[one].float(), sets[0].gates[one]
            _close(
                out[one], ref.index_scores_decode(codes, gates, keys, tables[0][one], visible[one])
            )

    read = owners * pages * 64 * KEY.row_bytes
    runs = [partial(run, *one) for one in zip(sets, tables, strict=True)]
    return Work(runs, check, read, result=lambda: [out[0]])


def _build_prefill(device: torch.device) -> Work:
    keys = _keys(PREFIX_PAGES, device)
    page_ids = torch.randperm(PREFIX_PAGES, device=device).int()
    queries = _queries(4096, device)
    visible = PREFIX_PAGES * 64 - 1024 + torch.arange(4096, device=device, dtype=torch.int32) // 4
    scratch = torch.empty(256, PREFIX_PAGES * 64, device=device)
    ids = torch.empty(4096, 512, dtype=torch.int32, device=device)

    def run() -> None:
        op.scores_topk(queries, None, keys, page_ids, visible, 512, scratch=scratch, ids=ids)

    def check() -> None:
        run()
        few = slice(0, 8)
        codes, gates = queries.codes[few].float(), queries.gates[few]
        scores = ref.index_scores(codes, gates, keys, page_ids, visible[few])
        floor = scores.gather(1, ids[few].long()).amin(-1)
        missed = (scores > floor.unsqueeze(-1) + 5e-3 * scores.amax(-1, keepdim=True)).sum(-1)
        assert bool((missed <= 512).all()), "better scores were left out"

    read = PREFIX_PAGES * 64 * KEY.row_bytes
    return Work([run], check, read, result=lambda: [ids])
