"""`optimize`: cache, search, verify, lower, build, tune, cache, in this order, in limited time.

Takes a program and a device; gives a `Compiled` whose report says what became of every candidate.
What the device is, the stages ask its back end (`backends`) and nobody else. It promises that the
program's own kernels are always among what is built, that only what the judges accepted and the
tuner found right can be the answer, that one bad candidate never ends a run, and that a time limit
or Ctrl-C ends it with the best that is known.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from obelisk.app.account import (
    Tried,
    baseline_rows,
    candidate_rows,
    choice_text,
    environment,
    fastest_form,
)
from obelisk.app.backends import Lowering
from obelisk.app.builds import Builds
from obelisk.app.compiled import Artifact, Compiled, materialise
from obelisk.app.loading import load_for
from obelisk.app.report import Report, SearchRow, count_failures
from obelisk.app.request import Request, Wanted, make_request
from obelisk.app.sizing import structure
from obelisk.app.storage import fetch, keep, key_of
from obelisk.base.errors import BuildFailed, Infeasible, ObeliskError, UserError
from obelisk.base.interrupt import Interrupts
from obelisk.base.log import logger
from obelisk.base.progress import Progress, Silent
from obelisk.base.settings import settings, usable_cores
from obelisk.ir import Graph, KernelGraph
from obelisk.ir.resize import blocks_of
from obelisk.machine import estimate
from obelisk.search import Budget, Candidate, CandidateFile, SearchStats, Space, search
from obelisk.tune import Answers, Measured, TuneItem, TuneReport, tune
from obelisk.tune import Status as TuneStatus
from obelisk.verify import Verdict, VerdictKind, Verifier

# Shares of the time limit, less what tuning needs before it times anything, at whose end a stage
# must have ended. What one leaves, the next may use.
SEARCH_ENDS, VERIFY_ENDS, BUILD_ENDS, TUNE_ENDS = 0.5, 0.7, 0.82, 0.97
# Seconds that tuning needs for its worker, per floating-point operation of the program and per byte
# of its inputs for the right answers (measured on two cores); at most this share of the limit.
TUNE_PER_FLOP, TUNE_PER_BYTE, TUNE_SHARE = 1e-9, 3e-9, 0.45
TORCH_START = 3.0  # seconds until torch is imported and has answered once
TORCH_LEAST = 12.0  # seconds of time limit: below, starting torch would take too large a part
TORCH_SHARE = 0.35  # of the time limit, for starting torch
COMPILER_START = 60.0  # seconds for a device's baseline: torch.compile compiles before it answers
LEAST_SEARCH = 0.05
GRACE = 5.0  # seconds that Ctrl-C leaves to judge, build and measure what is known
LEAST_TUNING = 0.5  # seconds; below this nothing can be told apart
PROMISING = 3.0  # candidates predicted slower than this times the best are measured as they are
GROWN_FROM = 5  # of the fastest so far, every lowering choice is tried
GROW_SHARE = 0.6  # of what is left, for building them
LEAST_GROWING = 6.0  # seconds to the end below which nothing is added
SPACE = Space()
ITSELF = Verdict(VerdictKind.PROVED, "it is the program itself", 0.0, None)


def crowding() -> float:
    """By how much this machine is slower than it could be: its load per core, at least 1."""
    return max(1.0, os.getloadavg()[0] / usable_cores())


@dataclass(slots=True)
class _Lowered:
    """One lowering of one candidate, on its way to something that runs."""

    candidate: int
    made: Lowering
    variant: str  # sizes and choices in words
    future: Future[Any] | None = None
    measured: Measured | None = None

    @property
    def name(self) -> str:
        return f"candidate {self.candidate}, {self.variant}"

    @property
    def done(self) -> bool:
        return self.future is not None and self.future.done()


def optimize(
    program: Graph | KernelGraph | str,
    *,
    device: str = "cpu",
    budget: float = 60.0,
    seed: int = 0,
    cache: bool = True,
    verify_level: str = "full",
    baselines: Sequence[str] | None = None,
    threads: int | None = None,
    without: Sequence[str] = (),
    progress: Progress | None = None,
) -> Compiled:
    """The fastest kernels for a program that were found, judged equal and measured on this machine.

    Args:
        program: a graph, a builder, or what `obelisk optimize` takes: a name or a file.
        device: "cpu", this machine, or "cuda", "cuda:N". Named programs are f32 on a CPU and f16 on
            a CUDA device; compiled for one, they take torch tensors that lie on it.
        budget: wall seconds for everything; it ends by a tenth more, but for two things: the
            program's own kernels are always built, and torch.compile, where it is among the
            baselines, compiles on top.
        seed: of the search's and the tuner's random choices.
        cache: look the program up first, and store the answer.
        verify_level: "full" (small and full size) or "quick" (small sizes only).
        baselines: what to measure beside it, of `contenders.ALL` or `contenders_cuda.RIVALS`; what
            is missing is said so. By default the few that start quickly.
        without: decisions of the lowering to leave out, to see what they bring: of the back end's
            `ablations` (docs/cli.md).
        threads: how many the kernels use; by default `OBELISK_THREADS`, else all cores.
        progress: gets the counts of each stage.

    Returns the program's own kernels when nothing beats them, and says so in its report. Raises
    `UserError` for a wrong request or where there is no such device, `MissingDependency` where
    there is no compiler, `Infeasible` or `BuildFailed` when not even the program's own kernels can
    be made here.
    """
    if isinstance(program, str):
        program = load_for(program, device)
    graph = program.freeze() if isinstance(program, KernelGraph) else program
    wanted = Wanted(device, budget, seed, cache, verify_level, baselines, threads, without)
    return optimize_given(graph, None, wanted, progress)


def optimize_given(
    graph: Graph,
    found: CandidateFile | None,
    wanted: Wanted,
    progress: Progress | None = None,
) -> Compiled:
    """`optimize` on candidates that were found elsewhere, instead of a search (None: search).

    They are judged, built and measured here like any others; the cache is left alone. Raises
    `UserError` for candidates of another program, and what `optimize` raises.
    """
    if found is not None:
        wanted = replace(wanted, cache=False)
    request = make_request(graph, wanted, SPACE)
    run = _Run(request, progress or Silent())
    if found is not None:
        if found.program.digest != graph.digest:
            raise UserError(f"the candidates are of {found.program.name}, not of {graph.name}")
        machine = request.machine
        run.given = tuple(
            Candidate(c.graph, estimate(c.graph, machine), c.note) for c in found.candidates[1:]
        )
        run.notes.append(f"candidates were found for {found.machine}, not searched here")
    return run.result()


@dataclass
class _Run:
    """One run: what is known so far is state, so that Ctrl-C and errors lose nothing."""

    request: Request
    progress: Progress
    begun: float = field(default_factory=time.monotonic)
    limit: float = 0.0  # seconds for everything but what tuning needs before it times
    reserve: float = 0.0  # seconds for that
    candidates: list[Candidate] = field(default_factory=list)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    fallen: dict[int, tuple[str, str]] = field(default_factory=dict)  # candidate: status, reason
    lowered: list[_Lowered] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    stages: dict[str, float] = field(default_factory=dict)
    ready: list[tuple[_Lowered, Any]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)  # digests of what was lowered
    known: dict[str, list[Any]] = field(default_factory=dict)  # lowering choices by graph
    build: Builds = field(init=False)
    stats: SearchStats = field(default_factory=SearchStats)
    notes: list[str] = field(default_factory=list)
    interrupts: int = 0
    watch: Interrupts = field(default_factory=Interrupts)
    answers: Future[Answers] | None = None  # made ahead where a device leaves the cores idle
    given: tuple[Candidate, ...] | None = None  # found elsewhere: nothing is searched

    def result(self) -> Compiled:
        """Answer from the cache, or run the stages."""
        request, started = self.request, self.begun
        key = key_of(request) if request.cache else None
        if key is not None and (hit := fetch(key, request)) is not None:
            return hit
        self.reserve = self._reserve()
        self.limit = request.budget - self.reserve
        builders = ThreadPoolExecutor(max(1, settings().threads), "obelisk-build")
        self.build = Builds(request.backend.builder(request.machine, builders))
        ahead = ThreadPoolExecutor(1, "obelisk-answers")
        if request.backend.rig(request.device).on_device:
            self.answers = ahead.submit(Answers, request.program, request.seed)
        try:
            with self.watch:
                artifact = self._stages(started)
        finally:
            builders.shutdown(wait=False, cancel_futures=True)
            ahead.shutdown(wait=False, cancel_futures=True)
        if key is not None and not self.interrupts:
            keep(key, artifact)
        return materialise(artifact)

    def _reserve(self) -> float:
        """Seconds that tuning will take before it times anything."""
        program, backend = self.request.program, self.request.backend
        flops = estimate(program, self.request.machine).flops
        size = sum(node.nbytes for node in program.inputs)
        wanted = backend.start_seconds
        if not backend.rig(self.request.device).on_device:
            # A device's answers and its worker's imports are made beside the other stages.
            wanted += TUNE_PER_FLOP * flops + TUNE_PER_BYTE * size
            wanted += TORCH_START * any(backend.starts_slowly(name) for name in self._affordable())
        return min(wanted * crowding(), TUNE_SHARE * self.request.budget)

    def left(self, share: float) -> float:
        """Seconds until `share` of the time limit is spent; a Ctrl-C that was lost shortens it."""
        if self.watch.count > self.interrupts:
            self._interrupt()
        return self.begun + share * self.limit - time.monotonic()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage. Ctrl-C ends the stage, and leaves `GRACE` seconds for the later ones."""
        begin = time.monotonic()
        try:
            yield
        except KeyboardInterrupt:
            self._interrupt()
        finally:
            self.stages[name] = time.monotonic() - begin

    def _interrupt(self) -> None:
        self.interrupts += 1
        self.begun, self.limit = time.monotonic(), GRACE / self.interrupts**3
        self.reserve = 0.0

    def _stages(self, started: float) -> Artifact:
        program, machine = self.request.program, self.request.machine
        self.candidates.append(Candidate(program, estimate(program, machine), "the program itself"))
        self.verdicts[0] = ITSELF
        self._own()  # compiled while the search runs
        with self.stage("search"):
            self._search()
        with self.stage("verify"):
            self._verify()
        with self.stage("build"):
            self._build()
        tuned: TuneReport | None = None
        absent: dict[str, str] = {}
        with self.stage("tune"):
            tuned, absent = self._tune()
        if tuned is not None and tuned.interrupted:
            self._interrupt()
        return self._artifact(tuned, absent, time.monotonic() - started)

    def _search(self) -> None:
        request = self.request
        if self.given is not None:
            self.candidates.extend(self.given)
            return
        try:
            found = search(
                request.program,
                request.machine,
                space=request.space,
                budget=Budget(seconds=max(self.left(SEARCH_ENDS), LEAST_SEARCH)),
                seed=request.seed,
                progress=self.progress,
            )
        except Exception as error:  # a fault of ours, said loudly; the program is still an answer
            self.failures["search failed"] += 1
            self.notes.append(f"the search failed: {type(error).__name__}: {error}")
            logger("app").exception("the search failed; going on with the program itself")
            return
        self.stats = found.stats
        self.candidates.extend(found.candidates[1:])
        if found.stats.stopped == "interrupted":
            self._interrupt()

    def _verify(self) -> None:
        """Judge the candidates in order of rank; start building each that passes."""
        request = self.request
        verifier = Verifier(request.program, seed=request.seed)
        for i, candidate in enumerate(self.candidates[1:], 1):
            if self.left(VERIFY_ENDS) <= 0:
                break
            counts = {"judged": i - 1, "of": len(self.candidates) - 1, **self._judged()}
            self.progress.update("verify", counts)
            try:
                verdict = verifier.verify(candidate.graph)
            except Exception as error:  # a judge that fails is no reason to lose the others
                self._fell(i, "judge failed", error)
                continue
            self.verdicts[i] = verdict
            if not verdict.accepted:
                self._rejected(i, verdict)
                continue
            made = self._lower(i, candidate.graph, 0)
            if made is not None and not made.made.slow:
                made.future = self.build(made.made)

    def _rejected(self, candidate: int, verdict: Verdict) -> None:
        self.verdicts[candidate] = verdict
        self.fallen[candidate] = (verdict.kind.value, verdict.witness or verdict.bound)
        self.failures[verdict.kind.value] += 1

    def _judged(self) -> dict[str, int]:
        kinds = Counter(v.kind.value for i, v in self.verdicts.items() if i)
        return {kind.value: kinds[kind.value] for kind in VerdictKind}

    def _fell(self, candidate: int, status: str, error: Exception) -> None:
        """Count a failure; the candidate's row shows the first one."""
        self.failures[status] += 1
        text = str(error) if isinstance(error, ObeliskError) else f"{type(error).__name__}: {error}"
        self.fallen.setdefault(candidate, (status, text))
        logger("app").info("candidate %d: %s: %s", candidate, status, text)

    def _own(self) -> None:
        """Lower the program itself and start building it."""
        made = self._lower(0, self.request.program, 0)
        if made is not None:
            made.future = self.build(made.made)

    def _lower(self, candidate: int, graph: Graph, choice: int) -> _Lowered | None:
        """Lower one choice of a candidate, at its own sizes or a sibling's; None where there is
        none, or the text is known.
        """
        request, backend = self.request, self.request.backend
        try:
            options = self._options(graph)
            if choice >= len(options):
                return None
            made = backend.lower(graph, request.machine, options[choice])
        except Infeasible as error:
            self._fell(candidate, "infeasible", error)
            return None
        except Exception as error:  # a fault of the emitter costs this candidate, not the run
            self._fell(candidate, "code generation failed", error)
            return None
        if made.digest in self.seen:
            return None
        self.seen.add(made.digest)
        words = [made.label]
        if graph is not self.candidates[candidate].graph:
            words.insert(0, sizes_of(graph))
        found = _Lowered(candidate, made, ", ".join(words))
        self.lowered.append(found)
        return found

    def _options(self, graph: Graph) -> list[Any]:
        """The lowering choices of a graph, made once."""
        if graph.digest not in self.known:
            self.known[graph.digest] = self.request.options(graph)
        return self.known[graph.digest]

    def _choices(self, graph: Graph) -> int:
        """How many lowering choices a graph has; 0 where it cannot be lowered."""
        try:
            return len(self._options(graph))
        except Exception:  # counted where the default choice is lowered
            return 0

    def _pool(self) -> list[tuple[int, Graph]]:
        """What may be lowered: accepted candidates in order, then siblings of the promising."""
        request = self.request
        good = [i for i, v in sorted(self.verdicts.items()) if v.accepted]
        own = [(i, self.candidates[i].graph) for i in good]
        known = {g.digest for _, g in own}
        more: list[tuple[int, float, int, Graph]] = []
        structures: set[Hashable] = set()
        for i in good:
            kind = structure(self.candidates[i].graph)
            if i == 0 or not self._promising(i) or kind in structures:
                continue
            structures.add(kind)
            for rank, graph in enumerate(self._siblings(i, self.candidates[i].graph)):
                if graph.digest not in known:
                    known.add(graph.digest)
                    more.append((rank, estimate(graph, request.machine).seconds, i, graph))
        more.sort(key=lambda m: m[:3])
        return own + [(i, g) for _, _, i, g in more]

    def _siblings(self, candidate: int, graph: Graph) -> Sequence[Graph]:
        """Other sizes of a graph; none where a fault of ours keeps them from being made."""
        try:
            return self.request.backend.siblings(graph, self.request.machine)
        except Exception as error:
            self._fell(candidate, "sizing failed", error)
            return ()

    def _promising(self, candidate: int) -> bool:
        """Whether the model thinks it worth more than one try (where tries are not few anyway)."""
        if not self.request.backend.grow_items:
            return True
        costs = [c.cost.seconds for c in self.candidates]
        return costs[candidate] <= PROMISING * min(costs)

    def _build(self) -> None:
        """Lower further choices and sizes while there is time, then wait for the compilers."""
        most = self.request.backend.most_items
        left, choice = self._pool(), 0
        while left and self._fast() < most and self.left(VERIFY_ENDS) > 0:
            still: list[tuple[int, Graph]] = []
            for i, graph in left:
                if self._fast() >= most or self.left(VERIFY_ENDS) <= 0:
                    break
                if choice or graph is not self.candidates[i].graph:
                    self._lower(i, graph, choice)
                if choice + 1 < self._choices(graph) and self._promising(i):
                    still.append((i, graph))
            left, choice = still, choice + 1
        self._start(most)
        self._wait(lambda: self.left(BUILD_ENDS))

    def _fast(self) -> int:
        return sum(not item.made.slow for item in self.lowered)

    def _start(self, most: int) -> None:
        """Start building what was lowered, the forms that are meant to be fast first."""
        started = sum(item.future is not None for item in self.lowered)
        for item in sorted(self.lowered, key=lambda x: x.made.slow):
            if item.future is None and started < most:
                item.future = self.build(item.made)
                started += 1
        self.lowered = [item for item in self.lowered if item.future is not None]

    def _wait(self, left: Callable[[], float]) -> None:
        """Wait for the compilers while there is time."""
        while left() > 0:
            futures = [item.future for item in self.lowered if item.future is not None]
            waiting = [f for f in futures if not f.done()]
            counts = {"done": len(futures) - len(waiting), "of": len(futures)}
            self.progress.update("build", counts)
            if not waiting:
                break
            wait_futures(waiting, timeout=min(0.2, max(left(), 0.01)))

    def _built(self, items: Sequence[_Lowered]) -> list[tuple[_Lowered, Any]]:
        """The lowerings that were built; the others are counted by reason."""
        out: list[tuple[_Lowered, Any]] = []
        for item in items:
            if item.future is None:
                continue
            first = item.candidate == 0 and not self.ready and not out
            if not first and not item.done:
                item.future.cancel()
                self._fell(item.candidate, "not built in time", BuildFailed("time limit"))
                continue
            try:
                out.append((item, item.future.result()))
            except Exception as error:  # whatever one compiler run does, the others go on
                self._fell(item.candidate, "build failed", error)
        return out

    def _items(self, built: Sequence[tuple[_Lowered, Any]]) -> list[TuneItem]:
        return [
            TuneItem(item.name, item.made.graph, made.path, item.made.scratch_bytes)
            for item, made in built
        ]

    def _tune(self) -> tuple[TuneReport | None, dict[str, str]]:
        """Check and time what was built, beside the baselines."""
        request = self.request
        self.ready = self._built(self.lowered)
        items = self._items(self.ready)
        if not items or self.interrupts > 1:
            return None, {}
        limit = self.limit * TORCH_SHARE
        rig = request.backend.rig(request.device)
        if rig.on_device:  # their start comes on top, and a comparison without them is none
            limit = max(limit, COMPILER_START)
        others, absent = request.backend.contenders(request.program, self._affordable(), limit)
        for name in request.baselines:
            if name not in absent and all(c.name != name for c in others):
                absent[name] = f"not measured within a time limit below {TORCH_LEAST:g} s"
        report = tune(
            request.program,
            items,
            contenders=others,
            budget_seconds=max(self.left(TUNE_ENDS), LEAST_TUNING),
            threads=request.threads,
            seed=request.seed,
            progress=self.progress,
            rig=rig,
            grow=self._grow if self._may_grow() else None,
            answers=self.answers.result if self.answers is not None else None,
        )
        found: dict[TuneStatus, str] = {}
        for (item, _), measured in zip(self.ready, report.items, strict=True):
            item.measured = measured
            if measured.status is not TuneStatus.OK:
                error = BuildFailed(measured.detail)
                self._fell(item.candidate, measured.status.value, error)
                if measured.status is not TuneStatus.UNTRIED:
                    found.setdefault(measured.status, f"{measured.name}: {measured.detail}")
        self.notes += [f"the first {status.value}: {text}" for status, text in found.items()]
        return report, absent

    def _may_grow(self) -> bool:
        more = self.request.backend.grow_items and not self.interrupts
        return bool(more) and self.left(TUNE_ENDS) > LEAST_GROWING

    def _grow(self, seconds: Sequence[float | None]) -> list[TuneItem]:
        """Further lowerings of what is fastest so far: every choice, at neighbouring sizes too."""
        most = self.request.backend.grow_items
        timed = sorted((s, i) for i, s in enumerate(seconds) if s is not None)
        leaders: dict[str, tuple[int, Graph]] = {}
        for _, i in timed:
            item = self.ready[i][0]
            if item.candidate and len(leaders) < GROWN_FROM:
                leaders.setdefault(item.made.graph.digest, (item.candidate, item.made.graph))
        begin, before = time.monotonic(), len(self.lowered)
        pool = list(leaders.values())
        for i, graph in pool[:2]:
            known = {g.digest for _, g in pool}
            near = self._siblings(i, graph)
            pool += [(i, g) for g in near if g.digest not in known][:GROWN_FROM]
        # The first have the most choices tried: rank and number of the choice count alike.
        order = [(p + c, p, c) for p, (_, g) in enumerate(pool) for c in range(self._choices(g))]
        for _, p, choice in sorted(order):
            if len(self.lowered) - before < most:
                self._lower(*pool[p], choice)
        new = [item for item in self.lowered[before:] if not item.made.slow]
        self.lowered[before:] = new
        for item in new:
            item.future = self.build(item.made)
        room = GROW_SHARE * max(self.left(TUNE_ENDS), 0.0)
        self._wait(lambda: begin + room - time.monotonic())
        built = self._built(new)
        self.ready += built
        self.stages["grow"] = time.monotonic() - begin
        return self._items(built)

    def _affordable(self) -> tuple[str, ...]:
        """The baselines that the time limit allows: torch takes seconds to start."""
        names = self.request.baselines
        if self.interrupts or self.request.budget < TORCH_LEAST:
            return tuple(n for n in names if not self.request.backend.starts_slowly(n))
        return names

    def _artifact(
        self, tuned: TuneReport | None, absent: dict[str, str], seconds: float
    ) -> Artifact:
        """Choose, and put everything that is known together."""
        request = self.request
        item, built = self._choose(tuned)
        own = [m for k, _ in self.ready if k.candidate == 0 and (m := k.measured) is not None]
        choice = tuned.reason if tuned else "nothing was measured"
        if tuned and tuned.winner is not None and self.ready[tuned.winner][0] is not item:
            choice = "the fastest whose graph is judged equal"
        if item.measured is not None:
            choice = choice_text(choice, item.measured, own)
        lowerings: dict[int, list[Tried]] = {}
        for known in self.lowered:
            lowerings.setdefault(known.candidate, []).append(
                Tried(known.variant, known.measured, known.made.launches, known.made.target)
            )
        if made := self.build.account(found for _, found in self.ready):
            self.notes.append(made)
        report = Report(
            program=request.program.name,
            digest=request.program.digest,
            device=request.machine.name,
            seed=request.seed,
            budget_seconds=request.budget,
            seconds=seconds,
            candidates=candidate_rows(
                self.candidates, self.verdicts, self.fallen, lowerings, item.candidate
            ),
            baselines=baseline_rows(
                fastest_form(own),
                ": ".join(self.fallen.get(0, ())),
                tuned.contenders if tuned else (),
                absent,
            ),
            search=SearchRow(self.stats.seconds, self.stats.states, dict(self.stats.pruned)),
            stages=dict(self.stages),
            failures=count_failures(self.failures),
            environment=environment(
                request.machine, request.threads, request.backend.environment(request.device)
            ),
            choice=choice,
            notes=(*self.notes, *_notes(tuned)),
            interrupted=self.interrupts > 0,
            floor_us=_floor_us(request.program, tuned.bandwidth if tuned else None),
        )
        return Artifact(
            program=request.program,
            graph=item.made.graph,
            verdict=self.verdicts[item.candidate],
            source=item.made.source,
            files=request.backend.files(item.made, built),
            backend=request.backend.name,
            target=request.backend.target(request.machine),
            scratch_bytes=item.made.scratch_bytes,
            threads=request.threads,
            report=report,
        )

    def _choose(self, tuned: TuneReport | None) -> tuple[_Lowered, Any]:
        """The tuner's winner; the program's own kernels where nothing was measured."""
        for item, built in self._ranked(tuned):
            if self._confirmed(item):
                return item, built
        unmeasured = tuned is None or all(m.status is TuneStatus.UNTRIED for m in tuned.items)
        if unmeasured:
            for item, built in self.ready or self._built(self.lowered):
                if item.candidate == 0:
                    return item, built
        status, reason = self.fallen.get(0, ("not built", "no time was left"))
        text = f"{self.request.program.name} cannot be compiled here: {status}: {reason}"
        raise Infeasible(text) if status == "infeasible" else BuildFailed(text)

    def _ranked(self, tuned: TuneReport | None) -> list[tuple[_Lowered, Any]]:
        """The tuner's winner, then the others that are right by their times."""
        if tuned is None or tuned.winner is None:
            return []
        right = [
            (m.seconds, i)
            for i, m in enumerate(tuned.items)
            if m.status is TuneStatus.OK and m.seconds is not None and i != tuned.winner
        ]
        return [self.ready[i] for i in (tuned.winner, *(i for _, i in sorted(right)))]

    def _confirmed(self, item: _Lowered) -> bool:
        """Judge the winner again, now at the program's own sizes too, if that was asked for. A
        sibling, whose sizes no judge has seen, is always judged.
        """
        request, i = self.request, item.candidate
        same = item.made.graph is self.candidates[i].graph
        full = request.verify_level == "full" and not self.interrupts
        if i == 0 or (same and not full):
            return True
        verifier = Verifier(request.program, seed=request.seed + 1, full_size=full)
        verdict = verifier.verify(item.made.graph)
        if verdict.accepted:
            self.verdicts[i] = verdict
            return True
        if same:
            self._rejected(i, verdict)
        else:  # the candidate's own sizes are as right as they were
            self.failures[verdict.kind.value] += 1
            why = verdict.witness or verdict.bound
            self.notes.append(f"candidate {i} at {item.variant}: {verdict.kind.value}: {why}")
        return False


def sizes_of(graph: Graph) -> str:
    """The grids and loops of a graph's kernels in words."""
    words = []
    for block in blocks_of(graph):
        loop = f" loop {block.loop}" if block.loop > 1 else ""
        words.append(f"grid {'x'.join(map(str, block.grid))}{loop}")
    return ", ".join(words)


def _floor_us(program: Graph, bandwidth: float | None) -> float | None:
    """Microseconds to read the inputs and write the outputs once."""
    if bandwidth is None:
        return None
    return sum(n.nbytes for n in (*program.inputs, *program.outputs)) / bandwidth * 1e6


def _notes(tuned: TuneReport | None) -> tuple[str, ...]:
    """What a reader of the times must know."""
    if tuned is None:
        return ()
    return (f"inputs {tuned.cache_state} in {tuned.copies} copies", *tuned.notes)
