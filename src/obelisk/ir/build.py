"""Builder functions: one per operator, with conveniences (Python numbers as constants, negative
axes).

Every function takes and returns interned nodes and raises the error of the operator table when
operands do not fit. Composite operators are in `composite.py`; `BlockBuilder` makes block graphs,
`KernelGraph` is the user's front door.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from obelisk.base.errors import MalformedGraph, ShapeError
from obelisk.ir.block import BlockGraph, Reduce, Store, block_graph
from obelisk.ir.dtype import DType, parse_dtype
from obelisk.ir.node import _SUGAR, Node, Shape, make
from obelisk.ir.op import (
    BlockAttrs,
    BroadcastAttrs,
    CastAttrs,
    ConcatAttrs,
    ConstAttrs,
    ElemAttrs,
    InputAttrs,
    IotaAttrs,
    LoadAttrs,
    MatmulAttrs,
    Op,
    ReduceAttrs,
    ReshapeAttrs,
    SizeAttrs,
    SizeScope,
    SliceAttrs,
    ThreadAttrs,
    TransposeAttrs,
)  # fmt: skip
from obelisk.ir.table import axis_of
from obelisk.ir.thread import ThreadGraph

Operand = Node | float | int


def const(value: float) -> Node:
    """A scalar constant (finite, or -inf)."""
    return make(Op.CONST, (), ConstAttrs(float(value)))


def as_node(x: Operand) -> Node:
    """A number as a constant node; a node as itself."""
    return x if isinstance(x, Node) else const(x)


def input_node(
    index: int, shape: Shape, dtype: DType = DType.F32, strides: Shape | None = None
) -> Node:
    """Input number `index` of a kernel graph. Row-major strides are stored as None, so both
    spellings are one node.
    """
    shape = tuple(int(s) for s in shape)
    if strides is not None and tuple(strides) == row_major(shape):
        strides = None
    return make(
        Op.INPUT,
        (),
        InputAttrs(index, shape, dtype, tuple(strides) if strides is not None else None),
    )


def row_major(shape: Shape) -> Shape:
    """Element strides of a dense row-major tensor."""
    out: list[int] = []
    step = 1
    for n in reversed(shape):
        out.append(step)
        step *= n
    return tuple(reversed(out))


def iota(shape: Sequence[int], axis: int) -> Node:
    """0, 1, 2, ... along `axis`, i32."""
    return make(Op.IOTA, (), IotaAttrs(tuple(shape), axis_of("iota", axis, len(shape))))


def size(x: Node, axis: int, scope: SizeScope = SizeScope.TILE, loop: int = 1) -> Node:
    """The extent of an axis of `x` as a scalar that follows when the graph is resized."""
    return make(Op.SIZE, (x,), SizeAttrs(axis_of("size", axis, x.rank), scope, loop))


def _un(op: Op, x: Operand) -> Node:
    return make(op, (as_node(x),))


def _bin(op: Op, a: Operand, b: Operand) -> Node:
    return make(op, (as_node(a), as_node(b)))


def add(a: Operand, b: Operand) -> Node:
    """a + b, numpy broadcasting."""
    return _bin(Op.ADD, a, b)


def sub(a: Operand, b: Operand) -> Node:
    """a - b."""
    return _bin(Op.SUB, a, b)


def mul(a: Operand, b: Operand) -> Node:
    """a * b."""
    return _bin(Op.MUL, a, b)


def div(a: Operand, b: Operand) -> Node:
    """a / b (floating point only)."""
    return _bin(Op.DIV, a, b)


def maximum(a: Operand, b: Operand) -> Node:
    """Elementwise maximum."""
    return _bin(Op.MAX, a, b)


def minimum(a: Operand, b: Operand) -> Node:
    """Elementwise minimum."""
    return _bin(Op.MIN, a, b)


def less(a: Operand, b: Operand) -> Node:
    """a < b, bool."""
    return _bin(Op.LESS, a, b)


def where(cond: Node, a: Operand, b: Operand) -> Node:
    """Elements of `a` where `cond`, else of `b`."""
    return make(Op.WHERE, (cond, as_node(a), as_node(b)))


def neg(x: Operand) -> Node:
    """-x."""
    return _un(Op.NEG, x)


def exp(x: Operand) -> Node:
    """e**x."""
    return _un(Op.EXP, x)


def log(x: Operand) -> Node:
    """Natural logarithm."""
    return _un(Op.LOG, x)


def sqrt(x: Operand) -> Node:
    """Square root; NaN below zero."""
    return _un(Op.SQRT, x)


def rsqrt(x: Operand) -> Node:
    """1 / sqrt(x)."""
    return _un(Op.RSQRT, x)


def square(x: Operand) -> Node:
    """x * x."""
    return _un(Op.SQUARE, x)


def tanh(x: Operand) -> Node:
    """Hyperbolic tangent."""
    return _un(Op.TANH, x)


def sigmoid(x: Operand) -> Node:
    """1 / (1 + e**-x)."""
    return _un(Op.SIGMOID, x)


def erf(x: Operand) -> Node:
    """The error function."""
    return _un(Op.ERF, x)


def cast(x: Node, dtype: str | DType) -> Node:
    """Convert to another dtype (no node when it already has it)."""
    target = parse_dtype(dtype)
    return x if x.dtype is target else make(Op.CAST, (x,), CastAttrs(target))


def sum(x: Node, axis: int, keep: int = 1) -> Node:
    """Sum along `axis`, which stays with extent `keep`: out[j] = sum over i of x[i*keep + j]."""
    return make(Op.SUM, (x,), ReduceAttrs(axis_of("sum", axis, x.rank), keep))


def reduce_max(x: Node, axis: int, keep: int = 1) -> Node:
    """Maximum along `axis`, which stays with extent `keep`."""
    return make(Op.REDUCE_MAX, (x,), ReduceAttrs(axis_of("reduce_max", axis, x.rank), keep))


def matmul(a: Node, b: Node, accum: DType | None = None) -> Node:
    """Matrix product over the last two dims, batch dims broadcast. Sums are kept in f32 unless
    `accum` says otherwise.
    """
    return make(Op.MATMUL, (a, b), MatmulAttrs(accum or a.dtype.accumulator))


def reshape(x: Node, shape: Sequence[int]) -> Node:
    """Row-major reshape; one extent may be -1."""
    out = [int(s) for s in shape]
    if out.count(-1) == 1:
        rest = -prod(out)
        if rest == 0 or x.elements % rest:
            raise ShapeError(f"reshape: {x.shape} does not fit {tuple(shape)}")
        out[out.index(-1)] = x.elements // rest
    target = tuple(out)
    return x if target == x.shape else make(Op.RESHAPE, (x,), ReshapeAttrs(target))


def transpose(x: Node, perm: Sequence[int] | None = None) -> Node:
    """Permute dims; by default the last two are swapped."""
    p = (
        (*range(x.rank - 2), x.rank - 1, x.rank - 2)
        if perm is None
        else tuple(q % x.rank for q in perm)
    )
    return x if p == tuple(range(x.rank)) else make(Op.TRANSPOSE, (x,), TransposeAttrs(p))


def broadcast(x: Node, shape: Sequence[int]) -> Node:
    """Broadcast to `shape` by numpy's rule."""
    target = tuple(shape)
    return x if target == x.shape else make(Op.BROADCAST, (x,), BroadcastAttrs(target))


