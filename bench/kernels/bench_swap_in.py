"""Plan + swap-in of one C4 layer: FP8 rows, 512 a request, a hot set of 4,096 rows a request.

Each input set has tables and rows of its own; its state is restored before each replay, so that
every timed run meets exactly the stated misses. The mirror is one layer's sections, pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from harness import LINK_GBS, Case, Work, floor_us
from torch import Tensor

from dsv4_tierd.kernels.layout import RowFormat, RowKind, Rows, row_pool
from dsv4_tierd.kernels.swap_in import HotSet, swap_in

K = 512
HOT_PER_REQUEST = 4096
LATENT = RowFormat(RowKind.FP8, 512, 64)
MIRROR_PAGES = 8192
STEP = 100
# batch, misses in percent, sessions alike, goal in us
CASES = (
    (1, 5, False, 6.0),
    (1, 20, False, 8.0),
    (1, 100, False, 14.0),
    (8, 20, False, 17.0),
    (32, 5, False, 19.0),
    (32, 20, False, 52.0),
    (32, 100, False, 232.0),
    (32, 20, True, None),
)
TOY = ((2, 20, False, None),)


def cases(toy: bool) -> Iterator[Case]:
    """One case a line of the table; on a CPU a toy size through the twin."""
    for batch, percent, alike, goal in TOY if toy else CASES:
        k = 32 if toy else K
        misses = k * percent // 100 * (1 if alike else batch)
        name = f"batch={batch} misses={percent}%" + (" alike" if alike else "")
        build = partial(_build, batch, percent, alike, k)
        yield Case(name, build, goal, floor_us(misses * LATENT.row_bytes, LINK_GBS))


@cache
def _mirror(pages: int, pinned: bool) -> Rows:
    rows = row_pool(LATENT, pages * 64, 64, torch.device("cpu"))
    rows.data.random_(0, 256)
    assert rows.scale is not None
    rows.scale.random_(0, 256)
    if not pinned:
        return rows
    whole = torch.empty(pages, LATENT.row_bytes * 64, dtype=torch.uint8, pin_memory=True)
    whole[:, : 64 * LATENT.data_bytes] = rows.data.flatten(1)
    whole[:, 64 * LATENT.data_bytes :] = rows.scale.flatten(1)
    return Rows(
        LATENT,
        whole[:, : 64 * LATENT.data_bytes].unflatten(1, (64, LATENT.data_bytes)),
        whole[:, 64 * LATENT.data_bytes :].unflatten(1, (64, LATENT.scale_bytes)),
    )


class _Set:
    """One input set: a full hot set, and rows of which ``percent`` are not in it."""

    def __init__(
        self, batch: int, percent: int, alike: bool, k: int, mirror: Rows, device: torch.device
    ) -> None:
        per_request = HOT_PER_REQUEST * k // K
        slot_count, count = batch * per_request, mirror.row_count
        shuffled = torch.randperm(count, device=device).to(torch.int32)
        owner, absent = shuffled[:slot_count], shuffled[slot_count:]
        residency = torch.full((count,), -1, dtype=torch.int32, device=device)
        residency[owner.long()] = torch.arange(slot_count, dtype=torch.int32, device=device)
        stamp = torch.randint(0, STEP, (slot_count,), dtype=torch.int32, device=device)
        self.first = (residency, owner.clone(), stamp)
        pool = row_pool(LATENT, slot_count, 64, device)
        self.hot = HotSet(pool, *(table.clone() for table in self.first))
        misses = k * percent // 100
        self.distinct_misses = misses * (1 if alike else batch)
        chosen = []
        for b in range(batch):
            own = owner[b * per_request : (b + 1) * per_request][
                torch.randperm(per_request, device=device)
            ]
            chosen.append(torch.cat([own[: k - misses], absent[b * misses : (b + 1) * misses]]))
        rows = torch.stack([c[torch.randperm(k, device=device)] for c in chosen])
        self.rows = (rows[:1].expand(batch, k) if alike else rows).contiguous()
        self.slots = torch.empty_like(self.rows)
        self.step = torch.tensor([STEP], dtype=torch.int32, device=device)
        self.counters = torch.zeros(2, dtype=torch.int64, device=device)
        self.mirror = mirror

    def reset(self) -> None:
        for table, first in zip(
            (self.hot.residency, self.hot.owner, self.hot.stamp), self.first, strict=True
        ):
            table.copy_(first)

    def run(self) -> None:
        swap_in(self.rows, self.hot, self.mirror, self.step, self.slots, self.counters)

    def check(self) -> None:
        self.counters.zero_()
        self.run()
        assert self.counters[1].item() == self.distinct_misses, self.counters.tolist()
        assert torch.equal(self.hot.owner[self.slots.long()], self.rows), "a slot holds another row"
        rows = torch.unique(self.rows[self._missed()]).long()
        slots = self.hot.residency[rows].long()
        for here, there in (
            (self.hot.rows.data, self.mirror.data),
            (self.hot.rows.scale, self.mirror.scale),
        ):
            assert here is not None and there is not None
            same = here[slots // 64, slots % 64].cpu() == there[rows.cpu() // 64, rows.cpu() % 64]
            assert bool(same.all()), "a row's bytes differ"

    def _missed(self) -> Tensor:
        return self.first[0][self.rows.long()] < 0


def _build(batch: int, percent: int, alike: bool, k: int, device: torch.device) -> Work:
    on_gpu = device.type == "cuda"
    mirror = _mirror(MIRROR_PAGES if on_gpu else 64, on_gpu)
    sets = [
        _Set(batch, percent, alike, k, mirror, device)
        for _ in range(max(4, 24 // batch) if on_gpu else 1)
    ]

    def check() -> None:
        for each in sets[:2]:
            each.reset()
            each.check()

    def reset() -> None:
        for each in sets:
            each.reset()

    runs: list[Callable[[], object]] = [each.run for each in sets]
    bytes_moved = sets[0].distinct_misses * LATENT.row_bytes
    return Work(runs, check, bytes_moved, lambda: [each.slots.sum(-1) for each in sets[:1]], reset)
