"""Every operator alone, compiled and run, against float64: all shapes of record R01, all dtypes,
edge values, the depths of record R05.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.lowering import call, check, compiled, largest_error

from obelisk.ir import DType, Graph, KernelGraph, random_inputs, run

pytestmark = pytest.mark.usefixtures("compiler")
SHAPES = ((8, 4096), (1, 1), (3, 77), (7, 4095))


def elementwise(shape: tuple[int, ...], dtype: str = "f32") -> Graph:
    """All elementwise operators of one shape as outputs of one graph; each is a kernel of its
    own.
    """
    g = KernelGraph(f"elementwise {shape} {dtype}")
    x, y = g.input(shape, dtype), g.input(shape, dtype)
    row, column = g.input((1, shape[1]), dtype), g.input((shape[0], 1), dtype)
    positive = g.add(g.square(x), 0.25)
    for op in (g.neg, g.exp, g.square, g.tanh, g.sigmoid, g.erf, g.silu, g.gelu, g.relu, g.abs):
        g.output(op(x))
    for op in (g.log, g.sqrt, g.rsqrt):
        g.output(op(positive))
    for op in (g.add, g.sub, g.mul, g.maximum, g.minimum):
        g.output(op(x, y), op(x, row), op(column, y))
    g.output(g.div(x, g.add(g.square(y), 0.5)), g.less(x, y), g.less(x, 0.0))
    g.output(g.where(g.less(x, y), x, row), g.clamp(x, -1.0, 0.5), g.mul(x, 0.125))
    return g.freeze()


def reductions(shape: tuple[int, ...]) -> Graph:
    """Folds along both axes, and the composites that use them."""
    g = KernelGraph(f"reductions {shape}")
    x = g.input(shape)
    for axis in (0, 1):
        g.output(g.sum(x, axis), g.reduce_max(x, axis), g.mean(x, axis), g.softmax(x, axis))
    g.output(g.rms_norm(x, None, 1e-6), g.layer_norm(x))
    if shape[1] % 7 == 0:
        g.output(g.sum(x, 1, 7), g.reduce_max(x, 1, 7))
    return g.freeze()


def structure(shape: tuple[int, ...]) -> Graph:
    """Moves of elements, alone and around arithmetic."""
    m, n = shape
    g = KernelGraph(f"structure {shape}")
    x, y = g.input(shape), g.input(shape)
    g.output(g.transpose(x), g.reshape(x, (n, m)), g.reshape(g.transpose(x), (m * n,)))
    g.output(g.broadcast(x, (3, m, n)), g.concat([x, y], 0), g.concat([x, y, x], 1))
    g.output(g.slice(x, 1, 0, (n + 1) // 2), g.slice(x, 0, m - 1, m))
    g.output(g.exp(g.transpose(x)), g.add(g.reshape(x, (m * n, 1)), 1.0), x)
    g.output(g.iota((m, n), 1), g.cast(g.iota((m, n), 0), "f32"))
    return g.freeze()


def test_every_operator_on_every_shape() -> None:
    """Elementwise operators, folds and moves equal float64 within f32 rounding."""
    check([make(s) for s in SHAPES for make in (elementwise, reductions, structure)])


def narrow(dtype: str) -> Graph:
    g = KernelGraph(f"narrow {dtype}")
    x, y, w = g.input((5, 77), dtype), g.input((5, 77), dtype), g.input((77, 33), dtype)
    g.output(g.add(x, y), g.mul(x, y), g.matmul(x, w), g.softmax(x), g.neg(g.transpose(x)))
    g.output(g.sum(x, 1), g.concat([x, y], 1), g.exp(x))
    if dtype != "f64":
        g.output(g.cast(g.cast(x, "f32"), dtype))
    return g.freeze()


def integers(dtype: str) -> Graph:
    g = KernelGraph(f"integers {dtype}")
    x, y, w = g.input((5, 77), dtype), g.input((5, 77), dtype), g.input((77, 12), dtype)
    g.output(g.add(x, y), g.mul(g.mul(x, y), g.mul(x, x)), g.sub(x, y), g.maximum(x, y), g.neg(x))
    g.output(g.less(x, y), g.where(g.less(x, y), x, y), g.sum(x, 1), g.reduce_max(x, 0))
    g.output(g.cast(x, "f32"), g.cast(g.mul(g.cast(x, "f32"), 1.75), dtype), g.matmul(x, w))
    g.output(g.add(x, 2.0), g.minimum(x, 1.0), g.less(x, 2.0), g.square(x), g.concat([x, y], 0))
    return g.freeze()


def test_every_dtype() -> None:
    """f64, f16, bf16 and fp8 round as their types say; i8 wraps at 8 bits, i32 at 32; both are
    exact.
    """
    check([*(narrow(d) for d in ("f64", "f16", "bf16", "f8e4m3")), integers("i8"), integers("i32")])


def test_bool_inputs_and_mixed_floats() -> None:
    """A bool input selects; an f64 operand widens an f32 one; casts between all kinds."""
    g = KernelGraph("bool")
    c, x, y, z = (
        g.input((3, 77), "bool"), g.input((3, 77)), g.input((3, 77)), g.input((3, 77), "f64")
    )  # fmt: skip
    g.output(g.where(c, x, y), g.cast(c, "f32"), g.cast(c, "i32"), g.add(x, z), g.where(c, x, z))
    g.output(g.concat([c, c], 1), g.transpose(c), g.cast(g.cast(x, "f64"), "f32"))
    check([g.freeze()])


@pytest.mark.parametrize("op", ["exp", "log", "tanh", "sigmoid", "erf", "sqrt", "rsqrt"])
def test_functions_are_accurate(op: str) -> None:
    """Error of the vector functions: at most 3 units in the last place over their whole range."""
    spread = np.concatenate(
        [
            np.linspace(-87.0, 88.0, 40_001),
            np.linspace(-1.5, 1.5, 40_001),
            np.geomspace(1e-30, 1e30, 20_001),
            -np.geomspace(1e-30, 80.0, 20_001),
        ]
    ).astype(np.float32)
    if op in ("log", "sqrt", "rsqrt"):
        spread = np.abs(spread[spread != 0])
    x = spread.reshape(1, -1)
    g = KernelGraph(op)
    g.output(getattr(g, op)(g.input(x.shape)))
    graph = g.freeze()
    ((_, library),) = compiled([graph])
    (got,) = call(library, graph, [x], 1)
    (exact,) = run(graph, [x])
    with np.errstate(over="ignore"):
        unit = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    limits = np.finfo(np.float32)
    normal = (np.abs(exact) >= limits.tiny) & (np.abs(exact) <= limits.max)
    assert normal.sum() > 50_000
    assert float(np.max(np.abs(got[normal] - exact[normal]) / unit[normal])) <= 3.0


def test_edge_values() -> None:
    """Infinities, NaN, signed zeros and overflow come out as numpy gives them."""
    x = np.array(
        [[np.inf, -np.inf, np.nan, 0.0, -0.0, 89.0, -104.0, 1e-42, 3e38, -3e38, 88.72, -1.0]],
        np.float32,
    )
    g = KernelGraph("edges")
    n = g.input(x.shape)
    for op in (g.exp, g.log, g.tanh, g.sigmoid, g.erf, g.sqrt, g.rsqrt, g.relu, g.neg, g.square):
        g.output(op(n))
    g.output(g.maximum(n, 0.5), g.minimum(n, 0.5), g.less(n, 0.5), g.div(1.0, n))
    g.output(g.reduce_max(n, 1), g.reduce_max(g.slice(n, 1, 3, 6), 1), g.mul(n, 2.0))
    check([g.freeze()], inputs=[[x]])


DEPTHS = (1, 7, 8, 15, 17, 24, 40, 56, 77, 100, 1000, 4095)


def test_every_term_of_a_product_counts() -> None:
    """R05: ones times ones equals the depth exactly, for any depth, few rows and many, f32 and
    f16.
    """
    graphs, inputs = [], []
    for dtype, rows in (("f32", 64), ("f32", 3), ("f16", 64)):
        g = KernelGraph(f"ones {dtype} {rows}")
        arrays: list[Any] = []
        kind = DType(dtype).numpy
        for k in DEPTHS:
            a, b = g.input((rows, k), dtype), g.input((k, 64), dtype)
            product = g.matmul(a, b)
            g.output(product)
            arrays += [np.ones((rows, k), kind), np.ones((k, 64), kind)]
        graphs.append(g.freeze())
        inputs.append(arrays)
    for (graph, library), arrays in zip(compiled(graphs), inputs, strict=True):
        for k, out in zip(DEPTHS, call(library, graph, arrays), strict=True):
            assert (out == np.asarray(k).astype(out.dtype)).all(), (graph.name, k)


def products() -> list[Graph]:
    out = []
    for m, k, n in (
        (1, 1, 1),
        (5, 7, 3),
        (6, 16, 16),
        (13, 300, 35),
        (100, 33, 129),
        (40, 640, 77),
    ):
        g = KernelGraph(f"product {m} {k} {n}")
        a, b = g.input((m, k)), g.input((k, n))
        at, bt = g.input((k, m)), g.input((n, k))
        g.output(g.matmul(a, b), g.matmul(g.transpose(at), b), g.matmul(a, g.transpose(bt)))
        g.output(g.matmul(g.transpose(at), g.transpose(bt)))
        out.append(g.freeze())
    g = KernelGraph("batched")
    a, b, c = g.input((2, 3, 5, 7)), g.input((3, 7, 9)), g.input((7, 9))
    g.output(g.matmul(a, b), g.matmul(a, c), g.matmul(g.slice(a, 0, 0, 1), b))
    out.append(g.freeze())
    g = KernelGraph("deep")  # cut along its depth, combined by a reducing store
    a, b = g.input((2, 9000)), g.input((9000, 3))
    g.output(g.matmul(a, b), g.sum(g.reshape(b, (1, 27000)), 1))
    out.append(g.freeze())
    return out


def test_products_of_any_layout() -> None:
    """Operands transposed or not, batches broadcast, sizes around the register block; long
    depth.
    """
    check(products(), relative=1e-4)


def test_strided_inputs() -> None:
    """Inputs with padding, transposed, and with a repeated row (stride 0)."""
    g = KernelGraph("strides")
    x = g.input((6, 10), strides=(16, 1))
    y = g.input((6, 10), strides=(1, 6))
    z = g.input((6, 10), strides=(0, 1))
    w = g.input((10, 8), strides=(1, 12))
    h = g.input((6, 10), "f16", strides=(23, 2))
    total = g.add(g.add(x, y), z)
    g.output(total, g.matmul(x, w), g.matmul(g.transpose(w), g.transpose(y)), g.sum(y, 0))
    g.output(g.reshape(y, (60,)), g.cast(h, "f32"), g.softmax(y))
    graph = g.freeze()
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(n.shape).astype(n.dtype.numpy) for n in graph.inputs]
    arrays[2][:] = arrays[2][0]
    check([graph], inputs=[arrays])


def test_outputs_that_are_inputs_views_or_the_same() -> None:
    """An output may be an input, a view, a constant tensor, or the same value twice."""
    g = KernelGraph("outputs")
    x = g.input((4, 6))
    y = g.exp(x)
    g.output(x, y, y, g.transpose(y), g.reshape(g.transpose(y), (2, 12)), g.iota((3, 4), 0))
    check([g.freeze()])


def composites() -> Graph:
    g = KernelGraph("composites")
    x, c, s = g.input((3, 7, 24)), g.input((7, 24)), g.input((7, 24))
    q, k, v = g.input((4, 9, 16)), g.input((2, 21, 16)), g.input((2, 21, 8))
    g.output(g.rope(x, c, s), g.rope(x, c, s, interleaved=True), g.gelu(x, "tanh"))
    g.output(g.attention(q, k, v), g.attention(q, k, v, causal=True))
    return g.freeze()


def test_composites() -> None:
    """rope, gelu and grouped, causal attention."""
    check([composites()])


def test_a_result_does_not_depend_on_threads() -> None:
    """One, two and many threads give the same bytes."""
    graph = composites()
    ((_, library),) = compiled([graph])
    arrays = random_inputs(graph, 3)
    one = call(library, graph, arrays, 1)
    for threads in (2, 3, 64):
        for a, b in zip(one, call(library, graph, arrays, threads), strict=True):
            assert a.tobytes() == b.tobytes()


def test_errors_are_seen() -> None:
    """The comparison itself: a single wrong element is found."""
    a = np.zeros((4, 4), np.float32)
    b = a.copy()
    b[3, 3] = 1e-3
    assert largest_error(a, a) == 0.0
    assert largest_error(a, b) > 9e-4
    assert largest_error(np.array([np.nan]), np.array([1.0])) == np.inf
