"""What the ops hand to their CUDA C++ kernels fits the kernels' parameters: seen without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsv4_tierd.kernels import index_scores, nvrtc, sparse_attention
from dsv4_tierd.kernels.layout import RowFormat, RowKind, row_pool

CPU = torch.device("cpu")
Launches = list[tuple[str, tuple[object, ...]]]


def parameters(file: str, kernel: str) -> list[str]:
    """The parameters of a kernel, as its source declares them."""
    text = re.sub(r"//.*", "", (nvrtc.CSRC / file).read_text())
    found = re.search(rf"__global__[^;{{]*?\b{kernel}\(([^)]*)\)", text)
    assert found is not None, kernel
    return [one.strip() for one in found[1].split(",")]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Every launch, in place of a GPU: (kernel, arguments), counted and typed as it is made."""
    made: Launches = []

    class Recorder:
        def __init__(self, file: str, kernel: str) -> None:
            self.file, self.kernel = file, kernel

        def launch(self, shape: nvrtc.Shape, *arguments: object) -> None:
            assert shape.blocks > 0
            declared = parameters(self.file, self.kernel)
            assert len(arguments) == len(declared)
            for text, value in zip(declared, arguments, strict=True):
                is_pointer = "*" in text
                assert isinstance(value, Tensor) or value is None if is_pointer else True, text
                assert isinstance(value, int) or is_pointer, text
            made.append((self.kernel, arguments))

    def load(file: str, kernel: str, _: torch.device) -> Recorder:
        return Recorder(file, kernel)

    yes: Callable[..., bool] = lambda *_: True  # noqa: E731
    monkeypatch.setattr(nvrtc, "load", load)
    for module in (index_scores, sparse_attention):
        monkeypatch.setattr(module, "_compiled", yes)
        monkeypatch.setattr(module, "runs_kernels", yes)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", [64, 1 << 14])
def test_sparse_attention(launches: Launches, dtype: torch.dtype, split: int) -> None:
    """One launch for a whole span; a merge after it where keys are split."""
    rows = row_pool(sparse_attention.ROW, 300, 64, CPU)
    q, ids = torch.zeros(2, 70, 512, dtype=dtype), torch.zeros(2, 100, dtype=torch.int32)
    held = sparse_attention.workspace(2, 70, 256, CPU, split)
    turn = sparse_attention.InverseRope(torch.zeros(2, dtype=torch.int64), torch.zeros(32))
    for inverse in (None, turn):
        launches.clear()
        sparse_attention.sparse_attention(
            q, rows, ids, rows, ids, torch.zeros(70), 0.1, scratch=held, inverse=inverse
        )
        merged = ["sparse_attention", "sparse_attention_merge"]
        assert [kernel for kernel, _ in launches] == merged[: 2 if split == 64 else 1]


def test_sparse_attention_refuses_what_its_kernel_cannot_read(launches: Launches) -> None:
    """Ids of another type, rows that start between 16 bytes, queries in fp16."""
    rows = row_pool(sparse_attention.ROW, 300, 64, CPU)
    q, ids = torch.zeros(1, 64, 512), torch.zeros(1, 100, dtype=torch.int32)
    sink = torch.zeros(64)
    attend = sparse_attention.sparse_attention
    with pytest.raises(ValueError, match="window_ids"):
        attend(q, rows, ids.long(), rows, ids, sink, 0.1)
    with pytest.raises(ValueError, match="fp32 or bf16"):
        attend(q.half(), rows, ids, rows, ids, sink, 0.1)
    shifted = torch.zeros(2, 64 * 584 + 8, dtype=torch.uint8)[:, 8:]
    strange = type(rows)(
        rows.format,
        shifted[:, : 64 * 576].unflatten(1, (64, 576)),
        shifted[:, 64 * 576 :].unflatten(1, (64, 8)),
    )
    with pytest.raises(ValueError, match="16 bytes"):
        attend(q, strange, ids, rows, ids, sink, 0.1)
    assert not launches


@pytest.mark.parametrize("per_page", [1, 2, 3, 61, 64, 69, 1000, (1 << 20) + 1])
def test_ids_are_divided_by_a_multiplication(per_page: int) -> None:
    """Page and place of every id up to 2**31, from the two numbers that the kernel gets."""
    rows = row_pool(sparse_attention.ROW, per_page, per_page, torch.device("meta"))
    magic, shift = sparse_attention._scope(rows)[7:9]
    assert isinstance(magic, int)
    assert magic < 1 << 32
    assert isinstance(shift, int)
    near = range(-3, 4)
    ids = {k * per_page + d for k in (0, 1, 2, 12345, (1 << 31) // per_page) for d in near}
    for number in (*ids, (1 << 31) - 1):
        if 0 <= number < 1 << 31:
            assert number * magic >> shift == number // per_page


def test_index_scan(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode with and without a plan, and prefill, are launches of one kernel."""
    monkeypatch.setattr(index_scores, "_processors", lambda _: 3)
    keys = row_pool(RowFormat(RowKind.KEY_FP8, 128), 256, 64, CPU)
    codes = torch.zeros(2, 64, 128).to(torch.float8_e4m3fn)
    queries = index_scores.Queries(codes, torch.zeros(2, 64))
    table, visible = torch.zeros(2, 3, dtype=torch.int32), torch.full((2,), 100, dtype=torch.int32)
    plan = index_scores.new_plan(2, 3, CPU)
    index_scores.index_scores_decode(queries, None, keys, table, visible)
    index_scores.index_scores_decode(queries, None, keys, table, visible, plan=plan)
    index_scores.index_scores(queries, None, keys, table[0], visible)
    assert [kernel for kernel, _ in launches] == ["index_scan"] * 3


def test_ops_import_and_run_their_twins_without_triton() -> None:
    """A machine without a GPU needs no GPU package: the modules load and the twins run."""
    script = """
import sys
sys.modules["triton"] = None
import torch
from dsv4_tierd.kernels import compress, index_scores, row_store, sparse_attention
from dsv4_tierd.kernels.layout import row_pool
rows = row_pool(sparse_attention.ROW, 4, 4, torch.device("cpu"))
ids = torch.arange(2, dtype=torch.int32)
row_store.row_store(torch.randn(2, 512), torch.ones(512), 1e-6, ids, torch.ones(32), rows, ids)
out = sparse_attention.sparse_attention(
    torch.randn(2, 2, 512), rows, ids.expand(2, 2), None, None, torch.zeros(2), 0.04
)
assert out.isfinite().all() and out.any()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
