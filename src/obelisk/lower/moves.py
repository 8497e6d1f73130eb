"""How far a tile moves in device memory from block to block and from iteration to iteration.

Takes a load or a store of a block graph and the strides of its kernel tensor; gives elements per
step of each grid axis, then per iteration of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from obelisk.ir.block import BlockGraph, Reduce, ceil_div
from obelisk.ir.node import Node
from obelisk.ir.op import LoadAttrs


def load_moves(node: Node, strides: Sequence[int]) -> tuple[int, ...]:
    """The moves of a load whose kernel tensor has these strides."""
    at: LoadAttrs = node.attrs
    moves = [
        0 if d is None else ceil_div(at.full[d], at.grid[a]) * strides[d]
        for a, d in enumerate(at.imap)
    ]
    moves.append(0 if at.fmap is None else node.shape[at.fmap] * strides[at.fmap])
    return tuple(moves)


def store_moves(block: BlockGraph, j: int, strides: Sequence[int]) -> tuple[int, ...]:
    """The moves of result `j`. Partial results have the number of the folded block in front."""
    store, full, grid = block.stores[j], block.info.shapes[j], block.grid
    moves = [
        0 if d is None else ceil_div(full[d], grid[a]) * strides[d]
        for a, d in enumerate(store.omap)
    ]
    if store.reduce is not Reduce.NONE:
        step = prod(full)
        for a in reversed(range(len(grid))):
            if store.omap[a] is None:
                moves[a] = step
                step *= grid[a]
    fm = store.fmap
    moves.append(0 if fm is None else store.value.shape[fm] * strides[fm])
    return tuple(moves)
