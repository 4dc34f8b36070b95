"""Which C4 entries each layer chose in each step, recorded from a run and kept small.

A file is a compressed .npz of ``deltas`` [4, steps, layers, k] uint8: the chosen entries of a
step and layer in ascending order, as differences, one plane for each byte; and of ``about``,
what it was recorded from. An entry is -1 where it was read from the session's tail, not from
the hot set, or where fewer than k were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rig import Rig
from torch import Tensor

from dsv4_tierd.kernels.layout import Rows
from dsv4_tierd.tiering.hot_set import C4Place
from dsv4_tierd.tiering.sequence import Sequence

Trace = npt.NDArray[np.int32]
"""[steps, layers, k] int32 C4 entries, ascending along k, -1 first."""


def save(path: Path, trace: Trace, about: str) -> None:
    """Write a trace."""
    deltas = np.diff(trace.astype(np.int64), axis=-1, prepend=-1).astype(np.uint32)
    planes = np.stack([(deltas >> (8 * byte)).astype(np.uint8) for byte in range(4)])
    np.savez_compressed(path, deltas=planes, about=np.array(about))


def load(path: Path) -> tuple[Trace, str]:
    """A trace, and what it was recorded from."""
    with np.load(path) as file:
        planes = file["deltas"].astype(np.uint32)
        deltas = sum(plane << np.uint32(8 * byte) for byte, plane in enumerate(planes))
        return (np.cumsum(deltas, axis=-1, dtype=np.int64) - 1).astype(np.int32), str(file["about"])


class Recorder:
    """Keeps what one decoding session's steps choose, from its creation on.

    Where the runner has ``record_choices(on)``, it returns [C4 layers, batch, k] int32 entries
    that every step writes until it is off: a captured step calls nothing that could be watched.
    Else the look-ups are watched.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._steps: list[npt.NDArray[np.int32]] = []
        self._row: list[npt.NDArray[np.int32]] = []
        runner = rig.engine.runner
        has_buffer = hasattr(runner, "record_choices")
        self._written: Tensor | None = runner.record_choices(True) if has_buffer else None
        self._decode, self._lookup = runner.decode, rig.tiers.c4.lookup
        runner.decode = self._decoded  # type: ignore[method-assign]
        if self._written is None:
            rig.tiers.c4.lookup = self._looked_up  # type: ignore[method-assign]

    def trace(self) -> Trace:
        """Everything so far; the engine is no longer watched."""
        self._rig.engine.runner.decode = self._decode  # type: ignore[method-assign]
        if self._written is None:
            self._rig.tiers.c4.lookup = self._lookup  # type: ignore[method-assign]
        else:
            self._rig.engine.runner.record_choices(False)  # type: ignore[attr-defined]
        if not self._steps:
            raise RuntimeError("the engine's decode steps did not say what they chose")
        return np.sort(np.stack(self._steps), axis=-1)

    def _decoded(self, seqs: Seq[Sequence]) -> Tensor:
        tail_from = seqs[0].tail_from
        logits = self._decode(seqs)
        if self._written is not None:
            chosen = self._written[:, 0].cpu()
            self._row = [self._outside(each, tail_from) for each in chosen]
        if self._row:
            self._steps.append(np.stack(self._row))
        self._row = []
        return logits

    def _looked_up(
        self, layer: int, places: Seq[C4Place], entries: Tensor, step: int
    ) -> tuple[Rows, Tensor]:
        self._row.append(self._outside(entries[0], places[0].tail_from))
        return self._lookup(layer, places, entries, step)

    @staticmethod
    def _outside(chosen: Tensor, tail_from: int) -> npt.NDArray[np.int32]:
        entries = chosen.to("cpu").numpy().astype(np.int32)
        return np.where(entries < tail_from, entries, np.int32(-1))
