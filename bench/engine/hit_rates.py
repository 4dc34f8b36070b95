"""How often a hot set holds what a step chooses: our policy, exact LRU, and Belady's optimum.

``python bench/run.py hit_rates TRACE [--svg FILE] [--policies ours,lru,belady]`` replays a
trace (see ``traces``) with nothing in the hot set at first; what is chosen for the first time
misses in every policy, so the figures count the steps after WARM of them.

Weights are random: such a trace says nothing of a trained model's locality. What it does say is
how far our policy is from the other two, and where on its own curve more rows stop to help.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from sheet import Sheet

Trace = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]
Sim = Callable[[Sequence[Ints], int, int], Ints]

WARM = 0.25
PROBED = 32
SECTOR = 8
HASHED_PROBES = 16
NEVER = np.iinfo(np.int64).max
KNEE_PERCENT = 1.0
# SGLang keeps 4,096 rows a request and layer for a top-k of 512 and sees about 2 misses a request,
# layer and step of a trained model (its kernel's own comment, 100 requests on an H200): 0.4 %.
PUBLISHED_STEPS = 8
SIZES = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768)


@dataclass(frozen=True, slots=True)
class Rate:
    """Of the rows that were chosen after the warm steps, the share that was there."""

    policy: str
    hot_rows: int
    percent: float
    misses_a_step: float


def sizes_for(trace: Trace) -> list[int]:
    """Hot rows to try: from twice a step's on, up to what holds nearly everything."""
    k = trace.shape[-1]
    real = [size for size in SIZES if size >= 2 * k]
    return real if k >= 128 else [2 * k, 4 * k, 8 * k, 16 * k]


def hit_rates(
    trace: Trace, sizes: Sequence[int], policies: Sequence[str] = ("ours", "lru", "belady")
) -> list[Rate]:
    """Every policy at every size; all layers of the trace count alike."""
    found = []
    layers = [
        [np.unique(step[step >= 0]).astype(np.int64) for step in trace[:, layer]]
        for layer in range(trace.shape[1])
    ]
    warm = int(len(trace) * WARM)
    for policy in policies:
        for size in sizes:
            misses = chosen = 0
            for steps in layers:
                rows = 1 + max((int(step.max()) for step in steps if len(step)), default=0)
                misses += int(POLICIES[policy](steps, size, rows)[warm:].sum())
                chosen += sum(len(step) for step in steps[warm:])
            percent = 100 * (1 - misses / max(chosen, 1))
            each = misses / (len(layers) * max(1, len(trace) - warm))
            found.append(Rate(policy, size, percent, each))
    return found


# ---------------------------------------------------------------- policies
def lru(steps: Sequence[Ints], size: int, rows: int) -> Ints:
    """Misses of each step when the row goes that was used longest ago."""
    return _replaced(steps, size, rows, lambda stamp, _: stamp)


def belady(steps: Sequence[Ints], size: int, rows: int) -> Ints:
    """Misses of each step when the row goes that will be used last, if ever: the fewest there are.

    A row that a step chose must be there in it, as in the other policies.
    """
    return _replaced(steps, size, rows, lambda _, following: -following)


def _replaced(
    steps: Sequence[Ints], size: int, rows: int, value: Callable[[Ints, Ints], Ints]
) -> Ints:
    """Misses of each step when the rows of the least value go, never one of this step."""
    following_of = _following(steps, rows)
    there = np.zeros(rows, bool)
    stamp, following = np.full(rows, -1, np.int64), np.zeros(rows, np.int64)
    misses = np.zeros(len(steps), np.int64)
    for now, chosen in enumerate(steps):
        assert len(chosen) <= size, "a step chooses more rows than there are places"
        misses[now] = np.count_nonzero(~there[chosen])
        stamp[chosen], following[chosen] = now, following_of[now]
        excess = np.count_nonzero(there) + misses[now] - size
        if excess > 0:
            old = there.copy()
            old[chosen] = False
            candidates = np.flatnonzero(old)
            worth = value(stamp[candidates], following[candidates])
            there[candidates[np.argpartition(worth, excess - 1)[:excess]]] = False
        there[chosen] = True
    return misses


def _following(steps: Sequence[Ints], rows: int) -> list[Ints]:
    """For each step's rows, the step that chooses them next; past the end if none does."""
    upcoming = np.full(rows, len(steps), np.int64)
    found: list[Ints] = []
    for now in range(len(steps) - 1, -1, -1):
        found.append(upcoming[steps[now]].copy())
        upcoming[steps[now]] = now
    return found[::-1]


def ours(steps: Sequence[Ints], size: int, rows: int) -> Ints:
    """Misses of each step under the swap-in kernel's rule.

    A missing row takes the oldest of 32 slots in 4 hashed sectors, never one of this step, and
    probes on where all are.
    """
    slots = size // SECTOR * SECTOR
    where, owner = np.full(rows, -1, np.int64), np.full(slots, -1, np.int64)
    stamp = np.full(slots, -1, np.int64)
    misses = np.zeros(len(steps), np.int64)
    for now, chosen in enumerate(steps):
        at = where[chosen]
        stamp[at[at >= 0]] = now
        missing = chosen[at < 0]
        misses[now] = len(missing)
        seeds = np.arange(len(missing), dtype=np.uint64) + np.uint64(now * 0x85EBCA6B)
        for seed, row, first in zip(seeds, missing.tolist(), _probed(seeds, 0, slots), strict=True):
            slot = _victim(stamp, now, seed, first)
            if owner[slot] >= 0:
                where[owner[slot]] = -1
            owner[slot], where[row], stamp[slot] = row, slot, now
    return misses


