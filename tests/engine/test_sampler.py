"""Drawing tokens: greedy, restricted and random, always repeatable."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dsv4_tierd.engine.messages import Sampling
from dsv4_tierd.engine.sampler import draw, uniform

LOGITS = torch.tensor([0.5, 2.0, -1.0, 2.5, 0.0, 1.0, -3.0, 2.5])  # 3 and 7 tie for the first place
DRAWS = 2000
# Chi-square of up to 7 degrees of freedom exceeds 29.9 once in 10,000 fair samples.
CHI_SQUARE_MAX = 29.9


def drawn(count: int, logits: torch.Tensor = LOGITS, **settings: float) -> list[int]:
    """Draws at positions 0, 1, ... with one seed."""
    sampling = Sampling(**({"temperature": 1.0, "seed": 5} | settings))
    return [draw(logits, sampling, position).token_id for position in range(count)]


def chi_square(tokens: list[int], probabilities: np.ndarray) -> float:
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any(), "a token of probability 0 was drawn"
    expected = probabilities[probabilities > 0] * len(tokens)
    return float(((counts[probabilities > 0] - expected) ** 2 / expected).sum())


def softmax(logits: torch.Tensor, temperature: float = 1.0) -> np.ndarray:
    scaled = np.exp((logits.double().numpy() - float(logits.max())) / temperature)
    return scaled / scaled.sum()


def only(probabilities: np.ndarray, kept: list[int]) -> np.ndarray:
    """The distribution when nothing else may be drawn."""
    masked = np.zeros_like(probabilities)
    masked[kept] = probabilities[kept]
    return masked / masked.sum()


def test_greedy_takes_the_lowest_of_the_best() -> None:
    """Temperature 0 takes the largest logit, the lowest id of equal ones, whatever else is set."""
    assert drawn(3, temperature=0.0) == [3, 3, 3]
    assert drawn(1, temperature=0.0, top_k=1, top_p=0.1, seed=99) == [3]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature: float) -> None:
    """Draws follow softmax(logits / temperature)."""
    tokens = drawn(DRAWS, temperature=temperature)
    assert chi_square(tokens, softmax(LOGITS, temperature)) < CHI_SQUARE_MAX


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, [3]), (2, [3, 7]), (3, [1, 3, 7]), (8, [*range(8)]), (99, [*range(8)])]
)
def test_top_k(top_k: int, kept: list[int]) -> None:
    """Only the k most probable tokens are drawn, in proportion; ties keep the lowest id."""
    tokens = drawn(DRAWS, top_k=top_k)
    assert chi_square(tokens, only(softmax(LOGITS), kept)) < CHI_SQUARE_MAX


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, [3]), (0.3, [3]), (0.4, [3, 7]), (0.7, [1, 3, 7]), (0.95, [0, 1, 3, 5, 7])],
)
def test_top_p(top_p: float, kept: list[int]) -> None:
    """The smallest set of most probable tokens that holds top_p is drawn from; never none."""
    probabilities = softmax(LOGITS)
    assert probabilities[kept].sum() >= top_p
    assert probabilities[kept].sum() - probabilities[kept].min() < top_p
    tokens = drawn(DRAWS, top_p=top_p)
    assert chi_square(tokens, only(probabilities, kept)) < CHI_SQUARE_MAX


def test_top_p_is_of_what_top_k_left() -> None:
    """top_p is measured on the distribution that top_k leaves."""
    kept = only(softmax(LOGITS), [3, 7])
    assert kept[3] == 0.5
    assert set(drawn(200, top_k=2, top_p=0.5)) == {3}
    assert set(drawn(200, top_k=2, top_p=0.51)) == {3, 7}


def test_same_seed_and_position_same_draw() -> None:
    """A draw depends on seed and position alone: not on what was drawn before, nor on the order."""
    sampling = Sampling(temperature=1.3, seed=17)
    there = [draw(LOGITS, sampling, position).token_id for position in range(200)]
    back = [draw(LOGITS, sampling, position).token_id for position in reversed(range(200))]
    assert there == back[::-1]
    assert there != drawn(200, temperature=1.3, seed=18)
    numbers = [uniform(seed, position) for seed in range(40) for position in range(40)]
    assert len(set(numbers)) == 1600 and all(0 <= number < 1 for number in numbers)
    assert abs(float(np.mean(numbers)) - 0.5) < 4 / math.sqrt(12 * 1600)


@pytest.mark.parametrize("seed", [0, -1, -(1 << 63), (1 << 63) - 1, (1 << 64) - 1, 1 << 80])
def test_any_integer_is_a_seed(seed: int) -> None:
    """Negative and huge seeds work, and draw as any other."""
    assert 0 <= uniform(seed, 1 << 40) < 1
    assert len(set(drawn(100, seed=seed))) > 2


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-3, 1e3, 1e30])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_extremes_never_make_nan(temperature: float, scale: float) -> None:
    """However cold or hot, and however large the logits: a possible token, and the best if cold."""
    tokens = set(drawn(50, LOGITS * scale, temperature=temperature))
    assert tokens <= set(range(8))
    if temperature <= 1e-3 * scale and temperature < 1e30:
        assert tokens <= {3, 7}
    hidden = LOGITS.clone()
    hidden[3:] = -torch.inf
    assert set(drawn(50, hidden * scale, temperature=temperature)) <= {0, 1, 2}


def test_logprobs() -> None:
    """Log probabilities are of the model's own distribution, the best first, whatever was drawn."""
    expected = np.log(softmax(LOGITS))
    for settings in ({}, {"temperature": 0.7, "top_k": 2}):
        found = draw(LOGITS, Sampling(logprobs=3, **settings), 5)
        assert found.logprob is not None and found.logprob.token_id == found.token_id
        assert found.logprob.logprob == pytest.approx(expected[found.token_id], abs=1e-5)
        ids, values = zip(*found.logprob.top, strict=True)
        assert set(ids) == {1, 3, 7} and list(values) == sorted(values, reverse=True)
        assert values == pytest.approx([expected[i] for i in ids], abs=1e-5)
    assert draw(LOGITS, Sampling(), 0).logprob is None
    assert draw(LOGITS, Sampling(logprobs=0), 0).logprob.top == ()
