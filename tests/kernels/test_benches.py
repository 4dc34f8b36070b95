"""The benches' toy sizes run on a CPU through the twins, so that they do not rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, str(ROOT / "bench" / "run.py"), "--toy"]


@pytest.mark.parametrize("bench", ["topk", "swap_in", "page_copy", "step_op"])
def test_toy_sizes_are_green(bench: str) -> None:
    """Each case is checked, then timed, and prints its line; a red one would exit 1."""
    done = subprocess.run([*RUN, bench], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert bench in done.stdout
    assert "RED" not in done.stdout


def test_records_have_the_fields_that_readers_rely_on() -> None:
    """One JSON object a line, these fields, in this order; better is one of two words."""
    fields = [
        *("bench", "case", "metric", "value", "unit", "better", "goal", "floor"),
        *("gpu", "driver", "torch", "commit", "command"),
    ]
    lines = (ROOT / "bench" / "results" / "h200.jsonl").read_text().splitlines()
    assert lines
    for line in lines:
        record = json.loads(line)
        assert list(record) == fields
        assert record["better"] in ("lower", "higher")
        assert record["value"] > 0
