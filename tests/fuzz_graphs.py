"""Random small programs over every operator, and arrays that lie in memory as they ask.

`random_program(seed)` draws a plain program of two to five operators (a composite counts as one) on
awkward extents, in f32, f16 or bf16, with broadcasting, several outputs and odd strides. Values
stay in a range where float64 and the program's own precision can be compared, and no comparison
hangs on a rounded value, so that every disagreement is a fault. The same seed gives the same
program.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from obelisk.base.errors import ObeliskError
from obelisk.ir import DType, Graph, Node, make_graph
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.ir.build import row_major

DIMS = (1, 3, 5, 7, 12, 24, 77, 96, 100, 127, 129, 640, 896)
ELEMENTS = 120_000  # of any value
PRODUCTS = 40_000_000  # multiply-adds of any product


def bounded(x: Node) -> Node:
    """x limited to [-3, 3]."""
    return c.clamp(x, -3.0, 3.0)


def positive(x: Node) -> Node:
    """Between 0.5 and 9.5."""
    return b.add(b.square(bounded(x)), 0.5)


UNARY: tuple[Callable[[Node], Node], ...] = (
    lambda x: b.exp(bounded(x)), lambda x: b.log(positive(x)), lambda x: b.sqrt(positive(x)),
    lambda x: b.rsqrt(positive(x)), lambda x: b.square(bounded(x)), b.neg, b.tanh, b.sigmoid,
    b.erf, c.silu, c.gelu, lambda x: c.gelu(x, "tanh"), c.relu, c.absolute, bounded,
    lambda x: b.mul(x, 0.37), lambda x: b.sub(1.0, x), lambda x: b.div(2.0, positive(x)),
    lambda x: b.cast(b.cast(x, DType.F32), x.dtype), lambda x: b.add(x, b.size(x, 0)),
)  # fmt: skip
BINARY: tuple[Callable[[Node, Node], Node], ...] = (
    b.add, b.sub, b.maximum, b.minimum, lambda x, y: b.mul(bounded(x), bounded(y)),
    lambda x, y: b.div(x, positive(y)),
    lambda x, y: b.where(b.less(x, y), b.sub(y, x), b.mul(b.sub(x, y), 0.5)),  # continuous
)  # fmt: skip


@dataclass
class Maker:
    """A program under construction."""

    rng: random.Random
    dtype: DType
    inputs: list[Node] = field(default_factory=list)
    values: list[Node] = field(default_factory=list)

    def chance(self, p: float) -> bool:
        """True with probability p."""
        return self.rng.random() < p

    def shape(self) -> tuple[int, ...]:
        """A random shape of rank 1 to 4 within the limit."""
        while True:
            shape = tuple(self.rng.choice(DIMS) for _ in range(self.rng.choice((1, 2, 2, 2, 3, 4))))
            if prod(shape) <= ELEMENTS:
                return shape

    def strides(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Mostly dense; else permuted, padded, with gaps, or repeating along a dim."""
        if self.chance(0.7):
            return None
        kind = self.rng.randrange(4)
        if kind == 0:
            order = self.rng.sample(range(len(shape)), len(shape))
            inner = row_major(tuple(shape[d] for d in order))
            return tuple(inner[order.index(d)] for d in range(len(shape)))
        if kind == 1:
            padded = (*shape[:-1], shape[-1] + self.rng.choice((1, 3, 8)))
            return row_major(padded)
        if kind == 2:
            return tuple(2 * s for s in row_major(shape))
        repeated = self.rng.randrange(len(shape))
        return tuple(0 if d == repeated else s for d, s in enumerate(row_major(shape)))

    def input(self, shape: tuple[int, ...]) -> Node:
        """A new input; sometimes f32 beside narrow ones."""
        dtype = DType.F32 if self.dtype is not DType.F64 and self.chance(0.1) else self.dtype
        node = b.input_node(len(self.inputs), shape, dtype, self.strides(shape))
        self.inputs.append(node)
        self.values.append(node)
        return node

    def partner(self, x: Node) -> Node:
        """A value of the same shape, or a new input that broadcasts to it."""
        same = [v for v in self.values if v.shape == x.shape]
        if self.chance(0.5):
            return self.rng.choice(same)
        shape = tuple(1 if self.chance(0.4) else n for n in x.shape)
        return self.input(shape[self.rng.randrange(len(shape)) :])


