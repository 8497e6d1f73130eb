"""Turns during which a core was taken away: read from the system's files, repeated, and told."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from obelisk.tune.race import Runner, leader, race, ratio
from obelisk.tune.taken import ATTEMPTS, FEW, Counted, Steady, Turned, count

STAT = """cpu  466675 0 40220 188748 561 0 81 1149 0 0
cpu0 229092 0 17693 101173 83 0 9 {0} 0 0
cpu1 237583 0 22526 87574 478 0 71 {1} 0 0
cpu2 237583 0 22526 87574 478 0 71 70000 0 0
intr 23 0 7
"""


def proc(folder: Path, steal: tuple[int, int], delays: list[int | None]) -> Path:
    """A /proc with the steal of two of three processors, and threads (None: one that has ended)."""
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text(STAT.format(*steal))
    for i, delay in enumerate(delays):
        task = folder / "self" / "task" / str(100 + i)
        task.mkdir(parents=True, exist_ok=True)
        if delay is not None:
            (task / "schedstat").write_text(f"512704469 {delay} 150\n")
    return folder


def test_what_the_system_counts_is_added_up(tmp_path: Path) -> None:
    """Steal of the processors that the process may use, in ticks; its threads' waits, in ns."""
    first = proc(tmp_path / "a", (500, 84), [1_000_000, None, 20_000_000, 5])
    found = count(first, (0, 1), 0.01)
    assert found.steal == {"cpu0": 5.0, "cpu1": pytest.approx(0.84)}
    assert sum(found.waited.values()) == pytest.approx(0.021)
    later = count(proc(tmp_path / "b", (503, 84), [4_000_000, 50_000_000, None, 5]), (0, 1), 0.01)
    assert later.since(found) == pytest.approx(0.03 + 0.003 + 0.05)  # the third thread has ended
    assert found.since(found) == 0.0
    assert count(tmp_path / "none") == Counted({}, {})
    old = tmp_path / "old"
    old.mkdir()
    (old / "stat").write_text("cpu0 1 2 3\n")  # before the field was there
    assert count(old, (0,), 0.01) == Counted({}, {})


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not count")
def test_threads_that_take_each_others_core_are_seen() -> None:
    """The real files: a thread that spins on this thread's only core."""
    cpus = os.sched_getaffinity(0)
    core = {min(cpus)}
    ends, block = time.monotonic() + 0.3, bytes(1 << 20)
    before = count()

    def spin() -> None:
        os.sched_setaffinity(0, core)
        while time.monotonic() < ends:
            hashlib.sha256(block).digest()  # without the interpreter's lock

    os.sched_setaffinity(0, core)
    try:
        other = threading.Thread(target=spin)
        other.start()
        spin()
        other.join()
    finally:
        os.sched_setaffinity(0, cpus)
    assert count().since(before) > 0.03


def turns(*shares: float) -> Iterator[Turned]:
    """Turns whose time is 1, and twice that where a core was taken."""
    return (Turned([1.0 + (s > 0.5)], 3, s) for s in shares)


def test_a_turn_that_was_taken_from_is_repeated() -> None:
    """Once, twice; the third attempt is the last, and the least so counts."""
    steady = Steady()
    for _ in range(8):
        assert steady.turn(0, lambda: Turned([1.0], 3, 0.01)) == Turned([1.0], 3, 0.01)
    assert steady.said() == ""
    left = turns(1.0, 0.05)
    assert steady.turn(0, lambda: next(left)) == Turned([1.0], 3, 0.05)
    assert (steady.turns, steady.thrown, steady.kept) == (9, 1, 0)
    left = turns(1.0, 0.8, 0.9, 0.0)
    assert steady.turn(0, lambda: next(left)) == Turned([2.0], 3, 0.8)
    assert (steady.thrown, steady.kept, ATTEMPTS) == (3, 1, 3)
    assert steady.said() == (
        "3 turns were thrown away and repeated: a core was taken away; so it was in 1 of the 10 "
        "that count"
    )
    gone = iter([Turned([2.0], 3, 1.0), None])
    assert steady.turn(0, lambda: next(gone)) is None


def test_what_a_contender_takes_from_itself_is_its_own() -> None:
    """More threads than cores: every turn loses as much, and none is repeated."""
    steady, rng = Steady(), np.random.default_rng(0)
    for _ in range(50):
        steady.turn(1, lambda: Turned([1.0], 1, 0.6 + 0.05 * float(rng.random())))
    assert (steady.turns, steady.thrown, steady.kept) == (50, 0, 0)


def test_where_cores_are_always_taken_the_race_goes_on() -> None:
    """At most half as many turns are repeated as count."""
    steady = Steady()
    calls = itertools.count()
    steady.turn(0, lambda: Turned([1.0], 1, 0.0))
    for _ in range(99):
        steady.turn(0, lambda: Turned([1.0], 1, 0.5 + 0 * next(calls)))
    assert steady.turns == 100
    assert steady.thrown <= 52
    assert steady.kept == 99
    assert next(calls) <= 152


class Host:
    """Two contenders on a clock of their own; the host takes a core for whole stretches of it, in
    which the one with two threads takes twice as long, and the system says so.
    """

    def __init__(self, seed: int) -> None:
        self.rng, self.now = np.random.default_rng(seed), 0.0

    def turn(self, key: int) -> Turned:
        """Contender 0 has one thread and takes 1.5; contender 1 has two and takes 1."""
        away = int(self.now / 7.3) % 2 == 1
        each = (1.5, 2.0 if away else 1.0)[key] * (1 + 0.01 * abs(float(self.rng.normal())))
        self.now += 3 * each
        return Turned([each] * 3, 3, 1.0 if away else 0.02)


@pytest.mark.parametrize("seed", range(4))
def test_a_race_is_decided_by_whole_cores(seed: int) -> None:
    """Half of the time has one core: without repeating, the ratio is a matter of luck between 0.75
    and 1.5; with it, it is that of two cores.
    """
    host, steady = Host(seed), Steady()
    runners = [Runner(0, True, True, 1.5), Runner(1, False, True, 1.0)]

    def turn(r: Runner) -> tuple[list[float], int]:
        got = steady.turn(r.key, lambda: host.turn(r.key))
        assert got is not None
        return got.samples, got.calls

    race(runners, turn, 1e9, seed, clock=lambda: host.now)
    assert leader(runners) is runners[1]
    assert ratio(*runners) == pytest.approx(1.5, rel=0.03)
    assert steady.thrown > 0
    slow = sum(v > 1.9 for v in runners[1].values)
    assert slow < len(runners[1].values) / 3


def test_a_host_that_is_busy_all_the_time_costs_few_repeats() -> None:
    """Every other turn is disturbed, its repeats too: after some turns none is repeated."""
    steady = Steady()
    for number in range(200):
        key, taken = number % 2, 0.9 if number % 2 else 0.0
        steady.least[key] = 0.0
        steady.turn(key, functools.partial(Turned, [1.0], 1, taken))
    assert steady.turns == 200
    assert steady.kept == 100
    assert steady.thrown <= FEW
