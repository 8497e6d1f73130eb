"""Where a plan's kernel and its meaning part: every operator of a step against float64.

Takes a loaded CPU plan and its weights; runs a few steps in the kernel, recording what each
operator writes, and the same schedule in the virtual machine. Gives the error of every result, in
the order of a step, so that the first one beyond a tolerance names the operator at fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from obelisk.app.plan_judge import relative_error
from obelisk.base.errors import UserError
from obelisk.plan import Plan
from obelisk.runtime import CpuSession
from obelisk.runtime.packing import GroupSource, dense_only, stored
from obelisk.schedule import Schedule, Sync, place
from obelisk.schedule.vm import VirtualMachine
from obelisk.tasks import (
    TABLE,
    ModelConfig,
    StepShape,
    Task,
    TaskKind,
    Tiling,
    Workload,
    operators,
    parse_format,
)

Array = Any
LARGEST = 200_000_000  # weights: the reference holds float64
TOLERANCE = 1e-4
_CACHED = ("keys", "values")


@dataclass(frozen=True, slots=True)
class Difference:
    """One result of one operator: its largest error, relative to its largest element."""

    kind: TaskKind
    layer: int
    value: str
    error: float

    def __str__(self) -> str:
        at = f" of layer {self.layer}" if self.layer >= 0 else ""
        return f"{self.kind}{at}: {self.value} differs by {self.error:.1e} of its largest"


def schedule_of(plan: Plan) -> Schedule:
    """The schedule that a CPU plan was emitted from, placed anew."""
    work = dict(plan.workload)
    shape = StepShape(
        ModelConfig.from_json(plan.model),
        Workload(**{**work, "weights": parse_format(work["weights"])}),
        Tiling(**plan.schedule["tiling"]),
        plan.layout.layer_matrices[0].lanes,
    )
    return place(shape, Sync(plan.schedule["sync"]))


class _Witness(VirtualMachine):
    """A virtual machine that keeps what each operator wrote."""

    def __init__(self, schedule: Schedule, weights: Callable[[str], Array]) -> None:
        super().__init__(schedule, weights)
        self.seen: dict[tuple[TaskKind, int, str], Array] = {}

    def execute(self, task: Task, core: int) -> None:
        """Run a task, and copy what it wrote."""
        super().execute(task, core)
        for r in TABLE[task.kind].writes(self.shape, task):
            if r.value not in (*_CACHED, "token"):
                page = self.page(r.value)
                kept = self.seen.setdefault((task.kind, task.layer, r.value), np.zeros(page.shape))
                rows = slice(None) if r.slot < 0 else slice(r.slot, r.slot + 1)
                kept[rows, r.lo : r.hi] = page[rows, r.lo : r.hi]


def _used(s: StepShape, value: str, rows: Array) -> Array:
    """Rows without the padding that nobody reads, and so nobody needs to write."""
    if value == "part":
        used = s.model.group * (s.model.head_dim + 2)
        return rows.reshape(s.batch, -1, s.part_width)[:, :, :used]
    widths = {"raw": s.qkv_rows, "q": s.model.q_width, "logits": s.model.vocab}
    return rows[:, : widths.get(value, rows.shape[1])]


def compare(
    session: CpuSession, source: Callable[[str], Array], grouped: GroupSource = dense_only,
    steps: int = 2, seed: int = 0,
) -> list[Difference]:  # fmt: skip
    """The error of every operator's results after `steps` steps on random tokens, in step order.

    Raises `UserError` for a plan that is not for a CPU, and for a model that is too large for a
    float64 reference.
    """
    plan = session.plan
    if plan.target != "cpu":
        raise UserError(f"a plan for {plan.target} cannot be compared here: make one for the CPU")
    schedule = schedule_of(plan)
    if plan.layout.total_bytes / schedule.shape.work.weight_bytes > LARGEST:
        raise UserError(f"models beyond {LARGEST} weights are not compared: use fewer layers")
    machine = _Witness(schedule, stored(plan.layout, source, grouped))
    session.reset()
    session.start_recording()
    rng = np.random.default_rng(seed)
    for _ in range(min(steps, plan.context)):
        tokens = [int(t) for t in rng.integers(0, plan.vocab, plan.batch)]
        machine.step(tokens)
        session.launch([[t] for t in tokens], [1] * plan.batch)
    out = []
    end = int(session.position[0])
    for op in operators(schedule.shape):
        regions = TABLE[op.kind].writes(schedule.shape, op.tasks[0])
        for value in dict.fromkeys(r.value for r in regions):
            if value in _CACHED:
                got, want = (
                    getattr(x, value)[max(op.layer, 0), :, :, :end] for x in (session, machine)
                )
            elif value in ("token", "best"):  # integers; the logits are there
                continue
            else:
                got = session.recorded(op.kind, value, max(op.layer, 0))
                want = machine.seen[op.kind, op.layer, value]
                got, want = (_used(schedule.shape, value, x) for x in (got, want))
            out.append(Difference(op.kind, op.layer, value, relative_error(got, want)))
    session.reset()
    session.record = None
    return out


def first_beyond(found: list[Difference], tolerance: float = TOLERANCE) -> Difference | None:
    """The first result, in step order, whose error exceeds `tolerance`; None when none does."""
    return next((d for d in found if not d.error <= tolerance), None)
