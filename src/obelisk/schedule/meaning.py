"""What a model means: several tokens of every sequence through all operators, in float64.

Takes a model and a source of rows of its weights; gives logits, keys and values. No schedule, and
no memory for a model: an operator is executed for all tokens before the next one, and cut into
tasks whose weights are read when it is their turn, so each weight is read once and few are held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np

from obelisk.base.settings import usable_cores
from obelisk.ir import Graph
from obelisk.schedule.execute import Executor
from obelisk.schedule.pages import plan_pages
from obelisk.schedule.types import Sync
from obelisk.tasks import (
    ModelConfig,
    Operator,
    StepShape,
    Task,
    TaskKind,
    Tiling,
    WeightFormat,
    Workload,
)
from obelisk.tasks import operators as operators_of
from obelisk.tasks.weights import EMBED

Array = Any
RowSource = Callable[[str, slice], Array]
BLOCK = 1 << 22  # weights of a task: 32 MB in float64


def _tiling(m: ModelConfig) -> Tiling:
    """Products cut into tasks of at most `BLOCK` weights; everything else apart and once."""

    def tasks(rows: int, cols: int) -> int:
        return -(-rows * cols // BLOCK)

    return Tiling(
        fuse_rope=False, replicate_norm=False, qkv=tasks(m.q_width + 2 * m.kv_width, m.hidden),
        o=tasks(m.hidden, m.q_width), up=tasks(2 * m.ffn, m.hidden), down=tasks(m.hidden, m.ffn),
        head=tasks(m.vocab, m.hidden),
    )  # fmt: skip


class Meaning(Executor):
    """`steps` tokens of each of `batch` sequences; row b * steps + t of a value is token t of
    sequence b.
    """

    def __init__(
        self, model: ModelConfig, batch: int, steps: int, weights: RowSource,
        like: Tiling | None = None, head: WeightFormat | None = None,
    ) -> None:  # fmt: skip
        """`weights` gives the named rows of a tensor; it is called by several threads. With `like`
        the operators are fused and split as a plan's are. `head` is the plan's `Workload.head`.
        """
        # slots of the meaning, more than a plan may have
        work = Workload(batch * steps, steps, head=head)
        tiling = _tiling(model)
        if like is not None:
            tiling = replace(
                tiling, fuse_rope=like.fuse_rope, kv_splits=like.kv_splits, panel=like.panel
            )
        shape = StepShape(model, work, tiling)
        home = [b for b in range(batch) for _ in range(steps)]
        super().__init__(shape, plan_pages(shape, Sync.COUNTER), self._whole, home)
        self.position = np.tile(np.arange(steps), batch)
        self.batch, self.steps, self.rows = batch, steps, weights
        self.operators: Sequence[Operator] = operators_of(shape)
        self._lock = Lock()

    def _whole(self, name: str) -> Array:
        return self.rows(name, slice(None))

    def _weight(self, name: str, layer: int, lo: int = 0, hi: int | None = None) -> Array:
        return np.asarray(self.rows(name.format(layer=max(layer, 0)), slice(lo, hi)), np.float64)

    def _graph(self, task: Task, n: int) -> Graph:
        with self._lock:  # nodes are interned
            return super()._graph(task, n)

    def execute(self, task: Task, core: int) -> None:
        """Run one task on memory; the embedding is looked up, not multiplied with ones."""
        if task.kind is not TaskKind.EMBED:
            super().execute(task, core)
            return
        page = self.page("x")
        page[:] = 0.0
        for row, token in enumerate(self.tokens.tolist()):
            page[row, : self.shape.model.hidden] = self._weight(EMBED, -1, token, token + 1)[0]

    def forward(
        self, tokens: Array, done: Callable[[Operator], None] = lambda _: None
    ) -> Array:  # fmt: skip
        """Logits (batch, steps, vocab) of tokens (batch, steps) from position 0 on; `done` is
        called behind each operator, when its results lie in the pages.
        """
        self.tokens = np.asarray(tokens, np.int64).reshape(-1)
        with ThreadPoolExecutor(usable_cores()) as pool:
            for op in self.operators:
                if op.kind is TaskKind.SAMPLE:
                    continue
                for _ in pool.map(lambda task: self.execute(task, 0), op.tasks):
                    pass
                done(op)
        logits = self.page("logits")[:, : self.shape.model.vocab]
        return logits.reshape(self.batch, self.steps, -1).copy()
