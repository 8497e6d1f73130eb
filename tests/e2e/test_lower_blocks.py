"""Block graphs compiled and run against the interpreter: loops, accumulators, online softmax, short
tiles, stores with loop maps and reductions, thread graphs, and random graphs.
"""

from __future__ import annotations

import random
from math import inf

import numpy as np
import pytest
from tests import strategies
from tests.lowering import call, check, compiled, largest_error

from obelisk.ir import (
    BlockBuilder,
    DType,
    Graph,
    KernelGraph,
    Node,
    Reduce,
    build,
    composite,
    make_graph,
    random_inputs,
    thread_graph,
)
from obelisk.lower.cpu import CpuOptions

pytestmark = pytest.mark.usefixtures("compiler")


def attention(
    heads: int, rows: int, d: int, keys: int, e: int, grid: tuple[int, int], loop: int, safe: bool
) -> Graph:
    """softmax(q k) v in one pass over the keys; with running maxima where `safe`."""
    g = KernelGraph(f"attention {grid} {loop} {safe}")
    q, k, v = g.input((heads, rows, d)), g.input((heads, d, keys)), g.input((heads, keys, e))
    b = BlockBuilder(grid, loop)
    tq, tk = b.load(q, (0, 1)), b.load(k, (0, None), 2)
    tv = b.load(v, (0, None), 1)
    s = build.mul(build.matmul(tq, tk), 0.25)
    if safe:
        peak = build.running_max(build.reduce_max(s, 2))
        p = build.exp(build.sub(s, peak))
        top = build.accum_rescale(build.matmul(p, tv), peak)
        low = build.accum_rescale(build.sum(p, 2), peak)
    else:
        p = build.exp(s)
        top, low = build.accum_sum(build.matmul(p, tv)), build.accum_sum(build.sum(p, 2))
    b.store(build.div(top, low), (0, 1))
    g.output(*b.launch())
    return g.freeze()


def rmsnorm(m: int, k: int, n: int, grid: int, loop: int) -> Graph:
    g = KernelGraph(f"rmsnorm {grid} {loop}")
    x, w = g.input((m, k)), g.input((k, n))
    b = BlockBuilder((grid,), loop)
    tx, tw = b.load(x, (None,), 1), b.load(w, (1,), 0)
    power = build.accum_sum(build.sum(build.square(tx), 1))
    product = build.accum_sum(build.matmul(tx, tw))
    b.store(build.div(product, build.sqrt(build.div(power, float(k)))), (1,))
    g.output(*b.launch())
    return g.freeze()


def gated(m: int, k: int, n: int, grid: int, loop: int) -> Graph:
    g = KernelGraph(f"gated {grid} {loop}")
    x, w1, w2 = g.input((m, k)), g.input((k, n)), g.input((k, n))
    b = BlockBuilder((grid,), loop)
    tx, t1, t2 = b.load(x, (None,), 1), b.load(w1, (1,), 0), b.load(w2, (1,), 0)
    gate, up = build.accum_sum(build.matmul(tx, t1)), build.accum_sum(build.matmul(tx, t2))
    b.store(build.mul(composite.silu(gate), up), (1,))
    g.output(*b.launch())
    return g.freeze()


def lora(m: int, k: int, n: int, r: int, grid: int) -> Graph:
    g = KernelGraph(f"lora {grid}")
    x, w, a, w2 = g.input((m, k)), g.input((k, n)), g.input((k, r)), g.input((r, n))
    b = BlockBuilder((grid,))
    tx, tw, ta, t2 = b.load(x, (None,)), b.load(w, (1,)), b.load(a, (None,)), b.load(w2, (1,))
    b.store(build.add(build.matmul(tx, tw), build.matmul(build.matmul(tx, ta), t2)), (1,))
    g.output(*b.launch())
    return g.freeze()


def stores() -> Graph:
    """A store with a loop map, sums and maxima across blocks, an invariant, and one value stored
    twice.
    """
    g = KernelGraph("stores")
    x, w = g.input((5, 84)), g.input((84, 33))
    b = BlockBuilder((2, 3), 4)
    tx, tw = b.load(x, (None, 1), 1), b.load(w, (1, 0), 0)
    b.store(build.accum_sum(build.matmul(tx, tw)), (1, None), reduce=Reduce.SUM)
    b.store(build.accum_max(build.reduce_max(tx, 1)), (None, None), reduce=Reduce.MAX)
    b.store(build.accum_sum(build.sum(tx, 1)), (None, None), reduce=Reduce.SUM, dtype=DType.F16)
    g.output(*b.launch())
    b = BlockBuilder((5,), 4)
    tx = b.load(x, (0,), 1)
    e = build.exp(tx)
    b.store(e, (0,), 1)
    b.store(e, (0,), 1, dtype=DType.BF16)
    b.store(build.accum_max(e), (0,))
    b.store(build.accum_sum(build.mul(e, 2.0)), (0,))
    b.store(build.mul(b.load(w, (None,)), 3.0), (None,), reduce=Reduce.MAX)
    g.output(*b.launch())
    return g.freeze()


def threads() -> Graph:
    """A thread graph with two results and a reduction inside, between block operators."""
    g = KernelGraph("threads")
    x, y = g.input((12, 40)), g.input((12, 1))
    b = BlockBuilder((3,), 2)
    tx, ty = b.load(x, (0,), 1), b.load(y, (0,))
    ex, ey = build.elem(0, tx), build.elem(1, ty)
    inner = build.exp(build.mul(ex, ey))
    graph = thread_graph((inner, build.sum(inner, 1)), 4)
    p, total = build.run_thread(graph, [tx, ty])
    b.store(p, (0,), 1)
    b.store(build.accum_sum(total), (0,))
    g.output(*b.launch())
    return g.freeze()


