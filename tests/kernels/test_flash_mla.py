"""FlashMLA is chosen by what it declares, and gets the bytes and arguments that its format says.

The module is a stand-in with the real signature (sgl-flash-mla 1.0.0): it reads the rows from the
bytes it is given, by FlashMLA's description of V4's format, not by this project's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4_tierd.kernels import flash_mla, sparse_attention
from dsv4_tierd.kernels.layout import PAGE_TOKENS, PageLayout, RowFormat, RowKind, Rows, row_pool
from dsv4_tierd.kernels.ref import sparse_attention as ref
from dsv4_tierd.kernels.ref.rope import rotate

CPU = torch.device("cpu")
BLACKWELL = (10, 0)
SCALE = 512**-0.5
TOLERANCE = 8e-3  # queries and results are bf16


def read_v4(cache: Tensor, ids: Tensor) -> Tensor:
    """Rows [n, 512] by FlashMLA's format: a page's 576-byte rows, then its 8-byte scales."""
    pages, per_page, one, width = cache.shape
    assert (one, width, cache.dtype) == (1, 584, torch.uint8)
    assert cache.stride()[1:] == (584, 584, 1)
    page = cache.as_strided((pages, per_page * 584), (cache.stride(0), 1))
    rows = page[:, : per_page * 576].reshape(-1, 576)[ids.long()]
    scales = page[:, per_page * 576 :].reshape(-1, 8)[ids.long()]
    latent = rows[:, :448].contiguous().view(torch.float8_e4m3fn).float().view(-1, 7, 64)
    factors = torch.exp2(scales[:, :7].float() - 127).unsqueeze(-1)
    rotated = rows[:, 448:].contiguous().view(torch.bfloat16).float()
    return torch.cat([(latent * factors).flatten(1), rotated], 1)


class Stand:
    """What the module was called with, and how often it made a schedule."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []
        self.schedules = 0


def make_module(stand: Stand, legacy: bool = True, version: str = "1.0.0") -> ModuleType:
    module = ModuleType("flash_mla")

    def flash_mla_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor | None,
        cache_seqlens: Tensor | None,
        head_dim_v: int,
        tile_scheduler_metadata: object,
        num_splits: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        is_fp8_kvcache: bool | None = None,
        indices: Tensor | None = None,
        attn_sink: Tensor | None = None,
        extra_k_cache: Tensor | None = None,
        extra_indices_in_kvcache: Tensor | None = None,
        topk_length: Tensor | None = None,
        extra_topk_length: Tensor | None = None,
        enable_batch_invariant: bool = False,
        use_legacy: bool = False,
        kv_format: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        tokens, width, heads, dim = q.shape
        assert (width, dim, q.dtype, head_dim_v) == (1, 512, torch.bfloat16, 512)
        assert heads in (64, 128)
        assert (is_fp8_kvcache, use_legacy, kv_format) == (True, True, "V4")
        assert not (causal or enable_batch_invariant)
        assert (block_table, cache_seqlens, num_splits, topk_length, extra_topk_length) == (
            None,
        ) * 5
        assert attn_sink is not None
        assert (attn_sink.shape, attn_sink.dtype) == ((heads,), torch.float32)
        assert (extra_k_cache is None) == (extra_indices_in_kvcache is None)
        out = torch.zeros(tokens, 1, heads, 512)
        for t in range(tokens):
            keys = []
            for cache, ids in ((k_cache, indices), (extra_k_cache, extra_indices_in_kvcache)):
                if cache is None:
                    continue
                assert ids is not None
                assert ids.dtype is torch.int32
                assert ids.shape[:2] == (tokens, 1)
                assert ids.shape[2] > 0
                assert ids.shape[2] % 64 == 0
                assert bool(((ids >= -1) & (ids < cache.shape[0] * cache.shape[1])).all())
                keys.append(read_v4(cache, ids[t, 0][ids[t, 0] >= 0]))
            rows = torch.cat(keys)
            assert bool(rows.isfinite().all())
            logits = q[t, 0].float() @ rows.T * softmax_scale
            both = torch.cat([logits, attn_sink.unsqueeze(1)], 1)
            out[t, 0] = torch.softmax(both, 1)[:, :-1] @ rows
        stand.calls.append(SimpleNamespace(heads=heads, schedule=tile_scheduler_metadata))
        return out.bfloat16(), torch.zeros(tokens, heads, 1)

    def get_mla_metadata(*_: object) -> tuple[object, None]:
        stand.schedules += 1
        return object(), None

    named: dict[str, Any] = {
        "__version__": version,
        "has_legacy": lambda: legacy,
        "flash_mla_with_kvcache": flash_mla_with_kvcache,
        "get_mla_metadata": get_mla_metadata,
    }
    vars(module).update(named)
    return module


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    """An installed FlashMLA on a card that it is chosen for."""
    made = Stand()
    monkeypatch.setitem(sys.modules, "flash_mla", make_module(made))
    monkeypatch.setattr(flash_mla, "_schedules", {})
    monkeypatch.setattr(sparse_attention, "_capability", lambda _: BLACKWELL)
    monkeypatch.setattr(sparse_attention, "runs_kernels", lambda _: True)
    flash_mla.examine.cache_clear()
    yield made
    flash_mla.examine.cache_clear()


