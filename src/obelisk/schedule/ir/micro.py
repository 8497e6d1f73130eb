"""Micro-operations: what one chunk of a phase is made of, and in which order a warp issues it.

`expand` fills the second region of each streaming phase; `order` sorts it by list scheduling
(`ordering.py`) within the registers of the role. Cycles are those of one warp on one SM, from the
vendor's throughput tables (a 16-byte shared load of a warp takes 4 of the 128-byte cycles) and
published microbenchmarks of latencies (about 30 cycles shared, 33 for mma, 23 for a shuffle); they
rank orders, nothing depends on their last digit.
"""

from __future__ import annotations

from dataclasses import dataclass

from xdsl.dialects.builtin import IntAttr, ModuleOp
from xdsl.ir import Block, Operation, SSAValue

from obelisk.schedule.gpu import (
    K_BLOCK,
    GpuTiling,
    head_chunk,
    input_bytes,
    sixteens,
    weight_bits,
)
from obelisk.schedule.gpu_tasks import GpuStep
from obelisk.schedule.gpu_types import CONSUMER as CONSUMER_ROLE
from obelisk.schedule.gpu_types import LOADER as LOADER_ROLE
from obelisk.schedule.ir.dialects import (
    UNITS,
    CopyOp,
    EventType,
    FragmentOp,
    LoadOp,
    MicroOp,
    MultiplyOp,
    PhaseOp,
    ReduceOp,
    RegisterType,
    ReleaseOp,
    SpecialOp,
    StoreOp,
    WaitOp,
    numbers,
)
from obelisk.schedule.ir.ordering import Node, Order, list_schedule
from obelisk.schedule.ir.passes import phases

