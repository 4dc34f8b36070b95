"""FlashMLA for sparse attention in decode: used where it is installed, able, and the faster one.

The package is sgl-flash-mla, its module ``flash_mla``. What it declares decides whether it is able
(``examine``): V4's FP8 rows of 584 bytes and Hopper's kernels are in its legacy half. It takes
64 or 128 heads (others are padded), bf16 queries, ids padded to whole blocks of 64 with -1 where
nothing is, and pages whose rows and scales lie as a section of ``layout`` has them. It knows no
inverse rotation: that, and what ids mean here, are a launch each beside it. It allocates its
partials; its schedule is made once for shapes and kept, so the first call belongs before a capture.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dsv4_tierd.kernels.flash_mla_triton import prepare_ids, turn_back
from dsv4_tierd.kernels.layout import Rows
from dsv4_tierd.kernels.sparse_attention_triton import Call
from dsv4_tierd.kernels.triton_rows import row_arguments

MODULE = "flash_mla"
HEADS = (64, 128)
_BLOCK_IDS = 64
_ROW_BYTES = 584
_DATA_BYTES, _SCALE_BYTES = 576, 8
_ARCHITECTURES = (9, 10)  # majors that its V4 kernels are built for
# Measured with the launches that it needs beside it: docs/PERFORMANCE.md.
_OWN_IS_FASTER = {(9, 0)}
_NEEDED = {
    "q",
    "k_cache",
    "head_dim_v",
    "tile_scheduler_metadata",
    "softmax_scale",
    "is_fp8_kvcache",
    "indices",
    "attn_sink",
    "extra_k_cache",
    "extra_indices_in_kvcache",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether FlashMLA runs, and what was found or why not."""

    chosen: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _Able:
    module: Any
    legacy: bool
    name: str


def choose(capability: tuple[int, int] | None) -> Choice:
    """The choice for a card of this compute capability (None: no card), as ``doctor`` shows it."""
    found = examine()
    if isinstance(found, str):
        return Choice(False, found)
    if capability is None:
        return Choice(False, f"{found.name} is able, but there is no GPU")
    if capability[0] not in _ARCHITECTURES:
        version = ".".join(map(str, capability))
        return Choice(False, f"{found.name} has no V4 kernels for compute capability {version}")
    if capability in _OWN_IS_FASTER:
        return Choice(False, f"{found.name} is able, and slower on this card than the own kernel")
    return Choice(True, found.name)


@cache
def examine() -> _Able | str:
    """The installed module, when it declares V4's rows; else what is missing, in words."""
    try:
        module = importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        return "not installed" if error.name == MODULE else f"does not import: {error}"
    except Exception as error:  # noqa: BLE001 - a library that does not load raises what it likes
        return f"does not import: {error}"
    name = f"{MODULE} {getattr(module, '__version__', 'of no version')}"
    function = getattr(module, "flash_mla_with_kvcache", None)
    taken = set() if function is None else set(inspect.signature(function).parameters)
    if missing := sorted(_NEEDED - taken):
        return f"{name} does not take V4's rows: no {', '.join(missing)}"
    legacy = "use_legacy" in taken
    if legacy and not module.has_legacy():
        return f"{name} was built without the kernels of V4's rows"
    if not legacy and "enable_batch_invariant" in taken:
        return f"{name} has dropped V4's rows"
    return _Able(module, legacy, name)


def refusal(call: Call, capability: tuple[int, int]) -> str | None:
    """Why FlashMLA cannot take this call, in words; None when it can."""
    if call.q.shape[1] > HEADS[-1]:
        return f"{call.q.shape[1]} heads, at most {HEADS[-1]}"
    scopes = [("window", call.window)] + [("extra", call.extra)] * bool(call.extra_count)
    for name, rows in scopes:
        data, scale, data_page, data_row, scale_page, scale_row, per_page, _ = row_arguments(rows)
        apart = scale.data_ptr() - data.data_ptr()
        many = data.shape[0] > 1
        if (data_row, scale_row, apart) != (_DATA_BYTES, _SCALE_BYTES, per_page * _DATA_BYTES):
            return f"{name}: a page's rows do not stand in front of its scales without gaps"
        if many and (data_page != scale_page or data_page >= 1 << 31):
            return f"{name}: pages {data_page} bytes apart"
        if many and capability[0] == 10 and data_page % _DATA_BYTES:
            return f"{name}: pages {data_page} bytes apart, not a multiple of {_DATA_BYTES}"
        if data.data_ptr() % 16:
            return f"{name}: rows do not start at 16 bytes"
    return None


def attend(call: Call) -> None:
    """Sparse attention of ``call`` into its ``out``. Raises what FlashMLA raises."""
    found = examine()
    assert isinstance(found, _Able), found
    tokens, heads, dim = call.q.shape
    padded = next(count for count in HEADS if heads <= count)
    near, far = prepare_ids(call, _BLOCK_IDS)
    sink = call.sink
    q = call.q.to(torch.bfloat16)
    if padded != heads:
        q = torch.nn.functional.pad(q, (0, 0, 0, padded - heads))
        sink = torch.nn.functional.pad(sink, (0, padded - heads))
    key = (tokens, padded, near.shape[1], far.shape[1], *_page_rows(call))
    options: dict[str, Any] = {"use_legacy": True, "kv_format": "V4"} if found.legacy else {}
    if far.shape[1]:
        options["extra_k_cache"] = packed(call.extra)
        options["extra_indices_in_kvcache"] = far.unsqueeze(1)
    result, _ = found.module.flash_mla_with_kvcache(
        q=q.unsqueeze(1),
        k_cache=packed(call.window),
        block_table=None,
        cache_seqlens=None,
        head_dim_v=dim,
        tile_scheduler_metadata=_schedule(found, q.device, key),
        softmax_scale=call.scale,
        is_fp8_kvcache=True,
        indices=near.unsqueeze(1),
        attn_sink=sink.contiguous(),
        **options,
    )
    turn_back(result[:, 0, :heads], call.out, call.inverse)


def packed(rows: Rows) -> Tensor:
    """Rows as FlashMLA takes them: [pages, rows a page, 1, 584] uint8, scales behind all rows."""
    pages, per_page, _ = rows.data.shape
    pitch = rows.data.stride(0) if pages > 1 else per_page * _ROW_BYTES
    shape, strides = (pages, per_page, 1, _ROW_BYTES), (pitch, _ROW_BYTES, _ROW_BYTES, 1)
    return rows.data.as_strided(shape, strides, rows.data.storage_offset())


def _page_rows(call: Call) -> tuple[int, int]:
    return call.window.rows_per_page, call.extra.rows_per_page


_schedules: dict[tuple[object, ...], Any] = {}


def _schedule(found: _Able, device: torch.device, key: tuple[int, ...]) -> Any:
    """FlashMLA's own schedule for these shapes: one for all layers, made by the first call.

    One that is made inside a capture belongs to that graph and is not kept.
    """
    kept = _schedules.get((device, *key))
    if kept is None:
        (kept, _) = found.module.get_mla_metadata()
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _schedules[(device, *key)] = kept
    return kept
