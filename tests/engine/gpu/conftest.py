"""What the GPU tests of the engine share: skipped, and said so, without a card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: runs on an NVIDIA GPU; skipped without one")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no GPU: torch.cuda is not available"
    )
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(skip)
