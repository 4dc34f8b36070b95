"""What the model itself says of a session's words, without any cache, and worlds to compare."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from dsv4_tierd.engine import messages as m
from dsv4_tierd.engine.model.dense import forward_dense
from dsv4_tierd.tiering.check import check
from dsv4_tierd.tiering.store.protocol import PrefixStore
from naive_model import NaiveModel
from small_models import Model
from world import Answer, World

# Two orders of fp32 sums differ by so much in an indexer's or a router's scores: below it either
# choice is right, and from there on the words may part.
NEAR_TIE = 5e-6


def make_world(
    model: Model, store: PrefixStore | None = None, identity: bytes | None = None, **more: object
) -> World:
    """An engine over a model, with the store's identity; ``more``: settings of EngineConfig."""
    if identity is None:
        identity = store.identity if store is not None else bytes(32)
    return World(model.transformer, model.folder, store, identity=identity, **more)  # type: ignore[arg-type]


def assert_true(model: Model, world: World, session: str, answer: Answer) -> None:
    """Every greedy token of an answer is what the model gives for the words before it.

    The answer's tokens must be the session's last.
    """
    assert answer.failed is None, answer.failed
    words = world.tokens(session)
    count = len(answer.token_ids)
    assert words[len(words) - count :] == answer.token_ids
    if not count:
        return
    logits = forward_dense(model.transformer, torch.tensor(words[:-1]))[-count:]
    drawn = logits.gather(1, torch.tensor(answer.token_ids).unsqueeze(1))[:, 0]
    # Two orders of fp32 sums may part a tie; the logits themselves are around 1.
    worst = float((logits.amax(-1) - drawn).max())
    assert worst <= 1e-4 or smallest_gap(model, words[:-1]) < NEAR_TIE, (
        f"a token is {worst} below the best one, and no choice on the way to it was a near tie"
    )


def smallest_gap(model: Model, words: list[int]) -> float:
    """The smallest gap, in float64, between what an indexer or a router chose and left."""
    naive = NaiveModel(model.folder)
    naive.streams(np.array(words))
    return float(naive.margin.min())


def assert_usage_adds_up(answer: Answer, prompt_tokens: int) -> None:
    """device + host + store + computed = prompt tokens."""
    usage = answer.usage
    parts = usage.device_tokens + usage.host_tokens + usage.store_tokens + usage.computed_tokens
    assert parts == usage.prompt_tokens == prompt_tokens


def at_rest(world: World) -> bool:
    """Whether all pages can be taken by a newcomer: nothing is promised, leaked or in flight."""
    tiers = world.tiers
    return all(pool.available == pool.capacity for pool in (tiers.mirror_pool, tiers.device_pool))


def stats(world: World) -> m.Stats:
    """Gauges and counters, as the daemon gets them."""
    found = world.op(m.AskStats).stats
    assert found is not None
    return found


def step_until(world: World, condition: Callable[[], bool], steps: int = 2000) -> None:
    """Step until something is so; fails if it does not come."""
    for _ in range(steps):
        if condition():
            return
        world.step()
    raise AssertionError("it did not come")


def poison_free_pages(world: World) -> Callable[[], None]:
    """Fill every free page; returns a check that those still free hold it."""
    tiers = world.tiers
    pairs = [(tiers.mirror_pool, tiers.memory.mirror), (tiers.device_pool, tiers.memory.device)]
    free = [[p for p in range(pool.capacity) if pool.is_free(p)] for pool, _ in pairs]
    for pages, (_, memory) in zip(free, pairs, strict=True):
        memory[pages] = 0xA5

    def untouched() -> None:
        for pages, (pool, memory) in zip(free, pairs, strict=True):
            still = [page for page in pages if pool.is_free(page)]
            assert bool((memory[still] == 0xA5).all()), f"{pool.name}: a freed page was written to"
        check(tiers, world.engine.retention)

    return untouched
