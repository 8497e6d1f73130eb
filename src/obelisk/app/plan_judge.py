"""Does a kernel compute its model? Judged on the machine that it was built for, before it is kept.

Takes a loaded session and the weights as they are stored; runs a short random text in the kernel,
and the same by the float64 meanings of its operators. Gives the errors of the logits and of every
layer's keys and values, which name a layer at fault. Weights are read when it is their turn, so
models of any size are judged, in memory for a few of their tasks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from obelisk.base.errors import InternalError
from obelisk.runtime.session import Session
from obelisk.schedule.meaning import Meaning, RowSource
from obelisk.tasks import ModelConfig, Workload

Array = Any
POSITIONS = 20  # more than one tile of attention's 16
HEADS = 3  # of them, the last: those whose logits are compared


@dataclass(frozen=True, slots=True)
class Judged:
    """What was compared with float64, and the largest errors.

    Attributes:
        positions: tokens of every slot; the kernel took the first ones in one launch.
        slots: sequences.
        steps: last positions whose logits were compared.
        logits: relative to the step's largest logit.
        keys, values: of all layers, relative to the layer's largest.
    """

    positions: int
    slots: int
    steps: int
    logits: float
    keys: float
    values: float

    def to_json(self) -> dict[str, Any]:
        """What a plan says of it."""
        return asdict(self)


def relative_error(got: Array, want: Array) -> float:
    """The largest error relative to the largest element; infinite where only one is finite."""
    finite = np.isfinite(want)
    if not np.array_equal(finite, np.isfinite(got)):
        return float("inf")
    if not finite.any():
        return 0.0
    most = float(np.abs(want[finite]).max())
    return float(np.abs(got[finite] - want[finite]).max()) / (most or 1.0)


def judge_plan(session: Session, source: RowSource, tolerance: float, seed: int = 0) -> Judged:
    """The errors of a session's kernel on a random text from position 0 on; the session is reset.

    Raises `InternalError`, naming what differs first, above `tolerance`: such a plan is not
    written.
    """
    plan = session.plan
    count = min(POSITIONS, plan.context)
    steps = min(HEADS, count)
    tokens = np.random.default_rng(seed).integers(0, plan.vocab, (plan.batch, count))
    head = Workload.from_json(plan.workload).head
    meaning = Meaning(ModelConfig.from_json(plan.model), plan.batch, count, source, head=head)
    want = meaning.forward(tokens)
    session.reset()
    before, session.keep_logits = session.keep_logits, True
    worst, first = 0.0, count - steps
    for last in range(first, count):
        begin = last if last > first else 0
        feeds = [[int(t) for t in row[begin : last + 1]] for row in tokens]
        session.launch(feeds, [1] * plan.batch)
        for got, row in zip(session.logits(), want[:, last], strict=True):
            worst = max(worst, relative_error(got, row))
    cached = session.cached(count)
    session.keep_logits = before
    session.reset()
    largest = []
    for name, got, mine in zip(
        ("keys", "values"), cached, (meaning.keys, meaning.values), strict=True
    ):
        errors = [relative_error(a, b) for a, b in zip(got, mine, strict=True)]
        layer = next((i for i, e in enumerate(errors) if not e <= tolerance), None)
        if layer is not None:
            raise InternalError(
                f"the kernel differs from its meaning: {name} of layer {layer} by "
                f"{errors[layer]:.1e} of the largest"
            )
        largest.append(max(errors))
    if not worst <= tolerance:
        raise InternalError(
            f"the kernel differs from its meaning: {worst:.1e} of the largest logit"
        )
    return Judged(count, plan.batch, steps, worst, *largest)
