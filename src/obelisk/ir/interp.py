"""The interpreter: evaluates kernel, block and thread graphs over any algebra.

The same walk serves numpy in float64 (the meaning of a graph), numpy in the graph's own dtypes
(what a machine would round and overflow), and the finite fields of `verify`. An `Algebra` supplies
values and operators; the walk supplies the order, the tiles, the loop and its accumulators. Where
every tile is full all blocks are evaluated at once along leading batch axes; otherwise block by
block, with short last tiles cut to size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from obelisk.base.errors import ShapeError
from obelisk.ir.block import BlockGraph, Phase, Reduce, Store, ceil_div
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node, Shape, topological
from obelisk.ir.op import LoadAttrs, Op
from obelisk.ir.table import TABLE, size_value

V = TypeVar("V")


class Algebra(Protocol[V]):
    """What the walk needs of a kind of value. It may consist of several arrays of one shape."""

    def const(self, value: float) -> V:
        """A scalar constant."""

    def integer(self, value: int) -> V:
        """A scalar integer (an extent)."""

    def iota(self, shape: Shape, axis: int) -> V:
        """Counts along an axis, i32."""

    def apply(self, node: Node, args: Sequence[V], lead: int) -> V:
        """The meaning of an elementwise operator, reduction or product; args carry `lead` batch
        axes.
        """

    def structural(self, fn: Callable[..., Any], *values: V) -> V:
        """Apply a numpy function that only moves elements to each component array of the values."""

    def add(self, a: V, b: V) -> V:
        """Elementwise sum (accumulators)."""

    def maximum(self, a: V, b: V) -> V:
        """Elementwise maximum (accumulators)."""

    def fold(self, value: V, axis: int, reduce: Reduce) -> V:
        """Sum or maximum along an axis, which disappears (stores that reduce across blocks)."""

    def rescale(self, acc: V, old: V, new: V) -> V:
        """acc * exp(old - new) (online softmax)."""

    def settle(self, value: V, dtype: DType, block: bool) -> V:
        """Round a value to `dtype` as memory would: after a kernel (block False) or a step inside a
        block.
        """

    def shape(self, value: V) -> Shape:
        """Shape of a value, batch axes included."""


def evaluate(outputs: Sequence[Node], bindings: Mapping[Node, V], algebra: Algebra[V]) -> list[V]:
    """Values of `outputs`, given the value of each input node.

    Raises `ShapeError` for a missing binding. Cost: one numpy call per node and loop iteration
    where tiles are full.
    """
    return list(evaluate_all(outputs, bindings, algebra, outputs))


def evaluate_all(
    outputs: Sequence[Node], bindings: Mapping[Node, V], algebra: Algebra[V], wanted: Sequence[Node]
) -> list[V]:
    """Like `evaluate`, but gives the values of `wanted`, any kernel-level nodes below `outputs`."""
    values: dict[Node, V] = {}
    launches: dict[tuple[BlockGraph, tuple[Node, ...]], list[V]] = {}
    for node in topological([*outputs, *wanted]):
        args = [values[i] for i in node.inputs]
        match node.op:
            case Op.INPUT:
                if node not in bindings:
                    raise ShapeError(f"input {node.attrs.index} has no value")
                values[node] = bindings[node]
            case Op.BLOCK:
                key = (node.attrs.block, node.inputs)
                if key not in launches:
                    launches[key] = run_block(node.attrs.block, args, algebra)
                values[node] = launches[key][node.attrs.result]
            case _:
                values[node] = algebra.settle(_step(node, args, algebra, 0), node.dtype, False)
    return [values[n] for n in wanted]


def _step(node: Node, args: Sequence[V], algebra: Algebra[V], lead: int) -> V:
    """One operator that needs no state, at any level."""
    match node.op:
        case Op.CONST:
            return algebra.const(node.attrs.value)
        case Op.SIZE:
            return algebra.integer(size_value(node))
        case Op.IOTA:
            value = algebra.iota(node.attrs.shape, node.attrs.axis)
            return (
                algebra.structural(lambda x: x.reshape((1,) * lead + x.shape), value)
                if lead
                else value
            )
        case Op.THREAD:
            inner: dict[Node, V] = {}
            for n in node.attrs.thread.body:
                inner[n] = (
                    args[n.attrs.index]
                    if n.op is Op.ELEM
                    else algebra.settle(
                        _step(n, [inner[i] for i in n.inputs], algebra, lead), n.dtype, True
                    )
                )
            return inner[node.attrs.thread.results[node.attrs.result]]
    if TABLE[node.op].field == "structural":
        meaning = TABLE[node.op].numpy
        assert meaning is not None
        return algebra.structural(lambda *xs: meaning(node, xs, lead), *args)
    return algebra.apply(node, args, lead)


def run_block(block: BlockGraph, args: Sequence[V], algebra: Algebra[V]) -> list[V]:
    """Results of one kernel that runs `block` over its grid."""
    if not block.info.ragged:
        return _Batched(block, args, algebra).run()
    return _run_ragged(block, args, algebra)


class _Loop(Generic[V]):
    """The loop of a block: what is known before it, its accumulators, and one iteration."""

    def __init__(
        self, block: BlockGraph, algebra: Algebra[V], lead: int, load: Callable[[Node, int], V]
    ) -> None:
        self.block, self.algebra, self.lead, self.load = block, algebra, lead, load
        self.values: dict[Node, V] = {}
        self.state: dict[Node, V] = {}
        phase = block.info.phase
        self.before = [n for n in block.body if phase[n] is Phase.INVARIANT]
        self.closing = [
            n for n in block.body if n.op in (Op.ACCUM_SUM, Op.ACCUM_MAX, Op.ACCUM_RESCALE)
        ]
        self.inside = [n for n in block.body if phase[n] is Phase.LOOP]
        self.after = [n for n in block.body if phase[n] is Phase.POST]

    def compute(self, node: Node, iteration: int) -> None:
        if node.op is Op.LOAD:
            self.values[node] = self.load(node, iteration)
            return
        # An extent is known before the loop, though the value it names may exist only inside it.
        args = [] if node.op is Op.SIZE else [self.values[i] for i in node.inputs]
        if node.op is Op.RUNNING_MAX:
            old = self.state.get(node)
            self.values[node] = args[0] if old is None else self.algebra.maximum(old, args[0])
            return
        self.values[node] = self.algebra.settle(
            _step(node, args, self.algebra, self.lead), node.dtype, True
        )

    def accumulate(self, node: Node) -> None:
        args = [self.values[i] for i in node.inputs]
        old = self.state.get(node)
        if old is None:
            self.state[node] = args[0]
        elif node.op is Op.ACCUM_SUM:
            self.state[node] = self.algebra.add(old, args[0])
        elif node.op is Op.ACCUM_MAX:
            self.state[node] = self.algebra.maximum(old, args[0])
        else:
            peak = node.inputs[1]
            self.state[node] = self.algebra.add(
                self.algebra.rescale(old, self.state[peak], self.values[peak]), args[0]
            )

    def run(self, on_iteration: Callable[[int], None]) -> None:
        for node in self.before:
            self.compute(node, 0)
        for i in range(self.block.loop):
            for node in self.inside:
                self.compute(node, i)
            for node in self.closing:
                self.accumulate(node)
            for node in self.inside:
                if node.op is Op.RUNNING_MAX:
                    self.state[node] = self.values[node]
            on_iteration(i)
        for node in self.after:
            if node in self.state:
                self.values[node] = self.algebra.settle(self.state[node], node.dtype, True)
            else:
                self.compute(node, 0)


class _Batched(Generic[V]):
    """All blocks at once: every value carries one leading axis per grid axis (extent 1 where blocks
    agree).
    """

    def __init__(self, block: BlockGraph, args: Sequence[V], algebra: Algebra[V]) -> None:
        self.block, self.algebra = block, algebra
        self.lead = len(block.grid)
        self.views = {n: self._view(n.attrs, args[n.attrs.index]) for n in block.loads}

    def _view(self, at: LoadAttrs, value: V) -> V:
        """Split mapped dims and bring grid axes to the front, then the loop's axis (extent 1 if
        unmapped).
        """

        def cut(x: Any) -> Any:
            shape: list[int] = []
            front: dict[int, int] = {}
            loop_at, own = -1, []
            for d, n in enumerate(at.full):
                axis = next((a for a, m in enumerate(at.imap) if m == d), None)
                if axis is not None:
                    front[axis] = len(shape)
                    shape.append(at.grid[axis])
                    n //= at.grid[axis]
                if at.fmap == d:
                    loop_at = len(shape)
                    shape.append(at.loop)
                    n //= at.loop
                own.append(len(shape))
                shape.append(n)
            extra = 0
            for a in range(len(at.grid)):
                if a not in front:
                    front[a] = len(shape) + extra
                    extra += 1
            if loop_at < 0:
                loop_at = len(shape) + extra
                extra += 1
            x = x.reshape(tuple(shape) + (1,) * extra)
            return x.transpose([*(front[a] for a in range(len(at.grid))), loop_at, *own])

        return self.algebra.structural(cut, value)

    def load(self, node: Node, iteration: int) -> V:
        index = (slice(None),) * self.lead + (iteration if node.attrs.fmap is not None else 0,)
        return self.algebra.structural(lambda x: x[index], self.views[node])

    def run(self) -> list[V]:
        loop = _Loop(self.block, self.algebra, self.lead, self.load)
        pieces: dict[int, list[V]] = {
            j: [] for j, s in enumerate(self.block.stores) if s.fmap is not None
        }

        def keep(_: int) -> None:
            for j in pieces:
                pieces[j].append(loop.values[self.block.stores[j].value])

        loop.run(keep)
        out = []
        for j, store in enumerate(self.block.stores):
            value = loop.values[store.value]
            if j in pieces:
                axis = self.lead + (store.fmap or 0)
                value = self.algebra.structural(
                    lambda *xs, axis=axis: np.concatenate(xs, axis=axis), *pieces[j]
                )
            out.append(self.algebra.settle(self._gather(store, value), store.dtype, False))
        return out

    def _gather(self, store: Store, value: V) -> V:
        """Lay the blocks' parts side by side, or fold them."""
        grid, lead, algebra = self.block.grid, self.lead, self.algebra
        rank = store.value.rank

        def spread(x: Any) -> Any:
            if x.ndim == 0:
                x = x.reshape((1,) * lead)
            return np.broadcast_to(x, tuple(grid) + x.shape[lead:])

        value = algebra.structural(spread, value)
        kept = list(range(lead))
        for a in reversed(range(lead)):
            if store.omap[a] is None:
                reduce = store.reduce
                if reduce is Reduce.NONE:
                    value = algebra.structural(lambda x, a=a: np.take(x, 0, axis=a), value)
                else:
                    value = algebra.fold(value, a, reduce)
                kept.remove(a)

        def lay(x: Any) -> Any:
            n = len(kept)
            order: list[int] = []
            shape: list[int] = []
            for d in range(rank):
                axis = next((i for i, a in enumerate(kept) if store.omap[a] == d), None)
                extent = x.shape[n + d]
                if axis is not None:
                    order.append(axis)
                    extent *= x.shape[axis]
                order.append(n + d)
                shape.append(extent)
            return x.transpose(order).reshape(shape)

        return algebra.structural(lay, value)


