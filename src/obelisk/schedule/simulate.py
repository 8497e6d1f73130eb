"""The simulator: what a schedule costs on a machine, without running it.

Takes a `Schedule` and a `Machine`; gives a `Timeline`. Each core runs its program; a task costs the
longer of its stream (from memory, at the core's share of the bandwidth) and its arithmetic, plus
what it moves within caches; a wait costs a hand-over between cores. It ranks schedules; it does not
judge them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from obelisk.ir import DType
from obelisk.machine import Machine
from obelisk.schedule.types import Await, Barrier, Item, Run, Schedule, Signal
from obelisk.tasks.kinds import TABLE, MicroOp, Task, TaskKind
from obelisk.tasks.shape import StepShape

HANDOVER = 120e-9  # a cache line that another core wrote, seen by a poll
SIGNAL = 25e-9  # an atomic addition
CALL = 40e-9  # entering a task, its loops' ends
SPECIAL_CYCLES = 2.5  # an exponential, per element, in vectors
VECTOR_CYCLES = {4: 0.6, 2: 1.1, 1: 1.4, 0: 1.4}  # load, widen and multiply a vector, by bytes
STREAM_SHARE = {4: 0.94, 8: 1.0}  # of the bandwidth, by rows of a panel: measured on Zen 3
CHUNK_CYCLES = 2.0  # the input's vector and the loop, for each chunk of a panel


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step.

    Attributes:
        seconds: when the last core ends.
        busy: seconds that each core spends in tasks.
        waits: seconds that each core waits.
        spans: (core, task, start, end) in seconds, in order of starts.
    """

    seconds: float
    busy: tuple[float, ...]
    waits: tuple[float, ...]
    spans: tuple[tuple[int, Task, float, float], ...]


def task_seconds(s: StepShape, task: Task, machine: Machine, position: int) -> float:
    """Seconds of one task on one core, all cores busy, at a context of `position`."""
    cores = max(1, s.tiling.cores)
    memory = min(machine.core_bandwidth, machine.bandwidth / cores)
    near = machine.caches[-1].bandwidth if machine.caches else machine.core_bandwidth
    flops = machine.peak(DType.F32) / machine.cores / 2  # half of the peak: one load per product
    stream = compute = moved = 0.0
    for m in TABLE[task.kind].micro(s, task, position):
        match m.op:
            case MicroOp.STREAM:
                share = 1.0 if task.kind is TaskKind.ATTEND else STREAM_SHARE[s.tiling.panel]
                stream += m.amount / memory / share
                if task.kind is not TaskKind.ATTEND:
                    size = {
                        TaskKind.EMBED: s.work.outer_bytes, TaskKind.HEAD: s.work.head_bytes
                    }.get(task.kind, s.work.weight_bytes)  # fmt: skip
                    vectors = m.amount / size / machine.lanes
                    each = VECTOR_CYCLES[int(size)] + CHUNK_CYCLES / s.tiling.panel
                    compute += vectors * each * (s.batch + 1) / 2 / machine.clock
            case MicroOp.MULTIPLY:
                compute += m.amount / flops if task.kind is TaskKind.ATTEND else 0.0
            case MicroOp.SPECIAL:
                compute += m.amount * SPECIAL_CYCLES / machine.clock
            case MicroOp.REDUCE:
                compute += m.amount / machine.lanes / machine.clock
            case MicroOp.LOAD | MicroOp.STORE:
                moved += m.amount / near
    return CALL + max(stream, compute) + moved


class _Cores:
    """Cores in simulated time."""

    def __init__(self, schedule: Schedule, machine: Machine, position: int) -> None:
        self.schedule, self.machine, self.position = schedule, machine, position
        n = schedule.cores
        self.now, self.busy, self.waits = [0.0] * n, [0.0] * n, [0.0] * n
        self.arrivals: dict[str, list[float]] = {}
        self.met: dict[str, dict[int, float]] = {}
        self.spans: list[tuple[int, Task, float, float]] = []
        self.cost: dict[tuple[object, ...], float] = {}

    def _seconds(self, task: Task) -> float:
        key = (task.kind, task.lo, task.hi, task.split)
        if key not in self.cost:
            shape = self.schedule.shape
            self.cost[key] = task_seconds(shape, task, self.machine, self.position)
        return self.cost[key]

    def _until(self, core: int, moment: float) -> None:
        self.waits[core] += max(0.0, moment - self.now[core])
        self.now[core] = max(self.now[core], moment)

    def step(self, core: int, item: Item) -> bool:
        """Run an item; False when it cannot yet."""
        match item:
            case Run(task):
                start = self.now[core]
                self.now[core] += self._seconds(task)
                self.busy[core] += self.now[core] - start
                self.spans.append((core, task, start, self.now[core]))
            case Signal(name):
                self.now[core] += SIGNAL
                self.arrivals.setdefault(name, []).append(self.now[core])
            case Await(name, count):
                there = sorted(self.arrivals.get(name, []))
                if len(there) < count:
                    return False
                self._until(core, there[count - 1] + HANDOVER)
            case Barrier(name):
                met = self.met.setdefault(name, {})
                met.setdefault(core, self.now[core] + SIGNAL)
                if len(met) < self.schedule.cores:
                    return False
                self._until(core, max(met.values()) + HANDOVER)
        return True


def simulate(schedule: Schedule, machine: Machine, position: int | None = None) -> Timeline:
    """One step at a context of `position` (default: half of the plan's). A schedule that stops
    moving gives infinite seconds.
    """
    at = max(1, schedule.shape.work.context // 2) if position is None else position
    cores = _Cores(schedule, machine, at)
    place = Counter[int]()
    moved = True
    while moved:
        moved = False
        for core, program in enumerate(schedule.programs):
            while place[core] < len(program) and cores.step(core, program[place[core]]):
                place[core] += 1
                moved = True
    done = all(place[c] == len(p) for c, p in enumerate(schedule.programs))
    seconds = max(cores.now) if done else float("inf")
    spans = tuple(sorted(cores.spans, key=lambda x: (x[2], x[0])))
    return Timeline(seconds, tuple(cores.busy), tuple(cores.waits), spans)
