"""Models made of a seed: what they are named, what is in them, where they fit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from dsv4_tierd.engine.model import noise, weights
from dsv4_tierd.engine.model.config import ConfigError, load_config
from dsv4_tierd.engine.model.dense import forward_dense
from dsv4_tierd.engine.model.digest import weights_digest
from dsv4_tierd.engine.model.folder import WeightsError
from dsv4_tierd.engine.model.presets import SEEDED, PresetError, Storage, model_name, parse_preset
from dsv4_tierd.engine.model.seeded import Seeded
from dsv4_tierd.engine.model.shapes import shapes, weight_bytes
from dsv4_tierd.engine.model.transformer import Transformer
from dsv4_tierd.engine.vocabulary import DEEPSEEK_VOCAB_SIZE, find_tokenizer
from dsv4_tierd.kernels.weight import Weight, WeightKind

# The rows that the ops want (512 / 64, keys of 128 from 64 heads), all else small.
SMALL = (
    "preset:flash-mini?layers=SCH&hidden_size=256&vocab_size=512&heads=8&q_lora=128"
    "&o_groups=2&o_lora=128&experts=8&experts_per_token=2&moe_inter=128"
)


def test_flash_mini_is_flash() -> None:
    """All of V4-Flash's numbers, but for 16 routed experts."""
    config = load_config("preset:flash-mini")
    assert config.num_hidden_layers == 43 and config.hidden_size == 4096
    assert config.compress_ratios == (0, 0, *(4, 128) * 20, 4)
    assert (len(config.c4_layers), len(config.c128_layers)) == (21, 20)
    assert sum(config.hash_layers) == 3 and config.num_nextn_predict_layers == 1
    assert (config.vocab_size, config.max_position_embeddings) == (129280, 1 << 20)
    assert (config.num_attention_heads, config.head_dim, config.qk_rope_head_dim) == (64, 512, 64)
    assert (config.q_lora_rank, config.o_groups, config.o_lora_rank) == (1024, 8, 1024)
    assert (config.sliding_window, config.swiglu_limit) == (128, 10.0)
    assert (config.index_n_heads, config.index_head_dim, config.index_topk) == (64, 128, 512)
    assert (config.n_routed_experts, config.num_experts_per_tok) == (16, 6)
    assert (config.moe_intermediate_size, config.routed_scaling_factor) == (2048, 1.5)
    assert config.yarn is not None and config.yarn.original_max_position_embeddings == 65536


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("preset:flash", "preset:flash does not exist; there is preset:flash-mini"),
        ("preset:flash-mini?depth=4", "depth is none of layers, hash_layers"),
        ("preset:flash-mini?experts=four", "experts cannot be 'four'"),
        ("preset:flash-mini?experts=-1", "experts cannot be '-1'"),
        ("preset:flash-mini?swiglu_limit=nan", "swiglu_limit cannot be 'nan'"),
        ("preset:flash-mini?mtp=2", "mtp cannot be '2'"),
        ("preset:flash-mini?storage=int3", "storage cannot be 'int3'"),
        ("preset:flash-mini?layers=SX", "layers are letters of SCH"),
        ("preset:flash-mini?layers=", "layers are letters of SCH"),
    ],
)
def test_what_is_no_preset(model: str, message: str) -> None:
    """A name, a key or a value that cannot be is named."""
    with pytest.raises(PresetError, match=message):
        parse_preset(model)


def test_sizes_that_do_not_fit_one_another() -> None:
    """Sizes given one by one are checked like those of a file."""
    with pytest.raises(ConfigError, match="o_groups 3"):
        load_config("preset:flash-mini?o_groups=3")


def test_sizes_and_names() -> None:
    """Any size can be given; the model is called by its preset; a folder is none."""
    seeded = parse_preset(SMALL + "&seed=7&mtp=false&storage=quantised")
    assert seeded is not None and seeded.seed == 7
    assert not seeded.preset.mtp and seeded.preset.storage is Storage.QUANTISED
    assert replace(seeded.preset, mtp=True).head_dim == SEEDED["flash-mini"].head_dim
    assert model_name(SMALL) == model_name("preset:flash-mini") == "flash-mini"
    assert model_name("some/folder/v4") == "v4" and parse_preset("some/folder/v4") is None


def test_tokenizers() -> None:
    """DeepSeek's words where the vocabulary is DeepSeek's; otherwise token ids alone."""
    assert find_tokenizer("preset:flash-mini", DEEPSEEK_VOCAB_SIZE) is not None
    assert find_tokenizer(SMALL, 512) is None


def test_the_digest_is_the_recipe() -> None:
    """Weights are named without being made; any size, the storage or the seed changes the name."""
    first = weights_digest(SMALL)
    assert len(first) == 32 and weights_digest(SMALL + "&seed=0&experts=8") == first
    others = ["&seed=1", "&experts=9", "&storage=quantised", "&mtp=false", "&swiglu_limit=9"]
    assert len({first, *(weights_digest(SMALL + other) for other in others)}) == 6


def test_values_stay_what_they_are() -> None:
    """The recipe's number names its values: other values need another number."""
    seeded = parse_preset(SMALL)
    assert seeded is not None
    tensors = Seeded(seeded, torch.device("cpu"))
    matrix, scale = tensors.read("layers.0.attn.wq_a.weight", (128, 256))
    assert scale is not None
    assert matrix.view(torch.uint8)[0, :8].tolist() == [81, 109, 90, 212, 237, 217, 239, 105]
    assert scale.view(torch.uint8).tolist() == [[117, 116]]
    assert tensors.read("layers.0.attn_norm.weight", (256,))[0][:4].tolist() == [
        0.9375,
        1.1484375,
        1.2265625,
        0.81640625,
    ]
    assert tensors.read("layers.0.ffn.gate.tid2eid", (512, 2))[0][:3].tolist() == [
        [7, 0],
        [0, 5],
        [3, 5],
    ]


