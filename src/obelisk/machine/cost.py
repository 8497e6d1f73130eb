"""The analytic cost of a program: what the search ranks by before anything is compiled.

Takes a frozen `Graph` and a `Machine`; gives a `Cost`. Deterministic and pure: no timing, no
device. The formula is in `docs/machine.md`; its aim is order, not seconds: a candidate that is
clearly faster must not be ranked behind.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from obelisk.ir.block import BlockGraph
from obelisk.ir.graph import VIEWS, Graph, Launch
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.ir.table import TABLE, Kind
from obelisk.machine import cpu, gpu
from obelisk.machine.description import Machine, MachineKind
from obelisk.machine.traffic import (
    INPUT_SHARE,
    RESULT_SHARE,
    WRITE_FACTOR,
    Operand,
    Traffic,
    launch_traffic,
    line_factors,
    run_length,
    strides_of,
)
from obelisk.machine.work import Work, arithmetic, matmul_shape, work

OVERLAP = (
    0.2  # share of the smaller of memory and arithmetic time that does not hide behind the larger
)
_CONSTANTS = frozenset({Op.CONST, Op.SIZE, Op.IOTA})
_SOURCES = _CONSTANTS | {Op.INPUT}
LONE_LAUNCH = 0.2e-6  # a launch of one block on a CPU is a call


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """One kernel's share.

    Attributes:
        name: what runs, for people.
        seconds: of the whole launch.
        memory_seconds, compute_seconds, launch_seconds: its parts (memory and arithmetic overlap).
        bytes: between device memory and the chip.
        flops: of products and elementwise code, tiles counted full.
        blocks, waves: parallel parts, and rounds of them over the cores.
    """

    name: str
    seconds: float
    memory_seconds: float
    compute_seconds: float
    launch_seconds: float
    bytes: float
    flops: float
    blocks: int
    waves: int

    @property
    def limit(self) -> str:
        """What takes most of the time: "memory", "compute" or "launch"."""
        parts = {
            "memory": self.memory_seconds,
            "compute": self.compute_seconds,
            "launch": self.launch_seconds,
        }
        return max(parts, key=lambda name: parts[name])

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.seconds * 1e6:.2f} us, bound by {self.limit} "
            f"(memory {self.memory_seconds * 1e6:.2f}, compute {self.compute_seconds * 1e6:.2f}, "
            f"launch {self.launch_seconds * 1e6:.2f}), {self.bytes / 1e6:.3f} MB, "
            f"{self.flops / 1e6:.2f} Mflop, {self.blocks} blocks in {self.waves} waves"
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """The predicted cost of a program.

    Attributes:
        seconds: the sum over its launches, which run one after the other.
        launches: how many, copies of outputs that are views or inputs included.
        bytes: between device memory and the chip.
        flops: arithmetic, tiles counted full.
        waves: summed over the launches.
        per_launch: the breakdown, in execution order.
    """

    seconds: float
    launches: int
    bytes: float
    flops: float
    waves: int
    per_launch: tuple[LaunchCost, ...]

    def __str__(self) -> str:
        head = f"{self.seconds * 1e6:.2f} us in {self.launches} launches, {self.bytes / 1e6:.3f} MB"
        return "\n".join([head, *(f"  {c}" for c in self.per_launch)])


def estimate(graph: Graph, machine: Machine) -> Cost:
    """The predicted cost of `graph` on `machine`: each launch is a roofline with overheads;
    launches add up.

    A tensor that an earlier launch made is read from the last cache if it fits an eighth of it. On
    a CPU inputs that fit a quarter together are read from there too, as the tuner measures them;
    otherwise inputs come from device memory.
    """
    room = machine.last_cache * RESULT_SHARE
    warm: set[Node] = set()
    size = sum(n.nbytes for n in graph.inputs)
    if machine.kind is MachineKind.CPU and size <= machine.last_cache * INPUT_SHARE:
        warm.update(graph.inputs)
    parts: list[LaunchCost] = []
    before: Launch | None = None
    for launch in graph.launches():
        operands = tuple(Operand(strides_of(n), _cached(n, warm, room)) for n in launch.inputs)
        if launch.block is not None:
            part = _block_cost(launch.block, operands, machine)
            if before is not None and machine.kind is MachineKind.CUDA:
                part = _joined_cost(part, before, launch, machine)
        else:
            part = _primitive_cost(launch.node, operands, machine)
        parts.append(part)
        before = launch
        warm.update(launch.results)
    for output in dict.fromkeys(graph.outputs):
        if output.op in VIEWS or output.op in _SOURCES:  # nothing computes it in its place
            parts.append(_copy_cost(output, _cached(output, warm, room), machine))
    return Cost(
        seconds=sum(p.seconds for p in parts),
        launches=len(parts),
        bytes=sum(p.bytes for p in parts),
        flops=sum(p.flops for p in parts),
        waves=sum(p.waves for p in parts),
        per_launch=tuple(parts),
    )


def _cached(node: Node, warm: set[Node], room: float) -> bool:
    while node.op in VIEWS:
        node = node.inputs[0]
    return node in warm and (node.op is Op.INPUT or node.nbytes <= room)


def _copy_cost(node: Node, cached: bool, machine: Machine) -> LaunchCost:
    """An output that is an input or a view: one copy."""
    size = float(node.nbytes)
    source = 0.0 if node.op in _CONSTANTS else size
    traffic = Traffic(size, source, 0.0, 0.0) if cached else Traffic(size + source, 0.0, 0.0, 0.0)
    memory = _memory_seconds(traffic, machine.bandwidth, machine.cores, machine)
    return LaunchCost(
        name=f"copy {node.dtype}{list(node.shape)}",
        seconds=memory + machine.launch_seconds,
        memory_seconds=memory,
        compute_seconds=0.0,
        launch_seconds=machine.launch_seconds,
        bytes=traffic.memory,
        flops=0.0,
        blocks=machine.cores,
        waves=1,
    )


def _combine(memory: float, compute: float) -> float:
    return max(memory, compute) + OVERLAP * min(memory, compute)


def _memory_seconds(traffic: Traffic, rate: float, active: int, machine: Machine) -> float:
    """Seconds to move a launch's bytes when `active` cores draw `rate` bytes per second from device
    memory.
    """
    outer = machine.caches[-1] if machine.caches else None
    cache_rate = outer.bandwidth * active if outer else rate
    if machine.kind is MachineKind.CUDA:  # the last cache serves what memory does not, side by side
        if outer:  # all of it, however few cores ask, as fast as their paths to it carry
            cache_rate = min(outer.bandwidth * machine.cores, active * machine.core_bandwidth)
        return max(traffic.memory / rate, (traffic.cache + traffic.memory) / cache_rate)
    near = machine.cache(2)
    near_rate = near.bandwidth * active if near else cache_rate
    return traffic.memory / rate + traffic.cache / cache_rate + traffic.near / near_rate


@lru_cache(maxsize=8192)
def _block_cost(block: BlockGraph, operands: tuple[Operand, ...], machine: Machine) -> LaunchCost:
    todo = work(block)
    traffic = launch_traffic(block, operands, machine)
    blocks = block.blocks
    waves = -(-blocks // machine.cores)
    active = min(blocks, machine.cores)
    if machine.kind is MachineKind.CPU:
        compute = waves * cpu.block_seconds(block, todo, operands, machine)
        rate = min(machine.bandwidth, active * machine.core_bandwidth)
    else:
        compute, rate, waves = _cuda_parts(block, todo, active, machine)
    memory = _memory_seconds(traffic, rate, active, machine)
    alone = blocks == 1 and machine.kind is MachineKind.CPU
    launch = LONE_LAUNCH if alone else machine.launch_seconds
    grid = "x".join(map(str, block.grid))
    return LaunchCost(
        name=f"block grid={grid} loop={block.loop}",
        seconds=_combine(memory, compute) + launch,
        memory_seconds=memory,
        compute_seconds=compute,
        launch_seconds=launch,
        bytes=traffic.memory,
        flops=(todo.matmul_flops + todo.vector_flops) * blocks,
        blocks=blocks,
        waves=waves,
    )


def _cuda_parts(
    block: BlockGraph, todo: Work, active: int, machine: Machine
) -> tuple[float, float, int]:
    """Compute seconds, achievable memory rate and waves of a launch on a GPU."""
    resident = min(gpu.occupancy(block, machine).blocks, -(-block.blocks // machine.cores))
    waves = -(-block.blocks // (machine.cores * resident))
    busy, chain = gpu.block_seconds(block, todo, machine)
    share = -(-block.blocks // machine.cores)
    full = min(1.0, resident * gpu.useful_threads(block) / gpu.BUSY_THREADS)
    compute = max(share * busy / full, waves * (chain + busy))
    # Little's law: what an SM draws is what it keeps in flight over the latency.
    flight = gpu.flight(block, todo, resident, machine)
    rate = min(machine.bandwidth, active * min(machine.core_bandwidth, flight / machine.latency))
    return compute, max(rate, 1.0), waves


def _joined_cost(part: LaunchCost, first: Launch, second: Launch, machine: Machine) -> LaunchCost:
    """The cost of a launch that combines the parts of the one before it, which the last block of
    each group can do in the first kernel (docs/cuda.md), if that is cheaper.
    """
    block = first.block
    assert second.block is not None
    split = None if block is None else _split_of(block)
    if block is None or split is None or second.block.loop != 1:
        return part
    made = set(first.results)
    if any(x not in made for x in second.inputs):
        return part
    size = sum(n.nbytes for n in first.results)
    seconds = gpu.combine_seconds(block, split, size, machine)
    if seconds >= part.seconds:
        return part
    return replace(
        part,
        name=f"{part.name}, in the kernel before",
        seconds=seconds,
        memory_seconds=seconds,
        compute_seconds=0.0,
        launch_seconds=0.0,
    )


def _split_of(block: BlockGraph) -> int | None:
    """Blocks along the grid axis in which every result has one part a block, side by side in dim
    0.
    """
    for a, n in enumerate(block.grid):
        if n > 1 and all(
            s.omap[a] == 0 and s.value.rank > 1 and s.value.shape[0] == 1 for s in block.stores
        ):
            return n
    return None


@lru_cache(maxsize=8192)
def _primitive_cost(node: Node, operands: tuple[Operand, ...], machine: Machine) -> LaunchCost:
    """One operator as a kernel of its own: reads its operands, writes its result, in even parts."""
    on_cpu = machine.kind is MachineKind.CPU
    memory_bytes = cache_bytes = 0.0
    for at, (source, operand) in enumerate(zip(node.inputs, operands, strict=True)):
        size = float(_storage_bytes(source))
        if on_cpu and node.op is Op.MATMUL and at == 1:
            slow, quick = _column_factors(node, operand, machine)
            size *= quick if operand.cached else slow
        cache_bytes += size if operand.cached else 0
        memory_bytes += 0 if operand.cached else size
    if on_cpu and node.nbytes <= machine.last_cache * RESULT_SHARE:
        cache_bytes += node.nbytes
    else:
        memory_bytes += node.nbytes * (WRITE_FACTOR if on_cpu else 1.0)
    if on_cpu:
        blocks = _cpu_parts(node, machine)
        active = min(blocks, machine.cores)
        seconds = cpu.operator_seconds(node, operands, machine)
        compute = seconds * -(-blocks // machine.cores) / blocks
        rate = min(machine.bandwidth, active * machine.core_bandwidth)
    else:
        blocks = gpu.primitive_blocks(node, machine)
        active = min(blocks, machine.cores)
        compute = gpu.step_seconds(node, True, machine) / active + machine.latency
        flight = 32768 if blocks >= machine.cores else 16384
        rate = min(machine.bandwidth, active * flight / machine.latency)
    memory = _memory_seconds(Traffic(memory_bytes, cache_bytes, 0.0, 0.0), rate, active, machine)
    launch = machine.launch_seconds if blocks > 1 or not on_cpu else LONE_LAUNCH
    product, other, _ = arithmetic(node)
    return LaunchCost(
        name=f"{node.op.value} {node.dtype}{list(node.shape)}",
        seconds=_combine(memory, compute) + launch,
        memory_seconds=memory,
        compute_seconds=compute,
        launch_seconds=launch,
        bytes=memory_bytes,
        flops=product + other,
        blocks=blocks,
        waves=-(-blocks // machine.cores),
    )


def _storage_bytes(node: Node) -> int:
    """Bytes that a kernel reads for an operand: a broadcast its source, constants nothing."""
    while node.op is Op.BROADCAST:
        node = node.inputs[0]
    return 0 if node.op in _CONSTANTS else node.nbytes


def _cpu_parts(node: Node, machine: Machine) -> int:
    """Parts that an operator's kernel is cut into: four a core, none too small to be worth it."""
    if node.op is Op.MATMUL:
        b, m, n, k = matmul_shape(node)
        room = b * max(-(-n // 16), -(-m // cpu.ROWS))
        return max(1, min(4 * machine.cores, room, b * m * n * k // 65536))
    source = node.inputs[0] if TABLE[node.op].kind is Kind.REDUCE else node
    return max(1, min(4 * machine.cores, source.elements // 8192))


def _column_factors(node: Node, operand: Operand, machine: Machine) -> tuple[float, float]:
    """`line_factors` of a product's right operand when its columns are cut into parts."""
    b, m, n, _ = matmul_shape(node)
    parts = max(1, _cpu_parts(node, machine) // b) if n >= m else 1
    tile = (*node.inputs[1].shape[:-1], -(-n // parts))
    run, step = run_length(tile, node.inputs[1].shape, operand.strides)
    width = node.inputs[1].dtype.nbytes
    return line_factors(run * width, step * width, machine.kind)
