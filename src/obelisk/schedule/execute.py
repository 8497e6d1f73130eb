"""What tasks do to a step's values: each by its meaning, in float64, on pages of memory.

Takes a `StepShape`, where its values lie, and a checkpoint's tensors. `vm.VirtualMachine` executes
a schedule with it, `meaning.Meaning` the operators one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from obelisk.ir import Graph, run
from obelisk.schedule.types import PagePlan
from obelisk.tasks import TABLE, Region, StepShape, Task, TaskKind, rope_table, task_reads
from obelisk.tasks.weights import EMBED, FINAL_NORM, LAYER, head_tensor

Array = Any
_NORM_GAIN = {
    TaskKind.NORM_IN: LAYER + "input_layernorm.weight",
    TaskKind.NORM_MID: LAYER + "post_attention_layernorm.weight",
    TaskKind.NORM_FINAL: FINAL_NORM,
}


class Executor:
    """The values of one step, and where each slot is.

    Attributes:
        memory: the pages, which begin as NaN.
        home: the slot of the cache that each row of a value belongs to.
        keys, values: (layers, slots of the cache, kv_heads, context, head_dim).
        position, tokens: of each row.
    """

    def __init__(
        self, s: StepShape, pages: PagePlan, weights: Callable[[str], Array],
        home: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.pages, self.weights = s, pages, weights
        self.memory = np.full(pages.elements, np.nan)
        self.home = np.arange(s.batch) if home is None else np.asarray(home)
        m = s.model
        cache = (m.layers, int(self.home.max()) + 1, m.kv_heads, s.work.context, m.head_dim)
        self.keys, self.values = np.full(cache, np.nan), np.full(cache, np.nan)
        self.position = np.zeros(s.batch, np.int64)
        self.tokens = np.zeros(s.batch, np.int64)
        self.graphs: dict[tuple[object, ...], Graph] = {}

    # ---- memory ----
    def page(self, value: str) -> Array:
        """A value's rows, (batch, width), as a view."""
        p, b = self.pages.page(value), self.shape.batch
        return np.lib.stride_tricks.as_strided(
            self.memory[p.offset :], (b, p.width), (8 * p.stride, 8)
        )

    def view(self, r: Region, end: int | None = None) -> Array:
        """A region's elements: (batch, n), or (n,) of one slot; `end` cuts padding off."""
        page = self.page(r.value)
        hi = r.hi if end is None else min(r.hi, end)
        return page[:, r.lo : hi] if r.slot < 0 else page[r.slot, r.lo : hi]

    # ---- weights ----
    def _weight(self, name: str, layer: int, lo: int = 0, hi: int | None = None) -> Array:
        return np.asarray(self.weights(name.format(layer=max(layer, 0)))[lo:hi], np.float64)

    def _packed(self, layer: int, lo: int, hi: int, suffix: str) -> Array:
        """Rows lo..hi of the packed q, k, v product, zeros where a group is padded."""
        s = self.shape
        d, wide = s.model.head_dim, s.model.group * s.model.head_dim
        rows: list[Array] = []
        at = 0  # where a part begins
        for g in range(s.model.kv_heads):
            for x, count in (("q", wide), ("k", d), ("v", d)):
                first, last = max(lo - at, 0), min(hi - at, count)
                if first < last:
                    name = LAYER + f"self_attn.{x}_proj.{suffix}"
                    start = g * count
                    rows.append(self._weight(name, layer, start + first, start + last))
                at += count
            end = (g + 1) * s.group_rows
            pad = max(0, min(hi, end) - max(lo, at))
            if pad:
                tail = (s.model.hidden,) if suffix == "weight" else ()
                rows.append(np.zeros((pad, *tail)))
            at = end
        return np.concatenate(rows)

    def _angles(self) -> tuple[Array, Array]:
        m = self.shape.model
        cos, sin = rope_table(m.rope, m.head_dim, self.position)
        return np.asarray(cos, np.float64), np.asarray(sin, np.float64)

    # ---- tasks ----
    def _graph(self, task: Task, n: int) -> Graph:
        key = (task.kind, task.lo, task.hi, n)
        if key not in self.graphs:
            meaning = TABLE[task.kind].meaning
            assert meaning is not None
            self.graphs[key] = meaning(self.shape, task, n)
        return self.graphs[key]

    def _meaning(self, task: Task, n: int, inputs: Sequence[Array]) -> list[Array]:
        return run(self._graph(task, n), inputs)

    def execute(self, task: Task, core: int) -> None:
        """Run one task on memory."""
        s, m, k = self.shape, self.shape.model, TaskKind
        reads, writes = task_reads(s, task, core), TABLE[task.kind].writes(s, task)
        n = int(self.position[max(task.slot, 0)]) + 1
        match task.kind:
            case k.EMBED:
                x = self._meaning(task, n, [self.tokens[:, None], self._weight(EMBED, -1)])[0]
                self.view(writes[0])[:] = 0.0
                self.view(writes[0], m.hidden)[:] = x
            case k.NORM_IN | k.NORM_MID | k.NORM_FINAL:
                gain = self._weight(_NORM_GAIN[task.kind], task.layer)
                self.view(writes[0])[:] = 0.0
                self.view(writes[0], m.hidden)[:] = self._meaning(
                    task, n, [self.view(reads[0], m.hidden), gain]
                )[0]
            case k.QKV | k.QKV_ROWS | k.ROPE:
                self._qkv(task, reads, writes)
            case k.ATTEND:
                self._attend(task, reads, writes, n)
            case k.COMBINE:
                self._combine(task, reads, writes, n)
            case k.O | k.DOWN:
                self._residual(task, reads, writes, n)
            case k.UP:
                hi = min(task.hi, m.ffn)
                h = self.view(reads[0], m.hidden)
                inputs = [h]
                for name in ("gate", "up"):
                    p = LAYER + f"mlp.{name}_proj."
                    inputs.append(self._weight(p + "weight", task.layer, task.lo, hi))
                    if m.mlp_bias:
                        inputs.append(self._weight(p + "bias", task.layer, task.lo, hi))
                cut = Task(task.kind, task.layer, task.lo, hi, index=task.index)
                self.view(writes[0])[:] = 0.0
                self.view(writes[0], m.ffn)[:] = self._meaning(cut, n, inputs)[0]
            case k.HEAD:
                hi = min(task.hi, m.vocab)
                w = self._weight(head_tensor(m, s.work), -1, task.lo, hi)
                out = self._meaning(task, n, [self.view(reads[0], m.hidden), w])
                self.view(writes[0])[:] = 0.0
                self.view(writes[0], m.vocab)[:] = out[0]
                self.view(writes[1])[:] = np.concatenate(out[1:], 1)
            case k.SAMPLE:
                best, end = self.page("best"), 2 * self._tiles()
                values, ids = best[:, 0:end:2], best[:, 1:end:2]
                pick = values.argmax(1)
                self.tokens = ids[np.arange(s.batch), pick].astype(np.int64)

    def _tiles(self) -> int:
        return len(self.shape.cuts(self.shape.vocab_rows, self.shape.tiling.head))

    def _qkv(self, task: Task, reads: Sequence[Region], writes: Sequence[Region]) -> None:
        s, m = self.shape, self.shape.model
        if task.kind is TaskKind.QKV_ROWS:
            lo, hi = task.lo, task.hi
        else:
            lo, hi = task.lo * s.group_rows, task.hi * s.group_rows
        inputs = [self.view(reads[0], None if task.kind is TaskKind.ROPE else m.hidden)]
        if task.kind is not TaskKind.ROPE:
            inputs.append(self._packed(task.layer, lo, hi, "weight"))
            if m.qkv_bias:
                inputs.append(self._packed(task.layer, lo, hi, "bias"))
        if task.kind is TaskKind.QKV_ROWS:
            self.view(writes[0])[:] = 0.0
            self.view(writes[0], hi)[:] = self._meaning(task, 0, inputs)[0]
            return
        if m.qk_norm:
            a = LAYER + "self_attn."
            inputs += [self._weight(a + f"{x}_norm.weight", task.layer) for x in "qk"]
        q, key, value = self._meaning(task, 0, [*inputs, *self._angles()])
        self.view(writes[0], m.q_width)[:] = q
        for i, g in enumerate(range(task.lo, task.hi)):
            part = slice(i * m.head_dim, (i + 1) * m.head_dim)
            self.keys[task.layer, self.home, g, self.position] = key[:, part]
            self.values[task.layer, self.home, g, self.position] = value[:, part]

    def _attend(
        self, task: Task, reads: Sequence[Region], writes: Sequence[Region], n: int
    ) -> None:
        m, splits = self.shape.model, self.shape.tiling.kv_splits
        q = self.view(reads[0], m.q_width).reshape(m.group, m.head_dim)
        piece = -(-n // splits)
        lo, hi = min(n, task.split * piece), min(n, (task.split + 1) * piece)
        at = (task.layer, self.home[task.slot], task.lo, slice(lo, hi))
        out = self.view(writes[0])
        if splits == 1:
            out[:] = 0.0
            cut = self.view(writes[0], m.q_width)
            cut[:] = self._meaning(task, n, [q, self.keys[at], self.values[at]])[0].ravel()
            return
        d = m.group * m.head_dim
        out[:] = 0.0
        if lo == hi:
            out[d : d + m.group] = -np.inf
            return
        sums, peak, mass = self._meaning(task, hi - lo, [q, self.keys[at], self.values[at]])
        out[:d] = sums.ravel()
        out[d : d + m.group], out[d + m.group : d + 2 * m.group] = peak.ravel(), mass.ravel()

    def _combine(
        self, task: Task, reads: Sequence[Region], writes: Sequence[Region], n: int
    ) -> None:
        m = self.shape.model
        d = m.group * m.head_dim
        parts = [self.view(r) for r in reads]
        sums = np.stack([p[:d].reshape(m.group, m.head_dim) for p in parts])
        peaks = np.stack([p[d : d + m.group, None] for p in parts])
        masses = np.stack([p[d + m.group : d + 2 * m.group, None] for p in parts])
        self.view(writes[0])[:] = 0.0
        cut = self.view(writes[0], m.q_width)
        cut[:] = self._meaning(task, n, [sums, peaks, masses])[0].ravel()

    def _residual(
        self, task: Task, reads: Sequence[Region], writes: Sequence[Region], n: int
    ) -> None:
        m = self.shape.model
        o = task.kind is TaskKind.O
        name = LAYER + ("self_attn.o_proj." if o else "mlp.down_proj.")
        hi = min(task.hi, m.hidden)
        x = self.view(writes[0], m.hidden)
        inputs = [self.view(reads[0], m.q_width if o else m.ffn), x.copy()]
        inputs.append(self._weight(name + "weight", task.layer, task.lo, hi))
        if m.o_bias if o else m.mlp_bias:
            inputs.append(self._weight(name + "bias", task.layer, task.lo, hi))
        x[:] = self._meaning(task, n, inputs)[0]
