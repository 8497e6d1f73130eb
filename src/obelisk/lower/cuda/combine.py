"""A kernel that stores parts and a kernel that combines them, as one.

Takes the block graphs of two launches in a row, the second reading only what the first wrote; gives
the second cut by the first's grid without the split axis, so that the last block of each such group
can do it, or None where the two do not fit together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from obelisk.base.errors import Infeasible, UserError
from obelisk.ir.block import GRID_AXES, BlockGraph, Store, block_graph
from obelisk.ir.node import Node, make
from obelisk.ir.op import LoadAttrs, Op, ReshapeAttrs
from obelisk.ir.resize import _Resizer
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
    block: BlockGraph, grid: tuple[int, ...], imaps: dict[int, tuple[int | None, ...]]
) -> dict[Node, Node]:
    """The block's values for another grid and other maps of its loads."""
    work = _Resizer({}, {}, {})
    new: dict[Node, Node] = {}
    for node in block.body:
        if node.op is Op.LOAD:
            at: LoadAttrs = node.attrs
            new[node] = make(Op.LOAD, (), replace(at, grid=grid, imap=imaps[at.index]))
        elif node.op is Op.RESHAPE and node.shape == node.inputs[0].shape[1:]:
            x = new[node.inputs[0]]  # the parts' axis goes; which of many ones would be ambiguous
            new[node] = make(Op.RESHAPE, (x,), ReshapeAttrs(x.shape[1:]))
        else:
            new[node] = work.rebuild(node, [new[i] for i in node.inputs], block.loop)
    return new


@dataclass(frozen=True, slots=True)
class Ending:
    """The combining launch, cut like the launch before it.

    Attributes:
        split: the grid axis of the first launch whose blocks are combined.
        block: the second block graph on the other axes.
        coordinates: for each of its grid axes, the axis of the first launch, and into how many
            parts each of that axis' blocks was cut (0: the axis is the split axis itself).
    """

    split: int
    block: BlockGraph
    coordinates: tuple[tuple[int, int], ...]


def combining(
    first: BlockGraph, second: BlockGraph, sources: tuple[int | None, ...], shared: bool
) -> Ending | None:
    """`second` on the grid of `first` without its split axis.

    `sources[i]` is the result of `first` that param `i` of `second` reads (None: another tensor).
    With `shared`, the blocks of a split share the work of combining; else one of them does it all.
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
    if not shared and second.grid == (tuple(first.grid[a] for a in kept) or (1,)):
        same = all(list(n.attrs.imap) == (maps[n.attrs.index] or [None]) for n in second.loads)
        if same:  # it is cut like the first already
            coordinates = tuple((a, 1) for a in kept) or ((split, -1),)
            return Ending(split, second, coordinates)
    try:
        return _ending(first, second, split, kept, maps, first.grid[split] if shared else 1)
    except (Infeasible, UserError):
        return None


def _ending(
    first: BlockGraph,
    second: BlockGraph,
    split: int,
    kept: list[int],
    maps: dict[int, list[int | None]],
    sharers: int,
) -> Ending | None:
    values = _recut(second, (1,), {i: (None,) for i in maps})
    whole = tuple(Store(values[s.value], (None,), s.fmap, s.reduce, s.dtype) for s in second.stores)
    axes = Axes(block_graph((1,), 1, second.threads, whole))
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
    coordinates = [(a, 1) for a in kept]
    if sharers > 1:
        target = _shared_axis(second, values, axes, cut, grid, sharers)
        if target is None:
            return None
        if target in cut:
            position = cut.index(target)
            grid[position] *= sharers
            coordinates[position] = (kept[position], sharers)
        else:
            cut.append(target)
            grid.append(sharers)
            coordinates.append((split, 0))
            for node in second.loads:
                dims = axes.of[values[node]]
                if len(maps[node.attrs.index]) < len(grid):
                    maps[node.attrs.index].append(dims.index(target) if target in dims else None)
    if not grid:
        grid, cut, coordinates = [1], [None], [(split, -1)]
        maps = {i: [None] for i in maps}
    omaps = []
    for s in second.stores:
        dims = axes.of[values[s.value]]
        if any(a is not None and grid[p] > 1 and a not in dims for p, a in enumerate(cut)):
            return None
        omaps.append(tuple(dims.index(a) if a is not None else None for a in cut))
    values = _recut(second, tuple(grid), {i: tuple(m) for i, m in maps.items()})
    stores = tuple(
        Store(values[s.value], omap, s.fmap, s.reduce, s.dtype)
        for s, omap in zip(second.stores, omaps, strict=True)
    )
    return Ending(split, block_graph(tuple(grid), 1, second.threads, stores), tuple(coordinates))


def _shared_axis(
    second: BlockGraph,
    values: dict[Node, Node],
    axes: Axes,
    cut: list[int | None],
    grid: list[int],
    sharers: int,
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
    order = [*reversed(dims[0][:-1]), dims[0][-1]]
    for a in order:
        if a is None or a in folded or not all(a in d for d in dims):
            continue
        parts = grid[cut.index(a)] if a in cut else 1
        if axes.axes[a].extent % (parts * sharers) == 0 and (a in cut or len(grid) < GRID_AXES):
            return a
    return None
