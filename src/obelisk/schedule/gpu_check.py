"""The judge of GPU schedules: it knows the table of tasks and nothing of how a schedule was found.

Takes a `GpuSchedule`, which may be wrong in any way, and a machine; gives a list of `Fault`s, empty
when it is safe. Obligations:

1. Completeness: the blocks compute exactly the units of the step, each once; what every block does
   for itself (embed, join, choose) it does, itself, once.
2. Capacity: shared memory, threads and registers of a block fit the machine; all blocks are
   resident at a time (one an SM), for they wait for each other; pages lie inside their memories,
   and shared pages that are held at the same time do not overlap.
3. Progress: the items of a few steps in a row, executed under their waits, end. Where there are
   steps of a prompt, every pair of neighbours is among them (`sequence_of`).
4. Happens-before: two accesses of one word of which one writes are ordered by program order, grid
   barriers, and polls (who reads a word with its tag knows what its writer knew). Reading asks for
   more, since tagged words are stored without a fence: each word that another block wrote must have
   been polled itself, or lie behind a barrier.
   A mark need not be unique: it differs from that of the words' use before, no more. So the use
   before must be known to be written when a block begins to look, or it could take the one before
   that for the new one.
5. Values: every read finds what the defining order of tasks says it must find.
6. Roles: a grid barrier is met by the consumers of every block; the loader meets nobody (measured:
   a loader that stops at barriers costs 17%), and so cannot be waited for.
7. Rings (`gpu_ring`): slots reused only after their release, copies in flight bounded, every chunk
   copied once and multiplied once, no deadlock between loader and warps.

Rings and items are judged apart. That suffices: a loader waits for its own block's warps alone, so
a state in which nothing moves would either be one of the items alone (obligation 3, where takes are
taken to succeed) or of one ring alone (obligation 7, where items are taken to succeed).

Layers are alike: adding `GpuTiling.rotate` to every block's number maps the programs of a layer and
the next one onto those of the two behind them, so a pair of neighbouring layers stands for all of
them. Between the last layer and the first of the next step every block reads a word of every block
(`choose`), whatever the depth. So `shallow` gives a step of three or four layers (as even or odd as
the model's, since copies of words are used in turn) that is safe if and only if the whole one is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from obelisk.machine import Machine
from obelisk.schedule.check import Fault
from obelisk.schedule.gpu_ring import ring_faults
from obelisk.schedule.gpu_tasks import (
    PRIVATE,
    TABLE,
    GpuKind,
    GpuStep,
    GpuTask,
    before,
    phases,
)
from obelisk.schedule.gpu_types import CONSUMER, Compute, GpuProgram, GpuSchedule, Meet, Poll
from obelisk.tasks.kinds import Region

Array = Any
_MOST = 16
_Accesses = tuple[tuple[Region, slice], ...]


def block_faults(schedule: GpuSchedule, machine: Machine) -> list[Fault]:
    """Obligation 2, without pages: does the grid fit, all of it at once?"""
    t, out = schedule.step.tiling, []
    need = schedule.pages.shared_bytes
    if schedule.blocks != t.blocks:
        out.append(Fault("capacity", f"{schedule.blocks} programs for {t.blocks} blocks"))
    if need > machine.shared_bytes:
        out.append(
            Fault("capacity", f"{need} bytes of shared memory, a block has {machine.shared_bytes}")
        )
    if t.threads > machine.threads_per_block:
        out.append(
            Fault("capacity", f"{t.threads} threads, a block has {machine.threads_per_block}")
        )
    resident = machine.cores * max(
        0, min(machine.blocks_per_core, machine.shared_per_core // max(1, need + 1024),
               machine.threads_per_core // max(1, t.threads))
    )  # fmt: skip
    if schedule.blocks > resident:
        out.append(
            Fault("capacity", f"{schedule.blocks} blocks wait for each other, {resident} are "
                  f"resident at a time on {machine.name}")
        )  # fmt: skip
    return out


def page_faults(schedule: GpuSchedule) -> list[Fault]:
    """Obligation 2, pages."""
    out, pages = [], schedule.pages
    spans = []
    for value, width in schedule.step.widths.items():
        page = pages.device_page(value)
        if page is None:
            out.append(Fault("capacity", f"{value} has no page"))
            continue
        if page.width < width:
            out.append(Fault("capacity", f"the page of {value} is {page.width} words wide"))
        end = page.offset + page.width * max(1, page.copies)
        if page.copies < 1 or page.offset < 0 or end > pages.words:
            out.append(Fault("capacity", f"{value} ends at word {end} of {pages.words}"))
        if page.offset % 2:
            out.append(Fault("capacity", f"the page of {value} begins within 16 bytes"))
        spans.append((page.offset, end, value))
    shared = [(p.offset, p.offset + p.size, p, n) for n, p in pages.shared]
    for i, (low, high, held, name) in enumerate(shared):
        if low < 0 or high > pages.shared_bytes or low % 16:
            out.append(Fault("capacity", f"shared page {name} lies at {low} to {high}"))
        for low2, high2, other, name2 in shared[i + 1 :]:
            alive = held.first <= other.last and other.first <= held.last
            if alive and low < high2 and low2 < high:
                out.append(Fault("alias", f"shared pages {name} and {name2} are held at once"))
    names = {n for n, _ in pages.shared}
    if "ring" not in names:
        out.append(Fault("capacity", "the ring has no shared page"))
    else:
        ring = next(p for n, p in pages.shared if n == "ring")
        t = schedule.step.tiling
        if ring.size < t.stages * t.chunk_bytes:
            out.append(Fault("capacity", f"a ring of {ring.size} bytes for {t.stages} slots"))
    return out


def _expected(step: GpuStep, core: int) -> Counter[GpuTask]:
    out: Counter[GpuTask] = Counter()
    for kind, layer in phases(step):
        alone = before(step, kind, layer, core)
        if alone is not None:
            out[alone] += 1
    out[GpuTask(GpuKind.CHOOSE, core=core)] += 1
    return out


def sequence_of(schedule: GpuSchedule) -> tuple[tuple[GpuProgram, ...], ...]:
    """The programs of the steps that are executed in a row."""
    whole, prompt = schedule.programs, schedule.prompt
    return (whole, whole, prompt, prompt, whole) if prompt else (whole, whole)


_HEAD = (GpuKind.HEAD, GpuKind.CHOOSE)


def prompt_faults(schedule: GpuSchedule) -> list[Fault]:
    """Obligation 1 for the steps of a prompt: the tasks of the others up to the head."""
    if not schedule.prompt:
        return []
    if len(schedule.prompt) != schedule.blocks:
        return [Fault("completeness", f"{len(schedule.prompt)} blocks run a prompt's steps")]
    last = schedule.step.model.layers - 1
    out = []
    for core, (whole, prompt) in enumerate(zip(schedule.programs, schedule.prompt, strict=True)):
        tasks = [i.task for i in whole if isinstance(i, Compute) and i.task.kind not in _HEAD]
        if tasks[-1:] == [GpuTask(GpuKind.JOIN, last, core=core, after="down")]:
            tasks.pop()
        if [i.task for i in prompt if isinstance(i, Compute)] != tasks:
            out.append(Fault("completeness", f"block {core} runs other tasks in a prompt's step"))
        out += [
            Fault("role", f"block {core} meets as {i.role} at {i.name}")
            for i in prompt if isinstance(i, Meet) and i.role != CONSUMER
        ]  # fmt: skip
    return out[:_MOST]


def structure_faults(schedule: GpuSchedule) -> list[Fault]:
    """Obligation 1, and barriers' roles (6)."""
    step, out = schedule.step, []
    runs: dict[tuple[GpuKind, int], list[tuple[int, int]]] = {p: [] for p in phases(step)}
    for core, program in enumerate(schedule.programs):
        mine: Counter[GpuTask] = Counter()
        for item in program:
            if isinstance(item, Meet) and item.role != CONSUMER:
                out.append(Fault("role", f"block {core} meets as {item.role} at {item.name}"))
            if not isinstance(item, Compute):
                continue
            t = item.task
            if t.core >= 0 or t.kind in (GpuKind.EMBED, GpuKind.JOIN, GpuKind.CHOOSE):
                mine[t] += 1
            elif (t.kind, t.layer) in runs:
                runs[(t.kind, t.layer)].append((t.lo, t.hi))
            else:
                out.append(Fault("completeness", f"{t} is not of this step"))
        want = _expected(step, core)
        for task in (want - mine) | (mine - want):
            out.append(
                Fault("completeness", f"block {core} runs {task} {mine[task]} times, not "
                      f"{want[task]}")
            )  # fmt: skip
    for (kind, layer), cuts in runs.items():
        at, end = 0, step.units[kind]
        for low, high in sorted(cuts):
            if low != at or high < low:
                break
            at = high
        else:
            if at == end:
                continue
        out.append(Fault("completeness", f"{kind}@{layer}: unit {at} of {end} is missing or twice"))
    return out[:_MOST]


