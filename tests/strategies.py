"""Random well-formed graphs for tests: seeded generators, and hypothesis strategies over their
seeds.

`kernel_graph` draws a plain program of a few operators, kept in a range where float64 and half
precision can be compared; `blocked_pair` draws a program together with a launch of a block graph
that computes the same, on extents that mostly do not divide; `block_zoo` draws graphs with every
feature of the block and thread levels for round trips.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path

from hypothesis import strategies as st

from obelisk.ir import BlockBuilder, DType, Graph, Node, Reduce, make_graph, thread_graph
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.ir.op import SizeScope

DIMS = (1, 3, 5, 7, 12, 24, 77, 96, 100, 127, 129, 640, 896)
SMALL = (1, 2, 3, 5, 7, 8, 12)
MUGRAPHS = Path(__file__).resolve().parents[2] / "shared" / "data" / "mugraphs"
NAMES = ("q", "x y", "größe", 'a"b', "0", "line\nbreak", "out", "%3", "#", "")


@dataclass
class _Pool:
    """Values so far, and the inputs that were declared for them."""

    rng: random.Random
    dims: Sequence[int]
    dtype: DType
    limit: int
    inputs: list[Node]
    values: list[Node]

    def shape(self, rank: int) -> tuple[int, ...]:
        while True:
            shape = tuple(self.rng.choice(self.dims) for _ in range(rank))
            if prod(shape) <= self.limit:
                return shape

    def input(self, shape: tuple[int, ...]) -> Node:
        node = b.input_node(len(self.inputs), shape, self.dtype)
        self.inputs.append(node)
        self.values.append(node)
        return node

    def partner(self, x: Node) -> Node:
        """A value of the same shape, or a new input that broadcasts to it."""
        same = [v for v in self.values if v.shape == x.shape]
        if self.rng.random() < 0.5:
            return self.rng.choice(same)
        shape = tuple(1 if self.rng.random() < 0.4 else n for n in x.shape)
        return self.input(shape[self.rng.randrange(len(shape) + 1) :] or (1,))


def _bounded(x: Node) -> Node:
    return b.minimum(b.maximum(x, -3.0), 3.0)


_UNARY: tuple[Callable[[Node], Node], ...] = (
    lambda x: b.exp(_bounded(x)),
    lambda x: b.log(b.add(b.square(_bounded(x)), 1.0)),
    lambda x: b.sqrt(b.add(b.square(_bounded(x)), 0.5)),
    lambda x: b.rsqrt(b.add(b.square(_bounded(x)), 0.5)),
    lambda x: b.mul(x, 0.37), b.neg, b.tanh, b.sigmoid, b.erf, c.silu, c.gelu, c.relu, c.absolute,
    lambda x: b.square(_bounded(x)),
    lambda x: c.clamp(x, -1.0, 0.5),
)  # fmt: skip
_BINARY: tuple[Callable[[Node, Node], Node], ...] = (
    b.add, b.sub, b.maximum, b.minimum,
    lambda x, y: b.mul(_bounded(x), _bounded(y)),
    lambda x, y: b.div(x, b.add(b.square(_bounded(y)), 1.0)),
    lambda x, y: b.where(b.less(x, y), x, b.mul(y, 0.5)),
)  # fmt: skip


def _reduced(pool: _Pool, x: Node) -> Node:
    axis = pool.rng.randrange(x.rank)
    kind = pool.rng.randrange(5)
    if kind == 0:
        return b.mul(b.sum(_bounded(x), axis), 1 / x.shape[axis])
    if kind == 1:
        return b.reduce_max(x, axis)
    if kind == 2:
        return c.mean(x, axis)
    if kind == 3:
        return c.softmax(_bounded(x), axis)
    return c.rms_norm(x, eps=0.5, axis=axis)


def _product(pool: _Pool, x: Node) -> Node | None:
    if x.rank < 2:
        return None
    k = x.shape[-1]
    n = pool.rng.choice([d for d in pool.dims if d * k <= pool.limit] or [1])
    if x.elements // k * n > pool.limit:
        return None
    batch = x.shape[:-2] if pool.rng.random() < 0.5 else ()
    if prod(batch) * n * k > pool.limit:
        batch = ()
    other = pool.input((*batch, k, n))
    return b.mul(b.matmul(_bounded(x), other), k**-0.5)


def _moved(pool: _Pool, x: Node) -> Node | None:
    rng = pool.rng
    kind = rng.randrange(6)
    axis = rng.randrange(x.rank)
    n = x.shape[axis]
    if kind == 0 and x.rank > 1:
        return b.transpose(x, rng.sample(range(x.rank), x.rank))
    if kind == 1 and x.rank > 1:
        at = rng.randrange(x.rank - 1)
        merged = x.shape[at] * x.shape[at + 1]
        return b.reshape(x, (*x.shape[:at], merged, *x.shape[at + 2 :]))
    if kind == 2 and n > 1:
        start = rng.randrange(n)
        return b.slice(x, axis, start, rng.randrange(start, n) + 1)
    if kind == 3 and x.elements * 2 <= pool.limit:
        return b.concat([x, rng.choice([v for v in pool.values if v.shape == x.shape])], axis)
    if kind == 4 and x.rank < 4:
        m = rng.choice((2, 3))
        return b.broadcast(x, (m, *x.shape)) if x.elements * m <= pool.limit else None
    if kind == 5 and x.dtype.is_float:
        return b.cast(b.cast(x, DType.F32), x.dtype)
    return None


def kernel_graph(
    seed: int,
    ops: tuple[int, int] = (2, 5),
    dims: Sequence[int] = DIMS,
    dtype: DType = DType.F32,
    limit: int = 20_000,
) -> Graph:
    """A random plain program of `ops` operators (composites count as one) on extents from `dims`;
    no value has more than `limit` elements. The same seed gives the same graph.
    """
    rng = random.Random(seed)
    pool = _Pool(rng, dims, dtype, limit, [], [])
    for _ in range(rng.choice((1, 1, 2, 3))):
        pool.input(pool.shape(rng.choice((1, 2, 2, 2, 3))))
    last = rng.choice(pool.values)
    count = rng.randint(*ops)
    while count:
        x = last if rng.random() < 0.75 else rng.choice(pool.values)
        kind = rng.randrange(10)
        if kind < 3:
            made: Node | None = rng.choice(_UNARY)(x)
        elif kind < 5:
            made = rng.choice(_BINARY)(x, pool.partner(x))
        elif kind < 7:
            made = _product(pool, x)
        elif kind < 8:
            made = _reduced(pool, x)
        else:
            made = _moved(pool, x)
        if made is None or made.elements > limit or made in pool.values:
            continue
        pool.values.append(made)
        last = made
        count -= 1
    outputs = [last]
    extra = [v for v in pool.values if v not in pool.inputs and v is not last]
    if extra and rng.random() < 0.3:
        outputs.append(rng.choice(extra))
    return make_graph(pool.inputs, outputs, name=f"random_{seed}")


# --- programs with a block graph that computes the same ------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A program and a graph that must compute the same values."""

    kind: str
    program: Graph
    candidate: Graph


