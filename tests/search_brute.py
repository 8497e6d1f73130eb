"""A plain enumerator of kernels, to check the search against: no normal forms, no pruning by goal,
no bank.

Under one schedule it forms every sequence of at most `most` operators, runs each in float64 on
random input the way a block runs (the loop in two iterations, accumulators across them), and
reports those whose result is the target. Left out are sequences with an operator that nothing
reads, and of sequences that differ by the order of independent operators all but one. A program
with a division has the constant one too, for reciprocals (and for nothing else).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from obelisk.ir import Graph, Op, random_inputs, run
from obelisk.search.axes import Axis, Dims, Segment

Array = Any
INVARIANT, LOOP, POST = range(3)
_UNARY: dict[Op, Callable[[Array], Array]] = {
    Op.EXP: np.exp, Op.SQRT: np.sqrt, Op.SQUARE: np.square, Op.NEG: np.negative,
}  # fmt: skip
_BINARY: dict[Op, Callable[[Array, Array], Array]] = {
    Op.ADD: np.add, Op.SUB: np.subtract, Op.MUL: np.multiply, Op.DIV: np.divide,
    Op.MAX: np.maximum,
}  # fmt: skip
ONE = ("one",)  # the numerator of reciprocals
_COMMUTES = (Op.ADD, Op.MUL, Op.MAX)


@dataclass(frozen=True)
class Tile:
    """A value of the block: its operator and operands, axes, stage, and (iterations, tile...)
    numbers.
    """

    step: tuple[Any, ...]
    dims: Dims
    stage: int
    data: Array


@dataclass(frozen=True)
class Kernel:
    """A sequence that computes the target: operators only, leaves in front."""

    steps: tuple[Tile, ...]
    leaves: int


def operators(ops: frozenset[Op]) -> set[Op]:
    """What a kernel may be made of: the program's operators, and their relatives."""
    allowed = set(ops) & (set(_UNARY) | {Op.MAX, Op.MATMUL})
    if ops & {Op.MUL, Op.DIV}:
        allowed.add(Op.MUL)
    if ops & {Op.ADD, Op.SUB}:
        allowed.add(Op.ADD)
    allowed |= ops & {Op.SUB, Op.DIV}
    if ops & {Op.SUM, Op.MATMUL}:
        allowed.add(Op.SUM)
    return allowed


