"""What the command-line modules share: a conversation with a daemon, output, exit codes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NoReturn

import aiohttp
import typer
from rich.console import Console
from rich.text import Text

from dsv4_tierd.daemon.client import AsyncTierd
from dsv4_tierd.daemon.client_errors import CapacityError, SessionNotFoundError, TierdError

out, err = Console(markup=False), Console(markup=False, stderr=True)  # what it says is not ours

FAILED, USAGE, NOT_FOUND, NO_CAPACITY = 1, 2, 3, 4
Url = Annotated[str | None, typer.Option("--url", envvar="TIERD_BASE_URL", help="The daemon.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="TIERD_API_KEY")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def ask(url: str | None, key: str | None, work: Callable[[AsyncTierd], Awaitable[Any]]) -> Any:
    """Run one conversation with a daemon; its errors become exit codes."""
    try:
        client = AsyncTierd(url, key)
    except ValueError as error:
        fail(str(error), USAGE)

    async def run() -> Any:
        async with client as tierd:
            return await work(tierd)

    try:
        return asyncio.run(run())
    except TierdError as error:
        if is_nobody(error):
            where = f"no daemon at {client.base_url}"
            fail(f"{where} (dsv4-tierd serve starts one; --url names another)", FAILED)
        said = Text.assemble((error.code or "error", "red"), f": {error.message}")
        err.print(said, soft_wrap=True)
        kinds = ((SessionNotFoundError, NOT_FOUND), (CapacityError, NO_CAPACITY))
        code = next((code for kind, code in kinds if isinstance(error, kind)), FAILED)
        raise typer.Exit(NOT_FOUND if error.status == 404 else code) from error


def is_nobody(error: TierdError) -> bool:
    """Whether nothing listens at the address: no name that is unknown, no broken conversation."""
    return type(error.__cause__) is aiohttp.ClientConnectorError


def why(error: OSError) -> str:
    """What the system said, and of what, without its number."""
    if error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def show(data: Any, as_json: bool, draw: Callable[[Any], Any] | None = None) -> None:
    """Print an answer: JSON, or as ``draw`` draws it."""
    if as_json or draw is None:
        sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    else:
        out.print(draw(data))


def complain(console: Console, message: object) -> None:
    """Say what is wrong, literally: no markup, and a path is never broken in two."""
    console.print(str(message), style="red", markup=False, highlight=False, soft_wrap=True)


def fail(message: str, code: int) -> NoReturn:
    """Say why, and end."""
    complain(err, message)
    raise typer.Exit(code)
