"""Pooling of groups: the formula, and bits that do not depend on how the tokens arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

import naive_ops
from dsv4_tierd.kernels.ref.compress import CompressParams, compress_decode, compress_prefill

RATIOS = pytest.mark.parametrize("ratio", [4, 128])


@dataclass(frozen=True)
class Case:
    params: CompressParams
    kv: Tensor
    gate: Tensor

    def run(self, cuts: list[int], ring: Tensor) -> Tensor:
        """Entries of the text, prefilled in chunks that end at ``cuts``; ring in place."""
        parts, start = [], 0
        for end in cuts:
            kv, gate = self.kv[start:end], self.gate[start:end]
            parts.append(compress_prefill(kv, gate, start, ring, self.params, ring))
            start = end
        return torch.cat(parts)

    def nan_ring(self) -> Tensor:
        return torch.full((self.params.ring_len, self.params.ring_dim), math.nan)


def case(rng: torch.Generator, ratio: int, tokens: int, dim: int = 48) -> Case:
    width = 2 * dim if ratio == 4 else dim
    params = CompressParams(
        ape=torch.randn(ratio, width, generator=rng),
        norm=torch.rand(dim, generator=rng) + 0.5,
        eps=1e-6,
        inv_freq=torch.rand(8, generator=rng),
        ratio=ratio,
    )
    kv = torch.randn(tokens, width, generator=rng)
    return Case(params, kv, 2 * torch.randn(tokens, width, generator=rng))


@RATIOS
def test_entries_follow_the_formula(rng: torch.Generator, ratio: int) -> None:
    """An entry is the normed, rotated softmax pooling of its group (ratio 4: and the last)."""
    c = case(rng, ratio, 3 * ratio + 1, dim=20)
    entries = naive_ops.as_array(c.run([c.kv.shape[0]], c.nan_ring()))
    assert len(entries) == 3
    kv, gate = naive_ops.as_array(c.kv), naive_ops.as_array(c.gate)
    ape, norm = naive_ops.as_array(c.params.ape), naive_ops.as_array(c.params.norm)
    for group in range(3):
        pooled = naive_ops.pool_group(kv, gate, ape, group, ratio, 20)
        normed = naive_ops.rms(pooled, norm, 1e-6)
        expected = naive_ops.rotate(normed, group * ratio, c.params.inv_freq.numpy())
        assert np.abs(entries[group] - expected).max() < 1e-5


@RATIOS
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 127, 128, 129, 256])
def test_chunk_cuts_change_no_bit(rng: torch.Generator, ratio: int, chunk: int) -> None:
    """Chunks of any size give the one-shot entries and ring, bit for bit."""
    c = case(rng, ratio, 519)
    whole_ring, ring = c.nan_ring(), c.nan_ring()
    whole = c.run([519], whole_ring)
    assert torch.equal(c.run([*range(chunk, 519, chunk), 519], ring), whole)
    assert torch.equal(ring, whole_ring)


@RATIOS
def test_decode_equals_prefill(rng: torch.Generator, ratio: int) -> None:
    """Token by token, in a batch with others at other positions, entries have prefill's bits."""
    first, second = case(rng, ratio, 300), case(rng, ratio, 300)
    second = Case(first.params, second.kv, second.gate)
    expected = [c.run([300], c.nan_ring()) for c in (first, second)]
    rings = torch.full((5, first.params.ring_len, first.params.ring_dim), math.nan)
    lead = 77  # the second session is this far ahead
    second.run([lead], rings[3])
    slots = torch.tensor([1, 3])
    for step in range(300 - lead):
        positions = torch.tensor([step, step + lead])
        kv = torch.stack([first.kv[step], second.kv[step + lead]])
        gate = torch.stack([first.gate[step], second.gate[step + lead]])
        entries = compress_decode(kv, gate, positions, rings, slots, first.params)
        for row, position in enumerate(positions.tolist()):
            if position % ratio == ratio - 1:
                assert torch.equal(entries[row], expected[row][position // ratio])
            else:
                assert not bool(entries[row].any())
    assert bool(rings[[0, 2, 4]].isnan().all())


@RATIOS
def test_rewinding_needs_no_undo(rng: torch.Generator, ratio: int) -> None:
    """Tokens written past a position leave no trace once the position is taken again."""
    c = case(rng, ratio, 4 * 128)
    expected = c.run([512], c.nan_ring())
    ring = c.nan_ring()
    c.run([256], ring)
    wrong = torch.randn(2, c.kv.shape[1])
    compress_prefill(wrong, wrong, 256, ring, c.params, ring)
    rest = compress_prefill(c.kv[256:], c.gate[256:], 256, ring, c.params, ring)
    assert torch.equal(rest, expected[256 // ratio :])


@RATIOS
def test_ring_out_may_be_another_tensor(rng: torch.Generator, ratio: int) -> None:
    """The state before stays as it was when the next one goes elsewhere, also for no tokens."""
    c = case(rng, ratio, 300)
    ring = c.nan_ring()
    c.run([290], ring)
    before, out = ring.clone(), c.nan_ring()
    compress_prefill(c.kv[290:], c.gate[290:], 290, ring, c.params, out)
    assert torch.equal(ring, before)
    expected = c.nan_ring()
    c.run([300], expected)
    assert torch.equal(out, expected)
    empty = compress_prefill(c.kv[:0], c.gate[:0], 290, ring, c.params, out)
    assert empty.shape == (0, 48) and torch.equal(out, before)


def test_extreme_gates_stay_finite(rng: torch.Generator) -> None:
    """Gates of +-1e4 pick one token instead of overflowing."""
    c = case(rng, 4, 8)
    c = Case(c.params, c.kv, c.gate.sign() * 1e4)
    assert bool(c.run([8], c.nan_ring()).isfinite().all())
