"""Public records against compiled C kernels: R01 fused, R05 cut, R08 any address, R11, R40, R45.

Each operator alone, and the depths of R05 uncut, are in test_lower_operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.lowering import call, check, compiled, largest_error

from obelisk.base.errors import ObeliskError
from obelisk.ir import (
    BlockBuilder,
    DType,
    Graph,
    KernelGraph,
    Node,
    Reduce,
    make_graph,
    random_inputs,
    run,
)
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.lower.cpu import CpuOptions, lower_cpu
from obelisk.machine.host import host

pytestmark = pytest.mark.usefixtures("compiler")
UNARY: dict[str, Callable[[Node], Node]] = {
    "neg": b.neg, "exp": b.exp, "square": b.square, "tanh": b.tanh, "sigmoid": b.sigmoid,
    "erf": b.erf, "silu": c.silu, "gelu": c.gelu, "relu": c.relu, "abs": c.absolute,
    "log": lambda x: b.log(b.square(x) + 0.25), "sqrt": lambda x: b.sqrt(b.square(x)),
    "rsqrt": lambda x: b.rsqrt(b.square(x) + 0.25),
}  # fmt: skip
BINARY: dict[str, Callable[[Node, Node], Node]] = {
    "add": b.add, "sub": b.sub, "mul": b.mul, "max": b.maximum, "min": b.minimum,
    "div": lambda x, y: x / (b.square(y) + 0.5), "where": lambda x, y: b.where(b.less(x, y), x, y),
}  # fmt: skip
LOWEST = {"silu": -0.2786, "gelu": -0.1701, "sigmoid": 0.0, "exp": 0.0, "relu": 0.0, "abs": 0.0}


def _inputs(*shapes: tuple[int, ...], dtype: DType = DType.F32) -> list[Node]:
    return [b.input_node(i, s, dtype) for i, s in enumerate(shapes)]


def _fused(name: str) -> Graph:
    """An operator behind a product's accumulator and in front of a sum, in one kernel."""
    xs = x, w, y = _inputs((5, 77), (77, 35), (5, 35))
    block = BlockBuilder((3,), 4)
    tx, tw, ty = block.load(x, (None,), 1), block.load(w, (1,), 0), block.load(y, (1,))
    product = b.accum_sum(tx @ tw) * 0.125
    behind = UNARY[name](product) + ty if name in UNARY else BINARY[name](product, ty)
    before = UNARY[name](tx) if name in UNARY else BINARY[name](tx, tx * 0.5)
    block.store(behind, (1,))
    block.store(behind * b.accum_sum(b.sum(before, 1)), (1,))
    return make_graph(xs, block.launch(), name=name)


def test_every_operator_behind_a_product_and_before_a_sum() -> None:
    """R01: a wrong operator often shows only when it is fused."""
    check([_fused(name) for name in (*UNARY, *BINARY)], relative=1e-4)


def test_no_operator_leaves_its_range() -> None:
    """R01: silu never below -0.2786, exp never below 0, and so on, on a wide spread of values."""
    x = np.concatenate([np.linspace(-20, 20, 4001), np.geomspace(1e-30, 80, 95)])[None]
    (n,) = _inputs(x.shape)
    graph = make_graph([n], [UNARY[name](n) for name in LOWEST])
    ((_, library),) = compiled([graph])
    for name, got in zip(LOWEST, call(library, graph, [x.astype(np.float32)]), strict=True):
        assert np.isfinite(got).all(), name
        assert got.min() >= LOWEST[name], name