SHARED = (4, 30)  # issue and latency of a 16-byte shared load of a warp
DEVICE = (8, 700)  # of a 16-byte load from device memory
MMA = (8, 33)  # of one m16n8k16, or m16n8k32 of bytes
FMA = (1, 4)  # of one fp32 multiplication and addition of a warp
SHUFFLE = (2, 23)
SPECIAL = (8, 22)
EVENT = (1, 20)  # looking at, or arriving at, an mbarrier
STEPS = {16: K_BLOCK // 16, 8: 1, 4: 1}  # multiplications in 32 columns of a tile, by bits
READ = {16: 1, 8: 2, 4: 2}  # blocks of 32 columns whose inputs are one load
DECODE = {16: 0, 8: 3, 4: 9}  # cycles for a step's weights: masks, and its share of the scales
POSITIONS = 16  # of the context, that a warp takes at a time: the m of m16n8k16
POSITIONS_FP32 = 8  # a row of lanes for each
ROWS = 4  # of a slab that a lane multiplies in fp32


def times(cost: tuple[int, int], n: int) -> tuple[int, int]:
    """Issue and latency of `n` of the same, one behind the other."""
    return n * cost[0], (n - 1) * cost[0] + cost[1]


@dataclass(frozen=True, slots=True)
class _Pen:
    """Appends micro-operations to a block."""

    block: Block

    def put(
        self, kind: type[MicroOp], uses: list[SSAValue], cost: tuple[int, int],
        registers: int = 0, event: bool = False, role: str = CONSUMER_ROLE,
    ) -> tuple[SSAValue, ...]:  # fmt: skip
        """Append one; gives its results (registers first, then the event)."""
        gives: list[RegisterType | EventType] = []
        if registers:
            gives.append(RegisterType(IntAttr(registers)))
        if event:
            gives.append(EventType())
        op = kind(role, uses, gives, *cost)
        self.block.add_op(op)
        return tuple(op.gives)


def _product(pen: _Pen, t: GpuTiling, special: bool) -> None:
    """A chunk of a product: one warp, `chunk_cols` columns of a tile's rows, 32 at a time."""
    (landed,) = pen.put(CopyOp, [], (t.chunk_bytes // 64, 700), event=True, role=LOADER_ROLE)
    (there,) = pen.put(WaitOp, [landed], EVENT, event=True)
    sums: SSAValue | None = None
    read: list[SSAValue] = []
    bits = weight_bits(t)
    each = 8 * STEPS[bits] // bits  # steps whose weights are one load
    steps = STEPS[bits] * -(-t.chunk_cols // K_BLOCK)
    cost = (MMA[0] + DECODE[bits], MMA[1])
    for step in range(steps):
        if step % (STEPS[bits] * READ[bits]) == 0:
            (inputs,) = pen.put(LoadOp, [], SHARED, registers=4)
        if step % each == 0:
            weights, done = pen.put(FragmentOp, [there], SHARED, registers=4, event=True)
            read.append(done)
        uses = [weights, inputs] + ([] if sums is None else [sums])
        (sums,) = pen.put(MultiplyOp, uses, cost, registers=4)
    pen.put(ReleaseOp, read, EVENT)
    assert sums is not None
    _hand_over(pen, [sums], 2, special)


def _hand_over(pen: _Pen, sums: list[SSAValue], shuffles: int, special: bool) -> None:
    """Sums over the lanes, and to whoever adds them up."""
    (total,) = pen.put(ReduceOp, sums, times(SHUFFLE, shuffles), registers=2)
    if special:
        (total,) = pen.put(SpecialOp, [total], SPECIAL, registers=2)
    pen.put(StoreOp, [total], (2, 400))


def _product_fp32(pen: _Pen, t: GpuTiling, batch: int, special: bool) -> None:
    """The same of fp32 weights: a lane multiplies 4 columns of 4 rows by every slot's inputs."""
    (landed,) = pen.put(CopyOp, [], (t.chunk_bytes // 64, 700), event=True, role=LOADER_ROLE)
    (there,) = pen.put(WaitOp, [landed], EVENT, event=True)
    sums: list[SSAValue] = []
    read: list[SSAValue] = []
    for _ in range(-(-t.chunk_cols // K_BLOCK)):
        inputs = [pen.put(LoadOp, [], SHARED, registers=4)[0] for _ in range(batch)]
        before, sums = sums, []
        for row in range(ROWS):
            weights, done = pen.put(FragmentOp, [there], SHARED, registers=4, event=True)
            read.append(done)
            uses = [weights, *inputs, *before[row : row + 1]]
            cost = (4 * batch * FMA[0], 4 * batch * FMA[0] + 3 * FMA[1])
            sums += pen.put(MultiplyOp, uses, cost, registers=batch)
    pen.put(ReleaseOp, read, EVENT)
    _hand_over(pen, sums, 6 if batch == 1 else 4 * batch - 4, special)


def _attend(pen: _Pen, head_dim: int) -> None:
    """`POSITIONS` of the context for all query heads of a group: keys and values straight from
    device memory, scores and sums on the tensor cores, softmax between them.
    """
    steps = -(-head_dim // POSITIONS)
    keys = [pen.put(FragmentOp, [], DEVICE, registers=4)[0] for _ in range(steps)]
    values = [pen.put(FragmentOp, [], DEVICE, registers=4)[0] for _ in range(steps)]
    scores: SSAValue | None = None
    for key in keys:
        (queries,) = pen.put(LoadOp, [], SHARED, registers=2)
        uses = [key, queries] + ([] if scores is None else [scores])
        (scores,) = pen.put(MultiplyOp, uses, MMA, registers=4)
    assert scores is not None
    (most,) = pen.put(ReduceOp, [scores], times(SHUFFLE, 3), registers=4)
    (weights,) = pen.put(SpecialOp, [most], times(SPECIAL, 4), registers=2)
    for value in values:
        (sums,) = pen.put(MultiplyOp, [value, weights], MMA, registers=4)
        pen.put(StoreOp, [sums], (2, 30))


def _attend_fp32(pen: _Pen, head_dim: int, heads: int) -> None:
    """`POSITIONS_FP32` of the context for `heads` query heads, one behind the other."""
    parts = sixteens(head_dim)
    keys = [pen.put(FragmentOp, [], DEVICE, registers=4)[0] for _ in range(parts)]
    values = [pen.put(FragmentOp, [], DEVICE, registers=4)[0] for _ in range(parts)]
    for _ in range(heads):
        queries = [pen.put(LoadOp, [], SHARED, registers=4)[0] for _ in range(parts)]
        (score,) = pen.put(MultiplyOp, [*keys, *queries], times(FMA, 4 * parts), registers=1)
        (score,) = pen.put(ReduceOp, [score], times(SHUFFLE, 2), registers=1)
        (weights,) = pen.put(SpecialOp, [score], times(SPECIAL, 2), registers=2)
        cost = (8 * parts * FMA[0], 2 * FMA[1] + 8 * parts - 1)
        (sums,) = pen.put(MultiplyOp, [*values, weights], cost, registers=4 * parts)
        pen.put(StoreOp, [sums], (2, 30))


def positions(step: GpuStep) -> int:
    """Of the context, that a warp takes at a time."""
    return POSITIONS_FP32 if input_bytes(step.work) == 4 else POSITIONS


def _chunk(pen: _Pen, step: GpuStep, attend: bool, special: bool) -> None:
    """One chunk of a phase, in the arithmetic of the step's weights."""
    model, t = step.model, step.tiling
    wide = input_bytes(step.work) == 4
    if attend and wide:
        _attend_fp32(pen, model.head_dim, head_chunk(model, step.work))
    elif attend:
        _attend(pen, model.head_dim)
    elif wide:
        _product_fp32(pen, t, step.batch, special)
    else:
        _product(pen, t, special)


def expand(module: ModuleOp, step: GpuStep) -> None:
    """Fill the micro-operations of every phase that streams: those of one chunk (attention: of the
    positions that a warp takes at a time).
    """
    for phase, _ in phases(module):
        kinds = [op.kind.data for op in phase.operators()]
        if not phase.stream():
            continue
        block = Block()
        _chunk(_Pen(block), step, kinds[-1] == "attend", "gate" in kinds)
        phase.micro.add_block(block)


def micro_operations(phase: PhaseOp) -> list[MicroOp]:
    """A phase's micro-operations in their present order."""
    if not phase.micro.blocks:
        return []
    return [op for op in phase.micro.block.ops if isinstance(op, MicroOp)]


def nodes(ops: list[MicroOp]) -> list[Node]:
    """The DAG of micro-operations: uses of registers are data edges, of events resource edges."""
    at: dict[Operation, int] = {op: i for i, op in enumerate(ops)}
    out = []
    for op in ops:
        uses: list[int] = []
        after: list[int] = []
        for value in op.uses:
            owner = value.owner
            assert isinstance(owner, Operation)
            (uses if isinstance(value.type, RegisterType) else after).append(at[owner])
        out.append(Node(
            op.role.data + "." + UNITS[op.name], op.issue.value.data, op.latency.value.data,
            op.registers, tuple(uses), tuple(after),
        ))  # fmt: skip
    return out


def ahead(ops: list[MicroOp]) -> int:
    """The most fragments that are read before the multiplication that uses them is issued."""
    waiting: set[SSAValue] = set()
    most = 0
    for op in ops:
        if isinstance(op, FragmentOp):
            waiting.add(op.gives[0])
            most = max(most, len(waiting))
        elif isinstance(op, MultiplyOp):
            waiting -= set(op.uses)
    return most


def _span(ops: list[MicroOp], found: Order) -> int:
    """Cycles of a warp from its first look at the chunk until the last product is there."""
    begin = [found.start[i] for i, op in enumerate(ops) if isinstance(op, WaitOp)]
    end = [
        found.start[i] + op.latency.value.data
        for i, op in enumerate(ops) if isinstance(op, MultiplyOp)
    ]  # fmt: skip
    return max(end) - min(begin, default=0)


def order(module: ModuleOp, registers: int) -> None:
    """Sort each phase's micro-operations by list scheduling within `registers` of a thread; notes
    cycles, live registers and fragments read ahead. Raises `Infeasible` when the share is too
    small.
    """
    for phase, _ in phases(module):
        ops = micro_operations(phase)
        if not ops:
            continue
        found: Order = list_schedule(nodes(ops), registers)
        block = phase.micro.block
        for op in ops:
            block.detach_op(op)
        sorted_ops = [ops[i] for i in found.order]
        block.add_ops(sorted_ops)
        phase.properties["order"] = numbers([_span(ops, found), found.registers, ahead(sorted_ops)])


PARALLEL = {"shared": 1, "math": 4, "shuffle": 4, "special": 4, "sync": 4, "memory": 1, "copy": 1}


def chunk_cycles(phase: PhaseOp, warps: int) -> float:
    """Cycles in which an SM's consumers get through one chunk when all warps are at work: the
    busiest unit (each SM has one path to shared memory, and four of the others), or a warp's own
    chain divided by the warps that overlap.
    """
    taken: dict[str, int] = {}
    for op in micro_operations(phase):
        if op.role.data == CONSUMER_ROLE:
            unit = UNITS[op.name]
            taken[unit] = taken.get(unit, 0) + op.issue.value.data
    busiest = max((n / PARALLEL[unit] for unit, n in taken.items()), default=0.0)
    return max(busiest, span_of(phase) / warps)


def span_of(phase: PhaseOp) -> int:
    """Cycles that a warp takes for a chunk by itself, once ordered (0 before)."""
    return 0 if phase.order is None else phase.order.get_values()[0]
