"""Small instances of a program and a candidate: the same structures at 2-3 tiles per dim.

Takes two graphs with one interface; gives pairs of resized graphs that are well formed and agree in
their outputs' shapes. Grids and loops are drawn first (2 or 3 wherever there was more than 1), then
the extents that they divide: distinct odd tiles per class of dims, so that extents are coprime but
for what the cuts ask. One kind of instance leaves tiles short. Sampling is by rejection, seeded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod

from obelisk.base.errors import UserError
from obelisk.ir.block import BlockGraph
from obelisk.ir.dims import DimClass, dim_classes
from obelisk.ir.graph import Graph
from obelisk.ir.node import Node, Shape, topological
from obelisk.ir.op import LoadAttrs, Op
from obelisk.ir.resize import blocks_of, resize

_TILES = (3, 5, 7, 2, 11)
_SMALL = 64  # a program with no dim above this and few elements is small enough as it is
_ELEMENTS = 1 << 14
_LIGHT = 200_000  # work of an instance that is worth looking for


@dataclass(frozen=True, slots=True)
class Instance:
    """A program and a candidate at the same sizes.

    Attributes:
        program, candidate: the graphs.
        ragged: some tile of the candidate is short.
        full: these are the sizes that were asked about, not smaller ones.
    """

    program: Graph
    candidate: Graph
    ragged: bool
    full: bool

    @property
    def sizes(self) -> str:
        """The inputs' shapes as text."""
        return " ".join(
            f"{name}[{','.join(map(str, node.shape))}]"
            for name, node in zip(self.program.input_names, self.program.inputs, strict=True)
        )


def is_ragged(graph: Graph) -> bool:
    """True when some block of the graph has short tiles."""
    return any(block.info.ragged for block in blocks_of(graph))


def full_instance(program: Graph, candidate: Graph) -> Instance:
    """The graphs at their own sizes."""
    return Instance(program, candidate, is_ragged(candidate), True)


def work_of(graph: Graph) -> int:
    """Multiply-adds and elementwise steps of one evaluation, roughly; blocks count per block and
    iteration.
    """
    total = 0
    for node in topological(graph.outputs):
        if node.op is Op.BLOCK:
            if node.attrs.result == 0 or node not in graph.outputs:
                block: BlockGraph = node.attrs.block
                inner = sum(_node_work(n) for n in block.body)
                total += inner * block.blocks * block.loop
        else:
            total += _node_work(node)
    return total


def _node_work(node: Node) -> int:
    if node.op is Op.MATMUL:
        return node.elements * node.inputs[0].shape[-1]
    return node.elements + sum(i.elements for i in node.inputs)


