"""The engine's benches at toy size, so that they do not rot, and what they compute themselves."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dsv4_tierd.tiering.check import check

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, str(ROOT / "bench" / "run.py"), "engine", "--toy", "--device", "cpu"]
BENCHES = {
    *("prefill", "decode", "agents", "hit_rate", "fork", "resume", "reuse"),
    *("equality", "capacity", "soak"),
}


@pytest.fixture(scope="module")
def load() -> Iterator[object]:
    """Import a module of bench/engine by its name, as bench/run.py does."""
    folders = [str(ROOT / "bench" / "engine"), str(ROOT / "bench")]
    known = set(sys.modules)
    sys.path[:0] = folders
    yield importlib.import_module
    sys.path[:] = [folder for folder in sys.path if folder not in folders]
    for name in set(sys.modules) - known:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(folders[1]):
            del sys.modules[name]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*RUN, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "BENCH_COMMIT": "tested"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )


def records(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "cpu.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------- the run
@pytest.mark.slow
def test_every_part_runs_and_resumes(tmp_path: Path) -> None:
    """At toy size all parts are green and record figures; run again, nothing is measured twice."""
    out, state = tmp_path / "out", tmp_path / "state"
    done = run("--out", out, "--state", state)
    assert done.returncode == 0, done.stdout + done.stderr
    found = records(out)
    assert {record["bench"] for record in found} == BENCHES
    assert all(record["value"] > 0 and "engine" in record["command"] for record in found)
    equal = [record for record in found if record["bench"] == "equality"]
    assert equal and all(record["value"] == record["goal"] for record in equal)

    again = run("--out", out, "--state", state, "--resume", "--parts", "prefill,agents")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "recorded already" in again.stdout
    assert records(out) == found


def test_what_does_not_fit_is_left_out(tmp_path: Path) -> None:
    """With no time left a case is not begun, and the run says so and is green."""
    done = run("--out", tmp_path, "--limit-s", "0", "--parts", "prefill,agents")
    assert done.returncode == 0, done.stderr
    assert "left out: agents" in done.stdout and "left out: prefill" in done.stdout
    assert not (tmp_path / "cpu.jsonl").exists()


def test_a_part_that_fails_is_red_and_the_next_one_runs(tmp_path: Path) -> None:
    """A store that cannot be opened costs its part, not the ones that need none."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "store").write_text("not a folder")
    done = run("--out", tmp_path, "--state", tmp_path / "state", "--parts", "agents,soak")
    assert done.returncode == 1
    assert "RED  agents" in done.stdout and "RED  soak" not in done.stdout
    assert {record["bench"] for record in records(tmp_path)} == {"soak"}


# ---------------------------------------------------------------- grafts and floors
@pytest.fixture
def rig(load, tmp_path: Path) -> Iterator[object]:
    """A toy engine with a session "stem" of 800 computed words."""
    import torch

    module, sizes = load("rig"), load("sizes")
    model = module.load_model("toy", torch.device("cpu"), tmp_path)
    budgets = {"device_budget_bytes": 8 * sizes.MIB, "host_budget_bytes": 8 * sizes.MIB}
    made = module.Rig(model, hot_rows=128, max_batch=4, chunk_tokens=256, **budgets)
    yield made
    made.close()


def test_a_graft_answers_as_its_source(load, rig) -> None:
    """Copied pages under another salt, or other names, decode as the pages they are copies of."""
    graft, words = load("graft"), load("texts").byte_ids(800)
    stem = rig.open(words)
    rig.generate(stem)
    graft.touch(rig, stem, len(words))
    question = load("rig").spread(3, 5, 256)
    expected = rig.generate(rig.open(words), question, 6)
    assert expected.usage.computed_tokens < 256
    twin = words.copy()
    twin[512:] = (twin[512:] + 1) % 256
    for other, salt, first_block in ((words, "other", 0), (twin, "", 2)):
        graft.graft(rig, words, other, salt, first_block)
        check(rig.tiers, rig.engine.retention)
        found = rig.generate(rig.open(other, salt), question, 1)
        assert found.usage.computed_tokens == expected.usage.computed_tokens
        # The words after the last whole page are computed from their own ids.
        same = found.token_ids == expected.token_ids[:1]
        assert same or first_block
    again = rig.generate(rig.open(words, "other"), question, 6)
    assert again.token_ids == expected.token_ids
    graft.purge_twins(rig, 0)
    check(rig.tiers, rig.engine.retention)


