"""Settings from flags, file and environment; the command line against a running daemon."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from daemon_harness import Daemon, run_daemon
from dsv4_tierd.daemon.cli import app, figure
from dsv4_tierd.daemon.cli_serve import context_line
from dsv4_tierd.daemon.config import BadConfig, load_config
from dsv4_tierd.daemon.doctor import examine
from dsv4_tierd.daemon.middleware import read_keys
from dsv4_tierd.engine.config import EngineConfig
from dsv4_tierd.tiering.units import format_bytes, parse_bytes


def test_later_sources_win(tmp_path: Path) -> None:
    """Default, file, environment, flag: each overrides those before it."""
    file = tmp_path / "c.toml"
    file.write_text('port = 1\nmax-batch = 2\nhost_budget = "3GiB"\nstore = "disk:/s"\n')
    environ = {"DSV4_TIERD_PORT": "5", "DSV4_TIERD_MAX_BATCH": "6", "OTHER": "x"}
    config = load_config({"model": "m", "port": 9, "hot_rows": None}, file, environ)
    assert (config.port, config.max_batch, config.host_budget) == (9, 6, 3 << 30)
    engine = config.engine()
    assert EngineConfig.from_json(engine.to_json()) == engine
    assert (engine.host_budget_bytes, engine.pin_budget_bytes) == (3 << 30, 3 << 29)
    assert engine.store == "disk:/s"
    assert load_config({"model": "m"}, None, {}).engine().hot_rows is None


@pytest.mark.parametrize(
    ("flags", "environ", "names"),
    [
        ({}, {}, "model"),
        ({"model": "m", "prot": 1}, {}, "prot"),
        ({"model": "m"}, {"DSV4_TIERD_PROT": "1"}, "prot"),
        ({"model": "m", "port": 70_000}, {}, "port"),
        ({"model": "preset:flash-maxi"}, {}, "there is preset:flash-mini"),
        ({"model": "preset:flash-mini?layer=S"}, {}, "layer is none of layers"),
        ({"model": "m", "port": "x"}, {}, "port"),
        ({"model": "m", "port": True}, {}, "port"),
        ({"model": "m", "max_batch": 1.5}, {}, "max_batch"),
        ({"model": "m", "max_batch": 0}, {}, "max_batch"),
        ({"model": "m"}, {"DSV4_TIERD_MAX_BATCH": "abc"}, "max_batch: not a whole number: 'abc'"),
        ({"model": "m", "lease_s": "x"}, {}, "lease_s: not a number: 'x'"),
        ({"model": "m", "device": "tpu"}, {}, "tpu"),
        ({"model": "m", "host_budget": "3 bananas"}, {}, "host_budget"),
        ({"model": "m", "host_budget": "1048576TiB"}, {}, "of memory there are"),
        ({"model": "m", "store": "s3:x"}, {}, "store"),
        ({"model": "m", "thinking_default": "perhaps"}, {}, "thinking_default"),
        ({"model": "m", "write_policy": "sometimes"}, {}, "sometimes"),
        (
            {"model": "m", "write_policy": "never", "store": "disk:a,through:redis://h"},
            {},
            "differ",
        ),
        ({"model": "m", "lease_s": 0}, {}, "lease_s"),
        ({"model": "m", "body_bytes_max": 0}, {}, "body_bytes_max"),
        ({"model": "m"}, {"DSV4_TIERD_HOST": ""}, "host is empty"),
        ({"model": "m"}, {"DSV4_TIERD_STATE_DIR": ""}, "state_dir: it is empty"),
        ({"model": "m", "served_model_name": ["m"]}, {}, "served_model_name: .* is not text"),
    ],
)
def test_bad_settings_are_named(flags: dict[str, Any], environ: dict[str, str], names: str) -> None:
    """Unknown keys and impossible values are errors that say which."""
    with pytest.raises(BadConfig, match=names):
        load_config(flags, None, environ)


@pytest.mark.parametrize(
    ("settings", "policy", "near"),
    [
        ({}, "through", False),
        ({"write_policy": "never"}, "never", False),
        ({"store": "disk:a,on_suspend:redis://h"}, "on_suspend", True),
        ({"store": "disk:a,never:redis://h", "write_policy": "never"}, "never", True),
    ],
)
def test_the_default_write_policy(settings: dict[str, Any], policy: str, near: bool) -> None:
    """The setting's, or the one that the store names before its far tier, or through."""
    config = load_config({"model": "m", **settings}, None, {})
    assert (config.default_policy, config.has_near_tier) == (policy, near)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1GiB", 1 << 30), ("1.5 KiB", 1536), ("2m", 2 << 20), ("7", 7), (9, 9), ("3KB", 3000)],
)
def test_sizes(text: str | int, size: int) -> None:
    """Sizes are read as people write them."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1XB", "1..5", -1, True, None, 1.5])
def test_bad_sizes(text: Any) -> None:
    """What is no size is an error."""
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


def test_sizes_are_written_in_the_largest_unit() -> None:
    """1536 bytes are 1.5 KiB."""
    assert [format_bytes(n) for n in (5, 1536, 3 << 30)] == ["5 B", "1.5 KiB", "3.0 GiB"]


async def run_cli(daemon: Daemon, *arguments: str) -> tuple[int, str]:
    environ = {"TIERD_BASE_URL": daemon.url, "COLUMNS": "200"}
    found = await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=environ)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.exit_code, found.output


async def test_the_command_line(daemon: Daemon, tmp_path: Path) -> None:
    """Sessions are listed, forked, suspended, looked up and deleted; exit codes say how it went."""
    await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5] * 600})
    code, text = await run_cli(daemon, "status", "--json")
    assert code == 0
    assert json.loads(text)["sessions"] == {"idle": 1}
    assert (await run_cli(daemon, "status"))[0] == 0
    assert (await run_cli(daemon, "session", "fork", "a", "--new-id", "b"))[0] == 0
    code, text = await run_cli(daemon, "session", "ls", "--json")
    assert [s["id"] for s in json.loads(text)] == ["a", "b"]
    code, text = await run_cli(daemon, "session", "suspend", "b", "--json")
    assert json.loads(text)["state"] == "suspended"
    code, text = await run_cli(daemon, "session", "ls")
    assert "suspended" in text
    assert (await run_cli(daemon, "session", "show", "nobody"))[0] == 3
    assert (await run_cli(daemon, "session", "rm", "b"))[0] == 0
    file = tmp_path / "text"
    file.write_text("word " * 2_000)
    code, text = await run_cli(daemon, "prefix", "lookup", str(file), "--json")
    assert json.loads(text)["matched_tokens"] > 0
    for names in (("prefix", "warm"), ("prefixes", "warm")):
        code, text = await run_cli(daemon, *names, str(file), "--json")
        assert (code, json.loads(text)["host_tokens"] > 0) == (0, True)
    file.write_bytes(struct.pack("<600i", *range(600)))
    code, text = await run_cli(daemon, "prefix", "warm", str(file), "--ids", "--json")
    assert json.loads(text) == {"prompt_tokens": 600, "host_tokens": 512, "loaded_tokens": 256}
    code, text = await run_cli(daemon, "prefix", "lookup", str(file), "--ids", "--json")
    assert (code, json.loads(text)["prompt_tokens"]) == (0, 600)
    file.write_bytes(struct.pack("<1000000i", *[5] * 1_000_000))
    code, text = await run_cli(daemon, "prefix", "lookup", str(file), "--ids", "--json")
    assert (code, json.loads(text)["prompt_tokens"]) == (0, 1_000_000)
    file.write_bytes(bytes(7))
    for verb in ("lookup", "warm"):
        assert (await run_cli(daemon, "prefix", verb, str(file), "--ids"))[0] == 2
    file.write_bytes(struct.pack("<600i", *range(600)))
    for verb in ("pin", "unpin"):
        code, text = await run_cli(daemon, "prefix", verb, str(file), "--ids", "--json")
        assert (code, json.loads(text)) == (0, {"pinned": verb == "pin", "tokens": 512})
    code, text = await run_cli(daemon, "prefix", "purge", "tenant", "--json")
    assert (code, json.loads(text)) == (0, {"objects": 7})
    code, text = await run_cli(daemon, "prefix", "purge", "")
    assert code == 1
    assert "the tenant has sessions here, 1: delete them first" in text
    code, text = await run_cli(daemon, "store", "verify")
    assert (code, text.strip()) == (0, "9 objects, 4.0 KiB read, 0 bad")
    code, text = await run_cli(daemon, "store", "gc")
    assert (code, text.strip()) == (0, "4.0 KiB -> 1.0 KiB")
    assert (await run_cli(daemon, "store", "gc", "--budget", "1GiB"))[0] == 2
    assert (await run_cli(daemon, "session", "fly", "a"))[0] == 2
    assert (await run_cli(daemon, "serve", "--device", "tpu", "--model", "m"))[0] == 2
    code, text = await run_cli(daemon, "drain", "--wait")
    assert (code, json.loads(text)["state"]) == (0, "ended")
    await daemon.task
    assert (await run_cli(daemon, "status"))[0] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("status --url nonsense", 2, "no address"),
        ("status --url http://[::1", 2, "no address"),
        ("status --url http://h:99999", 2, "no address"),
        ("status --url ftp://h", 2, "no address"),
        ("status --url http://127.0.0.1:1", 1, "no daemon at http://127.0.0.1:1 (dsv4-tierd"),
        ("status --api-key a\tb", 2, "one line"),
        ("prefix lookup {folder}/none", 3, "there is no file"),
        ("prefix warm {folder}/none", 3, "there is no file"),
        ("prefix lookup {folder}", 1, "directory"),
        ("prefix lookup {folder}/bad", 2, "UTF-8"),
        ("prefix warm {folder}/bad", 2, "UTF-8"),
        ("make-checkpoint {folder}/bad", 1, "/bad: it exists, and is no folder"),
        ("make-checkpoint {folder}", 1, "not empty"),
        ("make-checkpoint {folder}/new --seed -1", 2, "seed"),
        ("make-checkpoint {folder}/new --seed 99999999999999999999", 2, "seed"),
        ("demo --tokens 0", 2, "tokens"),
        ("demo --answer-tokens 0", 2, "answer"),
        ("demo --keep {folder}/bad", 1, "directory"),
        ("demo --model {folder}/[/none]", 1, "[/none]/config.json does not exist"),
        ("serve --model m --store redis://[", 2, "host"),
        ("serve --model m --store redis+cluster://a,[", 2, "store"),
        ("serve --model m --drain-s inf", 2, "finite"),
        ("serve --model m --idle-tails -1", 2, "idle_tails"),
        ("store ls redis://[", 2, "host"),
    ],
)
def test_mistakes_have_their_lines_and_exit_codes(
    tmp_path: Path, arguments: str, code: int, said: str
) -> None:
    """What is wrong is said in words, never as an exception's trace."""
    (tmp_path / "bad").write_bytes(b"\xff\xfe")
    given = [part.format(folder=tmp_path) for part in arguments.split(" ")]
    found = CliRunner().invoke(app, given, env={"COLUMNS": "400"})
    assert isinstance(found.exception, SystemExit), found.exception
    assert (found.exit_code, "Traceback" in found.output) == (code, False), found.output
    # Lines are broken where a path's length happens to have it.
    assert "".join(said.split()) in "".join(found.output.split())


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    """By its number, without the system's."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = ["serve", "--model", "m", "--port", port, "--state-dir", str(tmp_path)]
        found = CliRunner().invoke(app, given)
    assert (found.exit_code, f"port {port} is in use" in found.output) == (1, True), found.output


def test_numbers_are_written_for_people() -> None:
    """The limit of a session, and whose it is; gauges in bytes as sizes, counts as integers."""
    assert context_line(4096, 4096) == "a session: at most 4,096 tokens"
    assert context_line(4096, 8192).endswith(
        "4,096 tokens: the budgets hold no more of the model's 8,192"
    )
    figures = [figure(*g) for g in (("store_bytes", 1536.0), ("pages", 1e6), ("x_ratio", 0.25))]
    assert figures == ["1.5 KiB", "1,000,000", "0.25"]


def test_a_checkpoint_is_overwritten_on_demand_only(tmp_path: Path) -> None:
    """And all of its files may be read by whom the umask lets."""
    given = ["make-checkpoint", str(tmp_path / "c"), "--preset", "micro"]
    codes = [CliRunner().invoke(app, [*given, *more]).exit_code for more in ([], [], ["--force"])]
    assert codes == [0, 1, 0]
    assert len({file.stat().st_mode for file in (tmp_path / "c").iterdir()}) == 1


def test_a_key_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    """Before anything starts."""
    file = tmp_path / "keys"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(BadConfig, match="cannot read"):
        read_keys(file)


@pytest.mark.parametrize("name", ["a?", "a#b", "x/../a", "[/a]"])
async def test_a_name_is_never_another_path(daemon: Daemon, name: str) -> None:
    """What is no session's name finds none, and is shown as it is."""
    await daemon.ok("POST", "/v1/sessions", {"id": "a"})
    code, text = await run_cli(daemon, "session", "rm", name)
    assert (code, "session id" in text) == (1, True)
    assert (await daemon.ok("GET", "/v1/sessions/a"))["tokens"] == 0


