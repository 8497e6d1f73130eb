"""Units of work of a search, in plain data, and the bench that does them in any process.

A unit is (interval, mode, split axis) -> skeletons with first sizes, or (interval, skeleton) -> the
best sizes. Graphs travel as text and are interned again where they arrive; skeletons and sizes
travel as lists. The result of a unit depends on nothing but the unit and the `Context`: so any
number of processes finds the same, in whatever order they work.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from obelisk.base.digest import digest
from obelisk.base.errors import ParseError
from obelisk.ir import Graph, Op
from obelisk.ir.codec import find_op
from obelisk.ir.text import parse, to_text
from obelisk.machine import Machine
from obelisk.search.axes import Axis, Segment
from obelisk.search.partition import Choice, Partition
from obelisk.search.program import Program
from obelisk.search.sizes import Instance, Sizer
from obelisk.search.skeleton import Sizes, Skeleton, Step, extract
from obelisk.search.space import Space
from obelisk.search.synth import Synthesis
from obelisk.search.value import Counts, Mode, Schedule, Stage

VERSION = 2  # of what a unit computes: results of another version are not reused
SIZES_KEPT = 8  # instances kept of one skeleton
TICK_SECONDS = 0.1  # how often a unit looks at the clock's relatives: memory, parent, progress
RAW = Mode()
Plain = Any  # numbers, strings, None, and lists and dicts of them


@dataclass(frozen=True, slots=True)
class Context:
    """What all units of a search share: the program in text form, machine, space and seed."""

    program: str
    machine: Machine
    space: Space
    seed: int

    @property
    def identity(self) -> str:
        """Digest of everything that a unit's result depends on."""
        return digest(
            str(VERSION), self.program, self.machine.digest, self.space.key, str(self.seed)
        )


@dataclass(frozen=True, slots=True)
class Task:
    """A unit to do.

    Attributes:
        key: the same in every run with the same context.
        start, stop: the interval.
        mode: the form to derive.
        split: the inner axis that the grid splits, if any.
        skeleton: plain form of the skeleton that wants sizes; None for a synthesis.
    """

    key: str
    start: int
    stop: int
    mode: Mode = RAW
    split: Axis | None = None
    skeleton: Plain = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What is left when a unit starts: seconds, states, and resident bytes of its process."""

    seconds: float
    states: int
    memory: int


@dataclass(slots=True)
class Outcome:
    """What a unit found, in plain data.

    Attributes:
        found: of a synthesis, one [skeleton, sizes, seconds] per skeleton that fits the machine,
            in order of its schedules; of sizing, one [sizes, seconds] each, cheapest first.
        barren: skeletons without any sizes that fit.
        tried: sized instances built; `threads`: how many had so many threads a block.
        moments: for each entry of `found`, processor seconds after which the unit had it.
        stopped: the limit that ended it early, or "": only complete outcomes are kept on disk.
        seconds: processor seconds; `memory`: most resident bytes of its process so far.
    """

    key: str
    states: int = 0
    bank_hits: int = 0
    pruned: dict[str, int] = field(default_factory=dict)
    found: list[Plain] = field(default_factory=list)
    barren: int = 0
    tried: int = 0
    threads: dict[str, int] = field(default_factory=dict)
    moments: list[float] = field(default_factory=list)
    stopped: str = ""
    seconds: float = 0.0
    memory: int = 0

    def plain(self) -> Plain:
        """As a JSON value; `outcome` reads it back."""
        return {name: getattr(self, name) for name in self.__slots__}


def outcome(data: Plain) -> Outcome:
    """From `Outcome.plain`; `ParseError` for anything else."""
    if not isinstance(data, dict) or set(data) != set(Outcome.__slots__):
        raise ParseError("a unit's result has other fields than this version writes")
    return Outcome(**data)


# -- plain forms ----------------------------------------------------------------------------------
def _plain_word(x: Any) -> Plain:
    if isinstance(x, Op):
        return f"@{x.value}"
    return repr(x) if isinstance(x, float) else x


def skeleton_plain(s: Skeleton) -> Plain:
    """A skeleton as a JSON value: operators by name with "@", constants as text."""
    return {
        "steps": [[[_plain_word(x) for x in t.op], list(t.dims), int(t.stage)] for t in s.steps],
        "targets": list(s.targets),
        "schedule": [s.schedule.loop, s.schedule.split],
        "cost": s.cost,
        "safe": s.safe,
    }


def read_skeleton(data: Plain) -> Skeleton:
    """From `skeleton_plain`, equal to the original."""
    steps = []
    for words, dims, stage in data["steps"]:
        name, *rest = words
        op = find_op(name[1:]) if name.startswith("@") else name
        args = [float(x) if isinstance(x, str) else x for x in rest]
        steps.append(Step((op, *args), tuple(dims), Stage(stage)))
    return Skeleton(
        tuple(steps), tuple(data["targets"]), Schedule(*data["schedule"]), data["cost"],
        data["safe"],
    )  # fmt: skip


def sizes_plain(z: Sizes) -> Plain:
    """Sizes as a JSON value."""
    return [
        [list(p) for p in z.parts], z.loop, z.split, [list(p) for p in z.combine], z.threads,
        z.combine_threads,
    ]  # fmt: skip


def read_sizes(data: Plain) -> Sizes:
    """From `sizes_plain`, equal to the original."""
    parts, loop, split, combine, *threads = data
    return Sizes(
        tuple((a, n) for a, n in parts), loop, split, tuple((a, n) for a, n in combine), *threads
    )


def choice(skeleton: Skeleton, sizes: Plain, seconds: float, moment: float) -> Choice:
    """A choice from a unit's plain result."""
    return Choice(skeleton, read_sizes(sizes), seconds, moment)


