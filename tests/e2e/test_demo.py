"""The demo as a user runs it, in small; and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from dsv4_tierd.daemon.demo import TABLE_COLUMNS, Step, table_of, verdict_of
from live_daemon import CLI, ENVIRON, until


def start(model: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CLI, "demo", "--model", str(model), "--answer-tokens", "4", *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRON,
    )  # fmt: skip


def offspring(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


async def finish(process: subprocess.Popen[str], timeout_s: float) -> tuple[int, str, str]:
    try:
        out, err = await asyncio.to_thread(process.communicate, timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, out, err


@pytest.mark.slow
async def test_the_demo_proves_what_it_shows(tiny: Path) -> None:
    """After the kill everything comes from the store; every token is proved equal; then as text."""
    process = start(tiny, "--tokens", "1500", "--json")
    code, out, err = await finish(process, 240)
    assert code == 0, err
    assert "load source code: " in err
    assert "the same without tiering: " in err
    found = json.loads(out)
    assert found["equal"] is True
    steps = {step["name"]: step for step in found["steps"]}
    assert steps["load source code"]["computed"] >= 1500
    assert steps["fork four agents"]["computed"] == 0
    assert steps["resume"]["store"] >= 1280
    assert steps["go on"]["computed"] < 100
    text = Console(width=TABLE_COLUMNS, file=io.StringIO())
    text.print(table_of([Step(**step) for step in found["steps"]]))
    assert isinstance(text.file, io.StringIO)
    for name in ("fork four agents", "suspend to the store", "kill -9 and restart", "go on"):
        assert f"│ {name}" in text.file.getvalue()
    assert str(verdict_of(True)) == "Every token equals the run with --tiering off."
    assert steps["go on"]["bytes_by_tier"]["store"] > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_interrupted_demo_leaves_no_process(tiny: Path, number: signal.Signals) -> None:
    """SIGTERM and Ctrl-C end the daemon and its engine before the demo itself ends."""
    process = start(tiny, "--tokens", "200000")
    children: list[psutil.Process] = []
    try:
        await until(lambda: len(offspring(process)) >= 2, 60)  # the daemon and its engine
        children = offspring(process)
        await asyncio.sleep(1.0)
        os.kill(process.pid, number)
        code, out, err = await finish(process, 60)
        assert code == 130, out + err
        assert not [child for child in children if child.is_running()]
    finally:
        for child in children:
            if child.is_running():
                child.kill()


async def test_a_demo_that_fails_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    """A folder without a checkpoint: exit code 1, the engine's own reason, nothing left running."""
    process = start(tmp_path, "--keep", str(tmp_path / "kept"))
    code, out, err = await finish(process, 60)
    assert code == 1, out + err
    assert f"{tmp_path / 'config.json'} does not exist" in out + err
