"""The one table of task kinds: parameters, reads, writes, footprint, micro-operations, meaning.

Takes a `StepShape` and a `Task`; every column of `TABLE` is a function of the two. The scheduler,
the checker, the simulator, the virtual machine, the emitter's names and the documentation all read
this table; nothing about a kind is written anywhere else, but its body in C.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from obelisk.ir import Graph
from obelisk.tasks import meanings
from obelisk.tasks.shape import StepShape


class TaskKind(enum.StrEnum):
    """Every kind of task, in the order of a step. A kind's value is its name in C and in plans."""

    EMBED = "embed"
    NORM_IN = "norm_in"
    QKV = "qkv"  # product, head norms, rotation and append, by head groups
    QKV_ROWS = "qkv_rows"  # the product alone, by rows
    ROPE = "rope"  # head norms, rotation and append, by head groups
    ATTEND = "attend"
    COMBINE = "combine"
    O = "o"  # noqa: E741 (the field's name for the output projection)
    NORM_MID = "norm_mid"
    UP = "up"
    DOWN = "down"
    NORM_FINAL = "norm_final"
    HEAD = "head"
    SAMPLE = "sample"


@dataclass(frozen=True, slots=True)
class Task:
    """One tile task of a step.

    Attributes:
        kind: what it does.
        layer: which layer; -1 outside the layers.
        lo, hi: the rows, head groups or slots that it covers (see the table's `parameters`).
        slot: attention alone: which slot.
        split: attention alone: which piece of the context.
        core: norms alone: whose copy this is (-1: the shared one).
        index: its number among its operator's tasks.
    """

    kind: TaskKind
    layer: int = -1
    lo: int = 0
    hi: int = 1
    slot: int = -1
    split: int = 0
    core: int = -1
    index: int = 0

    @property
    def operator(self) -> tuple[TaskKind, int]:
        """Which operator this is a tile of."""
        return (self.kind, self.layer)

    def __str__(self) -> str:
        at = f"@{self.layer}" if self.layer >= 0 else ""
        what = (
            f"[{self.lo}:{self.hi}]" if self.slot < 0 else f"[{self.slot},{self.lo},{self.split}]"
        )
        return f"{self.kind}{at}{what}"


@dataclass(frozen=True, slots=True)
class Region:
    """Elements lo <= i < hi of a value's rows, of one slot (-1: all), of one layer (-1: none)."""

    value: str
    lo: int
    hi: int
    slot: int = -1
    layer: int = -1


class MicroOp(enum.StrEnum):
    """What a task is made of, and what the simulator charges for."""

    LOAD = "load"  # activations from a shared cache, bytes
    STREAM = "stream"  # weights or cached keys and values from memory, bytes
    MULTIPLY = "multiply"  # multiply-adds, operations
    SPECIAL = "special"  # exponentials, square roots: elements
    REDUCE = "reduce"  # elements folded
    STORE = "store"  # results, bytes


@dataclass(frozen=True, slots=True)
class Micro:
    """One micro-operation: how much of it, and which earlier ones (by position) it waits for."""

    op: MicroOp
    amount: float
    after: tuple[int, ...] = ()


Regions = Callable[[StepShape, Task], tuple[Region, ...]]


@dataclass(frozen=True, slots=True)
class KindRow:
    """A row of the table.

    Attributes:
        parameters: what `lo:hi`, slot and split mean.
        reads, writes: regions of values; values are those of `value_width`.
        weights: names of the packed tensors it reads.
        micro: its micro-operations for a context of `n` positions, in order.
        footprint: bytes that it wants in the core's own cache.
        meaning: its ir graph for a context of `n` positions (None: a random choice has none).
    """

    parameters: str
    reads: Regions
    writes: Regions
    weights: tuple[str, ...]
    micro: Callable[[StepShape, Task, int], tuple[Micro, ...]]
    footprint: Callable[[StepShape, Task], int]
    meaning: Callable[[StepShape, Task, int], Graph] | None


