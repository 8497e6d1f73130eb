"""Seconds that one SM takes for the blocks it gets: the CUDA half of the cost model.

Takes a block's work and a machine; gives occupancy and seconds. Products are padded to the
tensor-core tile, special functions go to their own units, and every value kept in shared memory
costs a barrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from obelisk.ir.block import BlockGraph
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.ir.table import TABLE, Kind
from obelisk.machine.description import Machine
from obelisk.machine.footprint import residence
from obelisk.machine.work import Work, arithmetic, matmul_shape

SHARED_BYTES_PER_CLOCK = 128.0  # of one SM
BARRIER = 60.0  # cycles of a block barrier with the latency of the value before it
PRODUCT_LATENCY = 120.0  # cycles until a product's first result can be read
REACH = 0.75  # share of the tensor cores' rate that generated code reaches on large tiles
BUSY_THREADS = 256  # resident threads of an SM from which its units can be kept busy
_TILE_K = {DType.F16: 16, DType.BF16: 16, DType.F8E4M3: 32, DType.I8: 32, DType.I4: 64}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks that one SM holds at a time, and what limits them."""

    blocks: int
    limit: str


def occupancy(block: BlockGraph, machine: Machine) -> Occupancy:
    """Resident blocks of an SM by shared memory, threads and registers (accumulators plus 48 a
    thread).
    """
    need = residence(block)
    threads = max(block.threads, machine.warp)
    registers = 48 + min(192, -(-need.accumulators // (4 * threads)))
    limits = {
        "shared memory": machine.shared_per_core // (need.tiles + 1024),
        "threads": machine.threads_per_core // threads,
        "registers": machine.registers // (registers * threads),
        "blocks": machine.blocks_per_core,
    }
    limit = min(limits, key=lambda name: limits[name])
    return Occupancy(max(1, limits[limit]), limit)


def up(value: int, to: int) -> int:
    """`value` rounded up to a multiple of `to`."""
    return -(-value // to) * to


@lru_cache(maxsize=16384)
def matmul_seconds(b: int, m: int, n: int, k: int, dtype: DType, machine: Machine) -> float:
    """Seconds of b products on one SM: tensor-core rate on padded tiles, or the rate its operands
    leave shared memory.
    """
    rate = machine.peak(dtype) / machine.cores
    if dtype in _TILE_K:
        flops = 2.0 * b * up(m, 16) * up(n, 8) * up(k, _TILE_K[dtype])
    else:
        flops = 2.0 * b * up(m, 4) * up(n, 8) * k
    # Warps of 64 by 64 results read their rows (16 at least) and columns once each.
    moved = b * k * dtype.nbytes * (up(m, 16) * -(-n // 64) + n * -(-m // 64))
    return max(flops / (rate * REACH), moved / (SHARED_BYTES_PER_CLOCK * machine.clock))


def step_seconds(node: Node, fused: bool, machine: Machine) -> float:
    """Seconds of one evaluation of a value with all of an SM's units."""
    if node.op is Op.MATMUL:
        return matmul_seconds(*matmul_shape(node), node.dtype, machine)
    _, flops, special = arithmetic(node)
    cores = machine.cores
    seconds = flops / (machine.vector_flops / cores)
    if special:
        seconds += special / (machine.special_flops / cores)
    if not fused:
        reads = sum(i.elements for i in node.inputs) if TABLE[node.op].kind is not Kind.LOOP else 0
        seconds += 4.0 * (reads + node.elements) / (SHARED_BYTES_PER_CLOCK * machine.clock)
    return seconds


def block_seconds(block: BlockGraph, todo: Work, machine: Machine) -> tuple[float, float]:
    """Seconds of one block: at the SM's full rate, and the chain of its latencies when it runs
    alone.
    """
    busy = 0.0
    chain = machine.latency
    products = 0
    for step in todo.steps:
        busy += step_seconds(step.node, step.fused, machine) * step.times
        products += step.times * (step.node.op is Op.MATMUL)
    chain += (
        products * PRODUCT_LATENCY + (todo.barriers + 1) * todo.iterations * BARRIER
    ) / machine.clock
    return busy, chain


def primitive_blocks(node: Node, machine: Machine) -> int:
    """Blocks that a library kernel for one operator would use."""
    if node.op is Op.MATMUL:
        b, m, n, k = matmul_shape(node)
        tiles = b * -(-m // 128) * -(-n // 64)
        return max(
            tiles, min(machine.cores, tiles * max(1, k // 256))
        )  # split along k where tiles are few
    elements = node.inputs[0].elements if TABLE[node.op].kind is Kind.REDUCE else node.elements
    return max(1, elements // 1024)