def _pair(kind: str, inputs: Sequence[Node], program: Node, candidate: Node) -> Pair:
    return Pair(
        kind,
        make_graph(inputs, [program], name=kind),
        make_graph(inputs, [candidate], name=f"{kind}_block"),
    )


def _elementwise_pair(rng: random.Random, dims: Sequence[int]) -> Pair:
    """A chain cut by grid and loop along different dims, in places as a thread graph."""
    m, n = rng.choice(dims), rng.choice(dims)
    x, y = b.input_node(0, (m, n)), b.input_node(1, (1, n))

    def chain(p: Node, q: Node) -> Node:
        return b.mul(b.tanh(b.add(p, q)), b.sigmoid(p))

    gm, gn, loop = (rng.choice((1, 2, 3, 4)) for _ in range(3))
    grid, imap_x, imap_y = (gm, gn), (0, 1), (None, 1)
    block = BlockBuilder(grid, loop)
    looped = rng.choice((0, 1))
    tx = block.load(x, imap_x, looped)
    ty = block.load(y, imap_y, looped if looped == 1 else None)
    if rng.random() < 0.5:
        graph = thread_graph((chain(b.elem(0, tx), b.elem(1, ty)),), vector=rng.choice((1, 4)))
        value = b.run_thread(graph, [tx, ty])[0]
    else:
        value = chain(tx, ty)
    block.store(value, (0, 1), fmap=looped)
    return _pair("elementwise", [x, y], chain(x, y), block.launch()[0])


