"""Check every candidate, race the right ones, choose. The stage `tune` of the pipeline.

Takes the program, its built candidates and optional Python baselines; gives a `TuneReport`.
Whatever a candidate does, the run goes on and the report names it. Correctness first: nothing wrong
is ever timed against the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from obelisk.base.errors import UserError
from obelisk.base.log import logger
from obelisk.base.progress import Progress, Silent
from obelisk.ir.graph import Graph
from obelisk.tune.answers import Answers
from obelisk.tune.bench import Bench
from obelisk.tune.inputs import input_specs, output_specs
from obelisk.tune.judge import Judgement, excused
from obelisk.tune.race import HINT, Runner, leader, race, ratio, ratio_spread, significantly_slower
from obelisk.tune.rigs import CPU, Rig
from obelisk.tune.stats import interval, quartile_range
from obelisk.tune.supervisor import Fallen
from obelisk.tune.taken import Steady, Turned
from obelisk.tune.types import Contender, Measured, Status, TuneItem, TuneReport, count_line

_CHECK_SHARE = 0.6  # of the budget at most for checking, the rest for the race
_SAMPLES = 3
_LEAST_LIMIT, _LIMIT_OF_OWN = 2.0, 50.0  # a hang is 50 times the program's own time and 2 s
_PATIENCE_WITH_OWN = 6
_COPY_SECONDS = 60.0
_RECHECKED = 8  # of the fastest, after the race
_STEADY_CALLS = 128  # of a finalist on a device, whose bits must not move


Grow = Callable[[Sequence["float | None"]], list[TuneItem]]


@dataclass(slots=True)
class _State:
    """What is known of one contender so far."""

    name: str
    status: Status = Status.UNTRIED
    detail: str = "not reached"
    seconds: float | None = None
    error: float | None = None
    share: float | None = None
    relative: float | None = None
    repeatable: bool | None = None
    runner: Runner | None = None

    def fell(self, status: Status, detail: str) -> None:
        self.status, self.detail = status, detail


def tune(
    program: Graph,
    items: Sequence[TuneItem],
    *,
    contenders: Sequence[Contender] = (),
    budget_seconds: float = 30.0,
    threads: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
    limit_seconds: float = 5.0,
    rig: Rig = CPU,
    grow: Grow | None = None,
    answers: Callable[[], Answers] | None = None,
) -> TuneReport:
    """Check all items against the program's float64 meaning, race the right ones, and choose the
    fastest.

    Args:
        program: what they must compute.
        items: candidates, best-ranked first; item 0 is by convention the program's own op-by-op
            kernels and wins ties.
        contenders: Python baselines, checked and timed in the same process and rounds; they cannot
            win.
        budget_seconds: wall time for checks and race. The reference and the start of the worker
            come on top, and so does each
            contender's own preparation (bounded by its `limit_seconds`).
        threads: passed to every call.
        seed: of the inputs and of the order within rounds.
        progress: gets stage "tune" with `done`, `of`, `ok`, then stage "race" with `round`,
            `alive`, `best_us`.
        limit_seconds: a checked call that takes longer counts as a hang; six times as long is
            allowed to item 0, and less to the others once its time is known (docs/tune.md).
        rig: where the items run: `CPU`, or a CUDA device's.
        grow: once all items are checked and probed, gets seconds of a call for each (None: not
            right) and gives further ones, which are checked and join the race; the report lists
            them behind the others.
        answers: gives the program's inputs and right answers for this seed, made ahead.

    Returns the report, also when no item is right, when the budget ends early, and on Ctrl-C.
    Raises `UserError` for a budget or thread count that is not positive, or a contender that no
    other process could import.
    """
    if budget_seconds <= 0 or threads < 1 or limit_seconds <= 0:
        raise UserError(
            f"tune: budget_seconds {budget_seconds}, limit_seconds {limit_seconds} and "
            f"threads {threads} must all be positive"
        )
    targets = [c.target for c in contenders]
    run = _Tuning(program, items, contenders, targets, threads, seed, progress or Silent(), rig)
    run.grow, run.answers = grow, answers
    return run.report(budget_seconds, limit_seconds)


class _Tuning:
    """One run of `tune`.

    The stages as methods, what is known so far as state, so that Ctrl-C loses nothing.
    """

    def __init__(
        self,
        program: Graph,
        items: Sequence[TuneItem],
        contenders: Sequence[Contender],
        targets: Sequence[str],
        threads: int,
        seed: int,
        progress: Progress,
        rig: Rig,
    ) -> None:
        self.rig = rig
        self.grow: Grow | None = None
        self.answers: Callable[[], Answers] | None = None
        self.program, self.items, self.contenders = program, list(items), contenders
        self.targets, self.threads, self.seed, self.progress = targets, threads, seed, progress
        self.states = [_State(i.name) for i in items] + [_State(c.name) for c in contenders]
        self.copies, self.cache_state, self.scale = 1, "resident", 1.0
        self.known: set[int] = set()  # contenders that the present worker of the race has
        self.generation = 0  # of that worker
        self.soiled = 0  # the last worker in which a candidate was not right
        self.after_python = False
        self.steady = Steady()
        self.notes: list[str] = []
        self.bandwidth: float | None = None
        self.took: dict[str, float] = {}  # seconds by what they were spent on
        self.starts: dict[str, float] = {}  # of them, each contender's own

    @contextmanager
    def spent(self, what: str) -> Iterator[None]:
        """Add the time of a block to the account."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.took[what] = self.took.get(what, 0.0) + time.monotonic() - begin

    def report(self, budget: float, limit: float) -> TuneReport:
        start = time.monotonic()
        interrupted = False
        try:
            scratch = max((i.scratch_bytes for i in self.items), default=0)
            with self.spent("answers"):
                bench = Bench(
                    self.program, self.seed, self.threads, limit, scratch, self.rig, self.answers,
                    list(dict.fromkeys(m for c in self.contenders for m in c.imports)),
                )  # fmt: skip
            with bench:
                self.scale = bench.inputs.scale
                if self.scale < 1:
                    self.notes.append(
                        f"inputs have deviation {self.scale:g}: "
                        "at 1 the program overflows in its own dtypes"
                    )
                self.notes += excused(self.program, bench.right)
                with self.spent("worker"):
                    bench.child.start()
                begin = time.monotonic()
                with self.spent("checks"):
                    self._check_all(bench, begin + _CHECK_SHARE * budget)
                if self.grow is not None:
                    with self.spent("more candidates"):
                        self._extend(bench, begin + budget - self.rig.least_race)
                left = budget - (time.monotonic() - begin)
                self._race(bench, max(left, self.rig.least_race))
                self._account()
        except KeyboardInterrupt:
            interrupted = True
            self.notes.append("interrupted: this is the best found until then")
        winner, reason = self._choose()
        first = self.states[winner].runner if winner is not None else None
        n = len(self.items)
        return TuneReport(
            program=self.program.name,
            items=tuple(self._measured(s, first) for s in self.states[:n]),
            contenders=tuple(self._measured(s, first) for s in self.states[n:]),
            winner=winner, reason=reason, cache_state=self.cache_state, copies=self.copies,
            input_scale=self.scale, threads=self.threads, seed=self.seed,
            seconds=time.monotonic() - start, interrupted=interrupted,
            bandwidth=self.bandwidth, notes=tuple(self.notes),
        )  # fmt: skip

    def _account(self) -> None:
        """Say where the time of a device's tuning went: it is short, and starts are long."""
        if not self.rig.on_device:
            return
        spent = [f"{what} {seconds:.1f} s" for what, seconds in self.took.items()]
        self.notes.append(f"tuning: {', '.join(spent)}")
        if self.starts:
            each = [f"{name} {seconds:.1f} s" for name, seconds in self.starts.items()]
            self.notes.append(f"others were ready after: {', '.join(each)}")

    # --- checks ---

    def _extend(self, bench: Bench, deadline: float) -> None:
        """Probe what is right, let the caller add items to it, and check these."""
        assert self.grow is not None
        n = len(self.items)
        self._prepare_race(bench)
        for key in range(n):
            if self.states[key].status is Status.OK and time.monotonic() < deadline:
                self._probe(bench, key)
        seconds = [
            s.runner.estimate if s.runner is not None and s.status is Status.OK else None
            for s in self.states[:n]
        ]
        new = self.grow(seconds)
        self.items += new
        self.states[n:n] = [_State(i.name) for i in new]
        share = _CHECK_SHARE * max(0.0, deadline - time.monotonic())
        self._check_all(bench, time.monotonic() + share, n)

    def _check_all(self, bench: Bench, deadline: float, first: int = 0) -> None:
        for key, item in enumerate(self.items[first:], first):
            if time.monotonic() > deadline:
                left, whole = len(self.items) - key, len(self.items) - first
                what = "more items" if first else "items"
                self.notes.append(f"the time for checks ended before {left} of {whole} {what}")
                break
            self._check(bench, key, item)
            if key == 0 and (own := self.states[0].seconds) is not None:
                bench.limit = min(bench.limit, max(_LEAST_LIMIT, _LIMIT_OF_OWN * own))
            good = sum(s.status is Status.OK for s in self.states)
            self.progress.update("tune", {"done": key + 1, "of": len(self.items), "ok": good})
            state = self.states[key]
            if state.status is not Status.OK:
                self.soiled = bench.child.generation
                logger("tune").info("%s: %s, %s", item.name, state.status.value, state.detail)

    def _check(self, bench: Bench, key: int, item: TuneItem) -> None:
        used = bench.child.running
        self._check_once(bench, key, item)
        if self.states[key].status is Status.CRASH and used:
            # Perhaps an earlier candidate left the process damaged: ask again in a fresh one.
            first = self.states[key].detail
            self.states[key] = _State(item.name)
            self._check_once(bench, key, item)
            if self.states[key].status is Status.OK:
                self.notes.append(
                    f"{item.name}: right in a fresh process; in one that others had used, {first}"
                )

    def _check_once(self, bench: Bench, key: int, item: TuneItem) -> None:
        state = self.states[key]
        if (why := _interface(self.program, item.graph)) or not item.library.is_file():
            state.fell(Status.UNLOADABLE, why or f"there is no file {item.library}")
            return
        first: list[np.ndarray] = []
        times: list[float] = []
        for turn, which in enumerate((*range(bench.inputs.sets), 0)):
            try:
                got, seconds = self._checked_call(bench, key, item, turn, which)
            except Fallen as e:
                state.fell(e.status, e.detail)
                return
            if got.status is not Status.OK:
                if (
                    turn
                    and got.status is not Status.OVERRUN
                    and self._fresh(bench, key, item, which)
                ):
                    text = f"right in a fresh process, but on call {turn + 1}: {got.detail}"
                    got = Judgement(Status.STALE, text, got.error)
                state.fell(got.status, got.detail)
                state.error, state.share = got.error, got.share
                return
            state.error = max(state.error or 0.0, got.error)
            state.share = max(state.share or 0.0, got.share)
            state.relative = max(state.relative or 0.0, got.relative)
            times.append(seconds)
            if turn == 0:
                first = [r.data.copy() for r in bench.outs]
        same = all(np.array_equal(a, r.data) for a, r in zip(first, bench.outs, strict=True))
        state.status, state.detail = Status.OK, ""
        state.seconds, state.repeatable = min(times), same

    def _checked_call(
        self, bench: Bench, key: int, item: TuneItem, turn: int, which: int
    ) -> tuple[Judgement, float]:
        """One call in the worker on input set `which`, judged here; raises `Fallen`."""
        self._load(bench, key, item)
        bench.put(which)
        bench.blank(turn, item.scratch_bytes)
        # The report needs the time of the program's own kernels however slow they are.
        limit = bench.limit * (_PATIENCE_WITH_OWN if key == 0 else 1)
        answer = bench.child.ask(limit, "run", key=key, which=which, first=turn == 0)
        if answer["code"]:
            raise Fallen(Status.REFUSED, f"it returned {answer['code']}")
        if text := answer.get("changed"):
            return Judgement(Status.OVERRUN, text), 0.0
        if text := bench.broken(item.scratch_bytes):
            return Judgement(Status.OVERRUN, text), 0.0
        return bench.judged(which, turn), float(answer["seconds"])

    def _load(self, bench: Bench, key: int, item: TuneItem) -> None:
        bench.child.start()
        try:
            bench.child.ask(bench.limit, "load", key=key, path=str(item.library))
        except Fallen as e:
            status = Status.UNLOADABLE if e.status is Status.REFUSED else e.status
            raise Fallen(status, e.detail) from e

    def _fresh(self, bench: Bench, key: int, item: TuneItem, which: int) -> bool:
        """Whether the item is right on this input set as the first call of a new process."""
        bench.child.stop()
        try:
            return self._checked_call(bench, key, item, 0, which)[0].status is Status.OK
        except Fallen:
            return False

    # --- the race ---

    def _race(self, bench: Bench, budget: float) -> None:
        """Race everyone who is right, in one fresh worker that no bad candidate has touched."""
        self._prepare_race(bench)
        n = len(self.items)
        with self.spent("start of others"):
            for key in range(n, len(self.states)):
                begin = time.monotonic()
                self._admit(bench, key)
                self.starts[self.states[key].name] = time.monotonic() - begin
        bench.child.start()
        if self.rig.on_device and self.bandwidth is None:
            self._measure_bandwidth(bench)
        deadline = time.monotonic() + budget
        with self.spent("probes"):
            for key, state in enumerate(self.states):
                pinned = key == 0 or key >= n  # what others are compared with always gets a time
                if state.status is Status.OK and (pinned or time.monotonic() < deadline):
                    self._probe(bench, key)
        entered = [s for s in self.states if s.runner is not None and s.status is Status.OK]

        def watch(done: int, alive: Sequence[Runner]) -> None:
            first = leader(alive)
            best = first.typical * 1e6 if first else 0.0
            self.progress.update("race", {"round": done, "alive": len(alive), "best_us": best})

        runners = [s.runner for s in entered if s.runner is not None]
        if runners:
            turn = partial(self._turn, bench)
            with self.spent("race"):
                ended = race(
                    runners, turn, deadline, self.seed, watch=watch, hopeless=self.rig.hopeless
                )
            self.notes.append(f"race: {ended}")
            if said := self.steady.said():
                self.notes.append(said)
        with self.spent("last checks"):
            for runner in self._finalists(runners):
                self._recheck(bench, runner.key)

    def _finalists(self, runners: Sequence[Runner]) -> list[Runner]:
        """Who is asked once more after the race: who was in it to the end, the fastest of the
        others, and what they are compared with.
        """
        right = [r for r in runners if self.states[r.key].status is Status.OK]
        fastest = sorted((r for r in right if r.candidate), key=lambda r: r.typical)[:_RECHECKED]
        keys = {r.key for r in fastest} | {r.key for r in right if r.pinned or not r.out}
        return [r for r in right if r.key in keys]

    def _prepare_race(self, bench: Bench) -> None:
        """Choose the copies of the inputs, and see that no bad candidate has touched the worker.

        On a CPU it is a fresh one; a device's takes seconds to start, and stays while all is well.
        """
        if self.copies == 1:
            self._choose_copies()
        if not self.rig.on_device or self.soiled == bench.child.generation:
            bench.child.stop()

    def _measure_bandwidth(self, bench: Bench) -> None:
        try:
            self.bandwidth = float(bench.child.ask(_COPY_SECONDS, "ceiling")["bandwidth"])
        except Fallen as e:
            self.notes.append(f"the device's bandwidth was not measured: {e.detail}")

    def _choose_copies(self) -> None:
        """Decide which cache state is measured, by inputs and last-level cache."""
        size = sum(s.nbytes for s in input_specs(self.program))
        self.cache_state, self.copies, wanted = self.rig.copies(size)
        if self.copies < wanted:
            self.notes.append("memory is short of copies of the inputs: parts may stay in cache")

    def _equip(self, bench: Bench, key: int) -> None:
        """Tell the worker what it needs to time `key`.

        A worker that replaced a dead one knows nothing.
        """
        bench.child.start()
        if bench.child.generation != self.generation:
            self.known, self.generation = set(), bench.child.generation
            for copy in range(self.copies):
                bench.put(copy % bench.inputs.sets)
                bench.child.ask(_COPY_SECONDS, "snapshot")
        if key in self.known:
            return
        if key < len(self.items):
            self._load(bench, key, self.items[key])
        else:
            at = key - len(self.items)
            one = self.contenders[at]
            bench.child.ask(
                one.limit_seconds, "prepare", key=key, target=self.targets[at], payload=one.payload
            )
        self.known.add(key)

    def _admit(self, bench: Bench, key: int) -> None:
        """Prepare a baseline and check its outputs on every copy with other inputs."""
        state, limit = self.states[key], self.contenders[key - len(self.items)].limit_seconds
        try:
            self._equip(bench, key)
        except Fallen as e:
            status = Status.UNLOADABLE if e.status is Status.REFUSED else e.status
            state.fell(status, e.detail)
            return
        state.status, state.detail = Status.OK, ""
        for copy in range(min(self.copies, bench.inputs.sets)):
            self._show(bench, key, copy, limit)

    def _show(self, bench: Bench, key: int, copy: int, limit: float) -> None:
        """One more call, judged; a contender that fails is marked."""
        state = self.states[key]
        if state.status is not Status.OK:
            return
        try:
            self._equip(bench, key)
            bench.blank(copy)
            answer = bench.child.ask(limit, "show", key=key, copy=copy)
        except Fallen as e:
            state.fell(e.status, e.detail)
            return
        if answer["code"]:
            state.fell(Status.REFUSED, f"it returned {answer['code']}")
            return
        got = bench.judged(copy % bench.inputs.sets, copy)
        state.error = max(state.error or 0.0, got.error)
        state.share = max(state.share or 0.0, got.share)
        state.relative = max(state.relative or 0.0, got.relative)
        if got.status is not Status.OK:
            state.fell(got.status, got.detail)

    def _recheck(self, bench: Bench, key: int) -> None:
        """After hundreds of calls: is it still right?"""
        n = len(self.items)
        limit = bench.limit if key < n else self.contenders[key - n].limit_seconds
        self._show(bench, key, 0, limit)
        state = self.states[key]
        if state.status in (Status.WRONG, Status.INCOMPLETE):
            state.fell(Status.STALE, f"right when checked, but after the race: {state.detail}")
        if self.rig.on_device and key < n and state.status is Status.OK:
            self._steady(bench, key)

    def _steady(self, bench: Bench, key: int) -> None:
        """A device's kernel sums in a fixed order: where bits move, its threads race, and its
        answers are right by luck.
        """
        state = self.states[key]
        try:
            got = bench.child.ask(4 * bench.limit, "steady", key=key, times=_STEADY_CALLS)
        except Fallen as e:
            state.fell(e.status, f"in calls one behind the other: {e.detail}")
            return
        if got["moved"]:
            text = f"{got['moved']} of {got['calls']} calls on the same inputs gave other bits"
            state.fell(Status.STALE, text)
            state.repeatable = False

    def _probe(self, bench: Bench, key: int) -> None:
        """Warm up and get a first estimate; makes the runner."""
        n = len(self.items)
        limit = bench.limit if key < n else self.contenders[key - n].limit_seconds
        runner = Runner(key, key == 0 or key >= n, key < n, estimate=0.0)
        got = self._timed(bench, runner, 3, 1, 4 * limit)
        if got is not None:
            runner.estimate = min(got.samples)
            self.states[key].runner = runner

    def _turn(self, bench: Bench, runner: Runner) -> tuple[list[float], int] | None:
        each = max(runner.estimate, 1e-8)
        repeats = min(max(1, round(self.rig.batch / each)), 2000)
        samples = _SAMPLES if repeats * each < 20 * self.rig.batch else 1
        limit = bench.limit + 20 * each * max(repeats, self.copies) * samples
        take = partial(self._timed, bench, runner, samples, repeats, limit)
        got = self.steady.turn(runner.key, take)
        return None if got is None else (got.samples, got.calls)

    def _timed(
        self, bench: Bench, runner: Runner, samples: int, repeats: int, limit: float
    ) -> Turned | None:
        """A turn; a runner that fails is marked and gives None."""
        python = runner.key >= len(self.items)
        try:
            self._equip(bench, runner.key)
            rest = self.rig.settle_python if self.after_python else self.rig.settle_library
            answer = bench.child.ask(
                limit, "turn", key=runner.key, samples=samples, repeats=repeats, settle=rest
            )
            self.after_python = python
            if answer["code"]:
                raise Fallen(Status.REFUSED, f"it returned {answer['code']} while being timed")
            return Turned(
                [float(x) for x in answer["seconds"]], int(answer["calls"]),
                float(answer.get("taken", 0.0)),
            )  # fmt: skip
        except Fallen as e:
            self.states[runner.key].fell(e.status, f"while being timed: {e.detail}")
            runner.out = e.status.value
            return None

    # --- the choice ---

    def _choose(self) -> tuple[int | None, str]:
        good = [k for k in range(len(self.items)) if self.states[k].status is Status.OK]
        raced = [r for k in good if (r := self.states[k].runner) and r.values]
        if not good:
            counts = [s.status for s in self.states[: len(self.items)]]
            words = count_line({s.value: counts.count(s) for s in Status if s in counts})
            return None, f"no item is right: {words}"
        if not raced:
            best = min(good, key=self._seconds)
            if 0 in good and self._seconds(0) <= HINT * self._seconds(best):
                return 0, "no time for a race, and nothing was far faster in the checked calls"
            return best, "fastest in the checked calls; there was no time for a race"
        first = leader([r for r in raced if not r.out]) or min(raced, key=lambda r: r.typical)
        own = next((r for r in raced if r.key == 0), None)
        if first is own:
            return 0, "the program's own kernels are the fastest"
        if own is None:
            return first.key, "fastest of the right items; the program's own were not raced"
        lead, rounds = ratio(own, first), len(first.values)
        if not significantly_slower(own, first):
            return 0, (
                "nothing beats the program's own kernels beyond noise "
                f"(the best is {lead:.3f} times as fast, {rounds} rounds)"
            )
        name = self.states[0].name
        return first.key, f"{lead:.2f} times as fast as the program's own kernels ({name})"

    def _seconds(self, key: int) -> float:
        """Of a checked call."""
        seconds = self.states[key].seconds
        return float("inf") if seconds is None else seconds

    def _measured(self, state: _State, winner: Runner | None) -> Measured:
        runner = state.runner
        values = runner.values if runner is not None else []
        detail = state.detail
        if state.status is Status.OK and runner is not None and runner.out:
            detail = f"left the race: {runner.out}"
        low, high = interval(values) if values else (None, None)
        return Measured(
            name=state.name, status=state.status, detail=detail,
            seconds=runner.typical if runner is not None else state.seconds,
            spread=quartile_range(values) if values else None, low=low, high=high,
            rounds=len(values), calls=runner.calls if runner is not None else 0,
            error=state.error, share=state.share, relative=state.relative,
            repeatable=state.repeatable,
            ratio=ratio(runner, winner) if runner and winner and values and winner.values else None,
            ratio_spread=ratio_spread(runner, winner) if runner and winner else None,
        )  # fmt: skip


def _interface(program: Graph, candidate: Graph) -> str:
    """How a candidate's inputs and outputs differ from the program's; empty when they agree."""
    for what, ours, theirs in (
        ("input", input_specs(program), input_specs(candidate)),
        ("output", output_specs(program), output_specs(candidate)),
    ):
        if len(ours) != len(theirs):
            return f"it has {len(theirs)} {what}s, the program {len(ours)}"
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a != b:
                return f"{what} {i} is {b.dtype}{b.shape}, the program's is {a.dtype}{a.shape}"
    return ""
