"""The virtual machine: executes a schedule in numpy, each task by its meaning, in float64.

Takes a `Schedule` and a checkpoint's tensors; gives logits and tokens. It runs the cores as they
would run, one item at a time in an order drawn from a seed, on the schedule's own pages (filled
with NaN first), so that a missing wait or a page reused early shows as a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from obelisk.base.errors import InternalError
from obelisk.schedule.execute import Executor
from obelisk.schedule.types import Await, Barrier, Item, Run, Schedule, Signal

Array = Any


class VirtualMachine(Executor):
    """One schedule, its memory, and where each slot is."""

    def __init__(
        self, schedule: Schedule, weights: Callable[[str], Array], seed: int = 0
    ) -> None:  # fmt: skip
        super().__init__(schedule.shape, schedule.pages, weights)
        self.schedule = schedule
        self.rng = np.random.default_rng(seed)

    def step(self, tokens: Sequence[int]) -> Array:
        """One step of every slot from `tokens`; gives logits (batch, vocab). Raises `InternalError`
        when the schedule stops moving.
        """
        self.tokens = np.asarray(tokens, np.int64)
        programs = [list(p) for p in self.schedule.programs]
        at = [0] * len(programs)
        arrived: dict[str, int] = {}
        met: dict[str, set[int]] = {}
        while True:
            ready = [
                c for c, p in enumerate(programs)
                if at[c] < len(p) and self._may(p[at[c]], c, arrived, met)
            ]  # fmt: skip
            if not ready:
                break
            core = int(self.rng.choice(ready))
            item = programs[core][at[core]]
            at[core] += 1
            if isinstance(item, Run):
                self.execute(item.task, core)
            elif isinstance(item, Signal):
                arrived[item.counter] = arrived.get(item.counter, 0) + 1
        if any(a < len(p) for a, p in zip(at, programs, strict=True)):
            raise InternalError("the schedule stops moving before its end")
        self.position += 1
        return self.page("logits")[:, : self.shape.model.vocab].copy()

    def _may(
        self, item: Item, core: int, arrived: Mapping[str, int], met: dict[str, set[int]]
    ) -> bool:
        match item:
            case Await(counter, count):
                return arrived.get(counter, 0) >= count
            case Barrier(name):
                met.setdefault(name, set()).add(core)
                return len(met[name]) == self.schedule.cores
            case _:
                return True
