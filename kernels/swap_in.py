"""Plan + swap-in: chosen mirror rows into the hot set, one launch, no host (csrc/swap_in.cu).

The tables and what they mean are the twin's (``kernels/ref/swap_in.py``). Two differences, both
allowed by the contract: a victim is the oldest of 32 hashed slots, not of all; and the order of
misses is not reported. On a CPU the twin runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.kernels import nvrtc
from dsv4_tierd.kernels.checks import check_dense, check_tensor
from dsv4_tierd.kernels.layout import Rows
from dsv4_tierd.kernels.ref import swap_in as ref

_THREADS = 512
_BUFFERS = 64
_PAIRS_A_CTA_MAX = 8192
PAIRS_MAX = 16 * _PAIRS_A_CTA_MAX


@dataclass(frozen=True, slots=True)
class HotSet:
    """One layer's rows on the device, and who is where.

    rows: the slots' memory; residency: [M] int32, slot of a mirror row or -1; owner: [S] int32,
    mirror row of a slot or -1; stamp: [S] int32, the step that last used a slot, -1 never.
    """

    rows: Rows
    residency: Tensor
    owner: Tensor
    stamp: Tensor

    @property
    def device(self) -> torch.device:
        return self.owner.device


def swap_in(
    rows: Tensor,
    hot: HotSet,
    mirror: Rows,
    step: Tensor,
    slots: Tensor,
    counters: Tensor,
    *,
    cluster: int | None = None,
) -> None:
    """Give every chosen row a slot and copy in the ones that were not there.

    rows: [B, K] or [B, width, K] int32, mirror rows, -1 padded; a row that several chose is copied
    once. mirror: rows in pinned host memory (or on the device), same format as ``hot.rows``.
    step: [1] int32 on the device, above every earlier step's. slots: like ``rows``, written, -1
    where rows are. counters: [2] int64 on the device, += distinct rows found, rows copied (a row
    found again within one step counts once). Needs S >= 2 * rows.numel(), S a multiple of 8, and at
    most PAIRS_MAX rows. Raises ValueError on a wrong argument. Safe in a CUDA graph: the caller
    keeps the mirror's rows unchanged until the launch is done.
    """
    _check(rows, hot, mirror, step, slots, counters)
    if not rows.numel():
        return
    if hot.device.type != "cuda":
        flat = rows.reshape(-1, rows.shape[-1])
        plan = ref.plan_swap_in(flat, hot.residency, hot.owner, hot.stamp, int(step))
        ref.swap_in(plan, hot.rows, mirror)
        slots.copy_(plan.slots.view(slots.shape))
        counters += torch.tensor([plan.hits, plan.misses])
        return
    pairs = rows.numel()
    # Eight CTAs fill the link; twice as many plan large batches faster.
    cluster = cluster or (8 if pairs <= 2048 else 16)
    cap = -(-pairs // (8 * cluster)) * 8
    data_bytes, scale_bytes = hot.rows.format.data_bytes, hot.rows.format.scale_bytes
    defines = {
        "DATA_BYTES": data_bytes,
        "SCALE_BYTES": scale_bytes,
        "MIRROR_ROWS": mirror.rows_per_page,
        "HOT_ROWS": hot.rows.rows_per_page,
    }
    # sizeof(Shared) in swap_in.cu: buffers, their barriers, then the claimed rows and slots.
    buffer_bytes = -(-(data_bytes + (16 if scale_bytes else 0)) // 128) * 128 + 8
    shape = nvrtc.Shape(cluster, _THREADS, cluster, _BUFFERS * buffer_bytes + 128 + 12 * cap)
    nvrtc.load("swap_in.cu", "swap_in", hot.device, **defines).launch(
        shape,
        rows,
        pairs,
        hot.residency,
        hot.owner,
        hot.stamp,
        hot.owner.shape[0],
        step,
        *_pool(hot.rows),
        *_pool(mirror),
        cap,
        slots,
        counters,
    )


def evict_rows(rows: Tensor, hot: HotSet) -> None:
    """Forget mirror rows that are about to get other content; their slots are free again.

    rows: [n] int32 on the tables' device, mirror rows, distinct, resident or not; -1 is skipped.
    """
    check_tensor("rows", rows, torch.int32, (None,), hot.device)
    check_dense("rows", rows)
    if not rows.numel():
        return
    if hot.device.type != "cuda":
        ref.evict_rows(rows[rows >= 0], hot.residency, hot.owner, hot.stamp)
        return
    kernel = nvrtc.load("evict_rows.cu", "evict_rows", hot.device)
    shape = nvrtc.Shape(-(-rows.shape[0] // 256), 256)
    kernel.launch(shape, rows, rows.shape[0], hot.residency, hot.owner, hot.stamp)


def _pool(rows: Rows) -> tuple[Tensor, int, Tensor | None, int]:
    """(data, bytes a page, scale, bytes a page), as the kernel takes a pool."""
    scale_pitch = 0 if rows.scale is None else rows.scale.stride(0)
    return rows.data, rows.data.stride(0) * rows.data.element_size(), rows.scale, scale_pitch


def _check(
    rows: Tensor, hot: HotSet, mirror: Rows, step: Tensor, slots: Tensor, counters: Tensor
) -> None:
    device, slot_count = hot.device, hot.owner.shape[0]
    check_tensor("rows", rows, torch.int32, (None,) * rows.dim(), device)
    check_tensor("slots", slots, torch.int32, tuple(rows.shape), device)
    check_tensor("residency", hot.residency, torch.int32, (None,), device)
    check_tensor("owner", hot.owner, torch.int32, (None,), device)
    check_tensor("stamp", hot.stamp, torch.int32, (slot_count,), device)
    check_tensor("step", step, torch.int32, (1,), device)
    check_tensor("counters", counters, torch.int64, (2,), device)
    for name, tensor in (("rows", rows), ("slots", slots), ("counters", counters)):
        check_dense(name, tensor)
    if device.type == "cuda" and hot.stamp.data_ptr() % 32:
        raise ValueError(
            f"stamp: at {hot.stamp.data_ptr():#x}, must start at 32 B: probes are sectors"
        )
    if hot.rows.format != mirror.format:
        raise ValueError(f"mirror: rows of {mirror.format}, hot set of {hot.rows.format}")
    if slot_count < 2 * rows.numel() or slot_count > hot.rows.row_count or slot_count % 8:
        raise ValueError(
            f"{slot_count} slots over {hot.rows.row_count} rows for {rows.numel()} chosen:"
            " needs twice as many, in eights"
        )
    if hot.residency.shape[0] > mirror.row_count:
        raise ValueError(
            f"residency of {hot.residency.shape[0]} rows, mirror of {mirror.row_count}"
        )
    if rows.numel() > PAIRS_MAX:
        raise ValueError(f"{rows.numel()} chosen rows, at most {PAIRS_MAX}")
    if device.type == "cuda":
        _check_pool("hot", hot.rows)
        _check_pool("mirror", mirror)
        if mirror.data.device.type == "cpu" and not mirror.data.is_pinned():
            raise ValueError("mirror: pageable memory, must be pinned for the device to read it")


def _check_pool(name: str, rows: Rows) -> None:
    """Bulk copies move multiples of 16 B between multiples of 16 B."""
    row_format, data, scale = rows.format, rows.data, rows.scale
    pitches = [data.stride(0) * data.element_size(), 0 if scale is None else scale.stride(0)]
    starts = [data.data_ptr(), 0 if scale is None else scale.data_ptr()]
    dense = data.stride(1) == row_format.data_elems and (
        scale is None or scale.stride(1) == row_format.scale_bytes
    )
    if not dense or any(value % 16 for value in (*pitches, *starts, row_format.data_bytes)):
        raise ValueError(
            f"{name}: rows of {row_format.data_bytes} B at {starts}, pages {pitches} B apart:"
            " must be dense, in multiples of 16 B"
        )
