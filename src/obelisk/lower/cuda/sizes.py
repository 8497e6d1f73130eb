"""Sizes that a lowering may change: rows and columns of a tile, parts of a fold, loop tiles.

Takes a graph and options; gives a graph that means the same, with other grids and loop counts. The
search ranks sizes by a cost model; here they meet what an architecture wants (64 rows for products
of four warps, whole lines of 64 columns, clusters that all run at once, one pipeline stage an
iteration).
"""

from __future__ import annotations

from math import prod

from obelisk.base.errors import UserError
from obelisk.ir.block import BlockGraph, Phase
from obelisk.ir.graph import Graph
from obelisk.ir.op import Op
from obelisk.ir.resize import blocks_of, resize
from obelisk.lower.cuda.combine import split_axis
from obelisk.lower.cuda.kernel import MOST_CLUSTER, cluster_waves
from obelisk.lower.cuda.options import CudaOptions
from obelisk.lower.schedule import flatten
from obelisk.machine.description import Machine

LOOP_TILE = 64  # elements of an iteration along the loop that one pipeline stage holds


def _resized(
    graph: Graph, grids: dict[BlockGraph, tuple[int, ...]], loops: dict[BlockGraph, int]
) -> Graph:
    """The graph with other sizes; as it was where they do not make a graph."""
    if not grids and not loops:
        return graph
    try:
        return resize(graph, [x.shape for x in graph.inputs], grids=grids, loops=loops)
    except UserError:
        return graph


def has_products(block: BlockGraph) -> bool:
    """Whether a block graph has a matrix product."""
    return any(n.op is Op.MATMUL for n in flatten(block).body)


def has_chain(graph: Graph, least: int) -> bool:
    """Whether a block graph's loop of at least so many iterations feeds products to products."""
    for block in blocks_of(graph):
        flat = flatten(block)
        phase = flat.info.phase
        inside = [n for n in flat.body if n.op is Op.MATMUL and phase[n] is Phase.LOOP]
        if flat.loop < least or len(inside) < 2:
            continue
        reached = set(inside)
        for node in flat.body:  # in order: operands come first
            if phase[node] is Phase.LOOP and not reached.isdisjoint(node.inputs):
                if node in reached and node.op is Op.MATMUL:
                    return True
                reached.add(node)
    return False


def row_axis(block: BlockGraph) -> tuple[int, int] | None:
    """The grid axis that cuts the rows of a block's first product, and how many rows there are in
    all; None where no axis does.
    """
    flat = flatten(block)
    for node in flat.body:
        if node.op is Op.MATMUL:
            split = flat.info.splits[node][-2]
            if split is None or split.axis is None:
                return None
            return split.axis, split.full
    return None


def column_axis(block: BlockGraph) -> tuple[int, int] | None:
    """The grid axis that cuts the columns of products which are columns of results, and how many
    columns there are in all; None where no axis does.
    """
    flat = flatten(block)
    last = {flat.info.splits[s.value][-1] for s in flat.stores if s.value.rank}
    for node in flat.body:
        split = flat.info.splits[node][-1] if node.op is Op.MATMUL else None
        if split is not None and split.axis is not None and split in last:
            return split.axis, split.full
    return None


def coarser(graph: Graph, options: CudaOptions) -> Graph:
    """The graph with tiles of at least `row_tile` rows and `column_tile` columns, where asked, and
    at most `splits` parts of a fold.
    """
    grids: dict[BlockGraph, tuple[int, ...]] = {}
    for block in blocks_of(graph):
        if not has_products(block):
            continue
        grid = list(block.grid)
        wanted = ((row_axis(block), options.row_tile), (column_axis(block), options.column_tile))
        for cut, tile in wanted:
            if tile and cut is not None and cut[1] % tile == 0:
                grid[cut[0]] = min(grid[cut[0]], cut[1] // tile)
        split = split_axis(flatten(block))
        if options.splits and split is not None and block.loop > 1:
            grid[split] = min(grid[split], options.splits)
        if tuple(grid) != block.grid:
            grids[block] = tuple(grid)
    return _resized(graph, grids, {})


def staged(graph: Graph, options: CudaOptions) -> Graph:
    """The graph with its loops cut so that a tile along the loop is one pipeline stage: finer where
    tiles are longer, coarser where they are shorter than a `loop_tile` that was asked for.
    """
    loops: dict[BlockGraph, int] = {}
    for block in blocks_of(graph):
        longest = max(
            (
                n.shape[n.attrs.fmap]
                for n in block.loads
                if n.attrs.fmap is not None and block.info.phase[n] is Phase.LOOP
            ),
            default=1,
        )
        if block.loop == 1 or not has_products(block):
            continue
        join = options.loop_tile // max(1, longest)
        if not options.loop_scale and join > 1 and block.loop % join == 0 and block.loop > join:
            loops[block] = block.loop // join
            continue
        scale = options.loop_scale or max(1, longest // (options.loop_tile or LOOP_TILE))
        while scale > 1 and longest % scale:
            scale -= 1
        if scale > 1:
            loops[block] = block.loop * scale
    return _resized(graph, {}, loops)


def scaled(graph: Graph, options: CudaOptions) -> Graph:
    """The graph at the sizes that the options ask for."""
    return staged(coarser(graph, options), options) if options.fragments else graph


def fitting_splits(graph: Graph, machine: Machine, row_tile: int = 0) -> int:
    """Into how many parts a split fold is best cut: the most whose clusters all run at once; 0
    where the graph splits no fold with products.
    """
    for block in blocks_of(coarser(graph, CudaOptions(row_tile=row_tile))):
        split = split_axis(flatten(block)) if has_products(block) else None
        if split is None:
            continue
        groups = prod(block.grid) // block.grid[split]
        parts = min(MOST_CLUSTER, block.grid[split])
        while parts > 1 and (
            block.grid[split] % parts or cluster_waves(groups * parts, parts, machine) > 1
        ):
            parts -= 1
        return parts if parts > 1 else 0
    return 0
