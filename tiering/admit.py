"""Yes or no to a sequence, with every page that it may need reserved to the end. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsv4_tierd.tiering.errors import HostPoolExhausted
from dsv4_tierd.tiering.pages import PagePool
from dsv4_tierd.tiering.radix import NO_PAGE, Node


@dataclass(slots=True)
class Reservation:
    """Pages promised and not yet taken. Released whole at the end, whatever is left."""

    mirror: int = 0
    device: int = 0


def admit(
    path: Sequence[Node],
    total_blocks: int,
    mirror: PagePool,
    device: PagePool,
    in_flight: Callable[[Node], bool],
) -> Reservation:
    """Reserve what a sequence on ``path`` (held already) lacks up to ``total_blocks``.

    A page that is being read for another sequence (``in_flight``) is paid for already.
    Raises HostPoolExhausted; then nothing is reserved.
    """
    unfinished = total_blocks - len(path)
    mirror_need = unfinished + sum(n.mirror == NO_PAGE and not in_flight(n) for n in path)
    device_need = unfinished + sum(node.device == NO_PAGE for node in path)
    if mirror.reserve(mirror_need):
        if device.reserve(device_need):
            return Reservation(mirror_need, device_need)
        mirror.unreserve(mirror_need)
    raise HostPoolExhausted(
        f"{mirror_need} host and {device_need} device pages are needed, "
        f"{mirror.available} and {device.available} are available"
    )
