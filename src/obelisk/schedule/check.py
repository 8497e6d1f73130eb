"""The judge of schedules: it knows the task table and nothing of how a schedule was found.

Takes a `Schedule`, which may be wrong in any way; gives a list of `Fault`s, empty when it is safe.
Obligations, for steps in a row (two are expanded, so that hazards between steps count):

1. Completeness: the programs run exactly the tasks of the step's operators, each once.
2. Capacity: pages lie inside the scratch memory, wide enough; no more cores than the machine has.
3. Progress: executing the programs under their waits ends (waits are monotone and signals are
   unconditional, so one execution decides for all of them).
4. Epochs: every signal of a counter in step s happens before every signal of it in step s+1, since
   C counts them on one variable.
5. Happens-before: every two accesses of one memory cell of which one writes are ordered by program
   order, barriers and *full* waits (a wait for fewer signals than there are orders nothing).
6. Aliases: a task writes no memory that it also reads, but a value that it updates in place (its
   body reads its inputs to the end).
7. Values: every read finds, in memory, what the defining order of tasks says it must find. This is
   what rejects a page that is reused early.

Happens-before is decided with vector clocks; without a race in one execution there is none in any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from obelisk.schedule.types import Await, Barrier, Item, Run, Schedule, Signal
from obelisk.tasks.dag import sequence, task_reads
from obelisk.tasks.kinds import TABLE, Region, Task, value_width

STEPS = 2
Array = Any


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken obligation: which (`completeness`, `capacity`, `progress`, `epoch`, `race`,
    `alias`, `value`), and where.
    """

    rule: str
    text: str


@dataclass(slots=True)
class _Clock:
    """Happens-before of the items executed so far."""

    cores: int
    now: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.now = [np.zeros(self.cores, np.int64) for _ in range(self.cores)]

    def tick(self, core: int) -> Array:
        """Advance a core; gives a copy of its clock."""
        self.now[core][core] += 1
        return self.now[core].copy()

    def join(self, core: int, other: Array) -> None:
        """What `other` knows, `core` knows now."""
        np.maximum(self.now[core], other, out=self.now[core])


class _Memory:
    """Cells of memory: who wrote each last, who has read it since, and what it holds."""

    def __init__(self, schedule: Schedule) -> None:
        s = schedule.shape
        self.schedule, self.s = schedule, s
        self._reads: dict[tuple[Task, int], tuple[Region, ...]] = {}
        self._writes: dict[Task, tuple[Region, ...]] = {}
        self.cuts = self._cuts()
        n = len(self.cuts)
        caches = 2 * s.model.layers * s.batch * s.model.kv_heads
        self.base = n
        self.writer_core = np.full(n + caches, -1, np.int64)
        self.writer_time = np.zeros(n + caches, np.int64)
        self.read_time = np.zeros((n + caches, schedule.cores), np.int64)
        self.content = np.zeros(n + caches, np.int64)
        self.cells: dict[Region, Array] = {}

    def reads(self, task: Task, core: int) -> tuple[Region, ...]:
        """What a task reads on a core."""
        found = self._reads.get((task, core))
        if found is None:
            found = self._reads[(task, core)] = task_reads(self.s, task, core)
        return found

    def writes(self, task: Task) -> tuple[Region, ...]:
        """What a task writes."""
        found = self._writes.get(task)
        if found is None:
            found = self._writes[task] = TABLE[task.kind].writes(self.s, task)
        return found

    def _regions(self) -> set[Region]:
        out: set[Region] = set()
        for core, program in enumerate(self.schedule.programs):
            for item in program:
                if isinstance(item, Run):
                    out.update(self.reads(item.task, core))
                    out.update(self.writes(item.task))
        return out

    def _spans(self, r: Region) -> list[tuple[int, int]]:
        page = self.schedule.pages.page(r.value)
        slots = range(self.s.batch) if r.slot < 0 else (r.slot,)
        return [(page.offset + b * page.stride + r.lo, page.offset + b * page.stride + r.hi)
                for b in slots]  # fmt: skip

    def _cuts(self) -> Array:
        ends = {
            e for r in self._regions() if r.value not in ("keys", "values")
            for span in self._spans(r) for e in span
        }  # fmt: skip
        return np.array(sorted(ends), np.int64)

    def where(self, r: Region) -> Array:
        """The cells of a region."""
        found = self.cells.get(r)
        if found is not None:
            return found
        s = self.s
        if r.value in ("keys", "values"):
            half = 0 if r.value == "keys" else s.model.layers * s.batch * s.model.kv_heads
            slots = range(s.batch) if r.slot < 0 else (r.slot,)
            out = [
                self.base + half + (r.layer * s.batch + b) * s.model.kv_heads + g
                for b in slots for g in range(r.lo, r.hi)
            ]  # fmt: skip
            cells = np.array(out, np.int64)
        else:
            parts = [
                np.arange(np.searchsorted(self.cuts, a), np.searchsorted(self.cuts, b))
                for a, b in self._spans(r)
            ]
            cells = np.concatenate(parts)
        self.cells[r] = cells
        return cells


