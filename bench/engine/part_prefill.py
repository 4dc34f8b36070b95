"""2. A long real-text prompt, with all C4 rows on the device within a budget."""

from __future__ import annotations

from itertools import pairwise

from sizes import Kind, c4_device_bytes
from stage import STEM, Stage, named

BENCH = "prefill"
GOAL_TOKENS_S = 5_000.0
GOAL_HIDDEN_PERCENT = 97.0
BUCKETS = 9


def run(stage: Stage) -> None:
    """Mean rate, rate by position, and the share of time that copies do not add to."""
    sizes, sheet, case = stage.sizes, stage.sheet, stage.prefill_case
    if not sheet.wants(BENCH, case, 15 + sizes.long / sizes.prefill_tokens_s):
        return
    rig = stage.rig(Kind.HISPARSE)
    assert STEM not in rig.engine.sessions, "the long prompt is there already"
    config = stage.model.transformer.config
    c4 = c4_device_bytes(rig.plan.hot_rows, rig.config.max_batch, config, stage.layouts)
    assert c4 <= sizes.c4_bytes, (c4, sizes.c4_bytes)
    before_s = rig.exposed_copy_s()
    answer = stage.load_stem(rig)
    after_s = rig.exposed_copy_s()
    assert answer.usage is not None and answer.ended_s is not None and answer.ready_s is not None
    computed = answer.usage.computed_tokens
    if computed != sizes.long - 1:
        sheet.red(f"{case}: {computed} tokens computed: the rest was cached, so no figure")
        return
    spent_s = answer.ended_s - answer.ready_s
    sheet.record(
        BENCH, case, "tokens a second", computed / spent_s, "tokens/s", "higher", GOAL_TOKENS_S
    )
    _by_position(stage, [(answer.ready_s, 0), *answer.progress, (answer.ended_s, computed)])
    if before_s is None or after_s is None:
        sheet.say(f"{case}: this runner does not say how long it waits for copies")
        return
    hidden = (1 - (after_s - before_s) / spent_s) * 100
    name = "time not in exposed copies"
    sheet.record(BENCH, case, name, hidden, "%", "higher", GOAL_HIDDEN_PERCENT)


def _by_position(stage: Stage, marks: list[tuple[float, int]]) -> None:
    """A figure for each ninth of the prompt, between the nearest chunk borders."""
    total = marks[-1][1]
    edges = [
        min(range(len(marks)), key=lambda i: abs(marks[i][1] - total * edge // BUCKETS))
        for edge in range(BUCKETS + 1)
    ]
    for first, last in pairwise(edges):
        if last > first:
            (from_s, begin), (to_s, end) = marks[first], marks[last]
            case = f"{named(stage.sizes.long)}: tokens {begin} to {end}"
            rate = (end - begin) / (to_s - from_s)
            stage.sheet.record(BENCH, case, "tokens a second", rate, "tokens/s", "higher")