def slice(x: Node, axis: int, start: int, stop: int) -> Node:
    """Elements start <= i < stop of one axis."""
    axis = axis_of("slice", axis, x.rank)
    whole = start == 0 and stop == x.shape[axis]
    return x if whole else make(Op.SLICE, (x,), SliceAttrs(axis, start, stop))


def concat(xs: Sequence[Node], axis: int) -> Node:
    """Join along an axis."""
    if not xs:
        raise ShapeError("concat of nothing")
    return (
        xs[0]
        if len(xs) == 1
        else make(Op.CONCAT, tuple(xs), ConcatAttrs(axis_of("concat", axis, xs[0].rank)))
    )


_SUGAR.update(add=add, sub=sub, mul=mul, div=div, neg=neg, matmul=matmul)


def accum_sum(x: Node) -> Node:
    """Block level: sum over the loop's iterations."""
    return make(Op.ACCUM_SUM, (x,))


def accum_max(x: Node) -> Node:
    """Block level: maximum over the loop's iterations."""
    return make(Op.ACCUM_MAX, (x,))


def running_max(x: Node) -> Node:
    """Block level: maximum over the iterations so far; stays a value of the loop."""
    return make(Op.RUNNING_MAX, (x,))


def accum_rescale(x: Node, peak: Node) -> Node:
    """Block level: sum over iterations i of x_i * exp(peak_i - peak_last), `peak` a running_max
    (online softmax).
    """
    return make(Op.ACCUM_RESCALE, (x, peak))


