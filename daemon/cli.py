"""``dsv4-tierd``: serve, demo, and everything that one asks a running daemon.

Exit codes: 0 well, 1 an error, 2 wrong usage, 3 not found, 4 no capacity.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from dsv4_tierd.daemon.cli_ask import (
    FAILED,
    NOT_FOUND,
    ApiKey,
    AsJson,
    Url,
    ask,
    err,
    fail,
    is_nobody,
    out,
    show,
    why,
)
from dsv4_tierd.daemon.cli_store import store_app
from dsv4_tierd.daemon.client import AsyncTierd
from dsv4_tierd.daemon.client_errors import ConnectionFailedError
from dsv4_tierd.daemon.client_parts import Prefixes
from dsv4_tierd.tiering.units import format_bytes

app = typer.Typer(
    name="dsv4-tierd",
    help="A long-context memory-tiering service for DeepSeek-V4.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
session_app = typer.Typer(help="Sessions of a running daemon.", no_args_is_help=True)
prefix_app = typer.Typer(help="Cached prefixes of a running daemon.", no_args_is_help=True)
ENDS_WITHIN_S = 30.0  # after its deadline
PrefixFile = Annotated[Path, typer.Argument(help="A text file, or - for standard input.")]
IsIds = Annotated[bool, typer.Option("--ids", help="It is ids, int32 LE.")]
app.add_typer(session_app, name="session")
app.add_typer(prefix_app, name="prefix")
app.add_typer(prefix_app, name="prefixes", hidden=True)
app.add_typer(store_app, name="store")


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Option(help="Folder of the checkpoint, or preset:flash-mini.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="8100; 0 for a free one")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda")] = None,
    store: Annotated[str | None, typer.Option(help="none, disk:PATH, redis://…, …")] = None,
    tiering: Annotated[str | None, typer.Option(help="hisparse, resident or off")] = None,
    device_budget: Annotated[str | None, typer.Option(help="1GiB")] = None,
    host_budget: Annotated[str | None, typer.Option(help="a quarter of the memory")] = None,
    pin_budget: Annotated[str | None, typer.Option(help="half of host-budget")] = None,
    resume_budget: Annotated[str | None, typer.Option(help="an eighth of host-budget")] = None,
    store_budget: Annotated[str | None, typer.Option(help="64GiB")] = None,
    hot_rows: Annotated[int | None, typer.Option(help="what device-budget allows")] = None,
    idle_tails: Annotated[int | None, typer.Option(help="64")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="auto, fp8, bf16 or fp32")] = None,
    chunk_tokens: Annotated[int | None, typer.Option(help="GPU: 8192; CPU: 512")] = None,
    max_batch: Annotated[int | None, typer.Option(help="8")] = None,
    queue_max: Annotated[int | None, typer.Option(help="64")] = None,
    max_tokens_default: Annotated[int | None, typer.Option(help="8192")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name in the API.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Journal and lock.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="One key a line.")] = None,
    drain_s: Annotated[float | None, typer.Option(help="30")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with the same keys.")] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a checkpoint until SIGTERM. Every flag is also a key of --config, and DSV4_TIERD_*."""
    from dsv4_tierd.daemon.cli_serve import run_serve

    flags = {k: v for k, v in locals().items() if k not in ("config", "as_json", "run_serve")}
    raise typer.Exit(run_serve(flags, config, as_json, err))