class _Words:
    """Cells of memory: what is between two neighbouring ends of regions is one cell."""

    def __init__(self, schedule: GpuSchedule) -> None:
        self.schedule, self.step = schedule, schedule.step
        ends: dict[tuple[str, int], set[int]] = {}
        regions = set()
        for programs in (schedule.programs, schedule.prompt):
            for core, program in enumerate(programs):
                for item in program:
                    for r in self._touched(item, core):
                        if r not in regions:
                            regions.add(r)
                            ends.setdefault(self._space(r), set()).update(self._span(r))
        self.cuts = {}
        at = 0
        for space in sorted(ends):
            cut = np.array(sorted(ends[space]), np.int64)
            self.cuts[space] = (at, cut)
            at += len(cut)
        self.count = at
        self.cells: dict[Region, slice] = {}

    def _touched(self, item: object, core: int) -> tuple[Region, ...]:
        if isinstance(item, Poll):
            return (item.region,)
        if not isinstance(item, Compute):
            return ()
        row = TABLE[item.task.kind]
        return (*row.reads(self.step, item.task, core), *row.writes(self.step, item.task, core))

    def _space(self, r: Region) -> tuple[str, int]:
        """Device values share one address space; caches and private values have their own."""
        if r.value == "cache":
            return ("cache", r.layer)
        if self.schedule.pages.device_page(r.value) is not None:
            return ("device", 0)
        return (r.value, 0)

    def _span(self, r: Region) -> tuple[int, int]:
        page = self.schedule.pages.device_page(r.value)
        at = 0 if page is None else page.at(r.layer)
        return at + r.lo, at + r.hi

    def where(self, r: Region) -> slice:
        """The cells of a region."""
        found = self.cells.get(r)
        if found is None:
            base, cut = self.cuts[self._space(r)]
            low, high = self._span(r)
            a, b = int(np.searchsorted(cut, low)), int(np.searchsorted(cut, high))
            found = self.cells[r] = slice(base + a, base + b)
        return found


