"""4. One device budget that holds everything: how many sessions run at once, and how fast.

The planner says how many; then so many really run, where host memory and the longest batch
allow, on pages that are copies of one prompt's (see ``graft``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from graft import graft
from part_decode import report, together
from rig import Rig
from sizes import Kind
from stage import STEM, Stage, named
from texts import Ids

from dsv4_tierd.engine.build import make_plan
from dsv4_tierd.engine.config import EngineConfig
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.errors import ExceedsCapacity

BENCH = "capacity"
HOT_ROWS_LARGE = 4_096
SESSIONS_MAX = 4_096
CASE_S = 60.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Sessions of one sort. ``hot_rows``: a session's share; goals: times the resident ones."""

    name: str
    kind: Kind
    hot_rows: int
    shared: bool
    sessions_goal: float | None
    speed_goal: float | None = None


def settings(stage: Stage) -> list[Setting]:
    """What is compared; the first is what the others are measured against.

    The fewest hot rows are the top-k's, or twice as many where the planner refuses those.
    """
    topk = stage.model.transformer.config.index_topk
    least = Setting(f"unshared, {topk} hot rows each", Kind.HISPARSE, topk, False, 4.0, 2.0)
    if not most_sessions(stage, least):
        stage.sheet.say(f"the planner refuses {topk} hot rows a session: {2 * topk} instead")
        topk *= 2
        least = replace(least, name=f"unshared, {topk} hot rows each", hot_rows=topk)
    many = f"unshared, {HOT_ROWS_LARGE} hot rows each"
    return [
        Setting("resident", Kind.RESIDENT, 0, False, None),
        least,
        Setting(many, Kind.HISPARSE, HOT_ROWS_LARGE, False, 3.3),
        Setting(f"shared prefix, {topk} hot rows each", Kind.HISPARSE, topk, True, 18.0),
    ]


def run(stage: Stage) -> None:
    """The planner's counts, then the runs."""
    sheet = stage.sheet
    base = base_speed = None
    for setting in settings(stage):
        case = f"{named(stage.sizes.session)} sessions, {setting.name}"
        planned = most_sessions(stage, setting)
        base = base or planned
        if not planned:
            sheet.say(f"{case}: the planner refuses one session of these")
            continue
        if sheet.wants(BENCH, case):
            times = setting.sessions_goal
            goal = None if times is None else times * base
            sheet.record(BENCH, case, "sessions at once", planned, "sessions", "higher", goal)
        run_case = f"{case}, run"
        if sheet.wants(BENCH, run_case, CASE_S + stage.stem_s(stage.sizes.session)):
            _measure(stage, setting, run_case, planned, base_speed)
        base_speed = base_speed or sheet.value(BENCH, run_case, "tokens a second")


def _measure(
    stage: Stage, setting: Setting, case: str, planned: int, base_speed: float | None
) -> None:
    sheet, sizes = stage.sheet, stage.sizes
    count = most_sessions(stage, setting, sizes.capacity_host_bytes, sizes.capacity_sessions_max)
    if count < planned:
        sheet.say(f"{case}: {count} of {planned} sessions, as host memory or the batch allows")
    if not count:
        return
    host_bytes = min(sizes.capacity_host_bytes, _host_bytes(stage, setting, count))
    more = _config(stage, setting, count, host_bytes)
    rig = stage.with_stem(setting.kind, sizes.session, **more)
    sessions = _sessions(stage, rig, setting, count)
    steps = together(rig, sessions, stage.sizes.session_steps, 1)
    sheet.record(BENCH, case, "sessions that ran", count, "sessions", "higher")
    sheet.record(BENCH, case, "step", steps.median_ms, "ms")
    report(stage, BENCH, case, steps)
    if setting.speed_goal is not None and base_speed is not None:
        ratio = steps.tokens_s / base_speed
        sheet.record(
            BENCH, case, "tokens a second to resident", ratio, "x", "higher", setting.speed_goal
        )
    stage.close()


# ---------------------------------------------------------------- counting
def pages_each(stage: Stage, setting: Setting) -> tuple[int, int]:
    """(pages that all share, pages of each session), to the end of its answer."""
    sizes = stage.sizes
    last = sizes.session + 1 + 3 + sizes.session_steps  # a question of one, the steps before
    total = -(-last // BLOCK_TOKENS)
    common = sizes.shared // BLOCK_TOKENS if setting.shared else 0
    return common, total - common


def most_sessions(
    stage: Stage, setting: Setting, host_bytes: int | None = None, at_most: int = SESSIONS_MAX
) -> int:
    """The most sessions that a plan holds at once under the device budget; 0: not one.

    ``host_bytes`` None: as much host memory as they need.
    """
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        fits = _fits(stage, setting, middle, host_bytes)
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _fits(stage: Stage, setting: Setting, count: int, host_bytes: int | None) -> bool:
    common, own = pages_each(stage, setting)
    config = EngineConfig(
        model=stage.model.name,
        device=stage.model.device.type,  # type: ignore[arg-type]
        kv_dtype=stage.model.kv_dtype,  # type: ignore[arg-type]
        **_config(stage, setting, count, host_bytes),  # type: ignore[arg-type]
    )
    try:
        plan = make_plan(config, stage.model.transformer.config, stage.layouts)
    except ExceedsCapacity:
        return False
    pages = common + count * own
    return (
        pages <= min(plan.device_pages, plan.mirror_pages)
        and plan.context_tokens >= (common + own) * BLOCK_TOKENS
    )


def _config(
    stage: Stage, setting: Setting, count: int, host_bytes: int | None
) -> dict[str, object]:
    """Settings of EngineConfig for ``count`` sessions of this sort."""
    found = stage.settings(setting.kind) | {
        "max_batch": count,
        "device_budget_bytes": stage.sizes.capacity_bytes,
        "host_budget_bytes": host_bytes or _host_bytes(stage, setting, count),
    }
    if setting.kind is Kind.HISPARSE:
        found["hot_rows"] = count * setting.hot_rows
    return found


def _host_bytes(stage: Stage, setting: Setting, count: int) -> int:
    """A host budget that ``count`` sessions surely fit."""
    common, own = pages_each(stage, setting)
    pages = (common + count * own) * stage.layouts.pages.mirror_bytes
    return pages * 5 // 4 + stage.sizes.capacity_spare_bytes


# ---------------------------------------------------------------- running
def _sessions(stage: Stage, rig: Rig, setting: Setting, count: int) -> list[str]:
    """Sessions whose pages are all there: the prompt's own, and copies of them."""
    words = stage.tokens[: stage.sizes.session]
    rig.close_sessions([STEM])
    sessions = [rig.open(words)]
    for number in range(1, count):
        twin, salt, first_block = words, f"twin {number}", 0
        if setting.shared:
            salt, first_block = "", stage.sizes.shared // BLOCK_TOKENS
            twin = other_words(words, first_block * BLOCK_TOKENS, number, stage.vocab_size)
        graft(rig, words, twin, salt, first_block)
        sessions.append(rig.open(twin, salt))
    return sessions


def other_words(words: Ids, first: int, number: int, vocab_size: int) -> Ids:
    """The same words up to ``first``, then others, different for each number."""
    twin = words.copy()
    twin[first:] = (twin[first:] + number + 1) % np.int32(vocab_size)
    return twin
