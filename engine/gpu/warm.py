"""Before the first request: every kernel compiled and loaded, by a text that is thrown away."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import torch

from dsv4_tierd.engine.gpu.runner import DeviceRunner
from dsv4_tierd.tiering.blocks import Transcript
from dsv4_tierd.tiering.store.protocol import WritePolicy

# Ops choose their kernels by the number of tokens: with the largest chunk these meet every choice.
SMALL_CHUNKS = (4033, 1985, 961, 513, 497, 241, 86, 65, 33, 17, 6, 4, 3, 2, 1)
RECORDED_BATCH = 8
_PAUSE_S = 0.001


@torch.no_grad()
def warm(
    runner: DeviceRunner,
    chunk_tokens: int,
    progress: Callable[[int, int], None],
    batch_max: int = RECORDED_BATCH,
) -> None:
    """Run a chunk of each size, and record decode's graphs; told steps done, steps in all.

    Nothing of it stays, in the tiers or in the store. Some seconds where kernels are on disk
    already, a minute or two where they must be compiled. Graphs of more than ``batch_max`` sessions
    are recorded at first use.
    """
    tiers = runner.tiers
    sizes = chunk_sizes(chunk_tokens, tiers.config.plan.context_tokens - 2)[::-1]
    sizes.append(1)  # of so long a text that it fetches the rows that it chose
    words = np.zeros(sum(sizes) + 1, np.int32)
    transcript = Transcript(os.urandom(32), words)
    seq = tiers.open(transcript, "", None, len(words))
    seq.write_policy = WritePolicy.NEVER
    while not tiers.ready(seq):  # for what the device was given to do before
        time.sleep(_PAUSE_S)
    layers = runner.model.config.num_hidden_layers
    for number, size in enumerate(sizes):
        chunk = runner.begin(seq, seq.position + size)
        runner.advance(chunk, layers)
        runner.network.logits(chunk.x[: runner.batch_rows])  # as that many sessions' would be
        runner.finish(chunk, want_logits=True)
        if number == 0:  # while the text fits the shortest page table
            runner.record(seq, batch_max)
        progress(number + 1, len(sizes) + 1)
    runner.decode([seq])
    runner.settle()
    path = list(seq.path)
    tiers.close(seq, keep_tail=False)
    if path:
        tiers.evictor.drop_subtree(path[0])
    progress(len(sizes) + 1, len(sizes) + 1)


def chunk_sizes(chunk_tokens: int, room: int) -> list[int]:
    """Chunks of a text of at most ``room`` tokens: the largest, then the small ones that fit."""
    chosen: list[int] = []
    for size in (*reversed(SMALL_CHUNKS), chunk_tokens):
        left = room - sum(chosen)
        if left > 0 and size <= chunk_tokens and (size <= left or size == chunk_tokens):
            chosen.append(min(size, left))
    return chosen[::-1]
