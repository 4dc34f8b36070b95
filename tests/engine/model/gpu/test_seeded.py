"""Models made of a seed on the card: the CPU's bits, in seconds, and sane through 43 layers."""

from __future__ import annotations

import time

import pytest
import torch

from dsv4_tierd.engine.model.dense import forward_dense
from dsv4_tierd.engine.model.presets import parse_preset
from dsv4_tierd.engine.model.seeded import Seeded
from dsv4_tierd.engine.model.shapes import shapes, weight_bytes
from dsv4_tierd.engine.model.transformer import Transformer

SMALL = (
    "preset:flash-mini?layers=SCH&hidden_size=256&vocab_size=512&heads=8&q_lora=128"
    "&o_groups=2&o_lora=128&experts=8&experts_per_token=2&moe_inter=128"
)
LOAD_S_MAX = 60.0


@pytest.mark.parametrize("storage", ["fp8", "quantised", "bfloat16", "float32"])
def test_the_bits_are_the_same_on_every_device(storage: str) -> None:
    """Every tensor and scale made on the card is the CPU's, bit for bit."""
    seeded = parse_preset(f"{SMALL}&storage={storage}&seed=3")
    assert seeded is not None
    card, host = (Seeded(seeded, torch.device(name)) for name in ("cuda", "cpu"))
    for name, shape in shapes(seeded.preset):
        for made, known in zip(card.read(name, shape), host.read(name, shape), strict=True):
            assert (made is None) == (known is None), name
            if made is not None and known is not None:
                assert made.is_cuda and made.dtype is known.dtype
                assert torch.equal(made.cpu().view(torch.uint8), known.view(torch.uint8)), name


@torch.no_grad()
@pytest.mark.parametrize("storage", ["fp8", "quantised"])
def test_flash_mini(storage: str) -> None:
    """The whole model: made in seconds, as large as said, finite, and of many minds."""
    model = f"preset:flash-mini?storage={storage}"
    seeded = parse_preset(model)
    assert seeded is not None
    torch.cuda.empty_cache()
    before, start = torch.cuda.memory_allocated(), time.monotonic()
    flash = Transformer.load(model, torch.bfloat16, "cuda", keep_quantised=True)
    torch.cuda.synchronize()
    assert time.monotonic() - start < LOAD_S_MAX
    # Norms are held in fp32 where a checkpoint has bf16, and memory is handed out in steps.
    held = torch.cuda.memory_allocated() - before
    assert held == pytest.approx(weight_bytes(seeded.preset), rel=0.01)
    ids = torch.randint(0, 129280, (400,), generator=torch.Generator().manual_seed(1))
    logits = forward_dense(flash, ids.cuda())
    assert bool(logits.isfinite().all()) and 1.5 < float(logits.std()) < 6.0
    assert len(logits.argmax(-1).unique()) > 200
