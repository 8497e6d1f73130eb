"""A kernel that stores parts and a kernel that combines them, as one.

Takes the block graphs of two launches in a row, the second reading only what the first wrote; gives
the second cut by the first's grid without the split axis, so that the last block of each such group
can do it, or None where the two do not fit together.
"""

from __future__ import annotations

from dataclasses import replace

from obelisk.base.errors import Infeasible, UserError
from obelisk.ir.block import BlockGraph, Store, block_graph
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


def combining(
    first: BlockGraph, second: BlockGraph, sources: tuple[int | None, ...]
) -> tuple[int, BlockGraph] | None:
    """The split axis of `first`, and `second` on the other axes of its grid.

    `sources[i]` is the result of `first` that param `i` of `second` reads (None: another tensor).
    """
    split = split_axis(first)
    if split is None or second.loop != 1 or any(s is None for s in sources):
        return None
    kept = [a for a in range(len(first.grid)) if a != split]
    grid = tuple(first.grid[a] for a in kept) or (1,)
    whole = {i: (None,) for i in range(len(sources))}
    imaps: dict[int, tuple[int | None, ...]] = {}
    for i, j in enumerate(sources):
        assert j is not None
        maps = tuple(first.stores[j].omap[a] for a in kept) or (None,)
        imaps[i] = tuple(
            None if m is not None and first.info.shapes[j][m] == 1 else m for m in maps
        )
    try:
        values = _recut(second, (1,), whole)
        stores = tuple(
            Store(values[s.value], (None,), s.fmap, s.reduce, s.dtype) for s in second.stores
        )
        axes = Axes(block_graph((1,), 1, second.threads, stores))
        # The axis that each grid axis cuts, seen through any load, tells the store's dim.
        cut: list[int | None] = []
        for position in range(len(grid)):
            found: set[int | None] = set()
            for node in second.loads:
                m = imaps[node.attrs.index][position]
                if m is not None:
                    found.add(axes.of[values[node]][m])
            if grid[position] > 1 and (len(found) != 1 or None in found):
                return None
            cut.append(next(iter(found), None))
        omaps = []
        for s in second.stores:
            dims = axes.of[values[s.value]]
            if any(a is not None and grid[p] > 1 and a not in dims for p, a in enumerate(cut)):
                return None
            omaps.append(tuple(dims.index(a) if a is not None else None for a in cut))
        values = _recut(second, grid, imaps)
        stores = tuple(
            Store(values[s.value], omap, s.fmap, s.reduce, s.dtype)
            for s, omap in zip(second.stores, omaps, strict=True)
        )
        return split, block_graph(grid, 1, second.threads, stores)
    except (Infeasible, UserError):
        return None
