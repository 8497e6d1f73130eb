"""Synthesis of a megakernel: from a model directory to a plan, offline.

Chains config, schedule search, emitter, compiler, profiler and judge. The best few schedules by the
simulator are built and timed on the machine; the fastest is kept, with what was measured and how
far it is from the float64 meanings of its operators.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from obelisk.app.plan_judge import judge_plan
from obelisk.base.errors import UserError
from obelisk.base.progress import Progress, Silent
from obelisk.build import compile_c
from obelisk.machine import Machine, find
from obelisk.mega import emit_cpu, target_of
from obelisk.plan import CacheLayout, EdgeName, Plan, host_identity
from obelisk.runtime import Checkpoint, CpuSession, file_digests
from obelisk.runtime.gptq import read_gptq
from obelisk.runtime.packing import pack, stored
from obelisk.schedule import Choice, SearchAccount, search_schedules
from obelisk.tasks import (
    ModelConfig,
    TaskKind,
    WeightFormat,
    Workload,
    checkpoint_tensors,
    inverse_frequencies,
    parse_head,
    parse_weights,
    read_config,
    weight_layout,
)

COMPILE_SECONDS = 180.0
PROFILE_STEPS = 12
TOLERANCE = 1e-3  # of the largest; fp32 sums reach about 1e-6


@dataclass(frozen=True, slots=True)
class Profiled:
    """One built schedule: its rank by the simulator, predicted and measured seconds of a step."""

    rank: int
    note: str
    predicted: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Synthesis:
    """A finished synthesis: the plan, what was searched, what was timed, and seconds in all."""

    plan: Plan
    choices: tuple[Choice, ...]
    account: SearchAccount
    profiled: tuple[Profiled, ...]
    seconds: float


def describe(choice: Choice) -> str:
    """A schedule's choices in a few words."""
    t = choice.schedule.shape.tiling
    rope = "qkv+rope fused" if t.fuse_rope else "qkv by rows"
    norm = "norms copied" if t.replicate_norm else "norms shared"
    return f"{choice.schedule.sync}, panels of {t.panel}, {rope}, {norm}, {t.kv_splits} kv pieces"


def make_plan(
    choice: Choice,
    folder: str | Path = "",
    digests: Mapping[str, str] | None = None,
    binary: bytes | None = None,
) -> Plan:
    """The plan of one schedule; compiles it unless `binary` is given."""
    schedule = choice.schedule
    shape, model = schedule.shape, schedule.shape.model
    layout = weight_layout(shape)
    emitted = emit_cpu(schedule, layout)
    if binary is None:
        binary = compile_c(emitted.source, timeout=COMPILE_SECONDS).path.read_bytes()
    return Plan(
        target="cpu",
        host=host_identity(),
        cores=schedule.cores,
        model=model.to_json(),
        model_digest=model.digest,
        weights_path=str(Path(folder).resolve()) if folder else "",
        weights_digests=digests or {},
        tensors=tuple((t.name, t.shape) for t in checkpoint_tensors(model)),
        workload=shape.work.to_json(),
        schedule={**schedule.to_json(), "probes": emitted.probes.to_json()},
        edges=tuple(EdgeName(e.name, e.base, e.groups, e.layered) for e in emitted.edges),
        barriers=emitted.barriers,
        kinds=tuple(TaskKind),
        layout=layout,
        cache=CacheLayout(
            model.layers, shape.batch, model.kv_heads, shape.work.context, model.head_dim
        ),
        scratch_bytes=schedule.pages.nbytes,
        frequencies=tuple(float(f) for f in inverse_frequencies(model.rope, model.head_dim)),
        eos=model.eos,
        tolerance=None,
        measured={},
        source=emitted.source,
        binary=binary,
    )  # fmt: skip


