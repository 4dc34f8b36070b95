"""Page copies between the device and the pinned mirror: in runs, on side streams.

Pages whose ids follow one another on both sides make one run, and a run is one 2D copy by the copy
engine, which takes no multiprocessor. Pages that stand alone go as one batch: a call each would
cost more than the copy. On a CPU the twin in ``kernels/ref/page_copy.py`` runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4_tierd.kernels.ref import page_copy as ref

Ids = Tensor | Sequence[int]
_RUN_MIN = 8  # pages; a shorter run is copied page by page in the batch


def copy_pages(
    dst: Tensor, dst_ids: Ids, src: Tensor, src_ids: Ids, columns: slice = slice(None)
) -> None:
    """Copy ``columns`` of pages ``src_ids`` of src to the same columns of pages ``dst_ids`` of dst.

    dst, src: [*, bytes] uint8, any pitch (a device page is a view of the tail of a mirror page);
    host memory pinned. dst_ids, src_ids: [n] ints, in host memory; dst_ids distinct; n may be 0.
    Queued on torch's current stream when either side is on a GPU: the caller keeps both sides
    until that is done. Raises ValueError on pageable memory. Cost: a call a run, one for the rest.
    """
    if src.device.type == "cpu" and dst.device.type == "cpu":
        ref.copy_pages(dst, _tensor(dst_ids), src, _tensor(src_ids), columns)
        return
    dst_part, src_part = dst[:, columns], src[:, columns]
    _check(dst_part, src_part)
    device = src.device if src.device.type == "cuda" else dst.device
    stream = torch.cuda.current_stream(device).cuda_stream
    single: list[tuple[int, int]] = []
    for first_dst, first_src, count in runs(dst_ids, src_ids):
        if count < _RUN_MIN and stream:  # the default stream takes no batches
            single += [(first_dst + i, first_src + i) for i in range(count)]
        else:
            _copy_run(dst_part[first_dst:], src_part[first_src:], count, stream)
    if single:
        _copy_batch(dst_part, src_part, single, stream)


class PageCopier:
    """Page copies beside the engine's stream: one side stream each way.

    A copy starts after what the current stream has queued so far; the returned event tells when
    it is done, and the current stream can be made to wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {way: torch.cuda.Stream(device) for way in ("to_host", "to_device")}

    def copy(
        self, dst: Tensor, dst_ids: Ids, src: Tensor, src_ids: Ids, columns: slice = slice(None)
    ) -> torch.cuda.Event:
        """``copy_pages`` on the side stream of its direction."""
        stream = self._streams["to_host" if dst.device.type == "cpu" else "to_device"]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            copy_pages(dst, dst_ids, src, src_ids, columns)
        done: torch.cuda.Event = stream.record_event()
        return done


def runs(dst_ids: Ids, src_ids: Ids) -> Iterator[tuple[int, int, int]]:
    """Maximal runs of pages consecutive on both sides: (first dst, first src, count) each."""
    dst, src = _array(dst_ids), _array(src_ids)
    if dst.shape != src.shape:
        raise ValueError(f"{dst.shape[0]} pages to copy to, {src.shape[0]} to copy from")
    if not dst.size:
        return
    breaks = np.flatnonzero((np.diff(dst) != 1) | (np.diff(src) != 1)) + 1
    starts = np.concatenate([[0], breaks, [dst.size]])
    for start, end in pairwise(starts):
        yield int(dst[start]), int(src[start]), int(end - start)


def _copy_run(dst: Tensor, src: Tensor, count: int, stream: int) -> None:
    from cuda.bindings import runtime

    assert count <= dst.shape[0] and count <= src.shape[0], (count, dst.shape, src.shape)
    (result,) = runtime.cudaMemcpy2DAsync(
        dst.data_ptr(),
        dst.stride(0),
        src.data_ptr(),
        src.stride(0),
        src.shape[1],
        count,
        runtime.cudaMemcpyKind.cudaMemcpyDefault,
        stream,
    )
    if result != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"page copy of {count} x {src.shape[1]} B: {result}")


def _copy_batch(dst: Tensor, src: Tensor, pairs: list[tuple[int, int]], stream: int) -> None:
    from cuda.bindings import runtime

    dst_ids, src_ids = zip(*pairs, strict=True)
    assert max(dst_ids) < dst.shape[0] and max(src_ids) < src.shape[0], (dst.shape, src.shape)
    attributes = runtime.cudaMemcpyAttributes()
    order = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    attributes.srcAccessOrder = order
    dst_start, dst_pitch = dst.data_ptr(), dst.stride(0)
    src_start, src_pitch = src.data_ptr(), src.stride(0)
    (result,) = runtime.cudaMemcpyBatchAsync(
        [dst_start + page * dst_pitch for page in dst_ids],
        [src_start + page * src_pitch for page in src_ids],
        [src.shape[1]] * len(pairs),
        len(pairs),
        [attributes],
        [0],
        1,
        stream,
    )
    if result != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"page copies of {len(pairs)} x {src.shape[1]} B: {result}")


def _check(dst: Tensor, src: Tensor) -> None:
    for name, part in (("dst", dst), ("src", src)):
        if part.dtype is not torch.uint8 or part.dim() != 2 or part.stride(1) != 1:
            raise ValueError(
                f"{name}: {part.dtype} {tuple(part.shape)}, must be [pages, bytes] uint8"
            )
        if part.device.type == "cpu" and not part.is_pinned():
            raise ValueError(f"{name}: pageable memory, a copy from or to it would block")
    if dst.shape[1] != src.shape[1]:
        raise ValueError(f"columns: {dst.shape[1]} B of dst, {src.shape[1]} B of src")


def _array(ids: Ids) -> Any:
    return np.asarray(ids.numpy() if isinstance(ids, Tensor) else ids, dtype=np.int64)


def _tensor(ids: Ids) -> Tensor:
    return ids if isinstance(ids, Tensor) else torch.tensor(ids, dtype=torch.int64)
