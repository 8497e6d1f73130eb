"""The search over schedules: tile shapes, fusions, context pieces, synchronisation.

Takes a model, a workload and a machine; gives ranked `Choice`s and an account of what was pruned
and which limit did it. Every choice was judged by `check`; infeasible ones are cut before they are
placed. Deterministic: equal arguments give equal results.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from obelisk.base.errors import Infeasible, InternalError
from obelisk.base.progress import Progress, Silent
from obelisk.machine import Machine
from obelisk.schedule.check import check
from obelisk.schedule.place import place
from obelisk.schedule.resources import Resources, resources
from obelisk.schedule.simulate import Timeline, simulate
from obelisk.schedule.types import Schedule, Sync
from obelisk.tasks.config import ModelConfig
from obelisk.tasks.shape import StepShape, Tiling
from obelisk.tasks.workload import Workload


@dataclass(frozen=True, slots=True)
class Choice:
    """A schedule that passed the checks, and what it costs by the simulator."""

    schedule: Schedule
    timeline: Timeline
    resources: Resources


@dataclass(frozen=True, slots=True)
class SearchAccount:
    """What the search did: choices tried, how many each limit cut (one example each), seconds."""

    tried: int
    pruned: tuple[tuple[str, int], ...]
    examples: tuple[str, ...]
    seconds: float


def _tilings(model: ModelConfig, work: Workload, cores: int, lanes: int) -> Iterator[Tiling]:
    panels = [p for p in (4, 8) if p <= max(lanes, 4)]
    splits = sorted({1, 2, max(1, -(-cores // (work.batch * model.kv_heads)))} - {0})
    for panel, rope, copied, pieces in product(panels, (True, False), (True, False), splits):
        if cores == 1 and (not copied or pieces > 1):
            continue  # one core: nothing to share
        yield Tiling(
            panel=panel, fuse_rope=rope, replicate_norm=copied, kv_splits=pieces, cores=cores
        )


def _small(model: ModelConfig) -> ModelConfig:
    """The same model with two layers: layers are alike, so two rank as many do."""
    return replace(model, layers=min(2, model.layers))


def search_schedules(
    model: ModelConfig,
    work: Workload,
    machine: Machine,
    *,
    cores: int | None = None,
    keep: int = 4,
    progress: Progress | None = None,
) -> tuple[list[Choice], SearchAccount]:
    """The best `keep` schedules, fastest first, and the account.

    Ranks on two layers, then places and judges the whole model. Raises `Infeasible` naming the
    limit when nothing fits, `UserError` when the workload exceeds a limit of its own.
    """
    work.check(model)
    listener = progress or Silent()
    start = time.monotonic()
    use = machine.cores if cores is None else cores
    if not 1 <= use <= machine.cores:
        raise Infeasible(f"{use} cores asked for, {machine.name} has {machine.cores}")
    lanes = max(4, machine.lanes)
    ranked: list[tuple[float, Tiling, Sync]] = []
    pruned: dict[str, int] = {}
    examples: list[str] = []
    tried = 0
    for tiling in _tilings(model, work, use, lanes):
        need = resources(StepShape(model, work, tiling, lanes), machine)
        for sync in Sync if use > 1 else (Sync.COUNTER,):
            tried += 1
            if need.refusal is not None:
                if need.limit not in pruned:
                    examples.append(need.refusal)
                pruned[need.limit] = pruned.get(need.limit, 0) + 1
                continue
            shape = StepShape(_small(model), work, tiling, lanes)
            seconds = simulate(place(shape, sync), machine).seconds
            ranked.append((seconds, tiling, sync))
            listener.update(
                "schedule", {"tried": tried, "best_us": min(r[0] for r in ranked) * 1e6}
            )
    if not ranked:
        raise Infeasible("nothing fits: " + "; ".join(examples))
    ranked.sort(key=lambda r: (r[0], str(r[1]), r[2].value))
    out = []
    for _, tiling, sync in ranked[:keep]:
        shape = StepShape(model, work, tiling, lanes)
        schedule = place(shape, sync)
        faults = check(schedule, machine.cores)
        if faults:
            raise InternalError(f"placement made an unsafe schedule: {faults[0]}")
        out.append(Choice(schedule, simulate(schedule, machine), resources(shape, machine)))
    account = SearchAccount(
        tried, tuple(sorted(pruned.items())), tuple(examples), time.monotonic() - start
    )
    return out, account
