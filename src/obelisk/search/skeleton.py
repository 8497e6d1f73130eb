"""Skeletons: a kernel (or a kernel and its combining kernel) with its structure fixed and its sizes
open.

A skeleton is a straight-line list of steps over axes. `instantiate` gives it sizes (blocks per grid
axis, loop count, parts of a split axis) and builds the block graphs; one skeleton serves every
size, batch and machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from obelisk.base.errors import InternalError
from obelisk.ir import BlockBuilder, Node, Op
from obelisk.ir import build as b
from obelisk.ir.op import SizeScope
from obelisk.search.axes import Axis, Dims, Segment
from obelisk.search.synth import Synthesis
from obelisk.search.value import Schedule, Stage, Value

THREADS = 128  # of a block, where the machine has no use for them (a CPU)


@dataclass(frozen=True, slots=True)
class Step:
    """One value: its operator and operands (indices of earlier steps; a leaf's number for a
    load).
    """

    op: tuple[Any, ...]
    dims: Dims
    stage: Stage


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A kernel's structure.

    Attributes:
        steps: operands before users.
        targets: index of the step that computes each target.
        schedule: the loop's axis and the split axis.
        cost: weight of the derivation, for ordering skeletons before sizes are known.
        safe: True if every exponential is of a shifted argument.
    """

    steps: tuple[Step, ...]
    targets: tuple[int, ...]
    schedule: Schedule
    cost: float
    safe: bool

    @property
    def key(self) -> str:
        """A stable text of the structure."""
        return repr((self.steps, self.targets, self.schedule))

    def grid_axes(self) -> tuple[Axis, ...]:
        """Axes that the grid may cut: those of everything the first kernel stores, then those that
        only some of it has.
        """
        return _shared(self.steps, self._stored() or self.targets) + self.copied_axes()

    def copied_axes(self) -> tuple[Axis, ...]:
        """Axes of some results of the first kernel for which the others have a dim of extent 1:
        each block stores its own copy there, which only the block of the combining kernel at the
        same place reads.
        """
        stored = self._stored()
        shared = _shared(self.steps, stored) if stored else ()
        return tuple(
            a
            for a in self.combine_axes()
            if a not in shared and all(self.copy_dim(i, a) is not None for i in stored)
        )

    def copy_dim(self, stored: int, axis: Axis) -> int | None:
        """Where a result has an axis, or else its copies along it: the dim of extent 1 at the place
        where another result has the axis.
        """
        dims = self.steps[stored].dims
        if axis in dims:
            return dims.index(axis)
        for i in self._stored():
            other = self.steps[i].dims
            if axis in other and len(other) == len(dims) and dims[other.index(axis)] is None:
                return other.index(axis)
        return None

    def _stored(self) -> list[int]:
        return [s.op[1] for s in self.steps if s.op[0] == "cross"]

    def batch_axes(self) -> frozenset[Axis]:
        """Axes that occur in products, and there only as batches."""
        products = [s.op[1:] for s in self.steps if s.op[0] in (Op.MATMUL, "joined")]
        operands = [self.steps[i].dims for p in products for i in p]
        inner = {a for dims in operands for a in dims[-2:]}
        return frozenset(a for d in operands for a in d[:-2] if a is not None and a not in inner)

    def combine_axes(self) -> tuple[Axis, ...]:
        """Axes that the second kernel's grid may cut; none if there is no second kernel."""
        if self.schedule.split is None:
            return ()
        return _shared(self.steps, self.targets)


def _shared(steps: Sequence[Step], stored: Sequence[int]) -> tuple[Axis, ...]:
    # An axis that is summed somewhere must lie whole in a block, or in the loop.
    summed = {steps[s.op[1]].dims[s.op[2]] for s in steps if s.op[0] in (Op.SUM, Op.REDUCE_MAX)}
    summed |= {steps[s.op[1]].dims[-1] for s in steps if s.op[0] in (Op.MATMUL, "joined")}
    summed |= {steps[s.op[2]].dims[-1] for s in steps if s.op[0] == "joined"}
    first = [a for a in steps[stored[0]].dims if a is not None and a not in summed]
    return tuple(a for a in first if all(a in steps[i].dims for i in stored))


