"""Choosing sizes for a skeleton by the cost model: coordinate descent over blocks, loop counts,
splits and threads.

Choices come from the program's extents and the machine (cores, vector width, warp), never from a
list of shapes: tile extents that are powers of two or the whole axis, block counts that fill the
cores once or a few times, threads by doublings of a warp up to what a block may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from obelisk.base.errors import UserError
from obelisk.ir import BlockGraph, Graph, Node, Op
from obelisk.ir.block import ceil_div
from obelisk.ir.build import const, input_node
from obelisk.ir.node import make
from obelisk.ir.table import size_value
from obelisk.machine import Cost, Machine, MachineKind, capacity, estimate
from obelisk.machine.traffic import strides_of
from obelisk.search.axes import Axis, Segment
from obelisk.search.skeleton import THREADS, Sizes, Skeleton, instantiate

GRID_AXES = 3
COPIED_TILE = 64  # least extent at first along an axis whose cutting repeats work
LEAST_GAIN = 0.002  # a smaller predicted gain is noise of the model


@dataclass(frozen=True, slots=True)
class Instance:
    """A skeleton with sizes, what it computes, and what the cost model says of it alone."""

    skeleton: Skeleton
    sizes: Sizes
    results: tuple[Node, ...]
    cost: Cost


@dataclass(slots=True)
class SizeCounts:
    """How many size assignments were tried, why some were dropped, and how many had which number
    of threads (where the machine has use for them).
    """

    tried: int = 0
    malformed: int = 0
    too_big: int = 0
    threads: dict[int, int] = field(default_factory=dict)


def part_choices(extent: int, machine: Machine) -> list[int]:
    """Numbers of parts worth trying for an axis: tiles of a power of two, powers of two of parts
    that divide the axis, and multiples of the core count.
    """
    powers = [1 << i for i in range(extent.bit_length())]
    tiles = {*powers, extent, *(extent // n for n in powers if extent % n == 0)}
    for waves in (1, 2, 4):
        if machine.cores * waves <= extent:
            tile = ceil_div(extent, machine.cores * waves)
            # A GPU's copies and products want whole vectors of 16-bit elements.
            grain = machine.vector_bytes // 2 if machine.kind is MachineKind.CUDA else 1
            tiles.add(ceil_div(tile, grain) * grain if tile > grain else tile)
    parts = {ceil_div(extent, t) for t in tiles}
    # Where the tile decides the number of parts, fewer parts give the same tile: keep the smallest.
    return sorted({ceil_div(extent, ceil_div(extent, p)) for p in parts})


def thread_choices(machine: Machine) -> list[int]:
    """Threads of a block worth trying: whole warps by doublings, as many as a block may have.

    On a CPU a block is the work of one core and its threads are no choice.
    """
    if machine.kind is MachineKind.CPU:
        return [THREADS]
    counts = range((machine.threads_per_block // machine.warp).bit_length())
    return [machine.warp << i for i in counts]


def standalone(leaves: Sequence[Node], results: Sequence[Node]) -> Graph:
    """Kernels or operators on these leaves as a graph for the cost model: the leaves become inputs
    that lie as they do, so that nothing that made them is counted.
    """
    new: dict[Node, Node] = {}
    for i, leaf in enumerate(leaves):
        if leaf.op in (Op.IOTA, Op.CONST):
            new[leaf] = leaf
        elif leaf.op is Op.SIZE:
            new[leaf] = const(float(size_value(leaf)))
        else:
            new[leaf] = input_node(i, leaf.shape, leaf.dtype, strides_of(leaf))
    for root in results:
        stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if node in new:
                continue
            if ready or not node.inputs:
                inputs = tuple(new[i] for i in node.inputs)
                new[node] = make(node.op, inputs, node.attrs) if inputs else node
            else:
                stack += [(node, True), *((i, False) for i in node.inputs)]
    made = tuple(new[i] for i in leaves)
    outputs = tuple(new[r] for r in results)
    return Graph(made, outputs, ("",) * len(made), ("",) * len(outputs))


class Sizer:
    """Finds good sizes for one skeleton on one machine."""

    def __init__(
        self, skeleton: Skeleton, segment: Segment, machine: Machine, stop: Callable[[], bool]
    ) -> None:
        self.skeleton, self.segment, self.machine, self.stop = skeleton, segment, machine, stop
        self.counts = SizeCounts()
        self.threads = thread_choices(machine)
        self.known: dict[Sizes, Instance | None] = {}

    def evaluate(self, sizes: Sizes) -> Instance | None:
        """Build and cost one assignment; None where it is malformed or does not fit the machine."""
        if sizes in self.known:
            return self.known[sizes]
        self.counts.tried += 1
        if len(self.threads) > 1:
            self.counts.threads[sizes.threads] = self.counts.threads.get(sizes.threads, 0) + 1
        self.known[sizes] = None
        try:
            results = instantiate(self.skeleton, self.segment, sizes)
        except UserError:
            self.counts.malformed += 1
            return None
        for node in results:
            for block in _blocks(node):
                if capacity(block, self.machine) is not None:
                    self.counts.too_big += 1
                    return None
        cost = estimate(standalone(self.segment.leaves, results), self.machine)
        found = Instance(self.skeleton, sizes, tuple(results), cost)
        self.known[sizes] = found
        return found

    def starts(self) -> Iterator[Sizes]:
        """Starting points: every axis whole, coarse tiles, fine tiles; as many parts of a split as
        fill the cores then, and iterations of 64 elements. Batches of products are cut to single
        ones on a GPU, where a block with several keeps nothing in registers.
        """
        extents = self.segment.extents
        loop, split = self.skeleton.schedule.loop, self.skeleton.schedule.split
        axes, copied = self.skeleton.grid_axes(), self.skeleton.copied_axes()
        batches = self.skeleton.batch_axes() if self.machine.kind is MachineKind.CUDA else ()
        for tile in (32, 8, 128, 1):
            wide = {a: 1 if a in batches else min(tile, extents[a]) for a in axes}
            wide |= {a: min(max(tile, COPIED_TILE), extents[a]) for a in copied}
            parts = self._limit([(a, ceil_div(extents[a], wide[a])) for a in axes])
            combine = self._combine_start(parts, tile)
            splits = 1
            if split is not None:
                fill = self.machine.cores // prod(n for _, n in parts)
                splits = min(extents[split], max(2, fill))
            loops = 1
            if loop is not None:
                cut = dict(parts).get(loop, 1) * (splits if loop == split else 1)
                loops = min(extents[loop], max(2, ceil_div(extents[loop], 64 * cut)))
            yield Sizes(parts, loops, splits, combine)

    def _combine_start(
        self, parts: Sequence[tuple[Axis, int]], tile: int
    ) -> tuple[tuple[Axis, int], ...]:
        """Blocks of the combining kernel: wide tiles on a CPU, on a GPU those of the first kernel,
        whose last block can then do it.
        """
        extents, axes = self.segment.extents, self.skeleton.combine_axes()
        if self.machine.kind is MachineKind.CUDA:
            first = dict(parts)
            return tuple((a, first.get(a, 1)) for a in axes)
        wide = [(a, ceil_div(extents[a], min(8 * tile, extents[a]))) for a in axes]
        return tuple(self._limit(wide))

    def _limit(self, parts: list[tuple[Axis, int]]) -> tuple[tuple[Axis, int], ...]:
        """At most three cut axes (two beside a split): the ones with most parts stay."""
        room = GRID_AXES - (self.skeleton.schedule.split is not None)
        keep = {a for a, _ in sorted(parts, key=lambda p: -p[1])[:room]}
        return tuple((a, n if a in keep else 1) for a, n in parts)

    def moves(self, sizes: Sizes) -> Iterator[Sizes]:
        """Assignments that differ in one coordinate."""
        extents, machine = self.segment.extents, self.machine
        loop, split = self.skeleton.schedule.loop, self.skeleton.schedule.split
        room = GRID_AXES - (split is not None)
        parts = dict(sizes.parts)
        for axis in parts:
            for n in part_choices(extents[axis], machine):
                changed = {**parts, axis: n}
                if sum(v > 1 for v in changed.values()) <= room:
                    yield replace(sizes, parts=tuple(changed.items()))
        if loop is not None:
            cut = parts.get(loop, 1) * (sizes.split if loop == split else 1)
            for n in part_choices(max(2, ceil_div(extents[loop], cut)), machine):
                if n > 1:
                    yield replace(sizes, loop=n)
        if split is not None:
            for n in part_choices(extents[split], machine):
                if 1 < n <= 4 * machine.cores:
                    yield replace(sizes, split=n)
        if machine.kind is MachineKind.CUDA:
            yield from self._trades(sizes)
        for n in self.threads:
            if n != sizes.threads:
                yield replace(sizes, threads=n)
        combine, copied = dict(sizes.combine), self.skeleton.copied_axes()
        for axis in (a for a in combine if a not in copied):
            for n in part_choices(extents[axis], machine):
                changed = {**combine, axis: n}
                if sum(v > 1 for v in changed.values()) <= GRID_AXES:
                    yield replace(sizes, combine=tuple(changed.items()))
        for n in self.threads if split is not None else ():
            if n != sizes.combine_threads:
                yield replace(sizes, combine_threads=n)

    def _trades(self, sizes: Sizes) -> Iterator[Sizes]:
        """As many blocks, dealt differently: twice the parts along one axis (or of the split), half
        along another.
        """
        split = self.skeleton.schedule.split
        coordinates = [*sizes.parts, *([(None, sizes.split)] if split is not None else [])]
        for more, n in coordinates:
            axis = split if more is None else more
            assert axis is not None
            extent = self.segment.extents[axis]
            for less, m in coordinates:
                if more == less or m % 2 or 2 * n > extent or (less is None and m == 2):
                    continue
                changed = dict(coordinates) | {more: 2 * n, less: m // 2}
                parts = tuple((a, changed[a]) for a, _ in sizes.parts)
                if sum(k > 1 for _, k in parts) <= GRID_AXES - (split is not None):
                    yield replace(sizes, parts=parts, split=changed.get(None, sizes.split))

    def sketch(self) -> Instance | None:
        """The best starting point: a first opinion of the skeleton, at a handful of evaluations."""
        found = [i for start in self.starts() if (i := self._fitting(start)) is not None]
        return min(found, key=_rank, default=None)

    def _fitting(self, start: Sizes) -> Instance | None:
        """A start with the fewest threads that hold its accumulators."""
        for n in [t for t in self.threads if t >= THREADS] or self.threads[-1:]:
            before = self.counts.too_big
            found = self.evaluate(replace(start, threads=n))
            if found is not None or self.counts.too_big == before:
                return found
        return None

    def best(self, keep: int) -> list[Instance]:
        """The cheapest assignments found by descent from the best start, cheapest first."""
        here = self.sketch()
        improved = here is not None
        while improved and not self.stop():
            improved = False
            assert here is not None
            for move in self.moves(here.sizes):
                there = self.evaluate(move)
                if there and there.cost.seconds < here.cost.seconds * (1 - LEAST_GAIN):
                    here, improved = there, True
        ranked = sorted((i for i in self.known.values() if i is not None), key=_rank)
        on_gpu = self.machine.kind is MachineKind.CUDA
        distinct: dict[object, Instance] = {}
        for i in ranked:  # sizes of the combining kernel alone make no other candidate, nor do
            loop = 0 if on_gpu else i.sizes.loop  # iterations where generated code cuts them anew
            distinct.setdefault((i.sizes.parts, loop, i.sizes.split), i)
        return list(distinct.values())[:keep]


def _rank(instance: Instance) -> tuple[float, str]:
    return instance.cost.seconds, repr(instance.sizes)


def _blocks(node: Node) -> list[BlockGraph]:
    out: list[BlockGraph] = []
    stack = [node]
    while stack:
        n = stack.pop()
        if n.op is Op.BLOCK:
            out.append(n.attrs.block)
            stack.extend(i for i in n.inputs if i.op is Op.BLOCK)
    return out
