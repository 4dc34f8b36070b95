"""``dsv4-tierd store``: look at, check and tidy stores.

A folder while no daemon has it; a running daemon's own store is tended by that daemon.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table

from dsv4_tierd.daemon.cli_ask import FAILED, ApiKey, AsJson, Url, ask, err, out
from dsv4_tierd.daemon.cli_bundle import (
    Store,
    export_command,
    import_command,
    store_errors,
    store_spec,
)
from dsv4_tierd.tiering.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from dsv4_tierd.tiering.store.maintain import Maintained

store_app = typer.Typer(help="Prefix stores: list, check, tidy, carry.", no_args_is_help=True)
store_app.command("export")(export_command)
store_app.command("import")(import_command)
OwnStore = Annotated[
    str | None,
    typer.Argument(help="As for ls. Without it: the store of the running daemon at --url."),
]


@contextmanager
def _opened(store: str, bytes_max: int | None = None) -> Iterator[list[Maintained]]:
    with store_errors():
        from dsv4_tierd.tiering.store.maintain import opened_for_care

        with opened_for_care(store_spec(store), bytes_max) as tiers:
            yield tiers


def _say(data: Any, as_json: bool, text: str) -> None:
    sys.stdout.write((json.dumps(data) if as_json else text) + "\n")


@store_app.command("ls")
def ls(store: Store, as_json: AsJson = False) -> None:
    """Every object, by identity and tenant."""
    with _opened(store) as tiers:
        objects = [item for tier in tiers for item in tier.list_objects()]
    if as_json:
        _say([asdict(o) | {"kind": o.kind.name} for o in objects], True, "")
        return
    table = Table("kind", "tenant", "digest", "bytes", "identity")
    for o in objects:
        size = format_bytes(o.record_bytes)
        table.add_row(o.kind.name, o.tenant, o.digest[:16], size, o.identity[:12])
    out.print(table)


@store_app.command("verify")
def verify(
    store: OwnStore = None, url: Url = None, api_key: ApiKey = None, as_json: AsJson = False
) -> None:
    """Read and check every byte; bad objects are dropped and listed. Exit code 1 if any was."""
    if store is None:
        found = _tended_by_the_daemon("verify", url, api_key)
    else:
        from dsv4_tierd.tiering.store.maintain import verified

        with _opened(store) as tiers, _bar(as_json) as advance:
            found = verified(tiers, advance)
    size = format_bytes(found["bytes_read"])
    text = f"{found['objects']} objects, {size} read, {len(found['bad'])} bad"
    _say(found, as_json, "\n".join([text, *found["bad"]]))
    raise typer.Exit(FAILED if found["bad"] else 0)


@store_app.command("gc")
def gc(
    store: OwnStore = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Shrink a folder, or each identity on a remote store, to this size."),
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: AsJson = False,
) -> None:
    """Remove what nobody can use: dead bytes, bytes without rows, rows without bytes."""
    try:
        bytes_max = None if budget is None else parse_bytes(budget)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--budget") from error
    if store is None:
        if budget is not None:
            raise typer.BadParameter("a running daemon has its own", param_hint="--budget")
        found = _tended_by_the_daemon("gc", url, api_key)
    else:
        from dsv4_tierd.tiering.store.maintain import tidied

        with _opened(store, bytes_max) as tiers:
            found = tidied(tiers)
    before, after = (format_bytes(found[name]) for name in ("bytes_before", "bytes_after"))
    _say(found, as_json, f"{before} -> {after}")


def _tended_by_the_daemon(verb: str, url: str | None, key: str | None) -> dict[str, Any]:
    with err.status(f"the daemon runs {verb}"):
        found: dict[str, Any] = ask(
            url, key, lambda t: t.call("POST", f"/v1/store/{verb}", wait="true")
        )
    return found


@contextmanager
def _bar(as_json: bool) -> Iterator[Callable[[int, int], None]]:
    columns = (BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=err, disable=as_json or not err.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
