"""Every operator and composite alone is right (R01), also behind a product and in front of a
reduction.

Compares the interpreter, in float64 and in the working precisions, with the formula written in
plain float64 numpy, on (8, 4096), (1, 1), (3, 77) and (7, 4095), and checks the ranges that a wrong
operator leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import erf, inf, pi, sqrt
from typing import Any

import numpy as np
import pytest

from obelisk.base.errors import DTypeError
from obelisk.ir import TABLE, DType, Graph, Kind, Op, Precision, make_graph, random_inputs, run
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.ir.interp import evaluate
from obelisk.ir.numeric import NumpyAlgebra, bind

SHAPES = [(8, 4096), (1, 1), (3, 77), (7, 4095)]
TOLERANCE = {DType.F32: (1e-5, 1e-4), DType.F16: (1e-3, 1e-2), DType.BF16: (1e-2, 2e-2)}
Array = Any
_np_erf = np.vectorize(erf, otypes=[np.float64])


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer_norm(x: Array) -> Array:
    d = x - x.mean(-1, keepdims=True)
    return d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5)


@dataclass(frozen=True)
class Case:
    """One operator: builder, formula, how many operands, the map of inputs into its domain, and its
    range.
    """

    name: str
    build: Callable[..., Any]
    formula: Callable[..., Array]
    arity: int = 1
    domain: Callable[[Array], Array] | None = None
    low: float = -inf
    high: float = inf


def positive(x: Array) -> Array:
    return abs(x) + np.asarray(0.25, x.dtype)


CASES = [
    Case("neg", b.neg, np.negative),
    Case("exp", b.exp, np.exp, low=0.0),
    Case("log", b.log, np.log, domain=positive),
    Case("sqrt", b.sqrt, np.sqrt, domain=positive, low=0.0),
    Case("rsqrt", b.rsqrt, lambda x: 1 / np.sqrt(x), domain=positive, low=0.0),
    Case("square", b.square, np.square, low=0.0),
    Case("tanh", b.tanh, np.tanh, low=-1.0, high=1.0),
    Case("sigmoid", b.sigmoid, sigmoid, low=0.0, high=1.0),
    Case("erf", b.erf, _np_erf, low=-1.0, high=1.0),
    Case("cast", lambda x: b.cast(b.cast(x, "f32"), x.dtype), lambda x: x),
    Case("add", b.add, np.add, 2),
    Case("sub", b.sub, np.subtract, 2),
    Case("mul", b.mul, np.multiply, 2),
    Case("div", lambda x, y: b.div(x, b.add(b.square(y), 0.5)), lambda x, y: x / (y * y + 0.5), 2),
    Case("max", b.maximum, np.maximum, 2),
    Case("min", b.minimum, np.minimum, 2),
    Case("where", lambda x, y: b.where(b.less(x, y), x, b.mul(y, 2.0)),
         lambda x, y: np.where(x < y, x, 2 * y), 2),
    Case("less", lambda x, y: b.cast(b.less(x, y), x.dtype), lambda x, y: x < y, 2, low=0, high=1),
    Case("sum", lambda x: b.sum(x, 1), lambda x: x.sum(1, keepdims=True)),
    Case("reduce_max", lambda x: b.reduce_max(x, 1), lambda x: x.max(1, keepdims=True)),
    Case("mean", c.mean, lambda x: x.mean(-1, keepdims=True)),
    Case("transpose", b.transpose, np.transpose),
    Case("reshape", lambda x: b.reshape(x, (-1,)), np.ravel),
    Case("broadcast", lambda x: b.broadcast(x, (2, *x.shape)), lambda x: np.stack([x, x])),
    Case("slice", lambda x: b.slice(x, 1, x.shape[1] // 3, x.shape[1]),
         lambda x: x[:, x.shape[1] // 3 :]),
    Case("concat", lambda x, y: b.concat([x, y, x], 1), lambda x, y: np.hstack([x, y, x]), 2),
    Case("matmul", lambda x, y: b.matmul(x, b.transpose(y)), lambda x, y: x @ y.T, 2),
    Case("softmax", c.softmax, softmax, low=0.0, high=1.0 + 1e-3),
    Case("rms_norm", lambda x: c.rms_norm(x, eps=1e-6),
         lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)),
    Case("rms_norm gain", lambda x, y: c.rms_norm(x, y, eps=1e-6),
         lambda x, y: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * y, 2),
    Case("layer_norm", c.layer_norm, layer_norm),
    Case("layer_norm gain bias", lambda x, y: c.layer_norm(x, y, x),
         lambda x, y: layer_norm(x) * y + x, 2),
    Case("silu", c.silu, lambda x: x * sigmoid(x), low=-0.2786),
    Case("gelu", c.gelu, lambda x: 0.5 * x * (1 + _np_erf(x / sqrt(2))), low=-0.1701),
    Case("gelu tanh", lambda x: c.gelu(x, "tanh"),
         lambda x: 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))), low=-0.1701),
    Case("relu", c.relu, lambda x: np.maximum(x, 0), low=0.0),
    Case("abs", c.absolute, np.abs, low=0.0),
    Case("clamp", lambda x: c.clamp(x, -0.5, 1.0), lambda x: np.clip(x, -0.5, 1.0), 1, None,
         -0.5, 1.0),
]  # fmt: skip
ELEMENTWISE = [
    k for k in CASES
    if k.name in {r.value for r in Op if TABLE[r].kind in (Kind.UNARY, Kind.BINARY, Kind.TERNARY)}
    or k.name in ("silu", "gelu", "gelu tanh", "relu", "abs", "clamp")
]  # fmt: skip


def test_every_numeric_operator_has_a_case() -> None:
    """A new operator without a formula here fails."""
    numeric = {op.value for op, row in TABLE.items() if row.numpy is not None}
    assert numeric <= {case.name for case in CASES}


def close(got: Array, want: Array, dtype: DType, slack: float = 1.0) -> None:
    """Within the house tolerance, times `slack` for composites, which round several times."""
    atol, rtol = (slack * t for t in TOLERANCE[dtype])
    worst = np.max(np.abs(got.astype(np.float64) - want) / (atol + rtol * np.abs(want)))
    assert worst <= 1, f"off by {worst:.3g} tolerances"


def inputs_of(case: Case, graph: Graph, seed: int) -> list[Array]:
    arrays = random_inputs(graph, seed)
    return [case.domain(a) if case.domain else a for a in arrays]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda k: k.name)
def test_alone(case: Case, shape: tuple[int, int]) -> None:
    for dtype in (DType.F32, DType.F16):
        xs = [b.input_node(i, shape, dtype) for i in range(case.arity)]
        graph = make_graph(xs, [case.build(*xs)])
        arrays = inputs_of(case, graph, seed=shape[1])
        with np.errstate(all="ignore"):
            want = case.formula(*(a.astype(np.float64) for a in arrays))
        (exact,) = run(graph, arrays)
        assert exact.shape == graph.outputs[0].shape
        np.testing.assert_allclose(exact, want, rtol=1e-11, atol=1e-11)
        assert np.all(exact >= case.low - 1e-12)
        assert np.all(exact <= case.high)
        (working,) = run(graph, arrays, Precision.WORKING)
        assert working.dtype == graph.outputs[0].dtype.numpy
        kernels = len(graph.launches())
        close(working, want, dtype, slack=1 if kernels <= 2 else 4)
        if dtype is DType.F32:
            assert np.all(working >= np.float32(case.low) - 1e-6)


@pytest.mark.parametrize("case", ELEMENTWISE, ids=lambda k: k.name)
@pytest.mark.parametrize("shape", [(8, 128), (3, 77), (1, 1)], ids=str)
def test_after_a_product_and_before_a_reduction(case: Case, shape: tuple[int, int]) -> None:
    """As an epilogue and as a prologue, where a wrong operator often shows first."""
    m, n = shape
    x, w = b.input_node(0, (m, 16)), b.input_node(1, (16, n))
    rest = [b.input_node(2 + i, shape) for i in range(case.arity - 1)]
    product = b.mul(b.matmul(x, w), 0.25)
    safe = b.add(c.absolute(product), 0.25) if case.domain else product
    value = case.build(safe, *rest)
    total = b.sum(value, 1)
    graph = make_graph([x, w, *rest], [value, total])
    arrays = random_inputs(graph, seed=m)
    first = arrays[0].astype(np.float64) @ arrays[1] * 0.25
    first = np.abs(first) + 0.25 if case.domain else first
    want = case.formula(first, *(a.astype(np.float64) for a in arrays[2:]))
    for precision in Precision:
        got = run(graph, arrays, precision)
        close(got[0], want, DType.F32)
        close(got[1], want.sum(1, keepdims=True), DType.F32)


def test_sqrt_and_rsqrt_are_nan_only_below_zero() -> None:
    x = b.input_node(0, (4,))
    graph = make_graph([x], [b.sqrt(x), b.rsqrt(x)])
    root, inverse = run(graph, [np.array([-1.0, -1e-30, 1e-30, 4.0])])
    assert np.isnan(root).tolist() == [True, True, False, False]
    assert np.isnan(inverse).tolist() == [True, True, False, False]
    assert root[3] == 2.0
    assert inverse[3] == 0.5


def test_softmax_and_sigmoid_do_not_overflow() -> None:
    """R11: rows that reach far beyond the range of exp in the working precision stay finite."""
    x = b.input_node(0, (1, 4), DType.F16)
    graph = make_graph([x], [c.softmax(x), b.sigmoid(x), c.silu(x)])
    row = np.array([[-1000.0, 0.0, 20.0, 1000.0]], dtype=np.float16)
    soft, sig, sil = run(graph, [row], Precision.WORKING)
    assert soft.tolist() == [[0.0, 0.0, 0.0, 1.0]]
    assert sig.tolist() == [[0.0, 0.5, 1.0, 1.0]]
    assert sil.tolist() == [[0.0, 0.0, 20.0, 1000.0]]


@pytest.mark.parametrize(
    ("dtype", "count", "want"),
    [("f16", 60_000, 60_000.0), ("f16", 70_000, inf), ("bf16", 4096, 4096.0), ("f32", 70_000, 7e4)],
)  # fmt: skip
def test_sums_accumulate_in_f32(dtype: str, count: int, want: float) -> None:
    """R45: a half-precision accumulator would stop at 2048 (f16) or 256 (bf16)."""
    from obelisk.ir import parse_dtype

    x = b.input_node(0, (1, count), parse_dtype(dtype))
    ones = np.ones((1, count), dtype=x.dtype.numpy)
    graph = make_graph([x], [b.sum(x, 1)])
    (got,) = run(graph, [ones], Precision.WORKING)
    assert float(got[0, 0]) == want
    algebra = NumpyAlgebra(Precision.WORKING)
    evaluate(graph.outputs, bind(graph, [ones], algebra), algebra)
    assert algebra.overflowed == (want == inf)


def test_integers_wrap_and_cast() -> None:
    x = b.input_node(0, (3,), DType.I8)
    graph = make_graph([x], [b.add(x, x), b.cast(x, "f32"), b.cast(b.cast(x, "f32"), "i32")])
    arrays = [np.array([100, -100, 3], dtype=np.int8)]
    total, real, back = run(graph, arrays, Precision.WORKING)
    assert total.tolist() == [-56, 56, 6]
    assert real.tolist() == [100.0, -100.0, 3.0]
    assert back.tolist() == [100, -100, 3]


def test_narrow_integers_wrap_and_bools_are_made() -> None:
    x, y = b.input_node(0, (3,), DType.I4), b.input_node(1, (4,))
    graph = make_graph([x, y], [b.add(x, x), b.cast(y, "bool"), b.cast(y, "i8")])
    arrays = [np.array([7, -8, 3]), np.array([0.0, -0.5, 2.9, 300.7])]
    for precision in Precision:
        total, truth, whole = run(graph, arrays, precision)
        assert total.astype(int).tolist() == [-2, 0, 6]
        assert truth.astype(bool).tolist() == [False, True, True, True]
        assert whole.tolist() == [0, 0, 2, 44]


def test_constants_with_integers_must_be_whole() -> None:
    x = b.input_node(0, (3,), DType.I32)
    assert b.add(x, 2.0).dtype is DType.I32
    with pytest.raises(DTypeError, match=r"add: constant 1\.5 with operands of i32"):
        b.add(x, 1.5)
    with pytest.raises(DTypeError, match="where: constant -inf"):
        b.where(b.less(x, 1.0), x, -inf)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved: bool) -> None:
    """Each pair is turned by its angle, so that lengths stay and angles add."""
    seq, d = 5, 8
    x, cos, sin = (b.input_node(i, (seq, d)) for i in range(3))
    graph = make_graph([x, cos, sin], [c.rope(x, cos, sin, interleaved)])
    angle = np.outer(np.arange(seq), 1.0 / 100 ** (np.arange(d // 2) / (d // 2)))
    full = np.repeat(angle, 2, axis=1) if interleaved else np.hstack([angle, angle])
    data = np.random.default_rng(0).standard_normal((seq, d))
    (got,) = run(graph, [data, np.cos(full), np.sin(full)])
    first, second = (slice(0, d, 2), slice(1, d, 2)) if interleaved else (
        slice(0, d // 2), slice(d // 2, d))  # fmt: skip
    want = (data[:, first] + 1j * data[:, second]) * np.exp(1j * angle)
    np.testing.assert_allclose(got[:, first] + 1j * got[:, second], want, atol=1e-12)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [(5, 5), (3, 7), (1, 9)])
def test_attention(heads: int, groups: int, causal: bool, rows: int, cols: int) -> None:
    """Grouped heads and the causal mask, the last query seeing all keys."""
    d, e = 8, 6
    shapes = [(2, heads, rows, d), (2, groups, cols, d), (2, groups, cols, e)]
    q, k, v = (b.input_node(i, s) for i, s in enumerate(shapes))
    graph = make_graph([q, k, v], [c.attention(q, k, v, causal=causal)])
    arrays = random_inputs(graph, 3)
    (got,) = run(graph, arrays)
    aq, ak, av = (a.astype(np.float64) for a in arrays)
    ak, av = (np.repeat(a, heads // groups, axis=1) for a in (ak, av))
    scores = aq @ ak.swapaxes(-1, -2) / np.sqrt(d)
    if causal:
        visible = np.arange(cols)[None, :] <= np.arange(rows)[:, None] + cols - rows
        scores = np.where(visible, scores, -np.inf)
    np.testing.assert_allclose(got, softmax(scores) @ av, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("extent", [1, 7, 8, 15, 17, 24, 40, 56, 77, 100, 1000, 4095])
def test_ones_sum_to_the_extent(extent: int) -> None:
    """R05 at kernel level: no term of a product or a sum is lost, in any precision."""
    for dtype in (DType.F32, DType.F16):
        x, w = b.input_node(0, (4, extent), dtype), b.input_node(1, (extent, 5), dtype)
        graph = make_graph([x, w], [b.matmul(x, w), b.sum(x, 1)])
        ones = [np.ones(i.shape, dtype=i.dtype.numpy) for i in graph.inputs]
        for precision in Precision:
            for got in run(graph, ones, precision):
                assert np.all(got == np.asarray(extent, dtype=got.dtype))
