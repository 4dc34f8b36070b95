"""Runs the model over the tiers: prefill chunks that stop at layer borders, and decode steps."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.engine.attend import DecodeAttend, LayerRanks, PrefillAttend
from dsv4_tierd.engine.model.transformer import Transformer
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.manager import TierManager
from dsv4_tierd.tiering.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """A prefill chunk half done: tokens [first, stop) have passed layers [0, layer).

    ids, positions: [stop - first]; x: [stop - first, streams, hidden].
    """

    seq: Sequence
    first: int
    stop: int
    layer: int
    ids: Tensor
    positions: Tensor
    x: Tensor


def next_cut(seq: Sequence, limit: int, chunk_tokens: int) -> int:
    """Where the chunk from ``seq.position`` ends; ``limit``: tokens to compute in all.

    Cuts lie at absolute multiples of ``chunk_tokens``, so that two runs of the same text cut
    alike; where pages begin to be written; and at the last block boundaries, where the window is
    kept as a resume point: at the end, and before the last token, where the same words sent again
    would start.
    """
    position = seq.position
    cuts = [
        limit,
        (position // chunk_tokens + 1) * chunk_tokens,
        (limit - 1) // BLOCK_TOKENS * BLOCK_TOKENS,
        limit // BLOCK_TOKENS * BLOCK_TOKENS,
    ]
    if position < seq.emit_from:
        cuts.append(seq.emit_from)
    return min(cut for cut in cuts if cut > position)


def nothing() -> None:
    """What is done at a layer border unless there is more."""


class Runner:
    """The model, the tiers and the step counter.

    ``at_border`` is called between two layers of a chunk, and while a chunk's end is waited for.
    Nothing of the tiers is half changed then, but it must not change what the chunk runs on, and
    must not wait for the device.
    """

    def __init__(self, model: Transformer, tiers: TierManager, batch_rows: int) -> None:
        self.model = model
        self.tiers = tiers
        self.batch_rows = batch_rows
        self.step = 0
        self.device = tiers.config.device
        self.at_border: Callable[[], None] = nothing
        self._ranks = LayerRanks(model)

    @torch.no_grad()
    def begin(self, seq: Sequence, stop: int) -> Chunk:
        """Start a chunk of tokens [seq.position, stop): pages, embeddings."""
        self.tiers.begin_chunk(seq)
        self.tiers.extend(seq, stop)
        words = seq.transcript.tokens[seq.position : stop].astype("int64")
        ids = torch.from_numpy(words).to(self.device)
        positions = torch.arange(seq.position, stop, device=self.device)
        return Chunk(seq, seq.position, stop, 0, ids, positions, self.model.embed(ids))

    @torch.no_grad()
    def advance(self, chunk: Chunk, layers: int) -> bool:
        """Run up to ``layers`` more layers; True when none is left. The sequence is unchanged."""
        window, last = self.model.config.sliding_window, self.model.config.num_hidden_layers
        for _ in range(layers):
            if chunk.layer == last:
                break
            dropped = min(chunk.seq.first_token(chunk.layer, window), chunk.stop) - chunk.first
            if dropped > 0:  # a bounded replay: deeper layers start later
                chunk.first += dropped
                chunk.ids, chunk.positions, chunk.x = (
                    chunk.ids[dropped:],
                    chunk.positions[dropped:],
                    chunk.x[dropped:],
                )
            self._layer(chunk)
            chunk.layer += 1
            self.at_border()
        return chunk.layer == last

    def _layer(self, chunk: Chunk) -> None:
        """Run the chunk's next layer, unless none of its tokens passes it."""
        attend = PrefillAttend(self.model, self.tiers, self._ranks, chunk.seq, chunk.stop)
        if len(chunk.x):
            chunk.x = self.model.layer(chunk.layer, chunk.x, chunk.ids, chunk.positions, attend)

    def _logits(self, x: Tensor) -> Tensor:
        return self.model.logits(x)

    def settle(self) -> None:
        """Wait for what is queued: before time is measured. Here nothing ever is."""

    @torch.no_grad()
    def finish(self, chunk: Chunk, want_logits: bool) -> Tensor | None:
        """Commit a chunk that passed all layers; the last token's logits [vocab], if wanted."""
        logits = self._logits(chunk.x[-1:])[0] if want_logits else None
        self.tiers.swap_tail(chunk.seq)
        self.tiers.commit(chunk.seq, chunk.stop, decoded=False)
        return logits

    @torch.no_grad()
    def decode(self, seqs: Seq[Sequence]) -> Tensor:
        """Compute the pending token of each sequence and commit it. Returns logits [B, vocab]."""
        assert 0 < len(seqs) <= self.batch_rows, len(seqs)
        self.step += 1
        for seq in seqs:
            self.tiers.extend(seq, seq.position + 1)
        attend = DecodeAttend.of(self.model, self.tiers, self._ranks, seqs, self.step)
        # Always the same number of rows: a token's bits do not depend on who else runs.
        ids = torch.zeros(self.batch_rows, dtype=torch.int64, device=self.device)
        positions = torch.zeros(self.batch_rows, dtype=torch.int64, device=self.device)
        ids[: len(seqs)] = torch.tensor(
            [int(seq.transcript.tokens[seq.position]) for seq in seqs], device=self.device
        )
        positions[: len(seqs)] = attend.positions
        x = self.model.embed(ids)
        for layer in range(self.model.config.num_hidden_layers):
            x = self.model.layer(layer, x, ids, positions, attend, decode=True)
        for seq in seqs:
            self.tiers.commit(seq, seq.position + 1, decoded=True)
        return self._logits(x)[: len(seqs)]
