"""The race: who is fastest, found with few calls and in spite of noise. Knows nothing of processes
or arrays.

Takes runners and a function that gives one runner's turn (seconds of one call, several samples);
appends one value per round to each runner that is still in. All runners of a round run one after
the other in a shuffled order, so drift of the machine hits all alike and rounds can be compared in
pairs. docs/tune.md states the protocol.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp, log

import numpy as np

from obelisk.tune.stats import median, quartile_range, slower_p

SIGNIFICANT = 0.01  # one-sided sign test
TIE = 0.01  # medians closer than this are equal for every practical purpose
HINT = 1.25  # ratio that is believed without statistics
FIRST = 7  # rounds before the first judgement: the fewest at which the test can reach SIGNIFICANT
ROUNDS = 56
FAR = 2.0  # times the leader: a pinned runner need not run to the end
HOPELESS = 4.0  # times the fastest in the probe: not raced at all


@dataclass(slots=True)
class Runner:
    """One contender of the race.

    Attributes:
        key: index for the caller.
        pinned: the program's own kernels and baselines, whose time the report needs: dropped only
            when it is known well enough.
        candidate: may win.
        estimate: seconds of a call by the probe.
        values: per round, the median of its samples.
        calls: timed calls so far.
        out: why it left before the end ("" while it is in).
    """

    key: int
    pinned: bool
    candidate: bool
    estimate: float
    values: list[float] = field(default_factory=list)
    calls: int = 0
    out: str = ""

    @property
    def typical(self) -> float:
        """Median over rounds: what is reported. The probe's estimate before the first round."""
        return median(self.values) if self.values else self.estimate


Turn = Callable[[Runner], "tuple[list[float], int] | None"]


def race(
    runners: Sequence[Runner],
    turn: Turn,
    deadline: float,
    seed: int = 0,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.monotonic,
    watch: Callable[[int, Sequence[Runner]], None] = lambda n, alive: None,
    hopeless: float = HOPELESS,
) -> str:
    """Run rounds until the order is clear, `rounds` are done, or `clock()` passes `deadline`; says
    which.

    `turn` returns samples and the number of calls, or None when the runner fell (it then leaves).
    Successive halving: after FIRST rounds and whenever that many have doubled, runners that are
    significantly slower than the leader leave, and of the rest the slower half unless tied with it.
    Candidates `hopeless` times slower than the best in the probe do not begin.
    """
    rng = np.random.default_rng(seed)
    best = min((r.estimate for r in runners if r.candidate), default=0.0)
    for r in runners:
        if not r.pinned and r.estimate > hopeless * best:
            r.out = f"over {hopeless:g} times slower than the best in the probe"
    done, check = 0, FIRST
    while done < rounds:
        alive = [r for r in runners if not r.out]
        if not alive:
            return "nobody is left"
        for i in rng.permutation(len(alive)):
            if clock() > deadline:
                return "the time budget was used up"
            got = turn(alive[i])
            if got is None:
                alive[i].out = alive[i].out or "fell"
                continue
            samples, calls = got
            alive[i].values.append(median(samples))
            alive[i].calls += calls
        done += 1
        watch(done, alive)
        if done == check:
            check *= 2
            _drop(runners, done)
            if _settled(runners, done):
                return "the order is clear"
    return f"{rounds} rounds were run"


def ratio(a: Runner, b: Runner) -> float:
    """How many times slower `a` is than `b`: the median over rounds of their ratio in each round.

    What disturbs a round disturbs both, so drift cancels; without common rounds the probe decides.
    """
    pairs = list(zip(a.values, b.values, strict=False))
    return median(x / y for x, y in pairs) if pairs else a.estimate / b.estimate


def ratio_spread(a: Runner, b: Runner) -> float | None:
    """Interquartile range of that ratio over rounds; None without common rounds."""
    pairs = list(zip(a.values, b.values, strict=False))
    return quartile_range([x / y for x, y in pairs]) if pairs else None


def leader(runners: Sequence[Runner]) -> Runner | None:
    """The fastest candidate among those still in: the smallest median over rounds.

    Times count relative to their round, that is, to the geometric mean of all who ran in it.
    """
    entered = [r for r in runners if r.candidate and not r.out]
    rounds = min((len(r.values) for r in entered), default=0)
    if not rounds:
        return min(entered, key=lambda r: r.estimate, default=None)
    means = [exp(sum(log(r.values[i]) for r in entered) / len(entered)) for i in range(rounds)]
    return min(entered, key=lambda r: median(v / m for v, m in zip(r.values, means, strict=False)))


def significantly_slower(a: Runner, b: Runner) -> bool:
    """Whether `a` is slower than `b` by more than a tie, in too many rounds for chance.

    Below FIRST rounds no test can say so: then `a` must have lost every round, by HINT.
    """
    pairs = list(zip(a.values, b.values, strict=False))
    if len(pairs) < FIRST:
        return ratio(a, b) > HINT and all(x > y for x, y in pairs)
    return ratio(a, b) > 1 + TIE and slower_p(a.values, b.values) < SIGNIFICANT


def _drop(runners: Sequence[Runner], done: int) -> None:
    first = leader(runners)
    if first is None:
        return
    for r in runners:
        if not r.out and r.candidate and not r.pinned and significantly_slower(r, first):
            r.out = f"significantly slower after {done} rounds"
    entered = [r for r in runners if r.candidate and not r.out]
    order = sorted(entered, key=lambda r: ratio(r, first))
    for r in order[max(2, -(-len(order) // 2)) :]:
        if not r.pinned and ratio(r, first) > 1 + TIE:
            r.out = f"in the slower half after {done} rounds"
    for r in runners:
        # What is far off, and not by chance, has been timed often enough for the report.
        far = r.pinned and not r.out and done >= 2 * FIRST and ratio(r, first) > FAR
        if far and significantly_slower(r, first):
            r.out = f"far slower after {done} rounds"


def _settled(runners: Sequence[Runner], done: int) -> bool:
    first = leader(runners)
    if first is None or done < 2 * FIRST:
        return False
    rivals = [r for r in runners if not r.out and r is not first]
    clear = all(significantly_slower(r, first) or significantly_slower(first, r) for r in rivals)
    tied = all(abs(ratio(r, first) - 1) <= TIE for r in rivals)
    return clear or (tied and done >= 4 * FIRST)
