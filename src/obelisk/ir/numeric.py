"""The numpy algebra: a graph's meaning in float64, and its behaviour in its own dtypes.

`run(graph, arrays)` gives the meaning; `run(graph, arrays, Precision.WORKING)` rounds and overflows
as a machine does: device memory holds each kernel's result in its dtype, inside a kernel values are
kept in the accumulator type.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from obelisk.base.errors import ShapeError
from obelisk.ir.block import Reduce
from obelisk.ir.dtype import DType
from obelisk.ir.graph import Graph
from obelisk.ir.interp import evaluate
from obelisk.ir.node import Node, Shape
from obelisk.ir.op import Op
from obelisk.ir.table import TABLE

Array = Any


class Precision(enum.Enum):
    """How an interpretation rounds."""

    EXACT = "exact"  # float64 throughout
    WORKING = "working"  # the graph's own dtypes


class NumpyAlgebra:
    """Arrays of float64 (EXACT), or of accumulator types rounded to storage types at kernel borders
    (WORKING).
    """

    def __init__(self, precision: Precision = Precision.EXACT) -> None:
        self.exact = precision is Precision.EXACT
        self.peak = 0.0  # largest finite magnitude that was settled (WORKING only)
        self.overflowed = False  # an infinity or NaN was settled (WORKING only)

    def lift(self, array: Array, dtype: DType) -> Array:
        """An input array as a value of this algebra."""
        if not dtype.is_float:
            return np.asarray(array).astype(np.bool_ if dtype is DType.BOOL else np.int64)
        return (
            np.asarray(array, dtype=np.float64)
            if self.exact
            else self._held(np.asarray(array), dtype)
        )

    def _held(self, x: Array, dtype: DType) -> Array:
        return x.astype(np.float64 if dtype is DType.F64 else np.float32)

    def const(self, value: float) -> Array:
        return np.asarray(value, dtype=np.float64 if self.exact else np.float32)

    def integer(self, value: int) -> Array:
        return self.const(float(value))

    def iota(self, shape: Shape, axis: int) -> Array:
        n = shape[axis]
        line = np.arange(n, dtype=np.int64).reshape(
            [n if d == axis else 1 for d in range(len(shape))]
        )
        return np.broadcast_to(line, shape)

    def apply(self, node: Node, args: Sequence[Array], lead: int) -> Array:
        meaning = TABLE[node.op].numpy
        assert meaning is not None
        if node.op is Op.CAST and node.dtype.is_float and args[0].dtype.kind in "ib":
            args = [args[0].astype(np.float64 if self.exact else np.float32)]
        if node.op is Op.CAST and node.dtype is DType.BOOL:
            return args[0] != 0
        with np.errstate(all="ignore"):
            return meaning(node, args, lead)

    def structural(self, fn: Callable[..., Array], *values: Array) -> Array:
        return fn(*values)

    def add(self, a: Array, b: Array) -> Array:
        with np.errstate(all="ignore"):
            return a + b

    def maximum(self, a: Array, b: Array) -> Array:
        return np.maximum(a, b)

    def fold(self, value: Array, axis: int, reduce: Reduce) -> Array:
        return np.sum(value, axis=axis) if reduce is Reduce.SUM else np.max(value, axis=axis)

    def rescale(self, acc: Array, old: Array, new: Array) -> Array:
        with np.errstate(all="ignore"):
            # Where nothing was seen yet both maxima are -inf: the accumulator is 0 and stays 0.
            return np.where(np.isneginf(old), np.zeros_like(acc), acc * np.exp(old - new))

    def settle(self, value: Array, dtype: DType, block: bool) -> Array:
        if not dtype.is_float:
            return value if dtype is DType.BOOL else _wrap(value, dtype)
        if self.exact:
            return value
        with np.errstate(all="ignore"):
            out = self._held(value if block else value.astype(dtype.numpy), dtype)
        finite = np.isfinite(out)
        if not finite.all():
            self.overflowed = True
        self.peak = max(self.peak, float(np.max(np.abs(out), where=finite, initial=0.0)))
        return out

    def shape(self, value: Array) -> Shape:
        return tuple(value.shape)


def _wrap(value: Array, dtype: DType) -> Array:
    """Integers wrap around as two's complement."""
    whole = value.astype(np.int64)  # a float is cut towards zero
    half = 1 << (dtype.bits - 1)
    return (whole + half) % (2 * half) - half


def bind(graph: Graph, arrays: Sequence[Array], algebra: NumpyAlgebra) -> dict[Node, Array]:
    """Input values by node; raises `ShapeError` naming the input and both sides."""
    if len(arrays) != len(graph.inputs):
        raise ShapeError(f"{graph.name} takes {len(graph.inputs)} inputs, got {len(arrays)}")
    out: dict[Node, Array] = {}
    for name, node, array in zip(graph.input_names, graph.inputs, arrays, strict=True):
        if tuple(np.shape(array)) != node.shape:
            raise ShapeError(
                f"input {name!r} has shape {tuple(np.shape(array))}, the graph expects {node.shape}"
            )
        out[node] = algebra.lift(array, node.dtype)
    return out


def run(
    graph: Graph, arrays: Sequence[Array], precision: Precision = Precision.EXACT
) -> list[Array]:
    """Interpret a graph on numpy arrays, one per input, at all three levels; returns one array per
    output.

    EXACT gives float64 arrays; WORKING gives arrays of the outputs' own dtypes.
    """
    algebra = NumpyAlgebra(precision)
    values = evaluate(graph.outputs, bind(graph, arrays, algebra), algebra)
    if precision is Precision.EXACT:
        return [np.asarray(v, order="C") for v in values]
    return [
        np.asarray(v, order="C").astype(o.dtype.numpy)
        for v, o in zip(values, graph.outputs, strict=True)
    ]


def random_inputs(graph: Graph, seed: int = 0, scale: float = 1.0) -> list[Array]:
    """Standard-normal inputs of the graph's dtypes (integers: small), reproducible by seed."""
    rng = np.random.default_rng(seed)
    out: list[Array] = []
    for node in graph.inputs:
        if node.dtype.is_float:
            out.append((rng.standard_normal(node.shape) * scale).astype(node.dtype.numpy))
        elif node.dtype is DType.BOOL:
            out.append(rng.integers(0, 2, node.shape).astype(np.bool_))
        else:
            out.append(rng.integers(-4, 5, node.shape).astype(node.dtype.numpy))
    return out