def _bounds(full: int, parts: int, part: int, loop: int, i: int) -> slice:
    """Elements of a dim that block `part` of `parts` reads in iteration `i` of `loop`."""
    chunk = ceil_div(full, parts)
    tile = ceil_div(chunk, loop)
    start = min(part * chunk + i * tile, full)
    stop = min(part * chunk + min((i + 1) * tile, chunk), full)
    return slice(start, max(start, stop))


def _run_ragged(block: BlockGraph, args: Sequence[V], algebra: Algebra[V]) -> list[V]:
    """Block by block, with short tiles."""
    parts: list[dict[tuple[int, ...], V]] = [{} for _ in block.stores]
    for coords in itertools.product(*(range(g) for g in block.grid)):

        def load(node: Node, i: int, coords: tuple[int, ...] = coords) -> V:
            at: LoadAttrs = node.attrs
            index = []
            for d, full in enumerate(at.full):
                axis = next((a for a, m in enumerate(at.imap) if m == d), None)
                index.append(
                    _bounds(
                        full,
                        at.grid[axis] if axis is not None else 1,
                        coords[axis] if axis is not None else 0,
                        at.loop if at.fmap == d else 1,
                        i if at.fmap == d else 0,
                    )
                )
            return algebra.structural(lambda x: x[tuple(index)], args[at.index])

        loop = _Loop(block, algebra, 0, load)
        looped: dict[int, list[V]] = {
            j: [] for j, s in enumerate(block.stores) if s.fmap is not None
        }

        def keep(_: int, loop: _Loop[V] = loop, looped: dict[int, list[V]] = looped) -> None:
            for j in looped:
                looped[j].append(loop.values[block.stores[j].value])

        loop.run(keep)
        for j, store in enumerate(block.stores):
            value = loop.values[store.value]
            if j in looped:
                value = algebra.structural(
                    lambda *xs, axis=store.fmap: np.concatenate(xs, axis=axis), *looped[j]
                )
            parts[j][coords] = value
    return [
        algebra.settle(_assemble(block.grid, s, parts[j], algebra), s.dtype, False)
        for j, s in enumerate(block.stores)
    ]


def _assemble(
    grid: tuple[int, ...], store: Store, parts: dict[tuple[int, ...], V], algebra: Algebra[V]
) -> V:
    """Join the blocks' parts along each grid axis in turn, last axis first."""
    current = parts
    for a in reversed(range(len(grid))):
        joined: dict[tuple[int, ...], V] = {}
        for prefix in {c[:a] for c in current}:
            row = [current[(*prefix, g)] for g in range(grid[a])]
            dim = store.omap[a]
            if dim is not None:
                joined[prefix] = algebra.structural(
                    lambda *xs, dim=dim: np.concatenate(xs, axis=dim), *row
                )
            elif store.reduce is Reduce.NONE:
                joined[prefix] = row[0]
            else:
                total = row[0]
                for other in row[1:]:
                    total = (
                        algebra.add(total, other)
                        if store.reduce is Reduce.SUM
                        else algebra.maximum(total, other)
                    )
                joined[prefix] = total
        current = joined
    return current[()]
