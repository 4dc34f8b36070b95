"""Where figures go: a printed line each, a record each, and what is left of the time.

A figure that is recorded already (same card, same commit) is not measured again with
``--resume``, and a case for which too little time is left is not begun: so a long run is one
script, called as often as it takes.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from harness import Better, Record, append, commit, driver_version, gpu_name, results_file


@dataclass(slots=True)
class Sheet:
    """``out`` None: figures are printed only. ``ends_s``: on the monotonic clock."""

    device: torch.device
    out: Path | None
    resume: bool
    ends_s: float
    reds: list[str] = field(default_factory=list)
    left_out: dict[str, None] = field(default_factory=dict)  # in order, each once
    known: dict[tuple[str, str, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        file = None if self.out is None else results_file(gpu_name(self.device), self.out)
        if self.resume and file is not None and file.is_file():
            for line in file.read_text().splitlines():
                row = json.loads(line)
                if row["commit"] == commit():
                    self.known[row["bench"], row["case"], row["metric"]] = row["value"]

    @property
    def left_s(self) -> float:
        """Seconds that this run may still take."""
        return self.ends_s - time.monotonic()

    def wants(self, bench: str, case: str, needs_s: float = 0.0) -> bool:
        """Whether to measure a case now: not recorded yet, and time enough for it."""
        if any(key[:2] == (bench, case) for key in self.known) and self.resume:
            print(f"     {bench} {case}: recorded already", flush=True)
            return False
        if needs_s > self.left_s:
            print(
                f"     {bench} {case}: about {needs_s:.0f} s, {self.left_s:.0f} s left", flush=True
            )
            self.left_out[f"{bench} {case}"] = None
            return False
        return True

    def record(
        self,
        bench: str,
        case: str,
        metric: str,
        value: float,
        unit: str,
        better: Better = "lower",
        goal: float | None = None,
        floor: float | None = None,
    ) -> None:
        """Print a figure, and keep it. A figure that is not positive is no measurement: red."""
        value = round(value, 4)
        met = goal is None or (value <= goal if better == "lower" else value >= goal)
        mark = "    " if goal is None else "ok  " if met else "MISS"
        wanted = "" if goal is None else f" (goal {goal:.4g})"
        least = "" if floor is None else f" floor {floor:.4g}"
        print(
            f"{mark} {bench:9} {case:52} {metric:26} {value:12.4f} {unit}{wanted}{least}",
            flush=True,
        )
        self.known[bench, case, metric] = value
        if value <= 0:
            self.red(f"{bench} {case}: {metric} is {value} {unit}")
        elif self.out is not None:
            append(
                Record(
                    bench=bench,
                    case=case,
                    metric=metric,
                    value=value,
                    unit=unit,
                    better=better,
                    goal=None if goal is None else round(goal, 4),
                    floor=None if floor is None else round(floor, 4),
                    gpu=gpu_name(self.device),
                    driver=driver_version(self.device),
                    torch=torch.__version__,
                    commit=commit(),
                    command=shlex.join(["python", *sys.argv]),
                ),
                self.out,
            )

    def value(self, bench: str, case: str, metric: str) -> float | None:
        """A figure of this run, or of the one that it resumes."""
        return self.known.get((bench, case, metric))

    def say(self, text: str) -> None:
        """A line that is no figure."""
        print(f"     {text}", flush=True)

    def red(self, why: str) -> None:
        """Something that must not be: the run ends with 1."""
        print(f"RED  {why}", flush=True)
        self.reds.append(why)
