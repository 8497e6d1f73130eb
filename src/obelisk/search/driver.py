"""The search: partition, units of work, ranking. Anytime, seeded, durable, within limits of time
and memory.

For each interval that the partition asks for, units close every schedule and size what is promising
(`units`), in this process or in workers (`pool`, `ray_pool`). Outcomes are merged in the order of
the units, never in the order in which they arrive. The candidates are the best cover with its
alternatives, one interval varied at a time; the input graph is always candidate 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from obelisk.base.digest import digest
from obelisk.base.errors import UserError
from obelisk.base.interrupt import Interrupts
from obelisk.base.progress import Progress, Silent
from obelisk.base.settings import usable_cores
from obelisk.ir import Graph, make_graph
from obelisk.machine import Machine, estimate
from obelisk.search.checkpoint import Checkpoint
from obelisk.search.partition import Choice, Cover, Interval, Partition
from obelisk.search.plan import make_plan
from obelisk.search.pool import Executor, Local, Pool
from obelisk.search.sizes import Instance, Sizer
from obelisk.search.skeleton import Skeleton
from obelisk.search.space import Budget, Candidate, SearchResult, SearchStats, Space
from obelisk.search.threads import fuse_graph
from obelisk.search.units import (
    Limits,
    Outcome,
    Task,
    choice,
    context_of,
    peak_resident,
    read_skeleton,
    resident,
    sizing_task,
    synthesis_tasks,
)

REPORT_SECONDS = 0.1
PROMISING = 2.0  # a skeleton whose first sizes cost more than this times the best is not refined
GRACE_SECONDS = 0.3  # wait for workers that stop at the deadline themselves
ExecutorMaker = Callable[[Callable[[], Limits], Callable[[], str]], Executor]


def _timed(result: Outcome | None) -> Iterator[tuple[Any, float]]:
    """What a unit found, each with the processor seconds after which it had it."""
    if result is not None:
        yield from zip(result.found, result.moments, strict=True)


@dataclass
class _Job:
    """The search of one segment: first its syntheses, then sizes for what looks promising."""

    key: str
    interval: Interval
    tasks: list[Task]
    synthesized: dict[str, Outcome] = field(default_factory=dict)
    sizing: dict[str, Skeleton] = field(default_factory=dict)
    sized: dict[str, Outcome] = field(default_factory=dict)
    sketches: list[tuple[Skeleton, Choice]] = field(default_factory=list)
    begun: dict[str, float] = field(default_factory=dict)  # processor seconds before each unit
    done: bool = False

    def sketch(self) -> None:
        """Skeletons with their first sizes, cheapest first; of equal ones the first unit's."""
        found: dict[str, tuple[Skeleton, Choice]] = {}
        for task in self.tasks:
            result = self.synthesized.get(task.key)
            begun = self.begun.get(task.key, 0.0)
            for (plain, sizes, seconds), moment in _timed(result):
                skeleton = read_skeleton(plain)
                made = choice(skeleton, sizes, seconds, begun + moment)
                found.setdefault(skeleton.key, (skeleton, made))
        self.sketches = sorted(found.values(), key=lambda s: (s[1].seconds, s[0].key))

    def choices(self) -> list[Choice]:
        """Everything sized, cheapest first; a skeleton that was not refined has its first sizes."""
        out: list[Choice] = []
        refined = {s.key: self.sized[k] for k, s in self.sizing.items() if k in self.sized}
        for skeleton, sketch in self.sketches:
            better = refined.get(skeleton.key)
            begun = self.begun.get(better.key, 0.0) if better else 0.0
            found = [choice(skeleton, z, s, begun + m) for (z, s), m in _timed(better)]
            out += found or [sketch]
        out.sort(key=lambda c: (c.seconds, repr(c.sizes)))
        return out


