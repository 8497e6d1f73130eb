"""Cycles that one core takes for a value of a block: the CPU half of the cost model.

Takes nodes and a machine; gives cycles. Products are weighed as a register-tiled micro-kernel (at
most 6 rows by 12 accumulators, one fused multiply-add on each of two pipes), elementwise code as
vectors with the last one padded.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf, prod

from obelisk.ir.block import BlockGraph
from obelisk.ir.build import row_major
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.ir.table import TABLE, Kind
from obelisk.machine.description import Machine
from obelisk.machine.footprint import arena
from obelisk.machine.traffic import Operand
from obelisk.machine.work import Work, matmul_shape

STREAM_ROWS = 8  # a product of no more rows reads its right operand in place, row by row
ROWS, ACCUMULATORS = 6, 12  # a micro-kernel's rows and vector accumulators
FMA_LATENCY = 4.0
SUM = 8.0  # cycles to clear, add and store a vector of sums of a streamed product
TILE_CALL = 15.0  # cycles to enter a micro-kernel and set its pointers
STEP_CALL = 30.0  # cycles to start the loop nest of one value
BLOCK_CALL = 40.0  # cycles to fetch a block's number and compute its offsets
ITERATION = 15.0
SWEEP = 6.0  # cycles of a horizontal fold
PACK_VECTOR = 2.5  # cycles a vector to copy an operand into panels
PACK = 0.7  # cycles an element to reorder an operand whose columns are not contiguous
_NARROW = frozenset({DType.F16, DType.BF16, DType.F8E4M3, DType.I8, DType.I4})


def lanes_for(node: Node, lanes: int) -> int:
    """Vector elements of a value's accumulator type."""
    return max(1, lanes // 2) if node.dtype is DType.F64 else lanes


def micro_kernel(m: int, n: int, lanes: int) -> tuple[int, int, int, int]:
    """Rows and vector columns of the register tile for an m by n product, and how many of each."""
    vectors = -(-n // lanes)
    row_tiles = -(-m // ROWS)
    rows = -(-m // row_tiles)
    columns = min(vectors, max(1, ACCUMULATORS // rows))
    return rows, columns, row_tiles, -(-vectors // columns)


@lru_cache(maxsize=16384)
def matmul_cycles(b: int, m: int, n: int, k: int, lanes: int) -> float:
    """Cycles of b products (m, k) @ (k, n) on one core, operands in its nearest cache.

    Few rows are streamed: four rows of the right operand at a time are added to sums in the first
    cache, which are then added to the result. More rows go through register tiles.
    """
    vectors = -(-n // lanes)
    if m <= STREAM_ROWS:
        per_k = max(FMA_LATENCY, vectors * (0.6 * m + 1.0))
        return b * (k * per_k + SUM * m * vectors + TILE_CALL)
    rows, columns, row_tiles, panels = micro_kernel(m, n, lanes)
    per_k = max(rows * columns / 2, (rows + columns) / 2, FMA_LATENCY)
    return b * row_tiles * panels * (k * per_k + 2.0 * rows * columns + TILE_CALL)


@lru_cache(maxsize=16384)
def refetch_seconds(b: int, m: int, n: int, k: int, lanes: int, machine: Machine) -> float:
    """Seconds to fetch again what a product's register tile does not keep.

    The right operand comes again for every row of tiles, from the cache that holds a panel of it;
    the left one for every panel, from the cache that holds all of it. Half hides behind arithmetic.
    """
    if m <= STREAM_ROWS:
        return 0.0
    _, columns, row_tiles, panels = micro_kernel(m, n, lanes)
    right = 4.0 * b * k * n * (row_tiles - 1) / level_rate(4 * k * columns * lanes, machine)
    left = 4.0 * b * m * k * (panels - 1) / level_rate(4 * m * k, machine)
    return 0.5 * (right + left)


def vectors_of(shape: tuple[int, ...], lanes: int) -> float:
    """Vectors that cover a tile; rows of the last dim are padded, unless they have one element."""
    if not shape:
        return 1.0
    if shape[-1] == 1:
        return -(-prod(shape) // lanes)
    return prod(shape[:-1]) * -(-shape[-1] // lanes)


@lru_cache(maxsize=16384)
def step_cycles(node: Node, fused: bool, lanes: int) -> float:
    """Cycles of one evaluation of a value on one core, operands in its nearest cache."""
    op = node.op
    wide = lanes_for(node, lanes)
    if op is Op.MATMUL:
        return matmul_cycles(*matmul_shape(node), wide)
    if op is Op.THREAD:
        if node.attrs.result:
            return 0.0
        body = node.attrs.thread.body
        inner = sum(step_cycles(n, True, lanes) for n in body if TABLE[n.op].kind is not Kind.LEAF)
        return STEP_CALL + inner
    row = TABLE[op]
    if row.kind is Kind.REDUCE:
        source = node.inputs[0]
        vectors = vectors_of(source.shape, wide)
        along_rows = node.attrs.axis == source.rank - 1 and node.attrs.keep == 1
        return STEP_CALL + vectors + (node.elements * SWEEP if along_rows else 0.0)
    if row.kind is Kind.STRUCTURE:
        return STEP_CALL + node.elements * PACK
    vectors = vectors_of(node.shape, wide)
    arithmetic = max(row.flops, 1.0) / 2 * vectors
    narrow = sum(i.op is Op.LOAD and i.dtype in _NARROW for i in node.inputs)
    moves = (0.0 if fused else 1.0) + narrow
    return (0.0 if fused else STEP_CALL) + arithmetic + moves * vectors


def packing_cycles(right: Node, rows: int, strides: tuple[int, ...], lanes: int) -> float:
    """Cycles to bring a product's right operand into panels: none for few rows; by vectors where
    its columns are contiguous in memory (`strides`), else element by element.
    """
    if right.shape[-1] > 1 and strides[-1] != 1:
        return right.elements * PACK
    return PACK_VECTOR * right.elements / lanes if rows > STREAM_ROWS else 0.0


def tile_strides(node: Node, operands: tuple[Operand, ...]) -> tuple[int, ...]:
    """Strides of a block value as its reader sees it: loads in place, views as they follow."""
    if node.op is Op.LOAD:
        index: int = node.attrs.index
        return operands[index].strides
    if node.op is Op.TRANSPOSE:
        inner = tile_strides(node.inputs[0], operands)
        perm: tuple[int, ...] = node.attrs.perm
        return tuple(inner[p] for p in perm)
    if node.op is Op.SLICE:
        return tile_strides(node.inputs[0], operands)
    return row_major(node.shape)


def _product_seconds(
    node: Node, operands: tuple[Operand, ...], lanes: int, machine: Machine
) -> float:
    """Packing and fetching again, for one evaluation of a product in a block."""
    right = node.inputs[1]
    b, m, n, k = matmul_shape(node)
    wide = lanes_for(node, lanes)
    packing = packing_cycles(right, m, tile_strides(right, operands), wide) / machine.clock
    return packing + refetch_seconds(b, m, n, k, wide, machine)


def block_seconds(
    block: BlockGraph, todo: Work, operands: tuple[Operand, ...], machine: Machine
) -> float:
    """Seconds that one core needs for one block, its tiles where the footprint lets them be."""
    lanes = machine.lanes
    cycles = BLOCK_CALL + ITERATION * todo.iterations
    extra = stored = 0.0
    for step in todo.steps:
        node = step.node
        cycles += step_cycles(node, step.fused, lanes) * step.times
        if node.op is Op.MATMUL:
            extra += step.times * _product_seconds(node, operands, lanes, machine)
        elif not step.fused:
            stored += 8.0 * node.elements * step.times  # written once, read once
    return cycles / machine.clock + extra + 0.5 * stored / level_rate(arena(block), machine)


def operator_seconds(node: Node, operands: tuple[Operand, ...], machine: Machine) -> float:
    """Seconds of a kernel-level operator on one core, memory aside."""
    seconds = step_cycles(node, False, machine.lanes) / machine.clock
    if node.op is not Op.MATMUL:
        return seconds
    b, m, n, k = matmul_shape(node)
    wide = lanes_for(node, machine.lanes)
    packing = packing_cycles(node.inputs[1], m, operands[1].strides, wide) / machine.clock
    return seconds + packing + refetch_seconds(b, m, n, k, wide, machine)


def level_rate(size: int, machine: Machine) -> float:
    """Bytes per second of the smallest cache level that holds `size` bytes.

    Infinite for the first level, whose accesses the cycle counts include.
    """
    for at, cache in enumerate(machine.caches):
        if size <= cache.size // (cache.cores if cache.level > 2 else 1):
            return cache.bandwidth if at else inf
    return machine.core_bandwidth
