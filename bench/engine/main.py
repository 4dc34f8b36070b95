"""Measure the engine, part by part: ``python bench/run.py engine --parts prefill,decode``.

One process loads the model once and takes the parts in order; parts share an engine where they
can, and the long prompt is computed once. ``--limit-s`` ends it in time: a case that does not
fit is left out, and said so. ``--resume`` skips what the results have already.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

import texts
import torch
from harness import RESULTS
from rig import load_model
from sheet import Sheet
from sizes import REAL, TOY, up_to
from stage import Stage

# In this order few engines are built, and the long prompt's first user is the one that times it.
PARTS = (
    *("prefill", "decode", "agents", "trace", "reuse"),  # one engine, and one more at the end
    *("resident", "streams", "equality", "capacity", "soak"),
)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench/run.py engine", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--model", help="preset:NAME, a checkpoint folder, or toy")
    parser.add_argument("--toy", action="store_true", help="small sizes, nothing recorded")
    parser.add_argument("--tokens", type=Path, help="token ids, as bench/run.py tokens makes them")
    parser.add_argument("--out", type=Path, help=f"folder of the records (default {RESULTS.name})")
    parser.add_argument("--state", type=Path, help="folder of the prefix store; kept")
    parser.add_argument("--limit-s", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--long", type=int, help="tokens of the long prompt, for a rehearsal")
    parser.add_argument("--soak-s", type=float, help="seconds for the soak")
    parser.add_argument("--resume", action="store_true", help="skip what is recorded already")
    given = parser.parse_args(argv)
    unknown = set(given.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}")
    if not given.toy and given.model is None:
        parser.error("--model, or --toy")
    return given


def main(argv: list[str] | None = None) -> int:
    """0 when nothing is red."""
    given = arguments(argv)
    ends_s = time.monotonic() + given.limit_s
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    out = given.out if given.toy else given.out or RESULTS
    with tempfile.TemporaryDirectory(prefix="dsv4-tierd-bench-") as temporary:
        folder = given.state or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        sheet = Sheet(device, out, given.resume, ends_s)
        measure(given, sheet, folder)
    for case in sheet.left_out:
        print(f"left out: {case}")
    return 1 if sheet.reds else 0


def measure(given: argparse.Namespace, sheet: Sheet, folder: Path) -> None:
    """Load the model, then every part in order; a part that fails is red, the next one runs."""
    started = time.monotonic()
    sizes = TOY if given.toy else REAL
    if given.long is not None:
        sizes = up_to(sizes, given.long)
    if given.soak_s is not None:
        sizes = replace(sizes, soak_s=given.soak_s)
    model = load_model(given.model or "toy", sheet.device, folder)
    vocab_size = model.transformer.config.vocab_size
    tokens = texts.load(given.tokens, sizes.long, vocab_size)
    sheet.say(f"model and text in {time.monotonic() - started:.1f} s")
    stage = Stage(model, tokens, sizes, sheet, folder)
    for part in given.parts.split(","):
        started = time.monotonic()
        try:
            importlib.import_module(f"part_{part}").run(stage)
        except Exception as error:  # noqa: BLE001  one part's bug must not cost the others their time
            traceback.print_exc()
            sheet.red(f"{part}: {type(error).__name__}: {error}")
            stage.forget()
        sheet.say(f"{part}: {time.monotonic() - started:.1f} s")
    if sheet.left_s > 0:
        stage.close()
    else:
        stage.forget()