def structural() -> Graph:
    """Views, a concat, kept columns, broadcasts and counts inside a block."""
    g = KernelGraph("structural")
    x, y = g.input((4, 6, 10)), g.input((4, 10, 6))
    b = BlockBuilder((2,))
    tx, ty = b.load(x, (0,)), b.load(y, (0,))
    t = build.transpose(ty)
    both = build.concat([build.exp(tx), build.neg(t)], 2)
    folded = build.sum(both, 2, 5)
    flat = build.reshape(build.add(build.slice(both, 2, 3, 13), tx), (2, 60, 1))
    wide = build.broadcast(build.reduce_max(folded, 2), (2, 6, 4))
    counts = build.cast(build.iota((6, 4), 1), "f32")
    b.store(both, (0,))
    b.store(folded, (0,))
    b.store(flat, (0,))
    b.store(build.where(build.less(counts, 2.0), wide, build.neg(wide)), (0,))
    b.store(build.matmul(build.transpose(build.exp(tx)), build.slice(both, 2, 0, 7)), (0,))
    g.output(*b.launch())
    return g.freeze()


def cases() -> list[Graph]:
    out = [stores(), threads(), structural()]
    out += [
        attention(2, 33, 16, 77, 24, grid, loop, safe)
        for grid, loop, safe in (
            ((2, 4), 5, True), ((2, 4), 5, False), ((1, 1), 1, True), ((2, 7), 9, True),
        )
    ]  # fmt: skip
    out += [rmsnorm(3, 100, 77, 5, 7), rmsnorm(2, 96, 64, 4, 3), rmsnorm(3, 5, 7, 4, 4)]
    out += [gated(5, 100, 77, 5, 7), gated(1, 64, 48, 2, 2), lora(5, 60, 77, 7, 5)]
    return out


def test_block_graphs_equal_the_interpreter() -> None:
    """Every feature of the block level, on extents that do not divide."""
    check(cases())


def test_every_option_gives_the_same_values() -> None:
    """Copies in place of aliases, other register blocks, shallow panels: all equal the
    interpreter.
    """
    graphs = [attention(2, 33, 16, 77, 24, (2, 4), 5, True), gated(40, 100, 77, 2, 3), stores()]
    for options in (
        CpuOptions(alias=False),
        CpuOptions(rows=4, vectors=3, depth=24, block_rows=8, block_columns=32, stream_rows=0),
        CpuOptions(pack_columns=0, stream_rows=2, unroll=1),
    ):
        check(graphs, options=options)


@pytest.mark.parametrize("width", [16, 64])
def test_any_vector_width(width: int) -> None:
    """Registers of 4 and of 16 lanes: the same values, on extents shorter and longer than a
    vector.
    """
    graphs = [attention(2, 33, 16, 77, 24, (2, 4), 5, True), gated(5, 300, 77, 5, 7), structural()]
    check(graphs, vector_bytes=width)


def test_online_softmax_is_safe() -> None:
    """Scores of a thousand, and rows that are masked to -inf in the first tiles, give finite
    results.
    """
    graph = attention(2, 33, 16, 77, 24, (2, 4), 5, True)
    ((_, library),) = compiled([graph])
    q, k, v = random_inputs(graph, 0)
    arrays = [q * 300, k, v]
    (got,) = call(library, graph, arrays)
    s = (arrays[0].astype(np.float64) @ k) * 0.25
    assert s.max() > 1000
    p = np.exp(s - s.max(-1, keepdims=True))
    assert largest_error(got, (p / p.sum(-1, keepdims=True)) @ v) < 1e-4
    k[:, :, :40] = 0
    arrays = [np.abs(q), np.where(np.arange(77) < 40, -inf, k).astype(np.float32), v]
    (got,) = call(library, graph, arrays)
    tail = (arrays[0].astype(np.float64) @ k)[..., 40:] * 0.25
    p = np.exp(tail - tail.max(-1, keepdims=True))
    assert largest_error(got, (p / p.sum(-1, keepdims=True)) @ v[:, 40:]) < 1e-4


@pytest.mark.parametrize("seed", [0])
def test_random_programs(seed: int) -> None:
    """Random programs of 2-5 operators, on awkward extents."""
    check([strategies.kernel_graph(100 * seed + i) for i in range(16)])


@pytest.mark.parametrize("seed", [0])
def test_random_block_graphs(seed: int) -> None:
    """Random launches with short tiles, and graphs with every feature of the text form."""
    check([strategies.blocked_pair(100 * seed + i).candidate for i in range(10)])
    zoo = [strategies.block_zoo(100 * seed + i) for i in range(12)]
    check([g for g in zoo if all(n.dtype is not DType.I4 for n in g.inputs)][:6])


def _halved(x: Node) -> Node:
    return build.mul(x, 0.5)


def test_many_kernels_in_one_graph() -> None:
    """A long graph whose intermediates share scratch memory: reuse never overwrites a live
    value.
    """
    rng = random.Random(5)
    g = KernelGraph("long")
    values = [g.input((24, 24)), g.input((24, 24))]
    for _ in range(40):
        a, b = rng.choice(values[-6:]), rng.choice(values)
        values.append(_halved(g.matmul(a, b)) if rng.random() < 0.3 else g.tanh(g.add(a, b)))
    g.output(*values[-3:], values[10])
    graph = g.freeze()
    check([make_graph(graph.inputs, graph.outputs, name="long")], relative=2e-4)
