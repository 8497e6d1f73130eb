"""Hand-made candidates of the named programs, for the tests of the cost model.

Each function gives a frozen `Graph` that computes a named program (or its plain form) with a chosen
grid, loop and tiling. They are data for ranking tests: `test_machine_rank` proves first that they
compute what they say.
"""

from __future__ import annotations

from collections.abc import Sequence

from obelisk.ir import BlockBuilder, DType, Graph, Node, make_graph
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.ir.op import SizeScope


def _inputs(dtype: DType, *shapes: tuple[int, ...]) -> list[Node]:
    return [b.input_node(i, s, dtype) for i, s in enumerate(shapes)]


def attention_shapes(batch: int, heads: int, rows: int, keys: int, d: int) -> list[tuple[int, ...]]:
    """Shapes of Q, K (transposed) and V as in the published benchmark."""
    n = batch * heads
    return [(n, rows, d), (n, d, keys), (n, keys, d)]


def attention_plain(shapes: Sequence[tuple[int, ...]], dtype: DType) -> Graph:
    """exp(Q K) / sum, times V, one kernel an operator."""
    q, k, v = _inputs(dtype, *shapes)
    e = b.exp(q @ k)
    return make_graph([q, k, v], [(e / b.sum(e, 2)) @ v], name="attention")


def attention_fused(
    shapes: Sequence[tuple[int, ...]], dtype: DType, row_parts: int, loop: int
) -> Graph:
    """One kernel, one pass over the keys, division moved behind the second product."""
    q, k, v = _inputs(dtype, *shapes)
    bb = BlockBuilder((shapes[0][0], row_parts), loop)
    tq, tk, tv = bb.load(q, (0, 1)), bb.load(k, (0, None), 2), bb.load(v, (0, None), 1)
    e = b.exp(tq @ tk)
    bb.store(b.accum_sum(e @ tv) / b.accum_sum(b.sum(e, 2)), (0, 1), dtype=dtype)
    return make_graph([q, k, v], bb.launch(), name="attention")


def attention_split(
    shapes: Sequence[tuple[int, ...]], dtype: DType, row_parts: int, splits: int, loop: int
) -> Graph:
    """Two kernels: each split of the keys gives a numerator and a denominator, the second adds and
    divides.
    """
    q, k, v = _inputs(dtype, *shapes)
    n, _, d = shapes[0]
    bb = BlockBuilder((n, row_parts, splits), loop)
    tq = bb.load(q, (0, 1, None))
    tk, tv = bb.load(k, (0, None, 2), 2), bb.load(v, (0, None, 1), 1)
    e = b.exp(tq @ tk)
    bb.store(b.accum_sum(e @ tv), (0, 1, 2), dtype=DType.F32)
    bb.store(b.accum_sum(b.sum(e, 2)), (0, 1, 2), dtype=DType.F32)
    top, bottom = bb.launch()
    end = BlockBuilder((n, row_parts))
    t, u = end.load(top, (0, 1)), end.load(bottom, (0, 1))
    end.store(b.sum(t, 2, keep=d) / b.sum(u, 2), (0, 1), dtype=dtype)
    return make_graph([q, k, v], end.launch(), name="attention")


def norm_linear_plain(rows: int, k: int, n: int, dtype: DType) -> Graph:
    """rms_norm then a product, one kernel an operator."""
    x, w = _inputs(dtype, (rows, k), (k, n))
    return make_graph([x, w], [c.rms_norm(x) @ w], name="rmsnorm")


def norm_linear_two(rows: int, k: int, n: int, parts: int, loop: int, dtype: DType) -> Graph:
    """A norm kernel, then a product kernel."""
    x, w = _inputs(dtype, (rows, k), (k, n))
    first = BlockBuilder((rows,))
    t = first.load(x, (0,))
    first.store(c.rms_norm(t), (0,), dtype=dtype)
    (y,) = first.launch()
    second = BlockBuilder((parts,), loop)
    ty, tw = second.load(y, (None,), 1), second.load(w, (1,), 0)
    second.store(b.accum_sum(ty @ tw), (1,), dtype=dtype)
    return make_graph([x, w], second.launch(), name="rmsnorm")


