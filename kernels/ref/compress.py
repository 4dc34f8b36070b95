"""Pool groups of tokens into cache entries, from rings of raw projections.

A ring row is [kv | gate] of one token, raw (no position bias), at ``position % ring_len``:
8 rows for ratio 4, whose groups overlap their predecessor, 128 for ratio 128. Because rows are
addressed by position, going back to an earlier position undoes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4_tierd.kernels.ref import steady
from dsv4_tierd.kernels.ref.rope import rotate


@dataclass(frozen=True, slots=True)
class CompressParams:
    """Constants of one compressor: entries of E values, one for ``ratio`` tokens.

    ape: [ratio, c*E] fp32; norm: [E] fp32; inv_freq: [R/2] fp32. c = 2 where groups overlap.
    """

    ape: Tensor
    norm: Tensor
    eps: float
    inv_freq: Tensor
    ratio: int

    @property
    def entry_dim(self) -> int:
        return self.norm.shape[0]

    @property
    def overlaps(self) -> bool:
        return self.ape.shape[1] == 2 * self.entry_dim

    @property
    def ring_len(self) -> int:
        """Rows of a ring: every token that a group still to be closed may need."""
        return 2 * self.ratio if self.overlaps else self.ratio

    @property
    def ring_dim(self) -> int:
        """Values of a ring row: kv and gate."""
        return 2 * self.ape.shape[1]


def compress_prefill(
    kv: Tensor, gate: Tensor, start: int, ring: Tensor, params: CompressParams, out_ring: Tensor
) -> Tensor:
    """Entries of the groups that tokens start .. start+T-1 close, and the ring after them.

    kv, gate: [T, c*E] fp32 raw projections; ring: [ring_len, 2*c*E] fp32, the state before
    ``start`` (not read for positions below 0); out_ring: like ring, overwritten, may be ring
    itself. Returns [n, E] fp32, normed and rotated at the group's first position, in order,
    n = (start+T)//ratio - start//ratio. An entry's bits do not depend on where chunks are cut.
    """
    length, tokens = params.ring_len, kv.shape[0]
    if not tokens:
        out_ring.copy_(ring)
        return kv.new_empty(0, params.entry_dim)
    first = max(0, start - length)
    history = ring[torch.arange(first, start, device=kv.device) % length]
    rows = torch.cat([history, torch.cat([kv, gate], -1)])
    groups = torch.arange(start // params.ratio, (start + tokens) // params.ratio, device=kv.device)
    positions = _group_positions(groups, params)
    entries = _pool(rows[(positions - first).clamp_min(0)], positions, groups, params)
    kept = torch.arange(max(first, start + tokens - length), start + tokens, device=kv.device)
    out_ring[kept % length] = rows[kept - first]
    return entries


def compress_decode(
    kv: Tensor,
    gate: Tensor,
    positions: Tensor,
    rings: Tensor,
    slots: Tensor,
    params: CompressParams,
) -> Tensor:
    """One token for each of B sessions: write ring rows, pool the groups that close.

    kv, gate: [B, c*E] fp32; positions: [B] int; rings: [S, ring_len, 2*c*E] fp32, written at
    ``slots`` [B] int (distinct, but for padding). Returns [B, E] fp32: the entry where the token
    closes its group (position % ratio == ratio-1), bit-equal to compress_prefill's, else zeros.
    """
    length = params.ring_len
    rings[slots, positions % length] = torch.cat([kv, gate], -1)
    entries = kv.new_zeros(kv.shape[0], params.entry_dim)
    closing = (positions % params.ratio == params.ratio - 1).nonzero().squeeze(-1)
    if closing.numel():
        groups = positions[closing] // params.ratio
        members = _group_positions(groups, params)
        rows = rings[slots[closing].unsqueeze(-1), members.clamp_min(0) % length]
        entries[closing] = _pool(rows, members, groups, params)
    return entries


def _group_positions(groups: Tensor, params: CompressParams) -> Tensor:
    """Token positions that each group pools: [G, ratio], or [G, 2*ratio] with the group before."""
    back = params.ratio if params.overlaps else 0
    offsets = torch.arange(-back, params.ratio, device=groups.device)
    return groups.unsqueeze(-1) * params.ratio + offsets


def _pool(rows: Tensor, positions: Tensor, groups: Tensor, params: CompressParams) -> Tensor:
    """Softmax-weighted sum a group, norm and rope. rows: [G, slots, 2*c*E] at ``positions``."""
    dim, ratio = params.entry_dim, params.ratio
    kv, gate = rows.chunk(2, -1)
    gate = gate + params.ape[positions % ratio]
    if params.overlaps:
        # The group before gives its low half, this group its high half.
        kv = torch.cat([kv[:, :ratio, :dim], kv[:, ratio:, dim:]], 1)
        gate = torch.cat([gate[:, :ratio, :dim], gate[:, ratio:, dim:]], 1)
        absent = (positions < 0).unsqueeze(-1)
        kv, gate = kv.masked_fill(absent, 0.0), gate.masked_fill(absent, -torch.inf)
    weights = steady.exp(gate - gate.amax(1, keepdim=True))
    pooled = steady.fold_sum(weights * kv, 1) / steady.fold_sum(weights, 1)
    return rotate(steady.rms_norm(pooled, params.norm, params.eps), groups * ratio, params.inv_freq)