def _matmul_pair(rng: random.Random, dims: Sequence[int]) -> Pair:
    """A product with its contraction cut by the loop, and by the grid with a reducing store."""
    m, k, n = (rng.choice(dims) for _ in range(3))
    x, w = b.input_node(0, (m, k)), b.input_node(1, (k, n))
    split = rng.random() < 0.4
    grid = tuple(rng.choice((1, 2, 3, 5)) for _ in range(3 if split else 2))
    block = BlockBuilder(grid, rng.choice((1, 2, 4, 7)))
    last = (1,) if split else ()
    tx = block.load(x, (0, None, *last), 1)
    tw = block.load(w, (None, 1, *((0,) if split else ())), 0)
    total = b.accum_sum(b.matmul(tx, tw))
    program = b.matmul(x, w)
    if split:
        block.store(total, (0, 1, None), reduce=Reduce.SUM)
    else:
        block.store(b.tanh(total), (0, 1))
        program = b.tanh(program)
    return _pair("matmul_split" if split else "matmul", [x, w], program, block.launch()[0])


def _reduce_pair(rng: random.Random, dims: Sequence[int]) -> Pair:
    """Row sums, maxima or norms, the row cut by the loop."""
    m, n = rng.choice(dims), rng.choice(dims)
    x = b.input_node(0, (m, n))
    block = BlockBuilder((rng.choice((1, 2, 3)),), rng.choice((1, 2, 3, 5)))
    tile = block.load(x, (0,), 1)
    kind = rng.choice(("sum", "max", "rms"))
    if kind == "sum":
        value, program = b.accum_sum(b.sum(tile, 1)), b.sum(x, 1)
    elif kind == "max":
        value, program = b.accum_max(b.reduce_max(tile, 1)), b.reduce_max(x, 1)
    else:
        power = b.accum_sum(b.sum(b.square(tile), 1))
        value = b.sqrt(b.div(power, b.size(tile, 1, SizeScope.FULL)))
        program = b.sqrt(c.mean(b.square(x), 1))
    block.store(value, (0,))
    return _pair(f"reduce_{kind}", [x], program, block.launch()[0])


def _attention_pair(rng: random.Random, dims: Sequence[int]) -> Pair:
    """Online softmax: one pass over the keys with a running maximum and rescaled sums."""
    heads, m, keys, d = rng.choice((1, 2, 3)), *(rng.choice(dims) for _ in range(3))
    return online_attention(heads, m, keys, d, rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4)))


def online_attention(heads: int, m: int, keys: int, d: int, grid: int, loop: int) -> Pair:
    """Rows over `grid` blocks a head, the keys in `loop` iterations, one pass."""
    q = b.input_node(0, (heads, m, d))
    k = b.input_node(1, (heads, keys, d))
    v = b.input_node(2, (heads, keys, d))
    block = BlockBuilder((heads, grid), loop)
    tq = block.load(q, (0, 1))
    tk, tv = block.load(k, (0, None), 1), block.load(v, (0, None), 1)
    scores = b.mul(b.matmul(tq, b.transpose(tk)), d**-0.5)
    peak = b.running_max(b.reduce_max(scores, -1))
    weights = b.exp(b.sub(scores, peak))
    total = b.accum_rescale(b.sum(weights, -1), peak)
    mixed = b.accum_rescale(b.matmul(weights, tv), peak)
    block.store(b.div(mixed, total), (0, 1))
    return _pair("attention", [q, k, v], c.attention(q, k, v), block.launch()[0])


