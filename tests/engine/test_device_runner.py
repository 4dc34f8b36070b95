"""The runner over the ops equals the plain one, and tiering never shows in it either.

On a CPU the ops are their twins: what is tested is the order of calls, ids and copies.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_tierd.engine import messages as m
from dsv4_tierd.engine.gpu.decode import DecodeStep
from dsv4_tierd.engine.gpu.runner import DeviceRunner
from dsv4_tierd.engine.gpu.warm import warm
from dsv4_tierd.engine.model.presets import Storage
from dsv4_tierd.engine.model.transformer import Transformer
from dsv4_tierd.kernels.scan_plan import fill_plan, new_plan
from dsv4_tierd.kernels.step_ids import fetch_rows
from dsv4_tierd.tiering import staging
from dsv4_tierd.tiering.sequence import Sequence
from dsv4_tierd.tiering.store.protocol import ObjectKind
from engine_probe import make_hostile
from hostile_store import HostileStore
from late_copies import LateCopier
from small_models import text
from world import World

MODES = ("off", "resident", "hisparse")


def _world(
    models,
    runner: str,
    tiering: str,
    layers: str = "SHC",
    settings: dict[str, object] | None = None,
    **more: object,
) -> World:
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
        **{
            "kv_dtype": "fp8",
            "runner": runner,
            "tiering": tiering,
            "device_budget_bytes": 24 << 20,
            **(settings or {}),
        },
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


@pytest.mark.parametrize("length", [20, 300])
@pytest.mark.parametrize("runner", ["plain", "kernels"])
def test_a_stored_tail_holds_nothing_of_others(models, runner: str, length: int) -> None:
    """The same bytes, whatever was in the slots that it was computed in."""
    kept = []
    for prepare in (lambda _: None, lambda world: make_hostile(world, seed=3)):
        store = HostileStore()
        world = _world(models, runner, "hisparse", settings={"store": store})
        prepare(world)
        session = world.open()
        world.generate(session, text(6, length), 4)
        world.op(m.SuspendSession, session_id=session, tier="store")
        objects = store.naive.objects.items()
        kept.append([payload for key, (_, payload) in objects if key.kind is ObjectKind.TAIL])
    assert len(kept[0]) == 1
    assert kept[0] == kept[1]


def test_warming_leaves_nothing(models) -> None:
    """After the throwaway text every page is free again, and answers are what they were."""
    world = _world(models, "kernels", "hisparse")
    told: list[tuple[int, int]] = []
    assert isinstance(world.engine.runner, DeviceRunner)
    warm(world.engine.runner, 256, lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == len(told)
    recorded = set(world.engine.runner._steps)
    assert {batch for batch, _ in recorded} == {1, 2, 3, 4}
    reach = max(columns for _, columns in recorded) * 256
    assert reach >= world.plan.context_tokens
    world.settle()
    for pool in (world.tiers.mirror_pool, world.tiers.device_pool):
        assert pool.free_count == pool.capacity
    fresh = _world(models, "kernels", "hisparse")
    prompt = text(6, 300)
    answers = [each.generate(each.open(), prompt, max_tokens=4) for each in (world, fresh)]
    assert answers[0].token_ids == answers[1].token_ids


class Watched:
    """Before its results are used, what each step of ``step`` was told is compared with the tiers'.

    Tables and plan: as if they were made anew for every step.
    """

    def __init__(self, step: DecodeStep) -> None:
        self.step, self.run, self.steps = step, step.run, 0
        step.run = self  # type: ignore[method-assign, assignment]

    def __call__(self, seqs: Seq[Sequence]) -> Tensor:
        logits, inputs, plan = self.run(seqs), self.step.inputs, self.step._plan
        padded = [*seqs, *[seqs[0]] * (inputs.batch - len(seqs))]
        for seq, device, mirror in zip(
            padded, inputs.device_pages, inputs.mirror_pages, strict=True
        ):
            assert device[: seq.page_count].equal(seq.device_pages)
            assert mirror[: seq.page_count].equal(seq.mirror_pages)
            assert (device[seq.page_count :] == -1).all()
        assert plan is not None
        fresh = new_plan(inputs.batch, inputs.columns, torch.device("cpu"))
        fill_plan(fresh, inputs.device_pages.numpy(), 64)
        assert fresh.segments.equal(plan.segments)
        for _, _, first, end in plan.segments.tolist():
            assert fresh.members[first:end].equal(plan.members[first:end])
        self.steps += 1
        return logits


def test_warming_fetches_chosen_rows(models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short chunk of a long text has its own way to its rows: it is met before a request does."""
    world = _world(models, "kernels", "hisparse")
    fetched: list[int] = []

    def fetch(wanted: Tensor, *rest: Any) -> None:
        fetched.append(len(wanted))
        fetch_rows(wanted, *rest)

    monkeypatch.setattr(staging, "fetch_rows", fetch)
    monkeypatch.setattr(staging, "STREAM_TOKENS_PER_QUERY", 256)
    assert isinstance(world.engine.runner, DeviceRunner)
    warm(world.engine.runner, 256, lambda _done, _total: None)
    assert fetched


