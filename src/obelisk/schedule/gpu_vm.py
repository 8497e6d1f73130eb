"""The virtual machine of GPU schedules: executes items, rings and pages in numpy, in float64.

Takes a `GpuSchedule` and a checkpoint's tensors; gives logits and tokens. Blocks run one item at a
time in an order drawn from a seed. Inside a task, the loader, the landing of copies and the warps
take turns drawn from the seed, too: a chunk is copied into its ring slot and used from there,
and all memory begins as NaN. So a missing wait, a page or a slot reused early, or a chunk left out
shows as a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from obelisk.base.errors import InternalError
from obelisk.schedule.gpu_tasks import GpuKind, GpuTask
from obelisk.schedule.gpu_types import Chunk, Compute, Copy, GpuItem, GpuSchedule, Join, Meet, Poll
from obelisk.tasks.rope import inverse_frequencies
from obelisk.tasks.weights import EMBED, FINAL_NORM, LAYER, head_tensor

Array = Any
Use = Callable[
    [Chunk, "Array | None"], None
]  # what a warp does with a chunk and what its slot holds
_MATRIX = {GpuKind.O: "self_attn.o_proj", GpuKind.DOWN: "mlp.down_proj"}


class _Ring:
    """One block's ring: slots, the loader's place, and what each warp has taken."""

    def __init__(self, machine: GpuMachine, block: int) -> None:
        self.vm, self.block = machine, block
        self.ring = machine.schedule.rings[block]
        stages = machine.step.tiling.stages
        self.slots: list[Array | None] = [None] * stages
        self.flying: list[tuple[int, Array]] = []  # copies that have not landed, in order
        self.filled, self.freed = [0] * stages, [0] * stages
        self.at, self.landed = 0, 0
        self.warp = [0] * len(self.ring.warps)

    def load(self) -> bool:
        """Issue the next copy, if it may be."""
        if self.at == len(self.ring.loader):
            return False
        copy = self.ring.loader[self.at]
        assert isinstance(copy, Copy)
        if self.freed[copy.slot] < copy.freed or self.landed < copy.landed:
            return False
        self.slots[copy.slot] = None  # what was there is gone
        self.flying.append((copy.slot, self.vm.chunk(self.block, copy.chunk)))
        self.at += 1
        return True

    def land(self) -> bool:
        """The oldest copy lands."""
        if not self.flying:
            return False
        slot, data = self.flying.pop(0)
        self.slots[slot] = data
        self.filled[slot] += 1
        self.landed += 1
        return True

    def take(self, warp: int, task: int, use: Use) -> bool:
        """A warp uses its next chunk of the task, if it has landed."""
        item = self.ring.warps[warp][self.warp[warp]]
        if isinstance(item, Join) or self.filled[item.slot] < item.filled:
            return False
        if item.chunk.task != task:
            raise InternalError(f"a warp takes {item.chunk} in task {task}")
        use(item.chunk, self.slots[item.slot])
        self.freed[item.slot] += item.releases
        self.warp[warp] += 1
        return True

    def move(self, task: int, use: Use) -> None:
        """All chunks of a streaming task, in any order that the ring allows."""
        warps = range(len(self.warp))
        while any(not isinstance(self.ring.warps[w][self.warp[w]], Join) for w in warps):
            turns: list[Callable[[], bool]] = [self.load, self.land]
            turns += [partial(self.take, w, task, use) for w in warps]
            if not any(turns[i]() for i in self.vm.rng.permutation(len(turns))):
                raise InternalError(f"the ring of block {self.block} stops moving in task {task}")
        for w in warps:
            self.warp[w] += 1

    def run(self, task: int, inputs: Callable[[int], Array]) -> Array:
        """A product: sums (units, slots, rows)."""
        units, parts = self.ring.tasks[task]
        step = self.vm.step
        sums = np.full((units, max(parts, 1), step.batch, step.tiling.rows), np.nan)

        def multiply(chunk: Chunk, data: Array | None) -> None:
            columns = inputs(chunk.unit)[:, self.vm.columns(self.block, chunk)]
            weights = np.full((step.tiling.rows, columns.shape[1]), np.nan)
            if data is not None and data.shape == weights.shape:
                weights = data
            sums[chunk.unit, chunk.part] = columns @ weights.T

        self.move(task, multiply)
        return sums.sum(1)

    def gather(self, task: int) -> Array:
        """Keys and values of attention's cells: (2, cells, positions, head_dim)."""
        cells, parts = self.ring.tasks[task]
        each, d = self.vm.step.cached, self.vm.step.model.head_dim
        out = np.full((2, cells, parts * each, d), np.nan)

        def keep(chunk: Chunk, data: Array | None) -> None:
            if data is not None and data.shape == (2, each, d):
                out[:, chunk.unit, chunk.part * each : (chunk.part + 1) * each] = data

        self.move(task, keep)
        return out

    def next_step(self) -> None:
        """Back to the first task; what was filled and freed counts on."""
        if self.at != len(self.ring.loader):
            raise InternalError(f"block {self.block} has copies left at the end of a step")
        self.filled, self.freed = [0] * len(self.filled), [0] * len(self.freed)
        self.at = self.landed = 0
        self.warp = [0] * len(self.warp)


