"""The house's own rules: who imports whom, how long things are, what is written where."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from dsv4_tierd.daemon import cli, wire
from dsv4_tierd.daemon.config import ServeConfig
from dsv4_tierd.tiering import errors
from dsv4_tierd.tiering.units import parse_bytes

ROOT = Path(__file__).parents[1]
LAYERS = ("kernels", "tiering", "engine", "daemon")
MODULE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
KERNEL_LINES_MAX = 150
# What a simulator, a router or a client loads must not cost a second and 400 MB.
TORCH_FREE = (
    *(
        f"tiering.{name}"
        for name in ("admit", "blocks", "errors", "evict", "pages", "plan", "radix")
    ),
    *(f"tiering.{name}" for name in ("replay", "units")),
    *(f"tiering.store.{path.stem}" for path in (ROOT / "tiering" / "store").glob("[a-z]*.py")),
    "daemon.client",
)
# In two halves each, as this file is searched too.
BANNED = {
    "/wo" + "rk/": "a path of one machine",
    "/opt/" + "venv": "a path of one machine",
    "/home/" + "[a-z]": "a path of one machine",
    r"\bpypi" + r"\.org": "a registry's host",
    "files" + r"\.pythonhosted": "a registry's host",
    "download" + r"\.pytorch": "a registry's host",
    r"\b(?:TO" + "DO|FIX" + "ME|XX" + r"X)\b": "work left for later belongs in an issue",
    "(?i)co-auth" + "ored-by": "says who wrote it",
    r"(?i)\b(?:AI|LLM|machine)[- ]gen" + "erated": "says how it was written",
}


def sources(*folders: str) -> list[Path]:
    """Python files under the folders."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


def texts() -> Iterator[Path]:
    """Every text file of the project."""
    kinds = {".py", ".md", ".toml", ".yaml", ".cu", ".cuh", ".html", ".js", ".css", ".sh", ""}
    skipped = {"build", "dist"}
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part != ".ci" for part in parts[:-1])
        inside = skipped.intersection(parts) or any(part.endswith(".egg-info") for part in parts)
        is_environment = any((ROOT / part / "pyvenv.cfg").exists() for part in parts[:1])
        if path.is_file() and path.suffix in kinds and not (hidden or inside or is_environment):
            yield path


def named(paths: Iterator[Path] | list[Path]) -> list[object]:
    """The paths as parameters with readable ids."""
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in paths]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize("path", named(sources(*LAYERS)))
def test_imports_go_one_way(path: Path) -> None:
    """A layer imports itself and those below it: kernels, tiering, engine, daemon."""
    own = path.relative_to(ROOT).parts[0]
    above = LAYERS[LAYERS.index(own) + 1 :]
    # The client is the daemon's border: it knows nothing of the engine inside.
    if path == ROOT / "daemon" / "client.py":
        above = ("kernels", "engine")
    for line, name in imported(path):
        project, _, rest = name.partition(".")
        assert project not in LAYERS, f"{path}:{line}: imported as dsv4_tierd.{project}"
        if project == "dsv4_tierd":
            assert rest.partition(".")[0] not in above, f"{path}:{line}: {name} is a layer above"


@pytest.mark.parametrize("name", TORCH_FREE)
def test_bookkeeping_imports_no_torch(name: str) -> None:
    """The tree, the pools, the admission, the store and the client load without torch."""
    code = (
        f"import sys, dsv4_tierd.{name};"
        "sys.exit(', '.join({'torch', 'triton', 'transformers'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"dsv4_tierd.{name}: {done.stderr.strip()}"


@pytest.mark.parametrize("path", named(sources(*LAYERS, "bench", "tests")))
def test_modules_and_functions_stay_short(path: Path) -> None:
    """Modules end at 500 lines, functions at 70, kernel bodies at 150."""
    text = path.read_text()
    count = text.count("\n")
    assert count <= MODULE_LINES_MAX, f"{path} has {count} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            decorators = " ".join(ast.unparse(each) for each in node.decorator_list)
            limit = KERNEL_LINES_MAX if "triton.jit" in decorators else FUNCTION_LINES_MAX
            assert length <= limit, f"{path}:{node.lineno}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", named(sources(*LAYERS)))
def test_public_functions_are_documented(path: Path) -> None:
    """Whatever another module may call says what it does; so does every module."""
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} does not say what it is"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.name.startswith("_") or ast.get_docstring(node), f"{path}: {node.name}"


@pytest.mark.parametrize("path", named(sources("tests")))
def test_tests_state_a_behaviour(path: Path) -> None:
    """The docstring of every test is a sentence about what must be so."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_test = node.name.startswith("test_")
            assert not is_test or ast.get_docstring(node), f"{path}:{node.lineno}: {node.name}"


def test_nothing_names_a_machine_or_a_registry() -> None:
    """No file holds a path of one machine, a registry's host, or a note to self."""
    found = []
    for path in texts():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found += [
                f"{path.relative_to(ROOT)}:{number}: {why}: {line.strip()}"
                for pattern, why in BANNED.items()
                if re.search(pattern, line)
            ]
    assert not found, "\n".join(found)


