"""``store ls | verify | gc`` on every kind of store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import redis_servers
from dsv4_tierd.daemon.cli import app
from dsv4_tierd.tiering.store.protocol import StoredObject
from lmcache_cases import needs_lmcache, open_fs_native
from redis_cases import open_redis
from store_cases import IDENTITY, chain, open_disk, page, resume

OTHER = replace(IDENTITY, weights_digest="ef" * 32)


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["store", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def listed(spec: str) -> set[tuple[str, str]]:
    """Identities and digests that ``ls`` shows."""
    code, output = run("ls", spec, "--json")
    assert code == 0, output
    return {(each["identity"], each["digest"]) for each in json.loads(output)}


def named(items: Sequence[StoredObject], identity: bytes = IDENTITY.digest) -> set[tuple[str, str]]:
    return {(identity.hex(), item.key.digest.hex()) for item in items}


def corrupt_redis() -> None:
    """One byte in the middle of each extent is another."""
    with redis_servers.current().client as client:
        for name in client.keys("tierd:1:x:*"):
            client.setrange(name, 3000, b"\xa5\x5a")


def test_a_server() -> None:
    """Every identity's objects are listed, read and checked; what is bad is named and goes."""
    url = redis_servers.emptied().url
    items, others = [*chain("a", 6), resume("a5")], [page("b")]
    for identity, objects in ((IDENTITY, items), (OTHER, others)):
        store = open_redis(url, identity)
        store.put(objects)
        store.close()
    assert listed(url) == named(items) | named(others, OTHER.digest)
    assert "PAGE" in run("ls", url)[1]
    code, output = run("verify", url, "--json")
    found = json.loads(output)
    assert (code, found["objects"], found["bad"]) == (0, 8, [])
    assert found["bytes_read"] == sum(len(item.payload) for item in [*items, *others])
    corrupt_redis()
    code, output = run("verify", url)
    assert code == 1
    assert "checksum" in output
    assert run("verify", url)[0] == 0, "what was bad is gone"
    assert len(listed(url)) < 8


def test_a_servers_leftovers_go() -> None:
    """``gc`` takes back rows without bytes, and shrinks every identity to a budget."""
    url = redis_servers.emptied().url
    items = chain("a", 40, size=60_000)
    store = open_redis(url)
    store.put(items)
    store.close()
    assert run("gc", url)[0] == 0
    assert len(listed(url)) == 40
    code, output = run("gc", url, "--budget", "1MiB", "--json")
    assert code == 0, output
    found = json.loads(output)
    assert found["bytes_before"] > 2_400_000
    assert found["bytes_after"] <= 1 << 20
    kept = listed(url)
    assert kept == named(items[: len(kept)]), "ends of prefixes go before their beginnings"
    with redis_servers.current().client as client:
        client.delete(*client.keys("tierd:1:x:*"))
    assert json.loads(run("gc", url, "--json")[1])["bytes_after"] == 0
    assert listed(url) == set()


def test_a_folder_is_shrunk(tmp_path: Path) -> None:
    """``gc --budget`` gives up the coldest ends until the folder is as small as that."""
    items = chain("a", 40, size=100_000)
    store = open_disk(tmp_path)
    store.put(items)
    store.close()
    code, output = run("gc", tmp_path, "--budget", "2MiB", "--json")
    assert code == 0, output
    assert json.loads(output)["bytes_after"] <= 2 << 20
    kept = listed(f"disk:{tmp_path}")
    assert 5 < len(kept) < 20
    assert kept == named(items[: len(kept)])
    assert run("verify", tmp_path)[0] == 0


def test_two_tiers_are_both_looked_at(tmp_path: Path) -> None:
    """A folder in front of a server: objects of both are listed and read."""
    url = redis_servers.emptied().url
    near, far = chain("a", 3), chain("b", 4)
    local, remote = open_disk(tmp_path), open_redis(url)
    local.put(near)
    remote.put(far)
    local.close()
    remote.close()
    spec = f"disk:{tmp_path},{url}"
    assert listed(spec) == named(near) | named(far)
    assert json.loads(run("verify", spec, "--json")[1])["objects"] == 7
    corrupt_redis()
    assert run("verify", spec)[0] == 1
    assert run("gc", spec)[0] == 0


