"""Attention of one latent head over FP8 window rows and chosen FP8 rows: split-KV, then a merge.

FlashMLA runs where flash_mla.py chooses it. Else on Hopper (wgmma) and Blackwell (the same source
with mma.sync) csrc/sparse_attention.cu runs, elsewhere the Triton kernels of
sparse_attention_triton.py: the same algorithm. Rows are decoded in the kernel. Keys are cut into
spans of ``rows_per_split``; each program attends to one span and leaves a normalised partial and
its log-sum, which a second launch merges, with the sink, in span order. A span without a valid id
costs its ids' read and nothing else, and a partial that nobody wrote is not read. No atomics: a
query's bits depend on its q, the order of its ids and ``rows_per_split`` alone.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from dsv4_tierd.kernels import flash_mla, nvrtc
from dsv4_tierd.kernels.checks import check_tensor
from dsv4_tierd.kernels.layout import FP8_GROUP, RowFormat, RowKind, Rows
from dsv4_tierd.kernels.ref import sparse_attention as ref
from dsv4_tierd.kernels.ref.rope import rotate
from dsv4_tierd.kernels.sparse_attention_triton import (
    BLOCK_ROWS,
    Call,
    InverseRope,
    Workspace,
    launch_triton,
)
from dsv4_tierd.kernels.triton_rows import row_arguments, runs_kernels

ROW = RowFormat(RowKind.FP8, 512, FP8_GROUP)
_SHARED_BYTES = 1024 + 228912  # sizeof(Shared) in attention_rows.cuh, and room to align it
_MERGE_SHARED_BYTES = 41984  # sizeof(Shared) in attention_merge.cu; up to 8 spans need none
_MERGE_SPANS_MAX = 1024
_PARTIAL_COST = 0.04  # of what a block costs: writing, reading and adding one
_TARGET_PROGRAMS = 132  # multiprocessors of an H200; fixed, so that results do not follow the card


def supports(row_format: RowFormat) -> bool:
    """Whether the kernel reads rows of this format."""
    return row_format == ROW


def rows_per_split(tokens: int, heads: int, capacity: int) -> int:
    """Rows that one program attends to, from the capacities of a call alone.

    tokens: queries; capacity: window and extra ids of a query, -1 ones too. As many spans as
    fill the card once, fewer where their partials would cost more than longer spans do.
    """
    blocks = max(1, -(-capacity // BLOCK_ROWS))
    lanes = tokens * -(-heads // 64)
    programs = max(1, _TARGET_PROGRAMS // lanes)
    fewest = -(-blocks // min(programs, blocks))
    # n blocks a span take n b + c lanes blocks / n, c for a partial: least at the root below.
    cheapest = int(math.sqrt(_PARTIAL_COST * lanes * blocks) + 0.3)
    return BLOCK_ROWS * min(blocks, max(fewest, cheapest))


def workspace(
    tokens: int, heads: int, capacity: int, device: torch.device, split: int | None = None
) -> Workspace:
    """Scratch of ``sparse_attention`` for up to ``capacity`` ids a query; reusable across calls.

    split: rows_per_split; fix it where bits must be the same at different batch sizes. One span
    needs no scratch.
    """
    span = rows_per_split(tokens, heads, capacity) if split is None else split
    splits = -(-(-(-capacity // BLOCK_ROWS) * BLOCK_ROWS) // span)
    held = tokens if splits > 1 else 0
    compiled = _compiled(device)
    kept = -(-heads // 64) * 64 if compiled else heads
    dtype = torch.float16 if compiled else torch.float32
    return Workspace(
        torch.empty(held, splits, kept, ROW.dim, dtype=dtype, device=device),
        torch.empty(held, splits, heads, dtype=torch.float32, device=device),
        span,
    )


def sparse_attention(
    q: Tensor,
    window: Rows,
    window_ids: Tensor,
    extra: Rows | None,
    extra_ids: Tensor | None,
    sink: Tensor,
    scale: float,
    *,
    out: Tensor | None = None,
    scratch: Workspace | None = None,
    inverse: InverseRope | None = None,
) -> Tensor:
    """Attention of T independent queries over rows that ids name; see the twin in ref/.

    q: [T, H, 512] fp32 or bf16, rotated (read as bf16); window_ids: [T, W] and extra_ids: [T, K]
    int32 rows; an id below 0, or at or past the rows' count, is absent; sink: [H] fp32,
    infinities allowed; scale: 512**-0.5. ``out``: [T, H, 512], else allocated like q;
    ``scratch`` as ``workspace`` makes it for these capacities, else allocated; ``inverse``
    rotates the result back. Returns out; zeros where nothing is visible. On Hopper the operands
    are fp16: values of rows and q beyond 57,344, which normed ones never reach, saturate. Raises
    ValueError for rows that are not fp8 of (512, 64). Cost: the rows' bytes, 2,048 * H operations
    a row.
    """
    if not runs_kernels(q.device):
        result = _plainly(q, window, window_ids, extra, extra_ids, sink, scale, inverse)
        return result.to(q.dtype) if out is None else out.copy_(result)
    used = window if extra is None else extra
    for rows in (window, used):
        if not supports(rows.format):
            raise ValueError(f"sparse_attention reads fp8 rows of (512, 64), got {rows.format}")
    tokens, heads, dim = q.shape
    picked = window_ids if extra_ids is None else extra_ids
    extra_count = 0 if extra_ids is None else extra_ids.shape[1]
    assert dim == ROW.dim and q.stride(2) == 1, (q.shape, q.stride())
    assert window_ids.stride(1) == 1 and picked.stride(1) == 1, "ids must be contiguous in a query"
    blocks = -(-window_ids.shape[1] // BLOCK_ROWS) + -(-extra_count // BLOCK_ROWS)
    if out is None:
        out = torch.empty_like(q)
    if not tokens:
        return out
    if scratch is None:
        scratch = workspace(tokens, heads, blocks * BLOCK_ROWS, q.device)
    span_blocks = scratch.rows_per_split // BLOCK_ROWS
    splits = max(1, -(-blocks // span_blocks))
    held = scratch.logs.shape
    assert splits == 1 or (held[0] >= tokens and held[1] >= splits and held[2] == heads), held
    call = Call(
        q, window, window_ids, used, picked, extra_count, sink, scale, out, scratch, inverse
    )
    if _flash_mla(call):
        flash_mla.attend(call)
    elif _compiled(q.device):
        _launch_compiled(call, splits, span_blocks)
    else:
        launch_triton(call, splits, span_blocks)
    return out


def sparse_attention_prefill(
    q: Tensor,
    window: Rows,
    window_visible: Tensor,
    scope: ref.Picked | ref.Listed | None,
    sink: Tensor,
    scale: float,
    window_size: int,
    *,
    tile_rows: int = 512,
    out: Tensor | None = None,
    inverse: InverseRope | None = None,
) -> Tensor:
    """Attention of T consecutive queries of one session, in tiles of queries; see the twin in ref/.

    q: [T, H, 512]; window: its first window_size - 1 + T rows in token order, query i's own at
    window_size - 1 + i; window_visible: [T] int, rows, ending with its own, that query i sees;
    ``out`` and ``inverse`` as in sparse_attention. Returns out; bits depend on T only through a
    last tile so small that its keys are split. Scratch: a tile's ids, tile_rows * (window_size +
    entries) * 4 B, and what sparse_attention allocates.
    """
    if out is None:
        out = torch.empty_like(q)
    place = torch.arange(window_size, device=q.device, dtype=torch.int32)
    for start in range(0, q.shape[0], tile_rows):
        tile = slice(start, min(q.shape[0], start + tile_rows))
        first = torch.arange(tile.start, tile.stop, device=q.device, dtype=torch.int32)
        seen = place >= window_size - window_visible[tile].unsqueeze(1)
        near = torch.where(seen, first.unsqueeze(1) + place, -1).to(torch.int32)
        extra = None if scope is None else scope.rows
        turn = inverse and InverseRope(inverse.positions[tile], inverse.inv_freq)
        far = _extra_ids(scope, tile)
        sparse_attention(
            q[tile], window, near, extra, far, sink, scale, out=out[tile], inverse=turn
        )
    return out


def _extra_ids(scope: ref.Picked | ref.Listed | None, tile: slice) -> Tensor | None:
    """Entries [t, K] int32 of a tile of queries, -1 where not seen."""
    if scope is None:
        return None
    if isinstance(scope, ref.Picked):
        return scope.ids[tile].to(torch.int32)
    columns = torch.arange(scope.ids.shape[0], device=scope.ids.device)
    seen = columns < scope.visible[tile].unsqueeze(1)
    return torch.where(seen, scope.ids, -1).to(torch.int32)


def _flash_mla(call: Call) -> bool:
    """Whether FlashMLA takes this call: chosen for the card, and able to read these rows."""
    capability = _capability(call.q.device)
    if capability is None or not flash_mla.choose(capability).chosen:
        return False
    return flash_mla.refusal(call, capability) is None


def _compiled(device: torch.device) -> bool:
    """Whether csrc/sparse_attention.cu runs here: compute capability 9.0 or 10.x, else Triton."""
    capability = _capability(device)
    return capability is not None and nvrtc.compiles_for(capability)


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _launch_compiled(call: Call, splits: int, span_blocks: int) -> None:
    q, out, scratch, inverse = call.q, call.out, call.scratch, call.inverse
    tokens, heads, _ = q.shape
    head_blocks = -(-heads // 64)
    check_rows_16(call.window)
    check_rows_16(call.extra)
    for name, ids in (("window_ids", call.window_ids), ("extra_ids", call.extra_ids)):
        check_tensor(name, ids, torch.int32, (None, None), q.device)
    check_tensor("sink", call.sink, torch.float32, (heads,), q.device)
    # Partials are units of eight fp16 values, whole blocks of 64 heads.
    sums = scratch.sums
    whole = sums.numel() == 0 or (sums.is_contiguous() and sums.shape[2] == head_blocks * 64)
    if not whole or sums.dtype is not torch.float16 or splits > _MERGE_SPANS_MAX:
        raise ValueError(f"scratch of {sums.dtype} {tuple(sums.shape)} is not of `workspace`'s")
    held = (sums.stride(0) // 8, sums.stride(1) // 8, *scratch.logs.stride()[:2])
    turn = (
        None if inverse is None else inverse.positions,
        int(inverse is not None and inverse.positions.dtype is torch.int64),
        None if inverse is None else inverse.inv_freq,
    )
    to = (out, _wide(out), out.stride(0), out.stride(1))
    kernel = nvrtc.load("sparse_attention.cu", "sparse_attention", q.device)
    kernel.launch(
        nvrtc.Shape(splits * head_blocks * tokens, 384, 1, _SHARED_BYTES),
        q,
        _wide(q),
        q.stride(0),
        q.stride(1),
        *_scope(call.window),
        call.window_ids,
        call.window_ids.stride(0),
        call.window_ids.shape[1],
        *_scope(call.extra),
        call.extra_ids,
        call.extra_ids.stride(0),
        call.extra_count,
        call.sink,
        *turn,
        *to,
        sums,
        scratch.logs,
        *held,
        heads,
        head_blocks,
        splits,
        span_blocks,
        struct.unpack("I", struct.pack("f", call.scale))[0],
    )
    if splits > 1:
        few = splits <= 8
        blocks = tokens * head_blocks * (16 if few else 128)
        nvrtc.load("attention_merge.cu", "sparse_attention_merge", q.device).launch(
            nvrtc.Shape(blocks, 256, 1, 0 if few else _MERGE_SHARED_BYTES, early=True),
            sums,
            scratch.logs,
            *held,
            splits,
            call.sink,
            *turn,
            *to,
            heads,
            head_blocks,
        )


def _scope(rows: Rows) -> tuple[Tensor | int, ...]:
    """Where rows lie, as the kernel takes it: an id below 2**31 is divided by a multiplication."""
    place, per_page = row_arguments(rows), rows.rows_per_page
    shift = 31 + (per_page - 1).bit_length()
    return (*place[:6], per_page, (1 << shift) // per_page + 1, shift, rows.row_count)


def _wide(x: Tensor) -> int:
    """1 for fp32, 0 for bf16; raises ValueError for others."""
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"queries and results are fp32 or bf16, got {x.dtype}")
    return int(x.dtype is torch.float32)


def check_rows_16(rows: Rows) -> None:
    """Raise ValueError unless rows start at 16 bytes, scales at 8, and pitches fit 32 bits."""
    data, scale, data_page, data_row, scale_page, scale_row, *_ = row_arguments(rows)
    if data.data_ptr() % 16 or data_page % 16 or data_row % 16:
        raise ValueError("row data must start at multiples of 16 bytes")
    if scale.data_ptr() % 8 or scale_page % 8 or scale_row % 8:
        raise ValueError("row scales must start at multiples of 8 bytes")
    if max(data_page, scale_page) >= 1 << 32:
        raise ValueError("a page of rows must be smaller than 4 GiB")


def _plainly(
    q: Tensor,
    window: Rows,
    window_ids: Tensor,
    extra: Rows | None,
    extra_ids: Tensor | None,
    sink: Tensor,
    scale: float,
    inverse: InverseRope | None,
) -> Tensor:
    near = _present(window, window_ids)
    far = None if extra is None or extra_ids is None else _present(extra, extra_ids)
    result = ref.sparse_attention(q.float(), window, near, extra, far, sink, scale)
    if inverse is None:
        return result
    return rotate(result, inverse.positions, inverse.inv_freq, inverse=True)


def _present(rows: Rows, ids: Tensor) -> Tensor:
    return torch.where((ids >= 0) & (ids < rows.row_count), ids, -1)
