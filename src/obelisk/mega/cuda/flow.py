"""The judge of how blocks hand values to each other, from the table of shares alone.

Takes the sizes and the table that the kernel is emitted with; gives a list of faults, empty when
the exchange is safe. In the kernel a reader waits for the values that it wants by their marks, so a
read after its write needs no proof; what needs one is everything else:

1. Completeness: the shares of a product are exactly its units, each once, and every value that is
   read is written by somebody in the same generation (or its reader would wait for ever).
2. Reuse: a buffer is written anew only when every reader of what it held is known, through the
   marks it has itself waited for, to have finished.
3. The cache: a piece of a layer is taken by the same block in every step.

Happens-before is decided with vector clocks over two steps in a row, layers cut to two or three (of
the same parity, which the double buffer depends on), with and without a head in the first step. The
text's program order is written down once more here, as phases; a device test executes both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from obelisk.plan.layout import align
from obelisk.schedule.gpu import TILE_ROWS, GpuTiling, tile_count
from obelisk.tasks import ModelConfig, Workload

Array = Any
Table = Mapping[str, Sequence[int]]
CELL = 8  # elements of a value that are judged as one
MOST = 8  # faults that are listed


@dataclass(slots=True)
class _Buffer:
    """Memory of one value: who wrote each cell, in which generation, and who has read it since."""

    cells: int
    blocks: int
    writer: Array = field(init=False)
    generation: Array = field(init=False)
    read: Array = field(init=False)
    snapshot: Array = field(init=False)

    def __post_init__(self) -> None:
        self.writer = np.full(self.cells, -1, np.int64)
        self.generation = np.full(self.cells, -1, np.int64)
        self.read = np.zeros((self.cells, self.blocks), np.int64)
        self.snapshot = np.zeros((self.blocks, self.blocks), np.int64)


class _Judge:
    """Executes the phases of all blocks, generation by generation."""

    def __init__(self, model: ModelConfig, work: Workload, t: GpuTiling, table: Table) -> None:
        self.m, self.b, self.t, self.table = model, work.batch, t, table
        self.hidden = tile_count(model.hidden)
        self.now = np.zeros((t.blocks, t.blocks), np.int64)
        self.faults: list[str] = []
        self.owner: dict[tuple[int, int], int] = {}
        rows = (model.heads + 2 * model.kv_heads) * model.head_dim
        widths = {
            "qkv": align(rows, TILE_ROWS) // CELL,
            "part": work.batch * model.kv_heads * t.kv_pieces,
            "o": t.o_split * self.hidden * TILE_ROWS // CELL,
            "act": align(model.ffn, CELL) // CELL,
            "down0": t.down_split * self.hidden * TILE_ROWS // CELL,
            "down1": t.down_split * self.hidden * TILE_ROWS // CELL,
            "best": t.blocks,
        }
        self.buffers = {k: _Buffer(n, t.blocks) for k, n in widths.items()}

    def fault(self, text: str) -> None:
        """Note a fault."""
        if len(self.faults) < MOST and text not in self.faults:
            self.faults.append(text)

    def write(self, value: str, block: int, cells: slice | Array, generation: int) -> None:
        """A block writes cells of a value."""
        buffer = self.buffers[value]
        self.now[block, block] += 1
        if np.any(buffer.read[cells] > self.now[block][None, :]):
            self.fault(f"block {block} overwrites {value} while it may still be read")
        old = buffer.writer[cells]
        if np.any((old >= 0) & (buffer.generation[cells] == generation)):
            self.fault(f"{value} is written twice in one generation")
        buffer.writer[cells], buffer.generation[cells] = block, generation
        buffer.read[cells] = 0
        buffer.snapshot[block] = self.now[block]

    def wait(self, value: str, block: int, cells: slice | Array, generation: int) -> None:
        """A block reads cells of a value, and so knows what their writers knew."""
        buffer = self.buffers[value]
        if np.any(buffer.generation[cells] != generation):
            self.fault(f"block {block} waits for ever for {value}")
            return
        writers = np.unique(buffer.writer[cells])
        if writers.size:
            known = buffer.snapshot[writers].max(axis=0)
            np.maximum(self.now[block], known, out=self.now[block])
        self.now[block, block] += 1
        buffer.read[cells, block] = self.now[block, block]

    def meet(self) -> None:
        """A barrier of all blocks."""
        self.now[:] = self.now.max(axis=0)[None, :]
        self.now[np.diag_indices(self.t.blocks)] += 1

    # ---- phases: every block in turn; a phase waits for earlier phases alone ----
    def share(self, kind: str, turn: int) -> range:
        """Units of a block's share."""
        return range(self.table[kind][turn], self.table[kind][turn + 1])

    def product(self, kind: str, value: str, turns: Sequence[int], each: int, gen: int) -> None:
        """Write the rows of a product's units: `each` cells a unit."""
        for block, turn in enumerate(turns):
            units = self.share(kind, turn)
            if units:
                end = min(units.stop * each, self.buffers[value].cells)
                self.write(value, block, slice(units.start * each, end), gen)

    def split(self, kind: str, turn: int) -> list[tuple[int, range]]:
        """A share of a split product: (part, tiles) in order."""
        units, out = self.share(kind, turn), []
        at = units.start
        while at < units.stop:
            part = at // self.hidden
            stop = min(units.stop, (part + 1) * self.hidden)
            out.append((part, range(at - part * self.hidden, stop - part * self.hidden)))
            at = stop
        return out

    def all_of(self, value: str, gen: int) -> None:
        """Every block reads a whole value."""
        for block in range(self.t.blocks):
            self.wait(value, block, slice(None), gen)

    def attend(self, layer: int, turns: Sequence[int], gen: int) -> None:
        """Items of attention: read a head group, write a piece."""
        m, t = self.m, self.t
        wide = (m.group + 2) * m.head_dim // CELL
        for block, turn in enumerate(turns):
            for item in range(turn, self.buffers["part"].cells, t.blocks):
                group = item // t.kv_pieces % m.kv_heads
                if self.owner.setdefault((layer, item), block) != block:
                    self.fault(f"piece {item} of layer {layer} changes its block between steps")
                self.wait("qkv", block, slice(group * wide, (group + 1) * wide), gen)
                self.write("part", block, slice(item, item + 1), gen)

    def combine(self, turns: Sequence[int], gen: int) -> None:
        """The output projection: read the pieces of a part's heads, write rows."""
        self.sums("o", "o", turns, gen)

    def sums(self, kind: str, value: str, turns: Sequence[int], gen: int) -> None:
        """A product that ends in the residual stream. Where its rows are rounded for all, the block
        with part 0 adds the others' before it writes them.
        """
        later: list[tuple[int, range]] = []
        for block, turn in enumerate(turns):
            for part, tiles in self.split(kind, turn):
                self.inputs(kind, block, part, gen)
                if self.t.rounded and part == 0:
                    later.append((block, tiles))
                else:
                    self.rows(value, block, part, tiles, gen)
        for block, tiles in later:
            for part in range(1, self.t.o_split if kind == "o" else self.t.down_split):
                self.wait(value, block, self.cells(part, tiles), gen)
            self.rows(value, block, 0, tiles, gen)

    def inputs(self, kind: str, block: int, part: int, gen: int) -> None:
        """Read what a part of such a product multiplies: heads' pieces, or the MLP's columns."""
        if kind == "down":
            cols = self.t.padded(self.m.ffn) // self.t.down_split
            cells = slice(part * cols // CELL, -(-(part + 1) * cols // CELL))
            self.wait("act", block, cells, gen)
            return
        m, t = self.m, self.t
        cols = t.padded(m.q_width) // t.o_split
        heads = np.arange(self.buffers["part"].cells) // t.kv_pieces % m.kv_heads
        lo, hi = heads * m.group * m.head_dim, (heads + 1) * m.group * m.head_dim
        need = np.flatnonzero((lo < (part + 1) * cols) & (hi > part * cols))
        self.wait("part", block, need, gen)

    def cells(self, part: int, tiles: range) -> slice:
        """Tiles of a part of the residual stream."""
        each, base = TILE_ROWS // CELL, part * self.hidden
        return slice((base + tiles.start) * each, (base + tiles.stop) * each)

    def rows(self, value: str, block: int, part: int, tiles: range, gen: int) -> None:
        """Write tiles of a part of the residual stream."""
        self.write(value, block, self.cells(part, tiles), gen)

    def down(self, value: str, turns: Sequence[int], gen: int) -> None:
        """The down projection: read a part's columns, write rows."""
        self.sums("down", value, turns, gen)

    def stream(self, value: str, gen: int) -> None:
        """Every block reads the residual stream: all parts, or their sum."""
        whole = slice(0, self.hidden * TILE_ROWS // CELL) if self.t.rounded else slice(None)
        for block in range(self.t.blocks):
            self.wait(value, block, whole, gen)

    def step(self, number: int, layers: int, head: bool) -> None:
        """One step of all blocks."""
        blocks = self.t.blocks
        turns = list(range(blocks))
        first = number * layers if self.t.rounded else 0  # what says which of two buffers it is
        for layer in range(layers):
            gen = number * (layers + 1) + layer
            if layer:
                self.stream(f"down{(first + layer - 1) & 1}", gen - 1)
            self.product("qkv", "qkv", turns, TILE_ROWS // CELL, gen)
            self.attend(layer, turns, gen)
            self.combine(turns, gen)
            self.stream("o", gen)
            self.product("up", "act", turns, 1, gen)
            self.down(f"down{(first + layer) & 1}", turns, gen)
            turns = [(x + self.t.rotate) % blocks for x in turns]
        gen = number * (layers + 1) + layers
        if not head:
            self.meet()
            return
        self.stream(f"down{(first + layers - 1) & 1}", gen - 1)
        for block in range(blocks):
            self.write("best", block, slice(block, block + 1), gen)
        self.all_of("best", gen)


def _complete(model: ModelConfig, t: GpuTiling, table: Table) -> list[str]:
    """Obligation 1, of the shares."""
    hidden, out = tile_count(model.hidden), []
    want = {
        "qkv": tile_count((model.heads + 2 * model.kv_heads) * model.head_dim),
        "o": hidden * t.o_split, "up": -(-model.ffn // (TILE_ROWS // 2)),
        "down": hidden * t.down_split, "head": tile_count(model.vocab),
    }  # fmt: skip
    for kind, units in want.items():
        cut = list(table[kind])
        if len(cut) != t.blocks + 1 or cut[0] != 0 or cut[-1] != units or cut != sorted(cut):
            out.append(f"the shares of {kind} are not its {units} units, each once")
    return out


def check_flow(model: ModelConfig, work: Workload, t: GpuTiling, table: Table) -> list[str]:
    """All faults found, a handful at most; empty means that the exchange is safe."""
    faults = _complete(model, t, table)
    if faults:
        return faults
    layers = model.layers if model.layers < 3 else 2 + model.layers % 2
    for heads in ((True, True), (False, True)):
        judge = _Judge(model, work, t, table)
        for number, head in enumerate(heads):
            judge.step(number, layers, head)
        faults += [f for f in judge.faults if f not in faults]
    return faults
