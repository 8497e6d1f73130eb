"""Block graphs for predefined operators in sizes that suit Triton: tiles of a few thousand padded
elements, products cut along the depth.

Takes a kernel-level node and the number of cores; gives a block graph whose loads are the node's
operands and whose one store is the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from obelisk.ir import build
from obelisk.ir.block import GRID_AXES, Reduce, ceil_div
from obelisk.ir.build import BlockBuilder
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node, make
from obelisk.ir.op import Op
from obelisk.lower.default import DefaultBlock, product_block
from obelisk.lower.triton.names import power
from obelisk.lower.triton.padding import on_matrix_units

TILE = 4096  # padded elements of an elementwise tile
FOLD = 16384  # of a fold's tile: rows that are folded stay whole up to this
LINE = 64  # elements beside a fold's axis that a tile keeps
SIDE, DEPTH = 64, 64  # a product's tile: rows and columns, and depth
LARGE = 128  # rows and columns of a tile where the result has plenty of such
MOST_DEPTH = 32  # of the tile of a product of f32, which no matrix unit takes
LEAST_DEPTH = 512  # elements of the depth that a block must have left where it is split


def cut_dims(shape: Sequence[int], most: int, frozen: Sequence[int] = ()) -> dict[int, int]:
    """Dims to cut and into how many parts, outermost first, at most three, until the padded tile
    has at most `most` elements or nothing is left to cut.
    """
    tile = [power(n) for n in shape]
    out: dict[int, int] = {}
    for d, n in enumerate(shape):
        if prod(tile) <= most or len(out) == GRID_AXES:
            break
        if d in frozen or n == 1:
            continue
        rest = prod(tile) // tile[d]
        size = max(1, most // rest)  # a power of two, since all padded extents are
        size = power(size) if power(size) == size else power(size) // 2
        parts = ceil_div(n, size)
        if parts > 1:
            out[d], tile[d] = parts, size
    return out


def _grid(cut: dict[int, int]) -> tuple[int, ...]:
    return tuple(cut.values()) or (1,)


def _operand(builder: BlockBuilder, x: Node, rank: int, cut: dict[int, int]) -> Node:
    """The load of an operand whose dims are aligned at the right with a result of `rank` dims."""
    if x.op is Op.CONST:
        return x
    if x.op is Op.SIZE:
        from obelisk.ir.table import size_value

        return build.const(float(size_value(x)))
    pad = rank - x.rank
    return builder.load(
        x, [d - pad if d >= pad and x.shape[d - pad] != 1 else None for d in cut] or [None]
    )


def elementwise(node: Node) -> DefaultBlock:
    """One pass over the result."""
    cut = cut_dims(node.shape, TILE)
    b = BlockBuilder(_grid(cut))
    args = tuple(_operand(b, x, node.rank, cut) for x in node.inputs)
    b.store(make(node.op, args, node.attrs), list(cut) or [None], dtype=node.dtype)
    return DefaultBlock(b.finish(), tuple(b.inputs))


def copy(node: Node) -> DefaultBlock:
    """The tensor as it is, into new memory."""
    cut = cut_dims(node.shape, TILE)
    b = BlockBuilder(_grid(cut))
    b.store(b.load(node, list(cut) or [None]), list(cut) or [None], dtype=node.dtype)
    return DefaultBlock(b.finish(), (node,))


def concat(node: Node) -> DefaultBlock:
    """Operands side by side; the joined axis is not cut."""
    cut = cut_dims(node.shape, TILE, [node.attrs.axis])
    b = BlockBuilder(_grid(cut))
    args = tuple(b.load(x, list(cut) or [None]) for x in node.inputs)
    b.store(make(Op.CONCAT, args, node.attrs), list(cut) or [None], dtype=node.dtype)
    return DefaultBlock(b.finish(), tuple(b.inputs))


def reduction(node: Node, cores: int) -> DefaultBlock:
    """A fold along one axis: the others are cut first; an axis too long for a tile runs in a loop,
    and is cut over blocks too, and combined by the store, where blocks are few.
    """
    (x,) = node.inputs
    axis, keep = node.attrs.axis, node.attrs.keep
    loop, reduce, length = 1, Reduce.NONE, x.shape[axis]
    if keep == 1 and prod(x.shape[axis + 1 :]) > 1:
        # Neighbours in memory lie across the axis: a tile keeps some of them.
        cut = cut_dims([1 if d == axis else n for d, n in enumerate(x.shape)], LINE)
    else:
        cut = cut_dims(x.shape, TILE if power(length) <= TILE else FOLD, [axis])
    rows = prod(power(ceil_div(n, cut.get(d, 1))) for d, n in enumerate(x.shape) if d != axis)
    if keep == 1 and power(length) * rows > FOLD:
        blocks = prod(cut.values())
        if blocks < cores and len(cut) < GRID_AXES:
            parts = min(cores // blocks, ceil_div(length * rows, FOLD))
            parts = ceil_div(length, ceil_div(length, parts))
            if parts > 1:
                cut = {**cut, axis: parts}
                reduce = Reduce.SUM if node.op is Op.SUM else Reduce.MAX
        length = ceil_div(length, cut.get(axis, 1))
        loop = ceil_div(length, max(1, FOLD // rows))
    b = BlockBuilder(_grid(cut), loop)
    imap: list[int | None] = [*cut] or [None]
    value = make(node.op, (b.load(x, imap, axis if loop > 1 else None),), node.attrs)
    if loop > 1:
        value = build.accum_sum(value) if node.op is Op.SUM else build.accum_max(value)
    omap = [None if d == axis else d for d in cut] or [None]
    b.store(value, omap, reduce=reduce, dtype=node.dtype)
    return DefaultBlock(b.finish(), tuple(b.inputs))


def matmul(node: Node, cores: int) -> DefaultBlock:
    """A matrix product: a tile of the result a block, the depth in a loop, and split over blocks
    where the result has too few tiles for the cores.
    """
    rank, depth = node.rank, node.inputs[0].shape[-1]
    units = on_matrix_units(node)
    tall, broad = node.shape[-2], node.shape[-1]
    side = SIDE if units else 16
    if units and ceil_div(tall, LARGE) * ceil_div(broad, LARGE) >= 2 * cores:
        side = LARGE
    rows, columns = min(power(tall), side), min(power(broad), side)
    narrow = node.inputs[0].dtype not in (DType.F32, DType.F64)
    step = DEPTH if units and narrow else MOST_DEPTH
    if not units and min(tall, broad) == 1:  # a vector: wide tiles, little work each
        rows, columns, step = min(power(tall), 64), min(power(broad), 64), 64
    cut = {d: n for d, n in enumerate(node.shape[:-2]) if n > 1}
    while len(cut) > GRID_AXES:
        cut.popitem()
    for d, size, tile in ((rank - 1, broad, columns), (rank - 2, tall, rows)):
        if len(cut) < GRID_AXES and ceil_div(size, tile) > 1:
            cut[d] = ceil_div(size, tile)
    blocks, folds = prod(cut.values()), 1
    if 2 * blocks <= cores and len(cut) < GRID_AXES and depth >= 2 * LEAST_DEPTH:
        folds = min(cores // blocks, depth // LEAST_DEPTH)
        folds = ceil_div(depth, ceil_div(depth, folds))
    loop = ceil_div(ceil_div(depth, folds), step)
    return product_block(node, cut, folds, loop)


def default_block(node: Node, cores: int) -> DefaultBlock:
    """The block graph of a predefined operator."""
    match node.op:
        case Op.SUM | Op.REDUCE_MAX:
            return reduction(node, cores)
        case Op.MATMUL:
            return matmul(node, cores)
        case Op.CONCAT:
            return concat(node)
        case _:
            return elementwise(node)