class Sampler:
    """Draws instances of one pair of graphs."""

    def __init__(self, program: Graph, candidate: Graph, seed: int) -> None:
        self.program, self.candidate = program, candidate
        self.rng = random.Random(seed)
        self.seen: set[tuple[Shape, ...]] = set()
        self.classes = dim_classes(program)
        self.blocks = list(dict.fromkeys([*blocks_of(program), *blocks_of(candidate)]))
        own = dim_classes(candidate) if self.blocks else self.classes
        self.tied = {m for c in own if c.frozen for m in c.members}
        bodies = [topological(candidate.outputs), topological(program.outputs)]
        bodies += [list(block.body) for block in self.blocks]
        self.nodes = [n for body in bodies for n in body]
        self.taken = {
            n for x in topological(program.outputs) if x.op is Op.RESHAPE for n in x.shape
        }
        self.keeps = sorted(
            {n.attrs.keep for n in self.nodes if n.op in (Op.SUM, Op.REDUCE_MAX)} - {1}
        )

    def small_already(self) -> bool:
        """True when the graphs' own sizes are small enough to test at."""
        extents = [n for node in self.program.inputs for n in node.shape]
        return (
            max(extents, default=1) <= _SMALL
            and sum(n.elements for n in self.program.inputs) <= _ELEMENTS
            and max(work_of(self.program), work_of(self.candidate)) <= 40 * _ELEMENTS
            and all(block.blocks * block.loop <= 64 for block in self.blocks)
        )

    def draw(self, ragged: bool, attempts: int, first: int = 0) -> Instance | None:
        """One instance, or None when `attempts` tries gave none; `first` picks the mode to begin
        with.
        """
        for attempt in range(first, first + attempts):
            plan = self._plan(attempt, ragged)
            try:
                small = resize(self.program, *plan)
                other = resize(self.candidate, *plan)
            except UserError:
                continue
            if [o.shape for o in small.outputs] != [o.shape for o in other.outputs]:
                continue
            if ragged and not (is_ragged(other) or is_ragged(small)):
                continue
            if tuple(plan[0]) in self.seen and attempt < first + attempts // 2:
                continue
            if attempt < first + attempts // 2 and work_of(small) + work_of(other) > _LIGHT:
                continue  # another draw is likely to be smaller
            self.seen.add(tuple(plan[0]))
            return Instance(small, other, ragged, False)
        return None

    def _plan(
        self, attempt: int, ragged: bool
    ) -> tuple[
        list[Shape], dict[BlockGraph, tuple[int, ...]], dict[BlockGraph, int], dict[int, int]
    ]:
        rng = self.rng
        grid_parts: tuple[int, ...]
        loop_parts: tuple[int, ...]
        grid_parts, loop_parts = (((2,), (2,)), ((3,), (3,)), ((2,), (3,)), ((3,), (2,)))[
            attempt % 4
        ]
        if attempt >= 8:  # mixed, and at last without some cuts
            grid_parts = loop_parts = (1, 2, 3) if attempt >= 24 else (2, 3)
        grids = {
            k: tuple(1 if n == 1 else min(n, rng.choice(grid_parts)) for n in k.grid)
            for k in self.blocks
        }
        loops = {k: 1 if k.loop == 1 else min(k.loop, rng.choice(loop_parts)) for k in self.blocks}
        extents, sizes = self._extents(grids, loops, attempt, ragged)
        self._follow_units(grids, sizes)
        shapes = [
            tuple(extents.get((i, d), n) for d, n in enumerate(node.shape))
            for i, node in enumerate(self.program.inputs)
        ]
        return shapes, grids, loops, sizes

    def _follow_units(
        self, grids: dict[BlockGraph, tuple[int, ...]], sizes: dict[int, int]
    ) -> None:
        """Where a kernel takes a computed tensor apart element by element, it must go on doing so:
        as many blocks as the dim has elements now.
        """
        for node in self.nodes:
            if node.op is not Op.BLOCK:
                continue
            block: BlockGraph = node.attrs.block
            cuts = list(grids[block])
            for load in block.loads:
                at: LoadAttrs = load.attrs
                if node.inputs[at.index].op is Op.INPUT:
                    continue
                for axis, d in enumerate(at.imap):
                    if d is not None and load.shape[d] == 1 and at.full[d] in sizes:
                        cuts[axis] = sizes[at.full[d]] if at.full[d] > 1 else cuts[axis]
            grids[block] = tuple(cuts)

    def _cuts(
        self, grids: dict[BlockGraph, tuple[int, ...]], loops: dict[BlockGraph, int]
    ) -> dict[tuple[int, int], tuple[int, bool]]:
        """For each input dim: how many parts the loads cut it into, and whether a tile is one
        element.
        """
        out: dict[tuple[int, int], tuple[int, bool]] = {}
        for graph in (self.program, self.candidate):
            for node in topological(graph.outputs):
                if node.op is not Op.BLOCK:
                    continue
                block: BlockGraph = node.attrs.block
                for load in block.loads:
                    at: LoadAttrs = load.attrs
                    source = node.inputs[at.index]
                    if source.op is not Op.INPUT:
                        continue
                    for d in range(load.rank):
                        axis = next((a for a, k in enumerate(at.imap) if k == d), None)
                        parts = 1 if axis is None else grids[block][axis]
                        parts *= loops[block] if at.fmap == d else 1
                        unit = load.shape[d] == 1 and at.full[d] > 1
                        key = (source.attrs.index, d)
                        before = out.get(key, (1, False))
                        out[key] = (lcm(before[0], parts), before[1] or unit)
        return out

    def _extents(
        self,
        grids: dict[BlockGraph, tuple[int, ...]],
        loops: dict[BlockGraph, int],
        attempt: int,
        ragged: bool,
    ) -> tuple[dict[tuple[int, int], int], dict[int, int]]:
        rng, cuts = self.rng, self._cuts(grids, loops)
        uniform = lcm(*(n for g in grids.values() for n in g), *loops.values(), 1)
        tiles = list(_TILES[: max(3, len(self.classes))])
        rng.shuffle(tiles)
        extents: dict[tuple[int, int], int] = {}
        options: dict[int, list[int]] = {}

        def assign(c: DimClass, n: int) -> None:
            for member in c.members:
                extents[member] = n
            options.setdefault(c.extent, []).append(n)

        later: list[tuple[DimClass, int]] = []
        for k, c in enumerate(self.classes):
            parts = lcm(*(cuts.get(m, (1, False))[0] for m in c.members), 1)
            unit = any(cuts.get(m, (1, False))[1] for m in c.members)
            if c.extent == 1 or (c.frozen and attempt % 2):
                assign(c, c.extent)
            elif unit:
                assign(c, parts)
            elif any(m in self.tied for m in c.members) and self.keeps and not c.frozen:
                later.append((c, parts))
            elif ragged:
                n = parts * tiles[k % len(tiles)]
                assign(c, max(2, n - rng.randint(1, max(1, tiles[k % len(tiles)] - 1))))
            else:
                through = uniform if attempt % 2 and parts == 1 else parts
                assign(c, max(2, through * tiles[k % len(tiles)]))
        sizes = {n: rng.choice(new) for n, new in options.items() if n > 1}
        for keep in self.keeps:
            sizes.setdefault(keep, rng.choice((2, 3)))
        for c, parts in later:
            unit_extent = prod({sizes[k] for k in self.keeps if c.extent % k == 0} or {3})
            n = parts * unit_extent * (rng.choice((1, 2)) if attempt > 3 else 1)
            assign(c, n)
            sizes.setdefault(c.extent, n)
        for block in self.blocks:  # tiles keep their names too
            for load in block.loads:
                at: LoadAttrs = load.attrs
                for d, (old, full) in enumerate(zip(load.shape, at.full, strict=True)):
                    # An extent of 1 stays one; what the program takes a dim apart into is no tile.
                    if 1 < old != full and full in sizes and old not in self.taken:
                        axis = next((a for a, k in enumerate(at.imap) if k == d), None)
                        parts = 1 if axis is None else grids[block][axis]
                        parts *= loops[block] if at.fmap == d else 1
                        sizes.setdefault(old, max(1, sizes[full] // parts))
        return extents, sizes


def instances(
    program: Graph, candidate: Graph, seed: int, count: int = 2, ragged: int = 1
) -> Sequence[Instance]:
    """Up to `count` instances with full tiles and `ragged` with short ones; empty when none exists.

    Deterministic for the seed. Graphs that are small already are taken as they are.
    """
    sampler = Sampler(program, candidate, seed)
    if sampler.small_already():
        return [full_instance(program, candidate)]
    out: list[Instance] = []
    for k in range(count + ragged):
        want = k >= count
        found = sampler.draw(want, 6 if want else 40 if k == 0 else 12, k)
        if found is not None:
            out.append(found)
    return out
