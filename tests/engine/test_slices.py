"""A prefill runs in slices of layers, and may be given up between any two of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4_tierd.engine import messages as m
from dsv4_tierd.engine.loop import _Pace
from engine_probe import Probe, make_hostile
from small_models import Model, text
from world import World

LAYERS, BATCH, CHUNK = "SHCHCS", 2, 128
FIRST, SECOND, OTHER = text(700, 270), text(701, 300), text(702, 150)
MINIMAL = {"max_batch": BATCH, "chunk_tokens": CHUNK, "hot_rows": 2 * BATCH * 16}


@pytest.fixture(scope="module")
def model(models) -> Model:
    return models(LAYERS, 16)


def new_world(model: Model, seed: int) -> tuple[World, Probe]:
    world = model.world(**MINIMAL)
    make_hostile(world, seed)
    return world, Probe(world)


def one_layer_a_step(world: World) -> None:
    """Prefill advances by a single layer a step."""
    runner, advance = world.engine.runner, world.engine.runner.advance
    runner.advance = lambda chunk, _layers: advance(chunk, 1)  # type: ignore[method-assign]


def second_turn(world: World, probe: Probe, session: str, words: list[int]) -> dict[int, Tensor]:
    """Logits of the answer to ``words``."""
    name = world.submit(session, words, 6)
    world.run(name)
    return {at: row for at, row in probe.rows[name].items() if at >= len(world.tokens(session)) - 7}


def assert_same_bits(ours: dict[int, Tensor], theirs: dict[int, Tensor]) -> None:
    assert ours.keys() == theirs.keys() and len(ours) == 6
    assert all(torch.equal(ours[at], theirs[at]) for at in ours)


@pytest.fixture(scope="module")
def undisturbed(model) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """The answers to SECOND and to OTHER, after FIRST and its answer."""
    world, probe = new_world(model, 1)
    session = world.open()
    world.generate(session, FIRST, 4)
    twin = world.fork(session)
    return second_turn(world, probe, session, SECOND), second_turn(world, probe, twin, OTHER)


@pytest.mark.parametrize(
    ("chunk", "layer"),
    [(c, i) for c in range(3) for i in range(1, len(LAYERS) + 1) if (c, i) != (2, len(LAYERS))],
)
def test_cancel_between_layers(model, undisturbed, chunk, layer) -> None:
    """Cancelled after any layer of a chunk, a session goes on, or back, as if nothing had been.

    Going on starts at the last chunk that was finished; going back, from the tail before if none
    was, else from the words.
    """
    world, probe = new_world(model, 2 + layer)
    session = world.open()
    world.generate(session, FIRST, 4)
    before, base = world.engine.sessions[session].tail, len(world.tokens(session))
    one_layer_a_step(world)
    name = world.submit(session, SECOND, 6)
    engine = world.engine

    def reached() -> bool:
        done, now = len(probe.chunks[name]), engine._chunk
        if layer == len(LAYERS):  # between two chunks
            return done == chunk + 1 and now is None
        return done == chunk and now is not None and now.layer == layer

    world.run_until(reached)
    finished = [stop for _, stop in probe.chunks[name]]
    world.verbs.handle(m.Cancel(request_id=name))
    world.settle()
    assert world.answers[name].done.finish_reason == "cancelled"
    kept = engine.sessions[session].tail
    assert kept is not None and kept.position == (finished[-1] if finished else base - 1)
    assert world.tokens(session) == world.tokens(session)[:base] + SECOND

    back = world.fork(session, at=base)
    assert_same_bits(second_turn(world, probe, session, []), undisturbed[0])
    if not finished:
        assert before is not None
        assert_same_bits(second_turn(world, probe, back, OTHER), undisturbed[1])
    else:
        answers = second_turn(world, probe, back, OTHER)
        assert all(
            torch.allclose(answers[at], row, atol=1e-3) for at, row in undisturbed[1].items()
        )
    world.settle()


def test_close_between_layers(model) -> None:
    """Closing a session in the middle of a chunk gives back every page that only it had."""
    world, _ = new_world(model, 20)
    one_layer_a_step(world)
    session = world.open()
    world.submit(session, SECOND, 6)
    world.run_until(lambda: world.engine._chunk is not None and world.engine._chunk.layer == 3)
    assert world.op(m.CloseSession, session_id=session, drop_from=0).code is None
    world.settle()
    tiers = world.tiers
    assert tiers.mirror_pool.free_count == tiers.mirror_pool.capacity
    assert tiers.device_pool.free_count == tiers.device_pool.capacity
    assert not len(tiers.idle) and not tiers.points.used_count and not world.engine.sessions


def test_decode_goes_on_between_slices(model, monkeypatch) -> None:
    """While a long prompt is computed a layer at a time, the other session draws a token a step."""
    monkeypatch.setattr(_Pace, "layers", lambda _self, _count: 1)
    world, probe = new_world(model, 21)
    first = world.submit(world.open(), OTHER, 60)
    drawn = world.answers[first].token_ids
    world.run_until(lambda: len(drawn) >= 2)
    second = world.submit(world.open(), SECOND, 6)
    steps = 0
    while not world.answers[second].token_ids:
        before = len(drawn)
        world.step()
        steps += 1
        assert len(drawn) == before + 1
    # Cuts at 128, 256 and 300; the step that finishes the last chunk decodes its token too.
    assert steps == 3 * len(LAYERS)
    world.run()
    for name, words in ((first, OTHER), (second, SECOND)):
        alone, watch = new_world(model, 22)
        other = alone.submit(alone.open(), words, len(world.answers[name].token_ids))
        alone.run(other)
        assert watch.rows[other].keys() == probe.rows[name].keys()
        assert all(torch.equal(row, probe.rows[name][at]) for at, row in watch.rows[other].items())


def test_pace_follows_the_clock() -> None:
    """A slice holds as many layers as take about one decode step, at least one, at most all."""
    assert _Pace().layers(40) == 1
    assert _Pace(decode_s=0.010, layer_s=0.002).layers(40) == 5
    assert _Pace(decode_s=0.001, layer_s=0.002).layers(40) == 1
    assert _Pace(decode_s=10.0, layer_s=0.002).layers(40) == 40


def test_nobody_waits_no_slices(model) -> None:
    """With nobody decoding, a step computes a whole chunk."""
    world, probe = new_world(model, 23)
    name = world.submit(world.open(), SECOND, 1)
    for chunks in (1, 2, 3):
        world.step()
        assert len(probe.chunks[name]) == chunks
    assert world.answers[name].done is not None
