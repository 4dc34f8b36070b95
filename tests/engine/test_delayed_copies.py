"""Device pages that fill late, and in any order that streams allow, never show in an answer.

A copier stands in for the copy stream (late_copies.py).
"""

from __future__ import annotations

import random

import pytest

from dsv4_tierd.engine import messages as m
from late_copies import LateCopier
from small_models import text
from world import World


def _late(model, seed: int, most: int = 6, **settings: object) -> World:  # type: ignore[no-untyped-def]
    world: World = model.world(max_batch=3, **settings)
    world.tiers.memory._copier = LateCopier(random.Random(seed), most)  # type: ignore[assignment]
    return world


def _evict_all(world: World) -> None:
    for node in list(world.tiers.tree.nodes.values())[::-1]:
        if node.device >= 0 and not node.refs and not node.device_children:
            world.tiers.evictor.evict_device(node)


@pytest.mark.parametrize("seed", range(6))
def test_late_pages_never_show(models, seed: int) -> None:
    """Several sessions on one prefix, restored at once, some given up midway: answers as ever."""
    model, draw = models("SHC", 16), random.Random(seed)
    prompts = [text(1, 1024) + text(10 + i, 40 + 60 * i) for i in range(4)]
    plain: World = model.world(max_batch=3)
    expected = [plain.generate(plain.open(), prompt, 4).token_ids for prompt in prompts]
    world = _late(model, seed)
    world.generate(world.open(), prompts[0], 1)
    for _ in range(6):
        world.run()
        _evict_all(world)
        chosen = draw.sample(range(4), 3)
        names = [world.submit(world.open(), prompts[i], 4) for i in chosen]
        given_up = draw.choice([None, *names])
        for _ in range(draw.randrange(1, 9)):
            world.step()
        if given_up is not None:
            world.verbs.handle(m.Cancel(request_id=given_up))
        for name, i in zip(names, chosen, strict=True):
            (answer,) = world.run(name)
            assert answer.failed is None
            if name == given_up:
                assert answer.token_ids == expected[i][: len(answer.token_ids)]
            else:
                assert answer.token_ids == expected[i]
    world.settle()


def test_a_sequence_waits_for_the_copies_of_another(models) -> None:
    """Pages that one session is still restoring are not there for the next one either."""
    model = models("SHC", 16)
    prompt = text(1, 1100)
    world = _late(model, 0, most=0)
    first = world.open()
    expected = world.generate(first, prompt, 4).token_ids
    _evict_all(world)
    copier = world.tiers.memory._copier
    copier.most = 40
    one = world.submit(world.open(), prompt, 4)
    world.step()
    two = world.submit(world.open(), prompt + text(2, 5), 1)
    world.step()
    assert len(copier.waiting) >= 1
    answers = world.run(one, two)
    assert answers[0].token_ids == expected


def test_a_page_of_a_cancelled_restore_is_not_written_later(models) -> None:
    """Giving up waits for the copies under way: whoever gets the page next owns its bytes."""
    model = models("SHC", 16)
    world = _late(model, 0, most=0)
    world.generate(world.open(), text(1, 1100), 1)
    _evict_all(world)
    copier = world.tiers.memory._copier
    copier.most = 1_000
    copier.draw = random.Random(3)
    name = world.submit(world.open(), text(1, 1100), 1)
    world.step()
    assert copier.waiting
    world.verbs.handle(m.Cancel(request_id=name))
    assert not copier.waiting
    world.run(name)
    world.settle()


def test_a_block_that_another_restores_is_there_for_whoever_finishes_it(models) -> None:
    """Decode ends a block whose device page another session is filling: it reads that page."""
    model = models("SHC", 16)
    prompt = text(1, 1000)
    world = _late(model, 0, most=0)
    expected = world.generate(world.open(), prompt, 60).token_ids
    one = world.submit(world.open(), prompt, 60)
    world.run_until(lambda: len(world.answers[one].token_ids) == 20)
    _evict_all(world)
    copier = world.tiers.memory._copier
    copier.most, copier.draw = 1_000, random.Random(3)
    two = world.submit(world.open(), prompt + expected[:50], 4)
    world.step()
    assert copier.waiting and not world.answers[two].token_ids
    answers = world.run(one, two)
    assert answers[0].token_ids == expected
    assert answers[1].token_ids == expected[50:54]
    world.settle()
