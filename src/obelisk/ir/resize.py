"""The same structure at other sizes: shrinking programs and candidates for the judges.

`resize` rebuilds a graph for other input shapes, grids and loop counts. Attributes that hold
extents (the columns a reduction keeps, the target of a reshape or broadcast, the ends of a slice,
an iota) are re-derived where the structure says how: from the input dims that they are tied to, so
that two things of one extent may part. Else they are looked up in `sizes`, a map from old extents
to new ones. A tile's dim of one element that a reshape moves among others may get more: then the
store says which it was. The result is checked like any other graph, so a choice that does not fit
raises; callers try several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any

from obelisk.base.errors import MalformedGraph, ShapeError
from obelisk.ir import build as b
from obelisk.ir.block import BlockGraph, Store, block_graph
from obelisk.ir.dims import (
    DimClass,
    InputDims,
    dim_classes,
    inner_scope,
    reshape_groups,
    shrink_shapes,
    sizes_for,
)
from obelisk.ir.graph import Graph, make_graph
from obelisk.ir.node import Node, Shape, make, topological
from obelisk.ir.op import (
    Attrs,
    BlockAttrs,
    BroadcastAttrs,
    ElemAttrs,
    InputAttrs,
    IotaAttrs,
    LoadAttrs,
    Op,
    ReduceAttrs,
    ReshapeAttrs,
    SizeAttrs,
    SizeScope,
    SliceAttrs,
    ThreadAttrs,
)
from obelisk.ir.thread import ThreadGraph, thread_graph

__all__ = [
    "DimClass",
    "blocks_of",
    "dim_classes",
    "rebuild",
    "resize",
    "shrink_shapes",
    "sizes_for",
]
# Operators whose result may have the shape of their operand and other elements at its places.
_MOVING = (Op.RESHAPE, Op.TRANSPOSE, Op.MATMUL)


def resize(
    graph: Graph,
    shapes: Sequence[Shape],
    grids: Mapping[BlockGraph, tuple[int, ...]] | None = None,
    loops: Mapping[BlockGraph, int] | None = None,
    sizes: Mapping[int, int] | None = None,
) -> Graph:
    """`graph` rebuilt for inputs of `shapes` (same ranks, one per input).

    `grids` and `loops` give the grid and loop count of each block graph of `graph`, by the old
    block; those not named keep theirs. `sizes` maps old extents in attributes to new ones. Raises
    `ShapeError` or `MalformedGraph` when the result is not well formed or an attribute's new extent
    is ambiguous.
    """
    if len(shapes) != len(graph.inputs):
        raise ShapeError(f"{graph.name} has {len(graph.inputs)} inputs, {len(shapes)} shapes given")
    work = _Resizer(graph, shapes, grids or {}, loops or {}, sizes or {})
    new: dict[Node, Node] = {}
    for node, shape in zip(graph.inputs, shapes, strict=True):
        new[node] = _resize_input(node, tuple(shape))
    for node in graph.nodes:
        if node not in new:
            new[node] = work.rebuild(None, node, [new[i] for i in node.inputs])
    return make_graph(
        [new[i] for i in graph.inputs],
        [new[o] for o in graph.outputs],
        graph.input_names,
        graph.output_names,
        graph.name,
    )


def rebuild(node: Node, args: Sequence[Node], loop: int) -> Node:
    """A block's node on other operands, in a block of `loop` iterations. Extents in its attributes
    follow the operands; raises `ShapeError` where that leaves two ways.
    """
    return _Resizer(None, (), {}, {}, {}).rebuild(None, node, args, loop)


def _resize_input(node: Node, shape: Shape) -> Node:
    at: InputAttrs = node.attrs
    if len(shape) != node.rank:
        raise ShapeError(f"input {at.index} has rank {node.rank}, the new shape is {shape}")
    strides = at.strides if shape == node.shape else _dense_like(at.strides, shape)
    return b.input_node(at.index, shape, at.dtype, strides)


def _dense_like(strides: Shape | None, shape: Shape) -> Shape | None:
    """Dense strides for `shape` whose dims are nested in the order of `strides`; a stride of 0
    stays.
    """
    if strides is None:
        return None
    out = [0] * len(shape)
    step = 1
    for d in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        if strides[d]:
            out[d] = step
            step *= shape[d]
    return tuple(out)


class _Resizer:
    """Rebuilds nodes bottom-up; blocks and thread graphs once per operand shapes."""

    def __init__(
        self,
        graph: Graph | None,
        shapes: Sequence[Shape],
        grids: Mapping[BlockGraph, tuple[int, ...]],
        loops: Mapping[BlockGraph, int],
        sizes: Mapping[int, int],
    ) -> None:
        self.graph, self.shapes = graph, shapes
        self.grids, self.loops, self.sizes = grids, loops, sizes
        self.within: BlockGraph | None = None  # the old block that is being rebuilt
        self.blocks: dict[Any, BlockGraph] = {}
        self.threads: dict[Any, ThreadGraph] = {}

    @cached_property
    def dims(self) -> InputDims | None:
        """Made when an attribute asks: most graphs hold none that needs it."""
        return None if self.graph is None else InputDims(self.graph)

    def rebuild(self, scope: Any, node: Node, args: Sequence[Node], loop: int = 1) -> Node:
        """The node on new operands, at kernel, block (`loop`: its new loop count) or thread
        level; `scope` says which of these, for the ties of its dims.
        """
        attrs: Attrs = node.attrs
        shapes = tuple(a.shape for a in args)
        match node.op:
            case Op.BLOCK:
                attrs = BlockAttrs(self.block(scope, node, shapes), node.attrs.result)
            case Op.THREAD:
                thread = self.thread(scope, node, shapes, loop)
                attrs = ThreadAttrs(thread, node.attrs.result)
            case Op.SIZE:
                at: SizeAttrs = node.attrs
                attrs = replace(at, loop=loop) if at.scope is SizeScope.LOOP else at
            case Op.SUM | Op.REDUCE_MAX:
                attrs = self.reduction(node.attrs)
            case Op.IOTA:
                extents = tuple(self.extent(scope, node, d) for d in range(node.rank))
                attrs = IotaAttrs(extents, node.attrs.axis)
            case Op.RESHAPE:
                attrs = ReshapeAttrs(self.reshape(scope, node, shapes[0]))
            case Op.BROADCAST:
                attrs = BroadcastAttrs(self.broadcast(scope, node, shapes[0]))
            case Op.SLICE:
                attrs = self.slice(node, shapes[0])
        return make(node.op, tuple(args), attrs)

    def known(self, scope: Any, node: Node, d: int) -> int | None:
        """The new extent of a dim that is tied to input dims, where these have become one."""
        if node.shape[d] == 1:
            return 1
        if self.dims is None:
            return None
        found = {self.shapes[i][k] for i, k in self.dims.of(scope, node, d)}
        return found.pop() if len(found) == 1 else None

    def extent(self, scope: Any, node: Node, d: int) -> int:
        known = self.known(scope, node, d)
        return self.sizes.get(node.shape[d], node.shape[d]) if known is None else known

    def reduction(self, at: ReduceAttrs) -> ReduceAttrs:
        return ReduceAttrs(at.axis, self.sizes.get(at.keep, at.keep) if at.keep != 1 else 1)

    def reshape(self, scope: Any, node: Node, new: Shape) -> Shape:
        """The target extents, group by group of dims that split and merge among themselves."""
        old, target = node.inputs[0].shape, node.shape
        grown = self.grown(node, new)
        left = [d for d in range(len(old)) if d not in grown]
        kept = [d for d in range(len(target)) if d not in grown.values()]
        out = [1] * len(target)
        for d, place in grown.items():
            out[place] *= new[d]
        groups = reshape_groups(tuple(old[d] for d in left), tuple(target[d] for d in kept))
        for own, others in groups:
            ins, outs = [left[d] for d in own], [kept[d] for d in others]
            for d, n in zip(outs, self.regrouped(scope, node, new, ins, outs), strict=True):
                out[d] = n
        return tuple(out)

    def grown(self, node: Node, new: Shape) -> dict[int, int]:
        """For each of a reshape's operand dims of one element that has more now: the dim of the
        result that it is.

        Row-major order does not tell neighbouring dims of extent 1 apart. Where both sides have as
        many, they are the same ones in order; else the store of the block does: what a grid axis
        cut is laid along the same axis again. A dim that has no counterpart merges with others.
        """
        old, target = node.inputs[0].shape, node.shape
        out: dict[int, int] = {}
        for d in (d for d, n in enumerate(old) if n == 1 and new[d] != 1):
            before = prod(old[:d])
            mine = [k for k, n in enumerate(old) if n == 1 and prod(old[:k]) == before]
            theirs = [k for k, n in enumerate(target) if n == 1 and prod(target[:k]) == before]
            if not theirs:
                continue
            if len(mine) == len(theirs):
                out[d] = theirs[mine.index(d)]
                continue
            stored = [k for k in self.laid(node, d) if k in theirs]
            if len(theirs) > 1 and len(stored) != 1:
                raise ShapeError(
                    f"reshape of {old} to {target}: which dim dim {d} is, now of {new[d]}, is "
                    "ambiguous"
                )
            out[d] = stored[0] if stored else theirs[0]
        return out

    def laid(self, node: Node, d: int) -> set[int]:
        """The dims of a reshape in a block along which stores lay what cut dim `d` of its
        operand.
        """
        if self.within is None:
            return set()
        cut = self.within.info.splits[node.inputs[0]][d]
        if cut is None or cut.axis is None:
            return set()
        same = {node}  # and what is computed from it element by element
        for n in self.within.body:
            if not same.isdisjoint(n.inputs) and n.shape == node.shape and n.op not in _MOVING:
                same.add(n)
        found = {s.omap[cut.axis] for s in self.within.stores if s.value in same}
        return {k for k in found if k is not None}

    def regrouped(
        self, scope: Any, node: Node, new: Shape, ins: Sequence[int], outs: Sequence[int]
    ) -> list[int]:
        """The extents of the dims `outs` of a reshape's result that are made of the dims `ins`."""
        old, target = node.inputs[0].shape, node.shape
        total = prod(new[d] for d in ins)
        extents = [target[d] for d in outs]
        if len(outs) == 1:
            return [total]
        known = [self.known(scope, node, d) for d in outs]
        same = all(old[d] == new[d] for d in ins)
        if same and all(k in (None, n) for k, n in zip(known, extents, strict=True)):
            return extents
        wide = [k for k, n in enumerate(extents) if n != 1]
        if len(wide) == 1 and all(new[d] == 1 for d in ins if old[d] == 1):
            # Only dims of extent 1 come or go: no name is needed.
            return [total if k in wide else 1 for k in range(len(extents))]
        fixed = {k: self.sizes[n] for k, n in enumerate(extents) if n in self.sizes}
        fixed |= {k: n for k, n in enumerate(known) if n is not None}
        free = [k for k in range(len(extents)) if k not in fixed]
        rest = prod(fixed.values())
        if len(free) > 1 or total % rest or (not free and total != rest):
            raise ShapeError(
                f"reshape of {old} to {target}: {total} elements cannot be split into the new "
                f"extents of {tuple(extents)} without more sizes"
            )
        for k in free:
            fixed[k] = total // rest
        return [fixed[k] for k in range(len(extents))]

    def broadcast(self, scope: Any, node: Node, new: Shape) -> Shape:
        old, target = node.inputs[0].shape, node.shape
        pad = len(target) - len(old)
        return tuple(
            new[d - pad] if d >= pad and old[d - pad] == n else self.extent(scope, node, d)
            for d, n in enumerate(target)
        )

    def slice(self, node: Node, new: Shape) -> SliceAttrs:
        at: SliceAttrs = node.attrs
        before, after = node.inputs[0].shape[at.axis], new[at.axis]

        def end(n: int) -> int:
            if n in (0, before):
                return 0 if n == 0 else after
            if n in self.sizes:
                return self.sizes[n]
            if n * after % before:
                raise ShapeError(
                    f"slice {at.start}:{at.stop} of extent {before}: its place in extent {after} "
                    "is ambiguous; name it in sizes"
                )
            return n * after // before

        return SliceAttrs(at.axis, end(at.start), end(at.stop))

    def block(self, scope: Any, launch: Node, shapes: tuple[Shape, ...]) -> BlockGraph:
        old: BlockGraph = launch.attrs.block
        key = (old, launch.inputs, shapes)
        if key in self.blocks:
            return self.blocks[key]
        grid, loop = self.grids.get(old, old.grid), self.loops.get(old, old.loop)
        if len(grid) != len(old.grid):
            raise MalformedGraph(f"new grid {grid} for a block with {len(old.grid)} grid axes")
        new: dict[Node, Node] = {}
        inner = inner_scope(scope, old, launch.inputs)
        self.within = old
        for node in old.body:
            if node.op is Op.LOAD:
                at: LoadAttrs = node.attrs
                attrs = replace(at, full=shapes[at.index], grid=grid, loop=loop)
                new[node] = make(Op.LOAD, (), attrs)
            else:
                new[node] = self.rebuild(inner, node, [new[i] for i in node.inputs], loop)
        self.within = None
        stores = tuple(Store(new[s.value], s.omap, s.fmap, s.reduce, s.dtype) for s in old.stores)
        self.blocks[key] = block_graph(grid, loop, old.threads, stores)
        self.laid_as_cut(old, self.blocks[key])
        return self.blocks[key]

    def laid_as_cut(self, old: BlockGraph, new: BlockGraph) -> None:
        """Raise where a tile of one element has more along a dim that its store lays elsewhere than
        it was cut: then its blocks' parts would be other parts of the tensor. (One that had several
        keeps its parts: a small instance of a wrong graph is wrong in the same way.)
        """
        for before, store in zip(old.stores, new.stores, strict=True):
            for d, cut in enumerate(new.info.splits[store.value]):
                n, was = store.value.shape[d], before.value.shape[d]
                if cut is None or cut.axis is None or n == 1 or was != 1:
                    continue
                place = store.omap[cut.axis]
                if place is not None and place != d:
                    raise ShapeError(
                        f"dim {d} of a tile, cut by grid axis {cut.axis}, has {n} elements instead "
                        f"of 1, but blocks along that axis are laid along dim {place}"
                    )

    def thread(self, scope: Any, chain: Node, shapes: tuple[Shape, ...], loop: int) -> ThreadGraph:
        old: ThreadGraph = chain.attrs.thread
        inner = inner_scope(scope, old, chain.inputs)
        key = (inner, shapes, loop)
        if key not in self.threads:
            new: dict[Node, Node] = {}
            for node in old.body:
                if node.op is Op.ELEM:
                    at: ElemAttrs = node.attrs
                    new[node] = make(Op.ELEM, (), replace(at, shape=shapes[at.index]))
                else:
                    new[node] = self.rebuild(inner, node, [new[i] for i in node.inputs], loop)
            self.threads[key] = thread_graph(tuple(new[r] for r in old.results), old.vector)
        return self.threads[key]


def blocks_of(graph: Graph) -> list[BlockGraph]:
    """The distinct block graphs of a graph, in execution order."""
    out: dict[BlockGraph, None] = {}
    for node in topological(graph.outputs):
        if node.op is Op.BLOCK:
            out.setdefault(node.attrs.block)
    return list(out)


def collapse(graph: Graph, extent: int, shapes: Sequence[Shape]) -> Graph:
    """`graph` for inputs of `shapes`, in which dims of extent `extent` (and of no other meaning:
    choose it so) may have become 1.

    Blocks do not cut such a dim any more: its grid axes and loops go to 1. Raises what `resize`
    raises.
    """
    grids: dict[BlockGraph, tuple[int, ...]] = {}
    loops: dict[BlockGraph, int] = {}
    for block in blocks_of(graph):
        grid, loop = list(block.grid), block.loop
        for load in block.loads:
            at: LoadAttrs = load.attrs
            for axis, d in enumerate(at.imap):
                if d is not None and at.full[d] == extent:
                    grid[axis] = 1
            if at.fmap is not None and at.full[at.fmap] == extent:
                loop = 1
        grids[block], loops[block] = tuple(grid), loop
    return resize(graph, shapes, grids, loops, sizes_for(graph, shapes))