# -- which units ----------------------------------------------------------------------------------
def synthesis_tasks(
    segment: Segment, key: str, start: int, stop: int, space: Space
) -> Iterator[Task]:
    """The syntheses of one interval: in every mode, without a split axis and with each of them.

    One unit closes the schedules of all loop axes, which share most of their work.
    """
    splits: list[Axis | None] = [None]
    if space.split_reductions:
        splits += sorted(segment.inner & segment.reduced)
    for mode in Program(segment, 0).modes(space.online_softmax):
        for split in splits:
            yield Task(f"{key}/{mode}/{split}", start, stop, mode, split)


def sizing_task(skeleton: Skeleton, key: str, start: int, stop: int) -> Task:
    """The sizing of one skeleton of an interval."""
    name = f"{key}/sizes/{digest(skeleton.key)}"
    return Task(name, start, stop, skeleton=skeleton_plain(skeleton))


# -- doing them -----------------------------------------------------------------------------------
class Bench:
    """Does units in this process.

    `tick` is called now and then in the middle of a unit and returns the name of a reason to stop,
    or "".
    """

    def __init__(self, context: Context, graph: Graph, tick: Callable[[], str]) -> None:
        self.context, self.tick = context, tick
        self._partition = Partition(graph, context.machine, context.space.window)
        self.counts = Counts()  # of the unit at work, for progress
        self._prepared: Program | None = None

    @classmethod
    def from_text(cls, context: Context, tick: Callable[[], str]) -> Bench:
        """A bench in another process: the program is read from its text."""
        return cls(context, parse(context.program), tick)

    def run(self, task: Task, limits: Limits) -> Outcome:
        """Do one unit within limits; a limit gives what was found so far, marked `stopped`."""
        begun, deadline = time.process_time(), time.monotonic() + limits.seconds
        self.counts = counts = Counts()
        out = Outcome(task.key)
        ticked = 0.0

        def stop() -> bool:
            nonlocal ticked
            if out.stopped:
                return True
            now = time.monotonic()
            if now > deadline:
                out.stopped = "time"
            elif counts.states > limits.states:
                out.stopped = "states"
            elif now - ticked > TICK_SECONDS:
                ticked = now
                out.stopped = "memory" if resident() > limits.memory else self.tick()
            return bool(out.stopped)

        interval = self._partition.interval(task.start, task.stop)
        assert interval is not None
        assert interval.segment is not None
        if task.skeleton is None:
            self._synthesize(task, interval.segment, counts, out, stop)
        else:
            self._size(task, interval.segment, out, stop)
        out.states, out.bank_hits = counts.states, counts.bank_hits
        for rule, n in sorted(counts.pruned.items()):
            out.pruned[rule] = out.pruned.get(rule, 0) + n
        out.seconds, out.memory = time.process_time() - begun, peak_resident()
        self.counts = Counts()
        return out

    def _synthesize(
        self, task: Task, segment: Segment, counts: Counts, out: Outcome, stop: Callable[[], bool]
    ) -> None:
        begun = time.process_time()
        space = self.context.space
        program = self._program(segment)
        for loop in (None, *range(len(segment.extents))):
            if stop():
                return
            synthesis = Synthesis(
                program,
                Schedule(loop, task.split),
                counts,
                most_values=space.values,
                most_ops=space.block_ops,
                online=space.online_softmax,
                mode=task.mode,
                stop=stop,
            )
            synthesis.run()
            skeleton = extract(synthesis)
            if skeleton is None:
                continue
            sizer = Sizer(skeleton, segment, self.context.machine, stop)
            sketch = sizer.sketch()
            _count(sizer, out)
            if sketch is None:
                out.barren += 1
            else:
                out.found.append([skeleton_plain(skeleton), *_sized(sketch)])
                out.moments.append(time.process_time() - begun)

    def _program(self, segment: Segment) -> Program:
        """The segment prepared, once for its units in a row. What its arena has already seen saves
        work and changes no answer.
        """
        if self._prepared is None or self._prepared.segment is not segment:
            self._prepared = Program(segment, self.context.seed)
        return self._prepared

    def _size(self, task: Task, segment: Segment, out: Outcome, stop: Callable[[], bool]) -> None:
        begun = time.process_time()
        sizer = Sizer(read_skeleton(task.skeleton), segment, self.context.machine, stop)
        out.found = [_sized(i) for i in sizer.best(SIZES_KEPT)]
        out.moments = [time.process_time() - begun] * len(out.found)
        _count(sizer, out)


def _sized(instance: Instance) -> list[Plain]:
    return [sizes_plain(instance.sizes), instance.cost.seconds]


def _count(sizer: Sizer, out: Outcome) -> None:
    c = sizer.counts
    out.tried += c.tried
    for threads, n in c.threads.items():
        out.threads[str(threads)] = out.threads.get(str(threads), 0) + n
    for rule, n in (("malformed", c.malformed), ("capacity", c.too_big)):
        if n:
            out.pruned[rule] = out.pruned.get(rule, 0) + n


def resident() -> int:
    """Resident bytes of this process now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as f:
            return int(f.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_resident()


def peak_resident() -> int:
    """The most resident bytes that this process ever had."""
    try:  # not getrusage: there a child starts with its parent's peak
        with open("/proc/self/status", encoding="ascii") as f:
            found = next((line for line in f if line.startswith("VmHWM:")), "")
        return int(found.split()[1]) * 1024
    except (OSError, IndexError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def context_of(graph: Graph, machine: Machine, space: Space, seed: int) -> Context:
    """The context of a search; the graph goes in as text."""
    return Context(to_text(graph), machine, space, seed)


def dumps(data: Mapping[str, Plain]) -> str:
    """Compact JSON with keys in a fixed order."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))
