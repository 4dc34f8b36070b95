"""What is measured at which size: the issue's, for an H200, and a toy's, for two CPU cores.

Lengths are tokens; budgets are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from dsv4_tierd.engine.build import Layouts
from dsv4_tierd.engine.model.config import ModelConfig
from dsv4_tierd.tiering.plan import C4_ROWS_PER_PAGE, TAIL_C4_ROWS

GIB, MIB = 1 << 30, 1 << 20


class Kind(Enum):
    """The engines that are compared."""

    HISPARSE = "hisparse"  # C4 rows within a device budget
    MINIMAL = "hisparse, fewest hot rows"
    RESIDENT = "resident"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Every length, count and budget of the measurements."""

    long: int
    points: tuple[int, ...]
    batch_points: tuple[int, ...]
    steps: int
    equal: tuple[int, ...]  # lengths that every engine prefills itself
    equal_tokens: int
    chunk_tokens: int
    other_chunks: tuple[int, ...]
    agents: int
    agent_tokens: int
    question_tokens: int
    session: int
    shared: int
    session_steps: int
    c4_bytes: int
    device_bytes: int
    resident_bytes: int
    host_bytes: int
    small_host_bytes: int
    capacity_bytes: int
    capacity_host_bytes: int
    capacity_spare_bytes: int  # host bytes for resume points and idle tails
    capacity_sessions_max: int
    trace_steps: int
    trace_kept_steps: int  # of the trace that goes into the tree
    trace_layers: int
    profile_steps: int
    soak_s: float
    soak_host_bytes: int
    soak_device_bytes: int
    soak_words: tuple[int, ...]
    prefill_tokens_s: float  # expected, to see whether the time suffices


REAL = Sizes(
    long=900_000,
    points=(4_096, 65_536, 262_144, 900_000),
    batch_points=(65_536,),
    steps=128,
    equal=(8_192, 65_536),
    equal_tokens=256,
    chunk_tokens=8_192,
    other_chunks=(4_096, 3_000),
    agents=8,
    agent_tokens=512,
    question_tokens=32,
    session=200_000,
    shared=180_000,
    session_steps=64,
    c4_bytes=GIB,
    device_bytes=16 * GIB,
    resident_bytes=48 * GIB,
    host_bytes=44 * GIB,
    small_host_bytes=12 * GIB,
    capacity_bytes=16 * GIB,
    capacity_host_bytes=80 * GIB,
    capacity_spare_bytes=4 * GIB,
    capacity_sessions_max=256,
    trace_steps=512,
    trace_kept_steps=256,
    trace_layers=2,
    profile_steps=16,
    soak_s=480.0,
    soak_host_bytes=6 * GIB,
    soak_device_bytes=3 * GIB,
    soak_words=(255, 256, 257, 1_000, 4_000, 12_000, 40_000),
    prefill_tokens_s=4_000.0,
)

TOY = Sizes(
    long=1_500,
    points=(300, 1_500),
    batch_points=(800,),
    steps=3,
    equal=(600,),
    equal_tokens=6,
    chunk_tokens=256,
    other_chunks=(100,),
    agents=3,
    agent_tokens=4,
    question_tokens=5,
    session=800,
    shared=600,
    session_steps=3,
    c4_bytes=MIB,
    device_bytes=16 * MIB,
    resident_bytes=16 * MIB,
    host_bytes=16 * MIB,
    small_host_bytes=8 * MIB,
    capacity_bytes=4 * MIB,
    capacity_host_bytes=8 * MIB,
    capacity_spare_bytes=2 * MIB,
    capacity_sessions_max=3,
    trace_steps=12,
    trace_kept_steps=8,
    trace_layers=1,
    profile_steps=1,
    soak_s=1.0,
    soak_host_bytes=4 * MIB,
    soak_device_bytes=4 * MIB,
    soak_words=(255, 256, 257, 400, 700),
    prefill_tokens_s=1e6,
)


def up_to(sizes: Sizes, long: int) -> Sizes:
    """The same measurements with no prompt longer than ``long``: a rehearsal."""
    session = min(sizes.session, long)
    return replace(
        sizes,
        long=long,
        points=(*(at for at in sizes.points if at < long), long),
        batch_points=tuple(at for at in sizes.batch_points if at <= long) or (long,),
        equal=tuple(length for length in sizes.equal if length <= long) or (long,),
        session=session,
        shared=min(sizes.shared, session * 9 // 10),
        soak_words=tuple(count for count in sizes.soak_words if count <= long),
    )


def c4_device_bytes(hot_rows: int, batch: int, model: ModelConfig, layouts: Layouts) -> int:
    """Device bytes that hold C4 rows: the hot ones, the tails' and both staging buffers."""
    layers, row = len(model.c4_layers), layouts.pages.latent.row_bytes
    tails = (2 * batch + 1) * TAIL_C4_ROWS * layers * row
    return hot_rows * layers * (row + 8) + tails + _staging_bytes(model, row)


def hot_rows_within(c4_bytes: int, batch: int, model: ModelConfig, layouts: Layouts) -> int:
    """The most hot rows a layer, whole pages of them, with all C4 rows within ``c4_bytes``."""
    spare = c4_bytes - c4_device_bytes(0, batch, model, layouts)
    rows = spare // (len(model.c4_layers) * (layouts.pages.latent.row_bytes + 8))
    return rows // C4_ROWS_PER_PAGE * C4_ROWS_PER_PAGE


def fewest_hot_rows(batch: int, model: ModelConfig) -> int:
    """What a step needs: twice what its batch may choose."""
    return 2 * batch * model.index_topk


def _staging_bytes(model: ModelConfig, row_bytes: int) -> int:
    return 2 * model.max_position_embeddings // 4 * row_bytes
