"""Host memory that the device reads by itself: faulted in, then registered with the driver.

Faulting is what takes time (about a second for each 4 GiB and thread), so it is done by several
threads in blocks, and says how far it is. Huge pages where the kernel gives them.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger("dsv4_tierd.tiering")

BLOCK_BYTES = 256 << 20
_THREADS = 8
_HUGE_PAGE = 2 << 20

Progress = Callable[[int, int], None]
"""Told bytes done, bytes in all."""


def host_memory(
    rows: int, row_bytes: int, pinned: bool, progress: Progress | None = None
) -> Tensor:
    """[rows, row_bytes] uint8 of zeros on the host; not pinned, it costs nothing until used.

    Raises MemoryError or RuntimeError if that much cannot be had, or not pinned.
    """
    if not pinned or not rows:
        return torch.from_numpy(np.zeros((rows, row_bytes), np.uint8))
    size = rows * row_bytes
    try:
        area = mmap.mmap(-1, -(-size // _HUGE_PAGE) * _HUGE_PAGE)
    except OSError as error:
        raise MemoryError(f"{size} B of host memory: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(area, dtype=torch.uint8)
    _fault_in(memory.numpy(), progress)
    _register(memory.data_ptr(), memory.numel())
    # With the last view goes the mapping, and before it the registration; at exit, if not before.
    weakref.finalize(area, _unregister, memory.data_ptr())
    return memory[:size].view(rows, row_bytes)


def _fault_in(
    memory: np.ndarray[tuple[int], np.dtype[np.uint8]], progress: Progress | None
) -> None:
    """Touch every page, so that registering finds them there."""
    size, done = len(memory), 0

    def touch(start: int) -> int:
        block = memory[start : start + BLOCK_BYTES]
        block[:: mmap.PAGESIZE] = 0
        return len(block)

    with ThreadPoolExecutor(_THREADS) as pool:
        for count in pool.map(touch, range(0, size, BLOCK_BYTES)):
            done += count
            if progress is not None:
                progress(done, size)


def _register(address: int, size: int) -> None:
    from cuda.bindings import runtime

    flags = runtime.cudaHostRegisterPortable | runtime.cudaHostRegisterMapped
    (result,) = runtime.cudaHostRegister(address, size, flags)
    if result != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(
            f"{size} B of host memory could not be pinned: {result} (is `ulimit -l` lower?)"
        )


def _unregister(address: int) -> None:
    from cuda.bindings import runtime

    (result,) = runtime.cudaHostUnregister(address)
    if result != runtime.cudaError_t.cudaSuccess:
        log.warning("host memory at %#x is not unpinned: %s", address, result)
