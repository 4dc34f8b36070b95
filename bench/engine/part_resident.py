"""3, with every C4 row on the device: what HiSparse's steps are compared with."""

from __future__ import annotations

from part_decode import batches, points
from sizes import Kind
from stage import Stage


def run(stage: Stage) -> None:
    """The same points and batches as under HiSparse."""
    points(stage, Kind.RESIDENT)
    batches(stage, Kind.RESIDENT)
