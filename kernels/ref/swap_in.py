"""Bring chosen rows from the mirror into the hot set: one plan for the batch, then one copy.

``residency`` [M] int32 says where a mirror row is (slot or -1), ``owner`` [S] int32 the inverse,
``stamp`` [S] int32 the step that last used a slot (-1: never). All three are written in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.kernels.layout import Rows


@dataclass(frozen=True, slots=True)
class Plan:
    """Where each chosen row is, and what must be copied first.

    slots: [B, K] int64 hot slots, -1 where rows were; miss_rows, miss_slots: [m] int64, copy
    mirror row -> slot. hits, misses: distinct rows found, and to be copied.
    """

    slots: Tensor
    miss_rows: Tensor
    miss_slots: Tensor
    hits: int
    misses: int


def plan_swap_in(rows: Tensor, residency: Tensor, owner: Tensor, stamp: Tensor, step: int) -> Plan:
    """Give every chosen row a slot.

    rows: [B, K] int mirror rows, -1 padded; a row that several sessions chose is copied once.
    Victims are the slots with the oldest stamp, lowest slot first, never one stamped ``step``.
    step: int, not below any stamp. Asserts that the slots suffice (before anything is written).
    """
    valid = rows >= 0
    distinct = torch.unique(rows[valid]).long()
    where = residency[distinct].long()
    hit_slots, missing = where[where >= 0], distinct[where < 0]
    busy = stamp == step
    busy[hit_slots] = True
    miss_slots = _victims(stamp, busy, missing.shape[0])

    stamp[hit_slots] = step
    evicted = owner[miss_slots]
    residency[evicted[evicted >= 0].long()] = -1
    residency[missing] = miss_slots.to(torch.int32)
    owner[miss_slots] = missing.to(torch.int32)
    stamp[miss_slots] = step
    slots = torch.where(valid, residency[rows.clamp_min(0).long()].long(), -1)
    return Plan(slots, missing, miss_slots, hit_slots.shape[0], missing.shape[0])


def swap_in(plan: Plan, hot: Rows, mirror: Rows) -> None:
    """Copy the plan's misses: rows of ``mirror`` to slots of ``hot``, formats equal."""
    if plan.misses:
        hot.copy_from(plan.miss_slots, mirror, plan.miss_rows)


def evict_rows(rows: Tensor, residency: Tensor, owner: Tensor, stamp: Tensor) -> None:
    """Forget mirror rows that are about to get other content; their slots are free again.

    rows: [n] int mirror rows, distinct, resident or not.
    """
    rows = rows.long()
    slots = residency[rows].long()
    slots = slots[slots >= 0]
    residency[rows] = -1
    owner[slots] = -1
    stamp[slots] = -1


def _victims(stamp: Tensor, busy: Tensor, count: int) -> Tensor:
    """The ``count`` slots with the oldest stamp, ties to the lowest slot: [count] int64."""
    slot_count = stamp.shape[0]
    free = slot_count - int(busy.sum())
    assert count <= free, f"{count} rows to swap in, {free} of {slot_count} slots may be evicted"
    if not count:
        return torch.empty(0, dtype=torch.int64, device=stamp.device)
    order = stamp.long() * slot_count + torch.arange(slot_count, device=stamp.device)
    order = order.masked_fill(busy, torch.iinfo(torch.int64).max)
    return torch.topk(order, count, largest=False, sorted=True).indices
