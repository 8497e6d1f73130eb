"""What rounding alone does to a program: its outputs under random rounding, several times over.

A program's own error at one set of inputs is one sample, and at a handful of elements it can be
zero by luck; sums of exponentials far below one sit where floats lose their digits. Here every
inexact step is rounded at random, by up to one unit and one smallest subnormal (Monte Carlo
arithmetic). How far the outputs spread is what any right rewrite may differ by. A second, harsher
kind takes head-room off both ends of the range: what stays finite there depends neither on the
largest numbers nor on the smallest, so a right rewrite stays finite too.

Inputs are exact, and so are moves, maxima, comparisons and zeros that come from zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from obelisk.ir.block import Reduce
from obelisk.ir.dtype import DType
from obelisk.ir.graph import Graph
from obelisk.ir.interp import evaluate
from obelisk.ir.kernels import align
from obelisk.ir.node import Node, topological
from obelisk.ir.numeric import NumpyAlgebra, Precision, bind
from obelisk.ir.op import Op

Array = Any

HEADROOM = 1 / 64  # of the largest number: above it a program is near its limit
_DRAWS = 8
_MUCH = 1 / 8  # of a result: one that moved further depends on the ends of the range

_INEXACT = frozenset({
    Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.EXP, Op.LOG, Op.SQRT, Op.RSQRT, Op.SQUARE, Op.TANH,
    Op.SIGMOID, Op.ERF, Op.SUM, Op.MATMUL,
})  # fmt: skip
_FACTORS = frozenset({Op.MUL, Op.DIV, Op.SUM, Op.MATMUL})
# Where a result is not an exact zero, so that it may have become one by underflow.
_UNDERFLOWS: dict[Op, Callable[..., Array]] = {
    Op.MUL: lambda a, b: (a != 0) & (b != 0),
    Op.SQUARE: lambda a: a != 0,
    Op.DIV: lambda a, b: (a != 0) & np.isfinite(b),
    Op.EXP: lambda a: ~np.isneginf(a),  # a masked score is meant
    Op.SIGMOID: lambda a: ~np.isneginf(a),
    Op.MATMUL: lambda a, b: (a != 0).astype(np.float32) @ (b != 0).astype(np.float32) > 0,
}


class _Random(NumpyAlgebra):
    """Rounds every inexact step at random; `harsh` takes head-room off the range as well."""

    def __init__(
        self, precision: Precision, seed: int, harsh: bool, stored: frozenset[Node]
    ) -> None:
        super().__init__(precision)
        self.rng, self.harsh, self.stored = np.random.default_rng(seed), harsh, stored

    def _shake(self, x: Array, dtype: type | np.dtype[Any], live: Array | None) -> Array:
        """`x` moved by up to one unit of `dtype`, and by up to one subnormal where `live`."""
        info = ml_dtypes.finfo(dtype)
        with np.errstate(all="ignore"):
            size = float(info.eps) * np.abs(x)
            if live is not None:
                size = size + np.where(live, float(info.smallest_subnormal), 0.0)
            out = x + (size * self.rng.uniform(-1, 1, x.shape)).astype(x.dtype)
            # A positive number stays one: the root of a sum of squares is no NaN.
            out = np.where((np.sign(out) == -np.sign(x)) & (x != 0), 0 * x, out)
        return self._narrow(out, dtype, live) if self.harsh else out

    def _narrow(self, x: Array, dtype: type | np.dtype[Any], live: Array | None) -> Array:
        info = ml_dtypes.finfo(dtype)
        top, bottom = float(info.max) * HEADROOM, float(info.smallest_normal) / HEADROOM
        x = np.where(np.abs(x) > top, np.copysign(np.inf, x), x)
        if live is None:
            return x
        low = np.copysign(bottom * self.rng.uniform(0, 1, x.shape), x).astype(x.dtype)
        return np.where(live & (np.abs(x) < bottom), low, x)

    def apply(self, node: Node, args: Sequence[Array], lead: int) -> Array:
        if node.op not in _INEXACT or args[0].dtype.kind != "f":
            return super().apply(node, args, lead)
        live = None
        if node.op in _UNDERFLOWS:
            pairs = zip(args, node.inputs, strict=True)
            live = _UNDERFLOWS[node.op](*(align(a, lead, i.rank, node.rank) for a, i in pairs))
        if node.op in _FACTORS:  # each use by itself: x / x is no exact one to a rewrite
            args = [self._use(a, i) for a, i in zip(args, node.inputs, strict=True)]
        out = super().apply(node, args, lead)
        return self._shake(out, out.dtype, live)

    def _use(self, x: Array, source: Node) -> Array:
        """An operand as a rewrite may see it: rounded at another place."""
        if not self.harsh:
            return self._shake(x, x.dtype, x != 0)
        held = self.exact or source not in self.stored
        return self._narrow(x, x.dtype if held else source.dtype.numpy, x != 0)

    def add(self, a: Array, b: Array) -> Array:
        out = super().add(a, b)
        return self._shake(out, out.dtype, None) if out.dtype.kind == "f" else out

    def fold(self, value: Array, axis: int, reduce: Reduce) -> Array:
        if reduce is not Reduce.SUM or value.dtype.kind != "f":
            return super().fold(value, axis, reduce)
        out = super().fold(self._shake(value, value.dtype, None), axis, reduce)
        return self._shake(out, out.dtype, None)

    def rescale(self, acc: Array, old: Array, new: Array) -> Array:
        out = super().rescale(acc, old, new)
        return self._shake(out, out.dtype, acc != 0)

    def settle(self, value: Array, dtype: DType, block: bool) -> Array:
        if dtype.is_float and not self.exact and not block:
            with np.errstate(all="ignore"):
                stored = value.astype(dtype.numpy).astype(value.dtype)
            inexact = (stored != value) & np.isfinite(value)
            if inexact.any():
                value = np.where(inexact, self._shake(value, dtype.numpy, value != 0), value)
        return super().settle(value, dtype, block)


def interpret(graph: Graph, arrays: Sequence[Array], algebra: NumpyAlgebra) -> list[Array]:
    """Outputs as float64 (or integer) arrays of the outputs' shapes."""
    values = evaluate(graph.outputs, bind(graph, arrays, algebra), algebra)
    out = []
    for value, node in zip(values, graph.outputs, strict=True):
        full = np.broadcast_to(value, node.shape)
        out.append(full.astype(np.float64 if node.dtype.is_float else np.int64))
    return out