_PAIRS = (_elementwise_pair, _matmul_pair, _reduce_pair, _attention_pair)


def blocked_pair(seed: int, dims: Sequence[int] = SMALL) -> Pair:
    """A random program and the launch of a block graph with the same meaning; extents need not
    divide. Grids and loops whose cut the level's rules refuse are drawn again.
    """
    from obelisk.base.errors import MalformedGraph

    rng = random.Random(seed)
    build = rng.choice(_PAIRS)
    while True:
        try:
            return build(rng, dims)
        except MalformedGraph:
            continue


# --- graphs with every feature, for round trips ---------------------------------------------------


def block_zoo(seed: int) -> Graph:
    """A graph whose parts use many features at once: dtypes, strides, odd names, shared blocks,
    thread graphs, store reductions, partly kept sums, casts, constants up to -inf.
    """
    rng = random.Random(seed)
    dtype = rng.choice((DType.F16, DType.BF16, DType.F32))
    m, n = rng.choice((2, 6, 10)), rng.choice((4, 12, 20))
    strides = rng.choice((None, (1, m), (n + 3, 1), (0, 1)))
    x = b.input_node(0, (m, n), dtype, strides)
    y = b.input_node(1, (m, n), dtype)
    unused = b.input_node(2, (rng.choice(SMALL),), rng.choice(list(DType)))
    block = BlockBuilder((2, 1)[: rng.choice((1, 2))], rng.choice((1, 2)), rng.choice((32, 128)))
    more = (None,) * (len(block.grid) - 1)
    tile = block.load(x, (0, *more), 1)
    other = block.load(y, (0, *more), 1)
    chain = thread_graph(
        (b.exp(b.elem(0, tile)), b.where(b.less(b.elem(0, tile), 0.25), b.elem(1, other), -inf)),
        vector=rng.choice((1, 2, 8)),
    )
    first, second = b.run_thread(chain, [tile, other])
    keep = rng.choice((1, 2))
    block.store(
        b.accum_sum(b.sum(first, 1, keep)), (0, *more), dtype=rng.choice((dtype, DType.F32))
    )
    block.store(b.accum_max(b.reduce_max(second, 1)), (0, *more))
    block.store(second, (0, *more), fmap=1)
    if rng.random() < 0.5:
        block.store(b.accum_sum(first), (None, *more), reduce=Reduce.SUM)
    graph = block.finish()
    once, again = b.run_block(graph, block.inputs), b.run_block(graph, block.inputs[::-1])
    if strides is None:
        once[0] = again[0]
    mask = c.causal_mask(m, n)
    masked = b.where(mask, once[2], rng.choice((0.5, -inf, 1e-30, 3.0)))
    tail = b.concat([b.slice(masked, 1, 1, 3), b.cast(b.reshape(y, (m, n)), dtype)], -1)
    more_dims = b.broadcast(b.transpose(tail), (2, n + 2, m))
    names = rng.sample(NAMES, 3)
    onames = [rng.choice(NAMES) for _ in range(3)]
    scaled = b.mul(b.cast(once[0], DType.F32), b.size(y, 0))
    return make_graph(
        [x, y, unused], [more_dims, scaled, x], names, onames, rng.choice(("zoo", 'a "zoo"\n'))
    )


seeds = st.integers(0, 2**32 - 1)
kernel_graphs = seeds.map(kernel_graph)
blocked_pairs = seeds.map(blocked_pair)
zoo_graphs = seeds.map(block_zoo)