async def test_what_is_no_daemon_is_said_to_be_none(daemon: Daemon) -> None:
    """An address at which something else answers."""
    environ = {"COLUMNS": "400"}
    for url in (f"{daemon.url}/elsewhere", f"{daemon.url}/metrics#"):
        arguments = ["status", "--url", url]
        found = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environ)
        assert isinstance(found.exception, SystemExit), found.exception
        assert found.exit_code in (1, 3)


async def test_a_daemon_looks_after_its_own_store(tmp_path: Path) -> None:
    """What was bad is listed, with exit code 1; without a store that is what it says."""
    async with run_daemon(tmp_path / "one", "rotten") as daemon:
        code, text = await run_cli(daemon, "store", "verify")
        assert (code, text.splitlines()[1]) == (1, "page 00ff: checksum")
        started = await daemon.ok("POST", "/v1/store/verify")
        await daemon.until(lambda: not daemon.service.operations.running())
        operation = await daemon.ok("GET", f"/v1/operations/{started['id']}")
        assert (operation["verb"], operation["result"]["objects"]) == ("store verify", 9)
    async with run_daemon(tmp_path / "two", store="none") as daemon:
        status, found, _ = await daemon.call("POST", "/v1/store/gc", {})
        assert (status, found["error"]["code"]) == (400, "unsupported_combination")


