"""Where a session starts: what is reused, and how its window comes back. No torch.

A match of P tokens (whole blocks) gives compressed pages; the last window of every layer must
come from somewhere, exactly. Three ways, the cheapest is taken:

- a resume point at P: nothing to compute;
- a resume point at r < P: tokens r..P run again, read-only (they emit no pages);
- *bounded replay*: tokens P - R..P run again from an empty window, where R = (window - 1) *
  layers + 1, rounded up to blocks. Layer l is exact from R's start + (window - 1) * l on, so it
  runs only from there, which halves the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.radix import NO_PAGE, Node


def replay_tokens(window: int, layer_count: int) -> int:
    """R: tokens before a boundary that determine its window exactly, in whole blocks.

    ``layer_count`` counts the MTP block too. Flash: 44 layers, 5,632; Pro: 62, 7,936.
    """
    exact = (window - 1) * layer_count + 1
    return -(-exact // BLOCK_TOKENS) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Start:
    """A way to start: ``reused`` tokens have pages, computing begins at ``begin``.

    Tokens [begin, reused) are replayed read-only. ``point``: the node whose resume point gives
    the window at ``begin``; None: the window is empty there. ``triangle``: layer l starts
    (window - 1) * l tokens after ``begin``.
    """

    reused: int
    begin: int
    point: Node | None
    triangle: bool

    @property
    def replayed(self) -> int:
        return self.reused - self.begin


def has_point(node: Node) -> bool:
    """Whether a resume point stands at the end of this block, in memory or stored."""
    return node.resume != NO_PAGE or node.resume_stored


def choose_start(
    path: Sequence[Node], replay: int, usable: Callable[[Node], bool] = has_point
) -> Start:
    """The cheapest exact start after matching ``path`` (root first).

    ``replay``: R in tokens. ``usable``: whether a node's resume point can be had now.
    """
    reused = len(path) * BLOCK_TOKENS
    point = next((node for node in reversed(path) if usable(node)), None)
    from_point = reused - point.depth * BLOCK_TOKENS if point is not None else reused
    if reused > replay and from_point > replay // 2:
        return Start(reused, reused - replay, None, triangle=True)
    if point is None:
        return Start(reused, 0, None, triangle=False)
    return Start(reused, reused - from_point, point, triangle=False)
