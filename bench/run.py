"""Run the kernel benches: ``python bench/run.py topk swap_in`` or, for all, no name.

``--toy`` runs small sizes (on a CPU through the twins) and records nothing, so that the benches
do not rot. Exits 1 when an op's check is red. Of the engine as a whole, each with its own
``--help``: ``run.py tokens`` (text to measure with), ``run.py engine``, ``run.py hit_rates``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from harness import RESULTS, Case, measure_all

KERNELS = Path(__file__).parent / "kernels"
ENGINE = Path(__file__).parent / "engine"
WHOLE = {"tokens": "texts", "engine": "main", "hit_rates": "hit_rates"}


def names() -> list[str]:
    """The benches there are, one file each."""
    return sorted(path.stem.removeprefix("bench_") for path in KERNELS.glob("bench_*.py"))


def load(name: str) -> Callable[..., Iterable[Case]]:
    """The ``cases(toy)`` function of ``bench/kernels/bench_<name>.py``."""
    path = KERNELS / f"bench_{name}.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cases: Callable[..., Iterable[Case]] = module.cases
    return cases


def main(argv: list[str] | None = None) -> int:
    """Measure the named benches; 0 when every check is green."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in WHOLE:
        sys.path.insert(0, str(ENGINE))
        return int(importlib.import_module(WHOLE[argv[0]]).main(argv[1:]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bench", nargs="*", help=f"of {', '.join(names())}; none: all")
    parser.add_argument("--toy", action="store_true", help="small sizes, nothing recorded")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument(
        "--results", type=Path, default=Path(os.environ.get("BENCH_RESULTS", RESULTS))
    )
    given = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not given.toy:
        parser.error("no GPU here: only --toy sizes run on a CPU")
    red = []
    for name in given.bench or names():
        chosen = (case for case in load(name)(toy=given.toy) if given.case in case.name)
        red += measure_all(name, chosen, device, None if given.toy else given.results)
    return 1 if red else 0


if __name__ == "__main__":
    raise SystemExit(main())
