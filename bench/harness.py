"""Times an op the same way everywhere: checked first, cold caches, graph replays, medians.

A bench file says *what* to run as cases; this module says *how*: it calls the case's check and
reports no figure when that is red, captures every input set once into one CUDA graph, flushes the
L2 before each replay, and takes the median. Records are JSON lines in ``bench/results``.

    cases = bench_topk.cases(toy=False)
    for case in cases:
        measure("topk", case, torch.device("cuda"))
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
FLUSH_BYTES = 256 << 20  # several times any L2 so far
REPLAYS = 15
HBM_READ_GBS = 4538.0  # measured on an H200, see docs/PERFORMANCE.md
LINK_GBS = 55.0  # pinned host to device, PCIe 5 x16

Better = Literal["lower", "higher"]


class Red(AssertionError):
    """The op's result is wrong, so its time means nothing."""


@dataclass(frozen=True, slots=True)
class Work:
    """An op with its inputs in place.

    ``runs``: one callable an input set; each launches the op once on its own inputs, on the
    current stream, and can be captured in a graph (unless ``graph`` is False). ``check`` runs the
    op and raises AssertionError when the result differs from the twin's. ``reset`` restores the
    state that a run changes; it runs before each replay, outside the timed part. ``result``: the
    outputs, for the hash in the report. ``bytes_moved``: counted with ``tensor_bytes``, of one run.
    """

    runs: Sequence[Callable[[], object]]
    check: Callable[[], None]
    bytes_moved: int
    result: Callable[[], Sequence[Tensor]] = tuple
    reset: Callable[[], object] | None = None
    graph: bool = True


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the report. ``build`` allocates lazily; ``goal`` and ``floor`` are in ``unit``.

    ``value`` turns (microseconds of one run, bytes of one run) into the reported figure.
    """

    name: str
    build: Callable[[torch.device], Work]
    goal: float | None = None
    floor: float | None = None
    metric: str = "time"
    unit: str = "us"
    better: Better = "lower"
    value: Callable[[float, int], float] = field(default=lambda run_us, _: run_us)


@dataclass(frozen=True, slots=True)
class Record:
    """One line of ``bench/results/<gpu>.jsonl``."""

    bench: str
    case: str
    metric: str
    value: float
    unit: str
    better: Better
    goal: float | None
    floor: float | None
    gpu: str
    driver: str
    torch: str
    commit: str
    command: str


def tensor_bytes(*tensors: Tensor) -> int:
    """Bytes that ``tensors`` hold: what reading or writing each once moves."""
    return sum(t.numel() * t.element_size() for t in tensors)


def floor_us(bytes_moved: int, gbs: float = HBM_READ_GBS) -> float:
    """Microseconds that moving ``bytes_moved`` takes at ``gbs``."""
    return bytes_moved / gbs / 1e3


def gigabytes_per_second(run_us: float, bytes_moved: int) -> float:
    """A ``Case.value``: the rate at which the run moved its bytes."""
    return bytes_moved / run_us / 1e3


def set_count(bytes_per_set: int, bytes_max: int = 4 << 30, most: int = 48) -> int:
    """How many input sets to build, so that they fit ``bytes_max``."""
    return max(4, min(most, bytes_max // max(1, bytes_per_set)))


def measure(bench: str, case: Case, device: torch.device) -> Record:
    """Check, time and describe one case; raises Red, without a figure, when the check fails."""
    work = case.build(device)
    try:
        work.check()
    except AssertionError as error:
        raise Red(f"{bench} {case.name}: {error}") from error
    run_us = _time_cuda_us(work, device) if device.type == "cuda" else _time_cpu_us(work)
    record = Record(
        bench,
        case.name,
        case.metric,
        round(case.value(run_us, work.bytes_moved), 3),
        case.unit,
        case.better,
        case.goal,
        None if case.floor is None else round(case.floor, 3),
        gpu_name(device),
        driver_version(device),
        torch.__version__,
        commit(),
        shlex.join(["python", *sys.argv]),
    )
    print(_line(record, work, run_us), flush=True)
    return record


def measure_all(
    bench: str, cases: Iterable[Case], device: torch.device, results: Path | None
) -> list[str]:
    """Measure each case and append its record under ``results`` (None: only print).

    Returns the messages of the red ones.
    """
    red = []
    for case in cases:
        try:
            record = measure(bench, case, device)
        except Red as error:
            print(f"RED, no figure: {error}", flush=True)
            red.append(str(error))
            continue
        if results is not None:
            append(record, results)
    return red


def append(record: Record, results: Path) -> None:
    """Add a record to the file of its card."""
    results.mkdir(parents=True, exist_ok=True)
    with results_file(record.gpu, results).open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def results_file(gpu: str, results: Path) -> Path:
    """The file of a card's records, as its name is given by ``gpu_name``."""
    name = gpu.lower().removeprefix("nvidia").strip().replace(" ", "-")
    return results / f"{name}.jsonl"


def _time_cuda_us(work: Work, device: torch.device) -> float:
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    with torch.cuda.stream(stream):
        if work.reset is not None:
            work.reset()
        for run in work.runs:  # warm: modules load outside the capture
            run()
        stream.synchronize()
        replay = _captured(work, stream)
        samples = []
        for i in range(REPLAYS + 2):
            if work.reset is not None:
                work.reset()
            flush.fill_(i)
            start, end = _event(), _event()
            start.record(stream)
            replay()
            end.record(stream)
            stream.synchronize()
            samples.append(float(start.elapsed_time(end)) * 1e3 / len(work.runs))
    return statistics.median(samples[2:])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _captured(work: Work, stream: torch.cuda.Stream) -> Callable[[], None]:
    def eager() -> None:
        for run in work.runs:
            run()

    if not work.graph:
        return eager
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        eager()
    return graph.replay


def _time_cpu_us(work: Work) -> float:
    samples = []
    for run in work.runs:
        if work.reset is not None:
            work.reset()
        start = time.perf_counter()
        run()
        samples.append((time.perf_counter() - start) * 1e6)
    return statistics.median(samples)


def _line(record: Record, work: Work, run_us: float) -> str:
    goal, mark = "no goal", "    "
    if record.goal is not None:
        met = (
            record.value <= record.goal if record.better == "lower" else record.value >= record.goal
        )
        goal, mark = f"goal {record.goal:g}", "ok  " if met else "MISS"
    floor = "" if record.floor is None else f" floor {record.floor:g}"
    rate = gigabytes_per_second(run_us, work.bytes_moved)
    digest = hashlib.sha256()
    for tensor in work.result():
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return (
        f"{mark} {record.bench:16} {record.case:44} {record.value:10.2f} {record.unit}"
        f" ({goal}{floor}; {work.bytes_moved} B, {rate:.0f} GB/s, {rate / HBM_READ_GBS:.0%} of HBM,"
        f" result {digest.hexdigest()[:8]})"
    )


def gpu_name(device: torch.device) -> str:
    """The card's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


@cache
def driver_version(device: torch.device) -> str:
    """The driver's version, or "none" on a CPU."""
    if device.type != "cuda":
        return "none"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]


@cache
def commit() -> str:
    """The commit under test: $BENCH_COMMIT where a copy without history runs, else git's."""
    given = os.environ.get("BENCH_COMMIT")
    if given:
        return given
    asked = ["git", "-C", str(RESULTS), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
