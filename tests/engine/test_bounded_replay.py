"""A window recomputed from R tokens before is the cold run's; from fewer tokens it is not.

Compared are the bytes of a resume point: the window rows of every layer, and of every C4 layer
the raw compressor and index inputs of the four tokens before the boundary. All are float32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.replay import Start, replay_tokens
from dsv4_tierd.tiering.sequence import Sequence
from engine_probe import Probe, largest_difference, make_hostile
from small_models import Model, text

EXACT, WRONG = 1e-4, 1e-3
ORDERS = ("SCH", "HCS", "CSHCSH", "SHCHCS")
WINDOWS = (16, 128)


def exact_tokens(model: Model) -> int:
    """The fewest tokens whose replay gives every layer its window."""
    config = model.transformer.config
    return (config.sliding_window - 1) * config.num_hidden_layers + 1


def boundary(model: Model) -> int:
    """A block boundary with more than R tokens before it: a multiple of 256."""
    return replay_tokens(model.transformer.config.sliding_window, 8) + 512


class Replay:
    """A cold run's resume point at ``boundary``, and what a replay of some tokens makes of it."""

    def __init__(self, model: Model) -> None:
        self.end, self.world = boundary(model), model.world(chunk_tokens=192)
        make_hostile(self.world, 21)
        self.tiers, self.probe = self.world.tiers, Probe(self.world)
        self.words = text(80, self.end + 40)
        self.cold_name = self.world.submit(self.world.open(), self.words, 8)
        self.world.run(self.cold_name)
        self.cold = self._point().clone()

    def _point(self) -> Tensor:
        [node] = [n for n in self.tiers.tree.nodes.values() if n.depth * BLOCK_TOKENS == self.end]
        return self.tiers.points.slot(node.resume).view(torch.float32)

    def run(self, tokens: int | None = None, triangle: bool = True) -> str:
        """Run the text again from ``tokens`` before the boundary (None: the planner's choice).

        Not ``triangle``: every layer computes all of them, from an empty window.
        """
        self._forget()
        tiers, choose, open_sequence = self.tiers, self.tiers._choose, self.tiers.open

        def opened(*args: Any) -> Sequence:
            seq = open_sequence(*args)
            seq.triangle, seq.window_start = triangle, seq.start.begin
            return seq

        if tokens is not None:
            start = Start(self.end, self.end - tokens, None, triangle=True)
            tiers._choose, tiers.open = (lambda _path: start), opened
        name = self.world.submit(self.world.open(), self.words, 8)
        self.world.run(name)
        tiers._choose, tiers.open = choose, open_sequence
        return name

    def _forget(self) -> None:
        """No resume point is left, and every tail slot is NaN: nothing is right by luck."""
        for node in list(self.tiers.points.owners().values()):
            self.tiers.points.drop(node)
        for session in list(self.world.engine.sessions.values()):
            self.world.engine.forget(session)
        assert not len(self.tiers.idle)
        self.tiers.tails.slots.fill_(0xFF)

    def error(self) -> float:
        """How far the point that the last run left is from the cold one."""
        return largest_difference(self._point(), self.cold)

    def logits_error(self, name: str) -> float:
        stop = len(self.words) + 7
        ours = self.probe.table(name, self.end, stop)
        return largest_difference(ours, self.probe.table(self.cold_name, self.end, stop))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layers", ORDERS)
def test_planned_replay_is_exact(models, layers, window) -> None:
    """Where no resume point is left, R tokens run again; every row of the window is exact."""
    model = models(layers, window)
    replay = Replay(model)
    name = replay.run()
    usage = replay.world.answers[name].usage
    assert usage.replayed_tokens == replay.tiers.replay >= exact_tokens(model)
    assert usage.miss_reason == "no_resume_point"
    assert replay.error() <= EXACT
    assert replay.logits_error(name) <= WRONG
    assert replay.world.answers[name].token_ids == replay.world.answers[replay.cold_name].token_ids
    replay.world.settle()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layers", ["SCH", "SHCHCS"])
def test_bound_is_tight(models, layers, window) -> None:
    """(window - 1) x layers + 1 tokens are enough, wherever they begin; one fewer are not."""
    model = models(layers, window)
    replay = Replay(model)
    replay.run(exact_tokens(model))
    assert replay.error() <= EXACT
    replay.run(exact_tokens(model) - 1)
    assert replay.error() >= WRONG


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("layers", ["SCH", "SHCHCS"])
def test_windows_fewer_are_wrong(models, layers, window) -> None:
    """Even if every layer computes all of them: far fewer tokens are not the same window."""
    model = models(layers, window)
    replay = Replay(model)
    replay.run(exact_tokens(model), triangle=False)
    assert replay.error() <= EXACT
    name = replay.run(exact_tokens(model) - (len(layers) - 1) * (window - 1), triangle=False)
    assert replay.error() >= WRONG
    assert replay.logits_error(name) >= WRONG


def test_a_branch_point_is_replayed_once(models) -> None:
    """The window that one session's replay made is kept: the next to branch there needs none."""
    world, words = models("SHCHCS", 16).world(), text(7, 3000)
    world.generate(world.open(), words, 4)
    # Longer than a block, so that later windows follow the one at the branch.
    usages = [world.generate(world.open(words[:1700]), text(8 + i, 600), 4).usage for i in range(3)]
    assert [usage.replayed_tokens > 0 for usage in usages] == [True, False, False]
    assert {usage.computed_tokens for usage in usages} == {2300 - 1536}
    world.settle()


def test_whole_pages_sent_again_replay_nothing(models) -> None:
    """A prompt that ends with a page: its twin starts one page earlier, where a point is kept."""
    world = models("SHC", 16).world(max_batch=2)
    prompt = text(9, 4 * BLOCK_TOKENS)
    first = world.generate(world.open(), prompt, max_tokens=3)
    again = world.generate(world.open(), prompt, max_tokens=3)
    assert again.token_ids == first.token_ids
    assert (again.usage.replayed_tokens, again.usage.computed_tokens) == (0, BLOCK_TOKENS)
