"""From the final module to a `GpuSchedule`: items, rings and pages for every block.

Takes a module after all passes; gives the records that the judge, the simulator and the virtual
machine work on. Who computes what comes from `bounds` and `turn`, the waits from `tile.sync`, pages
from `tile.page`, copies from `parts`. Rings are made once for each way to have units, and shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects.builtin import ModuleOp

from obelisk.base.errors import Infeasible
from obelisk.schedule.gpu import EdgeSync
from obelisk.schedule.gpu_tasks import TABLE, GpuKind, GpuStep, GpuTask
from obelisk.schedule.gpu_types import (
    Chunk,
    Compute,
    Copy,
    DevicePage,
    GpuItem,
    GpuPages,
    GpuProgram,
    GpuSchedule,
    Join,
    Meet,
    Poll,
    Ring,
    SharedPage,
    Take,
)
from obelisk.schedule.ir.dialects import PageOp, PhaseOp
from obelisk.schedule.ir.memory import syncs
from obelisk.schedule.ir.passes import ALONE, phases, repeat_of


@dataclass(frozen=True, slots=True)
class _Phase:
    """What the lowering needs of a phase."""

    kind: GpuKind
    bounds: tuple[int, ...]
    turn: int
    joins: str  # the value that its join reads ("" none, "embed" the first layer's)
    tagged: frozenset[str]  # phases whose words it polls for
    barrier: frozenset[str]  # phases behind which all blocks meet


def _phase(phase: PhaseOp, tagged: dict[str, set[str]], barrier: dict[str, set[str]]) -> _Phase:
    name = phase.phase.data
    if phase.bounds is None or "+" in name or name not in set(GpuKind):
        raise Infeasible(f"the CUDA megakernel has no phase {name!r}: it is ranked, never emitted")
    first = phase.operators()[0]
    joins = ""
    if first.kind.data == "join":
        joins = "o" if name == "up" else "down"
    turn = 0 if phase.turn is None else phase.turn.value.data
    return _Phase(
        GpuKind(name), tuple(phase.bounds.get_values()), turn, joins,
        frozenset(tagged.get(name, ())), frozenset(barrier.get(name, ())),
    )  # fmt: skip


class _Builder:
    """Programs of all blocks under construction."""

    def __init__(self, step: GpuStep, inner: Sequence[_Phase], head: _Phase) -> None:
        self.step, self.inner, self.head = step, inner, head
        self.blocks = step.tiling.blocks
        self.programs: list[list[GpuItem]] = [[] for _ in range(self.blocks)]
        self.rings: dict[tuple[tuple[int, int], ...], Ring] = {}

    def _alone(self, phase: _Phase, layer: int, core: int) -> GpuTask | None:
        if not phase.joins:
            return None
        if phase.kind is GpuKind.QKV and layer == 0:
            return GpuTask(GpuKind.EMBED, core=core)
        at = {GpuKind.QKV: layer - 1, GpuKind.HEAD: self.step.model.layers - 1}
        return GpuTask(GpuKind.JOIN, at.get(phase.kind, layer), core=core, after=phase.joins)

    def _tasks(self, phase: _Phase, layer: int, core: int) -> list[GpuTask]:
        n = layer if layer >= 0 else self.step.model.layers
        place = (core + n * phase.turn) % self.blocks
        if phase.kind is GpuKind.ATTEND:  # cells are dealt one by one
            end = phase.bounds[-1]
            return [
                GpuTask(phase.kind, layer, i, i + 1) for i in range(place, end, self.blocks)
            ]  # fmt: skip
        low, high = phase.bounds[place], phase.bounds[place + 1]
        # A block without a tile of the vocabulary still says that it has no best.
        some = low < high or phase.kind is GpuKind.HEAD
        return [GpuTask(phase.kind, layer, low, high)] if some else []

    def _run(self, core: int, task: GpuTask, tagged: frozenset[str]) -> None:
        """Append a task behind polls for the words that it reads from phases with tags."""
        for region in TABLE[task.kind].reads(self.step, task, core):
            if region.value in tagged:
                self.programs[core].append(Poll(region))
        self.programs[core].append(Compute(task))

    def add(self, phase: _Phase, layer: int) -> None:
        """Append a phase to all blocks."""
        for core in range(self.blocks):
            before = phase.barrier - (
                {"down"} if phase.kind is GpuKind.QKV and layer == 0 else set()
            )
            for name in sorted(before):
                self.programs[core].append(Meet(f"{name}@{phase.kind}@{layer}"))
            alone = self._alone(phase, layer, core)
            if alone is not None:
                self._run(core, alone, phase.tagged)
            for task in self._tasks(phase, layer, core):
                self._run(core, task, phase.tagged)

    def build(self) -> tuple[tuple[GpuProgram, ...], tuple[GpuProgram, ...]]:
        """The whole step, and one of a prompt."""
        for layer in range(self.step.model.layers):
            for phase in self.inner:
                self.add(phase, layer)
        prompt = tuple((*p, Meet("step")) for p in self.programs)
        self.add(self.head, -1)
        for core in range(self.blocks):
            task = GpuTask(GpuKind.CHOOSE, core=core)
            if self.step.tiling.sync("head") is EdgeSync.BARRIER:
                self.programs[core].append(Meet("head@choose"))
            self._run(core, task, frozenset({"head"}))
        return tuple(tuple(p) for p in self.programs), prompt

    def ring(self, program: GpuProgram) -> Ring:
        """The ring of a block: one object for all blocks with as many units everywhere."""
        step = self.step
        tasks = tuple(
            (i.task.hi - i.task.lo, step.chunks(i.task.kind))
            for i in program if isinstance(i, Compute) and step.chunks(i.task.kind)
        )  # fmt: skip
        found = self.rings.get(tasks)
        if found is None:
            t = step.tiling
            found = self.rings[tasks] = make_ring(tasks, t.stages, t.in_flight, t.warps)
        return found


def make_ring(
    tasks: tuple[tuple[int, int], ...], stages: int, flight: int, warps: int
) -> Ring:  # fmt: skip
    """Chunk n goes to slot n mod stages; chunk i of a task is multiplied by warp i mod warps."""
    chunks = [
        Chunk(task, unit, part)
        for task, (units, parts) in enumerate(tasks)
        for unit in range(units) for part in range(parts)
    ]  # fmt: skip
    loader = tuple(
        Copy(k % stages, chunk, k // stages, max(0, k + 1 - flight))
        for k, chunk in enumerate(chunks)
    )
    programs: list[list[Take | Join]] = [[] for _ in range(warps)]
    at = 0
    for task, (units, parts) in enumerate(tasks):
        for k in range(at, at + units * parts):
            programs[(k - at) % warps].append(Take(k % stages, chunks[k], k // stages + 1))
        at += units * parts
        for program in programs:
            program.append(Join(task))
    return Ring(loader, tuple(tuple(p) for p in programs), tasks)


def _pages(module: ModuleOp) -> GpuPages:
    device, shared, words, size = [], [], 0, 0
    for op in module.body.block.ops:
        if not isinstance(op, PageOp):
            continue
        offset, span, copies = op.offset.value.data, op.size.value.data, op.copies.value.data
        if op.memory.data == "device":
            device.append((op.value.data, DevicePage(offset, span, copies)))
            words = max(words, offset + span * copies)
        else:
            page = SharedPage(offset, span, op.first.value.data, op.last.value.data)
            shared.append((op.value.data, page))
            size = max(size, offset + span)
    return GpuPages(tuple(device), tuple(shared), words, size)


def lower(module: ModuleOp, step: GpuStep) -> GpuSchedule:
    """The schedule of a module. Raises `Infeasible` for a fusion that no emitter takes."""
    tagged: dict[str, set[str]] = {}
    barrier: dict[str, set[str]] = {}
    for sync in syncs(module):
        if sync.form.data == "program":
            continue
        tagged.setdefault(sync.after.data, set()).add(sync.before.data)
        if sync.form.data == "barrier":
            barrier.setdefault(sync.after.data, set()).add(sync.before.data)
    made = {
        p.phase.data: _phase(p, tagged, barrier)
        for p, _ in phases(module) if p.phase.data not in ALONE
    }  # fmt: skip
    inner = [p.phase.data for p in repeat_of(module).body.block.ops if isinstance(p, PhaseOp)]
    builder = _Builder(step, [made[n] for n in inner], made["head"])
    programs, prompt = builder.build()
    rings = tuple(builder.ring(p) for p in programs)
    return GpuSchedule(step, programs, rings, _pages(module), prompt)
