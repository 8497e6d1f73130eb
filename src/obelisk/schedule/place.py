"""Placement: which core runs which tile, in what order, and the waits that keep it right.

Takes a `StepShape` and a kind of synchronisation; gives a `Schedule`. Tiles go to cores in
contiguous runs of nearly equal work, attention to the core that made its head group where that
balances; a wait is left out where program order gives it for nothing. Nothing here is trusted:
`check` judges the result on its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from obelisk.schedule.pages import plan_pages
from obelisk.schedule.types import Await, Barrier, Item, Run, Schedule, Signal, Sync
from obelisk.tasks.dag import Operator, operators
from obelisk.tasks.kinds import TABLE, MicroOp, Task, TaskKind
from obelisk.tasks.shape import StepShape

_WRITE_X = frozenset({TaskKind.O, TaskKind.DOWN, TaskKind.SAMPLE})
_NORMS = frozenset({TaskKind.NORM_IN, TaskKind.NORM_MID, TaskKind.NORM_FINAL})


def work(s: StepShape, task: Task) -> float:
    """What placement balances: bytes streamed, plus bytes moved within caches at a quarter."""
    micro = TABLE[task.kind].micro(s, task, s.work.context)
    return sum(
        m.amount * (1.0 if m.op is MicroOp.STREAM else 0.25)
        for m in micro
        if m.op in (MicroOp.STREAM, MicroOp.LOAD, MicroOp.STORE)
    )


def assign(s: StepShape, op: Operator) -> list[list[Task]]:
    """The tasks of one operator for each core: contiguous runs whose ends are nearest to equal
    shares of the work; a copied norm goes to its own core.
    """
    cores = s.tiling.cores
    if op.kind in _NORMS and s.tiling.replicate_norm:
        return [[t for t in op.tasks if t.core == c] for c in range(cores)]
    tasks = list(op.tasks)
    if op.kind in (TaskKind.ATTEND, TaskKind.COMBINE):  # heads together, so that they stay put
        tasks.sort(key=lambda t: (t.lo, t.slot, t.split))
    weights = [work(s, t) for t in tasks]
    total, done = sum(weights) or 1.0, 0.0
    out: list[list[Task]] = [[] for _ in range(cores)]
    for task, weight in zip(tasks, weights, strict=True):
        middle = (done + weight / 2) / total
        out[min(cores - 1, int(middle * cores))].append(task)
        done += weight
    return out


class _Builder:
    """Programs under construction."""

    def __init__(self, s: StepShape, sync: Sync) -> None:
        self.s, self.sync = s, sync
        self.programs: list[list[Item]] = [[] for _ in range(s.tiling.cores)]
        self.previous: tuple[Operator, list[list[Task]]] | None = None
        self.signals: dict[str, int] = {}
        self.seen: list[set[tuple[str, int]]] = [set() for _ in range(s.tiling.cores)]

    def _groups(self, op: Operator, nxt: TaskKind, task: Task) -> list[str]:
        """The counters that a producing task belongs to: one for each head group before attention,
        else one for the operator.
        """
        base = f"{op.kind}@{op.layer}"
        if nxt is TaskKind.ATTEND and op.kind in (TaskKind.QKV, TaskKind.ROPE):
            return [f"{base}.{g}" for g in range(task.lo, task.hi)]
        return [base]

    def _needs(self, op: Operator, nxt: TaskKind, task: Task) -> list[str]:
        base = f"{op.kind}@{op.layer}"
        if nxt is TaskKind.ATTEND and op.kind in (TaskKind.QKV, TaskKind.ROPE):
            return [f"{base}.{task.lo}"]
        return [base]

    def add(self, op: Operator, placed: Sequence[Sequence[Task]]) -> None:
        """Append one operator, waits first."""
        if self.previous is not None and len(self.programs) > 1 and not self._private(op):
            if self.sync is Sync.BARRIER:
                for program in self.programs:
                    program.append(Barrier(f"{op.kind}@{op.layer}"))
            else:
                self._counters(op, placed)
        for program, tasks in zip(self.programs, placed, strict=True):
            program.extend(Run(t) for t in tasks)
        self.previous = (op, [list(p) for p in placed])

    def _private(self, op: Operator) -> bool:
        """Whether every core reads only what it made itself (products after copied norms)."""
        assert self.previous is not None
        return self.previous[0].kind in _NORMS and self.s.tiling.replicate_norm

    def _counters(self, op: Operator, placed: Sequence[Sequence[Task]]) -> None:
        assert self.previous is not None
        before, made = self.previous
        owners: dict[str, set[int]] = {}
        for core, tasks in enumerate(made):
            for task in tasks:
                for name in self._groups(before, op.kind, task):
                    owners.setdefault(name, set()).add(core)
        if op.kind in _WRITE_X and self.s.tiling.replicate_norm:
            # A core without a tile may still be reading x for its copy of the norm: all report.
            owners = {name: set(range(len(self.programs))) for name in owners}
        needs = [{n for t in tasks for n in self._needs(before, op.kind, t)} for tasks in placed]
        # A counter that only its own core waits for is program order: it needs no signal.
        used = {n for core, ns in enumerate(needs) for n in ns if owners[n] != {core}}
        for core, program in enumerate(self.programs):
            program.extend(Signal(n) for n in sorted(used) if core in owners[n])
        for core, program in enumerate(self.programs):
            for name in sorted(needs[core] & used):
                if owners[name] != {core}:
                    program.append(Await(name, len(owners[name])))


def place(s: StepShape, sync: Sync) -> Schedule:
    """The schedule of a step under these choices."""
    builder = _Builder(s, sync)
    for op in operators(s):
        builder.add(op, assign(s, op))
    programs = tuple(tuple(p) for p in builder.programs)
    return Schedule(s, sync, programs, plan_pages(s, sync))
