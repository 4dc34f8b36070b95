"""The share of a decode step that each op takes, from torch's profiler."""

from __future__ import annotations

from collections import Counter

from rig import WARM_STEPS, Rig
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

# What a kernel's name holds, in this order, and the op that it belongs to.
OPS = (
    (("swap_in",), "swap-in"),
    (("index_scan", "index_scores", "scan"), "index scores"),
    (("topk",), "top-k"),
    (("sparse_attention", "flash"), "attention"),
    (("compress",), "compressors"),
    (("row_store", "window"), "window row"),
    (("expert", "moe", "route"), "experts and router"),
    (("hyper", "mhc", "sinkhorn"), "hyper-connections"),
    (("norm",), "norms"),
    (("linear", "gemm", "gemv", "cutlass", "nvjet", "cublas", "::mm", "::bmm", "addmm"), "linears"),
    (("memcpy", "memset", "copy"), "copies"),
)
REST = "the rest"
SHARE_MIN_PERCENT = 0.05


def op_of(kernel: str) -> str:
    """The op that a kernel's name belongs to."""
    name = kernel.lower()
    return next((op for keys, op in OPS if any(key in name for key in keys)), REST)


def profile(rig: Rig, request: str) -> tuple[list[tuple[str, float]], float]:
    """(op, percent of the busy time), largest first, and busy ms a step, of a started request."""
    rig.until_decoding([request])
    on_gpu = rig.model.device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with torch_profile(activities=activities) as found:
        steps = rig.decode([request])
    spent_us: Counter[str] = Counter()
    for event in found.key_averages():
        spent_us[op_of(event.key)] += (
            event.self_device_time_total if on_gpu else event.self_cpu_time_total
        )
    total_us = sum(spent_us.values())
    shares = [(op, us / total_us * 100) for op, us in spent_us.most_common()]
    kept = [(op, percent) for op, percent in shares if percent >= SHARE_MIN_PERCENT]
    return kept, total_us / 1e3 / (WARM_STEPS + len(steps.wall_ms))
