"""``dsv4-tierd doctor``: what the machine has, each with what its lack costs. Changes nothing."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from dsv4_tierd.daemon.config import default_state_dir, memory_bytes
from dsv4_tierd.tiering.units import format_bytes

SMI_TIMEOUT_S = 10
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One line. ``cost`` says what is lost when ``good`` is False."""

    name: str
    good: bool
    found: str
    cost: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(
    store: str = "none", store_bytes_max: int = 0, state_dir: Path | None = None
) -> list[Check]:
    """All checks, in the order in which they matter. Raises InvalidRequest (``store``)."""
    from dsv4_tierd.daemon.doctor_store import examine_store

    return [
        _cpu(),
        _memory(),
        _gpu(),
        _packages(),
        _attention(),
        _memlock(),
        _huge_pages(),
        _numa(),
        _state_disk(state_dir or default_state_dir()),
        *examine_store(store, store_bytes_max),
    ]


def _cpu() -> Check:
    count = len(os.sched_getaffinity(0))
    return Check(
        "CPU", count >= 2, f"{count} cores usable", "engine and daemon share one core: slow answers"
    )


def _memory() -> Check:
    usable = memory_bytes()
    note = " (limit of the cgroup)" if usable < psutil.virtual_memory().total else ""
    return Check(
        "memory",
        usable >= 8 * GIB,
        format_bytes(usable) + note,
        "a small mirror: fewer tokens stay in host memory, more is recomputed or read from disk",
    )


def _gpu() -> Check:
    cost = "the engine runs on the CPU: right, but slow"
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return Check("GPU", False, "none (no nvidia-smi)", cost)
    query = "--query-gpu=name,driver_version,memory.total"
    try:
        found = subprocess.run(
            [smi, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Check("GPU", False, f"nvidia-smi failed: {error}", cost)
    return Check("GPU", bool(found.stdout.strip()), found.stdout.strip() or "none", cost)


def _packages() -> Check:
    wanted = ("cuda.core", "triton", "flash_mla")
    there = [name for name in wanted if _has(name)]
    return Check(
        "GPU packages",
        {"cuda.core", "triton"} <= set(there),
        ", ".join(there) or "none",
        "no GPU kernels (install the extra 'cuda'); flash_mla is optional, ours stands in",
    )


def _attention() -> Check:
    import torch

    from dsv4_tierd.kernels.flash_mla import choose

    there = torch.cuda.is_available()
    choice = choose(torch.cuda.get_device_capability() if there else None)
    found = choice.reason if choice.chosen else f"own kernels; flash_mla: {choice.reason}"
    return Check("sparse attention", True, found, "nothing is lost")


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _memlock() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    return Check(
        "locked memory",
        unlimited or soft >= GIB,
        "unlimited" if unlimited else format_bytes(soft),
        "io_uring and mlock are limited; CUDA's pinned memory is not bound by it",
    )


def _huge_pages() -> Check:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    text = path.read_text().strip() if path.is_file() else "unknown"
    chosen = text.split("[")[1].split("]")[0] if "[" in text else text
    return Check(
        "huge pages",
        chosen in ("always", "madvise"),
        chosen,
        "pinning the mirror touches 512 times as many pages: seconds a start for large budgets",
    )


def _numa() -> Check:
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    return Check(
        "NUMA",
        nodes <= 1,
        f"{max(nodes, 1)} node(s)",
        "host memory on the GPU's other side halves copies: start under numactl --cpunodebind",
    )


def _state_disk(folder: Path) -> Check:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    return Check(
        "state disk",
        free >= GIB and os.access(folder, os.W_OK),
        f"{format_bytes(free)} free in {folder}",
        "the journal cannot grow: requests fail with store_unavailable",
    )
