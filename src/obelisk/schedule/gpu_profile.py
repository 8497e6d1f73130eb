"""Profiling the best few GPU schedules, and what their times teach the simulator.

Takes ranked `GpuChoice`s and a function that builds and times one; gives a `Profile` whose winner
is what a plan is made of. The function belongs to the caller: nothing here compiles or launches. A
choice that cannot be built, crashes or answers wrongly is recorded and ends nothing.

`refit` finds the hand-over between blocks with which the simulator agrees best with what was
measured: the one figure that no loop without arithmetic can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from obelisk.base.errors import BuildFailed, Infeasible, KernelFault
from obelisk.base.progress import Progress, Silent
from obelisk.machine import Machine
from obelisk.schedule.gpu_search import GpuChoice, micro_costs
from obelisk.schedule.gpu_simulate import GpuCosts, costs_of, simulate_gpu
from obelisk.schedule.gpu_tasks import GpuStep
from obelisk.tasks.config import ModelConfig
from obelisk.tasks.workload import Workload

Measure = Callable[[GpuChoice], float]
HANDOVERS = tuple(x * 1e-7 for x in range(4, 41))  # seconds that `refit` looks at


@dataclass(frozen=True, slots=True)
class ProfiledChoice:
    """One choice: its rank by the simulator, predicted and measured seconds of a step (None when
    there is no time), and why there is none.
    """

    rank: int
    choice: GpuChoice
    predicted: float
    seconds: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """What was profiled, in order of rank, and the fastest."""

    rows: tuple[ProfiledChoice, ...]
    winner: ProfiledChoice

    @property
    def error(self) -> float:
        """Largest share by which a prediction missed its measurement."""
        return max(abs(r.predicted / r.seconds - 1) for r in self.rows if r.seconds)


def profile(
    choices: Sequence[GpuChoice], measure: Measure, progress: Progress | None = None
) -> Profile:
    """Time every choice and keep the fastest; of equals, the better rank.

    Raises `Infeasible` with every reason when none could be timed.
    """
    listener = progress or Silent()
    rows = []
    for rank, choice in enumerate(choices):
        listener.update("profile", {"profiled": rank, "of": len(choices)})
        seconds, reason = None, ""
        try:
            seconds = measure(choice)
        except (BuildFailed, Infeasible, KernelFault) as why:
            reason = f"{type(why).__name__}: {why}"
        rows.append(ProfiledChoice(rank, choice, choice.timeline.seconds, seconds, reason))
    timed = [r for r in rows if r.seconds is not None]
    if not timed:
        raise Infeasible("no schedule could be profiled: " + "; ".join(r.reason for r in rows))
    return Profile(tuple(rows), min(timed, key=lambda r: (r.seconds, r.rank)))


def refit(
    model: ModelConfig,
    work: Workload,
    machine: Machine,
    measured: Sequence[tuple[GpuChoice, float]],
    position: int | None = None,
) -> tuple[GpuCosts, float]:
    """The costs whose hand-over fits measured steps best (least mean square of the logarithms of
    predicted over measured), and the largest share by which a prediction then misses.

    Raises `Infeasible` without a measurement.
    """
    if not measured:
        raise Infeasible("nothing was measured: there is nothing to fit to")
    base = costs_of(machine)

    def misses(handover: float) -> list[float]:
        out = []
        for choice, seconds in measured:
            step = GpuStep(model, work, choice.tiling)
            micro = micro_costs(step, choice.fit.consumer_registers)
            line = simulate_gpu(step, machine, position, micro, choice.fusion, handover)
            out.append(float(np.log(line.seconds / seconds)))
        return out

    scored = [(float(np.square(misses(h)).mean()), h) for h in HANDOVERS]
    best = min(scored)[1]
    worst = max(abs(float(np.exp(x)) - 1) for x in misses(best))
    return replace(base, handover=best), worst