class _Search:
    def __init__(
        self,
        graph: Graph,
        machine: Machine,
        space: Space,
        budget: Budget,
        seed: int,
        progress: Progress,
        checkpoint: Path | None,
        resume: Path | None,
    ) -> None:
        self.graph, self.machine, self.space, self.budget = graph, machine, space, budget
        self.progress = progress
        self.context = context_of(graph, machine, space, seed)
        self.checkpoint = Checkpoint(self.context, checkpoint or resume)
        if resume is not None:
            self.checkpoint.load(resume)
        self.begun = time.monotonic()
        self.stopped = ""
        self.interrupts = Interrupts()
        self.executor: Executor | None = None
        self.pruned: dict[str, int] = {}
        self.stages: dict[str, float] = {}
        self.threads: dict[str, int] = {}
        self.found_seconds = 0.0
        self.states = self.bank_hits = self.skeletons = self.instances = 0
        self.intervals = self.reused = self.units = self.resumed = self.peak = 0
        self._reported = 0.0
        self._jobs: dict[str, _Job] = {}
        self._owner: dict[str, _Job] = {}  # unit key: its job
        self._pending: set[str] = set()
        self._built: dict[tuple[int, int, str, str], Instance | None] = {}

    # -- limits ----------------------------------------------------------------------------------
    def limits(self) -> Limits:
        """What is left now."""
        left = self.begun + self.budget.seconds - time.monotonic()
        return Limits(max(0.0, left), max(0, self.budget.states - self.states), self.budget.memory)

    def tick(self) -> str:
        """Called in the middle of units that run here: reports progress; a reason to stop."""
        now = time.monotonic()
        if now - self._reported > REPORT_SECONDS:
            self._reported = now
            self.progress.update("search", self._now())
        return "interrupted" if self.interrupts.count else ""

    def stop(self) -> bool:
        """True once a limit is reached."""
        if not self.stopped:
            if self.interrupts.count:  # raised where it was lost
                self.stopped = "interrupted"
            elif time.monotonic() - self.begun > self.budget.seconds:
                self.stopped = "time"
            elif self.states > self.budget.states:
                self.stopped = "states"
            elif resident() > self.budget.memory:
                self.stopped = "memory"
        self.tick()
        return bool(self.stopped)

    def _now(self) -> Mapping[str, float | int | str]:
        live = self.executor.live_states() if self.executor else 0
        return {
            "seconds": time.monotonic() - self.begun,
            "states": self.states + live,
            "pruned": sum(self.pruned.values()),
            "skeletons": self.skeletons,
            "candidates": self.instances,
        }

    # -- units -----------------------------------------------------------------------------------
    def _solve(self, partition: Partition) -> None:
        """Search what the partition wants until it wants nothing more."""
        while not self.stop():
            with self._stage("partition"):
                wanted = partition.wanted()
            if not wanted:
                return
            wanted.sort(key=lambda i: (i.stop - i.start, i.start))  # short ones are there soon
            jobs = [(interval, self._job(interval)) for interval in wanted]
            try:
                self._wait()
            finally:  # also on a limit or Ctrl-C: what is there is settled
                for interval, job in jobs:
                    if job is None:
                        partition.settle(interval, [])
                    elif job.done or job.synthesized:
                        if not job.done:
                            job.sketch()
                        partition.settle(interval, job.choices())

    def _job(self, interval: Interval) -> _Job | None:
        """The job of an interval's segment, begun if no equal segment was searched before."""
        self.intervals += 1
        segment = interval.segment
        if segment is None:
            return None
        key = digest(segment.key())
        if key in self._jobs:
            self.reused += 1
            return self._jobs[key]
        tasks = list(synthesis_tasks(segment, key, interval.start, interval.stop, self.space))
        job = self._jobs[key] = _Job(key, interval, tasks)
        for task in tasks:
            self._submit(task, job)
        return job

    def _submit(self, task: Task, job: _Job) -> None:
        self._owner[task.key] = job
        known = self.checkpoint.units.get(task.key)
        if known is not None:
            self.resumed += 1
            self._take(known)
            return
        assert self.executor is not None
        self._pending.add(task.key)
        self.executor.submit(task)

    def _wait(self) -> None:
        """Collect outcomes until none is pending or a limit is reached."""
        assert self.executor is not None
        while self._pending and not self.stop():
            for result in self.executor.results(REPORT_SECONDS):
                self._collect(result)
        ends = time.monotonic() + GRACE_SECONDS
        while self.stopped == "time" and self.executor.workers and time.monotonic() < ends:
            for result in self.executor.results(0.05):
                self._collect(result)
            if not self._pending:
                return

    def _collect(self, result: Outcome) -> None:
        self._pending.discard(result.key)
        if not result.stopped:
            self.checkpoint.add(result)
        elif result.stopped != "dropped" and not self.stopped:
            self.stopped = result.stopped
        self._take(result)

    def _take(self, result: Outcome) -> None:
        """Count an outcome and give it to its job; begin the sizing when it was the last
        synthesis.
        """
        job = self._owner[result.key]
        self.units += not result.stopped
        self.states += result.states
        self.bank_hits += result.bank_hits
        self.instances += result.tried
        self.peak = max(self.peak, result.memory)
        for rule, n in result.pruned.items():
            self.pruned[rule] = self.pruned.get(rule, 0) + n
        for threads, n in result.threads.items():
            self.threads[threads] = self.threads.get(threads, 0) + n
        sizing = result.key in job.sizing
        job.begun[result.key] = sum(self.stages.values())
        stage = "sizes" if sizing else "synthesis"
        self.stages[stage] = self.stages.get(stage, 0.0) + result.seconds
        (job.sized if sizing else job.synthesized)[result.key] = result
        if sizing:
            job.done = len(job.sized) == len(job.sizing)
        else:
            self.skeletons += len(result.found) + result.barren
            if len(job.synthesized) == len(job.tasks):
                self._refine(job)

    def _refine(self, job: _Job) -> None:
        job.sketch()
        tasks: list[Task] = []
        for skeleton, sketch in job.sketches[: self.space.descents]:
            if sketch.seconds < PROMISING * job.sketches[0][1].seconds or not tasks:
                task = sizing_task(skeleton, job.key, job.interval.start, job.interval.stop)
                job.sizing[task.key] = skeleton
                tasks.append(task)
        job.done = not tasks
        for task in tasks:
            self._submit(task, job)

    # -- the whole -------------------------------------------------------------------------------
    def run(self, make: ExecutorMaker) -> SearchResult:
        first = Candidate(self.graph, estimate(self.graph, self.machine), "the program itself")
        candidates = [first]
        partition: Partition | None = None
        try:
            partition = Partition(self.graph, self.machine, self.space.window)
            if not self.stop():
                self.executor = make(self.limits, self.tick)
                self._solve(partition)
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        finally:
            if self.executor is not None:
                self.executor.close()
            self.checkpoint.write()
        if partition is not None:
            try:
                with self._stage("assembly"):
                    candidates += self._candidates(partition)
            except KeyboardInterrupt:  # all is found: put it together all the same
                self.stopped = "interrupted"
                candidates += self._candidates(partition)
        try:
            self.progress.update("search", self._now())
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        return SearchResult(tuple(candidates[: self.space.keep]), self._stats())

    def _candidates(self, partition: Partition) -> list[Candidate]:
        out: dict[str, Candidate] = {}
        moments: dict[str, float] = {}
        for cover, chosen, note in _in_turn(partition.covers(), self.space.keep):
            if len(out) >= self.space.keep - 1:
                break
            outputs = partition.assemble(cover, partial(self._instance, chosen))
            graph = make_graph(
                self.graph.inputs,
                outputs,
                self.graph.input_names,
                self.graph.output_names,
                self.graph.name,
            )
            if self.space.thread_graphs:
                graph = fuse_graph(graph, self.machine)
            if graph.digest != self.graph.digest and graph.digest not in out:
                plan = make_plan(cover, chosen, self.space.window, self.space.thread_graphs)
                out[graph.digest] = Candidate(graph, estimate(graph, self.machine), note, plan)
                moments[graph.digest] = max((c.moment for c in chosen.values()), default=0.0)
        ranked = sorted(out.values(), key=lambda c: (c.cost.seconds, c.graph.digest))
        self.found_seconds = moments[ranked[0].graph.digest] if ranked else 0.0
        return ranked

    def _instance(self, chosen: Mapping[int, Choice], interval: Interval) -> Instance | None:
        """An interval's choice, built here; None where its own operators stay."""
        picked = chosen.get(id(interval))
        if picked is None or interval.segment is None:
            return None
        key = (interval.start, interval.stop, picked.skeleton.key, repr(picked.sizes))
        if key not in self._built:
            sizer = Sizer(picked.skeleton, interval.segment, self.machine, lambda: False)
            self._built[key] = sizer.evaluate(picked.sizes)
        return self._built[key]

    def _stage(self, name: str) -> _Stage:
        return _Stage(self.stages, name)

    def _stats(self) -> SearchStats:
        e = self.executor
        return SearchStats(
            seconds=time.monotonic() - self.begun,
            found_seconds=self.found_seconds,
            states=self.states,
            pruned=dict(sorted(self.pruned.items())),
            bank_hits=self.bank_hits,
            skeletons=self.skeletons,
            segments=len(self._jobs),
            instances=self.instances,
            threads=dict(sorted(self.threads.items(), key=lambda t: int(t[0]))),
            stopped=self.stopped or "exhausted",
            intervals=self.intervals,
            reused=self.reused,
            units=self.units,
            resumed=self.resumed,
            retried=e.retried if e else 0,
            dropped=e.dropped if e else 0,
            workers=e.workers if e else 0,
            stage_seconds=dict(sorted(self.stages.items())),
            peak_memory=max(peak_resident(), self.peak),
        )


