"""The bench of the stores runs, in small, and its figures are of what was asked."""

from __future__ import annotations

import importlib.util
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import redis_servers

BENCH = Path(__file__).parents[3] / "bench" / "bench_store.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with a short chain."""
    spec = importlib.util.spec_from_file_location("bench_store", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "bench_store", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CHAIN_PAGES", 50)
    return module


def test_the_bench_runs(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Every row has figures, and the server is left as it was found."""
    server = redis_servers.emptied()
    rows = bench.run(server.url, mib=4, page_kib=256, rounds=1)
    assert {"raw redis-py", "redis store", "disk store", "tiered", "tiered, far"} <= set(rows)
    assert ("LMCache resp store" in rows) == (find_spec("lmcache") is not None)
    assert all(each.put.mib_s > 0 and each.get.mib_s > 0 for each in rows.values())
    assert "50 pages" in capsys.readouterr().out
    with server.client as client:
        assert client.keys("tierd:1:x:*") == []
        assert client.keys("raw:*") == []
