"""Turns during which a core was taken away, told apart and repeated.

On a virtual machine the host may run somebody else on a core for many milliseconds (steal time);
on any machine another process may. A kernel that then has one core instead of two takes twice as
long, for whole turns. The worker reads what the system counts, `Steady` judges and repeats.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SHARE = 0.1  # of a turn's time: more than that taken away, over the contender's least, is too much
ATTEMPTS = 3
FEW = 20  # turns, below which a third of them is not "all the time"
_STEAL = 7  # the field of a processor's line in /proc/stat, behind its name, in ticks
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Counted:
    """What the system has counted: seconds that the host took of each processor that this process
    may use (in ticks, 10 ms), and that each of its threads was ready and did not run. Empty where
    the system does not say.
    """

    steal: Mapping[str, float]
    waited: Mapping[str, float]

    def since(self, before: Counted) -> float:
        """Seconds that were taken since `before`, of all cores and threads together; a thread that
        ended meanwhile is left out.
        """
        return sum(
            max(0.0, value - then.get(name, 0.0))
            for now, then in ((self.steal, before.steal), (self.waited, before.waited))
            for name, value in now.items()
        )


def count(
    proc: Path = _PROC, cpus: Collection[int] | None = None, tick: float | None = None
) -> Counted:
    """Read the counters; `cpus` and `tick` (seconds) are the process's and the system's own."""
    steal: dict[str, float] = {}
    waited: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError, IndexError, AttributeError):
        mine = os.sched_getaffinity(0) if cpus is None else cpus
        each = 1.0 / os.sysconf("SC_CLK_TCK") if tick is None else tick
        for line in (proc / "stat").read_text().splitlines():
            name, *fields = line.split()
            if not name.startswith("cpu"):
                break
            if name != "cpu" and int(name[3:]) in mine:
                steal[name] = int(fields[_STEAL]) * each
    with contextlib.suppress(OSError):
        for thread in (proc / "self" / "task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it ended meanwhile
                waited[thread.name] = int((thread / "schedstat").read_text().split()[1]) * 1e-9
    return Counted(steal, waited)


@dataclass(frozen=True, slots=True)
class Turned:
    """What a turn gave: seconds of a call by each sample, calls, and the share of the turn's time
    that was taken from the process (of all cores together, so it may exceed 1).
    """

    samples: list[float]
    calls: int
    taken: float = 0.0


@dataclass
class Steady:
    """Repeats a turn during which a core was taken away.

    What a contender's own threads take from each other is in its least share, which is not held
    against it.

    Attributes:
        turns: turns that count.
        thrown: turns that were repeated; at most half as many, and none any more where a third of
            the turns stay disturbed all the same.
        kept: turns that count although they were taken from: of their attempts, the least so.
        least: the least share seen, by contender.
    """

    turns: int = 0
    thrown: int = 0
    kept: int = 0
    least: dict[int, float] = field(default_factory=dict)

    def turn(self, key: int, take: Callable[[], Turned | None]) -> Turned | None:
        """One turn of contender `key`, by up to `ATTEMPTS` calls of `take`; None when that is."""
        best: Turned | None = None
        self.turns += 1
        for left in reversed(range(ATTEMPTS)):
            got = take()
            if got is None:
                return None
            if best is None or got.taken < best.taken:
                best = got
            least = self.least[key] = min(got.taken, self.least.get(key, got.taken))
            if got.taken <= least + SHARE:
                return got
            # Where cores are taken all the time, repeating would only cost rounds.
            busy = self.turns >= FEW and 3 * self.kept > self.turns
            if not left or busy or 2 * self.thrown > self.turns:
                break
            self.thrown += 1
        self.kept += 1
        return best

    def said(self) -> str:
        """For the report; empty where nothing was taken."""
        if not self.thrown + self.kept:
            return ""
        kept = f"; so it was in {self.kept} of the {self.turns} that count" if self.kept else ""
        return f"{self.thrown} turns were thrown away and repeated: a core was taken away{kept}"
