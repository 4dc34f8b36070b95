"""Runs checks of Triton kernels in Triton's interpreter, on a CPU, in a process of their own.

Triton reads TRITON_INTERPRET once, when it is first imported, so a test session that may import
it for other reasons cannot turn the interpreter on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run_interpreted(script: str) -> None:
    """Run a Python script with the interpreter on; fail with its output when it fails."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
