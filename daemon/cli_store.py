"""``dsv4-tierd store``: look at, check and tidy stores; folders while no daemon has them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table

from dsv4_tierd.daemon.cli_bundle import (
    AsJson,
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
FAILED = 1


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
    Console().print(table)


@store_app.command("verify")
def verify(store: Store, as_json: AsJson = False) -> None:
    """Read and check every byte; bad objects are dropped and listed. Exit code 1 if any was."""
    with _opened(store) as tiers, _bar(as_json) as advance:
        reports = [tier.verify(advance) for tier in tiers]
    bad = [line for report in reports for line in report.bad]
    count = sum(report.objects for report in reports)
    bytes_read = sum(report.bytes_read for report in reports)
    text = f"{count} objects, {format_bytes(bytes_read)} read, {len(bad)} bad"
    data = {"objects": count, "bytes_read": bytes_read, "bad": bad}
    _say(data, as_json, "\n".join([text, *bad]))
    raise typer.Exit(FAILED if bad else 0)


@store_app.command("gc")
def gc(
    store: Store,
    budget: Annotated[
        str | None,
        typer.Option(help="Shrink a folder, or each identity on a remote store, to this size."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove what nobody can use: dead bytes, bytes without rows, rows without bytes."""
    try:
        bytes_max = None if budget is None else parse_bytes(budget)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--budget") from error
    with _opened(store, bytes_max) as tiers:
        reports = [tier.gc() for tier in tiers]
    data = {
        name: sum(getattr(report, name) for report in reports)
        for name in ("bytes_before", "bytes_after", "segments_compacted")
    }
    before, after = (format_bytes(data[name]) for name in ("bytes_before", "bytes_after"))
    _say(data, as_json, f"{before} -> {after}")


@contextmanager
def _bar(as_json: bool) -> Iterator[Callable[[int, int], None]]:
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, disable=as_json or not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