class Rounding:
    """A program on one set of inputs under random rounding; each kind of run is made when asked
    for, and kept.

    Args:
        program, arrays: the program and its inputs.
        exact: its outputs in float64.
        seed: of the roundings.
        draws: how many runs of each kind.
    """

    def __init__(
        self,
        program: Graph,
        arrays: Sequence[Array],
        exact: Sequence[Array],
        seed: int,
        draws: int = _DRAWS,
    ) -> None:
        self.program, self.arrays, self.exact = program, arrays, exact
        self.seed, self.draws = seed, draws
        # Inputs are exact; what kernels of the program leave in device memory is not.
        self.stored = frozenset(n for n in topological(program.outputs) if n.op is not Op.INPUT)
        self._kept: dict[tuple[Precision, bool], list[list[Array]]] = {}

    def _runs(self, precision: Precision, harsh: bool) -> list[list[Array]]:
        key = (precision, harsh)
        if key not in self._kept:
            self._kept[key] = [
                interpret(
                    self.program,
                    self.arrays,
                    _Random(precision, self.seed + k, harsh, self.stored),
                )
                for k in range(self.draws)
            ]
        return self._kept[key]

    def spread(self, precision: Precision, output: int) -> Array:
        """How far each element of an output strays from its float64 value, by rows along the last
        axis; infinite where it ceases to be finite.
        """
        want = self.exact[output]
        with np.errstate(all="ignore"):
            off = [np.abs(run[output] - want) for run in self._runs(precision, False)]
        worst = functools.reduce(np.maximum, off)
        lost = ~np.isfinite(worst)
        if worst.ndim:
            finite = np.where(lost, 0, worst)
            worst = np.broadcast_to(finite.max(axis=-1, keepdims=True), worst.shape)
        return np.where(lost, np.inf, worst)

    def stays_finite(self, precision: Precision, output: int) -> Array:
        """Which elements of an output are finite, and much the same, even with head-room at both
        ends of the range.
        """
        want = self.exact[output]
        with np.errstate(all="ignore"):
            near = np.maximum(_MUCH * np.abs(want), 1e-6 * row_scale(want))
            same = [np.abs(run[output] - want) <= near for run in self._runs(precision, True)]
        return functools.reduce(np.logical_and, same)


def row_scale(x: Array) -> Array:
    """Largest finite magnitude of each row along the last axis, and a millionth of the largest of
    all.
    """
    size = np.abs(np.where(np.isfinite(x), x, 0))
    if not x.ndim:
        return size
    return np.maximum(size.max(axis=-1, keepdims=True), 1e-6 * size.max())