class GpuMachine:
    """One schedule, its memory, and where each slot is."""

    def __init__(
        self, schedule: GpuSchedule, weights: Callable[[str], Array], seed: int = 0
    ) -> None:  # fmt: skip
        self.schedule, self.step, self.weights = schedule, schedule.step, weights
        s, m = self.step, self.step.model
        self.rng = np.random.default_rng(seed)
        self.words = np.full((schedule.pages.words, 2), np.nan)
        self.marks = np.full(schedule.pages.words, -1, np.int64)
        shape = (m.layers, s.batch, m.kv_heads, s.work.context, m.head_dim)
        self.keys, self.values = np.full(shape, np.nan), np.full(shape, np.nan)
        blocks = schedule.blocks
        self.x = np.full((blocks, s.batch, m.hidden), np.nan)
        self.tokens = np.zeros((blocks, s.batch), np.int64)
        self.logits = np.full((s.batch, m.vocab), np.nan)
        self.steps = 0
        self.packed: dict[tuple[GpuKind, int], Array] = {}
        self.rings = [_Ring(self, b) for b in range(blocks)]
        self.streams = [
            [i.task for i in p if isinstance(i, Compute) and s.chunks(i.task.kind)]
            for p in schedule.programs
        ]

    # ---- weights ----
    def _tensor(self, name: str, layer: int) -> Array:
        return np.asarray(self.weights(name.format(layer=layer)), np.float64)

    def _groups(self, layer: int, suffix: str) -> Array:
        """q, k and v by head group: its query heads, its key, its value."""
        m = self.step.model
        q, k, v = (self._tensor(LAYER + f"self_attn.{x}_proj.{suffix}", layer) for x in "qkv")
        d, wide = m.head_dim, m.group * m.head_dim
        return np.concatenate([
            part for g in range(m.kv_heads)
            for part in (q[g * wide : (g + 1) * wide], k[g * d : (g + 1) * d],
                         v[g * d : (g + 1) * d])
        ])  # fmt: skip

    def _pairs(self, layer: int, suffix: str) -> Array:
        """Rows of gate and up in turn."""
        gate, up = (self._tensor(LAYER + f"mlp.{x}_proj.{suffix}", layer) for x in ("gate", "up"))
        return np.stack([gate, up], 1).reshape(-1, *gate.shape[1:])

    def matrix(self, kind: GpuKind, layer: int) -> Array:
        """A product's rows and columns as stored, padded with zeros."""
        if (kind, layer) in self.packed:
            return self.packed[kind, layer]
        s, m = self.step, self.step.model
        match kind:
            case GpuKind.QKV:
                raw = self._groups(layer, "weight")
            case GpuKind.UP:
                raw = self._pairs(layer, "weight")
            case GpuKind.HEAD:
                raw = self._tensor(head_tensor(m, s.work), 0)
            case _:
                raw = self._tensor(LAYER + _MATRIX[kind] + ".weight", layer)
        rows = s.units[kind] // s.splits(kind) * s.tiling.rows
        out = np.zeros((rows, s.columns(kind) * s.splits(kind)))
        out[: raw.shape[0], : raw.shape[1]] = raw
        self.packed[kind, layer] = out
        return out

    def _place(self, task: GpuTask, unit: int) -> tuple[int, int]:
        """Tile and part along K of a task's unit."""
        tiles = self.step.units[task.kind] // self.step.splits(task.kind)
        part, tile = divmod(task.lo + unit, tiles)
        return tile, part

    def columns(self, block: int, chunk: Chunk) -> slice:
        """Columns of a chunk within its unit."""
        kind = self.streams[block][chunk.task].kind
        wide, each = self.step.columns(kind), self.step.chunk_cols(kind)
        low = chunk.part * each
        return slice(low, min(wide, low + each))

    def chunk(self, block: int, chunk: Chunk) -> Array:
        """A chunk's weights, (rows, columns), or its keys and values, (2, positions, head_dim)."""
        task = self.streams[block][chunk.task]
        if task.kind is GpuKind.ATTEND:
            return self._cached(task.layer, task.lo + chunk.unit, chunk.part)
        tile, part = self._place(task, chunk.unit)
        base, rows = part * self.step.columns(task.kind), self.step.tiling.rows
        cut = self.columns(block, chunk)
        stored = self.matrix(task.kind, max(task.layer, 0))
        return stored[tile * rows : (tile + 1) * rows, base + cut.start : base + cut.stop].copy()

    def _piece(self, piece: int) -> tuple[int, int]:
        """A piece's first position and the end of its range."""
        each = -(-self.step.work.context // self.step.tiling.kv_pieces)
        return piece * each, (piece + 1) * each

    def _cached(self, layer: int, cell: int, part: int) -> Array:
        """What the cache has of a chunk's positions now; NaN where it has none."""
        s = self.step
        slot, g, piece = s.cell(cell)
        low, high = self._piece(piece)
        low += part * s.cached
        out = np.full((2, s.cached, s.model.head_dim), np.nan)
        for rows, cache in zip(out, (self.keys, self.values), strict=True):
            found = cache[layer, slot, g, low : min(high, low + s.cached)]
            rows[: len(found)] = found
        return out

    # ---- words ----
    def _span(self, value: str, layer: int, low: int, high: int) -> slice:
        page = self.schedule.pages.device_page(value)
        if page is None:
            raise InternalError(f"{value} has no page")
        at = page.at(layer)
        return slice(at + low, at + high)

    def _mark(self, layer: int) -> int:
        layers = self.step.model.layers
        return self.steps * (layers + 1) + (layers if layer < 0 else layer)

    def put(self, value: str, layer: int, low: int, data: Array) -> None:
        """Write words (n, 2) or (n,), and their marks."""
        span = self._span(value, layer, low, low + len(data))
        self.words[span] = data if data.ndim == 2 else np.stack([data, data], 1)
        self.marks[span] = self._mark(layer)

    def get(self, value: str, layer: int, low: int, high: int) -> Array:
        """Words (n, 2)."""
        return self.words[self._span(value, layer, low, high)]

    def _rows(self, value: str, layer: int, low: int, high: int) -> Array:
        """Rows low to high of an fp32 value, (slots, rows)."""
        b = self.step.batch
        return self.get(value, layer, b * low, b * high)[:, 0].reshape(high - low, b).T

    # ---- tasks ----
    def _norm(self, block: int, name: str, layer: int) -> Array:
        m = self.step.model
        x = self.x[block]
        scale = 1.0 / np.sqrt((x * x).mean(1, keepdims=True) + m.eps)
        return x * scale * self._tensor(name, max(layer, 0))

    def _product(self, block: int, task: GpuTask, inputs: Callable[[int], Array]) -> Array:
        """Sums of a task's units, (units, slots, rows)."""
        return self.rings[block].run(self.streams[block].index(task), inputs)

    def _padded(self, rows: Array, kind: GpuKind) -> Array:
        out = np.zeros((self.step.batch, self.step.columns(kind) * self.step.splits(kind)))
        out[:, : rows.shape[1]] = rows
        return out

    def execute(self, block: int, task: GpuTask) -> None:
        """Run one task on a block."""
        s, m, k = self.step, self.step.model, GpuKind
        r = s.tiling.rows
        match task.kind:
            case k.EMBED:
                self.x[block] = self._tensor(EMBED, 0)[self.tokens[block]]
            case k.JOIN:
                split = s.splits(k.O if task.after == "o" else k.DOWN)
                tiles = s.widths[task.after] // (s.batch * split)
                parts = self._rows(task.after, task.layer, 0, split * tiles)
                self.x[block] = parts.reshape(s.batch, split, tiles).sum(1)[:, : m.hidden]
            case k.QKV:
                self._qkv(block, task)
            case k.ATTEND:
                cells = range(task.lo, task.hi)
                held = [None] * len(cells)
                if s.chunks(task.kind):
                    held = list(
                        self.rings[block].gather(self.streams[block].index(task)).swapaxes(0, 1)
                    )
                for cell, rows in zip(cells, held, strict=True):
                    self._attend(task.layer, cell, rows)
            case k.O | k.DOWN:
                self._residual(block, task)
            case k.UP:
                self._up(block, task)
            case k.HEAD:
                h = self._padded(self._norm(block, FINAL_NORM, 0), k.HEAD)
                sums = self._product(block, task, lambda u: h)
                found = sums.transpose(1, 0, 2).reshape(s.batch, -1)[:, : m.vocab - r * task.lo]
                self._best(block, r * task.lo, found)
            case k.CHOOSE:
                best = self.get("head", -1, 0, s.widths["head"]).reshape(-1, s.batch, 2, 2)
                value, token = best[:, :, 0, 0], best[:, :, 1, 0]
                order = np.lexsort((token, -value), axis=0)[0]
                self.tokens[block] = token[order, np.arange(s.batch)].astype(np.int64)

    def _best(self, block: int, first: int, found: Array) -> None:
        s = self.step
        out = np.full((s.batch, 2), -np.inf)
        out[:, 1] = s.model.vocab
        if found.shape[1]:
            self.logits[:, first : first + found.shape[1]] = found
            pick = found.argmax(1)
            out = np.stack([found[np.arange(s.batch), pick], first + pick], 1)
        self.put("head", -1, 2 * s.batch * block, out.reshape(-1))

    def _qkv(self, block: int, task: GpuTask) -> None:
        s, m = self.step, self.step.model
        name = LAYER + "input_layernorm.weight"
        h = self._padded(self._norm(block, name, task.layer), task.kind)
        sums = self._product(block, task, lambda u: h)
        rows = sums.transpose(0, 2, 1).reshape(-1, s.batch)
        if m.qkv_bias:
            bias = np.zeros(s.units[task.kind] * s.tiling.rows)
            stored = self._groups(task.layer, "bias")
            bias[: len(stored)] = stored
            rows = rows + bias[s.tiling.rows * task.lo : s.tiling.rows * task.hi, None]
        self.put("qkv", task.layer, s.batch * s.tiling.rows * task.lo, rows.reshape(-1))

    def _head(self, rows: Array, gain: str, layer: int, position: int) -> Array:
        """Heads (n, head_dim), normed and rotated."""
        m = self.step.model
        if m.qk_norm:
            scale = 1.0 / np.sqrt((rows * rows).mean(1, keepdims=True) + m.eps)
            rows = rows * scale * self._tensor(LAYER + f"self_attn.{gain}_norm.weight", layer)
        angle = position * inverse_frequencies(m.rope, m.head_dim)
        cos, sin = np.cos(angle), np.sin(angle)
        half = m.head_dim // 2
        a, b = rows[:, :half], rows[:, half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], 1)

    def _attend(self, layer: int, cell: int, held: Array | None) -> None:
        """One cell; `held`: keys and values of older positions as the ring brought them, else they
        are read where they are.
        """
        s, m, d = self.step, self.step.model, self.step.model.head_dim
        slot, g, piece = s.cell(cell)
        wide, base = (m.group + 2) * d, g * (m.group + 2) * d
        rows = self._rows("qkv", layer, base, base + wide)[slot].reshape(m.group + 2, d)
        n = self.steps
        low, end = self._piece(piece)
        high = min(end, n + 1)
        if low <= n < high:
            self.keys[layer, slot, g, n] = self._head(rows[-2:-1], "k", layer, n)[0]
            self.values[layer, slot, g, n] = rows[-1]
        sums = d // s.packed  # words
        out = np.zeros((m.group, sums + 2, 2))
        out[:, sums] = -np.inf
        if low < high:
            q = self._head(rows[: m.group], "q", layer, n)
            keys, values = (c[layer, slot, g, low:high] for c in (self.keys, self.values))
            if held is not None:
                old = min(high, n) - low
                keys, values = (
                    np.concatenate([h[:old], c[old:]])
                    for h, c in zip(held, (keys, values), strict=True)
                )
            scores = q @ keys.T / np.sqrt(d)
            most = scores.max(1, keepdims=True)
            weight = np.exp(scores - most)
            mass = weight.sum(1, keepdims=True)
            mean = weight @ values / mass
            out[:, :sums, : s.packed] = mean.reshape(m.group, sums, s.packed)
            out[:, sums] = most + np.log(mass)
        self.put("attend", layer, s.cell_width * cell, out.reshape(-1, 2))

    def _attention(self, layer: int, part: int) -> Array:
        """The inputs of a part of the output projection: pieces joined; other groups are NaN."""
        s, m, d = self.step, self.step.model, self.step.model.head_dim
        wide, pieces = s.columns(GpuKind.O), s.tiling.kv_pieces
        each = m.group * d
        out = np.full((s.batch, m.q_width), np.nan)
        for slot in range(s.batch):
            for g in range(m.kv_heads):
                if g * each >= (part + 1) * wide or part * wide >= (g + 1) * each:
                    continue
                at = s.cell_width * pieces * (slot * m.kv_heads + g)
                cells = self.get("attend", layer, at, at + s.cell_width * pieces)
                sums = d // s.packed
                cells = cells.reshape(pieces, m.group, sums + 2, 2)
                mean = cells[:, :, :sums, : s.packed].reshape(pieces, m.group, d)
                mass = cells[:, :, sums, 0]
                share = np.exp(mass - mass.max(0))[:, :, None]
                out[slot, g * each : (g + 1) * each] = (
                    (np.where(share > 0, share * mean, 0.0)).sum(0) / share.sum(0)
                ).reshape(-1)
        return self._padded(out, GpuKind.O)[:, part * wide : (part + 1) * wide]

    def _activation(self, layer: int, part: int) -> Array:
        """The inputs of a part of the down projection."""
        s = self.step
        wide, b = s.columns(GpuKind.DOWN), s.batch
        per = s.tiling.rows // 2  # values of a slot in a tile
        low, high = (b * p * wide // s.packed for p in (part, part + 1))
        high = min(s.widths["up"], high)
        out = np.zeros((b, wide))
        if low < high:
            words = self.get("up", layer, low, high)[:, : s.packed].reshape(-1, b, per)
            got = words.transpose(1, 0, 2).reshape(b, -1)
            out[:, : got.shape[1]] = got
        return out

    def _residual(self, block: int, task: GpuTask) -> None:
        s, m, r = self.step, self.step.model, self.step.tiling.rows
        fill = self._attention if task.kind is GpuKind.O else self._activation
        parts = {p: fill(task.layer, p) for p in
                 {self._place(task, u)[1] for u in range(task.hi - task.lo)}}  # fmt: skip
        sums = self._product(block, task, lambda u: parts[self._place(task, u)[1]])
        bias = np.zeros(m.hidden)
        if m.o_bias if task.kind is GpuKind.O else m.mlp_bias:
            bias = self._tensor(LAYER + _MATRIX[task.kind] + ".bias", task.layer)
        whole = self.x[block] + bias
        for u in range(task.hi - task.lo):
            tile, part = self._place(task, u)
            rows = sums[u]
            if part == 0:
                mine = whole[:, tile * r : (tile + 1) * r]
                rows = rows + np.pad(mine, ((0, 0), (0, r - mine.shape[1])))
            at = s.batch * r * (task.lo + u)
            self.put(task.kind.value, task.layer, at, rows.T.reshape(-1))

    def _up(self, block: int, task: GpuTask) -> None:
        s, m, r = self.step, self.step.model, self.step.tiling.rows
        name = LAYER + "post_attention_layernorm.weight"
        h = self._padded(self._norm(block, name, task.layer), task.kind)
        sums = self._product(block, task, lambda u: h)
        if m.mlp_bias:
            bias = np.zeros(s.units[task.kind] * r)
            stored = self._pairs(task.layer, "bias")
            bias[: len(stored)] = stored
            sums = sums + bias[r * task.lo : r * task.hi].reshape(-1, 1, r)
        gate, up = sums[:, :, 0::2], sums[:, :, 1::2]
        act = gate / (1.0 + np.exp(-gate)) * up  # (units, slots, rows / 2)
        words = act.reshape(-1, 2) if s.packed == 2 else act.reshape(-1)
        self.put("up", task.layer, s.batch * r // (2 * s.packed) * task.lo, words)

    # ---- steps ----
    def step_once(self, tokens: Sequence[int]) -> Array:
        """One step of every slot from `tokens`; gives logits (batch, vocab). Raises `InternalError`
        when the schedule stops moving.
        """
        self.tokens[:] = np.asarray(tokens, np.int64)
        self.logits[:] = np.nan
        programs = self.schedule.programs
        at = [0] * len(programs)
        met: dict[str, set[int]] = {}
        while True:
            ready = [
                b for b, p in enumerate(programs)
                if at[b] < len(p) and self._may(b, p[at[b]], met)
            ]  # fmt: skip
            if not ready:
                break
            block = int(self.rng.choice(ready))
            item = programs[block][at[block]]
            at[block] += 1
            if isinstance(item, Compute):
                self.execute(block, item.task)
        if any(a < len(p) for a, p in zip(at, programs, strict=True)):
            raise InternalError("the schedule stops moving before its end")
        for ring in self.rings:
            ring.next_step()
        self.steps += 1
        return self.logits.copy()

    def _may(self, block: int, item: GpuItem, met: dict[str, set[int]]) -> bool:
        match item:
            case Poll(region):
                span = self._span(region.value, region.layer, region.lo, region.hi)
                return bool((self.marks[span] == self._mark(region.layer)).all())
            case Meet(name):
                met.setdefault(name, set()).add(block)
                return len(met[name]) == self.schedule.blocks
            case _:
                return True
