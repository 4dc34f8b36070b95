"""``dsv4-tierd store export | import``: one prefix as a file, from one store to another."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from dsv4_tierd.daemon.cli_ask import FAILED, NOT_FOUND, USAGE, AsJson, err, fail, why
from dsv4_tierd.tiering.errors import BadRequest, NotFound, TierError
from dsv4_tierd.tiering.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from dsv4_tierd.tiering.store.bundle import BundleReport
    from dsv4_tierd.tiering.store.identity import StoreIdentity
    from dsv4_tierd.tiering.store.protocol import PrefixStore

Store = Annotated[
    str, typer.Argument(help="A folder that no daemon uses, or disk:PATH, redis://…, lmcache:{…}")
]
Budget = Annotated[str, typer.Option(help="The store's byte budget.")]


def export_command(
    store: Store,
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    leaf: Annotated[str | None, typer.Option(help="Hash of the last block, hex.")] = None,
    tokens: Annotated[
        Path | None, typer.Option(help="Token ids, int32 little-endian: as much as is stored.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="The tenant's cache_salt.")] = "",
    identity: Annotated[str, typer.Option(help="Digest, or its beginning, if many.")] = "",
    as_json: AsJson = False,
) -> None:
    """Write one stored prefix, pages and resume points, to a file."""
    if (leaf is None) == (tokens is None):
        raise typer.BadParameter("give one of --leaf and --tokens")
    with store_errors():
        from dsv4_tierd.tiering.store.bundle import export_prefix, stored_leaf

        spec = store_spec(store)
        found = _identity(spec, identity)
        with _opened(spec, found, 1 << 60) as opened:
            end = (
                _digest(leaf)
                if tokens is None
                else stored_leaf(opened, found, tenant, _ids(tokens))
            )
            if not file.parent.is_dir():
                fail(f"there is no folder {file.parent}", NOT_FOUND)
            part = file.with_name(file.name + ".part")
            try:
                with part.open("wb") as out, _bar(as_json) as advance:
                    report = export_prefix(opened, found, tenant, end, out, advance)
                part.replace(file)  # the name is there when the file is whole
            finally:
                part.unlink(missing_ok=True)
    _say(report, as_json)


def import_command(
    file: Annotated[Path, typer.Argument(help="A file that export wrote.")],
    store: Store,
    adopt: Annotated[
        bool,
        typer.Option(
            help="Take it where only other identities were stored before; an empty store takes any."
        ),
    ] = False,
    budget: Budget = "64GiB",
    as_json: AsJson = False,
) -> None:
    """Store a prefix from a file. One of another identity is refused, by name of what differs."""
    try:
        bytes_max = parse_bytes(budget)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--budget") from error
    if not file.is_file():
        fail(f"there is no file {file}", NOT_FOUND)
    with store_errors():
        from dsv4_tierd.tiering.store.bundle import check_identity, import_prefix, read_manifest
        from dsv4_tierd.tiering.store.open import known_identities

        with file.open("rb") as source:
            manifest = read_manifest(source)
            spec = store_spec(store, create=True)
            known = known_identities(spec)
            if known and manifest.identity not in known and not adopt:
                check_identity(manifest, known[-1])
            source.seek(0)
            with (
                _opened(spec, manifest.identity, bytes_max) as opened,
                _bar(as_json) as advance,
            ):
                report = import_prefix(source, opened, manifest.identity, advance)
    _say(report, as_json)


def store_spec(store: str, *, create: bool = False) -> str:
    """The specification that an argument means; exit code 3 where it is a folder that is not."""
    from dsv4_tierd.tiering.store.open import parse_spec

    is_spec = store.startswith(("disk:", "lmcache:")) or "://" in store
    spec = store if is_spec else f"disk:{store}"
    for tier in () if create else parse_spec(spec):
        if tier.folder is not None and not tier.folder.is_dir():
            fail(f"there is no store in {tier.folder}", NOT_FOUND)
    return spec


def _identity(spec: str, beginning: str) -> StoreIdentity:
    from dsv4_tierd.tiering.store.open import known_identities

    found = [each for each in known_identities(spec) if each.digest.hex().startswith(beginning)]
    if not found:
        raise NotFound("no identity of that digest wrote to this store")
    if len(found) > 1:
        names = ", ".join(each.digest.hex()[:16] for each in found)
        fail(f"several identities wrote to this store, --identity says which: {names}", USAGE)
    return found[0]


@contextmanager
def _opened(spec: str, identity: StoreIdentity, bytes_max: int) -> Iterator[PrefixStore]:
    from dsv4_tierd.tiering.store.open import open_store

    store = open_store(spec, identity, bytes_max)
    assert store is not None
    try:
        yield store
    finally:
        store.close()


def _digest(text: str | None) -> bytes:
    try:
        digest = bytes.fromhex(text or "")
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise typer.BadParameter("64 hex digits", param_hint="--leaf")
    return digest


def _ids(path: Path) -> Any:
    import numpy as np

    if not path.is_file():
        fail(f"there is no file {path}", NOT_FOUND)
    return np.fromfile(path, "<i4")


@contextmanager
def _bar(as_json: bool) -> Iterator[Callable[[int, int], None]]:
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=err, disable=as_json or not err.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def store_errors() -> Iterator[None]:
    """What goes wrong with a store becomes a line and an exit code."""
    try:
        yield
    except TierError as error:
        code = NOT_FOUND if isinstance(error, NotFound) else FAILED
        wrong_spec = isinstance(error, BadRequest) and error.param == "store"
        fail(error.message, USAGE if wrong_spec else code)
    except OSError as error:
        fail(why(error), FAILED)


def _say(report: BundleReport, as_json: bool) -> None:
    manifest = report.manifest
    data = {
        "leaf": manifest.leaf.hex(),
        "tenant": manifest.tenant,
        "identity": manifest.identity.digest.hex(),
        "pages": manifest.pages,
        "resume_points": manifest.points,
        "file_bytes": report.file_bytes,
    }
    size = format_bytes(report.file_bytes)
    text = f"{manifest.pages} pages, {manifest.points} resume points, {size}, up to {data['leaf']}"
    sys.stdout.write((json.dumps(data) if as_json else text) + "\n")
