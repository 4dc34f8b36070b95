"""3. Decode: a step at several lengths, alone and in a batch, and where its time goes."""

from __future__ import annotations

from collections.abc import Sequence

from graft import purge_twins, touch, unshared
from harness import HBM_READ_GBS
from profiles import profile
from rig import Rig, Steps, spread
from sizes import Kind
from stage import STEM, Stage, named
from weights import step_bytes

BENCH = "decode"
GOAL_OF_FLOOR = 1.7
GOAL_ADDED_MS = {Kind.RESIDENT: 0.30, Kind.HISPARSE: 0.48}
POINT_S = 15.0


def run(stage: Stage) -> None:
    """Points, batches and ops under HiSparse. ``part_resident`` and ``part_streams`` have more."""
    points(stage, Kind.HISPARSE)
    batches(stage, Kind.HISPARSE)
    _profiles(stage, Kind.HISPARSE)


def points(stage: Stage, kind: Kind, more: str = "", **settings: object) -> None:
    """Batch 1 at every length; the time added against the shortest.

    ``settings``: of EngineConfig, beside the kind's; ``more`` names them.
    """
    sizes, sheet = stage.sizes, stage.sheet
    floor_ms = step_bytes(stage.model.transformer, 1) / HBM_READ_GBS / 1e6
    for at in sizes.points:
        case = f"{named(at)} batch 1, {kind.value}{more}"
        if not sheet.wants(BENCH, case, POINT_S + stage.stem_s()):
            continue
        steps = alone(stage.with_stem(kind, **settings), at, sizes.steps)
        is_first = at == sizes.points[0]
        goal = GOAL_OF_FLOOR * floor_ms if is_first else None
        sheet.record(BENCH, case, "step", steps.median_ms, "ms", goal=goal, floor=floor_ms)
        report(stage, BENCH, case, steps)
        shortest = f"{named(sizes.points[0])} batch 1, {kind.value}{more}"
        base_ms = sheet.value(BENCH, shortest, "step")
        if not is_first and base_ms is not None:
            goal = GOAL_ADDED_MS[kind] if at == sizes.long else None
            added_ms = steps.median_ms - base_ms
            if added_ms > 0:
                sheet.record(BENCH, case, "added to the shortest", added_ms, "ms", goal=goal)
            else:
                sheet.say(f"{case}: {added_ms:.4f} ms added to the shortest: within the noise")


def alone(rig: Rig, at: int, steps: int) -> Steps:
    """Decode steps of one fork of the long session at a length."""
    twin = rig.fork(STEM, at)
    found = rig.decode([rig.start(twin, None, steps)])
    rig.close_sessions([twin])
    return found


def together(rig: Rig, sessions: Sequence[str], steps: int, question_tokens: int) -> Steps:
    """Decode steps of several sessions, each with a question of its own; closes them."""
    vocab_size = rig.model.transformer.config.vocab_size
    requests = [
        rig.start(session, spread(number, question_tokens, vocab_size), steps)
        for number, session in enumerate(sessions)
    ]
    found = rig.decode(requests)
    rig.close_sessions(sessions)
    return found


def report(stage: Stage, bench: str, case: str, steps: Steps) -> None:
    """Tokens a second, time between events, hit rate, rows fetched a step."""
    sheet = stage.sheet
    sheet.record(bench, case, "tokens a second", steps.tokens_s, "tokens/s", "higher")
    if steps.gpu_ms:
        gpu_ms = sorted(steps.gpu_ms)[len(steps.gpu_ms) // 2]
        sheet.record(bench, case, "step between GPU events", gpu_ms, "ms")
    if steps.hit_percent is not None:
        sheet.say(f"{case}: {steps.misses / len(steps.wall_ms):.0f} rows fetched a step")
        if steps.hits:
            sheet.record(bench, case, "hot-set hit rate", steps.hit_percent, "%", "higher")


def batches(stage: Stage, kind: Kind) -> None:
    """A batch on one prefix, and a batch that shares nothing."""
    sizes, sheet = stage.sizes, stage.sheet
    for at in sizes.batch_points:
        head = f"{named(at)} batch {sizes.agents}"
        for shared in (True, False):
            case = f"{head} {'shared' if shared else 'unshared'}, {kind.value}"
            if not sheet.wants(BENCH, case, POINT_S + stage.stem_s()):
                continue
            rig, words = stage.with_stem(kind), stage.tokens[:at]
            touch(rig, STEM, at)
            sessions = (
                [rig.fork(STEM, at) for _ in range(sizes.agents)]
                if shared
                else unshared(rig, words, sizes.agents)
            )
            steps = together(rig, sessions, sizes.steps, sizes.question_tokens)
            if not shared:
                purge_twins(rig, sizes.agents)
            floor_ms = step_bytes(stage.model.transformer, sizes.agents) / HBM_READ_GBS / 1e6
            sheet.record(BENCH, case, "step", steps.median_ms, "ms", floor=floor_ms)
            report(stage, BENCH, case, steps)


def _profiles(stage: Stage, kind: Kind) -> None:
    """In a pass of its own, as profiling costs time: the share of each op."""
    for at in (stage.sizes.points[0], stage.sizes.long):
        case = f"{named(at)} batch 1, {kind.value}, profiled"
        if not stage.sheet.wants(BENCH, case, POINT_S + stage.stem_s()):
            continue
        rig = stage.with_stem(kind)
        twin = rig.fork(STEM, at)
        shares, busy_ms = profile(rig, rig.start(twin, None, stage.sizes.profile_steps))
        rig.close_sessions([twin])
        stage.sheet.record(BENCH, case, "busy time a step", busy_ms, "ms")
        for op, percent in shares:
            stage.sheet.record(BENCH, case, f"share of {op}", percent, "%")