def test_noise_is_a_function_of_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits do not depend on how many are made at a time; other names have other bits."""
    table = torch.arange(256, dtype=torch.uint8)
    whole = noise.fill(torch.empty(1003, dtype=torch.uint8), "a", table)
    monkeypatch.setattr(noise, "_SPAN", 64)
    assert torch.equal(noise.fill(torch.empty(1003, dtype=torch.uint8), "a", table), whole)
    other = noise.fill(torch.empty(1003, dtype=torch.uint8), "b", table)
    assert float((whole == other).float().mean()) < 0.03


def test_noise_is_even() -> None:
    """Every byte is as likely as any other, also beside its neighbour."""
    bits = noise.words("even", 0, 1 << 17, torch.device("cpu")).view(torch.uint8).long()
    counts = torch.bincount(bits, minlength=256).double()
    expected = bits.numel() / 256
    assert float(((counts - expected) ** 2).sum() / expected) < 400  # chi squared of 255: 255 +- 23
    pairs = torch.bincount(bits[0::2] // 16 * 16 + bits[1::2] // 16, minlength=256).double()
    assert float(((pairs - expected / 2) ** 2).sum() / (expected / 2)) < 400


def test_splitmix_is_the_published_one() -> None:
    """The first numbers of seed 0 are the reference's."""
    mixed = torch.tensor([0x9E3779B97F4A7C15 - (1 << 64)]) * torch.arange(1, 4)
    assert [value % (1 << 64) for value in noise.mix(mixed).tolist()] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@pytest.mark.parametrize("storage", list(Storage))
def test_matrices_have_the_deviation_they_should(storage: Storage) -> None:
    """Whatever the storage: outputs of deviation 1.5, of half where a sublayer ends."""
    seeded = parse_preset(SMALL + f"&storage={storage.value}")
    assert seeded is not None
    tensors = Seeded(seeded, torch.device("cpu"))
    tolerance = 0.5 if storage is Storage.QUANTISED else 0.1  # scales are powers of two
    for name, gain in (("wq_a", 1.5), ("wo_b", 0.5)):
        weight = Weight(*tensors.read(f"layers.0.attn.{name}.weight", (1024, 1024)))
        assert float(weight.dense().std()) == pytest.approx(gain / 32, rel=0.1)
    weight = Weight(*tensors.read("layers.0.ffn.experts.1.w1.weight", (1024, 1024)))
    assert float(weight.dense().std()) == pytest.approx(1.5 / 32, rel=tolerance)
    if weight.scales is not None:
        assert len(weight.scales.float().unique()) == 3


@torch.no_grad()
@pytest.mark.parametrize("storage", [Storage.FP8, Storage.QUANTISED, Storage.BF16])
def test_kept_or_dequantised(storage: Storage) -> None:
    """A seeded model kept in FP8 and MXFP4 gives the logits of its dequantised self."""
    model, ids = SMALL + f"&storage={storage.value}", torch.arange(300) % 512
    kept = Transformer.load(model, keep_quantised=True)
    logits = forward_dense(kept, ids)
    assert torch.equal(logits, forward_dense(Transformer.load(model), ids))
    assert 1.5 < float(logits.std()) < 5 and len(logits.argmax(-1).unique()) > 50
    routed = kept.parameters.layers[1].moe.experts.w13
    kinds = {Storage.FP8: WeightKind.FP8, Storage.QUANTISED: WeightKind.FP4}
    assert (routed.kind if isinstance(routed, Weight) else None) is kinds.get(storage)


def test_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model on a CPU is refused, with what it would take, before anything is made."""
    monkeypatch.setattr(weights, "free_bytes", lambda device: 20 << 30)
    with pytest.raises(WeightsError, match=r"needs 9\d\.\d GiB as float32 on cpu; 20\.0 are free"):
        Transformer.load("preset:flash-mini")
    with pytest.raises(WeightsError, match=r"needs 2\d\.\d GiB as stored on cpu; 20\.0 are free"):
        Transformer.load("preset:flash-mini", keep_quantised=True)


def test_free_memory_is_measured() -> None:
    """What is free is more than nothing and no more than the machine has."""
    assert 1 << 26 < weights.free_bytes(torch.device("cpu")) < 1 << 45


def test_what_a_model_takes() -> None:
    """The memory that is asked for is what the loaded model has, as stored and dequantised."""
    seeded = parse_preset(SMALL)
    assert seeded is not None
    stored = 0
    tensors = Seeded(seeded, torch.device("cpu"))
    for name, shape in shapes(seeded.preset):
        stored += sum(part.nbytes for part in tensors.read(name, shape) if part is not None)
    assert weight_bytes(seeded.preset) == stored
    numbers = sum(torch.Size(shape).numel() for _, shape in shapes(seeded.preset))
    assert weight_bytes(seeded.preset, 4) == 4 * numbers


def test_presets_import_no_torch() -> None:
    """The daemon reads what a preset is without a second and 400 MB of torch."""
    code = (
        "import sys, dsv4_tierd.engine.model.shapes, dsv4_tierd.engine.vocabulary;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
