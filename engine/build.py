"""An engine from its configuration: model, budgets, tiers, store."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from blake3 import blake3
from tokenizers import Tokenizer

from dsv4_tierd.engine.config import EngineConfig
from dsv4_tierd.engine.gpu.prefill import SCORE_ROWS
from dsv4_tierd.engine.gpu.runner import DeviceRunner, why_not
from dsv4_tierd.engine.loop import Engine, EngineOptions
from dsv4_tierd.engine.messages import ToDaemon
from dsv4_tierd.engine.model.config import ModelConfig, load_config
from dsv4_tierd.engine.model.digest import weights_digest
from dsv4_tierd.engine.model.transformer import Transformer
from dsv4_tierd.engine.runner import Runner
from dsv4_tierd.engine.verbs import Verbs
from dsv4_tierd.kernels.layout import PAGE_TOKENS, PageLayout, RowFormat, RowKind
from dsv4_tierd.kernels.tail_layout import TailLayout
from dsv4_tierd.tiering.errors import InvalidRequest, StoreUnavailable, UnsupportedCombination
from dsv4_tierd.tiering.manager import TierConfig, TierManager
from dsv4_tierd.tiering.pinned import Progress
from dsv4_tierd.tiering.plan import Budgets, ModelSizes, Plan, plan
from dsv4_tierd.tiering.retention import Retention
from dsv4_tierd.tiering.store.identity import StoreIdentity
from dsv4_tierd.tiering.store.late import LateStore, LateTwoTiers
from dsv4_tierd.tiering.store.open import open_store as open_spec
from dsv4_tierd.tiering.store.open import parse_spec
from dsv4_tierd.tiering.store.protocol import PrefixStore

log = logging.getLogger("dsv4_tierd.engine")

LAYOUT_VERSION = 1
CHUNK_TOKENS = 8192  # on a GPU: streaming a layer's rows hides behind computing them
CHUNK_TOKENS_MAX = 65_535  # rows of a grid's second dimension
CHUNK_TOKENS_BESIDE = 1024  # while others decode: one layer takes about a decode step's time


@dataclass(frozen=True, slots=True)
class Layouts:
    """The byte layouts that a model has under one choice of row formats."""

    pages: PageLayout
    tail: TailLayout

    @classmethod
    def of(cls, model: ModelConfig, kind: RowKind) -> Layouts:
        """Raises UnsupportedCombination if the model's rows cannot have this format."""
        key_kind = RowKind.KEY_FP8 if kind is RowKind.FP8 else kind
        try:
            latent = RowFormat(kind, model.head_dim, model.qk_rope_head_dim)
        except ValueError as error:
            raise UnsupportedCombination(
                f"--kv-dtype {kind.value}: {error}", param="kv_dtype"
            ) from error
        key = RowFormat(key_kind, model.index_head_dim, model.qk_rope_head_dim)
        tail = TailLayout(
            latent=latent,
            key=key,
            window=model.sliding_window,
            layer_count=model.num_hidden_layers,
            c4_count=len(model.c4_layers),
            c128_count=len(model.c128_layers),
        )
        return cls(PageLayout(latent, key, model.c4_layers, model.c128_layers), tail)


def row_kind(kv_dtype: str) -> RowKind:
    """The row format that a --kv-dtype names; on CPU ``auto`` is fp32."""
    return RowKind("fp32" if kv_dtype == "auto" else kv_dtype)


