"""DeepSeek-V4 in float64 NumPy, one whole text at a time, from the formulas alone.

Reads plain (fp32, bf16) official checkpoints. Optional quantisers imitate the cache's row
formats, so that a run with FP8 rows has something to equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Quantise = Callable[[Array], Array]


def round_bf16(x: Array) -> Array:
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) & np.uint64(0xFFFF0000)
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def round_e4m3(x: Array) -> Array:
    """The nearest e4m3 value, ties to even, saturating at 448."""
    size = np.minimum(np.abs(x), 448.0)
    exponent = np.floor(np.log2(np.maximum(size, 2.0**-30)))
    step = 2.0 ** (np.maximum(exponent, -6) - 3)
    return np.sign(x) * np.minimum(np.rint(size / step) * step, 448.0)


def fp8_row(rope_dim: int) -> Quantise:
    """Latent rows: e4m3 in groups of 64 with power-of-two scales, the rotated part bf16."""

    def quantise(x: Array) -> Array:
        nope = round_bf16(x[..., :-rope_dim])
        groups = nope.reshape(*nope.shape[:-1], -1, 64)
        amax = np.maximum(np.abs(groups).max(-1, keepdims=True), 1e-4)
        scale = 2.0 ** np.ceil(np.log2(amax / 448))
        rounded = (round_e4m3(groups / scale) * scale).reshape(nope.shape)
        return np.concatenate([rounded, round_bf16(x[..., -rope_dim:])], -1)

    return quantise


def fp8_key(x: Array) -> Array:
    """Index keys: Hadamard, then e4m3 with one fp32 scale a key. Returned in that basis."""
    n = x.shape[-1]
    signs = np.array([[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)])
    turned = x @ signs / math.sqrt(n)
    scale = np.maximum(np.abs(turned).max(-1, keepdims=True), 1e-4) / 448
    return round_e4m3(turned / scale) * scale @ signs / math.sqrt(n)  # back: queries stay exact


def exact(x: Array) -> Array:
    return x


class NaiveModel:
    """``margin[t]``: the smallest gap between a chosen and a rejected score so far at token t."""

    def __init__(self, folder: str | Path, row: Quantise = exact, key: Quantise = exact) -> None:
        self.c: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
        tensors = load_file(Path(folder) / "model.safetensors")
        self.w: dict[str, Array] = {name: t.double().numpy() for name, t in tensors.items()}
        self.row, self.key, self.eps = row, key, self.c["rms_norm_eps"]

    def logits(self, ids: Ints) -> Array:
        return self._head(self.streams(ids), "")

    def streams(self, ids: Ints) -> Array:
        """[T, n, d]; sets ``margin``."""
        self.margin = np.full(len(ids), np.inf)
        x = np.repeat(self.w["embed.weight"][ids][:, None], self.c["hc_mult"], 1)
        for i in range(self.c["num_hidden_layers"]):
            hashed = i < self.c["num_hash_layers"]
            x = self._block(x, ids, f"layers.{i}.", self.c["compress_ratios"][i], hashed)
        return x

    def mtp_logits(self, ids: Ints) -> Array:
        """Row t, from tokens 0 .. t+1, is for token t+2."""
        x, p = self.streams(ids)[:-1], "mtp.0."
        after = self._rms(self.w["embed.weight"][ids[1:]], p + "enorm.weight")
        joined = (after @ self.w[p + "e_proj.weight"].T)[:, None]
        joined = joined + self._rms(x, p + "hnorm.weight") @ self.w[p + "h_proj.weight"].T
        self.margin = self.margin[:-1]
        return self._head(self._block(joined, ids[1:], p, 0, False), p)

    # -------------------------------------------------------------- streams
    def _block(self, x: Array, ids: Ints, p: str, ratio: int, hashed: bool) -> Array:
        for part in ("attn", "ffn"):
            pre, post, comb = self._mixes(x, f"{p}hc_{part}_")
            h = self._rms(np.einsum("tn,tnd->td", pre, x), f"{p}{part}_norm.weight")
            if part == "attn":
                y = self._attention(h, p + "attn.", ratio)
            else:
                y = self._experts(h, ids, p + "ffn.", hashed)
            x = post[:, :, None] * y[:, None] + np.einsum("tjk,tjd->tkd", comb, x)
        return x

    def _mixes(self, x: Array, p: str) -> tuple[Array, Array, Array]:
        n, eps = self.c["hc_mult"], self.c["hc_eps"]
        m = self._rms(x.reshape(len(x), -1)) @ self.w[p + "fn"].T
        s, b = self.w[p + "scale"], self.w[p + "base"]
        comb = np.exp(s[2] * m[:, 2 * n :] + b[2 * n :]).reshape(-1, n, n)
        comb = comb / comb.sum(2, keepdims=True) + eps
        for turn in range(2 * self.c["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(1 if turn % 2 == 0 else 2, keepdims=True) + eps)
        pre = sigmoid(s[0] * m[:, :n] + b[:n]) + eps
        return pre, 2 * sigmoid(s[1] * m[:, n : 2 * n] + b[n : 2 * n]), comb

    def _head(self, x: Array, p: str) -> Array:
        m = self._rms(x.reshape(len(x), -1)) @ self.w[p + "hc_head_fn"].T
        weights = sigmoid(self.w[p + "hc_head_scale"] * m + self.w[p + "hc_head_base"])
        h = np.einsum("tn,tnd->td", weights + self.c["hc_eps"], x)
        return self._rms(h, p + "norm.weight") @ self.w["head.weight"].T

    def _rms(self, x: Array, name: str = "") -> Array:
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)
        return y * self.w[name] if name else y

    # -------------------------------------------------------------- attention
    def _attention(self, h: Array, p: str, ratio: int) -> Array:
        c, w, tokens = self.c, self.w, len(h)
        t = np.arange(tokens)
        low = self._rms(h @ w[p + "wq_a.weight"].T, p + "q_norm.weight")
        q = (low @ w[p + "wq_b.weight"].T).reshape(tokens, c["num_attention_heads"], -1)
        q = self._turn(self._rms(q), t, ratio)
        keys = self._rms(h @ w[p + "wkv.weight"].T, p + "kv_norm.weight")
        keys = self.row(self._turn(keys, t, ratio))
        ago = t[:, None] - t
        seen = (ago >= 0) & (ago < c["sliding_window"])
        if ratio:
            entries = self.row(self._entries(h, p + "compressor.", ratio))
            visible = np.arange(len(entries)) < ((t + 1) // ratio)[:, None]
            if ratio == 4:
                visible = self._chosen(h, low, p + "indexer.", visible)
            keys, seen = np.concatenate([keys, entries]), np.concatenate([seen, visible], 1)
        scores = np.einsum("thd,nd->thn", q, keys) / math.sqrt(c["head_dim"])
        weights = np.exp(np.where(seen[:, None], scores, -np.inf))
        total = weights.sum(-1, keepdims=True) + np.exp(w[p + "attn_sink"])[:, None]
        o = np.einsum("thn,nd->thd", weights / total, keys)
        o = self._turn(o, t, ratio, -1).reshape(tokens, c["o_groups"], -1)
        wo_a = w[p + "wo_a.weight"].reshape(c["o_groups"], c["o_lora_rank"], -1)
        u = np.einsum("tgd,grd->tgr", o, wo_a).reshape(tokens, -1)
        return u @ w[p + "wo_b.weight"].T

    def _entries(self, h: Array, p: str, ratio: int) -> Array:
        """[T // ratio, E], normed and rotated."""
        kv, z = h @ self.w[p + "wkv.weight"].T, h @ self.w[p + "wgate.weight"].T
        dim, count = len(self.w[p + "norm.weight"]), len(h) // ratio
        entries = np.zeros((count, dim))
        for group in range(count):
            own = slice(group * ratio, (group + 1) * ratio)
            high = slice(dim if ratio == 4 else 0, None)
            values, gates = kv[own, high], z[own, high] + self.w[p + "ape"][:, high]
            if ratio == 4 and group:
                last = slice((group - 1) * ratio, group * ratio)
                values = np.concatenate([kv[last, :dim], values])
                gates = np.concatenate([z[last, :dim] + self.w[p + "ape"][:, :dim], gates])
            weights = np.exp(gates - gates.max(0))
            entries[group] = (weights * values).sum(0) / weights.sum(0)
        entries = self._rms(entries, p + "norm.weight")
        return self._turn(entries, np.arange(count) * ratio, ratio)

    def _chosen(
        self, h: Array, low: Array, p: str, visible: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        c, w, tokens, k = self.c, self.w, len(h), self.c["index_topk"]
        q = (low @ w[p + "wq_b.weight"].T).reshape(tokens, c["index_n_heads"], -1)
        q = self._turn(q, np.arange(tokens), 4)
        keys = self.key(self._entries(h, p + "compressor.", 4))
        gates = h @ w[p + "weights_proj.weight"].T
        gates /= math.sqrt(c["index_n_heads"] * c["index_head_dim"])
        products = np.maximum(np.einsum("thd,nd->thn", q, keys), 0)
        scores = np.where(visible, np.einsum("thn,th->tn", products, gates), -np.inf)
        order = np.argsort(-scores, 1, kind="stable")
        keep = np.zeros_like(visible)
        np.put_along_axis(keep, order[:, :k], True, 1)
        self._note(scores, order, k)
        return keep & visible

    def _note(self, scores: Array, order: Ints, k: int) -> None:
        """Remember how close the choice of k was."""
        if scores.shape[1] > k:
            last = np.take_along_axis(scores, order[:, k - 1 : k + 1], 1)
            rivalled = np.isfinite(last[:, 1])
            gap = last[rivalled, 0] - last[rivalled, 1]
            self.margin[rivalled] = np.minimum(self.margin[rivalled], gap)

    def _turn(self, x: Array, t: Ints, ratio: int, sign: int = 1) -> Array:
        """Rotate the last channels, as complex numbers."""
        dim = self.c["qk_rope_head_dim"]
        pairs = x[..., -dim::2] + 1j * x[..., -dim + 1 :: 2]
        angles = (t.astype(np.float32)[:, None] * self._frequencies(ratio)).astype(np.float64)
        angles = angles.reshape(len(t), *(1,) * (x.ndim - 2), dim // 2)
        pairs = pairs * np.exp(1j * sign * angles)
        turned = np.stack([pairs.real, pairs.imag], -1).reshape(*x.shape[:-1], dim)
        return np.concatenate([x[..., :-dim], turned], -1)

    def _frequencies(self, ratio: int) -> NDArray[np.float32]:
        dim, yarn = self.c["qk_rope_head_dim"], self.c["rope_scaling"]
        theta = self.c["compress_rope_theta"] if ratio else self.c["rope_theta"]
        i = np.arange(dim // 2)
        table = theta ** (-2.0 * i / dim)
        if ratio:
            low, high = (
                dim
                * math.log(yarn["original_max_position_embeddings"] / (turns * 2 * math.pi))
                / (2 * math.log(theta))
                for turns in (yarn["beta_fast"], yarn["beta_slow"])
            )
            first, last = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
            slow = np.clip((i - first) / ((last - first) or 0.001), 0, 1)
            table = table * (1 - slow) + table / yarn["factor"] * slow
        return np.asarray(table, dtype=np.float32)

    # -------------------------------------------------------------- experts
    def _experts(self, h: Array, ids: Ints, p: str, hashed: bool) -> Array:
        k, w = self.c["num_experts_per_tok"], self.w
        scores = np.sqrt(np.logaddexp(0, h @ w[p + "gate.weight"].T))
        if hashed:
            picks = w[p + "gate.tid2eid"][ids].astype(np.int64)
        else:
            biased = scores + w[p + "gate.bias"]
            order = np.argsort(-biased, 1, kind="stable")
            picks = order[:, :k]
            self._note(biased, order, k)
        y = self._ffn(h, p + "shared_experts.")
        for t in range(len(h)):
            shares = scores[t, picks[t]] / scores[t, picks[t]].sum()
            for share, expert in zip(shares, picks[t], strict=True):
                out = self._ffn(h[t], f"{p}experts.{expert}.")
                y[t] += share * self.c["routed_scaling_factor"] * out
        return y

    def _ffn(self, h: Array, p: str) -> Array:
        limit = self.c["swiglu_limit"]
        gate = np.minimum(self.w[p + "w1.weight"] @ h.T, limit)
        up = np.clip(self.w[p + "w3.weight"] @ h.T, -limit, limit)
        return (self.w[p + "w2.weight"] @ (gate * sigmoid(gate) * up)).T


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))
