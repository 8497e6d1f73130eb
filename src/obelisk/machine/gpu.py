"""Seconds that one SM takes for the blocks it gets: the CUDA half of the cost model.

Takes a block's work and a machine; gives occupancy and seconds. Products are padded to the
tensor-core tile, special functions go to their own units, and every value kept in shared memory
costs a barrier. Values stay in registers where generated code keeps them there (docs/cuda.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from obelisk.ir.block import BlockGraph, Phase
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.ir.table import TABLE, Kind
from obelisk.machine.description import Machine
from obelisk.machine.footprint import residence
from obelisk.machine.work import Work, arithmetic, matmul_shape

SHARED_BYTES_PER_CLOCK = 128.0  # of one SM
BARRIER = 52.0  # cycles of a block barrier with the latency of the value before it
BARRIER_WARP = 2.0  # cycles more for every warp that it waits for
PRODUCT_LATENCY = 120.0  # cycles until a product's first result can be read
REACH = 0.65  # share of the tensor cores' rate that generated code reaches on large tiles
BUSY_THREADS = 256  # resident threads of an SM from which its units can be kept busy
STAGE = 64  # elements of the loop that one stage of a pipeline holds
STAGES = 4  # tiles of a group in flight
ROWS_OF_A_WARP = 32
MOST_REGISTERS = 160  # of a thread for one tile
MOST_ROWS = 512  # of products whose values stay in registers
_TILE_K = {DType.F16: 16, DType.BF16: 16, DType.F8E4M3: 32, DType.I8: 32, DType.I4: 64}


@dataclass(frozen=True, slots=True)
class Form:
    """How a block's warps share its work, as generated code does it (docs/cuda.md).

    Attributes:
        registers: values stay in registers from one operator to the next.
        group: threads that share one iteration; a block of more has several groups, which take the
            iterations in turn.
        iterations: of the loop, cut finer to stages of 64 elements where values are in registers.
        fixed, stage: bytes of the loads of a whole block, and of one iteration.
        live: bytes of registers that a group needs for accumulators and its largest loop value.
    """

    registers: bool
    group: int
    iterations: int
    fixed: int
    stage: int
    live: int

    def groups(self, threads: int) -> int:
        """Groups of a block of so many threads."""
        return max(1, min(self.iterations, threads // self.group))


@lru_cache(maxsize=8192)
def form(block: BlockGraph) -> Form:
    """How a block's warps share its work: products of narrow floats with one row axis keep their
    values in registers, and so does a block without products.
    """
    products = [n for n in block.body if n.op is Op.MATMUL]
    shapes = [matmul_shape(n) for n in products]
    rows = {m for _, m, _, _ in shapes}
    fragments = (
        len(rows) == 1
        and max(rows) <= MOST_ROWS
        and all(b == 1 and min(m, n, k) > 1 for b, m, n, k in shapes)
        and all(i.dtype in (DType.F16, DType.BF16) for p in products for i in p.inputs)
    )
    moved = any(n.op in (Op.CONCAT, Op.SLICE) for n in block.body)  # not done in registers
    fragments = fragments and not moved and _tile_registers(block, products) <= MOST_REGISTERS
    looped = [n for n in block.loads if n.attrs.fmap is not None]
    moving = sum(n.nbytes for n in looped)
    fixed = sum(n.nbytes for n in block.loads) - moving
    live = residence(block).accumulators
    if not fragments:
        return Form(
            not products and not moved, max(32, block.threads), block.loop, fixed, moving, live
        )
    cuts = max((-(-n.shape[n.attrs.fmap] // STAGE) for n in looped), default=1)
    phase = block.info.phase
    widest = max((4 * n.elements for n in products if phase[n] is Phase.LOOP), default=0)
    group = 32 * -(-max(rows) // ROWS_OF_A_WARP)
    return Form(
        True, group, block.loop * cuts, fixed, -(-moving // cuts), live + -(-widest // cuts)
    )


def _tile_registers(block: BlockGraph, products: Sequence[Node]) -> int:
    """Registers of a thread for the widest product, a warp holding up to 32 of its rows; columns
    that the loop cuts come in stages.
    """
    widest = 0
    for node in products:
        *_, rows, columns = node.shape
        cut = block.info.splits[node][-1]
        columns = min(columns, STAGE) if cut is not None and cut.loop else columns
        widest = max(widest, min(rows, ROWS_OF_A_WARP) * columns // 32)
    return widest


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks that one SM holds at a time, and what limits them."""

    blocks: int
    limit: str