def test_a_rehearsal_has_the_same_measurements(load) -> None:
    """A shorter long prompt cuts every length that is longer, and leaves none empty."""
    sizes = load("sizes")
    short = sizes.up_to(sizes.REAL, 65_536)
    assert short.points == (4_096, 65_536) and short.equal == (8_192, 65_536)
    assert short.session == 65_536 and short.shared < short.session
    assert sizes.up_to(sizes.REAL, sizes.REAL.long) == sizes.REAL


def test_a_batch_decodes_together(load, rig) -> None:
    """All start, none runs ahead, and every timed step is one token of each."""
    module, words = load("rig"), load("texts").byte_ids(300)
    sessions = [rig.open(words[: 60 * number]) for number in (1, 3, 5)]
    requests = [rig.start(session, None, 7) for session in sessions]
    steps = rig.decode(requests)
    assert len(steps.wall_ms) == 7 and steps.batch == 3
    assert all(len(rig.answers[name].token_ids) == 1 + module.WARM_STEPS + 7 for name in requests)


def test_a_recorder_reads_what_a_step_wrote(load, rig) -> None:
    """A runner that keeps its choices in a buffer gives the trace that watched look-ups give."""
    import torch

    recorder, words = load("traces").Recorder, load("texts").byte_ids(800)

    def recorded() -> np.ndarray:
        request = rig.start(rig.open(words), None, 5)
        rig.until_decoding([request])
        found = recorder(rig)
        rig.decode([request])
        return found.trace()

    watched = recorded()
    buffer = torch.full((1, 4, 16), -1, dtype=torch.int32)
    switched = []
    lookup = rig.tiers.c4.lookup

    def written(layer, places, entries, step):
        buffer[layer, : len(entries)] = entries
        return lookup(layer, places, entries, step)

    def record_choices(on: bool) -> torch.Tensor:
        switched.append(on)
        return buffer

    rig.tiers.c4.lookup = written
    rig.engine.runner.record_choices = record_choices
    assert (recorded() == watched).all() and watched.shape == (7, 1, 16)
    assert switched == [True, False]


def test_views_are_counted_once(load) -> None:
    """Overlapping views of one tensor, and a tensor of its own: bytes of memory, not of names."""
    import torch

    base, own = torch.zeros(10, 4), torch.zeros(3)
    count = load("weights").distinct_bytes([base[2:5], base, base[4:6], own])
    assert count == base.numel() * 4 + own.numel() * 4


# ---------------------------------------------------------------- sheets
def test_a_figure_that_is_not_positive_is_red(load, tmp_path: Path) -> None:
    """It is printed and makes the run fail; no record is written."""
    import torch

    sheet = load("sheet").Sheet(torch.device("cpu"), tmp_path, resume=False, ends_s=float("inf"))
    sheet.record("decode", "a case", "step", 0.0, "ms")
    assert sheet.reds and not (tmp_path / "cpu.jsonl").exists()
    sheet.record("decode", "a case", "step", 0.5, "ms", goal=1.0, floor=0.2)
    [record] = records(tmp_path)
    fields = importlib.import_module("harness").Record.__dataclass_fields__
    assert list(record) == list(fields) and record["value"] == 0.5


# ---------------------------------------------------------------- traces and policies
def walk(seed: int, steps: int = 40, chosen: int = 8, rows: int = 200) -> np.ndarray:
    """[steps, 1, chosen]: rows that are mostly the last step's."""
    draw = np.random.default_rng(seed)
    now = draw.choice(rows, chosen, replace=False)
    found = []
    for _ in range(steps):
        kept = now[draw.random(chosen) < 0.7]
        others = draw.permutation(np.setdiff1d(np.arange(rows), kept))[: chosen - len(kept)]
        now = np.concatenate([kept, others])
        found.append(np.sort(now))
    return np.array(found, np.int32)[:, None]


def test_a_trace_is_read_back_as_it_was_saved(load, tmp_path: Path) -> None:
    """Any entries up to a million tokens' worth, with gaps of every size and missing ones."""
    draw = np.random.default_rng(5)
    trace = np.sort(draw.integers(0, 1 << 18, (6, 3, 64)), axis=-1).astype(np.int32)
    trace[:, :, :3] = -1
    trace[0, 0] = -1
    traces = load("traces")
    traces.save(tmp_path / "trace.npz", trace, "random")
    found, about = traces.load(tmp_path / "trace.npz")
    assert (found == trace).all() and about == "random"