def reduced(m: Maker, x: Node) -> Node:
    """A fold or a normalisation along one axis."""
    axis = m.rng.randrange(x.rank)
    n = x.shape[axis]
    kind = m.rng.randrange(9)
    if kind == 0:
        return b.sum(x, axis)
    if kind == 1:
        return b.reduce_max(x, axis)
    if kind == 2:
        return c.mean(x, axis)
    if kind == 3:
        return c.softmax(x, axis)
    if kind == 4:
        return c.rms_norm(x, eps=1e-5, axis=axis)
    if kind == 5:
        return c.rms_norm(x, m.input((x.shape[-1],)), eps=0.1)
    if kind == 6:
        gain, bias = m.input((x.shape[-1],)), m.input((x.shape[-1],))
        return c.layer_norm(x, gain, bias, eps=0.1)
    keep = m.rng.choice([d for d in (1, 2, 3, 4, 7, 12) if n % d == 0])
    return b.sum(x, axis, keep) if kind == 7 else b.reduce_max(x, axis, keep)


def product(m: Maker, x: Node) -> Node | None:
    """x @ w or w @ x, batched or with a broadcast batch."""
    if x.rank < 2:
        return None
    left = m.chance(0.7)
    k = x.shape[-1 if left else -2]
    rows = x.elements // k
    free = [d for d in DIMS if d * k <= ELEMENTS and rows * d <= ELEMENTS]
    free = [d for d in free if rows * d * k <= PRODUCTS]
    if not free:
        return None
    n = m.rng.choice(free)
    batch = x.shape[:-2] if m.chance(0.5) else ()
    if batch and m.chance(0.5):
        batch = tuple(1 if m.chance(0.5) else s for s in batch)
    if prod(batch) * n * k > ELEMENTS:
        batch = ()
    other = m.input((*batch, k, n) if left else (*batch, n, k))
    made = b.matmul(x, other) if left else b.matmul(other, x)
    return b.mul(made, k**-0.5) if m.chance(0.6) else made