def value_width(s: StepShape) -> dict[str, int]:
    """The values of a step and the elements of one slot's row of each (tokens: one integer)."""
    m, t = s.model, s.tiling
    out = {"token": 16, "x": s.hidden_padded}
    copies = [f"h{c}" for c in range(t.cores)] if t.replicate_norm else ["h"]
    out |= dict.fromkeys(copies, s.hidden_padded)
    if not t.fuse_rope:
        out["raw"] = s._padded(s.qkv_rows)
    out |= {"q": s.q_padded, "attn": s.q_padded, "act": s.ffn_padded}
    if t.kv_splits > 1:
        out["part"] = m.kv_heads * t.kv_splits * s.part_width
    tiles = len(s.cuts(s.vocab_rows, t.head))
    return out | {"logits": s._padded(s.vocab_rows), "best": s._padded(2 * tiles)}


def _h(t: Task) -> str:
    return "h" if t.core < 0 else f"h{t.core}"


def _whole(s: StepShape, value: str) -> Region:
    return Region(value, 0, s.hidden_padded if value[0] == "h" else value_width(s)[value])


def _cache(s: StepShape, t: Task) -> tuple[Region, ...]:
    return tuple(Region(v, t.lo, t.hi, t.slot, t.layer) for v in ("keys", "values"))


def _queries(s: StepShape, t: Task, value: str) -> Region:
    wide = s.model.group * s.model.head_dim
    end = s.q_padded if t.hi == s.model.kv_heads else t.hi * wide  # the last owns the padding
    return Region(value, t.lo * wide, end, t.slot)


def _part(s: StepShape, t: Task, split: int) -> Region:
    at = (t.lo * s.tiling.kv_splits + split) * s.part_width
    return Region("part", at, at + s.part_width, t.slot)


def _padded_end(s: StepShape, t: Task, rows: int, width: int) -> int:
    """Products write whole panels; the last one also owns the padding behind it."""
    return width if t.hi >= rows else t.hi


def _product(
    s: StepShape, rows: int, cols: int, out: int, special: int = 0, each: float | None = None
) -> tuple[Micro, ...]:
    """`each`: bytes of a weight; of a layer's where nothing is said."""
    b, size = s.batch, s.work.weight_bytes if each is None else each
    ops = [
        Micro(MicroOp.LOAD, 4.0 * b * cols),
        Micro(MicroOp.STREAM, rows * cols * size),
        Micro(MicroOp.MULTIPLY, 2.0 * b * rows * cols, (0, 1)),
        Micro(MicroOp.REDUCE, float(b * rows * s.lanes), (2,)),
    ]
    if special:
        ops.append(Micro(MicroOp.SPECIAL, float(b * special), (3,)))
    ops.append(Micro(MicroOp.STORE, 4.0 * b * out, (len(ops) - 1,)))
    return tuple(ops)


def _pointwise(load: float, special: float, store: float) -> tuple[Micro, ...]:
    return (
        Micro(MicroOp.LOAD, load),
        Micro(MicroOp.REDUCE, load / 4, (0,)),
        Micro(MicroOp.SPECIAL, special, (1,)),
        Micro(MicroOp.STORE, store, (2,)),
    )


