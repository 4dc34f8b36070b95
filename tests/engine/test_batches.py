"""A session's decode steps do not notice who else runs: the same bits alone and in company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine_probe import Probe, make_hostile
from small_models import Model, text

LENGTHS = (300, 3, 129, 517)
ANSWER_TOKENS = 12


def run_together(
    model: Model, which: list[int], max_batch: int, seed: int
) -> list[dict[int, Tensor]]:
    """Decode logits by position of each of these sessions, all running at once."""
    world = model.world(max_batch=max_batch, hot_rows=2 * max_batch * 16, audit=False)
    make_hostile(world, seed)
    probe = Probe(world)
    names = [world.submit(world.open(), text(90 + i, LENGTHS[i]), ANSWER_TOKENS) for i in which]
    world.run()
    assert all(len(probe.decoded[name]) == ANSWER_TOKENS - 1 for name in names)
    return [probe.decoded[name] for name in names]


def assert_same_bits(ours: dict[int, Tensor], theirs: dict[int, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[position], theirs[position]) for position in ours)


@pytest.mark.parametrize(("layers", "max_batch"), [("SHCHCS", 5), ("CSHCSH", 4)])
def test_company_never_shows(models, layers, max_batch) -> None:
    """1, 2 and 4 sessions at once, in any order: each decode step's logits have the same bits."""
    model = models(layers, 16)
    alone = [run_together(model, [i], max_batch, i)[0] for i in range(4)]
    for which in ([0, 1], [3, 2], [0, 1, 2, 3], [3, 1, 0, 2]):
        for i, found in zip(which, run_together(model, which, max_batch, 10), strict=True):
            assert_same_bits(found, alone[i])


def test_sessions_come_and_go(models) -> None:
    """Others that start and are cancelled in the middle of an answer change no bit of it."""
    model = models("SHCHCS", 16)
    [alone] = run_together(model, [0], 4, 1)
    world = model.world(max_batch=4)
    make_hostile(world, 2)
    probe = Probe(world)
    name = world.submit(world.open(), text(90, LENGTHS[0]), ANSWER_TOKENS)
    drawn = world.answers[name].token_ids
    for at in range(1, ANSWER_TOKENS):
        world.run_until(lambda at=at: len(drawn) >= at)
        if at % 3 == 1:
            other = world.submit(world.open(), text(95 + at, 40 * at), 40)
        elif at % 3 == 0:
            world.engine.end(world.engine.requests[other], "cancelled")
    world.run(name)
    assert_same_bits(probe.decoded[name], alone)