def moved(m: Maker, x: Node) -> Node | None:
    """Something that only moves elements."""
    rng, axis = m.rng, m.rng.randrange(x.rank)
    n, kind = x.shape[axis], m.rng.randrange(6)
    if kind == 0 and x.rank > 1:
        return b.transpose(x, rng.sample(range(x.rank), x.rank))
    if kind == 1:
        if x.rank > 1 and m.chance(0.5):
            at = rng.randrange(x.rank - 1)
            return b.reshape(x, (*x.shape[:at], -1, *x.shape[at + 2 :]))
        parts = [d for d in (2, 3, 4, 5, 7) if n % d == 0]
        if parts and x.rank < 4:
            p = rng.choice(parts)
            return b.reshape(x, (*x.shape[:axis], p, n // p, *x.shape[axis + 1 :]))
    if kind == 2 and n > 1:
        start = rng.randrange(n)
        return b.slice(x, axis, start, rng.randrange(start, n) + 1)
    if kind == 3:
        like = [v for v in m.values if v.shape == x.shape and v.dtype is x.dtype]
        return b.concat([x, rng.choice(like)], axis)
    if kind == 4 and x.rank < 4:
        return b.broadcast(x, (rng.choice((2, 3)), *x.shape))
    if kind == 5:
        return b.cast(x, DType.F32 if x.dtype is not DType.F32 else m.dtype)
    return None


def model_part(m: Maker, x: Node) -> Node | None:
    """Pieces of transformers: rotary embedding, attention, masks, counts of comparisons."""
    kind = m.rng.randrange(4)
    if kind == 0 and x.shape[-1] % 2 == 0:
        shape = x.shape[-2:] if m.chance(0.5) else x.shape[-1:]
        return c.rope(x, m.input(shape), m.input(shape), interleaved=m.chance(0.4))
    if kind == 1:
        kv, group = m.rng.choice((1, 2, 3)), m.rng.choice((1, 1, 2, 3))
        rows, keys = m.rng.choice((1, 3, 5, 12, 24)), m.rng.choice((5, 12, 24, 77, 96, 127))
        d, e = (m.rng.choice((5, 7, 12, 24)) for _ in range(2))
        q, k, v = (m.input((h, r, w)) for h, r, w in
                   ((kv * group, rows, d), (kv, keys, d), (kv, keys, e)))  # fmt: skip
        return c.attention(q, k, v, scale=m.rng.choice((None, 0.3)), causal=m.chance(0.5))
    if kind == 2 and x.rank > 1:
        mask = c.causal_mask(x.shape[-2], x.shape[-1])
        return b.where(mask, x, m.rng.choice((0.0, -1.5)))
    if kind == 3:
        known = [v for v in m.inputs if v.dtype is DType.F32]  # compared as they are given
        if known:
            y = m.rng.choice(known)
            hits = b.cast(b.less(y, 0.25), DType.I32)
            return b.cast(b.sum(hits, m.rng.randrange(y.rank)), m.dtype)
    return None


def grown(m: Maker, x: Node) -> Node | None:
    """One more operator on x, or None where the drawn one does not fit."""
    kind = m.rng.randrange(12)
    if kind < 3:
        return m.rng.choice(UNARY)(x)
    if kind < 6:
        return m.rng.choice(BINARY)(x, m.partner(x))
    if kind < 8:
        return product(m, x)
    if kind < 10:
        return reduced(m, x)
    return moved(m, x) if kind == 10 else model_part(m, x)


def random_program(seed: int) -> Graph:
    """The program of a seed."""
    rng = random.Random(seed)
    dtype = rng.choice((DType.F32, DType.F32, DType.F32, DType.F16, DType.BF16))
    m = Maker(rng, dtype)
    m.input(m.shape())
    last, count = m.values[0], rng.randint(2, 5)
    made: list[Node] = []
    while count:
        x = last if m.chance(0.8) else rng.choice(m.values)
        before = len(m.inputs), len(m.values)
        try:
            value = grown(m, x)
        except ObeliskError:  # f16 beside bf16, say: what the builder refuses is not drawn
            value = None
        if value is None or value.elements > ELEMENTS or value in m.values:
            del m.inputs[before[0] :], m.values[before[1] :]
            continue
        m.values.append(value)
        made.append(value)
        last = value
        count -= 1
    outputs = [last, *(v for v in made[:-1] if m.chance(0.2))]
    if m.chance(0.05):
        outputs.append(rng.choice(m.inputs))
    rng.shuffle(outputs)
    return make_graph(m.inputs, outputs, name=f"fuzz_{seed}")


def lay_out(array: Any, strides: Sequence[int] | None) -> Any:
    """A copy of `array` with these element strides; gaps between its elements hold NaN."""
    if strides is None:
        return np.ascontiguousarray(array)
    span = 1 + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True))
    memory = np.full(span, np.nan, dtype=np.float32).astype(array.dtype)
    steps = [s * array.dtype.itemsize for s in strides]
    view = np.lib.stride_tricks.as_strided(memory, array.shape, steps)
    view[...] = array  # where a stride is 0 the last of the elements stays
    return view


def arrays_for(graph: Graph, seed: int) -> list[Any]:
    """Standard-normal inputs, laid out as the graph declares."""
    rng = np.random.default_rng(seed)
    return [
        lay_out(rng.standard_normal(n.shape).astype(n.dtype.numpy), n.attrs.strides)
        for n in graph.inputs
    ]


TOLERANCE = {DType.F64: 1e-9, DType.F32: 1e-3, DType.F16: 1e-2, DType.BF16: 6e-2}


def worst_error(got: Any, exact: Any, working: Any, dtype: DType) -> float:
    """The largest error in units of what is allowed; above 1 the result is wrong.

    Allowed is the dtype's tolerance of the value and of the output's root mean square, plus four
    times what the program's own rounding does, to the element and on average: where a narrow value
    inside is rounded the other way, any element may err as others do by themselves. Elements that
    overflow in its own precision need not be finite; everywhere else a NaN or infinity is
    infinitely wrong.
    """
    exact = np.asarray(exact, dtype=np.float64)
    if not dtype.is_float:
        return 0.0 if np.array_equal(np.asarray(got, np.float64), exact) else float("inf")
    working, got = np.asarray(working, dtype=np.float64), np.asarray(got, dtype=np.float64)
    usable = np.isfinite(exact) & np.isfinite(working)
    if not usable.any():
        return 0.0
    e, w, g = exact[usable], working[usable], got[usable]
    if not np.isfinite(g).all():
        return float("inf")
    scale = float(np.sqrt(np.mean(e * e)))
    own = np.abs(w - e)
    allowed = TOLERANCE[dtype] * (np.abs(e) + scale) + 4 * (own + np.sqrt(np.mean(own * own)))
    allowed += 1e-7
    return float(np.max(np.abs(g - e) / allowed))