@needs_lmcache
@pytest.mark.filterwarnings("ignore")
def test_an_lmcache_adapter(tmp_path: Path) -> None:
    """On fs_native: listed, checked, rows without bytes taken back, shrunk to a budget."""
    spec = "lmcache:" + json.dumps({"type": "fs_native", "base_path": str(tmp_path)})
    items = chain("a", 30, size=100_000)
    store = open_fs_native(tmp_path)
    store.put(items)
    store.close()
    assert listed(spec) == named(items)
    assert json.loads(run("verify", spec, "--json")[1])["objects"] == 30
    largest = max(tmp_path.rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[50_000] ^= 1
    largest.write_bytes(data)
    code, output = run("verify", spec)
    assert code == 1
    assert "checksum" in output
    assert run("verify", spec)[0] == 0
    code, output = run("gc", spec, "--budget", "1MiB", "--json")
    assert code == 0, output
    assert json.loads(output)["bytes_after"] <= 1 << 20
    assert 3 < len(listed(spec)) < 12


def test_what_cannot_be_looked_at_says_why(tmp_path: Path) -> None:
    """A server that is away, a folder in use or missing, a wrong budget; no password is shown."""
    port = redis_servers.free_port()
    for verb in ("ls", "verify", "gc"):
        code, output = run(verb, f"redis://:hunter2@127.0.0.1:{port}")
        assert code == 1
        assert "away" in output
        assert "hunter2" not in output
        assert run(verb, f"disk:{tmp_path / 'none'}")[0] == 3
        assert run(verb, "redis://h?ttl_s=soon")[0] == 2
    assert run("gc", tmp_path, "--budget", "1KiB")[0] == 2
    store = open_disk(tmp_path)
    assert run("ls", tmp_path)[0] == 1
    store.close()


def doctor(*arguments: str) -> tuple[int, list[dict[str, object]]]:
    """Exit code and the checks of stores."""
    done = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    found = json.loads(done.output) if done.exit_code == 0 else []
    names = ("Redis", "LMCache", "store disk")
    return done.exit_code, [check for check in found if check["name"] in names]


def test_the_doctor_looks_at_the_store(tmp_path: Path) -> None:
    """AOF and noeviction are warned of by name; a server that is away, and a good one, are said."""
    with redis_servers.Server(appendonly="yes", maxmemory_policy="noeviction") as server:
        code, found = doctor("--store", f"disk:{tmp_path},{server.url}", "--store-budget", "2MiB")
        assert code == 0
        costs = " ".join(str(check["cost"]) for check in found if not check["good"])
        assert "appendonly" in costs
        assert "maxmemory-policy noeviction" in costs
        assert any(check["name"] == "store disk" and check["good"] for check in found)
        away = server.url.replace("redis://", "redis://:hunter2@")
    good = {"maxmemory": "256mb", "maxmemory_policy": "noeviction"}
    with redis_servers.Server(**good) as server:
        [check] = doctor("--store", server.url, "--store-budget", "64MiB")[1]
        assert check["good"]
    [check] = doctor("--store", away)[1]
    assert not check["good"]
    assert "hunter2" not in json.dumps(check)
    [check] = doctor("--store", f"disk:{tmp_path}", "--store-budget", "9000TiB")[1]
    assert not check["good"]
    assert doctor("--store", 'lmcache:{"type": "fs_native"}')[1][0]["name"] == "LMCache"
    config = tmp_path / "c.toml"
    config.write_text(f'store = "{away}"\nport = 1\n')
    [check] = doctor("--config", str(config))[1]
    assert check["name"] == "Redis"
    assert doctor() == (0, [])
    assert doctor("--store", "s3:x")[0] == 2
    assert doctor("--store", "none", "--store-budget", "much")[0] == 2