class Enumerator:
    """All kernels of a one-segment program under one loop axis."""

    def __init__(self, program: Graph, segment: Segment, loop: Axis | None) -> None:
        self.segment, self.loop = segment, loop
        self.allowed = operators(segment.ops)
        self.tried = 0
        inputs = random_inputs(program, 11, 1.0)
        self.start: list[Tile] = []
        for i, leaf in enumerate(segment.leaves):
            data = np.asarray(inputs[program.inputs.index(leaf)], np.float64)
            dims = segment.dims[leaf]
            self.start.append(Tile(("load", i), dims, self._stage(dims), self._cut(data, dims)))
        for node in segment.nodes:
            if node.op is Op.CONST:
                data = np.full((1,), node.attrs.value)
                self.start.append(Tile(("const", node.attrs.value), (), INVARIANT, data))
        if Op.DIV in self.allowed:
            self.start.append(Tile(ONE, (), INVARIANT, np.ones(1)))
        (target,) = segment.targets
        self.target_dims = segment.dims[target]
        self.want = self._cut(np.asarray(run(program, inputs)[0], np.float64), self.target_dims)
        self.want_stage = self._stage(self.target_dims)

    def _stage(self, dims: Dims) -> int:
        return LOOP if self.loop is not None and self.loop in dims else INVARIANT

    def _cut(self, data: Array, dims: Dims) -> Array:
        """(iterations, tile...): the loop's axis in two halves."""
        if self._stage(dims) != LOOP:
            return data[None]
        return np.stack(np.split(data, 2, dims.index(self.loop)))

    def kernels(self, most: int) -> Iterator[Kernel]:
        """Every sequence of at most `most` operators that computes the target."""
        with np.errstate(all="ignore"):
            yield from self._grow(list(self.start), frozenset(), most, ())

    def _grow(
        self, values: list[Tile], unused: frozenset[int], left: int, last: tuple[Any, ...]
    ) -> Iterator[Kernel]:
        made = {v.step for v in values}
        here = len(values) - 1
        for step in self._steps(values, unused if left == 1 else frozenset()):
            operands = step[1:2] if step[0] is Op.SUM else step[1:]
            rank = (operands, str(step[0]), step)
            if here not in operands and last and rank <= last:
                continue  # another order of independent operators
            if step in made:
                continue
            open_ends = unused - set(operands)
            if len(open_ends) > left - 1:
                continue  # a binary operator joins two ends: not all could be read any more
            shape = self._shape(step, values)
            if shape is None or (left == 1 and (open_ends or not self._fits(*shape))):
                continue
            tile = Tile(step, *shape, self._compute(step, values, shape[0]))
            self.tried += 1
            if not open_ends and self._is_target(tile):
                yield Kernel((*values, tile), len(self.start))
            if left > 1:
                yield from self._grow([*values, tile], open_ends | {len(values)}, left - 1, rank)

    def _steps(self, values: Sequence[Tile], ends: frozenset[int]) -> Iterator[tuple[Any, ...]]:
        """Every operator on every value or pair of values that has all of `ends` among it."""
        everything = range(len(values))
        for i in everything if not ends else ends if len(ends) == 1 else ():
            v = values[i]
            if v.step == ONE:
                continue
            yield from ((op, i) for op in _UNARY if op in self.allowed)
            if Op.SUM in self.allowed:
                yield from ((Op.SUM, i, d) for d, axis in enumerate(v.dims) if axis is not None)
            if v.stage == LOOP:
                yield ("accum_sum", i)
        binary = [op for op in _BINARY if op in self.allowed]
        for i, j in itertools.product(everything, everything):
            if not ends <= {i, j}:
                continue
            if ONE in (values[i].step, values[j].step):
                if values[j].step != ONE and Op.DIV in self.allowed:
                    yield (Op.DIV, i, j)
                continue
            yield from ((op, i, j) for op in binary if op not in _COMMUTES or i <= j)
            if Op.MATMUL in self.allowed:
                yield (Op.MATMUL, i, j)

    def _shape(self, step: tuple[Any, ...], values: Sequence[Tile]) -> tuple[Dims, int] | None:
        """Axes and stage of a step's result; None where it has no meaning."""
        op, v = step[0], values[step[1]]
        if op in _UNARY:
            return v.dims, v.stage
        if op is Op.SUM:
            d = step[2]
            return (*v.dims[:d], None, *v.dims[d + 1 :]), v.stage
        if op == "accum_sum":
            return v.dims, POST
        w = values[step[2]]
        if {v.stage, w.stage} == {LOOP, POST}:
            return None  # what the loop leaves behind is not there in the loop, and the reverse
        dims = _product(v.dims, w.dims) if op is Op.MATMUL else _joined(v.dims, w.dims)
        return None if dims is None else (dims, max(v.stage, w.stage))

    def _compute(self, step: tuple[Any, ...], values: Sequence[Tile], dims: Dims) -> Array:
        op, a = step[0], values[step[1]].data
        if op in _UNARY:
            return _UNARY[op](a)
        if op is Op.SUM:
            return a.sum(1 + step[2], keepdims=True)
        if op == "accum_sum":
            return a.sum(0, keepdims=True)
        b = values[step[2]].data
        if op is Op.MATMUL:
            return a @ b
        return _BINARY[op](_widened(a, len(dims)), _widened(b, len(dims)))

    def _fits(self, dims: Dims, stage: int) -> bool:
        return dims == self.target_dims and (stage == LOOP) == (self.want_stage == LOOP)

    def _is_target(self, tile: Tile) -> bool:
        return (
            self._fits(tile.dims, tile.stage)
            and tile.data.shape == self.want.shape
            and bool(np.allclose(tile.data, self.want, rtol=1e-9, atol=1e-12))
        )


def _product(a: Dims, b: Dims) -> Dims | None:
    """Axes of a matrix product; None unless the contracted dims are one axis."""
    if len(a) < 2 or len(b) < 2:
        return None
    axis, dims = a[-1], (a[-2], b[-1])
    if axis is None or b[-2] != axis or axis in dims:
        return None
    return None if dims[0] is not None and dims[0] == dims[1] else dims


def _joined(a: Dims, b: Dims) -> Dims | None:
    rank = max(len(a), len(b))
    left, right = (None,) * (rank - len(a)) + a, (None,) * (rank - len(b)) + b
    out: list[Axis | None] = []
    for x, y in zip(left, right, strict=True):
        if x is not None and y is not None and x != y:
            return None
        out.append(y if x is None else x)
    named = [x for x in out if x is not None]
    return tuple(out) if len(named) == len(set(named)) else None


def _widened(data: Array, rank: int) -> Array:
    """(iterations, tile...) with ones in front of the tile up to a rank."""
    own = data.ndim - 1
    return data.reshape(data.shape[0], *(1,) * (rank - own), *data.shape[1:])