def test_what_is_recorded_again_is_not_kept(models) -> None:
    """A step that is to say what it chooses lets go of its graph and of its graph's memory."""
    world = _world(models, "kernels", "hisparse")
    runner = world.engine.runner
    assert isinstance(runner, DeviceRunner)
    world.generate(world.open(), text(1, 9), max_tokens=3)
    step = runner._step_for(1, 1)
    assert step._logits.numel()
    assert step.record_choices().shape[1] == 1
    assert not step._logits.numel()


def test_warming_waits_for_the_device(models, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was queued before, weights on their way for one, may keep a text from being ready."""
    world = _world(models, "kernels", "hisparse")
    asked: list[Sequence] = []
    ready = world.tiers.ready

    def late(seq: Sequence) -> bool:
        asked.append(seq)
        return len(asked) > 3 and ready(seq)

    monkeypatch.setattr(world.tiers, "ready", late)
    assert isinstance(world.engine.runner, DeviceRunner)
    warm(world.engine.runner, 256, lambda _done, _total: None)
    assert len(asked) == 4


def test_nothing_is_on_its_way_when_a_request_ends(models) -> None:
    """A chunk waits for its copies to the mirror: its pages may be another's at once."""
    world = _world(models, "kernels", "hisparse")
    runner, waited = world.engine.runner, []
    assert isinstance(runner, DeviceRunner)
    runner._outwait = lambda: waited.append(len(world.tiers.running))  # type: ignore[method-assign]
    session = world.open()
    world.run(world.submit(session, text(1, 9)))
    assert waited == [1]
    world.run(world.submit(session, text(2, 9), max_tokens=1))
    assert waited == [1, 1]


def test_a_step_is_told_the_pages_of_its_own_sessions(models) -> None:
    """Whoever ran in its places before, with as many pages: shared, not shared, page by page."""
    world = _world(models, "kernels", "hisparse", settings={"audit": False})
    assert isinstance(world.engine.runner, DeviceRunner)
    watched = Watched(world.engine.runner._step_for(2, 1))
    prefix = text(1, 256)
    world.generate(world.open(), prefix, max_tokens=1)
    for turn in range(8):
        pair = [prefix if turn % 2 == 0 else text(10 + 2 * turn + i, 256) for i in range(2)]
        ends = [text(60 + 2 * turn + i, 3) for i in range(2)]
        submitted = [
            world.submit(world.open(), words + end, max_tokens=4)
            for words, end in zip(pair, ends, strict=True)
        ]
        world.run(*submitted)
    long = [world.submit(world.open(), text(90 + i, 500), max_tokens=40) for i in range(2)]
    world.run(*long)
    assert watched.steps >= 30


def test_the_smallest_hot_set_holds_every_batch(models) -> None:
    """A batch is rounded up to few sizes, but never above what the plan made room for."""
    batch = 9
    world = _world(
        models, "kernels", "hisparse", index_topk=16, settings={"max_batch": batch, "hot_rows": 288}
    )
    names = [world.submit(world.open(), text(i, 20), max_tokens=24) for i in range(batch)]
    answers = world.run(*names)
    assert all(answer.failed is None and len(answer.token_ids) == 24 for answer in answers)


def test_no_budget_chooses_the_shape_of_a_step(models) -> None:
    """Attention cuts its sums by the reach of the tables: bits must not follow a budget."""
    shapes = []
    for budget in (7 << 20, 64 << 20):
        settings = {"device_budget_bytes": budget, "host_budget_bytes": 4 * budget}
        world = _world(models, "kernels", "hisparse", yarn_original=65536, settings=settings)
        assert isinstance(world.engine.runner, DeviceRunner)
        columns = [world.engine.runner._step_for(1, pages).inputs.columns for pages in (1, 17)]
        shapes.append((world.plan.context_tokens // 256, columns))
    assert 17 <= shapes[0][0] < 64 <= shapes[1][0]
    assert shapes[0][1] == shapes[1][1]


@pytest.mark.parametrize("chunk_tokens", [100, 256])
def test_how_rows_come_to_a_prefill_never_shows(
    models, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int
) -> None:
    """Whole layers that land as late as they may, or chosen rows alone: as if all were there."""
    settings = {"chunk_tokens": chunk_tokens}
    expected = _life(_world(models, "kernels", "resident", "SHCC", settings))
    streamed = _world(models, "kernels", "hisparse", "SHCC", settings)
    assert isinstance(streamed.engine.runner, DeviceRunner)
    prefill = streamed.engine.runner.prefill
    assert prefill.staging is not None
    prefill.staging._copier = LateCopier(random.Random(1), most=50)  # type: ignore[assignment]
    assert _life(streamed) == expected
    monkeypatch.setattr(staging, "STREAM_TOKENS_PER_QUERY", 0)
    assert _life(_world(models, "kernels", "hisparse", "SHCC", settings)) == expected


def test_a_batch_too_large_for_one_graph_is_run_in_parts(models) -> None:
    """More sessions than one plan of swap-ins takes: each answers as it does alone."""
    prompts = [text(20 + i, 90 + 80 * i) for i in range(3)]
    alone = _world(models, "kernels", "hisparse")
    expected = [alone.generate(alone.open(), prompt, 5).token_ids for prompt in prompts]
    world = _world(models, "kernels", "hisparse")
    assert isinstance(world.engine.runner, DeviceRunner)
    assert world.engine.runner.together_max == 256
    world.engine.runner.together_max = 2
    answers = world.run(*(world.submit(world.open(), prompt, 5) for prompt in prompts))
    assert [answer.token_ids for answer in answers] == expected
