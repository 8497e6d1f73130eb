"""Prompts outside the CUDA kernel: many positions at a time, by torch's products and attention.

Takes a plan and tensors over its arena, key-value cache and rotary tables, where a session has them
(on a device; the tests have them in host memory); writes the keys and values of a prompt's
positions in place. Numbers are rounded where the kernel rounds them: inputs of products, keys and
values to 16 bits; sums, norms and the residual stream are fp32. Queries and probabilities, which
the kernel keeps as two numbers, are 16 bits here. The weights of a layer are unpacked once for each
block of tokens; the model is never held twice. It imports torch: a session imports it when a prompt
is long enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention, silu

from obelisk.plan import Plan
from obelisk.runtime.prefill import Segment, blocks
from obelisk.runtime.unpacking_torch import TYPES, matrix, readable, rows_of

Tensor = Any
BLOCK, LEAST_BLOCK = 4096, 256  # tokens of all slots that go through the layers together
SCORES = 1 << 24  # at most about so many scores are formed together, where they are formed at all
OutOfMemory = torch.cuda.OutOfMemoryError


def product(x: Tensor, w: Tensor) -> Tensor:
    """x @ w^T of 16-bit numbers with fp32 sums, float32."""
    if x.is_cuda:
        return torch.mm(x, w.t(), out_dtype=torch.float32)
    return x.float() @ w.float().t()


class TorchPrefill:
    """The layers of a plan's model, for blocks of tokens."""

    def __init__(
        self, plan: Plan, arena: Tensor, keys: Tensor, values: Tensor, cosines: Tensor,
        sines: Tensor,
    ) -> None:  # fmt: skip
        """Work on the given memory, all uint8 tensors: the packed weights, the cache, and the
        rotary tables (context, head_dim / 2) of fp32.
        """
        m, layout, shape = plan.model, plan.layout, plan.cache.shape
        self.arena, self.layout = arena, layout
        self.type = TYPES[plan.cache.format]
        self.keys, self.values = (c.view(self.type).view(shape) for c in (keys, values))
        half = int(m["head_dim"]) // 2
        self.cosines, self.sines = (
            t.view(torch.float32).view(plan.context, half) for t in (cosines, sines)
        )
        self.layers, self.hidden, self.ffn = layout.layers, int(m["hidden"]), int(m["ffn"])
        self.groups, self.dim, self.eps = int(m["kv_heads"]), int(m["head_dim"]), float(m["eps"])
        self.share = int(m["heads"]) // self.groups
        self.matrices = {x.name: x for x in layout.layer_matrices}
        self.vectors = {x.name: x for x in layout.layer_vectors}
        self.embed = next(x for x in layout.matrices if x.name == "embed")
        self.block = BLOCK

    @staticmethod
    def serves(plan: Plan) -> bool:
        """Whether a plan's formats are read here."""
        parts = [*plan.layout.layer_matrices, plan.layout.matrices[0]]
        return plan.cache.format in TYPES and all(map(readable, parts))

    # ---- weights ----
    def _base(self, layer: int) -> int:
        return self.layout.layer_offset + layer * self.layout.layer_bytes

    def _vector(self, name: str, layer: int) -> Tensor | None:
        v = self.vectors.get(name)
        if v is None:
            return None
        at = self._base(layer) + v.offset
        return self.arena[at : at + 4 * v.size].view(torch.float32)

    def _product(self, name: str, layer: int, x: Tensor, root: Tensor | None = None) -> Tensor:
        """x @ w^T, times `root` of each token where there is one, and its bias; float32 (tokens,
        packed rows).
        """
        w = matrix(self.arena, self._base(layer), self.matrices[name])
        y = product(x, w.value)
        if w.scale is not None:
            y *= w.scale
        if root is not None:
            y *= root
        bias = self._vector(f"{name}_bias", layer)
        if bias is not None:
            y[:, : len(bias)] += bias
        return y

    # ---- parts of a layer ----
    def _normed(self, name: str, layer: int, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The inputs of the products behind a norm, and what multiplies their results: as in the
        kernel, the root comes after the product, but for fp16, which could overflow.
        """
        root = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        gain = self._vector(name, layer)
        assert gain is not None
        gained = x * gain[: self.hidden]
        if self.type is torch.bfloat16:
            return gained.to(self.type), root
        return (gained * root).to(self.type), None

    def _turn(self, x: Tensor, gain: Tensor | None, at: Tensor) -> Tensor:
        """Head norm where there is one, and rotation of halves; x is (tokens, ..., head_dim)."""
        if gain is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * gain
        half = self.dim // 2
        shape = (len(at),) + (1,) * (x.ndim - 2) + (half,)
        cos, sin = self.cosines[at].view(shape), self.sines[at].view(shape)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _attend(self, layer: int, s: Segment, q: Tensor, out: Tensor) -> None:
        """Causal attention of a segment's queries (tokens, groups, share, dim) into `out`. A group
        is a batch of its own, so that its keys are shared and never repeated.
        """
        count, end = len(s.tokens), s.start + len(s.tokens)
        keys, values = (
            c[layer, s.slot, :, :end].unsqueeze(1).expand(-1, self.share, -1, -1)
            for c in (self.keys, self.values)
        )
        queries = q.permute(1, 2, 0, 3)
        step = count if q.is_cuda else max(8, SCORES // (self.groups * self.share * end))
        for first in range(0, count, step):
            last = min(first + step, count)
            upto = s.start + last
            mixed = scaled_dot_product_attention(
                queries[:, :, first:last], keys[:, :, :upto], values[:, :, :upto],
                attn_mask=causal_lower_right(last - first, upto),
            )  # fmt: skip
            out[first:last] = mixed.permute(2, 0, 1, 3)

    def _layer(self, layer: int, x: Tensor, block: Sequence[Segment], at: Tensor) -> None:
        """One layer on x (tokens, hidden), in place; the last one only leaves keys and values."""
        n, wide = len(x), self.share * self.dim
        raw = self._product("qkv", layer, *self._normed("norm_in", layer, x))
        raw = raw[:, : self.groups * (wide + 2 * self.dim)].view(n, self.groups, -1)
        k = self._turn(raw[:, :, wide : wide + self.dim], self._vector("k_gain", layer), at)
        new = (k, raw[:, :, wide + self.dim :])
        first = 0
        for s in block:
            rows, upto = slice(first, first + len(s.tokens)), s.start + len(s.tokens)
            for cache, part in zip((self.keys, self.values), new, strict=True):
                cache[layer, s.slot, :, s.start : upto] = part[rows].transpose(0, 1)
            first = rows.stop
        if layer + 1 == self.layers:
            return
        q = raw[:, :, :wide].reshape(n, self.groups, self.share, self.dim)
        q = self._turn(q, self._vector("q_gain", layer), at).to(self.type)
        attended, first = torch.empty_like(q), 0
        for s in block:
            rows = slice(first, first + len(s.tokens))
            self._attend(layer, s, q[rows], attended[rows])
            first = rows.stop
        x += self._product("o", layer, attended.view(n, -1))[:, : self.hidden]
        every = self.matrices["up"].blocks[0].every
        up = self._product("up", layer, *self._normed("norm_mid", layer, x))
        pairs = up.view(n, -1, 2, every)
        act = (silu(pairs[:, :, 0]) * pairs[:, :, 1]).to(self.type).view(n, -1)[:, : self.ffn]
        x += self._product("down", layer, act)[:, : self.hidden]

    def run(self, segments: Sequence[Segment]) -> None:
        """Write the keys and values of all tokens of `segments` (one for each slot, in order), and
        wait until they are written.

        Raises `OutOfMemory` where not even small blocks of tokens find room; what was written of
        the segments then means nothing.
        """
        while True:
            try:
                self._run(segments)
                return
            except OutOfMemory:
                if self.block <= LEAST_BLOCK:
                    raise
                self.block //= 4
            torch.cuda.empty_cache()  # outside the handler, whose frames hold tensors

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _run(self, segments: Sequence[Segment]) -> None:
        device = self.arena.device
        for block in blocks(segments, self.block):
            tokens = torch.tensor([t for s in block for t in s.tokens], device=device)
            at = torch.cat(
                [torch.arange(s.start, s.start + len(s.tokens), device=device) for s in block]
            )
            x = rows_of(self.arena, 0, self.embed, tokens)
            for layer in range(self.layers):
                self._layer(layer, x, block, at)
        if self.arena.is_cuda:
            torch.cuda.current_stream(device).synchronize()