def _structure(schedule: Schedule, max_cores: int | None) -> list[Fault]:
    """Obligations 1 and 2."""
    s, faults = schedule.shape, []
    ran = Counter(i.task for p in schedule.programs for i in p if isinstance(i, Run))
    want = Counter(sequence(s))
    for task in sorted((want - ran).keys(), key=str)[:4]:
        faults.append(Fault("completeness", f"{task} is never run"))
    for task in sorted((ran - want).keys(), key=str)[:4]:
        faults.append(Fault("completeness", f"{task} is run {ran[task]} times, not {want[task]}"))
    if schedule.cores != s.tiling.cores:
        faults.append(Fault("capacity", f"{schedule.cores} programs for {s.tiling.cores} cores"))
    if max_cores is not None and schedule.cores > max_cores:
        faults.append(
            Fault("capacity", f"{schedule.cores} cores in use, the machine has {max_cores}")
        )
    pages = dict(schedule.pages.pages)
    for value, width in value_width(s).items():
        page = pages.get(value)
        if page is None:
            faults.append(Fault("capacity", f"{value} has no page"))
            continue
        end = page.offset + (s.batch - 1) * page.stride + page.width
        if page.width < width or page.stride < page.width or page.offset < 0:
            faults.append(Fault("capacity", f"the page of {value} is {page.width} wide ({width})"))
        if page.offset % 16 or page.stride % 16:
            faults.append(Fault("capacity", f"the page of {value} begins within a cache line"))
        if end > schedule.pages.elements:
            faults.append(
                Fault("capacity", f"{value} ends at {end}, scratch at {schedule.pages.elements}")
            )
    if any(
        t.core >= 0 and t.core != c
        for c, p in enumerate(schedule.programs) for i in p if isinstance(i, Run)
        for t in (i.task,)
    ):  # fmt: skip
        faults.append(Fault("completeness", "a core's own norm is run by another core"))
    return faults


