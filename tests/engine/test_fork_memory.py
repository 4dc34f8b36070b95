"""What a fork costs in memory, and which resume points a full budget keeps."""

from __future__ import annotations

import numpy as np

from dsv4_tierd.tiering.blocks import Transcript
from small_models import text


def test_forks_do_not_inflate_the_words() -> None:
    """A transcript that is forked and goes on, again and again, stays as large as its words."""
    transcript = Transcript(bytes(32), np.arange(1000, dtype=np.int32))
    for word in range(100):
        transcript.fork()
        transcript.append(np.array([word], np.int32))
    assert len(transcript) == 1100
    assert len(transcript._tokens) <= 2 * 1100
    assert transcript.tokens[998:1002].tolist() == [998, 999, 0, 1]


def test_full_budget_keeps_new_points(models) -> None:
    """With every resume slot in use, a new session's point replaces the oldest, not itself."""
    world = models("SCH", 16).world(max_batch=2, resume_budget_bytes=1)
    texts = [text(300 + i, 300) for i in range(world.tiers.points.capacity + 3)]
    for words in texts:
        world.generate(world.open(), words, 1)
    newest, oldest = texts[-1], texts[0]
    assert world.generate(world.open(), newest, 1).usage.replayed_tokens == 0
    assert world.generate(world.open(), oldest, 1).usage.replayed_tokens == 256