@app.command()
def status(url: Url = None, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Whether the daemon is ready, its sessions by state, and its tiers."""

    async def work(tierd: AsyncTierd) -> Any:
        found = {"ready": await tierd.ready()}
        if found["ready"]["ready"]:
            found["tiers"] = await tierd.call("GET", "/v1/tiers")
        states: dict[str, int] = {}
        async for session in tierd.sessions.list(page=1000):
            states[session.state] = states.get(session.state, 0) + 1
        return found | {"sessions": states}

    def draw(data: Any) -> Table:
        table = Table("what", "value", title=f"{data['ready']['state']}")
        for state, count in data["sessions"].items():
            table.add_row(f"sessions {state}", str(count))
        for name, value in data.get("tiers", {}).get("gauges", {}).items():
            table.add_row(name, figure(name, value))
        return table

    found = ask(url, api_key, work)
    show(found, as_json, draw)
    raise typer.Exit(0 if found["ready"]["ready"] else FAILED)


def figure(name: str, value: float) -> str:
    """A gauge, in sizes where it counts bytes."""
    if "bytes" in name.split("_"):
        return format_bytes(value)
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:g}"


@app.command()
def drain(
    wait: Annotated[bool, typer.Option("--wait", help="Until the daemon has ended.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Let requests end, write sessions to the store, stop the daemon.

    Returns at once, while the daemon does so; with --wait once it no longer answers.
    """

    async def work(tierd: AsyncTierd) -> Any:
        found = await tierd.call("POST", "/admin/drain")
        if not wait:
            return found
        with err.status(f"draining, at most {found['deadline_s']:g} s"):
            await _gone(tierd, found["deadline_s"] + ENDS_WITHIN_S)
        return found | {"state": "ended"}

    show(ask(url, api_key, work), as_json)


async def _gone(tierd: AsyncTierd, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    await tierd.ready()
                except ConnectionFailedError as error:
                    if is_nobody(error):
                        return
                await asyncio.sleep(0.1)
    except TimeoutError:
        fail(f"the daemon still answers after {timeout_s:g} s", FAILED)


@app.command()
def doctor(
    store: Annotated[str | None, typer.Option(help="Look at this store, too.")] = None,
    store_budget: Annotated[str | None, typer.Option(help="64GiB")] = None,
    config: Annotated[Path | None, typer.Option(help="The file that serve gets.")] = None,
    as_json: AsJson = False,
) -> None:
    """What this machine and the configured store have, and what each lack costs."""
    from dsv4_tierd.daemon.config import BadConfig, load_config
    from dsv4_tierd.daemon.doctor import examine

    flags = {"model": "any", "store": store, "store_budget": store_budget}
    try:
        settings = load_config(flags, config)
    except BadConfig as error:
        raise typer.BadParameter(error.message) from error
    found = examine(settings.store, settings.store_budget, settings.state_dir)

    def draw(_: Any) -> Table:
        table = Table("check", "found", "what its lack costs")
        for check in found:
            mark = ("ok", "green") if check.good else ("lacking", "yellow")
            name = Text.assemble(mark, f" {check.name}")
            table.add_row(name, check.found, "" if check.good else check.cost)
        return table

    show([check.as_dict() for check in found], as_json, draw)


@app.command("make-checkpoint")
def make_checkpoint_command(
    folder: Path,
    preset: Annotated[str, typer.Option(help="Sizes.")] = "tiny",
    seed: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="Same seed, same bytes.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Also into a folder with files.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a random-weight DeepSeek-V4 in the official format."""
    from dsv4_tierd.engine.model.checkpoint import make_checkpoint
    from dsv4_tierd.engine.model.presets import PRESETS

    if preset not in PRESETS:
        raise typer.BadParameter(f"presets: {', '.join(PRESETS)}", param_hint="--preset")
    try:
        if folder.exists() and not folder.is_dir():
            fail(f"{folder}: it exists, and is no folder", FAILED)
        if not force and folder.is_dir() and any(folder.iterdir()):
            fail(f"{folder} is not empty; --force writes into it nevertheless", FAILED)
        made = make_checkpoint(folder, preset, seed)
    except OSError as error:
        fail(why(error), FAILED)
    size = sum(f.stat().st_size for f in made.iterdir())
    show({"folder": str(made), "preset": preset, "seed": seed, "bytes": size}, as_json)


@app.command()
def demo(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of source code to load.")] = 32_768,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 24,
    model: Annotated[
        Path | None, typer.Option(help="Another checkpoint than the tiny one.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    keep: Annotated[Path | None, typer.Option(help="Keep state, store and logs here.")] = None,
    as_json: AsJson = False,
) -> None:
    """The whole job on a tiny checkpoint: load, fork, suspend, kill, resume, prove."""
    from dsv4_tierd.daemon.demo import DemoPlan, run_demo

    plan = DemoPlan(tokens, answer_tokens, model, device, keep)
    raise typer.Exit(asyncio.run(run_demo(plan, as_json=as_json, console=out)))


def _sessions_table(sessions: list[dict[str, Any]]) -> Table:
    table = Table("id", "state", "tokens", "pinned")
    for session in sessions:
        pinned = "" if session["pin"] is None else session["pin"]["tier"]
        table.add_row(session["id"], session["state"], f"{session['tokens']:,}", pinned)
    return table


@session_app.command("ls")
def session_ls(
    state: str | None = None, url: Url = None, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """All sessions."""

    async def work(tierd: AsyncTierd) -> Any:
        return [session.info async for session in tierd.sessions.list(state=state)]

    show(ask(url, api_key, work), as_json, _sessions_table)


@session_app.command("show")
def session_show(id: str, url: Url = None, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """One session, with where its pages lie."""

    async def work(tierd: AsyncTierd) -> Any:
        session = await tierd.sessions.get(id)
        return session.info | {"residency": await session.residency()}

    show(ask(url, api_key, work), as_json)


def _verb(name: str, help: str) -> None:
    @session_app.command(name, help=help)
    def command(id: str, url: Url = None, api_key: ApiKey = None, as_json: AsJson = False) -> None:
        async def work(tierd: AsyncTierd) -> Any:
            if name == "resume":  # the daemon may not know it yet
                return (await tierd.sessions.resume(id)).info
            session = await tierd.sessions.get(id)
            await getattr(session, name)()
            return session.info

        show(ask(url, api_key, work), as_json, lambda data: _sessions_table([data]))


for _name, _help in (
    ("suspend", "Write a session down."),
    ("resume", "Bring a session to the device, also one that another daemon suspended."),
    ("pin", "Promise its pages host memory."),
    ("unpin", "Withdraw the promise."),
):
    _verb(_name, _help)


@session_app.command("fork")
def session_fork(
    id: str,
    new_id: str | None = None,
    at: Annotated[int | None, typer.Option(help="Tokens to keep; all if not given.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """A session with the same words."""

    async def work(tierd: AsyncTierd) -> Any:
        return (await (await tierd.sessions.get(id)).fork(new_id, at)).info

    show(ask(url, api_key, work), as_json, lambda data: _sessions_table([data]))


@session_app.command("rm")
def session_rm(id: str, url: Url = None, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Delete a session and what only it had stored."""

    async def work(tierd: AsyncTierd) -> Any:
        await tierd.sessions.delete(id)
        return {"id": id, "deleted": True}

    show(ask(url, api_key, work), as_json)


def _words_of(file: Path, token_ids: bool) -> dict[str, Any]:
    data = _bytes_of(file)
    if token_ids and len(data) % 4:
        raise typer.BadParameter("not whole int32 numbers", param_hint="--ids")
    return {"token_ids": data} if token_ids else {"text": _text(data)}


def _bytes_of(file: Path) -> bytes:
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except FileNotFoundError:
        fail(f"there is no file {file}", NOT_FOUND)
    except OSError as error:
        fail(why(error), FAILED)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"not text in UTF-8: {error}", param_hint="FILE") from error


def _prefix_verb(
    name: str, help: str, work: Callable[..., Awaitable[Any]], waiting: str = ""
) -> None:
    @prefix_app.command(name, help=help)
    def command(
        file: PrefixFile,
        token_ids: IsIds = False,
        url: Url = None,
        api_key: ApiKey = None,
        as_json: AsJson = False,
    ) -> None:
        words = _words_of(file, token_ids)
        with err.status(waiting) if waiting else nullcontext():
            found = ask(url, api_key, lambda t: work(t.prefixes, **words))
        show(found, as_json)


_prefix_verb("lookup", "How many tokens of a text are cached, and in which tier.", Prefixes.lookup)
_prefix_verb(
    "warm",
    "Bring what the store has of a text to host memory, and say how many tokens that are.",
    Prefixes.warm,
    waiting="warming up",
)
_prefix_verb(
    "pin",
    "Keep what a shared Redis has of a text there, against its budget and its time.",
    Prefixes.pin,
)
_prefix_verb("unpin", "Let it go again.", partial(Prefixes.pin, pinned=False))


@prefix_app.command("purge")
def prefix_purge(
    salt: Annotated[str, typer.Argument(help='The tenant\'s cache_salt; "" for none.')],
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Forget all that is cached and stored for a tenant that has no sessions."""
    with err.status("purging"):
        found = ask(url, api_key, lambda t: t.prefixes.purge(salt))
    show(found, as_json)


def main() -> None:
    """The console script."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    app()
