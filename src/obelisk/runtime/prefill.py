"""Prompts outside the kernel: many positions at a time, by matrix products of the library.

Takes a plan, its packed weights and the key-value cache; writes the keys and values of a prompt's
positions in place, as the kernel itself would (its sums in another order: within 1e-5 of the
largest, fp32). The weights of a layer are unpacked once for each block of tokens, so this pays for
prompts longer than a few tokens. No logits are formed: the last token goes through the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from obelisk.plan import Plan
from obelisk.runtime.unpacking import matrix, rows_of

Array = Any
BLOCK = 512  # tokens of all slots that go through the layers together
SCORES = 1 << 24  # at most about so many scores are formed together


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of a slot, the first of which is at position `start`."""

    slot: int
    start: int
    tokens: tuple[int, ...]

    @property
    def positions(self) -> Array:
        """The positions of the tokens."""
        return np.arange(self.start, self.start + len(self.tokens))


def blocks(segments: Sequence[Segment], size: int = BLOCK) -> list[list[Segment]]:
    """Segments cut and joined so that each list holds at most `size` tokens, in order."""
    out: list[list[Segment]] = [[]]
    room = size
    for s in segments:
        at = 0
        while at < len(s.tokens):
            part = s.tokens[at : at + room]
            out[-1].append(Segment(s.slot, s.start + at, part))
            at, room = at + len(part), room - len(part)
            if room == 0:
                out.append([])
                room = size
    return [b for b in out if b]


class Prefill:
    """The layers of a plan's model, for blocks of tokens."""

    def __init__(
        self, plan: Plan, arena: Array, keys: Array, values: Array, cosines: Array, sines: Array
    ) -> None:
        """Work on the given arena and cache; cosines and sines are (context, head_dim / 2)."""
        self.arena, self.keys, self.values = arena, keys, values
        self.cosines, self.sines = cosines, sines
        m, layout = plan.model, plan.layout
        self.layers, self.layout = layout.layers, layout
        self.hidden, self.ffn, self.eps = int(m["hidden"]), int(m["ffn"]), np.float32(m["eps"])
        self.groups, self.dim = int(m["kv_heads"]), int(m["head_dim"])
        self.share = int(m["heads"]) // self.groups
        self.matrices = {x.name: x for x in layout.layer_matrices}
        self.vectors = {x.name: x for x in layout.layer_vectors}
        self.embed = next(x for x in layout.matrices if x.name == "embed")

    # ---- weights ----
    def _base(self, layer: int) -> int:
        return self.layout.layer_offset + layer * self.layout.layer_bytes

    def _vector(self, name: str, layer: int) -> Array | None:
        v = self.vectors.get(name)
        if v is None:
            return None
        return self.arena[self._base(layer) + v.offset :][: 4 * v.size].view(np.float32)

    def _product(self, name: str, layer: int, x: Array) -> Array:
        """x @ w^T with its bias; (tokens, packed rows)."""
        y = x @ matrix(self.arena, self._base(layer), self.matrices[name]).T
        bias = self._vector(f"{name}_bias", layer)
        if bias is not None:
            y[:, : bias.size] += bias
        return y

    # ---- parts of a layer ----
    def _norm(self, x: Array, gain: Array | None) -> Array:
        mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
        return x / np.sqrt(mean + self.eps) * gain

    def _turn(self, x: Array, gain: Array | None, at: Array) -> Array:
        """Head norm where there is one, and rotation of halves; x is (tokens, ..., head_dim)."""
        if gain is not None:
            x = self._norm(x, gain)
        half = self.dim // 2
        shape = (len(at),) + (1,) * (x.ndim - 2) + (half,)
        cos, sin = self.cosines[at].reshape(shape), self.sines[at].reshape(shape)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def _attend(self, layer: int, s: Segment, q: Array) -> Array:
        """Causal attention of a segment's queries (tokens, groups, share, dim)."""
        out = np.empty_like(q)
        most = s.start + len(s.tokens)
        step = max(8, min(256, SCORES // (self.groups * self.share * most)))
        for first in range(0, len(s.tokens), step):
            rows = slice(first, min(first + step, len(s.tokens)))
            count, end = rows.stop - first, s.start + rows.stop
            part = q[rows].transpose(1, 2, 0, 3).reshape(self.groups, -1, self.dim)
            keys, values = (c[layer, s.slot, :, :end] for c in (self.keys, self.values))
            scores = part @ keys.transpose(0, 2, 1) * np.float32(self.dim**-0.5)
            wide = scores.reshape(self.groups, self.share, count, end)
            hidden = np.arange(end) > s.positions[rows, None]
            wide[:, :, hidden] = -np.inf
            wide -= wide.max(-1, keepdims=True)
            np.exp(wide, out=wide)
            wide /= wide.sum(-1, keepdims=True)
            mixed = (scores @ values).reshape(self.groups, self.share, count, self.dim)
            out[rows] = mixed.transpose(2, 0, 1, 3)
        return out

    def _layer(self, layer: int, x: Array, block: Sequence[Segment], at: Array) -> None:
        """One layer on x (tokens, hidden), in place; the last one only leaves keys and values."""
        n, wide = len(x), self.share * self.dim
        h = self._norm(x, self._vector("norm_in", layer))
        raw = self._product("qkv", layer, h).reshape(n, self.groups, -1)
        q = raw[:, :, :wide].reshape(n, self.groups, self.share, self.dim)
        q = self._turn(q, self._vector("q_gain", layer), at)
        k = self._turn(raw[:, :, wide : wide + self.dim], self._vector("k_gain", layer), at)
        v = raw[:, :, wide + self.dim : wide + 2 * self.dim]
        first = 0
        attended = np.empty_like(q)
        for s in block:
            rows = slice(first, first + len(s.tokens))
            for cache, new in ((self.keys, k), (self.values, v)):
                cache[layer, s.slot][:, s.positions] = new[rows].transpose(1, 0, 2)
            if layer + 1 < self.layers:
                attended[rows] = self._attend(layer, s, q[rows])
            first = rows.stop
        if layer + 1 == self.layers:
            return
        x += self._product("o", layer, attended.reshape(n, -1))[:, : self.hidden]
        h = self._norm(x, self._vector("norm_mid", layer))
        panel = self.matrices["up"].panel
        pairs = self._product("up", layer, h).reshape(n, -1, 2, panel)
        gate, up = (pairs[:, :, i].reshape(n, -1)[:, : self.ffn] for i in (0, 1))
        with np.errstate(over="ignore"):  # exp of a large number: the gate is 0
            act = gate / (1 + np.exp(-gate)) * up
        x += self._product("down", layer, act)[:, : self.hidden]

    def run(self, segments: Sequence[Segment]) -> None:
        """Write the keys and values of all tokens of `segments` (one for each slot, in order)."""
        for block in blocks(segments):
            tokens = np.concatenate([np.asarray(s.tokens, np.int64) for s in block])
            at = np.concatenate([s.positions for s in block])
            x = rows_of(self.arena, 0, self.embed, tokens)
            for layer in range(self.layers):
                self._layer(layer, x, block, at)