def extract(synthesis: Synthesis) -> Skeleton | None:
    """The cheapest derivation of all targets in a closed bank, or None."""
    found: list[Value] = []
    for target in synthesis.segment.targets:
        value = synthesis.find(target)
        if value is None:
            return None
        found.append(value)
    if len({v.phase is Stage.COMBINE for v in found}) != 1:
        return None
    if synthesis.schedule.split is not None and found[0].phase is not Stage.COMBINE:
        return None
    order: list[int] = []
    index: dict[int, int] = {}

    def visit(root: int) -> None:
        stack = [(root, False)]
        while stack:
            ident, ready = stack.pop()
            if ident in index:
                continue
            if ready:
                index[ident] = len(order)
                order.append(ident)
                continue
            stack.append((ident, True))
            stack.extend((i, False) for i in reversed(_operands(synthesis.values[ident].step)))

    for v in found:
        visit(v.id)
    steps = []
    for ident in order:
        v = synthesis.values[ident]
        steps.append(Step(_renumber(v.step, index), v.dims, v.phase))
    safe = all(steps[s.op[1]].op[0] == "shift" for s in steps if s.op[0] is Op.EXP)
    cost = sum(v.cost for v in found)
    return Skeleton(tuple(steps), tuple(index[v.id] for v in found), synthesis.schedule, cost, safe)


_ONE_OPERAND = (Op.SUM, Op.REDUCE_MAX, Op.TRANSPOSE)  # what follows the operand are dims


def _operands(step: tuple[Any, ...]) -> list[int]:
    """Operand value ids of a bank step."""
    if step[0] in ("load", "const", "size"):
        return []
    if step[0] in _ONE_OPERAND:
        return [step[1]]
    return list(step[1:])


