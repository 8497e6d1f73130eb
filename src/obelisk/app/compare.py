"""Where a plan's kernel and its meaning part: every operator of a step against float64.

Takes a loaded CPU plan and its weights; runs a few steps in the kernel, recording what each
operator writes, and the same operators by their meanings. Gives the error of every result, in the
order of a step, so that the first one beyond a tolerance names the operator at fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from obelisk.app.plan_judge import relative_error
from obelisk.base.errors import UserError
from obelisk.plan import Plan
from obelisk.runtime import CpuSession
from obelisk.schedule import Schedule, Sync, place
from obelisk.schedule.meaning import Meaning, RowSource
from obelisk.tasks import (
    TABLE,
    ModelConfig,
    Operator,
    StepShape,
    TaskKind,
    Tiling,
    Workload,
    operators,
)

Array = Any
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
    shape = StepShape(
        ModelConfig.from_json(plan.model),
        Workload.from_json(plan.workload),
        Tiling(**plan.schedule["tiling"]),
        plan.layout.layer_matrices[0].lanes,
    )
    return place(shape, Sync(plan.schedule["sync"]))


def _used(s: StepShape, value: str, rows: Array) -> Array:
    """Rows without the padding that nobody reads, and so nobody needs to write."""
    if value == "part":
        used = s.model.group * (s.model.head_dim + 2)
        return rows.reshape(len(rows), -1, s.part_width)[:, :, :used]
    m = s.model
    widths = {"raw": s.qkv_rows, "q": m.q_width, "attn": m.q_width, "act": m.ffn,
              "logits": m.vocab}  # fmt: skip
    return rows[:, : widths.get(value, m.hidden)]


def compare(
    session: CpuSession, source: RowSource, steps: int = 2, seed: int = 0
) -> list[Difference]:  # fmt: skip
    """The error of every operator's results after `steps` steps on random tokens, in step order.

    `source` gives the weights as stored. Raises `UserError` for a plan that is not for a CPU.
    """
    plan = session.plan
    if plan.target != "cpu":
        raise UserError(f"a plan for {plan.target} is not compared here: see compare_cuda")
    shape = schedule_of(plan).shape
    steps = min(steps, plan.context)
    tokens = np.random.default_rng(seed).integers(0, plan.vocab, (plan.batch, steps))
    session.reset()
    session.start_recording()
    for t in range(steps):
        session.launch([[int(x)] for x in tokens[:, t]], [1] * plan.batch)
    means = Meaning(shape.model, plan.batch, steps, source, shape.tiling, shape.work.head)
    cached = dict(zip(_CACHED, session.cached(steps), strict=True))
    written = {
        (op.kind, op.layer): TABLE[op.kind].writes(shape, op.tasks[0]) for op in operators(shape)
    }
    out: list[Difference] = []

    def after(op: Operator) -> None:
        at = max(op.layer, 0)
        for value in dict.fromkeys(r.value for r in written[op.kind, op.layer]):
            if value in _CACHED:
                got, want = cached[value][at], getattr(means, value)[at]
            elif value in ("token", "best"):  # integers; the logits are there
                continue
            else:
                page = means.page("h" if value.startswith("h") else value)  # a copy for each core
                rows = page.reshape(plan.batch, steps, -1)[:, -1]
                got = _used(shape, value, session.recorded(op.kind, value, at))
                want = _used(means.shape, value, rows)
            out.append(Difference(op.kind, op.layer, value, relative_error(got, want)))

    means.forward(tokens, after)
    session.reset()
    session.record = None
    return out


def first_beyond(found: list[Difference], tolerance: float = TOLERANCE) -> Difference | None:
    """The first result, in step order, whose error exceeds `tolerance`; None when none does."""
    return next((d for d in found if not d.error <= tolerance), None)