def filled(rows: Rows, rng: torch.Generator) -> Rows:
    """Random rows in the first two thirds, NaN bytes behind."""
    count = rows.row_count * 2 // 3
    rows.data.fill_(0xFF)
    rows.write(torch.arange(count), torch.randn(count, 512, generator=rng))
    return rows


def ids(tokens: int, count: int, rows: Rows, rng: torch.Generator) -> Tensor:
    """Ids of written rows; a quarter absent: -1, both extremes, one past the end."""
    made = torch.randint(0, rows.row_count * 2 // 3, (tokens, count), generator=rng)
    strange = torch.tensor([-1, -(2**31), 2**31 - 1, rows.row_count])
    which = torch.randint(0, 16, made.shape, generator=rng)
    return torch.where(which < 4, strange[which % 4], made).to(torch.int32)


def pools(rng: torch.Generator) -> tuple[Rows, Rows]:
    """A window of one page, and a C4 pool whose pages are whole multiples of 576 bytes apart."""
    wide = torch.zeros(5, 576 * 66, dtype=torch.uint8)
    section = PageLayout(sparse_attention.ROW, RowFormat(RowKind.KEY_FP8, 128), (0,), ()).c4[0]
    assert section.rows == PAGE_TOKENS // 4
    return filled(row_pool(sparse_attention.ROW, 192, 192, CPU), rng), filled(
        section.view(wide), rng
    )


@pytest.mark.parametrize(("heads", "padded"), [(1, 64), (64, 64), (70, 128), (128, 128)])
@pytest.mark.parametrize("extra", [0, 1, 100])
def test_the_result_is_the_twins(
    heads: int, padded: int, extra: int, stand: Stand, rng: torch.Generator
) -> None:
    """Through FlashMLA's own reading of the bytes: padded heads, odd widths, strange ids."""
    window, rows = pools(rng)
    near, far = ids(3, 128, window, rng), ids(3, extra, rows, rng)
    q = torch.randn(3, heads, 512, generator=rng)
    sink = torch.randn(heads, generator=rng)
    out = torch.full_like(q, torch.nan)
    positions = torch.tensor([0, 77, 900_000])
    inv_freq = 160000.0 ** (-torch.arange(32) / 32)
    turn = sparse_attention.InverseRope(positions, inv_freq)
    scope = (None, None) if not extra else (rows, far)
    sparse_attention.sparse_attention(q, window, near, *scope, sink, SCALE, out=out, inverse=turn)
    scopes = ((near, window), (far, rows))
    plain = [torch.where((i >= 0) & (i < r.row_count), i, -1) for i, r in scopes]
    shown = (None, None) if not extra else (rows, plain[1])
    want = ref.sparse_attention(q, window, plain[0], *shown, sink, SCALE)
    want = rotate(want, positions, inv_freq, inverse=True)
    assert [call.heads for call in stand.calls] == [padded]
    assert (out - want).norm() / want.norm() < TOLERANCE


def test_hopper_would_take_it_if_it_were_faster(
    stand: Stand, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speed alone keeps it from Hopper: it is able there, with pages at any pitch."""
    monkeypatch.setattr(sparse_attention, "_capability", lambda _: (9, 0))
    monkeypatch.setattr(flash_mla, "_OWN_IS_FASTER", set())
    rows = filled(row_pool(sparse_attention.ROW, 256, 64, CPU), rng)
    near = ids(2, 128, rows, rng)
    q = torch.randn(2, 64, 512, generator=rng)
    sparse_attention.sparse_attention(q, rows, near, rows, near, torch.zeros(64), SCALE)
    assert len(stand.calls) == 1


def test_layers_share_a_schedule(stand: Stand, rng: torch.Generator) -> None:
    """FlashMLA's schedule is made once for shapes, not once a layer."""
    window, rows = pools(rng)
    q, sink = torch.randn(2, 64, 512, generator=rng), torch.zeros(64)
    for extra in (64, 64, 128, 64):
        far = ids(2, extra, rows, rng)
        near = ids(2, 128, window, rng)
        sparse_attention.sparse_attention(q, window, near, rows, far, sink, SCALE)
    assert stand.schedules == 2
    made = [call.schedule for call in stand.calls]
    assert made[0] is made[1] is made[3]
    assert made[2] is not made[0]


@pytest.mark.parametrize("pitch", [64 * 584, 576 * 66 + 16])
def test_pages_that_it_cannot_read_take_the_own_kernel(
    pitch: int, stand: Stand, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blackwell's kernels want whole multiples of 576 bytes between pages; others are refused."""
    section = PageLayout(sparse_attention.ROW, RowFormat(RowKind.KEY_FP8, 128), (0,), ()).c4[0]
    rows = filled(section.view(torch.zeros(4, pitch, dtype=torch.uint8)), rng)
    own = []
    monkeypatch.setattr(sparse_attention, "_launch_compiled", lambda *call: own.append(call))
    q, near = torch.zeros(1, 64, 512), ids(1, 128, rows, rng)
    sparse_attention.sparse_attention(q, rows, near, rows, near, torch.zeros(64), SCALE)
    assert len(own) == 1
    assert not stand.calls
    reason = flash_mla.refusal(own[0][0], BLACKWELL)
    assert reason == f"window: pages {pitch} bytes apart, not a multiple of 576"
    assert flash_mla.refusal(own[0][0], (9, 0)) is None


def without(module: ModuleType, *names: str) -> ModuleType:
    """The module with a function that lacks some parameters."""
    source = ", ".join(sorted(flash_mla._NEEDED - set(names)))
    made: dict[str, Any] = {}
    exec(f"def flash_mla_with_kvcache({source}): ...", made)  # noqa: S102
    vars(module)["flash_mla_with_kvcache"] = made["flash_mla_with_kvcache"]
    return module


def dropped(module: ModuleType) -> ModuleType:
    """As FlashMLA is after it dropped V4: all arguments, but no way to the older kernels."""
    names = ", ".join(sorted(flash_mla._NEEDED))
    made: dict[str, Any] = {}
    exec(f"def flash_mla_with_kvcache({names}, enable_batch_invariant=False): ...", made)  # noqa: S102
    vars(module)["flash_mla_with_kvcache"] = made["flash_mla_with_kvcache"]
    return module


@pytest.mark.parametrize(
    ("module", "capability", "chosen", "reason"),
    [
        (make_module(Stand()), BLACKWELL, True, "flash_mla 1.0.0"),
        (make_module(Stand()), None, False, "there is no GPU"),
        (make_module(Stand()), (9, 0), False, "slower on this card"),
        (make_module(Stand()), (12, 0), False, "no V4 kernels for compute capability 12.0"),
        (make_module(Stand(), legacy=False), BLACKWELL, False, "without the kernels of V4's rows"),
        (without(make_module(Stand()), "extra_k_cache"), BLACKWELL, False, "no extra_k_cache"),
        (dropped(make_module(Stand())), BLACKWELL, False, "has dropped V4's rows"),
        (None, BLACKWELL, False, "not installed"),
    ],
)
def test_what_it_declares_decides(
    module: ModuleType | None,
    capability: tuple[int, int] | None,
    chosen: bool,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chosen or not, the reason says why: what `dsv4-tierd doctor` shows."""
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    flash_mla.examine.cache_clear()
    try:
        choice = flash_mla.choose(capability)
    finally:
        flash_mla.examine.cache_clear()
    assert choice.chosen is chosen
    assert reason in choice.reason
