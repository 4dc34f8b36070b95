"""1. Tiering never shows: greedy tokens of every kind of engine, at several lengths.

Up to 64K every engine computes the prompt itself, with reuse off in other chunks too. The long
prompt is computed once and read from the store by the two engines with a store; the one without
tiering computes it again, if time is left.
"""

from __future__ import annotations

from rig import Answer, Rig
from sizes import Kind
from stage import STEM, Stage, named

BENCH = "equality"


def run(stage: Stage) -> None:
    """Compare with the engine without tiering; at the long length, with the resident one."""
    sizes = stage.sizes
    expected = _alone(stage)
    for kind in (Kind.RESIDENT, Kind.MINIMAL):
        for length in sizes.equal:
            needs_s = 10 + length / sizes.prefill_tokens_s
            if length in expected and stage.sheet.wants(BENCH, _case(kind, length), needs_s):
                rig = stage.rig(kind, store="none")
                _compare(stage, _case(kind, length), _fresh(stage, rig, length), expected[length])
    _long(stage)


def _case(kind: Kind, length: int, more: str = "") -> str:
    return f"{named(length)} {kind.value}{more}"


def _alone(stage: Stage) -> dict[int, Answer]:
    """Answers with tiering off, by length, and the same in other chunks."""
    sizes, sheet = stage.sizes, stage.sheet
    wanted = [(kind, length) for kind in (Kind.RESIDENT, Kind.MINIMAL) for length in sizes.equal]
    answers: dict[int, Answer] = {}
    if not any(sheet.wants(BENCH, _case(*each), 15) for each in wanted):
        return answers
    rig = stage.rig(Kind.OFF, store="none")
    for length in sizes.equal:
        if sheet.left_s > 10 + length / sizes.prefill_tokens_s:
            answers[length] = _fresh(stage, rig, length)
    longest = max(answers, default=0)
    for chunk in sizes.other_chunks:
        case = _case(Kind.OFF, longest, f", chunks of {chunk}")
        if longest and sheet.wants(BENCH, case, 5 + longest / sizes.prefill_tokens_s):
            with rig.chunks_of(chunk):
                _compare(stage, case, _fresh(stage, rig, longest), answers[longest])
    return answers


def _long(stage: Stage) -> None:
    sizes, sheet = stage.sizes, stage.sheet
    case = _case(Kind.MINIMAL, sizes.long, " against resident")
    off = _case(Kind.OFF, sizes.long, " against resident")
    wanted = [sheet.wants(BENCH, each, 2 * stage.stem_s()) for each in (case, off)]
    if not any(wanted):
        return
    expected = _of_stem(stage, Kind.RESIDENT)
    if wanted[0]:
        _compare(stage, case, _of_stem(stage, Kind.MINIMAL), expected)
    if wanted[1] and sheet.left_s > 15 + sizes.long / sizes.prefill_tokens_s:
        rig = stage.rig(Kind.OFF, store="none")
        _compare(stage, off, _fresh(stage, rig, sizes.long), expected)


def _of_stem(stage: Stage, kind: Kind) -> Answer:
    rig = stage.with_stem(kind)
    twin = rig.fork(STEM)
    [answer] = rig.run(rig.submit(twin, None, stage.sizes.equal_tokens, logprobs=2))
    rig.close_sessions([twin])
    return answer


def _fresh(stage: Stage, rig: Rig, length: int) -> Answer:
    """The prompt computed in this engine, and its greedy tokens."""
    session = rig.open(stage.tokens[:0])
    request = rig.submit(session, stage.tokens[:length], stage.sizes.equal_tokens, logprobs=2)
    [answer] = rig.run(request)
    rig.close_sessions([session])
    return answer


def _compare(stage: Stage, case: str, found: Answer, expected: Answer) -> None:
    pairs = zip(found.token_ids, expected.token_ids, strict=True)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(expected.token_ids))
    stage.sheet.record(
        BENCH, case, "equal tokens", same, "tokens", "higher", stage.sizes.equal_tokens
    )
    if same < len(expected.token_ids):
        both = [answer.logprobs[same].top for answer in (expected, found)]
        gaps = " and ".join(f"{top[0][1] - top[1][1]:.2e}" for top in both)
        stage.sheet.red(
            f"{case}: token {same} differs; the best two are {gaps} apart in log probability"
        )
