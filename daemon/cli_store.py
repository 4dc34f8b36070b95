"""``dsv4-tierd store``: look at, check and tidy a store's folder while no daemon has it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dsv4_tierd.daemon.cli_bundle import export_command, import_command
from dsv4_tierd.tiering.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from dsv4_tierd.tiering.store.disk import DiskStore

store_app = typer.Typer(help="A store's folder, while no daemon uses it.", no_args_is_help=True)
store_app.command("export")(export_command)
store_app.command("import")(import_command)
FAILED, NOT_FOUND = 1, 3
Folder = Annotated[Path, typer.Argument(help="PATH of disk:PATH")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@contextmanager
def _opened(folder: Path, bytes_max: int = 1 << 60) -> Iterator[DiskStore]:
    from dsv4_tierd.tiering.errors import StoreUnavailable
    from dsv4_tierd.tiering.store.disk import DiskStore
    from dsv4_tierd.tiering.store.vault import DiskConfig

    err = Console(stderr=True)
    if not folder.is_dir():
        err.print(f"[red]there is no store in {folder}[/red]", highlight=False)
        raise typer.Exit(NOT_FOUND)
    try:
        store = DiskStore(DiskConfig(folder, bytes_max), None)
    except StoreUnavailable as error:
        err.print(f"[red]{error.message}[/red]", highlight=False)
        raise typer.Exit(FAILED) from error
    try:
        yield store
    finally:
        store.close()


def _say(data: Any, as_json: bool, text: str) -> None:
    sys.stdout.write((json.dumps(data) if as_json else text) + "\n")


@store_app.command("ls")
def ls(folder: Folder, as_json: AsJson = False) -> None:
    """Every object, by identity and tenant."""
    with _opened(folder) as store:
        objects = list(store.list_objects())
    if as_json:
        _say([asdict(o) | {"kind": o.kind.name} for o in objects], True, "")
        return
    table = Table("kind", "tenant", "digest", "bytes", "identity")
    for o in objects:
        size = format_bytes(o.record_bytes)
        table.add_row(o.kind.name, o.tenant, o.digest[:16], size, o.identity[:12])
    Console().print(table)


@store_app.command("verify")
def verify(folder: Folder, as_json: AsJson = False) -> None:
    """Read and check every byte; bad objects are dropped and listed. Exit code 1 if any was."""
    with _opened(folder) as store:
        report = store.verify()
    size = format_bytes(report.bytes_read)
    text = f"{report.objects} objects, {size} read, {len(report.bad)} bad"
    _say(asdict(report), as_json, "\n".join([text, *report.bad]))
    raise typer.Exit(FAILED if report.bad else 0)


@store_app.command("gc")
def gc(
    folder: Folder,
    budget: Annotated[str | None, typer.Option(help="Shrink to this size, as 10GiB.")] = None,
    as_json: AsJson = False,
) -> None:
    """Give dead bytes back to the file system."""
    try:
        bytes_max = 1 << 60 if budget is None else parse_bytes(budget)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--budget") from error
    with _opened(folder, bytes_max) as store:
        report = store.gc()
    before, after = format_bytes(report.bytes_before), format_bytes(report.bytes_after)
    _say(asdict(report), as_json, f"{before} -> {after}")