def time_step(session: CpuSession, steps: int = PROFILE_STEPS) -> float:
    """Seconds of one step, all slots in use at the middle of the context: the median of short
    launches.
    """
    plan = session.plan
    at = max(0, plan.context // 2 - steps)
    feed = [[1 % plan.vocab]] * plan.batch
    runs = []
    for _ in range(4):
        session.position[:] = at
        want = min(steps, plan.context - at)
        start = time.perf_counter()
        session.launch(feed, [want] * plan.batch)
        runs.append((time.perf_counter() - start) / max(1, session.steps_done))
    session.reset()
    return float(np.median(runs[1:]))


def synthesise(
    folder: str | Path,
    *,
    device: str | Machine = "cpu",
    batch: int = 1,
    context: int | None = None,
    weights: str = "fp32",
    head: str | None = None,
    cores: int | None = None,
    profile: int = 3,
    progress: Progress | None = None,
) -> Synthesis:
    """A plan for the model in `folder`.

    `context` defaults to 2048 or the model's own limit; `head` is int8 for a head of 8 bits beside
    4-bit weights; `profile` is how many schedules are built and timed (1: the simulator decides
    alone). Raises `UserError` and `Infeasible` naming the limit
    that is exceeded.
    """
    listener = progress or Silent()
    start = time.perf_counter()
    machine = find(device) if isinstance(device, str) else device
    target_of(machine)
    model = read_config(folder)
    checkpoint = Checkpoint(folder)
    checkpoint.check([(t.name, t.shape) for t in checkpoint_tensors(model)], model.layers)
    work = workload_of(model, batch, context, weights, folder, head)
    length = work.context
    choices, account = search_schedules(
        model, work, machine, cores=cores, keep=max(1, profile), progress=listener
    )
    digests = file_digests(folder)
    best, plans, rows = None, [], []
    arenas: dict[str, Any] = {}
    for rank, choice in enumerate(choices):
        listener.update("build", {"built": rank, "of": len(choices)})
        plan = make_plan(choice, folder, digests)
        key = str(plan.layout)
        if key not in arenas:
            arenas.clear()  # one copy of the weights at a time
            arenas[key] = pack(plan.layout, checkpoint.tensor, checkpoint.grouped)
        seconds = time_step(CpuSession(plan, arenas[key]))
        rows.append(Profiled(rank, describe(choice), choice.timeline.seconds, seconds))
        plans.append(plan)
        if best is None or seconds < rows[best].seconds:
            best = rank
    assert best is not None
    chosen = choices[best]
    layout = plans[best].layout
    if str(layout) not in arenas:
        arenas = {str(layout): pack(layout, checkpoint.tensor, checkpoint.grouped)}
    listener.update("judge", {"schedule": best})
    means = stored(layout, checkpoint.tensor, checkpoint.grouped, checkpoint.rows)
    judged = judge_plan(CpuSession(plans[best], arenas[str(layout)]), means, TOLERANCE)
    measured = {
        "step_seconds": rows[best].seconds,
        "position": length // 2,
        "batch": batch,
        "step_bytes": chosen.resources.step_bytes,
        "schedule": rows[best].note,
    }
    return Synthesis(
        replace(plans[best], measured=measured, tolerance=judged.logits, judged=judged.to_json()),
        tuple(choices), account, tuple(rows), time.perf_counter() - start,
    )  # fmt: skip


def explain(
    model: ModelConfig, work: Workload, machine: Machine, cores: int | None = None
) -> tuple[list[Choice], SearchAccount]:
    """All schedules that fit, best first, without building any."""
    return search_schedules(model, work, machine, cores=cores, keep=1 << 16)


def workload_of(
    model: ModelConfig, batch: int, context: int | None, weights: str, folder: str | Path = "",
    head: str | None = None,
) -> Workload:  # fmt: skip
    """The workload that `synthesise` would take: 4-bit groups are those of the checkpoint in
    `folder` where it has any; `head` is what `parse_head` takes. Raises `UserError` when it exceeds
    a limit.
    """
    length = min(2048, model.max_positions) if context is None else context
    form, group = parse_weights(weights)
    found = read_gptq(folder) if folder and form is WeightFormat.W4A16 else None
    if found is not None and group not in (None, found.group):
        raise UserError(f"{folder} has groups of {found.group}, not of {group}: use w4a16")
    work = Workload(batch, length, form, found.group if found else group or 128,
                    found is not None and not found.symmetric, parse_head(head, form))  # fmt: skip
    work.check(model)
    return work


def require_directory(folder: Path) -> None:
    """Raise `UserError` when there is no such directory."""
    if not folder.is_dir():
        raise UserError(f"no model directory {folder}")
