"""What the kernels' GPU tests share: fresh random data each run, poisoned memory."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4_tierd.kernels import nvrtc


@pytest.fixture
def device() -> torch.device:
    """The card under test."""
    return torch.device("cuda")


@pytest.fixture
def seed() -> int:
    """A fresh seed each run; $GPU_TEST_SEED replays one. Printed when the test fails."""
    value = int(os.environ.get("GPU_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"GPU_TEST_SEED={value}")
    torch.manual_seed(value)
    return value


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    """A generator on the card, from ``seed``."""
    return torch.Generator("cuda").manual_seed(seed)


@pytest.fixture
def poison() -> Callable[[Tensor], Tensor]:
    """Fills memory with what no op may leave behind: NaN, or bytes 0xAB (int32: below -1)."""

    def fill(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.element_size() > 1:
            return tensor.fill_(float("nan"))
        tensor.view(torch.uint8).fill_(0xAB)
        return tensor

    return fill


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA C++ kernels as Blackwell gets them, without Hopper's own matrix instructions."""
    load = nvrtc.load
    monkeypatch.setattr(nvrtc, "load", lambda *what: load(*what, PORTABLE=1))
