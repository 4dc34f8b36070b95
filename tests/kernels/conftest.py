"""Fresh random data for each test, from the test's own id."""

from __future__ import annotations

import zlib

import pytest
import torch


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A CPU generator whose seed is the test's id, parameters included."""
    return torch.Generator().manual_seed(zlib.crc32(request.node.nodeid.encode()))