def norm_linear_fused(rows: int, k: int, n: int, parts: int, loop: int, dtype: DType) -> Graph:
    """One kernel, the division behind the product."""
    x, w = _inputs(dtype, (rows, k), (k, n))
    bb = BlockBuilder((parts,), loop)
    tx, tw = bb.load(x, (None,), 1), bb.load(w, (1,), 0)
    power = b.accum_sum(b.sum(b.square(tx), 1)) / b.size(tx, 1, SizeScope.FULL)
    bb.store(b.accum_sum(tx @ tw) / b.sqrt(power), (1,), dtype=dtype)
    return make_graph([x, w], bb.launch(), name="rmsnorm")


def gated_plain(rows: int, k: int, n: int, dtype: DType) -> Graph:
    """silu(X W1) * (X W2), one kernel an operator."""
    x, w, u = _inputs(dtype, (rows, k), (k, n), (k, n))
    return make_graph([x, w, u], [c.silu(x @ w) * (x @ u)], name="gated_mlp")


def gated_fused(rows: int, k: int, n: int, parts: int, loop: int, dtype: DType) -> Graph:
    """One kernel with two accumulators."""
    x, w, u = _inputs(dtype, (rows, k), (k, n), (k, n))
    bb = BlockBuilder((parts,), loop)
    tx = bb.load(x, (None,), 1)
    tw, tu = bb.load(w, (1,), 0), bb.load(u, (1,), 0)
    bb.store(c.silu(b.accum_sum(tx @ tw)) * b.accum_sum(tx @ tu), (1,), dtype=dtype)
    return make_graph([x, w, u], bb.launch(), name="gated_mlp")


def lora_plain(dtype: DType, rows: int = 16, k: int = 256, n: int = 4096, rank: int = 16) -> Graph:
    """X W + (X A) B, one kernel an operator."""
    x, w, a, u = _inputs(dtype, (rows, k), (k, n), (k, rank), (rank, n))
    return make_graph([x, w, a, u], [x @ w + (x @ a) @ u], name="lora")


def lora_fused(
    dtype: DType, parts: int, rows: int = 16, k: int = 256, n: int = 4096, rank: int = 16
) -> Graph:
    """One kernel; every block makes X A again."""
    x, w, a, u = _inputs(dtype, (rows, k), (k, n), (k, rank), (rank, n))
    bb = BlockBuilder((parts,))
    tx, ta = bb.load(x, (None,)), bb.load(a, (None,))
    tw, tu = bb.load(w, (1,)), bb.load(u, (1,))
    bb.store(tx @ tw + (tx @ ta) @ tu, (1,), dtype=dtype)
    return make_graph([x, w, a, u], bb.launch(), name="lora")


def square_matmul(m: int, n: int, k: int, grid: tuple[int, int], loop: int, dtype: DType) -> Graph:
    """A product cut by rows and columns, with a loop over k."""
    x, w = _inputs(dtype, (m, k), (k, n))
    bb = BlockBuilder(grid, loop)
    tx, tw = bb.load(x, (0, None), 1), bb.load(w, (None, 1), 0)
    bb.store(b.accum_sum(tx @ tw), (0, 1), dtype=dtype)
    return make_graph([x, w], bb.launch(), name="matmul")


def add_one(n: int, parts: int, dtype: DType) -> Graph:
    """x + 1 over a vector cut into `parts`."""
    (x,) = _inputs(dtype, (1, n))
    bb = BlockBuilder((parts,))
    bb.store(bb.load(x, (1,)) + 1.0, (1,), dtype=dtype)
    return make_graph([x], bb.launch(), name="add_one")