class _Stage:
    """Adds the processor time of a `with` block to an account."""

    def __init__(self, account: dict[str, float], name: str) -> None:
        self.account, self.name = account, name

    def __enter__(self) -> None:
        self.begun = time.process_time()

    def __exit__(self, *_: object) -> None:
        spent = time.process_time() - self.begun
        self.account[self.name] = self.account.get(self.name, 0.0) + spent


def _in_turn(covers: Iterable[Cover], keep: int) -> Iterator[tuple[Cover, dict[int, Choice], str]]:
    """The alternatives of several covers, one of each in turn."""
    streams = [(cover, _alternatives(cover, keep)) for cover in covers]
    while streams:
        left = []
        for cover, stream in streams:
            found = next(stream, None)
            if found is not None:
                yield (cover, *found)
                left.append((cover, stream))
        streams = left


def _alternatives(cover: Cover, keep: int) -> Iterator[tuple[dict[int, Choice], str]]:
    """The best choice everywhere, the best without second kernels everywhere, the best without
    unshifted exponentials everywhere, then one interval varied at a time, its skeletons in turn.
    """
    best = {
        id(i): i.choices[0]
        for i in cover.intervals
        if i.choices and i.choices[0].seconds <= (i.seconds or 0.0)  # else its operator as it is
    }
    yield best, _note(best.values())
    for wanted in (lambda c: c.skeleton.schedule.split is None, lambda c: c.skeleton.safe):
        chosen = {
            id(i): next(filter(wanted, i.choices or ()), best[id(i)])
            for i in cover.intervals
            if id(i) in best
        }
        yield chosen, _note(chosen.values())
    for interval in cover.intervals:
        for other in _diverse(interval.choices or [], keep):
            yield {**best, id(interval): other}, _note([other])