def elem(index: int, like: Node) -> Node:
    """Thread level: the elements of operand number `index`, which is a value like `like`."""
    return make(Op.ELEM, (), ElemAttrs(index, like.shape, like.dtype))


def run_thread(graph: ThreadGraph, inputs: Sequence[Node]) -> list[Node]:
    """Block level: the results of a thread graph on block values."""
    return [
        make(Op.THREAD, tuple(inputs), ThreadAttrs(graph, i)) for i in range(len(graph.results))
    ]


def run_block(graph: BlockGraph, inputs: Sequence[Node]) -> list[Node]:
    """Kernel level: the results of one launch of a block graph."""
    return [make(Op.BLOCK, tuple(inputs), BlockAttrs(graph, i)) for i in range(len(graph.stores))]


class BlockBuilder:
    """Builds one block graph.

    >>> b = BlockBuilder(grid=(4,), loop=2)
    >>> x = b.load(input_node(0, (8, 64)), imap=(0,), fmap=1)
    >>> b.store(accum_sum(sum(x, 1)), omap=(0,))
    >>> b.finish().info.shapes
    ((8, 1),)
    """

    def __init__(self, grid: Sequence[int], loop: int = 1, threads: int = 128) -> None:
        self.grid, self.loop, self.threads = tuple(grid), loop, threads
        self.inputs: list[Node] = []
        self.stores: list[Store] = []

    def load(self, x: Node, imap: Sequence[int | None], fmap: int | None = None) -> Node:
        """The tile of kernel tensor `x`; `imap[a]` is the dim that grid axis `a` splits (None:
        replicated).
        """
        if x not in self.inputs:
            self.inputs.append(x)
        maps = tuple(m if m is None else axis_of("imap", m, x.rank) for m in imap)
        fm = None if fmap is None else axis_of("fmap", fmap, x.rank)
        index = self.inputs.index(x)
        return make(Op.LOAD, (), LoadAttrs(index, x.shape, x.dtype, maps, fm, self.grid, self.loop))

    def store(
        self,
        value: Node,
        omap: Sequence[int | None],
        fmap: int | None = None,
        reduce: Reduce = Reduce.NONE,
        dtype: DType | None = None,
    ) -> None:
        """Write `value`: `omap[a]` is the dim along which blocks of axis `a` lie; `reduce` folds
        unmapped axes.
        """
        maps = tuple(m if m is None else axis_of("omap", m, value.rank) for m in omap)
        fm = None if fmap is None else axis_of("store fmap", fmap, value.rank)
        self.stores.append(Store(value, maps, fm, reduce, dtype or value.dtype))

    def finish(self) -> BlockGraph:
        """The checked, interned graph; loads are renumbered to those in use."""
        graph = block_graph(self.grid, self.loop, self.threads, tuple(self.stores))
        if len(graph.info.params) != len(self.inputs):
            raise MalformedGraph("a tensor was loaded but never used")
        return graph

    def launch(self) -> list[Node]:
        """Finish, and the kernel-level results of running it on the tensors that were loaded."""
        return run_block(self.finish(), self.inputs)
