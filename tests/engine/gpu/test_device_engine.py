"""The engine on a GPU: plain against the CPU, kernels against plain, and tiering never shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsv4_tierd.engine import messages as m
from dsv4_tierd.engine.model.checkpoint import make_checkpoint
from dsv4_tierd.engine.model.presets import Preset, Storage
from dsv4_tierd.engine.model.transformer import Transformer
from dsv4_tierd.tiering.replay import replay_tokens
from small_models import text
from world import World

GIB = 1 << 30
MODES = ("off", "resident", "hisparse")
VOCAB = 2048
# V4's rows, heads and keys; the rest small. Two layers of each kind.
FLASH_ROWS = Preset(
    layers="SCHCHC",
    head_dim=512,
    rope_dim=64,
    heads=64,
    index_heads=64,
    index_dim=128,
    index_topk=512,
    hidden_size=1024,
    q_lora=256,
    o_groups=8,
    o_lora=128,
    window=128,
    experts=8,
    experts_per_token=2,
    moe_inter=256,
    vocab_size=VOCAB,
    yarn_original=65536,
    storage=Storage.FP8,
)
MIN_HOT_ROWS = 2 * 4 * 512


@pytest.fixture(scope="module")
def flash_rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Transformer]:
    """A model that the kernels take, on the card."""
    folder = make_checkpoint(tmp_path_factory.mktemp("flash_rows"), FLASH_ROWS, 1)
    return folder, Transformer.load(folder, torch.bfloat16, "cuda", keep_quantised=True)


def _world(model: tuple[Path, Transformer], tiering: str, **settings: object) -> World:
    given = {
        "device": "cuda",
        "kv_dtype": "fp8",
        "tiering": tiering,
        "device_budget_bytes": 2 * GIB,
        "host_budget_bytes": 2 * GIB,
        "chunk_tokens": 1024,
        "hot_rows": MIN_HOT_ROWS if tiering == "hisparse" else None,
        "identity": bytes(32),
    }
    return World(model[1], model[0], **(given | settings))  # type: ignore[arg-type]


def _tokens(seed: int, count: int) -> list[int]:
    return text(seed, count, VOCAB)


def _life(world: World) -> list[list[int]]:
    """Prefill, decode over pages' ends side by side, short and long appends, a fork."""
    first, other = world.open(), world.open()
    answers = world.run(
        world.submit(first, _tokens(1, 5000), max_tokens=40),
        world.submit(other, _tokens(1, 2048) + _tokens(2, 60), max_tokens=40),
    )
    answers.append(world.generate(first, _tokens(3, 5), max_tokens=4))
    twin = world.fork(first)
    answers += world.run(
        world.submit(first, _tokens(4, 300), max_tokens=300),
        world.submit(twin, _tokens(5, 7), max_tokens=30),
    )
    return [answer.token_ids for answer in answers]


def test_the_plain_engine_gives_the_cpus_tokens(tmp_path: Path) -> None:
    """Tiny sizes that no kernel takes: greedy tokens of both devices are equal."""
    folder = make_checkpoint(tmp_path / "tiny", Preset(), 1)
    found = []
    for device in ("cpu", "cuda"):
        model = Transformer.load(folder, torch.float32, device)
        world = World(model, folder, device=device, identity=bytes(32))
        answer = world.generate(world.open(), text(1, 700), max_tokens=20)
        assert answer.failed is None
        found.append(answer.token_ids)
    assert found[0] == found[1]


def test_kernels_give_the_plain_engines_logits(flash_rows: tuple[Path, Transformer]) -> None:
    """Log probabilities agree to bf16 activations where everything visible is chosen.

    The twins in bf16 on a CPU are 0.24 from fp32 at most, after six layers.
    """
    probs = []
    for runner in ("plain", "kernels"):
        world = _world(flash_rows, "hisparse", runner=runner)
        answer = world.generate(world.open(), _tokens(5, 1900), max_tokens=3, logprobs=20)
        probs.append([dict(each.top) for each in answer.logprobs])
    for plain, fast in zip(*probs, strict=True):
        common = plain.keys() & fast.keys()
        assert len(common) >= 12
        differences = [abs(plain[token] - fast[token]) for token in common]
        assert max(differences) < 0.8
        assert sum(differences) / len(differences) < 0.3
        if max(plain, key=plain.__getitem__) != max(fast, key=fast.__getitem__):
            break  # from here on the texts differ


def test_tiering_never_shows(flash_rows: tuple[Path, Transformer]) -> None:
    """Off, resident, and a hot set at its minimum: the same tokens through a whole life."""
    worlds = {tiering: _world(flash_rows, tiering) for tiering in MODES}
    lives = {tiering: _life(world) for tiering, world in worlds.items()}
    assert lives["off"] == lives["resident"] == lives["hisparse"]
    assert worlds["hisparse"].tiers.c4.counters.misses > 0
    worlds["hisparse"].settle()


@pytest.mark.parametrize("tiering", ["resident", "hisparse"])
def test_warm_equals_cold(flash_rows: tuple[Path, Transformer], tiering: str) -> None:
    """A prefix that is reused after its session is gone, from host memory, answers as computed."""
    prompt = _tokens(7, 4 * 1024) + _tokens(8, 100)
    alone = _world(flash_rows, tiering)
    expected = alone.generate(alone.open(), prompt, max_tokens=20).token_ids
    world = _world(flash_rows, tiering)
    first = world.open()
    world.generate(first, prompt, max_tokens=4)
    world.op(m.CloseSession, session_id=first)
    for node in list(world.tiers.tree.nodes.values())[::-1]:
        world.tiers.evictor.evict_device(node)  # what pressure would do
    answer = world.generate(world.open(), prompt, max_tokens=20)
    assert answer.usage.host_tokens >= len(prompt) - replay_tokens(128, 6)
    assert answer.token_ids == expected
    world.settle()


def test_a_cancelled_chunk_leaves_no_trace(flash_rows: tuple[Path, Transformer]) -> None:
    """A prefill given up between two layers; the same words afterwards answer as ever."""
    prompt = _tokens(9, 3000)
    alone = _world(flash_rows, "hisparse")
    expected = alone.generate(alone.open(), prompt, max_tokens=10).token_ids
    world = _world(flash_rows, "hisparse")
    session = world.open()
    request = world.submit(session, prompt, max_tokens=10)
    for _ in range(2):
        world.step()
    world.verbs.handle(m.Cancel(request_id=request))
    world.run(request)
    answer = world.generate(world.open(), prompt, max_tokens=10)
    assert answer.token_ids == expected
    world.settle()
