"""The scheduled tile program: what stands between a kernel graph and the text of any target.

Holds frozen records only. A `TileProgram` lists device tensors, kernels and calls in order; a
`Kernel` lists its buffers with their offsets and three lists of statements (before the loop, in
every iteration, after it); a statement is a `Chain` (fused elementwise operators and one reduction)
or a `Product` (matrix product). Operands are affine `View`s of buffers, so reshapes, slices,
transposes and the cutting of tiles cost nothing. Targets only print it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from math import prod

from obelisk.ir.block import Split
from obelisk.ir.dtype import DType
from obelisk.ir.op import Op


class BufferKind(enum.Enum):
    """Where a buffer lives."""

    PARAM = "param"  # a kernel tensor that is read; bound per call
    RESULT = "result"  # a kernel tensor that is written; bound per call
    TILE = "tile"  # fast memory of one block


@dataclass(frozen=True, slots=True)
class Extent:
    """Extent of one dim: `size` of a full tile; `split` is set where tiles may be short, and says
    how.
    """

    size: int
    split: Split | None = None


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of memory. `index` numbers the params or results; `elements` is what a tile holds (0
    otherwise).
    """

    name: str
    kind: BufferKind
    dtype: DType
    elements: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """An affine view of a buffer: element (i...) is at `offset + sum(i*strides) +
    sum(coordinate*moves)`.

    Attributes:
        buffer: number of the buffer within its kernel.
        shape, strides: per dim, strides in elements.
        offset: of the first element.
        moves: elements per step of each grid coordinate, then per loop iteration.
    """

    buffer: int
    shape: tuple[Extent, ...]
    strides: tuple[int, ...]
    offset: int = 0
    moves: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Extents of a full tile."""
        return tuple(e.size for e in self.shape)

    @property
    def elements(self) -> int:
        """Elements of a full tile."""
        return prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Access:
    """A chain's operand: a view's address with one stride per dim of the chain (0: the same
    element).
    """

    buffer: int
    strides: tuple[int, ...]
    offset: int
    moves: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scalar:
    """One value of a chain: `op` over earlier values.

    ELEM reads operand number `place`; CONST is `value`; IOTA is the index along dim `place` times
    `value` (its stride, an integer). `dtype` is the graph's; floats are computed in f32 (f64 for
    f64).
    """

    op: Op
    args: tuple[int, ...]
    dtype: DType
    place: int = 0
    value: float = 0.0


class Mode(enum.Enum):
    """What a write does with what is there."""

    SET = "set"
    ADD = "add"
    MAX = "max"
    ADD_AFTER_FIRST = "add after first"  # overwrite in iteration 0, add in later ones


@dataclass(frozen=True, slots=True)
class Write:
    """A chain's result: value number `value` goes to `access`.

    `fold` is SUM or REDUCE_MAX where the value is folded over the chain's `axis` (the access has
    stride 0 there).
    """

    value: int
    access: Access
    fold: Op | None = None
    mode: Mode = Mode.SET


@dataclass(frozen=True, slots=True)
class Chain:
    """A loop nest over `dims` that computes `code` for each point; at most one dim, `axis`, is
    folded.

    `vector` is the dim that runs along vector lanes (innermost). `skip_first`: not in iteration 0.
    """

    dims: tuple[Extent, ...]
    reads: tuple[Access, ...]
    code: tuple[Scalar, ...]
    writes: tuple[Write, ...]
    axis: int | None = None
    vector: int = 0
    skip_first: bool = False


@dataclass(frozen=True, slots=True)
class Product:
    """c = a @ b over the last two dims, batch dims broadcast (stride 0). `mode` SET or
    ADD_AFTER_FIRST.

    `dtype` is the type of all three operands (the compute type). `work` is a tile the target may
    pack operands into.
    """

    a: View
    b: View
    c: View
    dtype: DType
    mode: Mode = Mode.SET
    work: int | None = None


Statement = Chain | Product


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: statements over a grid of blocks.

    Attributes:
        grid, loop: blocks along each axis; iterations.
        buffers: all buffers; `offsets[i]` is the byte offset of tile i in a block's memory (0 for
            others).
        before, body, after: statements before the loop, of an iteration, after the loop.
        arena: bytes of fast memory of a block.
        bound: peak of live tile bytes, the lower bound that the plan was measured against.
    """

    grid: tuple[int, ...]
    loop: int
    buffers: tuple[Buffer, ...]
    before: tuple[Statement, ...]
    body: tuple[Statement, ...]
    after: tuple[Statement, ...]
    offsets: tuple[int, ...] = ()
    arena: int = 0
    bound: int = 0

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return prod(self.grid)


class TensorKind(enum.Enum):
    """Where a device tensor comes from."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A device tensor. `index` numbers inputs or outputs; `offset` is its place in the scratch
    memory in bytes.
    """

    kind: TensorKind
    dtype: DType
    elements: int
    index: int = 0
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of a dense tensor."""
        return (self.elements * self.dtype.bits + 7) // 8


@dataclass(frozen=True, slots=True)
class Binding:
    """A tensor from element `offset` on."""

    tensor: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One launch of kernel number `kernel`. `origin` names the graph's node, for people."""

    kernel: int
    params: tuple[Binding, ...]
    results: tuple[Binding, ...]
    origin: str = ""


@dataclass(frozen=True, slots=True)
class TileProgram:
    """A whole graph: kernels, calls in order, tensors, and bytes of scratch memory."""

    name: str
    digest: str
    tensors: tuple[Tensor, ...]
    kernels: tuple[Kernel, ...]
    calls: tuple[Call, ...]
    scratch: int
    scratch_bound: int

    @property
    def arena(self) -> int:
        """Largest block memory among the kernels."""
        return max((k.arena for k in self.kernels), default=0)


def private(program: TileProgram, i: int) -> bool:
    """Whether what call `i` writes is read by call `i + 1` and by no other."""
    written = {b.tensor for b in program.calls[i].results}
    if any(program.tensors[t].kind is not TensorKind.SCRATCH for t in written):
        return False
    if not {b.tensor for b in program.calls[i + 1].params} <= written:
        return False
    later = {b.tensor for c in program.calls[i + 2 :] for b in c.params}
    return not written & later


def reads_of(statement: Statement) -> list[int]:
    """Buffers that a statement reads (an accumulating write reads too)."""
    match statement:
        case Chain(reads=reads, writes=writes):
            return [r.buffer for r in reads] + [
                w.access.buffer for w in writes if w.mode is not Mode.SET
            ]
        case Product(a=a, b=b, c=c, mode=mode):
            return [a.buffer, b.buffer] + ([c.buffer] if mode is not Mode.SET else [])


def writes_of(statement: Statement) -> list[int]:
    """Buffers that a statement writes (its work space too)."""
    match statement:
        case Chain(writes=writes):
            return [w.access.buffer for w in writes]
        case Product(c=c, work=work):
            return [c.buffer] + ([work] if work is not None else [])