def resolved(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The configuration with nothing left to chance: device, row format, runner.

    Raises UnsupportedCombination for a GPU that is not there, or a model that the ops do not take.
    """
    there = torch.cuda.is_available()
    device = ("cuda" if there else "cpu") if config.device == "auto" else config.device
    if device == "cuda" and not there:
        raise UnsupportedCombination("--device cuda: torch finds no GPU", param="device")
    kv_dtype, runner = config.kv_dtype, config.runner
    if kv_dtype == "auto" and device == "cuda" and why_not(model, RowKind.FP8) is None:
        kv_dtype = "fp8"
    reason = why_not(model, row_kind(kv_dtype))
    if runner == "auto":
        runner = "kernels" if device == "cuda" and reason is None else "plain"
        if device == "cuda" and reason is not None:
            log.warning("the plain engine runs on the GPU, slowly: %s", reason)
    if device == "cuda" and runner == "kernels" and reason is not None:
        raise UnsupportedCombination(reason, param="runner")
    chunk_tokens = config.chunk_tokens
    if chunk_tokens is None:
        chunk_tokens = CHUNK_TOKENS if device == "cuda" and runner == "kernels" else 512
    return msgspec.structs.replace(
        config, device=device, kv_dtype=kv_dtype, runner=runner, chunk_tokens=chunk_tokens
    )


def make_plan(config: EngineConfig, model: ModelConfig, layouts: Layouts) -> Plan:
    """Every pool's size. Raises ExceedsCapacity if the budgets hold nothing."""
    config = resolved(config, model)
    on_device = config.runner == "kernels"
    whole = _whole_pages(config)
    sizes = ModelSizes(
        score_rows=SCORE_ROWS if on_device else 0,
        c4_layers=len(model.c4_layers),
        index_topk=model.index_topk,
        row_bytes=layouts.pages.latent.row_bytes,
        mirror_page_bytes=layouts.pages.mirror_bytes,
        device_page_bytes=layouts.pages.mirror_bytes if whole else layouts.pages.device_bytes,
        tail_slot_bytes=layouts.tail.slot_bytes,
        resume_bytes=layouts.tail.resume_bytes,
        context_length=model.max_position_embeddings,
    )
    budgets = Budgets(
        device_bytes=config.device_budget_bytes,
        host_bytes=config.host_budget_bytes,
        max_batch=config.max_batch,
        hot_rows=config.hot_rows,
        tiered=config.tiering == "hisparse",
        resume_bytes=config.resume_budget_bytes,
        idle_tails=config.idle_tails,
    )
    return plan(sizes, budgets)


def store_identity(config: EngineConfig, model: ModelConfig, layouts: Layouts) -> StoreIdentity:
    """What cached bytes depend on, for this checkpoint and these formats."""
    config = resolved(config, model)
    described = json.dumps(asdict(model), sort_keys=True).encode()
    return StoreIdentity(
        weights_digest=weights_digest(config.model, cache_folder()).hex(),
        model_config_digest=blake3(described).hexdigest(),
        row_format=layouts.pages.latent.kind.value,
        key_format=layouts.pages.key.kind.value,
        compute_dtype=str(compute_dtype(config)).removeprefix("torch."),
        state_dtype="float32",
        layout_version=LAYOUT_VERSION,
        page_tokens=PAGE_TOKENS,
    )


def cache_folder() -> Path:
    """Where small derived files are remembered ($XDG_CACHE_HOME/dsv4-tierd)."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dsv4-tierd"


def open_store(config: EngineConfig, identity: StoreIdentity) -> PrefixStore | None:
    """The prefix store that ``--store`` names; None if tiering is off.

    Raises InvalidRequest, UnsupportedCombination, StoreUnavailable (where it may not wait).
    """
    if config.tiering == "off":
        return None

    def open_it() -> PrefixStore:
        found = open_spec(config.store, identity, config.store_bytes_max)
        assert found is not None, "no store is no store that waits"
        return found

    try:
        return open_spec(config.store, identity, config.store_bytes_max)
    except StoreUnavailable as error:
        if not config.store_may_wait:
            raise
        log.warning("the engine starts without its store: %s", error.message)
        late = LateTwoTiers if len(parse_spec(config.store)) == 2 else LateStore
        return late(open_it, identity.digest, config.store_bytes_max)


def compute_dtype(config: EngineConfig) -> torch.dtype:
    """What activations are kept in, under a resolved configuration."""
    on_ops = config.runner == "kernels" and config.device == "cuda"
    return torch.bfloat16 if on_ops else torch.float32


def load_model(config: EngineConfig) -> Transformer:
    """The weights on the engine's device: as they are stored for the ops, else in fp32.

    Raises ConfigError, WeightsError, PresetError, UnsupportedCombination.
    """
    config = resolved(config, load_config(config.model))
    keep = config.runner == "kernels"
    return Transformer.load(config.model, compute_dtype(config), config.device, keep_quantised=keep)


def _whole_pages(config: EngineConfig) -> bool:
    """Whether device pages hold C4 rows too."""
    return config.runner == "kernels" and config.tiering != "hisparse"


def _make_runner(config: EngineConfig, model: Transformer, tiers: TierManager) -> Runner:
    if config.runner == "plain":
        return Runner(model, tiers, config.max_batch)
    dtype = compute_dtype(config)
    assert config.chunk_tokens is not None
    return DeviceRunner(
        model, tiers, config.max_batch, config.chunk_tokens, dtype, config.side_streams
    )


def _take_own_stream(device: torch.device) -> None:
    """What follows is queued on a stream that takes copies in batches and captures.

    The default one does not, and no such stream waits for it by itself.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # where the weights are made
    torch.cuda.set_stream(stream)


def build_engine(
    config: EngineConfig,
    model: Transformer,
    send: Callable[[ToDaemon], None],
    tokenizer: Tokenizer | None = None,
    store: PrefixStore | None = None,
    identity: bytes = bytes(32),
    pinning: Progress | None = None,
) -> tuple[Engine, Verbs, Plan]:
    """Allocate the tiers and put the loop on top. Raises ExceedsCapacity, InvalidRequest."""
    config = resolved(config, model.config)
    chunk_tokens = config.chunk_tokens
    if chunk_tokens is None or not 0 < chunk_tokens <= CHUNK_TOKENS_MAX:
        raise InvalidRequest(
            f"chunk_tokens {chunk_tokens} is not in 1..{CHUNK_TOKENS_MAX}", param="chunk_tokens"
        )
    device = torch.device(config.device)
    if device.type == "cuda":
        _take_own_stream(device)
    layouts = Layouts.of(model.config, row_kind(config.kv_dtype))
    sizes = make_plan(config, model.config, layouts)
    tiers = TierManager(
        TierConfig(
            plan=sizes,
            pages=layouts.pages,
            tail=layouts.tail,
            identity=identity,
            tiered=config.tiering == "hisparse",
            reuse=config.tiering != "off",
            device=device,
            whole_pages=_whole_pages(config),
            replay_layers=model.config.num_hidden_layers + model.config.num_nextn_predict_layers,
        ),
        store,
        pinning,
    )
    retention = Retention(tiers, config.pin_budget_bytes // layouts.pages.mirror_bytes)
    options = EngineOptions(
        chunk_tokens=chunk_tokens,
        chunk_tokens_beside=min(chunk_tokens, CHUNK_TOKENS_BESIDE),
        max_batch=config.max_batch,
        queue_max=config.queue_max,
        eos_token_ids=model.config.eos_token_ids,
    )
    engine = Engine(_make_runner(config, model, tiers), retention, options, send, tokenizer)
    return (
        engine,
        Verbs(engine, model.config.vocab_size, model.config.max_position_embeddings),
        sizes,
    )
