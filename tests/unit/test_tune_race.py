"""The race and its statistics, on synthetic clocks and noise: no process, no array.

Proves that the fastest wins under noise and drift, that ties are seen as ties, that few calls are
spent on hopeless runners, and that the deadline and falling runners are handled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from obelisk.tune.race import (
    FIRST,
    ROUNDS,
    Runner,
    leader,
    race,
    ratio,
    ratio_spread,
    significantly_slower,
)
from obelisk.tune.stats import interval, median, quartile_range, slower_p


class Field:
    """Runners with given true times, on a clock that only their calls advance."""

    def __init__(
        self,
        times: Sequence[float],
        noise: float = 0.02,
        drift: Callable[[float], float] = lambda t: 1.0,
        seed: int = 0,
    ) -> None:
        self.times, self.noise, self.drift = times, noise, drift
        self.rng = np.random.default_rng(seed)
        self.now = 0.0
        self.runners = [
            Runner(k, k == 0, True, min(self.call(k) for _ in range(3))) for k in range(len(times))
        ]

    def call(self, k: int) -> float:
        """One call: true time, drift of the machine, noise that only slows down, rare outliers."""
        slow = 1 + abs(self.rng.normal(0, self.noise)) + (self.rng.random() < 0.02) * 3
        took = self.times[k] * self.drift(self.now) * slow
        self.now += took
        return float(took)

    def turn(self, r: Runner) -> tuple[list[float], int] | None:
        """Three samples."""
        return [self.call(r.key) for _ in range(3)], 3

    def race(self, deadline: float = 1e9, seed: int = 0) -> str:
        """Run it."""
        return race(self.runners, self.turn, deadline, seed, clock=lambda: self.now)


@pytest.mark.parametrize("seed", range(10))
def test_the_fastest_wins_under_noise(seed: int) -> None:
    """5% apart under 2% one-sided noise with outliers."""
    field = Field([1.0, 0.8, 0.76, 0.9, 1.5, 2.0], seed=seed)
    field.race(seed=seed)
    first = leader(field.runners)
    assert first is not None
    assert first.key == 2


@pytest.mark.parametrize("seed", range(5))
def test_drift_hits_all_alike(seed: int) -> None:
    """The machine halves its speed during the race: the order does not change."""
    field = Field([1.0, 0.95, 0.9], drift=lambda t: 1 + min(t / 60, 1.0), seed=seed)
    field.race(seed=seed)
    first = leader(field.runners)
    assert first is not None
    assert first.key == 2
    assert significantly_slower(field.runners[0], first)


def test_without_interleaving_the_same_drift_would_mislead() -> None:
    """The control: timed one after the other, the slowest looks fastest."""
    field = Field([1.0, 0.95, 0.9], noise=0.0, drift=lambda t: 1 + t / 60)
    alone = [median([field.call(k) for _ in range(60)]) for k in range(3)]
    assert alone[0] < alone[1] < alone[2]


def test_equal_runners_are_a_tie() -> None:
    """No significance where there is no difference: at most one false alarm in twenty races."""
    alarms = 0
    for seed in range(20):
        field = Field([1.0, 1.0], seed=seed)
        field.race(seed=seed)
        a, b = field.runners
        alarms += significantly_slower(a, b) or significantly_slower(b, a)
    assert alarms <= 1


def test_few_calls_for_the_hopeless() -> None:
    """40 runners: most leave early; the leader and the pinned one run to the end."""
    times = [2.0] + [1.0 + 0.05 * k for k in range(38)] + [50.0]
    field = Field(times)
    field.race()
    rounds = [len(r.values) for r in field.runners]
    assert rounds[-1] == 0, "hopeless in the probe"
    assert field.runners[-1].out
    assert sum(n <= FIRST for n in rounds) >= 20
    assert rounds[0] == max(rounds), "the program's own kernels are pinned"
    assert sum(rounds) < 0.35 * 40 * ROUNDS
    first = leader(field.runners)
    assert first is not None
    assert first.key == 1


def test_how_slow_is_hopeless_can_be_said() -> None:
    """A device's probe is exact enough to leave out what is half as slow again."""
    fast, slow = Runner(0, False, True, 1.0), Runner(1, False, True, 1.6)
    race([fast, slow], lambda r: ([r.estimate], 1), float("inf"), rounds=7, hopeless=1.5)
    assert slow.out.startswith("over 1.5 times slower")
    assert not slow.values
    assert len(fast.values) == 7


def test_the_ratio_that_decides_has_a_spread() -> None:
    """Drift that hits both in each round is in neither the ratio nor its spread."""
    a, b = Runner(0, True, True, 2.0), Runner(1, False, True, 1.0)
    a.values, b.values = [2.0, 20.0, 4.2], [1.0, 10.0, 2.0]
    assert ratio(a, b) == 2.0
    assert ratio_spread(a, b) == pytest.approx(0.05)
    assert ratio_spread(a, Runner(2, False, True, 1.0)) is None