@pytest.mark.parametrize(("grid", "loop"), [(1, 4), (3, 4), (4, 1), (5, 7), (1, 77)])
def test_no_term_is_lost_where_grid_and_loop_do_not_divide(grid: int, loop: int) -> None:
    """R05: ones times ones equals the depth exactly, the depth cut over blocks and iterations."""
    graphs = []
    for depth in (1, 7, 24, 40, 56, 77, 100, 4095):
        xs = x, w = _inputs((3, depth), (depth, 17))
        block = BlockBuilder((min(grid, depth),), min(loop, -(-depth // min(grid, depth))))
        tx, tw = block.load(x, (1,), 1), block.load(w, (0,), 0)
        block.store(b.accum_sum(tx @ tw), (None,), reduce=Reduce.SUM)
        block.store(b.accum_sum(b.sum(tx, 1)), (None,), reduce=Reduce.SUM)
        graphs.append(make_graph(xs, block.launch(), name=f"depth {depth}"))
    for graph, library in compiled(graphs):
        ones = [np.ones(n.shape, np.float32) for n in graph.inputs]
        for out in call(library, graph, ones):
            assert (out == graph.inputs[0].shape[1]).all(), graph.name


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16])
def test_any_element_aligned_address(dtype: DType) -> None:
    """R08: inputs and outputs that begin one element into an allocation."""
    xs = x, w = _inputs((8, 64), (64, 32), dtype=dtype)
    graph = make_graph(xs, [b.exp((x @ w) * 0.1) + b.sum(x, 1), b.transpose(w)])
    ((_, library),) = compiled([graph])
    arrays = random_inputs(graph, 1)
    want = call(library, graph, arrays)

    def moved(shape: tuple[int, ...], offset: int) -> Any:
        room = np.zeros(int(np.prod(shape)) + 32, dtype.numpy)
        start = (-room.ctypes.data % 64) // room.itemsize + offset
        return room[start : start + int(np.prod(shape))].reshape(shape)

    for offset in (1, 3, 5):
        inputs = [moved(a.shape, offset) for a in arrays]
        for mine, theirs in zip(inputs, arrays, strict=True):
            mine[...] = theirs
        outputs = [moved(o.shape, offset) for o in graph.outputs]
        library.run(inputs, outputs, 2)
        for got, right in zip(outputs, want, strict=True):
            assert got.tobytes() == np.ascontiguousarray(right).tobytes()


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32])
@pytest.mark.parametrize("keys", [1, 17, 1024])
def test_attention_at_any_score(keys: int, dtype: DType) -> None:
    """R11: scores up to 5, 11, 12, 50, 88, 100 and 1000: finite, and the softmax of float64. The
    scores are exact in every dtype, so no more is allowed for large ones.
    """
    xs = q, k, v = _inputs((2, 5, 64), (2, keys, 64), (2, keys, 64), dtype=dtype)
    graph = make_graph(xs, [c.attention(q, k, v)])
    ((_, library),) = compiled([graph])
    query, key, value = random_inputs(graph, 2)
    query[...] = 0
    query[..., 0] = 8  # what the scale of 1/8 takes back
    for top in (5, 11, 12, 50, 88, 100, 1000):
        key[..., 0] = np.random.default_rng(top).uniform(-top, top, key.shape[:2])
        key[:, keys // 2, 0] = top
        (got,) = call(library, graph, [query, key, value])
        (want,) = run(graph, [query, key, value])
        assert np.isfinite(got.astype(np.float64)).all()
        assert largest_error(got, want) < (2e-2 if dtype is DType.BF16 else 2e-3), top


@pytest.mark.parametrize("rows", [1, 17, 63, 64, 65, 100, 1000])
def test_attention_of_any_length_reads_a_fused_tensor_where_it_lies(rows: int) -> None:
    """R40: q, k and v dense, and as views of one (2, rows, 3, 8, 64) tensor: alike, right, and with
    no zeros that are not due. The views are the program's declared strides: nothing is copied.
    """
    shape = (2, 8, rows, 64)
    lying = (rows * 3 * 8 * 64, 64, 3 * 8 * 64, 1)
    graphs = []
    for strides in (None, lying):
        g = KernelGraph(f"attention {rows}")
        q, k, v = (g.input(shape, "bf16", strides=strides) for _ in range(3))
        g.output(g.attention(q, k, v))
        graphs.append(g.freeze())
    fused = np.random.default_rng(0).standard_normal((2, rows, 3, 8, 64)).astype(DType.BF16.numpy)
    views = [fused[:, :, i].transpose(0, 2, 1, 3) for i in range(3)]
    (want,) = run(graphs[0], views)
    dense, viewed = compiled(graphs)
    (first,) = call(dense[1], dense[0], views)
    out = np.full(shape, np.nan).astype(first.dtype)
    viewed[1].run(views, [out], 2)
    assert out.tobytes() == np.ascontiguousarray(first).tobytes()
    assert largest_error(out, want) < 2e-2
    assert (out == 0).mean() < 1e-3


def test_accumulators_are_wider_than_what_they_sum() -> None:
    """R45: 60,000 ones in f16 are 60,000, 70,000 are infinite on store; 4096 in bf16 are 4096. Both
    as a sum and as a product.
    """
    cases = [("f16", 60_000, 60_000.0), ("f16", 70_000, np.inf), ("bf16", 4096, 4096.0)]
    graphs = []
    for dtype, n, _ in cases:
        g = KernelGraph(f"{n} {dtype}")
        x, w = g.input((2, n), dtype), g.input((n, 3), dtype)
        g.output(g.sum(x, 1), g.matmul(x, w))
        graphs.append(g.freeze())
    for (graph, library), (_, _, want) in zip(compiled(graphs), cases, strict=True):
        ones = [np.ones(n.shape, n.dtype.numpy) for n in graph.inputs]
        for out in call(library, graph, ones):
            assert (out.astype(np.float64) == want).all(), graph.name


def test_any_two_dtypes_are_multiplied_rightly_or_refused() -> None:
    """R45: all pairs that can be named: a right product, or an error that names both types."""
    graphs, refused = [], []
    for left in DType:
        for right in DType:
            try:
                g = KernelGraph(f"{left} {right}")
                g.output(g.matmul(g.input((3, 20), left), g.input((20, 18), right)))
                graph = g.freeze()
                lower_cpu(graph, host(), CpuOptions())
            except ObeliskError as error:
                refused.append((left, right, str(error)))
            else:
                graphs.append(graph)
    assert len(graphs) >= 8
    for left, right, text in refused:
        assert str(left) in text or str(right) in text, (left, right, text)
    check(graphs)