def test_the_error_tree_is_drawn_as_it_is() -> None:
    """Names, parents, statuses and wire codes: the docstring and the classes say the same."""
    assert errors.__doc__ is not None
    drawn: set[tuple[str, str, int | None, str | None]] = set()
    parents: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ([│├└─\s]*)([A-Z]\w+)\b(?:\s+(\d{3}) (\w+)$)?", line)
        if match:
            depth = len(match[1]) // 4
            parents[depth:] = [match[2]]
            parent = parents[depth - 1] if depth else "Exception"
            drawn.add((match[2], parent, int(match[3]) if match[3] else None, match[4]))
        elif match := re.match(r"    [│├└─\s]*(\d{3}) (\w+)$", line):  # on a line of its own
            [last] = [row for row in drawn if row[0] == parents[-1]]
            drawn.remove(last)
            drawn.add((*last[:2], int(match[1]), match[2]))
    real = set()
    pending: list[type[Exception]] = [errors.TierError]
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        if cls.__module__ != errors.__name__:
            # A layer may tell its own cases apart; on the wire they are what they derive from.
            assert "code" not in vars(cls), f"{cls} has a wire code outside the tree"
            continue
        has_code = "code" in vars(cls) and cls is not errors.TierError
        status, code = (cls.status, cls.code) if has_code else (None, None)
        real.add((cls.__name__, cls.__mro__[1].__name__, status, code))
    assert drawn == real


def test_every_package_is_installed() -> None:
    """A folder with an __init__.py is in the wheel's list, and the list names no other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    there = {
        "dsv4_tierd." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in LAYERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert listed == there


@pytest.mark.parametrize("path", named([path for path in texts() if path.suffix == ".md"]))
def test_documents_link_to_what_is_there(path: Path) -> None:
    """Every relative link of a document leads to a file."""
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", path.read_text()):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def table_rows(name: str, cells: str) -> list[tuple[str, ...]]:
    """The rows of a document's tables that begin with these cells."""
    found = re.findall(rf"^\| {cells} \|", (ROOT / "docs" / name).read_text(), re.MULTILINE)
    assert found
    return found


def test_the_api_document_has_every_route() -> None:
    """Methods and paths in docs/API.md are those that the daemon registers."""
    app = web.Application()
    for path in sorted((ROOT / "daemon" / "routes").glob("[a-z]*.py")):
        module = importlib.import_module(f"dsv4_tierd.daemon.routes.{path.stem}")
        if hasattr(module, "add_routes"):
            module.add_routes(app)
    text = (ROOT / "docs" / "API.md").read_text()
    written = set(re.findall(r"`(GET|POST|PUT|PATCH|DELETE) (/[^`?]*)`", text))
    left = set(written)
    for route in app.router.routes():
        assert route.resource is not None
        info = route.resource.get_info()
        pattern = info.get("pattern") or re.compile(re.escape(info["path"]))
        ours = {
            (method, path)
            for method, path in written
            if method == route.method and pattern.fullmatch(path.replace("{id}", "x"))
        }
        assert ours or route.method == "HEAD", f"{route.method} {route.resource.canonical}"
        left -= ours
    assert not left, f"docs/API.md has routes that are not there: {left}"


def test_the_api_document_has_every_field_and_code() -> None:
    """Fields of our own bodies are named in docs/API.md; its codes and statuses are the tree's."""
    text = (ROOT / "docs" / "API.md").read_text()
    for body in wire.Body.__subclasses__() + wire.Input.__subclasses__():
        for field in body.__struct_fields__:
            assert f"`{field}`" in text, f"{body.__name__}.{field}"
    written = table_rows("API.md", r"(\d{3}) \| `(\w+)`")
    real = {(str(cls.status), code) for code, cls in errors.error_classes().items()}
    assert sorted(written) == sorted(real)


def test_the_configuration_document_has_every_setting() -> None:
    """Keys, which are flags, and plain defaults in docs/CONFIGURATION.md are those of the code."""
    rows = table_rows("CONFIGURATION.md", r"`(\w+)` \| (yes|no) \| ([^|]+)")
    fields = {field.name: field for field in dataclasses.fields(ServeConfig)}
    assert [name for name, _, _ in rows] == list(fields)
    flags = inspect.signature(cli.serve).parameters
    for name, is_flag, said in rows:
        assert is_flag == ("yes" if name in flags else "no"), name
        default = fields[name].default
        if default is None or default is dataclasses.MISSING:
            continue
        text = said.strip("`")
        if fields[name].metadata.get("size"):
            assert parse_bytes(text) == default, name
        elif isinstance(default, bool) or not isinstance(default, int | float):
            assert text == str(default).lower(), name
        else:
            assert float(text) == default, name
