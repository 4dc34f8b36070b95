"""The engine's own path (chunks, tiers, decode steps) against transformers' one-shot logits.

Tolerance 1e-3 on every logit of deviation 1.5: float32 sums in another order. The seeds have no
near tie in a top-k (see tests/engine/model), where one entry more or less would be legitimate.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from engine_probe import Probe, largest_difference, make_hostile
from small_models import Model, text

TOLERANCE = 1e-3
PROMPT_TOKENS, TOKENS = 984, 1000
ORDERS = ("SCH", "HCS", "CSHCSH", "SHCHCS")
BATCH, TOPK = 4, 16
# Twice what one step can name: every step then evicts what the one before it fetched.
MINIMAL = {"tiering": "hisparse", "hot_rows": 2 * BATCH * TOPK}
TIERINGS = {"minimal": MINIMAL, "resident": {"tiering": "resident"}, "off": {"tiering": "off"}}

Logits = Callable[[Model, list[int]], Tensor]


def run_forced(model: Model, tokens: list[int], prompt: int, **settings: object) -> Tensor:
    """Prefill ``prompt`` tokens, then decode the rest of the given text one by one.

    The drawn token is replaced by the text's next one, so that every row is of that text.
    Returns the logits after every token.
    """
    world = model.world(max_batch=BATCH, audit=False, **settings)
    make_hostile(world, seed=7)
    probe = Probe(world)
    name = world.submit(world.open(), tokens[:prompt], len(tokens) - prompt + 1)
    force(world, {name: tokens})
    world.run(name)
    assert sorted(probe.rows[name]) == list(range(len(tokens)))
    assert len(probe.chunks[name]) >= prompt / world.config.chunk_tokens
    return probe.table(name, 0, len(tokens))


def force(world, texts: dict[str, list[int]]) -> None:
    """Whatever is drawn, a request's words go on as its text says."""
    append = world.engine._append

    def forced(request, token_id: int) -> None:
        known, at = texts[request.id], len(request.session.transcript)
        append(request, known[at] if at < len(known) else token_id)

    world.engine._append = forced


@pytest.mark.parametrize("window", [16, 128])
@pytest.mark.parametrize("layers", ORDERS)
@pytest.mark.parametrize("tiering", TIERINGS)
def test_every_row_of_every_tiering(models, hf_logits: Logits, layers, window, tiering) -> None:
    """Prefill and decode give transformers' logits at all 1,000 positions, tiered or not."""
    model, tokens = models(layers, window), text(1, TOKENS)
    ours = run_forced(model, tokens, PROMPT_TOKENS, chunk_tokens=256, **TIERINGS[tiering])
    assert largest_difference(ours, hf_logits(model, tokens)) <= TOLERANCE


@pytest.mark.parametrize(
    ("chunk_tokens", "window"),
    [(1, 16), (3, 128), *((size, window) for size in (127, 129, 1000) for window in (16, 128))],
)
def test_every_chunk_size(models, hf_logits: Logits, window, chunk_tokens) -> None:
    """Where a prefill is cut, down to single tokens, does not show in the logits."""
    model, tokens = models("SCH" if chunk_tokens <= 3 else "SHCHCS", window), text(1, TOKENS)
    ours = run_forced(model, tokens, TOKENS - 16, chunk_tokens=chunk_tokens, **MINIMAL)
    assert largest_difference(ours, hf_logits(model, tokens)) <= TOLERANCE


@pytest.mark.parametrize("tiering", ["minimal", "resident"])
def test_mixed_lengths_decode_together(models, hf_logits: Logits, tiering) -> None:
    """Sessions of 1 to 700 tokens in one batch each get transformers' logits of their own text."""
    model, lengths = models("SHCHCS", 16), (1, 130, 255, 700)
    world = model.world(max_batch=BATCH, **TIERINGS[tiering])
    make_hostile(world, seed=8)
    probe = Probe(world)
    texts = [text(20 + i, length + 40) for i, length in enumerate(lengths)]
    names = [
        world.submit(world.open(), words[:length], 40)
        for words, length in zip(texts, lengths, strict=True)
    ]
    force(world, dict(zip(names, texts, strict=True)))
    world.run()
    together = [set(probe.decoded[name]) for name in names]
    assert all(len(positions) == 39 for positions in together)
    for name, words in zip(names, texts, strict=True):
        computed = len(words) - 1
        expected = hf_logits(model, words)[:computed]
        assert largest_difference(probe.table(name, 0, computed), expected) <= TOLERANCE


def test_greedy_continuations(models, hf_logits: Logits) -> None:
    """64 greedy tokens after each of 20 prompts are those that transformers would choose.

    transformers sees prompt and answer at once; each answer token must be its choice there.
    """
    model = models("SCHC", 16)
    world = model.world(max_batch=BATCH, **MINIMAL)
    lengths = [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 299, 511]
    prompts = [text(40 + i, length) for i, length in enumerate(lengths)]
    names = [world.submit(world.open(), prompt, 64) for prompt in prompts]
    world.run()
    for prompt, name in zip(prompts, names, strict=True):
        drawn = world.answers[name].token_ids
        chosen = hf_logits(model, prompt + drawn).argmax(-1).tolist()
        assert drawn == chosen[len(prompt) - 1 : -1]
    assert len({tuple(world.answers[name].token_ids) for name in names}) == len(names)
    assert world.tiers.c4.counters.misses > 0
    world.settle()
