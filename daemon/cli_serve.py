"""``dsv4-tierd serve``: settings in, a daemon until SIGTERM, an exit code out."""

from __future__ import annotations

import errno
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from dsv4_tierd.daemon.app import serve
from dsv4_tierd.daemon.cli_ask import complain, why
from dsv4_tierd.daemon.config import BadConfig, CannotStart, ServeConfig, load_config
from dsv4_tierd.daemon.service import Service
from dsv4_tierd.tiering.units import format_bytes


def run_serve(flags: Mapping[str, Any], file: Path | None, as_json: bool, err: Console) -> int:
    """Exit code: 0 drained, 1 could not serve, 2 wrong settings."""
    try:
        config = load_config(flags, file)
    except BadConfig as error:
        complain(err, error.message)
        return 2

    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        force=True,
    )

    async def announce(service: Service, port: int) -> None:
        await service.worker.wait_ready()
        _say_ready(service, config, port, as_json)

    def why_not(error: Exception) -> str:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            return f"port {config.port} is in use"
        return why(error) if isinstance(error, OSError) else str(error)

    try:
        uvloop.run(serve(config, on_listening=announce))
    except (CannotStart, OSError) as error:
        complain(err, why_not(error))
        return 1
    except ExceptionGroup as group:
        failed = group.subgroup((CannotStart, OSError))
        if failed is None or failed.exceptions != group.exceptions:
            raise
        for one in failed.exceptions:
            complain(err, why_not(one))
        return 1
    return 0


def _say_ready(service: Service, config: ServeConfig, port: int, as_json: bool) -> None:
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{port}"
    model, plan = service.model, dict(service.model.plan)
    if as_json:
        line: dict[str, Any] = {"url": url, "model": model.model_id, "plan": plan}
        line["context_length"] = model.context_length
        line["model_context_length"] = model.model_context_length
        sys.stdout.write(json.dumps(line) + "\n")
    else:
        lines = [f"  {name:<24}{format_bytes(size):>12}" for name, size in plan.items()]
        limit = context_line(model.context_length, model.model_context_length)
        sys.stdout.write("\n".join(["pools:", *lines, limit, f"ready: {url}"]) + "\n")
    sys.stdout.flush()


def context_line(held: int, model: int) -> str:
    """How long a session may be, in tokens, and whether the budgets or the model say so."""
    line = f"a session: at most {held:,} tokens"
    return line if held >= model else f"{line}: the budgets hold no more of the model's {model:,}"