class _Run:
    """One execution of the items of some steps in a row, judging as it goes."""

    def __init__(self, schedule: GpuSchedule, most: int) -> None:
        self.schedule, self.step, self.most = schedule, schedule.step, most
        self.sequence = sequence_of(schedule)
        self.words = _Words(schedule)
        n, blocks = self.words.count, schedule.blocks
        self.n = n
        self.clock = np.zeros((blocks, blocks), np.int64)
        self.writer = np.full(n, -1, np.int64)
        self.writer_time = np.zeros(n, np.int64)
        self.read_time = np.zeros((n, blocks), np.int64)
        self.content = np.zeros(n, np.int64)
        self.tag = np.full(n, -1, np.int64)
        self.polled = np.full((n, blocks), -1, np.int64)  # the tag that a block has found there
        self.past_writer = np.full(n, -1, np.int64)  # of the use before
        self.past_time = np.zeros(n, np.int64)
        self.fenced = np.zeros((blocks, blocks), np.int64)  # what barriers alone made known
        self.stamp: dict[tuple[int, int], Array] = {}  # (block, time) -> its clock then
        self.met: dict[tuple[int, str], list[int]] = {}
        self.joined: dict[tuple[int, str], Array] = {}
        self.known: dict[tuple[int, bytes], Array] = {}
        self.faults: list[Fault] = []
        self.accesses: dict[tuple[int, GpuTask], tuple[_Accesses, _Accesses]] = {}
        self.ids: dict[tuple[int, int, GpuTask], int] = {}
        self.owner_ids = self._defining_order()

    # ---- what every read must find ----
    def _defining_order(self) -> Mapping[tuple[int, int, GpuTask], list[Array]]:
        by_phase: dict[tuple[GpuKind, int], list[tuple[int, GpuTask]]] = {}
        for core, program in enumerate(self.schedule.programs):
            for item in program:
                if isinstance(item, Compute):
                    key = (item.task.kind, item.task.layer)
                    by_phase.setdefault(key, []).append((core, item.task))
        order: list[tuple[int, GpuTask]] = []
        for kind, layer in phases(self.step):
            for core in range(self.schedule.blocks):
                alone = before(self.step, kind, layer, core)
                if alone is not None:
                    order.append((core, alone))
            order += by_phase.get((kind, layer), [])
        for core in range(self.schedule.blocks):
            order.append((core, GpuTask(GpuKind.CHOOSE, core=core)))
        return self._values(order)

    def _before_head(self) -> set[tuple[int, GpuTask]]:
        """What every block does for itself before the head."""
        found = [(c, before(self.step, GpuKind.HEAD, -1, c)) for c in range(self.schedule.blocks)]
        return {(c, t) for c, t in found if t is not None}

    def _values(
        self, order: Sequence[tuple[int, GpuTask]]
    ) -> Mapping[tuple[int, int, GpuTask], list[Array]]:
        # Here every value of every layer has memory of its own.
        held: dict[tuple[str, int], Array] = {}
        out: dict[tuple[int, int, GpuTask], list[Array]] = {}
        head = self._before_head()
        prompt = [x for x in order if x[1].kind not in _HEAD and x not in head]
        for step, programs in enumerate(self.sequence):
            for core, task in order if programs is self.schedule.programs else prompt:
                ident = self.ids[(step, core, task)] = len(self.ids) + 1
                reads, writes = self._accesses(core, task)
                found = []
                for r, cells in reads:
                    memory = held.get((r.value, r.layer))
                    size = cells.stop - cells.start
                    found.append(
                        np.zeros(size, np.int64) if memory is None else memory[cells].copy()
                    )
                out[(step, core, task)] = found
                for w, cells in writes:
                    if (w.value, w.layer) not in held:
                        held[(w.value, w.layer)] = np.zeros(self.n, np.int64)
                    held[(w.value, w.layer)][cells] = ident
        return out

    def _tag(self, step: int, layer: int) -> int:
        """The tag of a layer's words (those outside the layers come last)."""
        layers = self.step.model.layers
        return step * (layers + 1) + (layers if layer < 0 else layer)

    # ---- execution ----
    def _fault(self, rule: str, text: str) -> None:
        if len(self.faults) < self.most:
            self.faults.append(Fault(rule, text))

    def _poll(self, step: int, core: int, item: Poll) -> bool:
        cells = self.words.where(item.region)
        if not np.all(self.tag[cells] == self._tag(step, item.region.layer)):
            return False
        self.polled[cells, core] = self.tag[cells]
        past = self.past_writer[cells]
        if np.any((past >= 0) & (self.past_time[cells] > self.clock[core][np.maximum(past, 0)])):
            self._fault("mark", f"block {core} looks for {item.region.value}@{item.region.layer} "
                        "before it knows that the use before was written")  # fmt: skip
        # Who reads a tagged word knows what its writer knew when it wrote it.
        key = (cells.start, self.content[cells].tobytes())
        joined = self.known.get(key)
        if joined is None:
            pairs = {
                (int(w), int(t))
                for w, t in zip(self.writer[cells], self.writer_time[cells], strict=True)
            }
            stamps = [self.stamp[p] for p in sorted(pairs) if p[0] >= 0]
            joined = np.maximum.reduce(stamps) if stamps else np.zeros_like(self.clock[core])
            self.known[key] = joined
        np.maximum(self.clock[core], joined, out=self.clock[core])
        self.clock[core, core] += 1
        return True

    def _meet(self, step: int, core: int, item: Meet) -> bool:
        here = self.met.setdefault((step, item.name), [])
        if core not in here:
            self.clock[core, core] += 1
            here.append(core)
        if len(here) < self.schedule.blocks:
            return False
        all_ = self.joined.get((step, item.name))
        if all_ is None:
            all_ = self.joined[(step, item.name)] = self.clock.max(0)
        np.maximum(self.clock[core], all_, out=self.clock[core])
        np.maximum(self.fenced[core], all_, out=self.fenced[core])
        return True

    def _accesses(self, core: int, task: GpuTask) -> tuple[_Accesses, _Accesses]:
        """What a task reads and writes on a block, and in which cells."""
        found = self.accesses.get((core, task))
        if found is None:
            row, where = TABLE[task.kind], self.words.where
            found = self.accesses[(core, task)] = (
                tuple((r, where(r)) for r in row.reads(self.step, task, core)),
                tuple((w, where(w)) for w in row.writes(self.step, task, core)),
            )
        return found

    def _compute(self, step: int, core: int, task: GpuTask) -> None:
        self.clock[core, core] += 1
        time = self.clock[core]
        reads, writes = self._accesses(core, task)
        ident = self.ids.get((step, core, task), 0)
        want = self.owner_ids.get((step, core, task), [])
        for (r, cells), expected in zip(reads, want, strict=False):
            self._ordered(cells, time, task, r, write=False)
            self._visible(cells, core, task, r)
            if not np.array_equal(self.content[cells], expected):
                self._fault("value", f"{task} on block {core} in step {step} reads {r.value} that "
                            "is not what its producer left there")  # fmt: skip
            self.read_time[cells, core] = time[core]
        for r, cells in writes:
            self._ordered(cells, time, task, r, write=True)
            self.past_writer[cells] = self.writer[cells]
            self.past_time[cells] = self.writer_time[cells]
            self.writer[cells] = core
            self.writer_time[cells] = time[core]
            self.read_time[cells] = 0
            self.content[cells] = ident
            self.tag[cells] = self._tag(step, r.layer)
            if not r.value.startswith(PRIVATE):
                self.stamp[(core, int(time[core]))] = time.copy()

    def _ordered(self, cells: slice, time: Array, task: GpuTask, r: Region, write: bool) -> None:
        writers = self.writer[cells]
        late = (writers >= 0) & (self.writer_time[cells] > time[np.maximum(writers, 0)])
        if late.any():
            self._fault("race", f"{task} and an earlier writer of {r.value} are not ordered")
        if write and (self.read_time[cells] > time[None, :]).any():
            self._fault("race", f"{task} overwrites {r.value} while it may still be read")

    def _visible(self, cells: slice, core: int, task: GpuTask, r: Region) -> None:
        writers = self.writer[cells]
        seen = (writers < 0) | (writers == core) | (self.polled[cells, core] == self.tag[cells])
        seen |= self.writer_time[cells] <= self.fenced[core][np.maximum(writers, 0)]
        if not seen.all():
            self._fault("visibility", f"{task} on block {core} reads words of {r.value} that it "
                        "neither polled nor met their writer behind")  # fmt: skip

    def go(self) -> list[Fault]:
        """Execute until all is done or nothing moves."""
        blocks = range(self.schedule.blocks)
        flat = [[(s, i) for s, p in enumerate(self.sequence) for i in p[b]] for b in blocks]
        at = [0 for _ in blocks]
        moved = True
        while moved and len(self.faults) < self.most:
            moved = False
            for core, items in enumerate(flat):
                while at[core] < len(items) and len(self.faults) < self.most:
                    step, item = items[at[core]]
                    if isinstance(item, Compute):
                        self._compute(step, core, item.task)
                    elif not (
                        self._poll(step, core, item)
                        if isinstance(item, Poll)
                        else self._meet(step, core, item)
                    ):
                        break
                    at[core] += 1
                    moved = True
        if len(self.faults) < self.most:
            for core, items in enumerate(flat):
                if at[core] < len(items):
                    step, item = items[at[core]]
                    self._fault("progress", f"block {core} waits for ever in step {step} at {item}")
        return self.faults


def shallow(step: GpuStep) -> GpuStep:
    """The same step with three or four layers, as even or odd as the model's (see above)."""
    layers = step.model.layers
    few = min(layers, 3 + (layers + 1) % 2)
    return replace(step, model=replace(step.model, layers=few))


def check_gpu(schedule: GpuSchedule, machine: Machine, most: int = _MOST) -> list[Fault]:
    """Faults, of the execution at most `most`; empty means the schedule is safe.

    Never raises for a bad schedule.
    """
    faults = block_faults(schedule, machine) + page_faults(schedule) + structure_faults(schedule)
    faults += prompt_faults(schedule)
    if faults:  # without its tasks and pages there is nothing to execute
        return faults
    return ring_faults(schedule) or _Run(schedule, most).go()


__all__ = [
    "block_faults",
    "check_gpu",
    "page_faults",
    "prompt_faults",
    "sequence_of",
    "shallow",
    "structure_faults",
]