@pytest.mark.parametrize("size", [16, 24, 64])
def test_lru_misses_what_a_queue_misses(load, size: int) -> None:
    """The whole-step LRU counts what a naive one counts that drops the oldest rows."""
    trace = walk(1)
    steps = [step.astype(np.int64) for step in trace[:, 0]]
    used: dict[int, int] = {}
    naive = []
    for now, step in enumerate(steps):
        naive.append(sum(row not in used for row in step.tolist()))
        used |= dict.fromkeys(step.tolist(), now)
        # Of equally old rows either choice is LRU: the count must not depend on it here.
        while len(used) > size:
            del used[min(used, key=lambda row: (used[row], row))]
    found = load("hit_rates").lru(steps, size, 200)
    assert abs(int(found.sum()) - sum(naive)) <= len(steps) // 10


def test_belady_is_the_fewest_misses_there_are(load) -> None:
    """On small traces no choice of what to drop, tried exhaustively, misses less."""
    hit_rates = load("hit_rates")
    for seed in range(4):
        steps = [step.astype(np.int64) for step in walk(seed, 9, 2, 7)[:, 0]]
        assert int(hit_rates.belady(steps, 4, 7).sum()) == fewest(steps, 4)


def fewest(steps: list[np.ndarray], size: int) -> int:
    """The least misses over every choice of rows to keep."""
    from itertools import combinations

    states = {frozenset(): 0}
    for step in steps:
        rows = frozenset(step.tolist())
        following: dict[frozenset[int], int] = {}
        for held, misses in states.items():
            others = sorted(held - rows)
            room = min(len(others), size - len(rows))
            for kept in combinations(others, room):
                state = rows | frozenset(kept)
                cost = misses + len(rows - held)
                following[state] = min(cost, following.get(state, cost))
        states = following
    return min(states.values())


def test_our_policy_lies_between_belady_and_chance(load) -> None:
    """Never fewer misses than the optimum, and near exact LRU where there are many slots."""
    hit_rates = load("hit_rates")
    rates = {
        (rate.policy, rate.hot_rows): rate.percent
        for rate in hit_rates.hit_rates(walk(2, 400), [16, 64, 128])
    }
    for size in (16, 64, 128):
        assert rates["belady", size] >= rates["ours", size] >= rates["lru", size] - 3.0


def test_the_kept_trace_is_what_the_documents_say(load) -> None:
    """Its rows are whole choices of 512, and on it our policy is nearly exact LRU."""
    trace, about = load("traces").load(ROOT / "bench" / "results" / "trace.npz")
    assert trace.shape[2] == 512 and "random weights" in about
    assert (np.diff(trace[trace.min(-1) >= 0], axis=-1) > 0).all()
    ours, lru = load("hit_rates").hit_rates(trace[:48], [4096], ["ours", "lru"])
    assert abs(ours.percent - lru.percent) < 0.5


def test_probed_slots_are_the_kernels(load) -> None:
    """The hash in arrays is the kernel's, spelled out in whole numbers, sector by sector."""
    hit_rates = load("hit_rates")
    for seed, probe, slots in ((0, 0, 1024), (0x85EBCA6B * 7 + 3, 5, 4096), (12345, 17, 64)):
        h = seed * 0x9E3779B1 % 2**32
        h ^= h >> 15
        sectors = slots // 8
        expected = []
        for which in range(4):
            if probe < 16:
                mixed = (h + (probe * 4 + which) * 0x85EBCA77) * 0xC2B2AE3D % 2**32
                mixed ^= mixed >> 13
                sector = mixed * 0x27D4EB2F % 2**32 * sectors >> 32
            else:
                sector = ((h * sectors >> 32) + (probe - 16) * 4 + which) % sectors
            expected += range(sector * 8, sector * 8 + 8)
        [found] = hit_rates._probed(np.array([seed], np.uint64), probe, slots)
        assert found.tolist() == sorted(expected)


def test_the_default_is_where_the_curve_bends(load) -> None:
    """The smallest size from which doubling brings less than a point, at most 8 steps' rows."""
    module: ModuleType = load("hit_rates")
    rates = [
        module.Rate("ours", size, percent, 0.0)
        for size, percent in ((1024, 50.0), (2048, 80.0), (4096, 91.0), (8192, 91.9))
    ]
    assert module.knee(rates) == module.default_hot_rows(rates, 512) == 4096
    assert module.default_hot_rows(rates, 1024) == 4096
    assert module.default_hot_rows(rates, 256) == 2048


# ---------------------------------------------------------------- text
def test_the_text_is_the_same_every_time(load) -> None:
    """Ids are below the vocabulary, as many as asked for, and equal from call to call."""
    texts = load("texts")
    first, again = texts.load(None, 5_000, 512), texts.load(None, 5_000, 512)
    assert len(first) == 5_000 and first.max() < 512 and (first == again).all()
    assert len(Counter(first.tolist())) > 40
    with pytest.raises(ValueError, match="below"):
        texts.load(None, 5_000, 64)
