"""The tasks of a decode step on a GPU: one table of kinds, with what each reads, writes and
streams.

Takes a `GpuStep` (model, workload, `GpuTiling`); gives `GpuTask`s in the order that defines the
step. The judge, the simulator and the virtual machine read this table; it knows nothing of
placement.

Values in device memory are named by the kind that makes them. Here they lie by units, and a row's
slots side by side (the kernel has slots outermost, which changes nothing for the rules): `qkv`
rows, `attend` cells (one piece of a slot's head group), `o` and `down` (the parts along K; part 0
carries the residual), `up` (silu(gate) * up), `head` (the best of a block). Values of a block alone
carry its number: `x7`, `token7`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from obelisk.schedule.gpu import (
    TILE_ROWS,
    GpuTiling,
    input_bytes,
    kv_tiles,
    piece_width,
    tile_count,
    up_tiles,
)
from obelisk.tasks.config import ModelConfig
from obelisk.tasks.kinds import Region
from obelisk.tasks.workload import Workload


class GpuKind(enum.StrEnum):
    """Every kind of task, in the order of a step."""

    EMBED = "embed"  # the token's row becomes the block's residual stream
    JOIN = "join"  # the parts of `o` or `down` become the block's residual stream
    QKV = "qkv"  # norm and product
    ATTEND = "attend"  # head norms, rotation, append, online softmax over a piece
    O = "o"  # noqa: E741 (the field's name): joins the pieces, product
    UP = "up"  # norm, product, silu(gate) * up
    DOWN = "down"  # product
    HEAD = "head"  # norm, product, best
    CHOOSE = "choose"  # the best of all blocks


@dataclass(frozen=True, slots=True)
class GpuTask:
    """One task: units lo <= u < hi of an operator (attention: cells), on whatever block.

    Attributes:
        kind: what it does.
        layer: which layer; -1 outside the layers.
        lo, hi: units (see `GpuStep.units`), or cells of attention.
        core: embed, join and choose alone: whose copy this is.
        after: join alone: the value that it joins, "o" or "down".
    """

    kind: GpuKind
    layer: int = -1
    lo: int = 0
    hi: int = 1
    core: int = -1
    after: str = ""

    def __str__(self) -> str:
        at = f"@{self.layer}" if self.layer >= 0 else ""
        return f"{self.kind}{at}" + (
            f"[{self.lo}:{self.hi}]" if self.core < 0 else f" {self.after}"
        )


@dataclass(frozen=True)
class GpuStep:
    """A decode step's extents on a GPU."""

    model: ModelConfig
    work: Workload
    tiling: GpuTiling

    @property
    def batch(self) -> int:
        """Slots."""
        return self.work.batch

    @cached_property
    def units(self) -> Mapping[GpuKind, int]:
        """Units of every operator that is dealt out."""
        m, t = self.model, self.tiling
        return MappingProxyType({
            GpuKind.QKV: tile_count(m.q_width + 2 * m.kv_width),
            GpuKind.ATTEND: self.batch * m.kv_heads * t.kv_pieces,
            GpuKind.O: tile_count(m.hidden) * t.o_split,
            GpuKind.UP: up_tiles(m),
            GpuKind.DOWN: tile_count(m.hidden) * t.down_split,
            GpuKind.HEAD: tile_count(m.vocab),
        })  # fmt: skip

    def splits(self, kind: GpuKind) -> int:
        """Parts along K of an operator's tiles."""
        return {GpuKind.O: self.tiling.o_split, GpuKind.DOWN: self.tiling.down_split}.get(kind, 1)

    def columns(self, kind: GpuKind) -> int:
        """Columns of a unit as stored (0: it streams no weights)."""
        m = self.model
        width = {
            GpuKind.QKV: m.hidden, GpuKind.UP: m.hidden, GpuKind.HEAD: m.hidden,
            GpuKind.O: m.q_width, GpuKind.DOWN: m.ffn,
        }.get(kind, 0)  # fmt: skip
        return self.tiling.padded(width) // self.splits(kind)

    def chunk_cols(self, kind: GpuKind) -> int:
        """Columns of a whole chunk."""
        return self.tiling.head_cols if kind is GpuKind.HEAD else self.tiling.chunk_cols

    def chunks(self, kind: GpuKind, length: int = 0) -> int:
        """Copies that a unit takes through the ring: of weights, or of a cell's keys and values at
        a context of `length` (default: the whole), where they go that way. 0: none.
        """
        if kind is not GpuKind.ATTEND:
            return -(-self.columns(kind) // self.chunk_cols(kind))
        if not self.tiling.kv_ring:
            return 0
        wide = piece_width(length or self.work.context, self.tiling.kv_pieces)
        return -(-wide // self.cached)

    @property
    def cached(self) -> int:
        """Positions of a slot of the ring that holds keys and values."""
        return TILE_ROWS * kv_tiles(self.model, self.tiling)

    def unit_bytes(self, kind: GpuKind) -> int:
        """Bytes of weights of a unit."""
        t, cols = self.tiling, self.columns(kind)
        if kind is GpuKind.HEAD:
            return cols // t.head_slab * t.head_bytes
        return cols // t.slab_cols * t.slab_bytes

    @property
    def packed(self) -> int:
        """Values of attention, or of the MLP, in a word: two of 16 bits, or one of fp32."""
        return 4 // input_bytes(self.work)

    @property
    def cell_width(self) -> int:
        """Words of one piece of attention: sums, then the log of the mass, of each head."""
        return self.model.group * (self.model.head_dim // self.packed + 2)

    def cell(self, index: int) -> tuple[int, int, int]:
        """Slot, head group and piece of a cell of attention."""
        rest, piece = divmod(index, self.tiling.kv_pieces)
        slot, group = divmod(rest, self.model.kv_heads)
        return slot, group, piece

    @cached_property
    def widths(self) -> Mapping[str, int]:
        """Words (an element, or two of 16 bits, and a tag) of every value of the step, all
        slots.
        """
        r, u, b = self.tiling.rows * self.batch, self.units, self.batch
        return MappingProxyType({
            "qkv": r * u[GpuKind.QKV], "attend": self.cell_width * u[GpuKind.ATTEND],
            "o": r * u[GpuKind.O], "up": r // (2 * self.packed) * u[GpuKind.UP],
            "down": r * u[GpuKind.DOWN],
            "head": 2 * b * self.tiling.blocks,
        })  # fmt: skip


Regions = Callable[[GpuStep, GpuTask, int], tuple[Region, ...]]
LAYERED = (GpuKind.QKV, GpuKind.ATTEND, GpuKind.O, GpuKind.UP, GpuKind.DOWN)
PRIVATE = ("x", "token")  # values of one block


@dataclass(frozen=True, slots=True)
class GpuRow:
    """A row of the table: what a task on a block reads and writes."""

    says: str
    reads: Regions
    writes: Regions


def private(value: str, core: int) -> Region:
    """A block's own value, as a whole."""
    return Region(f"{value}{core}", 0, 1)


def _whole(s: GpuStep, value: str, layer: int) -> Region:
    return Region(value, 0, s.widths[value], layer=layer)


def _rows(s: GpuStep, t: GpuTask, value: str) -> Region:
    r = s.batch * (s.tiling.rows // (2 * s.packed) if value == "up" else s.tiling.rows)
    return Region(value, r * t.lo, r * t.hi, layer=t.layer)


def _groups_of_columns(s: GpuStep, parts: set[int]) -> set[int]:
    """Head groups whose attention lies in these parts along K of the output projection."""
    m, wide = s.model, s.columns(GpuKind.O)
    each = m.group * m.head_dim
    return {
        g for p in parts for g in range(m.kv_heads)
        if g * each < (p + 1) * wide and p * wide < (g + 1) * each
    }  # fmt: skip


def _parts(s: GpuStep, t: GpuTask) -> set[int]:
    """Parts along K that a task's units belong to: all tiles of part 0 come first."""
    tiles = tile_count(s.model.hidden)
    return set(range(t.lo // tiles, -(-t.hi // tiles)))


def _attend_reads(s: GpuStep, t: GpuTask, core: int) -> tuple[Region, ...]:
    wide = s.batch * (s.model.group + 2) * s.model.head_dim
    groups = sorted({s.cell(i)[1] for i in range(t.lo, t.hi)})
    out = [Region("qkv", g * wide, (g + 1) * wide, layer=t.layer) for g in groups]
    return (*out, Region("cache", t.lo, t.hi, layer=t.layer))


def _attend_writes(s: GpuStep, t: GpuTask, core: int) -> tuple[Region, ...]:
    # A piece is a fixed range of positions: what is appended to it is read by its own cell alone.
    cells = Region("attend", s.cell_width * t.lo, s.cell_width * t.hi, layer=t.layer)
    return (cells, Region("cache", t.lo, t.hi, layer=t.layer))


def _o_reads(s: GpuStep, t: GpuTask, core: int) -> tuple[Region, ...]:
    groups = _groups_of_columns(s, _parts(s, t))
    n, w = s.tiling.kv_pieces, s.cell_width
    cells = [
        Region("attend", w * n * (b * s.model.kv_heads + g), w * n * (b * s.model.kv_heads + g + 1),
               layer=t.layer)
        for b in range(s.batch) for g in sorted(groups)
    ]  # fmt: skip
    return (*cells, private("x", core))


def _down_reads(s: GpuStep, t: GpuTask, core: int) -> tuple[Region, ...]:
    wide, end = s.batch * s.columns(GpuKind.DOWN) // s.packed, s.widths["up"]
    parts = sorted(_parts(s, t))
    cut = [Region("up", min(end, p * wide), min(end, (p + 1) * wide), layer=t.layer) for p in parts]
    return (*(r for r in cut if r.lo < r.hi), private("x", core))


def _join_reads(s: GpuStep, t: GpuTask, core: int) -> tuple[Region, ...]:
    return (_whole(s, t.after, t.layer),)


def _own_x(s: GpuStep, t: GpuTask, core: int) -> tuple[Region, ...]:
    return (private("x", core),)


TABLE: Mapping[GpuKind, GpuRow] = MappingProxyType({
    GpuKind.EMBED: GpuRow("the token's row", lambda s, t, c: (private("token", c),), _own_x),
    GpuKind.JOIN: GpuRow("sums the parts of a product", _join_reads, _own_x),
    GpuKind.QKV: GpuRow("tiles of q, k, v", _own_x, lambda s, t, c: (_rows(s, t, "qkv"),)),
    GpuKind.ATTEND: GpuRow("cells of attention", _attend_reads, _attend_writes),
    GpuKind.O: GpuRow("parts of tiles", _o_reads, lambda s, t, c: (_rows(s, t, "o"),)),
    GpuKind.UP: GpuRow("tiles of gate and up", _own_x, lambda s, t, c: (_rows(s, t, "up"),)),
    GpuKind.DOWN: GpuRow("parts of tiles", _down_reads, lambda s, t, c: (_rows(s, t, "down"),)),
    GpuKind.HEAD: GpuRow("tiles of the vocabulary", _own_x,
                         lambda s, t, c: (
                             Region("head", 2 * s.batch * c, 2 * s.batch * (c + 1)),)),
    GpuKind.CHOOSE: GpuRow("the best of all", lambda s, t, c: (_whole(s, "head", -1),),
                           lambda s, t, c: (private("token", c),)),
})  # fmt: skip


def phases(s: GpuStep) -> list[tuple[GpuKind, int]]:
    """The operators of a step in order, each with its layer, without what every block does
    alone.
    """
    inner = [(kind, layer) for layer in range(s.model.layers) for kind in LAYERED]
    return [*inner, (GpuKind.HEAD, -1)]


def before(s: GpuStep, kind: GpuKind, layer: int, core: int) -> GpuTask | None:
    """What a block does for itself before an operator: embed or join (None: nothing)."""
    match kind:
        case GpuKind.QKV if layer == 0:
            return GpuTask(GpuKind.EMBED, core=core)
        case GpuKind.QKV:
            return GpuTask(GpuKind.JOIN, layer - 1, core=core, after="down")
        case GpuKind.UP:
            return GpuTask(GpuKind.JOIN, layer, core=core, after="o")
        case GpuKind.HEAD:
            return GpuTask(GpuKind.JOIN, s.model.layers - 1, core=core, after="down")
        case _:
            return None
