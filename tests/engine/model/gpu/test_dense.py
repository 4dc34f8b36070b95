"""The plain path on the card against itself on the CPU, in fp32 with TF32 off.

Tolerance 1e-3 on logits of deviation 1.5, as against transformers: sums in another order, and
sines, exponentials and square roots of another library, through six layers. A near tie of a top-k
may be decided differently; the seed has none on these tokens (margins of at least 1e-6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dsv4_tierd.engine.model.checkpoint import Preset, Storage
from dsv4_tierd.engine.model.dense import forward_dense, mtp_dense
from dsv4_tierd.engine.model.transformer import Transformer
from dsv4_tierd.kernels.layout import RowKind

Make = Callable[..., Path]
TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """fp32 products in fp32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def token_ids(count: int) -> torch.Tensor:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("keep", [False, True], ids=["dequantised", "kept"])
@pytest.mark.parametrize("storage", list(Storage))
def test_logits_equal(checkpoint: Make, storage: Storage, keep: bool) -> None:
    """Logits and the MTP block's are the CPU's, for each storage, kept or dequantised."""
    folder, ids = checkpoint(Preset(storage=storage), 1), token_ids(1000)
    cpu = Transformer.load(folder)
    gpu = Transformer.load(folder, torch.float32, "cuda", keep_quantised=keep)
    for forward in (forward_dense, mtp_dense):
        expected, got = forward(cpu, ids), forward(gpu, ids.cuda())
        assert got.is_cuda and float(expected.std()) > 1.0
        assert float((got.cpu() - expected).abs().max()) <= TOLERANCE


def test_everything_is_on_the_card(checkpoint: Make) -> None:
    """No constant stays on the host, in any of the model's parts."""
    folder = checkpoint(Preset(storage=Storage.QUANTISED), 1)
    model = Transformer.load(folder, torch.bfloat16, "cuda", keep_quantised=True)
    pending: list[object] = [model.parameters, model.constants]
    seen = 0
    while pending:
        part = pending.pop()
        if isinstance(part, torch.Tensor):
            assert part.is_cuda
            seen += 1
        elif isinstance(part, tuple):
            pending.extend(part)
        elif hasattr(part, "__dataclass_fields__"):
            pending.extend(getattr(part, name) for name in part.__dataclass_fields__)
    assert seen > 100


def test_fp8_rows(checkpoint: Make) -> None:
    """FP8 rows and keys are encoded on the card as on the CPU: most logits stay as near as fp32's.

    A value at the border of two codes may round apart, which moves single rows by more.
    """
    folder, ids = checkpoint(Preset(), 1), token_ids(300)
    formats = (RowKind.FP8, RowKind.KEY_FP8)
    expected = forward_dense(Transformer.load(folder), ids, *formats)
    got = forward_dense(Transformer.load(folder, device="cuda"), ids.cuda(), *formats).cpu()
    near = (got - expected).abs().amax(1) <= TOLERANCE
    assert float(near.float().mean()) > 0.5
    assert float((got - expected).abs().mean()) < 0.1
