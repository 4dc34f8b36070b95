"""A store's password: in the configuration and at the store, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from live_daemon import live_daemon
from redis_servers import Server

PASSWORD = "hunter2-0123456789"  # noqa: S105 a test's own server


async def test_a_password_is_shown_by_nothing(tmp_path: Path, micro: Path) -> None:
    """No argument of any process, no log line, no answer and no error has it.

    Also not when the store goes away, and when the engine is started again.
    """
    with Server(requirepass=PASSWORD) as server:
        url = f"redis://:{PASSWORD}@127.0.0.1:{server.port}/0"
        async with live_daemon(tmp_path, micro, store=url) as live:
            said = [await everything(live)]
            await live.create("a", [7] * 600)
            await live.ok("POST", "/v1/sessions/a/suspend?wait=true", {"tier": "store"})
            assert arguments(live.pids), "no process was looked at"
            server.kill()
            said.append(await live.call("POST", "/v1/sessions/a/suspend?wait=true", {}))
            await live.engine_back(await live.kill_engine())
            said += [await everything(live), await live.create("b", [9] * 600)]
            seen = arguments(live.pids)
            assert any("dsv4_tierd.engine.worker" in line for line in seen)
            assert not [line for line in seen if PASSWORD in line]
            assert "redis at" in live.log, "the store's going away is not in the log"
            assert PASSWORD not in live.log
            assert PASSWORD not in repr(said)


def arguments(pids: list[int]) -> list[str]:
    """What ``ps`` shows of the processes and their children."""
    found = []
    for pid in pids:
        if psutil.pid_exists(pid):
            process = psutil.Process(pid)
            family = (process, *process.children(recursive=True))
            found += [" ".join(each.cmdline()) for each in family]
    return found


async def everything(live) -> list[str]:
    """The answers of every route that says how the daemon is."""
    paths = ["/", "/health", "/ready", "/version", "/metrics", "/v1/tiers", "/v1/models"]
    answers = []
    for path in paths:
        async with live.http.get(live.url + path) as response:
            answers.append(await response.text())
    return [*answers, json.dumps((await live.call("GET", "/v1/sessions"))[1])]
