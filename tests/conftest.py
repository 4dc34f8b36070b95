"""For all tests: those in a folder ``gpu`` need a card; no example has a time to keep to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

# A machine may stop for seconds: how long an example takes says nothing.
settings.register_profile("any", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any")


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
