"""``store export`` and ``store import`` from the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import redis_servers
from dsv4_tierd.daemon.cli import app
from dsv4_tierd.tiering.blocks import Transcript, chain_root
from dsv4_tierd.tiering.store.protocol import ObjectKey, ObjectKind, StoredObject
from redis_cases import open_redis
from store_cases import IDENTITY, content, open_disk, read

TOKENS = np.arange(256 * 6, dtype=np.int32)
HASHES = Transcript(chain_root(IDENTITY.digest, "me"), TOKENS).hashes
runner = CliRunner()


def pages() -> list[StoredObject]:
    keys = [ObjectKey(ObjectKind.PAGE, "me", key) for key in HASHES]
    parents = [None, *HASHES]
    return [StoredObject(k, p, content(k)) for k, p in zip(keys, parents, strict=False)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store's folder with a prefix of six blocks."""
    store = open_disk(tmp_path / "from")
    store.put(pages())
    store.close()
    return tmp_path / "from"


def run(*arguments: object) -> tuple[int, str]:
    done = runner.invoke(app, ["store", *map(str, arguments)])
    return done.exit_code, done.output


def test_from_folder_to_folder_and_to_a_server(folder: Path, tmp_path: Path) -> None:
    """By token ids and by leaf; into a fresh folder, and into a Redis that a daemon may use."""
    ids, file = tmp_path / "ids", tmp_path / "prefix"
    TOKENS[: 256 * 4 + 9].tofile(ids)
    code, output = run("export", folder, file, "--tokens", ids, "--tenant", "me", "--json")
    assert code == 0, output
    assert json.loads(output)["leaf"] == HASHES[3].hex()
    assert json.loads(output)["pages"] == 4
    code, output = run("import", file, tmp_path / "to")
    assert code == 0, output
    store = open_disk(tmp_path / "to")
    assert [read(store, page) for page in pages()] == [
        *(page.payload for page in pages()[:4]),
        *[None, None],
    ]
    store.close()
    assert run("export", folder, file, "--leaf", HASHES[5].hex(), "--tenant", "me")[0] == 0
    url = redis_servers.emptied().url
    code, output = run("import", file, url)
    assert code == 0, output
    server = open_redis(url)
    assert [read(server, page) for page in pages()] == [page.payload for page in pages()]
    server.close()
    assert (
        run("export", url, tmp_path / "again", "--leaf", HASHES[5].hex(), "--tenant", "me")[0] == 0
    )
    assert (tmp_path / "again").read_bytes() == file.read_bytes()


def test_a_store_of_another_identity_refuses_it(folder: Path, tmp_path: Path) -> None:
    """It says which field differs, stores nothing, and takes it only when told to."""
    file, leaf = tmp_path / "prefix", HASHES[5].hex()
    assert run("export", folder, file, "--leaf", leaf, "--tenant", "me")[0] == 0
    other = replace(IDENTITY, row_format="fp32")
    open_disk(tmp_path / "other", other).close()
    code, output = run("import", file, tmp_path / "other")
    assert code == 1
    assert "row_format" in output
    assert json.loads(run("ls", tmp_path / "other", "--json")[1]) == []
    assert run("import", file, tmp_path / "other", "--adopt")[0] == 0
    code, output = run("export", tmp_path / "other", file, "--leaf", leaf, "--tenant", "me")
    assert (code, IDENTITY.digest.hex()[:16] in output) == (2, True)
    begin = IDENTITY.digest.hex()[:8]
    export = ("export", tmp_path / "other", file, "--leaf", leaf, "--tenant", "me")
    assert run(*export, "--identity", begin)[0] == 0


def test_mistakes_have_their_exit_codes(folder: Path, tmp_path: Path) -> None:
    """2 for wrong usage, 3 for what is not there, 1 for a damaged file; no half file stays."""
    file, leaf = tmp_path / "prefix", HASHES[5].hex()
    assert run("export", folder, file)[0] == 2
    assert run("export", folder, file, "--leaf", "zz")[0] == 2
    assert run("export", "redis://h?ttl_s=x", file, "--leaf", leaf)[0] == 2
    assert run("export", tmp_path / "none", file, "--leaf", leaf)[0] == 3
    assert run("export", folder, file, "--leaf", leaf)[0] == 3, "another tenant's"
    assert run("export", folder, file, "--tokens", tmp_path / "none")[0] == 3
    code, said = run("export", folder, tmp_path / "no" / "f", "--leaf", leaf, "--tenant", "me")
    assert (code, "there is no folder" in said) == (3, True)
    assert run("import", file, tmp_path / "to")[0] == 3
    assert list(tmp_path.iterdir()) == [folder]
    file.write_bytes(b"x" * 100)
    assert run("import", file, tmp_path / "to")[0] == 1
    assert run("import", file, tmp_path / "to", "--budget", "much")[0] == 2