def test_a_clear_order_ends_the_race_early() -> None:
    """Two runners, a factor of two: no need for all rounds."""
    field = Field([2.0, 1.0])
    assert field.race() == "the order is clear"
    assert len(field.runners[1].values) == 2 * FIRST


@pytest.mark.parametrize(("times", "expected"), [([1.0, 0.5], True), ([1.0, 0.9], False)])
def test_with_few_rounds_only_a_large_lead_counts(times: list[float], expected: bool) -> None:
    """Three rounds, no statistics: a factor of two is believed, a tenth is not."""
    field = Field(times, noise=0.001, seed=3)
    race(field.runners, field.turn, 1e9, rounds=3, clock=lambda: field.now)
    own, other = field.runners
    assert len(own.values) == 3
    assert significantly_slower(own, other) is expected


def test_interference_does_not_hide_the_fastest() -> None:
    """Another job slows half of all turns by up to three times: the order of ten races is right."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        field = Field([1.0, 0.6, 0.8], noise=0.01, seed=seed)

        def turn(
            r: Runner, field: Field = field, rng: np.random.Generator = rng
        ) -> tuple[list[float], int]:
            slow = 1 + 2 * rng.random() * (rng.random() < 0.5)
            return [field.call(r.key) * slow for _ in range(3)], 3

        race(field.runners, turn, 1e9, seed, clock=lambda field=field: field.now)
        first = leader(field.runners)
        assert first is not None
        assert first.key == 1
        assert significantly_slower(field.runners[0], first)


def test_the_deadline_ends_it() -> None:
    """In the middle of a round if need be; what was measured stays."""
    field = Field([1.0] * 5)
    deadline = field.now + 40
    assert "budget" in field.race(deadline)
    assert field.now < deadline + 3 * 4.2, "one more turn at most"
    assert all(r.values for r in field.runners)


def test_a_runner_that_falls_leaves() -> None:
    """And nobody else is disturbed."""
    field = Field([1.0, 0.5, 0.8])
    turns = itertools.count()

    def turn(r: Runner) -> tuple[list[float], int] | None:
        return None if r.key == 1 and next(turns) >= 3 else field.turn(r)

    race(field.runners, turn, 1e9, clock=lambda: field.now)
    assert field.runners[1].out == "fell"
    assert len(field.runners[1].values) == 3
    first = leader(field.runners)
    assert first is not None
    assert first.key == 2


def test_a_slow_baseline_is_not_timed_for_ever() -> None:
    """A baseline at twice the leader's time has been timed enough after 14 rounds."""
    field = Field([1.0, 0.99, 3.0])
    field.runners[2].candidate, field.runners[2].pinned = False, True
    field.race()
    assert len(field.runners[2].values) == 2 * FIRST


def test_what_is_far_slower_by_chance_stays() -> None:
    """The program's own kernels, 2.5 times slower by the median but faster in 2 of 7 rounds: they
    stay until that cannot be chance, and the faster one is then the answer.
    """
    own, other = Runner(0, True, True, 2.5), Runner(1, False, True, 1.0)

    def turn(r: Runner) -> tuple[list[float], int]:
        fast = len(r.values) % 7 in (0, 3)
        return [(0.9 if fast else 2.5) if r is own else 1.0], 1

    race([own, other], turn, 1e9, clock=lambda: 0.0)
    assert len(own.values) == 8 * FIRST
    assert not significantly_slower(Runner(0, True, True, 2.5, own.values[: 2 * FIRST]), other)
    assert significantly_slower(own, other)


def test_median_interval_covers() -> None:
    """95% of the intervals of 25 skewed values hold the true median."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        low, high = interval(list(rng.exponential(1.0, 25)))
        hits += low <= np.log(2) <= high
    assert hits >= 0.94 * 400
    assert interval([3.0]) == (3.0, 3.0)
    assert interval([1.0, 2.0, 9.0]) == (1.0, 9.0)


def test_sign_test_by_hand() -> None:
    """Seven losses of seven are 1/128; four of seven are one half; ties say nothing."""
    assert slower_p([2.0] * 7, [1.0] * 7) == 1 / 128
    assert slower_p([2, 2, 2, 2, 0, 0, 0], [1] * 7) == 0.5
    assert slower_p([1.0] * 7, [1.0] * 7) == 1.0


def test_quartile_range_by_hand() -> None:
    """Linear interpolation, as numpy does it."""
    values = [5.0, 1.0, 4.0, 2.0, 8.0, 9.0]
    expected = np.percentile(values, 75) - np.percentile(values, 25)
    assert quartile_range(values) == pytest.approx(float(expected))
    assert quartile_range([7.0]) == 0.0