class _Execution:
    """One execution of the programs for `STEPS` steps, judging as it goes."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.s = schedule, schedule.shape
        self.clock = _Clock(schedule.cores)
        self.memory = _Memory(schedule)
        self.faults: list[Fault] = []
        self.totals = Counter(
            i.counter for p in schedule.programs for i in p if isinstance(i, Signal)
        )
        self.arrived: dict[tuple[int, str], list[Array]] = {}
        self.barrier: dict[tuple[int, str], dict[int, Array]] = {}
        self.last: dict[str, tuple[int, Array]] = {}
        self.want = self._expected()

    def _expected(self) -> Mapping[tuple[int, Task], list[Array]]:
        """For every task, what each read must hold: ids of writers, cell by cell."""
        s, cells = self.s, self.memory
        owner = {
            i.task: c for c, p in enumerate(self.schedule.programs) for i in p if isinstance(i, Run)
        }
        # The same cell structure, but every value in memory of its own.
        held: dict[str, Array] = {}
        none = np.zeros(len(cells.content), np.int64)
        out: dict[tuple[int, Task], list[Array]] = {}
        self.ids: dict[tuple[int, Task], int] = {}
        for step in range(STEPS):
            for task in sequence(s):
                core = owner.get(task, 0)
                ident = self.ids[(step, task)] = len(self.ids) + 1
                reads = cells.reads(task, core)
                out[(step, task)] = [held.get(r.value, none)[cells.where(r)] for r in reads]
                for w in cells.writes(task):
                    held.setdefault(w.value, none.copy())[cells.where(w)] = ident
        return out

    def _blocked(self, step: int, core: int, item: Item) -> bool:
        match item:
            case Await(counter, count):
                return len(self.arrived.get((step, counter), ())) < count
            case Barrier(name):
                met = self.barrier.setdefault((step, name), {})
                if core not in met:
                    met[core] = self.clock.tick(core)
                return len(met) < self.schedule.cores
            case _:
                return False

    def _run(self, step: int, core: int, task: Task) -> None:
        time, memory = self.clock.tick(core), self.memory
        ident = self.ids.get((step, task), 0)
        writes = memory.writes(task)
        want = self.want.get((step, task), [])
        for region, expected in zip(memory.reads(task, core), want, strict=False):
            cells = memory.where(region)
            self._order(cells, time, core, task, region, False)
            if not np.array_equal(memory.content[cells], expected):
                self._fault("value", f"{task} in step {step} reads {region.value} that is not the "
                            "one its producer left there")  # fmt: skip
            memory.read_time[cells, core] = time[core]
        self._aliases(task, core, writes)
        for region in writes:
            cells = memory.where(region)
            self._order(cells, time, core, task, region, True)
            memory.writer_core[cells] = core
            memory.writer_time[cells] = time[core]
            memory.read_time[cells] = 0
            memory.content[cells] = ident

    def _aliases(self, task: Task, core: int, writes: Sequence[Region]) -> None:
        """Obligation 6."""
        for read in self.memory.reads(task, core):
            for write in writes:
                if read.value != write.value and np.intersect1d(
                    self.memory.where(read), self.memory.where(write)
                ).size:  # fmt: skip
                    self._fault("alias", f"{task} writes {write.value} over its own {read.value}")

    def _order(
        self, cells: Array, time: Array, core: int, task: Task, region: Region, write: bool
    ) -> None:
        """Obligation 5 for one access."""
        memory = self.memory
        writers = memory.writer_core[cells]
        known = time[np.maximum(writers, 0)]
        if np.any((writers >= 0) & (memory.writer_time[cells] > known)):
            self._fault("race", f"{task} and an earlier writer of {region.value} are not ordered")
        if write and np.any(memory.read_time[cells] > time[None, :]):
            self._fault("race", f"{task} overwrites {region.value} while it may still be read")

    def _fault(self, rule: str, text: str) -> None:
        if len(self.faults) < 16:
            self.faults.append(Fault(rule, text))

    def _pass(self, step: int, core: int, item: Item) -> None:
        match item:
            case Run(task):
                self._run(step, core, task)
            case Signal(counter):
                time = self.clock.tick(core)
                self._epoch(step, counter, time)
                self.arrived.setdefault((step, counter), []).append(time)
            case Await(counter, count):
                if count >= self.totals[counter] > 0:
                    for other in self.arrived[(step, counter)]:
                        self.clock.join(core, other)
                self.clock.tick(core)
            case Barrier(name):
                for other in self.barrier[(step, name)].values():
                    self.clock.join(core, other)
                self.clock.tick(core)

    def _epoch(self, step: int, counter: str, time: Array) -> None:
        """Obligation 4: all signals of the step before are known to this one."""
        if step == 0:
            return
        earlier = self.arrived.get((step - 1, counter), [])
        complete = len(earlier) == self.totals[counter]
        if not complete or any(np.any(e > time) for e in earlier):
            self._fault("epoch", f"a signal of {counter} may be counted in the step before")

    def run(self) -> list[Fault]:
        """Execute until all is done or nothing moves."""
        flat: list[list[tuple[int, Item]]] = [
            [(step, i) for step in range(STEPS) for i in p] for p in self.schedule.programs
        ]
        at = [0] * len(flat)
        moved = True
        while moved:
            moved = False
            for core, items in enumerate(flat):
                while at[core] < len(items):
                    step, item = items[at[core]]
                    if self._blocked(step, core, item):
                        break
                    self._pass(step, core, item)
                    at[core] += 1
                    moved = True
        for core, items in enumerate(flat):
            if at[core] < len(items):
                step, item = items[at[core]]
                self._fault("progress", f"core {core} waits for ever in step {step} at {item}")
        return self.faults


def check(schedule: Schedule, max_cores: int | None = None) -> list[Fault]:
    """All faults found (at most a handful of each rule); empty means the schedule is safe.

    `max_cores` is the machine's number of cores. Never raises for a bad schedule.
    """
    faults = _structure(schedule, max_cores)
    # Without its tasks and pages there is nothing to execute.
    return faults or _Execution(schedule).run()
