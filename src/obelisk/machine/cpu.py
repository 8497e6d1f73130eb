"""Cycles that one core takes for a value of a block: the CPU half of the cost model.

Takes nodes and a machine; gives cycles. Products are weighed as a register-tiled micro-kernel (at
most 6 rows by 12 accumulators, one fused multiply-add on each of two pipes), elementwise code as
vectors with the last one padded.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from obelisk.ir.block import BlockGraph
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.ir.table import TABLE, Kind
from obelisk.machine.description import Machine
from obelisk.machine.traffic import Operand
from obelisk.machine.work import Work, matmul_shape

ROWS, ACCUMULATORS = 6, 12  # a micro-kernel's rows and vector accumulators
FMA_LATENCY = 4.0
TILE_CALL = 15.0  # cycles to enter a micro-kernel and set its pointers
STEP_CALL = 12.0  # cycles to start the loop nest of one value
BLOCK_CALL = 250.0  # cycles to fetch a block's number and compute its offsets
ITERATION = 15.0
SWEEP = 6.0  # cycles of a horizontal fold
PACK = 0.5  # cycles an element to reorder an operand whose columns are not contiguous
_NARROW = frozenset({DType.F16, DType.BF16, DType.F8E4M3, DType.I8, DType.I4})


def lanes_for(node: Node, lanes: int) -> int:
    """Vector elements of a value's accumulator type."""
    return max(1, lanes // 2) if node.dtype is DType.F64 else lanes


@lru_cache(maxsize=16384)
def matmul_cycles(b: int, m: int, n: int, k: int, lanes: int) -> float:
    """Cycles of b products (m, k) @ (k, n) on one core, operands in its nearest cache."""
    vectors = -(-n // lanes)
    row_tiles = -(-m // ROWS)
    rows = -(-m // row_tiles)
    columns = min(vectors, max(1, ACCUMULATORS // rows))
    tiles = b * row_tiles * -(-vectors // columns)
    per_k = max(rows * columns / 2, (rows + columns) / 2, FMA_LATENCY)
    return tiles * (k * per_k + 2.0 * rows * columns + TILE_CALL)


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


def _operand_bytes(node: Node) -> float:
    """Bytes that evaluating a value streams through the core, beyond what a product keeps in
    registers.
    """
    if node.op is Op.MATMUL:
        b, m, n, k = matmul_shape(node)
        return 4.0 * b * k * (n * -(-m // ROWS) + m)
    if TABLE[node.op].kind is Kind.REDUCE:
        return 4.0 * node.inputs[0].elements
    return 8.0 * node.elements


def _packing(node: Node, operands: tuple[Operand, ...]) -> float:
    """Cycles to reorder the right operand of a product where its columns are not contiguous in
    memory.
    """
    right = node.inputs[1]
    if right.op is Op.LOAD and right.shape[-1] > 1 and operands[right.attrs.index].strides[-1] != 1:
        return right.elements * PACK
    return 0.0


def block_seconds(
    block: BlockGraph, todo: Work, operands: tuple[Operand, ...], machine: Machine
) -> float:
    """Seconds that one core needs for one block, its tiles where the footprint lets them be."""
    lanes = machine.lanes
    cycles = BLOCK_CALL + ITERATION * todo.iterations
    streamed = 0.0
    for step in todo.steps:
        node = step.node
        cost = step_cycles(node, step.fused, lanes)
        if node.op is Op.MATMUL:
            cost += _packing(node, operands)
        cycles += cost * step.times
        if not step.fused or node.op is Op.MATMUL:
            streamed += _operand_bytes(node) * step.times
    seconds = cycles / machine.clock
    # Beyond the first level, operands arrive at the rate of the level that holds the block's tiles;
    # half of it hides behind arithmetic.
    rate = level_rate(todo.peak, machine)
    return seconds + (0.5 * streamed / rate if rate else 0.0)


def level_rate(size: int, machine: Machine) -> float:
    """Bytes per second of the smallest cache level that holds `size` bytes; 0 for the first, where
    streaming is free.
    """
    for at, cache in enumerate(machine.caches):
        if size <= cache.size // max(1, cache.cores if cache.level > 2 else 1):
            return cache.bandwidth if at else 0.0
    return machine.core_bandwidth
