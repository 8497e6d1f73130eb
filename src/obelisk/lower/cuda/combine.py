"""A kernel that stores parts and a kernel that combines them, as one.

Takes the block graphs of two launches in a row, the second reading only what the first wrote; gives
the second cut by the first's grid without the split axis, so that the last block of each such group
can do it, or cut once more, so that the blocks of the group share it. None where the two do not fit
together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from obelisk.base.errors import Infeasible, UserError
from obelisk.ir.block import BlockGraph, Store, block_graph
from obelisk.ir.node import Node, Shape, make
from obelisk.ir.op import LoadAttrs, Op, ReshapeAttrs
from obelisk.ir.resize import rebuild
from obelisk.ir.table import size_value
from obelisk.lower.cuda.axes import Axes


def split_axis(block: BlockGraph) -> int | None:
    """The grid axis along which every store puts its parts side by side in dim 0, one a block."""
    for a, n in enumerate(block.grid):
        if n > 1 and all(
            s.omap[a] == 0 and s.value.rank > 1 and s.value.shape[0] == 1 for s in block.stores
        ):
            return a
    return None


def _recut(
    block: BlockGraph,
    grid: tuple[int, ...],
    imaps: dict[int, tuple[int | None, ...]],
    full: dict[int, Shape] | None = None,
) -> dict[Node, Node]:
    """The values for another grid, other maps of the loads, and other tensors behind them."""
    new: dict[Node, Node] = {}
    for node in block.body:
        if node.op is Op.LOAD:
            at: LoadAttrs = node.attrs
            shape = at.full if full is None else full[at.index]
            attrs = replace(at, full=shape, grid=grid, imap=imaps[at.index])
            new[node] = make(Op.LOAD, (), attrs)
        elif node.op is Op.RESHAPE and node.shape == node.inputs[0].shape[1:]:
            x = new[node.inputs[0]]  # the parts' axis goes; which of many ones would be ambiguous
            new[node] = make(Op.RESHAPE, (x,), ReshapeAttrs(x.shape[1:]))
        else:
            new[node] = rebuild(node, [new[i] for i in node.inputs], block.loop)
    return new


@dataclass(frozen=True, slots=True)
class Ending:
    """The combining launch, cut like the launch before it.

    Attributes:
        split: the grid axis of the first launch whose blocks are combined.
        block: the second block graph on the other axes.
        coordinates: for each of its grid axes, the axis of the first launch (-1: there is none, and
            one block).
    """

    split: int
    block: BlockGraph
    coordinates: tuple[int, ...]


def combining(
    first: BlockGraph, second: BlockGraph, sources: tuple[int | None, ...]
) -> Ending | None:
    """`second` on the grid of `first` without its split axis.

    `sources[i]` is the result of `first` that param `i` of `second` reads (None: another tensor).
    """
    split = split_axis(first)
    if split is None or second.loop != 1 or any(s is None for s in sources):
        return None
    kept = [a for a in range(len(first.grid)) if a != split]
    maps: dict[int, list[int | None]] = {}
    for i, j in enumerate(sources):
        assert j is not None
        maps[i] = [first.stores[j].omap[a] for a in kept]
        maps[i] = [None if m is not None and first.info.shapes[j][m] == 1 else m for m in maps[i]]
    if second.grid == (tuple(first.grid[a] for a in kept) or (1,)):
        same = all(list(n.attrs.imap) == (maps[n.attrs.index] or [None]) for n in second.loads)
        if same:  # it is cut like the first already
            return Ending(split, second, tuple(kept) or (-1,))
    try:
        return _ending(first, second, split, kept, maps)
    except (Infeasible, UserError):
        return None


def _whole(
    block: BlockGraph, values: dict[Node, Node], omaps: list[tuple[int | None, ...]], grid: Shape
) -> BlockGraph:
    """The block graph of recut values."""
    stores = tuple(
        Store(values[s.value], omap, s.fmap, s.reduce, s.dtype)
        for s, omap in zip(block.stores, omaps, strict=True)
    )
    return block_graph(grid, 1, block.threads, stores)


def _ending(
    first: BlockGraph,
    second: BlockGraph,
    split: int,
    kept: list[int],
    maps: dict[int, list[int | None]],
) -> Ending | None:
    values = _recut(second, (1,), {i: (None,) for i in maps})
    axes = Axes(_whole(second, values, [(None,)] * len(second.stores), (1,)))
    grid = [first.grid[a] for a in kept]
    # The axis that each grid axis cuts, seen through any load, tells the store's dim.
    cut: list[int | None] = []
    for position in range(len(kept)):
        found: set[int | None] = set()
        for node in second.loads:
            m = maps[node.attrs.index][position]
            if m is not None:
                found.add(axes.of[values[node]][m])
        if grid[position] > 1 and (len(found) != 1 or None in found):
            return None
        cut.append(next(iter(found), None))
    coordinates = tuple(kept)
    if not grid:
        grid, cut, coordinates = [1], [None], (-1,)
        maps = {i: [None] for i in maps}
    omaps = []
    for s in second.stores:
        dims = axes.of[values[s.value]]
        if any(a is not None and grid[p] > 1 and a not in dims for p, a in enumerate(cut)):
            return None
        omaps.append(tuple(dims.index(a) if a is not None else None for a in cut))
    values = _recut(second, tuple(grid), {i: tuple(m) for i, m in maps.items()})
    return Ending(split, _whole(second, values, omaps, tuple(grid)), coordinates)


@dataclass(frozen=True, slots=True)
class Gathering:
    """The combining launch for one group of blocks, shared among them.

    Attributes:
        split: the grid axis of the first launch whose blocks are combined.
        block: the second block graph on the group's parts alone (dim 0 of its params: the block
            that has the part), its only grid axis the block's number in the group.
        places: for each store, the grid axes of the first launch that move the group's part of the
            result, with the dim along which they do.
    """

    split: int
    block: BlockGraph
    places: tuple[tuple[tuple[int, int], ...], ...]


def gathering(
    first: BlockGraph, second: BlockGraph, sources: tuple[int | None, ...]
) -> Gathering | None:
    """`second` for the parts of one group of blocks of `first`, shared among them."""
    split = split_axis(first)
    if split is None or second.loop != 1 or any(s is None for s in sources):
        return None
    try:
        return _gathering(first, second, split, [s for s in sources if s is not None])
    except (Infeasible, UserError):
        return None


def _gathering(
    first: BlockGraph, second: BlockGraph, split: int, sources: list[int]
) -> Gathering | None:
    sharers = first.grid[split]
    kept = [a for a, n in enumerate(first.grid) if a != split and n > 1]
    full: dict[int, Shape] = {}
    for i, j in enumerate(sources):
        store, shape = first.stores[j], first.info.shapes[j]
        if any(m is not None and shape[m] % first.grid[a] for a, m in enumerate(store.omap)):
            return None  # short tiles
        full[i] = (sharers, *store.value.shape[1:])
    places = _places(first, second, kept, sources, full)
    if places is None:
        return None
    values = _recut(second, (1,), {i: (None,) for i in full}, full)
    if any(n.op is Op.SIZE and size_value(n) != size_value(values[n]) for n in second.body):
        return None
    axes = Axes(_whole(second, values, [(None,)] * len(second.stores), (1,)))
    target = _shared_axis(second, values, axes, sharers)
    if target is None:
        return None

    def along(node: Node) -> tuple[int | None, ...]:
        dims = axes.of[values[node]]
        return (dims.index(target) if target in dims else None,)

    omaps = [along(s.value) for s in second.stores]
    maps = {n.attrs.index: along(n) for n in second.loads}
    values = _recut(second, (sharers,), maps, full)
    return Gathering(split, _whole(second, values, omaps, (sharers,)), places)


def _places(
    first: BlockGraph,
    second: BlockGraph,
    kept: list[int],
    sources: list[int],
    full: dict[int, Shape],
) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    """For each store of `second`, which grid axes of `first` move the group's part of it, and along
    which dim; None where that cannot be seen.
    """
    shapes = {i: list(shape) for i, shape in full.items()}
    for a in kept:
        moved = [
            (i, m) for i, j in enumerate(sources) if (m := first.stores[j].omap[a]) is not None
        ]
        if all(full[i][m] == 1 for i, m in moved):
            for i, m in moved:  # a dim of one element is no axis; of two it is
                shapes[i][m] = 2
    doubled: dict[int, Shape] = {i: tuple(shape) for i, shape in shapes.items()}
    values = _recut(second, (1,), {i: (None,) for i in full}, doubled)
    axes = Axes(_whole(second, values, [(None,)] * len(second.stores), (1,)))
    cut: dict[int, int | None] = {}
    for a in kept:
        found = {
            axes.of[values[n]][m]
            for n in second.loads
            if (m := first.stores[sources[n.attrs.index]].omap[a]) is not None
        } - {None}
        if len(found) != 1:
            return None
        cut[a] = found.pop()
    places = []
    for s in second.stores:
        dims = axes.of[values[s.value]]
        if any(axis not in dims for axis in cut.values()):
            return None
        places.append(tuple((a, dims.index(axis)) for a, axis in cut.items()))
    return tuple(places)


def _shared_axis(
    second: BlockGraph, values: dict[Node, Node], axes: Axes, sharers: int
) -> int | None:
    """The axis along which the blocks of a split share the combining: of every result, evenly cut,
    rows before columns.
    """
    dims = [axes.of[values[s.value]] for s in second.stores]
    folded = {
        axes.of[values[n.inputs[0]]][n.attrs.axis]
        for n in second.body
        if n.op in (Op.SUM, Op.REDUCE_MAX)
    }
    for a in [*reversed(dims[0][:-1]), dims[0][-1]]:
        if a is None or a in folded or not all(a in d for d in dims):
            continue
        if axes.axes[a].extent % sharers == 0:
            return a
    return None