def _attention(s: StepShape, t: Task, n: int) -> tuple[Micro, ...]:
    m = s.model
    piece = -(-n // s.tiling.kv_splits)
    return (
        Micro(MicroOp.LOAD, 4.0 * m.group * m.head_dim),
        Micro(MicroOp.STREAM, 8.0 * piece * m.head_dim),
        Micro(MicroOp.MULTIPLY, 4.0 * m.group * piece * m.head_dim, (0, 1)),
        Micro(MicroOp.SPECIAL, float(m.group * piece), (2,)),
        Micro(MicroOp.STORE, 4.0 * m.group * m.head_dim, (3,)),
    )


def _fit(cols: Callable[[StepShape], int]) -> Callable[[StepShape, Task], int]:
    """A product keeps its input rows and two panels of weights close."""

    def footprint(s: StepShape, t: Task) -> int:
        wide = cols(s)
        return 4 * s.batch * wide + int(2 * s.tiling.panel * wide * s.work.weight_bytes)

    return footprint


def _row_fit(s: StepShape, t: Task) -> int:
    return 8 * s.batch * s.hidden_padded


def _norm_row(gain: str, meaning: Callable[[StepShape, Task, int], Graph]) -> KindRow:
    return KindRow(
        "all slots; one copy for each core, or one shared",
        reads=lambda s, t: (_whole(s, "x"),),
        writes=lambda s, t: (_whole(s, _h(t)),),
        weights=(gain,),
        micro=lambda s, t, n: _pointwise(
            4.0 * s.batch * s.model.hidden, s.batch, 4.0 * s.batch * s.model.hidden
        ),
        footprint=_row_fit,
        meaning=meaning,
    )


def _residual_row(
    name: str, value: str, cols: Callable[[StepShape], int], bias: Callable[[StepShape], bool]
) -> KindRow:
    def writes(s: StepShape, t: Task) -> tuple[Region, ...]:
        return (Region("x", t.lo, _padded_end(s, t, s.hidden_rows, s.hidden_padded)),)

    return KindRow(
        "rows of the residual stream",
        reads=lambda s, t: (_whole(s, value), *writes(s, t)),
        writes=writes,
        weights=(name, f"{name}_bias"),
        micro=lambda s, t, n: _product(s, t.hi - t.lo, cols(s), t.hi - t.lo),
        footprint=_fit(cols),
        meaning=lambda s, t, n: meanings.residual(s, t.lo, t.hi, cols(s), bias(s)),
    )


def _qkv_cols(s: StepShape) -> int:
    return s.model.hidden


def _group_writes(s: StepShape, t: Task) -> tuple[Region, ...]:
    return (_queries(s, t, "q"), *_cache(s, t))


def _head_writes(s: StepShape, t: Task) -> tuple[Region, ...]:
    end = _padded_end(s, t, s.vocab_rows, value_width(s)["logits"])
    return (Region("logits", t.lo, end), Region("best", 2 * t.index, 2 * t.index + 2))


def _attend_writes(s: StepShape, t: Task) -> tuple[Region, ...]:
    return (_queries(s, t, "attn") if s.tiling.kv_splits == 1 else _part(s, t, t.split),)


TABLE: Mapping[TaskKind, KindRow] = MappingProxyType({
    TaskKind.EMBED: KindRow(
        "slots",
        reads=lambda s, t: (_whole(s, "token"),),
        writes=lambda s, t: (_whole(s, "x"),),
        weights=("embed",),
        micro=lambda s, t, n: _pointwise(s.batch * s.model.hidden * s.work.outer_bytes, 0.0,
                                         4.0 * s.batch * s.model.hidden),
        footprint=_row_fit,
        meaning=lambda s, t, n: meanings.embed(s),
    ),
    TaskKind.NORM_IN: _norm_row("norm_in", lambda s, t, n: meanings.norm(s)),
    TaskKind.QKV: KindRow(
        "head groups",
        reads=lambda s, t: (_whole(s, _h(t)),),
        writes=_group_writes,
        weights=("qkv", "qkv_bias", "q_gain", "k_gain"),
        micro=lambda s, t, n: _product(s, (t.hi - t.lo) * s.group_rows, s.model.hidden,
                                       (t.hi - t.lo) * s.group_rows, t.hi - t.lo),
        footprint=_fit(_qkv_cols),
        meaning=lambda s, t, n: meanings.qkv(s, t.hi - t.lo),
    ),
    TaskKind.QKV_ROWS: KindRow(
        "rows of the packed product",
        reads=lambda s, t: (_whole(s, _h(t)),),
        writes=lambda s, t: (
            Region("raw", t.lo, _padded_end(s, t, s.qkv_rows, s._padded(s.qkv_rows))),),
        weights=("qkv", "qkv_bias"),
        micro=lambda s, t, n: _product(s, t.hi - t.lo, s.model.hidden, t.hi - t.lo),
        footprint=_fit(_qkv_cols),
        meaning=lambda s, t, n: meanings.rows(s, t.hi - t.lo, s.model.hidden, s.model.qkv_bias),
    ),
    TaskKind.ROPE: KindRow(
        "head groups",
        reads=lambda s, t: (Region("raw", t.lo * s.group_rows, t.hi * s.group_rows),),
        writes=_group_writes,
        weights=("q_gain", "k_gain"),
        micro=lambda s, t, n: _pointwise(
            4.0 * s.batch * (t.hi - t.lo) * s.group_rows, s.batch * (t.hi - t.lo) * s.model.group,
            4.0 * s.batch * (t.hi - t.lo) * s.group_rows),
        footprint=lambda s, t: 8 * s.batch * s.group_rows,
        meaning=lambda s, t, n: meanings.rotate(s, t.hi - t.lo),
    ),
    TaskKind.ATTEND: KindRow(
        "slot, head group, piece of the context",
        reads=lambda s, t: (_queries(s, t, "q"), *_cache(s, t)),
        writes=_attend_writes,
        weights=(),
        micro=_attention,
        footprint=lambda s, t: 8 * s.model.group * (s.model.head_dim + 64),
        meaning=lambda s, t, n: meanings.attend(s, n, s.tiling.kv_splits == 1),
    ),
    TaskKind.COMBINE: KindRow(
        "slot, head group",
        reads=lambda s, t: tuple(_part(s, t, i) for i in range(s.tiling.kv_splits)),
        writes=lambda s, t: (_queries(s, t, "attn"),),
        weights=(),
        micro=lambda s, t, n: _pointwise(
            4.0 * s.tiling.kv_splits * s.part_width, s.tiling.kv_splits * s.model.group,
            4.0 * s.model.group * s.model.head_dim),
        footprint=lambda s, t: 4 * s.tiling.kv_splits * s.part_width,
        meaning=lambda s, t, n: meanings.combine(s),
    ),
    TaskKind.O: _residual_row("o", "attn", lambda s: s.model.q_width, lambda s: s.model.o_bias),
    TaskKind.NORM_MID: _norm_row("norm_mid", lambda s, t, n: meanings.norm(s)),
    TaskKind.UP: KindRow(
        "rows of gate and of up",
        reads=lambda s, t: (_whole(s, _h(t)),),
        writes=lambda s, t: (
            Region("act", t.lo, _padded_end(s, t, s.ffn_rows, s.ffn_padded)),),
        weights=("up", "up_bias"),
        micro=lambda s, t, n: _product(s, 2 * (t.hi - t.lo), s.model.hidden, t.hi - t.lo,
                                       t.hi - t.lo),
        footprint=_fit(_qkv_cols),
        meaning=lambda s, t, n: meanings.gated(s, t.hi - t.lo),
    ),
    TaskKind.DOWN: _residual_row("down", "act", lambda s: s.model.ffn, lambda s: s.model.mlp_bias),
    TaskKind.NORM_FINAL: _norm_row("norm_final", lambda s, t, n: meanings.norm(s)),
    TaskKind.HEAD: KindRow(
        "rows of the vocabulary; also the best of them",
        reads=lambda s, t: (_whole(s, _h(t)),),
        writes=_head_writes,
        weights=("head",),
        micro=lambda s, t, n: _product(s, t.hi - t.lo, s.model.hidden, t.hi - t.lo,
                                       each=s.work.head_bytes),
        footprint=_fit(_qkv_cols),
        meaning=lambda s, t, n: meanings.head(s, t.lo, min(t.hi, s.model.vocab)),
    ),
    TaskKind.SAMPLE: KindRow(
        "slots",
        reads=lambda s, t: (_whole(s, "logits"), _whole(s, "best")),
        writes=lambda s, t: (_whole(s, "token"),),
        weights=(),
        micro=lambda s, t, n: _pointwise(8.0 * s.batch * s.tiling.cores, 0.0, 4.0 * s.batch),
        footprint=lambda s, t: 8 * s.batch,
        meaning=None,
    ),
})  # fmt: skip