def occupancy(block: BlockGraph, machine: Machine) -> Occupancy:
    """Resident blocks of an SM by shared memory (two tiles of each group in flight), threads, and
    registers (accumulators plus 48 a thread).
    """
    how = form(block)
    threads = max(block.threads, machine.warp)
    if how.registers and how.iterations > 1:
        threads = how.group * how.groups(threads)
        shared = how.fixed + 2 * how.stage * how.groups(threads)
    else:
        shared = residence(block).tiles
    registers = 48 + min(192, -(-how.live // (4 * min(how.group, threads))))
    limits = {
        "shared memory": machine.shared_per_core // (shared + 1024),
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
    how = form(block)
    groups = how.groups(block.threads)
    busy = 0.0
    products = folds = inside = 0
    for step in todo.steps:
        fused = step.fused or how.registers
        busy += step_seconds(step.node, fused, machine) * step.times
        looped = step.times > 1
        if step.node.op is Op.MATMUL:
            products += 1 - looped
            inside += looped
        folds += _folds(step.node) * step.times
    barrier = BARRIER + BARRIER_WARP * block.threads / machine.warp
    if not how.registers:
        barriers = (todo.barriers + 1) * todo.iterations
        cycles = (products + inside * todo.iterations) * PRODUCT_LATENCY + barriers * barrier
        return busy, machine.latency + cycles / machine.clock
    cycles = products * PRODUCT_LATENCY + barrier
    if inside:  # a fold of a row is two shuffles of its own warp
        cycles += -(-how.iterations // groups) * (inside * PRODUCT_LATENCY + BARRIER)
    else:  # folds go through shared memory where more than a warp holds a row
        cycles += folds * barrier + (how.iterations - 1) * barrier
    if groups > 1:  # groups join their accumulators through shared memory
        cycles += 2 * groups * residence(block).accumulators / SHARED_BYTES_PER_CLOCK
    return busy, machine.latency + cycles / machine.clock


def _folds(node: Node) -> int:
    """Sums and maxima along a row in one value."""
    body = node.attrs.thread.body if node.op is Op.THREAD and not node.attrs.result else (node,)
    return sum(TABLE[n.op].kind is Kind.REDUCE for n in body)


def flight(block: BlockGraph, todo: Work, resident: int, machine: Machine) -> float:
    """Bytes that an SM keeps in flight: a few tiles of every group of a loop, or all tiles of a
    block without one, within its shared memory.
    """
    how = form(block)
    if how.registers and how.iterations > 1:
        groups = how.groups(block.threads)
        deep = min(STAGES, -(-how.iterations // groups))
        asked = how.fixed + how.stage * groups * deep
    else:
        asked = todo.tile_bytes * (2 if todo.iterations > 1 else 1)
    return min(resident * asked, machine.shared_per_core)


def useful_threads(block: BlockGraph) -> int:
    """Threads that have something to do: those of the groups, or a vector of the largest tile
    each.
    """
    how = form(block)
    if how.registers and how.group != max(32, block.threads):
        return how.group * how.groups(block.threads)
    largest = max((n.elements for n in block.body), default=1)
    return max(32, min(block.threads, -(-largest // 4)))


def combine_seconds(first: BlockGraph, parts: int, results: int, machine: Machine) -> float:
    """Seconds that the last block of a split takes to combine `results` bytes of `parts` blocks a
    group in the same kernel: a counter and a read that wait for memory, then bytes that one SM
    draws.
    """
    mine = results * parts / first.blocks
    return machine.latency + mine / machine.core_bandwidth


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
