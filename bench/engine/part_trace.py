"""7. What the indexer chooses over a long real text, recorded for ``hit_rates``."""

from __future__ import annotations

from part_decode import report
from sizes import Kind
from stage import STEM, Stage, named
from traces import Recorder, save

BENCH = "hit_rate"
CASE_S = 60.0


def run(stage: Stage) -> None:
    """Record one session's steps; keep the whole trace, and some layers of it for the tree."""
    sizes, sheet = stage.sizes, stage.sheet
    case = f"{named(sizes.long)} real text, random weights"
    if not sheet.wants(BENCH, case, CASE_S + stage.stem_s()):
        return
    rig = stage.with_stem(Kind.HISPARSE)
    twin = rig.fork(STEM)
    request = rig.start(twin, None, sizes.trace_steps)
    rig.until_decoding([request])
    recorder = Recorder(rig)
    steps = rig.decode([request])
    trace = recorder.trace()
    rig.close_sessions([twin])
    about = f"{stage.model.name.rsplit('/', 1)[-1]}, random weights, {named(sizes.long)} of source"
    out = sheet.out or stage.folder
    out.mkdir(parents=True, exist_ok=True)
    save(out / "trace-whole.npz", trace, about)
    layers = [trace.shape[1] * i // sizes.trace_layers for i in range(sizes.trace_layers)]
    small = trace[: sizes.trace_kept_steps, layers]
    save(out / "trace.npz", small, f"{about}, C4 layers {', '.join(map(str, layers))}")
    sheet.say(f"trace.npz: {(out / 'trace.npz').stat().st_size} B, {small.shape} of {trace.shape}")
    sheet.record(BENCH, case, "steps recorded", len(trace), "steps", "higher")
    report(stage, BENCH, case, steps)
