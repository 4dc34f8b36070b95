"""The runner over the ops equals the plain one, and tiering never shows in it either.

On a CPU the ops are their twins: what is tested is the order of calls, ids and copies.
"""

from __future__ import annotations

import pytest

from dsv4_tierd.engine.gpu.runner import DeviceRunner
from dsv4_tierd.engine.gpu.warm import warm
from dsv4_tierd.engine.model.presets import Storage
from dsv4_tierd.engine.model.transformer import Transformer
from small_models import text
from world import World

MODES = ("off", "resident", "hisparse")


def _world(models, runner: str, tiering: str, layers: str = "SHC", **more: object) -> World:
    sizes = {
        "head_dim": 128,
        "rope_dim": 64,
        "index_dim": 64,
        "q_lora": 128,
        "storage": Storage.FP8,
        "experts": 4,
    }
    model = models(layers, 16, **sizes, **more)
    return World(
        Transformer.load(model.folder, keep_quantised=True),
        model.folder,
        kv_dtype="fp8",
        runner=runner,
        tiering=tiering,
        device_budget_bytes=24 << 20,
    )


def _life(world: World) -> list[list[int]]:
    """Prefill, decode over a page's end beside another session, a short append, a long one."""
    first, other = world.open(), world.open()
    one = world.submit(first, text(1, 500), max_tokens=16)
    two = world.submit(other, text(1, 256) + text(2, 60), max_tokens=8)
    answers = world.run(one, two)
    answers += world.run(world.submit(first, text(3, 5), max_tokens=4))
    answers += world.run(world.submit(first, text(4, 300), max_tokens=4))
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("tiering", MODES)
def test_logits_are_the_plain_runners(models, tiering: str) -> None:
    """With everything chosen, log probabilities agree to bf16 activations: about 0.03 a layer."""
    probs = []
    for runner in ("plain", "kernels"):
        world = _world(models, runner, tiering, "SHC", index_topk=128)
        session = world.open()
        (answer,) = world.run(world.submit(session, text(5, 500), max_tokens=1, logprobs=20))
        probs.append(dict(answer.logprobs[0].top))
    common = probs[0].keys() & probs[1].keys()
    assert len(common) >= 15
    assert max(abs(probs[0][token] - probs[1][token]) for token in common) < 0.2


def test_tiering_never_shows(models) -> None:
    """Off, resident and swapped in: the same tokens, through a whole life."""
    lives = [_life(_world(models, "kernels", tiering)) for tiering in MODES]
    assert lives[0] == lives[1] == lives[2]


def test_warming_leaves_nothing(models) -> None:
    """After the throwaway text every page is free again, and answers are what they were."""
    world = _world(models, "kernels", "hisparse")
    told: list[tuple[int, int]] = []
    assert isinstance(world.engine.runner, DeviceRunner)
    warm(world.engine.runner, 256, lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == len(told)
    world.settle()
    for pool in (world.tiers.mirror_pool, world.tiers.device_pool):
        assert pool.free_count == pool.capacity
    fresh = _world(models, "kernels", "hisparse")
    prompt = text(6, 300)
    answers = [each.generate(each.open(), prompt, max_tokens=4) for each in (world, fresh)]
    assert answers[0].token_ids == answers[1].token_ids
