"""6. Agents forked from one long prefix, decoding at once, against as many unshared sessions."""

from __future__ import annotations

from graft import purge_twins, unshared
from harness import HBM_READ_GBS
from part_decode import report, together
from sizes import Kind
from stage import STEM, Stage, named
from weights import step_bytes

BENCH = "agents"
CASE_S = 25.0


def run(stage: Stage) -> None:
    """Total tokens a second, hit rate, rows fetched a step: shared, then unshared."""
    sizes, sheet = stage.sizes, stage.sheet
    floor_ms = step_bytes(stage.model.transformer, sizes.agents) / HBM_READ_GBS / 1e6
    for shared in (True, False):
        how = "forked from one" if shared else "on unshared"
        case = f"{sizes.agents} agents {how} {named(sizes.long)}, {sizes.agent_tokens} tokens"
        if not sheet.wants(BENCH, case, CASE_S + stage.stem_s()):
            continue
        rig = stage.with_stem(Kind.HISPARSE)
        sessions = (
            [rig.fork(STEM) for _ in range(sizes.agents)]
            if shared
            else unshared(rig, stage.stem, sizes.agents)
        )
        steps = together(rig, sessions, sizes.agent_tokens, sizes.question_tokens)
        if not shared:
            purge_twins(rig, sizes.agents)
        sheet.record(BENCH, case, "step", steps.median_ms, "ms", floor=floor_ms)
        report(stage, BENCH, case, steps)
        if steps.misses:
            fetched = steps.misses / len(steps.wall_ms)
            sheet.record(BENCH, case, "rows fetched a step", fetched, "rows")
