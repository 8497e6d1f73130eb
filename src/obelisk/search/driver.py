"""The search: partition, schedules, synthesis, sizes, ranking. Anytime, seeded, within limits of
time and memory.

For each interval that the partition asks for, every schedule (loop axis, split axis) is closed by
`synth`, each skeleton found gets sizes by `sizes`, and the instances are ranked by the cost model.
The candidates are the best cover with its alternatives, one interval varied at a time; the input
graph is always candidate 0.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping

from obelisk.base.progress import Progress, Silent
from obelisk.ir import Graph, make_graph
from obelisk.machine import Machine, estimate
from obelisk.search.axes import Axis, Segment
from obelisk.search.partition import Cover, Interval, Partition
from obelisk.search.program import Program
from obelisk.search.sizes import Instance, Sizer
from obelisk.search.skeleton import Skeleton, extract
from obelisk.search.space import Budget, Candidate, SearchResult, SearchStats, Space
from obelisk.search.synth import Synthesis
from obelisk.search.value import Counts, Schedule

REPORT_SECONDS = 0.1
SIZES_KEPT = 4  # instances kept of one skeleton
PROMISING = 2.0  # a skeleton whose first sizes cost more than this times the best is not refined


class _Stopped(Exception):
    """A limit was reached; carries its name."""


class _Search:
    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        space: Space,
        budget: Budget,
        seed: int,
        progress: Progress,
    ) -> None:
        self.graph, self.machine, self.space, self.budget = graph, machine, space, budget
        self.seed, self.progress = seed, progress
        self.begun = time.monotonic()
        self.counts = Counts()
        self.skeletons = self.instances = self.segments = 0
        self.stopped = ""
        self._reported = 0.0
        self._memo: dict[str, list[tuple[Skeleton, Instance]]] = {}

    # -- limits ----------------------------------------------------------------------------------
    def stop(self) -> bool:
        """True once a limit is reached; also reports progress, at a bounded rate."""
        if self.stopped:
            return True
        now = time.monotonic()
        if now - self.begun > self.budget.seconds:
            self.stopped = "time"
        elif self.counts.states > self.budget.states:
            self.stopped = "states"
        if now - self._reported > REPORT_SECONDS:
            self._reported = now
            if _memory() > self.budget.memory:
                self.stopped = "memory"
            self.progress.update("search", self._now())
        return bool(self.stopped)

    def _now(self) -> Mapping[str, float | int | str]:
        return {
            "seconds": time.monotonic() - self.begun,
            "states": self.counts.states,
            "pruned": sum(self.counts.pruned.values()),
            "skeletons": self.skeletons,
            "candidates": self.instances,
        }

    # -- one interval ----------------------------------------------------------------------------
    def schedules(self, segment: Segment) -> Iterator[Schedule]:
        """Every loop axis without, then with each split axis."""
        loops: list[Axis | None] = [None, *range(len(segment.extents))]
        yield from (Schedule(loop) for loop in loops)
        if self.space.split_reductions:
            for split in sorted(segment.inner & segment.reduced):
                yield from (Schedule(loop, split) for loop in loops)

    def interval(self, interval: Interval) -> list[Instance]:
        """Ranked instances of one interval."""
        segment = interval.segment
        if segment is None:
            return []
        self.segments += 1
        program = Program(segment, self.seed)
        found: dict[str, Skeleton] = {}
        for mode in program.modes(self.space.online_softmax):
            for schedule in self.schedules(segment):
                if self.stop():
                    break
                synthesis = Synthesis(
                    program,
                    schedule,
                    self.counts,
                    most_values=self.space.values,
                    most_ops=self.space.block_ops,
                    online=self.space.online_softmax,
                    mode=mode,
                    stop=self.stop,
                )
                synthesis.run()
                skeleton = extract(synthesis)
                if skeleton is not None:
                    found.setdefault(skeleton.key, skeleton)
        self.skeletons += len(found)
        return self._sized(segment, list(found.values()))

    def _sized(self, segment: Segment, skeletons: list[Skeleton]) -> list[Instance]:
        """Sizes for the skeletons that look promising at first sight; ranked instances."""
        sizers: list[tuple[Instance, Sizer]] = []
        for skeleton in skeletons:
            if self.stop():
                break
            sizer = Sizer(skeleton, segment, self.machine, self.stop)
            sketch = sizer.sketch()
            if sketch is not None:
                sizers.append((sketch, sizer))
            else:
                self._count(sizer)
        sizers.sort(key=lambda s: (s[0].cost.seconds, s[0].skeleton.key))
        out: list[Instance] = []
        for position, (sketch, sizer) in enumerate(sizers):
            promising = sketch.cost.seconds < PROMISING * sizers[0][0].cost.seconds
            out += (
                sizer.best(SIZES_KEPT) if promising and position < self.space.descents else [sketch]
            )
            self._count(sizer)
        out.sort(key=lambda i: (i.cost.seconds, repr(i.sizes)))
        return out

    def _count(self, sizer: Sizer) -> None:
        self.instances += sizer.counts.tried
        for rule, n in (("malformed", sizer.counts.malformed), ("capacity", sizer.counts.too_big)):
            if n:
                self.counts.pruned[rule] = self.counts.pruned.get(rule, 0) + n

    # -- the whole -------------------------------------------------------------------------------
    def run(self) -> SearchResult:
        first = Candidate(self.graph, estimate(self.graph, self.machine), "the program itself")
        candidates = [first]
        try:
            partition = Partition(self.graph, self.machine, self.space.window)
            partition.solve(self.interval, self.stop)
            candidates += self._candidates(partition)
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        self.progress.update("search", self._now())
        return SearchResult(tuple(candidates[: self.space.keep]), self._stats())

    def _candidates(self, partition: Partition) -> list[Candidate]:
        cover = partition.shortest(known_only=True)
        if cover is None:
            return []
        out: dict[str, Candidate] = {}
        for choices, note in self._choices(cover):
            if len(out) >= self.space.keep - 1:
                break
            outputs = partition.assemble(cover, lambda i, c=choices: c.get(id(i)))  # type: ignore[misc]
            graph = make_graph(
                self.graph.inputs,
                outputs,
                self.graph.input_names,
                self.graph.output_names,
                self.graph.name,
            )
            if graph.digest != self.graph.digest and graph.digest not in out:
                out[graph.digest] = Candidate(graph, estimate(graph, self.machine), note)
        ranked = sorted(out.values(), key=lambda c: (c.cost.seconds, c.graph.digest))
        return ranked

    def _choices(self, cover: Cover) -> Iterator[tuple[dict[int, Instance], str]]:
        """The best instance everywhere, then one interval varied at a time, its skeletons in
        turn.
        """
        best = {id(i): i.instances[0] for i in cover.intervals if i.instances}
        yield best, _note(best.values())
        for interval in cover.intervals:
            for instance in _diverse(interval.instances or [], self.space.keep):
                yield {**best, id(interval): instance}, _note([instance])

    def _stats(self) -> SearchStats:
        return SearchStats(
            seconds=time.monotonic() - self.begun,
            states=self.counts.states,
            pruned=dict(sorted(self.counts.pruned.items())),
            bank_hits=self.counts.bank_hits,
            skeletons=self.skeletons,
            segments=self.segments,
            instances=self.instances,
            stopped=self.stopped or "exhausted",
        )


def _diverse(instances: list[Instance], keep: int) -> list[Instance]:
    """Instances with every skeleton's best first, then every skeleton's second, and so on."""
    rounds: dict[str, int] = {}
    ranked = []
    for position, instance in enumerate(instances):
        turn = rounds.get(instance.skeleton.key, 0)
        rounds[instance.skeleton.key] = turn + 1
        ranked.append((turn, position, instance))
    ranked.sort(key=lambda t: t[:2])
    return [i for _, _, i in ranked[: 2 * keep]]


def _note(instances: object) -> str:
    """How a candidate came about, in words."""
    parts = []
    for instance in instances:  # type: ignore[attr-defined]
        s, z = instance.skeleton, instance.sizes
        words = ["x".join(str(n) for _, n in z.parts if n > 1) or "1"]
        if s.schedule.loop is not None:
            words.append(f"loop {z.loop}")
        if s.schedule.split is not None:
            words.append(f"split {z.split}, second kernel")
        parts.append("grid " + ", ".join(words))
    return "; ".join(parts)


def _memory() -> int:
    """Resident bytes of this process now."""
    try:
        with open("/proc/self/statm", encoding="ascii") as f:
            return int(f.read().split()[1]) * resource.getpagesize()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def search(
    graph: Graph,
    machine: Machine,
    *,
    space: Space | None = None,
    budget: Budget | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> SearchResult:
    """Candidates for a program, best predicted first; the program itself is always candidate 0.

    Deterministic for one input, machine, space and seed, unless a limit of `budget` stops it. Never
    times anything and never judges its own results. On Ctrl-C it returns what it has.
    """
    return _Search(
        graph, machine, space or Space(), budget or Budget(), seed, progress or Silent()
    ).run()
