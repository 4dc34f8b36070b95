"""Tests in a folder ``gpu`` need a card: skipped, and said so, without one."""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: runs on an NVIDIA GPU; skipped without one")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no GPU: torch.cuda is not available"
    )
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
            item.add_marker(skip)
