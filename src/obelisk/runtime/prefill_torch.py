"""Prompts outside the CUDA kernel: many positions at a time, by torch's products and attention.

Takes a plan and tensors over its arena, key-value cache and rotary tables, where a session has them
(on a device; the tests have them in host memory); writes the keys and values of a prompt's
positions in place. Numbers are rounded where the kernel rounds them: inputs of products, keys and
values to 16 bits; sums, norms and the residual stream are fp32. Queries and probabilities, which
the kernel keeps as two numbers, are 16 bits here. With fp32 weights nothing is rounded, and torch
is kept from doing it (TF32). The weights of a layer are unpacked once for each
block of tokens; the model is never held twice. It imports torch: a session imports it when a prompt
is long enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention, silu

from obelisk.plan import Plan
from obelisk.runtime.prefill import Segment, blocks
from obelisk.runtime.unpacking_torch import TYPES, Reader, readable, reader, rows_of

Tensor = Any
BLOCK, LEAST_BLOCK = 4096, 256  # tokens of all slots that go through the layers together
SCORES = 1 << 24  # at most about so many scores are formed together, where they are formed at all
OutOfMemory = torch.cuda.OutOfMemoryError


def product(x: Tensor, w: Tensor) -> Tensor:
    """x @ w^T of 16-bit numbers with fp32 sums, or of fp32 ones; float32."""
    if x.is_cuda and x.dtype is not torch.float32:
        return torch.mm(x, w.t(), out_dtype=torch.float32)
    return x.float() @ w.float().t()


@contextmanager
def unrounded() -> Iterator[None]:
    """Torch's products of fp32 in fp32, whatever it was told of TF32 and is told again after."""
    matmul = torch.backends.cuda.matmul
    name, off = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else (
        "allow_tf32", False
    )  # fmt: skip
    before = getattr(matmul, name)
    setattr(matmul, name, off)
    try:
        yield
    finally:
        setattr(matmul, name, before)


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
        self.readers: dict[tuple[str, int], Reader] = {}
        self.views: dict[tuple[str, int], Tensor | None] = {}

    @staticmethod
    def serves(plan: Plan) -> bool:
        """Whether a plan's formats are read here."""
        parts = [*plan.layout.layer_matrices, plan.layout.matrices[0]]
        return plan.cache.format in TYPES and all(map(readable, parts))

    # ---- weights ----
    def _vector(self, name: str, layer: int) -> Tensor | None:
        """A layer's gain or bias, as it lies; the views are kept: making one costs the host as much
        as starting a kernel.
        """
        key = (name, layer)
        if key not in self.views:
            v = self.vectors.get(name)
            at = self.layout.layer_offset + layer * self.layout.layer_bytes
            self.views[key] = None
            if v is not None:
                at += v.offset
                size = self.hidden if name.startswith("norm") else v.size  # without padding
                self.views[key] = self.arena[at : at + 4 * size].view(torch.float32)
        return self.views[key]

    def _head_gains(self, layer: int) -> Tensor | None:
        """Gains of a group's query heads and key head, (share + 1, head_dim); None without."""
        key = ("head gains", layer)
        if key not in self.views:
            q, k = self._vector("q_gain", layer), self._vector("k_gain", layer)
            both = None if q is None or k is None else torch.stack([q] * self.share + [k])
            self.views[key] = both
        return self.views[key]

    def _product(self, name: str, layer: int, x: Tensor, root: Tensor | None = None) -> Tensor:
        """x @ w^T, times `root` of each token where there is one, and its bias; float32 (tokens,
        packed rows).
        """
        key = (name, layer)
        if key not in self.readers:
            base = self.layout.layer_offset + layer * self.layout.layer_bytes
            self.readers[key] = reader(self.arena, base, self.matrices[name])
        w = self.readers[key]()
        y = product(x, w.value)
        if w.scale is not None:
            y *= w.scale
        if root is not None:
            y *= root
        bias = self._vector(f"{name}_bias", layer)
        if bias is not None:
            y[:, : len(bias)] += bias
        return y

    def _onto(self, x: Tensor, y: Tensor) -> None:
        """Add a product's true rows to the residual stream."""
        x += y if y.shape == x.shape else y[:, : self.hidden]

    # ---- parts of a layer ----
    def _root(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def _normed(self, name: str, layer: int, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The inputs of the products behind a norm, and what multiplies their results: as in the
        kernel, the root comes after the product, but for fp16, which could overflow.
        """
        gain = self._vector(name, layer)
        assert gain is not None
        gained, root = x * gain, self._root(x)
        if self.type is not torch.float16:
            return gained.to(self.type), root
        return (gained * root).to(self.type), None

    def _turn(self, x: Tensor, gain: Tensor | None, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Head norm where there is one, and rotation of halves; x is (tokens, groups, heads,
        head_dim), `angles` cosines and sines, negative in the first half.
        """
        if gain is not None:
            x = x * self._root(x) * gain
        return torch.addcmul(x * angles[0], x.roll(self.dim // 2, -1), angles[1])

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
        if s.start == 0 and step >= count:
            mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
            out.copy_(mixed.permute(2, 0, 1, 3))
            return
        for first in range(0, count, step):
            last = min(first + step, count)
            upto = s.start + last
            mixed = scaled_dot_product_attention(
                queries[:, :, first:last], keys[:, :, :upto], values[:, :, :upto],
                attn_mask=causal_lower_right(last - first, upto),
            )  # fmt: skip
            out[first:last] = mixed.permute(2, 0, 1, 3)

    def _layer(
        self, layer: int, x: Tensor, block: Sequence[Segment], angles: tuple[Tensor, Tensor]
    ) -> None:
        """One layer on x (tokens, hidden), in place; the last one only leaves keys and values."""
        n, heads = len(x), self.share + 2
        raw = self._product("qkv", layer, *self._normed("norm_in", layer, x))
        raw = raw[:, : self.groups * heads * self.dim].view(n, self.groups, heads, self.dim)
        turned = self._turn(raw[:, :, :-1], self._head_gains(layer), angles).to(self.type)
        new = (turned[:, :, -1], raw[:, :, -1])
        first = 0
        for s in block:
            rows, upto = slice(first, first + len(s.tokens)), s.start + len(s.tokens)
            for cache, part in zip((self.keys, self.values), new, strict=True):
                cache[layer, s.slot, :, s.start : upto] = part[rows].transpose(0, 1)
            first = rows.stop
        if layer + 1 == self.layers:
            return
        q = turned[:, :, :-1]
        attended, first = torch.empty(q.shape, dtype=q.dtype, device=q.device), 0
        for s in block:
            rows = slice(first, first + len(s.tokens))
            self._attend(layer, s, q[rows], attended[rows])
            first = rows.stop
        self._onto(x, self._product("o", layer, attended.view(n, -1)))
        every = self.matrices["up"].blocks[0].every
        up = self._product("up", layer, *self._normed("norm_mid", layer, x))
        pairs = up.view(n, -1, 2, every)
        act = (silu(pairs[:, :, 0]) * pairs[:, :, 1]).to(self.type).view(n, -1)
        act = act if act.shape[1] == self.ffn else act[:, : self.ffn]
        self._onto(x, self._product("down", layer, act))

    def _angles(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, (tokens, 1, 1, head_dim)."""
        cos, sin = self.cosines[at], self.sines[at]
        both = (torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))
        return (both[0][:, None, None], both[1][:, None, None])

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

    @unrounded()
    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _run(self, segments: Sequence[Segment]) -> None:
        device = self.arena.device
        for block in blocks(segments, self.block):
            tokens = torch.tensor([t for s in block for t in s.tokens], device=device)
            at = torch.cat(
                [torch.arange(s.start, s.start + len(s.tokens), device=device) for s in block]
            )
            x, angles = rows_of(self.arena, 0, self.embed, tokens), self._angles(at)
            for layer in range(self.layers):
                self._layer(layer, x, block, angles)
        if self.arena.is_cuda:
            torch.cuda.current_stream(device).synchronize()