async def test_capacity_is_exit_code_four(tmp_path: Path) -> None:
    """A refused pin tells scripts that there is no room."""
    async with run_daemon(tmp_path, "nopins") as daemon:
        await daemon.ok("POST", "/v1/sessions?wait=true", {"id": "a", "token_ids": [5]})
        assert (await run_cli(daemon, "session", "pin", "a"))[0] == 4


def test_doctor_says_what_each_lack_costs() -> None:
    """Every check has a finding and a cost."""
    checks = examine()
    assert {"CPU", "memory", "GPU", "locked memory", "huge pages", "NUMA"} <= {
        c.name for c in checks
    }
    assert all(check.found and check.cost for check in checks)


def test_doctor_looks_at_the_state_folder_that_serve_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of the configured folder, not of the default one."""
    monkeypatch.setenv("DSV4_TIERD_STATE_DIR", str(tmp_path / "state"))
    said = CliRunner().invoke(app, ["doctor", "--json"]).output
    found = {check["name"]: check["found"] for check in json.loads(said)}
    assert found["state disk"].endswith(f"free in {tmp_path}")


def test_the_stores_folder_from_the_command_line(tmp_path: Path) -> None:
    """An empty store lists nothing and verifies; a missing one is exit code 3."""
    runner = CliRunner()
    assert runner.invoke(app, ["store", "ls", str(tmp_path / "none")]).exit_code == 3
    (tmp_path / "s").mkdir()
    assert (
        json.loads(runner.invoke(app, ["store", "ls", str(tmp_path / "s"), "--json"]).output) == []
    )
    found = runner.invoke(app, ["store", "verify", str(tmp_path / "s"), "--json"])
    assert (found.exit_code, json.loads(found.output)["objects"]) == (0, 0)
    assert runner.invoke(app, ["store", "gc", str(tmp_path / "s")]).exit_code == 0
    assert runner.invoke(app, ["store", "gc", str(tmp_path / "s"), "--budget", "x"]).exit_code == 2
