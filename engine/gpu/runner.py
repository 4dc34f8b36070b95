"""The runner over the ops of ``kernels``: the same calls as the plain one, and its results.

On a GPU decode is one CUDA graph for each number of sessions and each reach of page tables; both
are rounded up to a few sizes, so that there are few graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.engine.gpu.decode import DecodeStep
from dsv4_tierd.engine.gpu.network import Network
from dsv4_tierd.engine.gpu.prefill import ChunkPlace, Prefill
from dsv4_tierd.engine.model.config import ModelConfig
from dsv4_tierd.engine.model.transformer import Transformer
from dsv4_tierd.engine.runner import Chunk, Runner
from dsv4_tierd.kernels.layout import RowKind
from dsv4_tierd.kernels.swap_in import PAIRS_MAX
from dsv4_tierd.tiering.blocks import BLOCK_TOKENS
from dsv4_tierd.tiering.manager import TierManager
from dsv4_tierd.tiering.sequence import Sequence

_BATCHES = (*range(1, 9), *range(12, 33, 4), *range(40, 257, 8))
# Pages; then in steps of four times. No budget shortens them: they cut attention's sums.
_COLUMNS_MIN = 16
_POLL_S = 0.0001


@dataclass(slots=True)
class DeviceChunk(Chunk):
    """A chunk half done, and where its rows lie. positions: int32."""

    place: ChunkPlace


class DeviceRunner(Runner):
    """Prefill by layers, decode by graphs."""

    def __init__(
        self,
        model: Transformer,
        tiers: TierManager,
        batch_rows: int,
        chunk_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        side_streams: bool = True,
    ) -> None:
        super().__init__(model, tiers, batch_rows)
        self.network = Network(model, max(batch_rows, chunk_tokens), dtype)
        plan = tiers.config.plan
        workspace = torch.empty(plan.score_count, dtype=torch.float32, device=self.device)
        self.prefill = Prefill(self.network, tiers, workspace)
        # Sessions of one graph: what one plan of swap-ins takes, and the largest batch below.
        self.together_max = min(PAIRS_MAX // max(model.config.index_topk, 1), _BATCHES[-1])
        self._step = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._steps: dict[tuple[int, int], DecodeStep] = {}
        self._side_streams = side_streams
        cuda = self.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if cuda else None

    @property
    def exposed_copy_s(self) -> float:
        """Seconds that prefill has waited for C4 rows so far."""
        return 0.0 if self.prefill.staging is None else self.prefill.staging.exposed_copy_s

    def record_choices(self, on: bool) -> Tensor:
        """What every decode step chooses, until it is switched off: [C4 layers, batch, k] int32.

        For one session; another reach of its page table gives another tensor.
        """
        if not on:
            self._steps.clear()
            return torch.empty(0, dtype=torch.int32)
        pages = max(seq.page_count for seq in self.tiers.running)
        return self._step_for(1, pages).record_choices()

    def settle(self) -> None:
        """Wait for what is queued on the device: before time is measured."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @torch.no_grad()
    def begin(self, seq: Sequence, stop: int) -> DeviceChunk:
        self.tiers.begin_chunk(seq)
        self.tiers.extend(seq, stop)
        words = seq.transcript.tokens[seq.position : stop].astype("int32")
        ids = torch.from_numpy(words).to(self.device)
        positions = torch.arange(seq.position, stop, device=self.device, dtype=torch.int32)
        x = self.network.embed(ids)
        place = self.prefill.begin(seq, stop)
        return DeviceChunk(seq, seq.position, stop, 0, ids, positions, x, place)

    def _layer(self, chunk: Chunk) -> None:
        assert isinstance(chunk, DeviceChunk)
        if not len(chunk.x):
            self.prefill.skip(chunk.layer, chunk.place)
            return
        chunk.x = self.prefill.layer(chunk.layer, chunk.place, chunk.x, chunk.ids, chunk.positions)

    def _logits(self, x: Tensor) -> Tensor:
        return self.network.logits(x)

    @torch.no_grad()
    def finish(self, chunk: Chunk, want_logits: bool) -> Tensor | None:
        """As the plain one's; waits for all that the chunk queued.

        Its sequence may end now, and others write its pages from the host.
        """
        logits = super().finish(chunk, want_logits)
        self._outwait()
        return logits

    def _outwait(self) -> None:
        """As ``settle``, with time for what is done at layer borders."""
        if self.device.type == "cuda":
            queued = torch.cuda.Event()
            queued.record()
            wait(queued.query, self.at_border)

    @torch.no_grad()
    def decode(self, seqs: Seq[Sequence]) -> Tensor:
        assert 0 < len(seqs) <= self.batch_rows, len(seqs)
        for seq in seqs:
            self.tiers.extend(seq, seq.position + 1)
        parts = [seqs[i : i + self.together_max] for i in range(0, len(seqs), self.together_max)]
        logits = self._run(parts[0])
        if len(parts) > 1:  # a run overwrites the results of the one before
            logits = torch.cat([logits.clone(), *(self._run(part).clone() for part in parts[1:])])
        for seq in seqs:
            self.tiers.commit(seq, seq.position + 1, decoded=True)
        return logits

    def _run(self, seqs: Seq[Sequence]) -> Tensor:
        return self._step_for(len(seqs), max(seq.page_count for seq in seqs)).run(seqs)

    @torch.no_grad()
    def record(self, seq: Sequence, batch_max: int) -> None:
        """Record the graphs of up to ``batch_max`` sessions at every reach, before any is wanted.

        ``seq`` stands for all of a batch; its pending token is computed again each time, and not
        committed.
        """
        self.tiers.extend(seq, seq.position + 1)
        most = -(-self.tiers.config.plan.context_tokens // BLOCK_TOKENS)
        columns = _COLUMNS_MIN
        assert seq.page_count <= columns, "a text longer than the shortest page table"
        while True:
            for batch in range(1, min(batch_max, self.batch_rows) + 1):
                self._step_for(batch, columns).run([seq])
            if columns >= most:
                return
            columns *= 4

    def _step_for(self, count: int, pages: int) -> DecodeStep:
        batch = next((size for size in _BATCHES if size >= count), self.batch_rows)
        batch = min(batch, self.batch_rows)  # what the hot set has rows for
        columns = _COLUMNS_MIN
        while columns < pages:
            columns *= 4
        key = batch, columns
        if key not in self._steps:
            self._steps[key] = DecodeStep(
                self.network,
                self.tiers,
                batch,
                columns,
                self._step,
                self._pool,
                self._side_streams,
            )
        return self._steps[key]


def wait(over: Callable[[], bool], meanwhile: Callable[[], None]) -> None:
    """Wait until it is over, and do something else meanwhile: the host is ahead of the device."""
    while not over():
        meanwhile()
        time.sleep(_POLL_S)


def why_not(config: ModelConfig, kind: RowKind) -> str | None:
    """Why the ops cannot run this model with these rows, in words; None: they can."""
    if kind is not RowKind.FP8:
        return f"--kv-dtype {kind.value}: the kernels read fp8 rows"
    wanted = (512, 64, 64, 128)
    found = (config.head_dim, config.qk_rope_head_dim, config.index_n_heads, config.index_head_dim)
    if found != wanted:
        return f"(head_dim, rope, index heads, index dim) are {found}, the kernels take {wanted}"
    return None
