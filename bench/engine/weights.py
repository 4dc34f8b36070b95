"""Bytes of weights that a decode step reads: the floor under its time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass

from torch import Tensor

from dsv4_tierd.engine.model.transformer import Transformer


def step_bytes(model: Transformer, batch: int) -> float:
    """Every matrix once, of the routed experts the expected share that ``batch`` tokens choose.

    Not read: the embedding (a row a token), the router's table of tokens, the MTP block.
    """
    config = model.config
    miss = 1 - config.num_experts_per_tok / config.n_routed_experts
    chosen = 1 - miss**batch
    whole, routed = [], []
    for path, tensor in _tensors(model.parameters, ()):
        if path[0] not in ("embed", "mtp") and "tid2eid" not in path:
            (routed if "experts" in path else whole).append(tensor)
    return distinct_bytes(whole) + distinct_bytes(routed) * chosen


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory under these tensors, where several are views of one counted once."""
    total, reached = 0, 0
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        for tensor in tensors
    )
    for first, last in spans:
        total += max(0, last - max(first, reached))
        reached = max(reached, last)
    return total


def _tensors(value: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Every tensor below a value, with the names of the fields that lead to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, tuple):
        for each in value:
            yield from _tensors(each, path)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _tensors(getattr(value, each.name), (*path, each.name))