def _diverse(choices: list[Choice], keep: int) -> list[Choice]:
    """Choices with every skeleton's best first, then every skeleton's second, and so on."""
    rounds: dict[str, int] = {}
    ranked = []
    for position, c in enumerate(choices):
        turn = rounds.get(c.skeleton.key, 0)
        rounds[c.skeleton.key] = turn + 1
        ranked.append((turn, position, c))
    ranked.sort(key=lambda t: t[:2])
    return [c for _, _, c in ranked[: 2 * keep]]


def _note(choices: Iterable[Choice]) -> str:
    """How a candidate came about, in words."""
    parts = []
    for c in choices:
        s, z = c.skeleton, c.sizes
        words = ["x".join(str(n) for _, n in z.parts if n > 1) or "1"]
        if s.schedule.loop is not None:
            words.append(f"loop {z.loop}")
        if s.schedule.split is not None:
            words.append(f"split {z.split}, second kernel")
        parts.append("grid " + ", ".join(words))
    return "; ".join(parts)


def search(
    graph: Graph,
    machine: Machine,
    *,
    space: Space | None = None,
    budget: Budget | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    workers: int | str | None = None,
    checkpoint: Path | None = None,
    resume: Path | None = None,
    patience: float | None = None,
) -> SearchResult:
    """Candidates for a program, best predicted first; the program itself is always candidate 0.

    Deterministic for one input, machine, space and seed, for any number of workers, unless a limit
    of `budget` stops it or a unit is lost with its worker twice. Never times anything and never
    judges its own results. On Ctrl-C it returns what it has.

    Args:
        workers: processes (1: this one alone; by default the usable cores), or "ray" (a local Ray),
            or "ray://HOST:PORT".
        checkpoint: file to keep finished units in, written every few seconds and at the end.
        resume: such a file to take finished units from; also the default of `checkpoint`.
        patience: seconds of work before worker processes are started; 0 at once.

    Raises `UserError` for a number of workers below 1 or another search's checkpoint, `ParseError`
    for a file that is none, `MissingDependency` for "ray" without Ray.
    """
    run = _Search(
        graph,
        machine,
        space or Space(),
        budget or Budget(),
        seed,
        progress or Silent(),
        checkpoint,
        resume,
    )
    make = _executor(run, workers, patience)
    with run.interrupts:
        return run.run(make)


def _executor(run: _Search, workers: int | str | None, patience: float | None) -> ExecutorMaker:
    """How to make the executor that `workers` asks for."""
    count = usable_cores() if workers is None else workers
    if isinstance(count, str) and count.isdigit():
        count = int(count)
    if isinstance(count, str):
        if count != "ray" and not count.startswith("ray://"):
            raise UserError(f"workers is {count!r}: expected a number, 'ray' or 'ray://HOST:PORT'")
        from obelisk.search.ray_pool import RayPool

        address = count
        return lambda limits, tick: RayPool(run.context, limits, address)
    if count < 1:
        raise UserError(f"workers is {count}: expected 1 or more")
    if count == 1:
        return lambda limits, tick: Local(run.context, run.graph, limits, tick)
    options = {} if patience is None else {"patience": patience}
    n = count
    return lambda limits, tick: Pool(run.context, run.graph, limits, tick, n, **options)