def _victim(stamp: Ints, now: int, seed: np.uint64, probed: Ints) -> int:
    """The oldest of the probed slots that is not of this step; probes on while there is none."""
    for probe in range(1, HASHED_PROBES + 2 + len(stamp) // PROBED):
        stamps = stamp[probed]
        best = int(np.argmin(np.where(stamps == now, NEVER, stamps)))
        if stamps[best] != now:
            return int(probed[best])
        [probed] = _probed(np.array([seed]), probe, len(stamp))
    raise AssertionError("every slot is of this step")


def _probed(seeds: npt.NDArray[np.uint64], probe: int, slots: int) -> Ints:
    """[n, 32]: the slots of each seed's probe, 4 sectors of 8, hashed at first, then in turn.

    As ``probed`` in kernels/csrc/swap_in.cu.
    """
    mask, sectors = np.uint64(0xFFFFFFFF), np.uint64(slots // SECTOR)
    which = np.arange(PROBED // SECTOR, dtype=np.uint64)
    h = (seeds[:, None] & mask) * np.uint64(0x9E3779B1) & mask
    h ^= h >> np.uint64(15)
    if probe < HASHED_PROBES:
        turn = (which + np.uint64(4 * probe)) * np.uint64(0x85EBCA77)
        h = (h + turn & mask) * np.uint64(0xC2B2AE3D) & mask
        h ^= h >> np.uint64(13)
        sector = (h * np.uint64(0x27D4EB2F) & mask) * sectors >> np.uint64(32)
    else:
        turn = np.uint64(4 * (probe - HASHED_PROBES)) + which
        sector = ((h * sectors >> np.uint64(32)) + turn) % sectors
    places = sector[:, :, None] * np.uint64(SECTOR) + np.arange(SECTOR, dtype=np.uint64)
    return np.sort(places.reshape(len(seeds), PROBED).astype(np.int64), axis=1)


POLICIES: dict[str, Sim] = {"ours": ours, "lru": lru, "belady": belady}


# ---------------------------------------------------------------- what follows from them
def default_hot_rows(rates: Sequence[Rate], topk: int) -> int:
    """Where our own curve bends, but no more rows than a trained model is known to gain from."""
    return min(knee(rates), PUBLISHED_STEPS * topk)


def knee(rates: Sequence[Rate]) -> int:
    """The smallest size from which twice as many rows bring less than KNEE_PERCENT more hits."""
    own = sorted((r for r in rates if r.policy == "ours"), key=lambda rate: rate.hot_rows)
    for here, larger in pairwise(own):
        if larger.percent - here.percent < KNEE_PERCENT:
            return here.hot_rows
    return own[-1].hot_rows


def chart(rates: Sequence[Rate], about: str, path: Path) -> bool:
    """Draw the curves; False where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        print(f"     no matplotlib: {path.name} is not drawn", flush=True)
        return False
    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams |= {"svg.hashsalt": "hit rates", "svg.fonttype": "none"}
    figure, axes = plt.subplots(figsize=(7, 4.2))
    names = {
        "belady": ("Belady (optimum)", {}),
        "lru": ("exact LRU", {"linewidth": 5, "alpha": 0.4}),  # ours lies on it
        "ours": ("oldest of 32 hashed slots", {"linestyle": "--"}),
    }
    for policy, (label, how) in names.items():
        points = sorted((r.hot_rows, r.percent) for r in rates if r.policy == policy)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label, **how)
    axes.set_xscale("log", base=2)
    ticks = sorted({rate.hot_rows for rate in rates})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("hot rows a layer (one session)")
    axes.set_ylabel("rows found in the hot set, %")
    axes.set_title(f"Hot-set hit rate: {about}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.text(0.01, 0.01, "Random weights: not a trained model's locality.", fontsize=7)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Replay a trace, print and record a line a policy and size, draw."""
    import traces

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--out", type=Path, help="folder of the records; none: only printed")
    parser.add_argument("--policies", default="ours,lru,belady")
    given = parser.parse_args(argv)
    trace, about = traces.load(given.trace)
    rates = hit_rates(trace, sizes_for(trace), given.policies.split(","))
    print(f"{about}: {trace.shape[0]} steps, {trace.shape[1]} layers, {trace.shape[2]} rows a step")
    sheet = Sheet(torch.device("cpu"), given.out, resume=False, ends_s=float("inf"))
    for rate in rates:
        case = f"{about}: {rate.policy}, {rate.hot_rows} rows"
        sheet.record("hit_rate", case, "hit rate", rate.percent, "%", "higher")
        sheet.record("hit_rate", case, "misses", rate.misses_a_step, "rows a step and layer")
    print(
        f"the curve bends at {knee(rates)} hot rows; "
        f"default: {default_hot_rows(rates, trace.shape[2])} a session"
    )
    if given.svg is not None:
        chart(rates, about, given.svg)
    return 1 if sheet.reds else 0
