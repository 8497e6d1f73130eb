"""Block graphs for predefined operators: how a program's own kernels run when nothing better was
found.

Takes a kernel-level node and the number of cores; gives a block graph whose loads are the node's
operands (scalars are inlined) and whose one store is the node. The grid is chosen for balance: a
few blocks per core, none so small that starting it costs more than running it; a long fold with few
results is split and combined by a reducing store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from obelisk.ir import build
from obelisk.ir.block import BlockGraph, Reduce, ceil_div, tile_extent
from obelisk.ir.build import BlockBuilder
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node, make
from obelisk.ir.op import Op

GRAIN = 8192  # elements: the least work of a block that is worth a hand-over to another core
PRODUCT_GRAIN = 1 << 16  # multiply-adds: the same for a product
COLUMNS = 16  # a product's tiles are whole numbers of these columns
ROWS = 6  # and of these rows
NARROW_DEPTH = 256  # depth of a product's tile where operands must be converted first
NARROW_WIDTH = 256  # and its width


@dataclass(frozen=True, slots=True)
class DefaultBlock:
    """A block graph and the kernel tensors to run it on."""

    block: BlockGraph
    inputs: tuple[Node, ...]


def split_dims(shape: Sequence[int], blocks: int, frozen: Sequence[int] = ()) -> dict[int, int]:
    """Dims to cut and into how many parts, outermost first, at most three, for about `blocks`
    blocks.
    """
    out: dict[int, int] = {}
    left = blocks
    for d, n in enumerate(shape):
        if left <= 1 or len(out) == 3:
            break
        if d in frozen or n == 1:
            continue
        parts = min(n, left)
        parts = ceil_div(n, ceil_div(n, parts))  # no empty block
        out[d] = parts
        left = left // parts
    return out


def wanted_blocks(work: int, grain: int, cores: int) -> int:
    """How many blocks `work` is cut into: up to 4 per core, each of at least `grain`."""
    return max(1, min(work // grain, 4 * cores))


def _operand(
    builder: BlockBuilder, x: Node, rank: int, cut: dict[int, int], fmap: int | None = None
) -> Node:
    """The load of operand `x` whose dims are aligned at the right with a result of `rank` dims."""
    if x.op is Op.CONST:
        return x
    if x.op is Op.SIZE:
        return build.const(float(_size(x)))
    pad = rank - x.rank
    imap = [d - pad if d >= pad and x.shape[d - pad] != 1 else None for d in cut] or [None]
    return builder.load(x, imap, fmap)


def _size(node: Node) -> int:
    from obelisk.ir.table import size_value

    return size_value(node)


def _grid(cut: dict[int, int]) -> tuple[int, ...]:
    return tuple(cut.values()) or (1,)


def _omap(cut: dict[int, int]) -> list[int | None]:
    return list(cut) or [None]


def elementwise(node: Node, cores: int) -> DefaultBlock:
    """One pass over the result."""
    cut = split_dims(node.shape, wanted_blocks(node.elements, GRAIN, cores))
    b = BlockBuilder(_grid(cut))
    args = tuple(_operand(b, x, node.rank, cut) for x in node.inputs)
    b.store(make(node.op, args, node.attrs), _omap(cut), dtype=node.dtype)
    return DefaultBlock(b.finish(), tuple(b.inputs))


def copy(node: Node, cores: int) -> DefaultBlock:
    """The tensor as it is, into new memory."""
    cut = split_dims(node.shape, wanted_blocks(node.elements, GRAIN, cores))
    b = BlockBuilder(_grid(cut))
    x = b.load(node, [*cut] or [None])
    b.store(x, _omap(cut), dtype=node.dtype)
    return DefaultBlock(b.finish(), (node,))


def reduction(node: Node, cores: int) -> DefaultBlock:
    """A fold along one axis. Rows are cut first; a long axis with few rows is cut too, and combined
    by the store.
    """
    (x,) = node.inputs
    axis = node.attrs.axis
    blocks = wanted_blocks(x.elements, GRAIN, cores)
    cut = split_dims(x.shape, blocks, frozen=[axis])
    parts = max(1, min(cores, blocks // max(1, prod(cut.values()))))
    reduce, n = Reduce.NONE, x.shape[axis]
    if (
        node.attrs.keep == 1
        and parts > 1
        and prod(cut.values()) < cores
        and len(cut) < 3
        and n >= 4 * GRAIN
    ):
        cut = {**cut, axis: ceil_div(n, ceil_div(n, parts))}
        reduce = Reduce.SUM if node.op is Op.SUM else Reduce.MAX
    b = BlockBuilder(_grid(cut))
    value = make(node.op, (_operand(b, x, x.rank, cut),), node.attrs)
    omap = [None if d == axis else d for d in cut] or [None]
    b.store(value, omap, reduce=reduce, dtype=node.dtype)
    return DefaultBlock(b.finish(), tuple(b.inputs))


def concat(node: Node, cores: int) -> DefaultBlock:
    """Operands side by side; the joined axis is not cut."""
    blocks = wanted_blocks(node.elements, GRAIN, cores)
    cut = split_dims(node.shape, blocks, frozen=[node.attrs.axis])
    b = BlockBuilder(_grid(cut))
    args = tuple(b.load(x, [*cut] or [None]) for x in node.inputs)
    b.store(make(Op.CONCAT, args, node.attrs), _omap(cut), dtype=node.dtype)
    return DefaultBlock(b.finish(), tuple(b.inputs))


def product_cut(shape: Sequence[int], depth: int, cores: int) -> tuple[dict[int, int], int]:
    """How a product's result is cut, and into how many parts its depth.

    Batches first; then columns (each operand column is then read once), then rows, in multiples of
    the register block; the depth only where the result alone cannot keep the cores busy.
    """
    rank = len(shape)
    work = prod(shape) * depth
    blocks = wanted_blocks(work, PRODUCT_GRAIN, cores)
    cut = split_dims(shape[:-2], blocks) if rank > 2 else {}
    while len(cut) > 2:
        cut.popitem()
    left = blocks // max(1, prod(cut.values()))
    if prod(cut.values()) >= 2 * cores:
        left = 1
    if left > 1:
        n, m = shape[-1], shape[-2]
        if n >= m or m < 4 * ROWS:
            d, unit = rank - 1, COLUMNS
        else:
            d, unit = rank - 2, ROWS
        parts = min(left, ceil_div(shape[d], unit))
        tile = ceil_div(ceil_div(shape[d], parts), unit) * unit
        parts = ceil_div(shape[d], tile)
        # Tiles are cut evenly by the block level; keep them whole numbers of the unit where that
        # divides.
        while parts > 1 and tile_extent(shape[d], parts, 1) % unit and parts > cores:
            parts -= 1
        if parts > 1:
            cut = {**cut, d: parts}
    folds = 1
    if prod(cut.values()) < cores and len(cut) < 3 and depth >= 2048:
        folds = max(1, min(cores // max(1, prod(cut.values())), depth // 1024))
    return cut, folds


def matmul(node: Node, cores: int) -> DefaultBlock:
    """A matrix product. Operands of the compute type are read in place; narrow ones tile by tile
    over the depth.
    """
    depth, rank = node.inputs[0].shape[-1], node.rank
    cut, folds = product_cut(node.shape, depth, cores)
    narrow = any(x.dtype not in (DType.F32, DType.F64, DType.I32) for x in node.inputs)
    loop = 1
    if narrow:
        width = NARROW_WIDTH
        n_parts = cut.get(rank - 1, 1)
        if (node.shape[-1] // n_parts > width and len(cut) < 3) or rank - 1 in cut:
            cut = {**cut, rank - 1: max(n_parts, ceil_div(node.shape[-1], width))}
        loop = ceil_div(ceil_div(depth, folds), NARROW_DEPTH)
    return product_block(node, cut, folds, loop)


def product_block(node: Node, cut: Mapping[int, int], folds: int, loop: int) -> DefaultBlock:
    """A matrix product with `cut[d]` blocks along dim d of the result, its depth split over `folds`
    blocks (a grid axis of its own, along the depth) and `loop` iterations.
    """
    a, w = node.inputs
    rank = node.rank
    cuts = {**cut, rank: folds} if folds > 1 else dict(cut)
    b = BlockBuilder(_grid(cuts), loop)

    def load(x: Node, skip: int, fold_dim: int) -> Node:
        pad = rank - x.rank
        imap: list[int | None] = []
        for d in cuts:
            if d == rank:
                imap.append(fold_dim)
            elif d == skip or d < pad or x.shape[d - pad] == 1:
                imap.append(None)
            else:
                imap.append(d - pad)
        return b.load(x, imap or [None], fold_dim if loop > 1 else None)

    value = make(
        Op.MATMUL, (load(a, rank - 1, a.rank - 1), load(w, rank - 2, w.rank - 2)), node.attrs
    )
    if loop > 1:
        value = build.accum_sum(value)
    omap = [None if d == rank else d for d in cuts] or [None]
    reduce = Reduce.SUM if folds > 1 else Reduce.NONE
    b.store(value, omap, reduce=reduce, dtype=node.dtype)
    return DefaultBlock(b.finish(), tuple(b.inputs))


def default_block(node: Node, cores: int) -> DefaultBlock:
    """The block graph of a predefined operator."""
    match node.op:
        case Op.SUM | Op.REDUCE_MAX:
            return reduction(node, cores)
        case Op.MATMUL:
            return matmul(node, cores)
        case Op.CONCAT:
            return concat(node, cores)
        case _:
            return elementwise(node, cores)
