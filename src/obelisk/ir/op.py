"""The names of the operators and the frozen attribute records that go with them.

One enum for all three levels: a level is a rule about which operators may occur (`spec.py`), not
another set of names, so that a rule, an emitter or a judge is written once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from obelisk.ir.dtype import DType

if TYPE_CHECKING:
    from obelisk.ir.block import BlockGraph
    from obelisk.ir.thread import ThreadGraph


class Op(enum.Enum):
    """Every operator. The value is its spelling in the text form."""

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call

    # leaves
    INPUT = "input"  # kernel level: a tensor in device memory
    CONST = "const"  # a scalar, shape ()
    IOTA = "iota"  # 0, 1, 2, ... along one axis, i32
    SIZE = "size"  # the extent of an axis as a scalar; follows the graph when it is resized
    LOAD = "load"  # block level: the tile of a kernel tensor, cut by imap and fmap
    ELEM = "elem"  # thread level: the elements of a block value that the threads hold
    # elementwise
    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    MAX = "max"
    MIN = "min"
    NEG = "neg"
    EXP = "exp"
    LOG = "log"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    SQUARE = "square"
    TANH = "tanh"
    SIGMOID = "sigmoid"
    ERF = "erf"
    LESS = "less"  # a < b, bool
    WHERE = "where"  # where(bool, a, b)
    CAST = "cast"
    # reductions and products
    SUM = "sum"
    REDUCE_MAX = "reduce_max"
    MATMUL = "matmul"
    # structure
    RESHAPE = "reshape"
    TRANSPOSE = "transpose"
    BROADCAST = "broadcast"
    SLICE = "slice"
    CONCAT = "concat"
    # the block graph's loop
    ACCUM_SUM = "accum_sum"  # sum over the iterations
    ACCUM_MAX = "accum_max"  # maximum over the iterations
    RUNNING_MAX = "running_max"  # maximum over the iterations up to this one; stays inside the loop
    ACCUM_RESCALE = (
        "accum_rescale"  # sum over i of x_i * exp(m_i - m_last), m a running_max (online softmax)
    )
    # graph-defined operators
    BLOCK = "block"
    THREAD = "thread"


@dataclass(frozen=True, slots=True)
class InputAttrs:
    """Position among the graph's inputs, its type, and element strides (None: dense row-major)."""

    index: int
    shape: tuple[int, ...]
    dtype: DType
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ConstAttrs:
    """A finite scalar, or -inf (the neutral element of max, and a masked score)."""

    value: float

    def __post_init__(self) -> None:
        # -0.0 equals 0.0, so both would be one interned node with two digests: keep only 0.0.
        object.__setattr__(self, "value", float(self.value) + 0.0)


@dataclass(frozen=True, slots=True)
class IotaAttrs:
    """Shape of the result and the axis along which it counts."""

    shape: tuple[int, ...]
    axis: int


class SizeScope(enum.Enum):
    """Which extent `size` names."""

    TILE = "tile"  # the axis of the operand as it is
    LOOP = "loop"  # times the number of loop iterations
    FULL = "full"  # of the whole kernel tensor; the operand is a `load`


@dataclass(frozen=True, slots=True)
class SizeAttrs:
    """Axis, scope, and the loop count that scope LOOP multiplies by (1 otherwise)."""

    axis: int
    scope: SizeScope = SizeScope.TILE
    loop: int = 1


@dataclass(frozen=True, slots=True)
class LoadAttrs:
    """How a block cuts its tile out of kernel tensor number `index`.

    `imap[a]` is the data dim that grid axis `a` splits, or None (replicated). `fmap` is the data
    dim that the loop splits after the grid, or None (the same tile in each iteration). Sizes are
    rounded up: the last tile may be short.
    """

    index: int
    full: tuple[int, ...]
    dtype: DType
    imap: tuple[int | None, ...]
    fmap: int | None
    grid: tuple[int, ...]
    loop: int


@dataclass(frozen=True, slots=True)
class ElemAttrs:
    """Thread-level parameter: the operand's number, tile shape and dtype."""

    index: int
    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class ReduceAttrs:
    """Axis (kept in the result) and how many columns stay: out[j] = fold over i of x[i*keep + j]; 1
    folds all.
    """

    axis: int
    keep: int = 1


@dataclass(frozen=True, slots=True)
class MatmulAttrs:
    """The type products are summed in."""

    accum: DType


@dataclass(frozen=True, slots=True)
class ReshapeAttrs:
    """The new shape."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransposeAttrs:
    """Result dim i is operand dim perm[i]."""

    perm: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BroadcastAttrs:
    """The shape to broadcast to, by numpy's rule."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SliceAttrs:
    """Elements start <= i < stop of one axis."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ConcatAttrs:
    """The axis that operands are joined along."""

    axis: int


@dataclass(frozen=True, slots=True)
class CastAttrs:
    """The dtype to convert to."""

    dtype: DType


@dataclass(frozen=True, slots=True)
class BlockAttrs:
    """Result number `result` of a kernel that runs `block`. Results with one block and the same
    inputs are one launch.
    """

    block: BlockGraph
    result: int


@dataclass(frozen=True, slots=True)
class ThreadAttrs:
    """Result number `result` of a thread graph."""

    thread: ThreadGraph
    result: int


Attrs = (
    InputAttrs | ConstAttrs | IotaAttrs | SizeAttrs | LoadAttrs | ElemAttrs | ReduceAttrs
    | MatmulAttrs | ReshapeAttrs | TransposeAttrs | BroadcastAttrs | SliceAttrs | ConcatAttrs
    | CastAttrs | BlockAttrs | ThreadAttrs | None
)  # fmt: skip