def _renumber(step: tuple[Any, ...], index: Mapping[int, int]) -> tuple[Any, ...]:
    if step[0] in ("load", "const", "size"):
        return step
    if step[0] in _ONE_OPERAND:
        return (step[0], index[step[1]], *step[2:])
    return (step[0], *(index[i] for i in step[1:]))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks per grid axis of the first and of the combining kernel, loop iterations, parts of the
    split axis, threads of a block of either kernel.
    """

    parts: tuple[tuple[Axis, int], ...] = ()
    loop: int = 1
    split: int = 1
    combine: tuple[tuple[Axis, int], ...] = ()
    threads: int = THREADS
    combine_threads: int = THREADS


def instantiate(skeleton: Skeleton, segment: Segment, sizes: Sizes) -> list[Node]:
    """The targets as results of block-graph launches on the segment's leaves.

    Raises `MalformedGraph` or `ShapeError` when the sizes do not suit (short tiles that would meet
    differently).
    """
    return _Builder(skeleton, segment, sizes).build()


class _Builder:
    def __init__(self, skeleton: Skeleton, segment: Segment, sizes: Sizes) -> None:
        self.skeleton, self.segment, self.sizes = skeleton, segment, sizes
        self.loop_axis, self.split_axis = skeleton.schedule.loop, skeleton.schedule.split
        self.nodes: dict[int, Node] = {}
        self.grid = [(a, n) for a, n in sizes.parts if n > 1]
        if self.split_axis is not None:
            self.grid.append((self.split_axis, sizes.split))
        self.block = BlockBuilder([n for _, n in self.grid] or [1], sizes.loop, sizes.threads)

    def build(self) -> list[Node]:
        steps = self.skeleton.steps
        crossed: list[int] = []
        for i, step in enumerate(steps):
            if step.stage is Stage.COMBINE:
                if step.op[0] == "cross":
                    crossed.append(i)
            else:
                self.nodes[i] = self._node(step)
        if not crossed:
            return self._store_targets(self.block, self.grid, leading=False)
        for i in crossed:
            value = self.nodes[steps[i].op[1]]
            tile = b.reshape(value, (1, *value.shape))
            omap = [0 if a == self.split_axis else 1 + self._place(i, a) for a, _ in self.grid]
            self.block.store(
                tile, omap, dtype=value.dtype.accumulator if value.dtype.is_float else None
            )
        parts = dict(zip(crossed, self.block.launch(), strict=True))
        return self._combine(parts)

    def _place(self, crossed: int, axis: Axis) -> int:
        """The dim of a stored value that a grid axis cuts."""
        place = self.skeleton.copy_dim(self.skeleton.steps[crossed].op[1], axis)
        assert place is not None
        return place

    def _combine(self, parts: Mapping[int, Node]) -> list[Node]:
        """The second kernel: blocks of the first are a leading dim here."""
        copied = self.skeleton.copied_axes()
        first = dict(self.sizes.parts)
        wanted = [(a, first[a] if a in copied else n) for a, n in self.sizes.combine]
        grid = [(a, n) for a, n in wanted if n > 1]
        second = BlockBuilder([n for _, n in grid] or [1], 1, self.sizes.combine_threads)
        self.nodes = {
            i: n for i, n in self.nodes.items() if self.skeleton.steps[i].op[0] == "const"
        }
        for i, step in enumerate(self.skeleton.steps):
            if step.stage is not Stage.COMBINE:
                continue
            if step.op[0] == "cross":
                imap = [self._imap(i, a, copied) for a, _ in grid] or [None]
                self.nodes[i] = second.load(parts[i], imap)
            else:
                self._recall(step)
                self.nodes[i] = self._node(step)
        return self._store_targets(second, grid, leading=True)

    def _imap(self, crossed: int, axis: Axis, copied: Sequence[Axis]) -> int | None:
        dims = self.skeleton.steps[crossed].dims
        if axis in copied:
            return 1 + self._place(crossed, axis)
        return dims.index(axis) if axis in dims else None

    def _recall(self, step: Step) -> None:
        """Sizes are rebuilt in the second kernel as constants: their tensors are not read there."""
        for i in step.op[1:]:
            if (
                isinstance(i, int)
                and i not in self.nodes
                and self.skeleton.steps[i].op[0] == "size"
            ):
                axis = self.skeleton.steps[i].op[1]
                self.nodes[i] = b.const(float(self.segment.extents[axis]))

    def _store_targets(
        self, block: BlockBuilder, grid: Sequence[tuple[Axis, int]], *, leading: bool
    ) -> list[Node]:
        for target, i in zip(self.segment.targets, self.skeleton.targets, strict=True):
            value = self.nodes[i]
            dims = self.segment.dims[target]
            if leading:
                value = b.reshape(value, value.shape[1:])
            omap: list[int | None] = [dims.index(a) for a, _ in grid]
            omap = omap or [None]
            fmap = None
            if self.skeleton.steps[i].stage is Stage.LOOP and self.loop_axis in dims:
                fmap = dims.index(self.loop_axis)
            block.store(value, omap, fmap=fmap, dtype=target.dtype)
        return block.launch()

    def _node(self, step: Step) -> Node:
        name, *rest = step.op
        match name:
            case "load":
                return self._load(rest[0])
            case "const":
                return b.const(rest[0])
            case "size":
                return self._size(rest[0])
        if name in (Op.SUM, Op.REDUCE_MAX):
            fold = b.sum if name is Op.SUM else b.reduce_max
            return fold(self.nodes[rest[0]], rest[1])
        if name is Op.TRANSPOSE:
            return b.transpose(self.nodes[rest[0]], rest[1:])
        args = [self.nodes[i] for i in rest]
        return _apply(name, args)

    def _load(self, leaf: int) -> Node:
        tensor = self.segment.leaves[leaf]
        dims = self.segment.dims[tensor]
        imap: list[int | None] = [dims.index(a) if a in dims else None for a, _ in self.grid]
        imap = imap or [None]
        fmap = (
            dims.index(self.loop_axis) if self.loop_axis in dims and self.sizes.loop > 1 else None
        )
        return self.block.load(tensor, imap, fmap)

    def _size(self, axis: Axis) -> Node:
        """The extent of an axis, named through a tensor that has it, so that it follows when sizes
        change.
        """
        for step in self.skeleton.steps:
            if step.op[0] == "load" and axis in step.dims:
                load = self._load(step.op[1])
                return b.size(load, step.dims.index(axis), SizeScope.FULL)
        return b.const(float(self.segment.extents[axis]))


_UNARY: dict[object, Callable[[Node], Node]] = {
    Op.EXP: b.exp, Op.LOG: b.log, Op.SQRT: b.sqrt, Op.RSQRT: b.rsqrt, Op.SQUARE: b.square,
    Op.TANH: b.tanh, Op.SIGMOID: b.sigmoid, Op.ERF: b.erf, Op.NEG: b.neg,
    "accum_sum": b.accum_sum, "accum_max": b.accum_max, "running_max": b.running_max,
}  # fmt: skip
_BINARY: dict[object, Callable[[Node, Node], Node]] = {
    Op.ADD: b.add, Op.SUB: b.sub, Op.MUL: b.mul, Op.DIV: b.div, Op.MAX: b.maximum,
    Op.MIN: b.minimum, Op.LESS: b.less, Op.MATMUL: b.matmul, "shift": b.sub,
    "accum_rescale": b.accum_rescale,
}  # fmt: skip


def _apply(name: object, args: list[Node]) -> Node:
    if name in _UNARY:
        return _UNARY[name](args[0])
    if name in _BINARY:
        return _BINARY[name](args[0], args[1])
    if name is Op.WHERE:
        return b.where(args[0], args[1], args[2])
    if name == "joined":
        x, y, w, v = args
        return b.matmul(b.concat([x, y], -1), b.concat([w, v], -2))
    if name == "weigh":
        value, peak = args
        return b.mul(value, b.exp(b.sub(peak, b.reduce_max(peak, 0))))
    raise InternalError(f"skeleton step {name!r}")
