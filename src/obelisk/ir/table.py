"""The one operator table: for each operator its arity, types, meanings, laws, costs and how it is
emitted.

A row is the only place that says what an operator is. Cells that belong to later stages are names
which those stages resolve: `field` is a method of the finite-field algebra, `term` the constructor
of its abstract term, `axioms` the laws the prover may use on it, `emit` the expression template for
elementwise code. A test enumerates the table and fails on a missing or unresolvable cell.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan, prod
from typing import Any

import numpy as np

from obelisk.base.errors import DTypeError, MalformedGraph, ShapeError
from obelisk.ir import kernels as k
from obelisk.ir.block import load_tile
from obelisk.ir.dtype import DType, promote
from obelisk.ir.node import _INFER, Node, Shape
from obelisk.ir.op import (
    Attrs,
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

Meaning = Callable[[Node, Sequence[Any], int], Any]


class Kind(enum.Enum):
    """What sort of operator: stages dispatch on this before they look at the operator itself."""

    LEAF = "leaf"
    UNARY = "unary"
    BINARY = "binary"
    TERNARY = "ternary"
    REDUCE = "reduce"
    CONTRACT = "contract"
    STRUCTURE = "structure"
    LOOP = "loop"
    GRAPH = "graph"


@dataclass(frozen=True, slots=True)
class OpRow:
    """One row of the table.

    Attributes:
        kind: sort of operator.
        arity: smallest and largest number of operands.
        attrs: the attribute record's class, or None.
        infer: (inputs, attrs) -> shape and dtype.
        numpy: meaning on arrays that carry `lead` batch axes in front (None: the interpreter itself
            does it).
        field: method of the finite-field algebra that gives its meaning there.
        term: constructor of the abstract term.
        axioms: names of the laws that hold for it.
        flops: floating-point operations per result element (for reductions and products, per term).
        emit: expression in C-like syntax over {0}, {1}, {2} for elementwise operators (""
            otherwise: by kind).
    """

    kind: Kind
    arity: tuple[int, int]
    attrs: type | None
    infer: Callable[[tuple[Node, ...], Any], tuple[Shape, DType]]
    numpy: Meaning | None
    field: str
    term: str
    axioms: tuple[str, ...]
    flops: float
    emit: str


def broadcast_shapes(what: str, *shapes: Shape) -> Shape:
    """numpy's broadcast of shapes; raises `ShapeError` naming both sides."""
    out: list[int] = []
    rank = max(len(s) for s in shapes)
    for d in range(1, rank + 1):
        extents = {s[-d] for s in shapes if len(s) >= d} - {1}
        if len(extents) > 1:
            raise ShapeError(f"{what}: shapes {' and '.join(map(str, shapes))} do not broadcast")
        out.append(extents.pop() if extents else 1)
    return tuple(reversed(out))


def _common(what: str, *nodes: Node) -> DType:
    """The common dtype; constants and sizes adapt to the others."""
    fixed = [n.dtype for n in nodes if n.op not in (Op.CONST, Op.SIZE)] or [DType.F32]
    out = fixed[0]
    for d in fixed[1:]:
        got = promote(out, d)
        if got is None:
            raise DTypeError(f"{what}: operands are {out} and {d}; cast one of them")
        out = got
    for n in nodes:
        value = n.attrs.value if n.op is Op.CONST else 0.0
        if not out.is_float and value != int(value if isfinite(value) else 0):
            raise DTypeError(f"{what}: constant {value} with operands of {out}; cast them")
    return out


def _numeric(what: str, dtype: DType) -> DType:
    if dtype is DType.BOOL:
        raise DTypeError(f"{what}: a bool operand has no arithmetic; use where or cast")
    return dtype


def _unary(op: Op, floats_only: bool) -> Callable[[tuple[Node, ...], Any], tuple[Shape, DType]]:
    def infer(inputs: tuple[Node, ...], attrs: Any) -> tuple[Shape, DType]:
        (x,) = inputs
        dtype = _numeric(op.value, x.dtype)
        if floats_only and not dtype.is_float:
            raise DTypeError(f"{op.value} needs a floating-point operand, got {dtype}; cast it")
        return x.shape, dtype

    return infer


def _binary(op: Op) -> Callable[[tuple[Node, ...], Any], tuple[Shape, DType]]:
    def infer(inputs: tuple[Node, ...], attrs: Any) -> tuple[Shape, DType]:
        dtype = _numeric(op.value, _common(op.value, *inputs))
        if op is Op.DIV and not dtype.is_float:
            raise DTypeError(f"div needs floating-point operands, got {dtype}; cast them")
        return broadcast_shapes(op.value, *(i.shape for i in inputs)), dtype

    return infer


def _less(inputs: tuple[Node, ...], attrs: Any) -> tuple[Shape, DType]:
    _numeric("less", _common("less", *inputs))
    return broadcast_shapes("less", *(i.shape for i in inputs)), DType.BOOL


def _where(inputs: tuple[Node, ...], attrs: Any) -> tuple[Shape, DType]:
    cond, a, b = inputs
    if cond.dtype is not DType.BOOL:
        raise DTypeError(f"where needs a bool condition, got {cond.dtype}")
    return broadcast_shapes("where", cond.shape, a.shape, b.shape), _common("where", a, b)


def axis_of(what: str, axis: int, rank: int) -> int:
    """`axis` made non-negative; raises `ShapeError` when there is no such dim."""
    if not -rank <= axis < rank:
        raise ShapeError(
            f"{what}: axis {axis} of a value of rank {rank}; allowed are {-rank} to {rank - 1}"
        )
    return axis % rank


def _reduce(inputs: tuple[Node, ...], attrs: ReduceAttrs) -> tuple[Shape, DType]:
    (x,) = inputs
    axis_of("reduction", attrs.axis, x.rank)
    n = x.shape[attrs.axis]
    if attrs.keep < 1 or n % attrs.keep:
        raise ShapeError(f"reduction of {n} elements to {attrs.keep}: must divide")
    return (*x.shape[: attrs.axis], attrs.keep, *x.shape[attrs.axis + 1 :]), _numeric(
        "reduction", x.dtype
    )


def _matmul(inputs: tuple[Node, ...], attrs: MatmulAttrs) -> tuple[Shape, DType]:
    a, b = inputs
    if a.rank < 2 or b.rank < 2:
        raise ShapeError(
            f"matmul needs rank 2 or more, got {a.shape} and {b.shape}; reshape vectors to matrices"
        )
    if a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            f"matmul: {a.shape} @ {b.shape}: contraction extents {a.shape[-1]} and {b.shape[-2]} "
            "differ"
        )
    batch = broadcast_shapes("matmul batch", a.shape[:-2], b.shape[:-2])
    return (*batch, a.shape[-2], b.shape[-1]), _numeric("matmul", _common("matmul", a, b))


def _reshape(inputs: tuple[Node, ...], attrs: ReshapeAttrs) -> tuple[Shape, DType]:
    (x,) = inputs
    if prod(attrs.shape) != x.elements or any(s < 1 for s in attrs.shape):
        raise ShapeError(
            f"reshape: {x.shape} has {x.elements} elements, {attrs.shape} has {prod(attrs.shape)}"
        )
    return attrs.shape, x.dtype


def _transpose(inputs: tuple[Node, ...], attrs: TransposeAttrs) -> tuple[Shape, DType]:
    (x,) = inputs
    if sorted(attrs.perm) != list(range(x.rank)):
        raise ShapeError(f"transpose: {attrs.perm} is no permutation of the {x.rank} dims")
    return tuple(x.shape[p] for p in attrs.perm), x.dtype


def _broadcast(inputs: tuple[Node, ...], attrs: BroadcastAttrs) -> tuple[Shape, DType]:
    (x,) = inputs
    if broadcast_shapes("broadcast", x.shape, attrs.shape) != attrs.shape:
        raise ShapeError(f"broadcast: {x.shape} does not broadcast to {attrs.shape}")
    return attrs.shape, x.dtype


def _slice(inputs: tuple[Node, ...], attrs: SliceAttrs) -> tuple[Shape, DType]:
    (x,) = inputs
    axis_of("slice", attrs.axis, x.rank)
    n = x.shape[attrs.axis]
    if not 0 <= attrs.start < attrs.stop <= n:
        raise ShapeError(f"slice {attrs.start}:{attrs.stop} of an axis of extent {n}")
    return (*x.shape[: attrs.axis], attrs.stop - attrs.start, *x.shape[attrs.axis + 1 :]), x.dtype


def _concat(inputs: tuple[Node, ...], attrs: ConcatAttrs) -> tuple[Shape, DType]:
    first = inputs[0]
    axis = axis_of("concat", attrs.axis, first.rank)
    for x in inputs[1:]:
        if x.rank != first.rank or any(
            x.shape[d] != first.shape[d] for d in range(first.rank) if d != axis
        ):
            raise ShapeError(
                f"concat along {axis}: shapes {first.shape} and {x.shape} differ elsewhere"
            )
    total = sum(x.shape[axis] for x in inputs)
    return (*first.shape[:axis], total, *first.shape[axis + 1 :]), _common("concat", *inputs)


def _cast(inputs: tuple[Node, ...], attrs: CastAttrs) -> tuple[Shape, DType]:
    return inputs[0].shape, attrs.dtype


def _const(inputs: tuple[Node, ...], attrs: ConstAttrs) -> tuple[Shape, DType]:
    if isnan(attrs.value) or attrs.value == inf:
        raise MalformedGraph(f"a constant must be finite or -inf, got {attrs.value}")
    return (), DType.F32


def _iota(inputs: tuple[Node, ...], attrs: IotaAttrs) -> tuple[Shape, DType]:
    axis_of("iota", attrs.axis, len(attrs.shape))
    return attrs.shape, DType.I32


def _size(inputs: tuple[Node, ...], attrs: SizeAttrs) -> tuple[Shape, DType]:
    (x,) = inputs
    axis_of("size", attrs.axis, x.rank)
    if attrs.scope is SizeScope.FULL and x.op is not Op.LOAD:
        raise MalformedGraph("size with scope full names a dim of a load")
    return (), DType.F32


def size_value(node: Node) -> int:
    """The number that a `size` node stands for."""
    attrs: SizeAttrs = node.attrs
    (x,) = node.inputs
    if attrs.scope is SizeScope.FULL:
        return int(x.attrs.full[attrs.axis])
    return x.shape[attrs.axis] * (attrs.loop if attrs.scope is SizeScope.LOOP else 1)


def _load(inputs: tuple[Node, ...], attrs: LoadAttrs) -> tuple[Shape, DType]:
    return load_tile(attrs), attrs.dtype


def _accum(inputs: tuple[Node, ...], attrs: Any) -> tuple[Shape, DType]:
    return inputs[0].shape, _numeric("accumulator", inputs[0].dtype)


def _rescale(inputs: tuple[Node, ...], attrs: Any) -> tuple[Shape, DType]:
    x, m = inputs
    if broadcast_shapes("accum_rescale", x.shape, m.shape) != x.shape:
        raise ShapeError(
            f"accum_rescale: maximum of shape {m.shape} does not broadcast to {x.shape}"
        )
    return x.shape, _numeric("accum_rescale", _common("accum_rescale", x, m))


def _block(inputs: tuple[Node, ...], attrs: BlockAttrs) -> tuple[Shape, DType]:
    info = attrs.block.info
    if len(inputs) != len(info.params):
        raise MalformedGraph(
            f"the block reads {len(info.params)} tensors, {len(inputs)} were given"
        )
    for i, (x, (shape, dtype)) in enumerate(zip(inputs, info.params, strict=True)):
        if x.shape != shape or x.dtype is not dtype:
            raise MalformedGraph(
                f"block input {i} was cut from {dtype}{shape}, but is {x.dtype}{x.shape}"
            )
    if not 0 <= attrs.result < len(info.shapes):
        raise MalformedGraph(
            f"the block has {len(info.shapes)} results, number {attrs.result} was asked for"
        )
    return info.shapes[attrs.result], attrs.block.stores[attrs.result].dtype


def _thread(inputs: tuple[Node, ...], attrs: ThreadAttrs) -> tuple[Shape, DType]:
    for node in attrs.thread.body:
        if node.op is Op.ELEM:
            i = node.attrs.index
            if (
                i >= len(inputs)
                or inputs[i].shape != node.shape
                or inputs[i].dtype is not node.dtype
            ):
                raise MalformedGraph(f"thread operand {i} does not match its elements {node!r}")
    if not 0 <= attrs.result < len(attrs.thread.results):
        raise MalformedGraph(f"thread result {attrs.result} of {len(attrs.thread.results)}")
    out = attrs.thread.results[attrs.result]
    return out.shape, out.dtype


def _leaf(inputs: tuple[Node, ...], attrs: InputAttrs | ElemAttrs) -> tuple[Shape, DType]:
    if any(s < 1 for s in attrs.shape):
        raise ShapeError(f"an input needs extents of at least 1, got {attrs.shape}")
    return attrs.shape, attrs.dtype


def _input(inputs: tuple[Node, ...], attrs: InputAttrs) -> tuple[Shape, DType]:
    if attrs.strides is not None and (
        len(attrs.strides) != len(attrs.shape) or min(attrs.strides, default=0) < 0
    ):
        raise ShapeError(
            f"strides {attrs.strides} for shape {attrs.shape}: one non-negative stride per dim"
        )
    return _leaf(inputs, attrs)


_COMM = ("commutative", "associative")
TABLE: dict[Op, OpRow] = {
    Op.INPUT: OpRow(Kind.LEAF, (0, 0), InputAttrs, _input, None, "lift", "var", (), 0, ""),
    Op.CONST: OpRow(Kind.LEAF, (0, 0), ConstAttrs, _const, None, "const", "const", (), 0, ""),
    Op.IOTA: OpRow(Kind.LEAF, (0, 0), IotaAttrs, _iota, None, "iota", "iota", (), 0, ""),
    Op.SIZE: OpRow(Kind.LEAF, (1, 1), SizeAttrs, _size, None, "integer", "size", (), 0, ""),
    Op.LOAD: OpRow(
        Kind.LEAF, (0, 0), LoadAttrs, _load, None, "structural", "partition", ("partition",), 0,
        "",
    ),
    Op.ELEM: OpRow(Kind.LEAF, (0, 0), ElemAttrs, _leaf, None, "structural", "elem", (), 0, ""),
    Op.ADD: OpRow(
        Kind.BINARY, (2, 2), None, _binary(Op.ADD), k.binary(np.add), "add", "add", _COMM, 1,
        "({0} + {1})",
    ),
    Op.SUB: OpRow(
        Kind.BINARY, (2, 2), None, _binary(Op.SUB), k.binary(np.subtract), "sub", "sub",
        ("sub_is_add_neg",), 1, "({0} - {1})",
    ),
    Op.MUL: OpRow(
        Kind.BINARY, (2, 2), None, _binary(Op.MUL), k.binary(np.multiply), "mul", "mul",
        (*_COMM, "distributes_over_add"), 1, "({0} * {1})",
    ),
    Op.DIV: OpRow(
        Kind.BINARY, (2, 2), None, _binary(Op.DIV), k.binary(np.divide), "div", "div",
        ("div_moves",), 4, "({0} / {1})",
    ),
    Op.MAX: OpRow(
        Kind.BINARY, (2, 2), None, _binary(Op.MAX), k.binary(np.maximum), "max", "max",
        (*_COMM, "idempotent"), 1, "max({0}, {1})",
    ),
    Op.MIN: OpRow(
        Kind.BINARY, (2, 2), None, _binary(Op.MIN), k.binary(np.minimum), "min", "min",
        (*_COMM, "idempotent"), 1, "min({0}, {1})",
    ),
    Op.NEG: OpRow(
        Kind.UNARY, (1, 1), None, _unary(Op.NEG, False), k.unary(np.negative), "neg", "neg",
        ("neg_moves",), 1, "(-{0})",
    ),
    Op.EXP: OpRow(
        Kind.UNARY, (1, 1), None, _unary(Op.EXP, True), k.unary(np.exp), "exp", "exp",
        ("exp_of_sum",), 10, "exp({0})",
    ),
    Op.LOG: OpRow(
        Kind.UNARY, (1, 1), None, _unary(Op.LOG, True), k.unary(np.log), "log", "log", (), 10,
        "log({0})",
    ),
    Op.SQRT: OpRow(
        Kind.UNARY, (1, 1), None, _unary(Op.SQRT, True), k.unary(np.sqrt), "sqrt", "sqrt",
        ("sqrt_of_product",), 8, "sqrt({0})",
    ),
    Op.RSQRT: OpRow(
        Kind.UNARY, (1, 1), None, _unary(Op.RSQRT, True), k.unary(k.rsqrt), "rsqrt", "rsqrt",
        ("rsqrt_is_inverse_sqrt",), 8, "(1 / sqrt({0}))",
    ),
    Op.SQUARE: OpRow(
        Kind.UNARY, (1, 1), None, _unary(Op.SQUARE, False), k.unary(np.square), "square",
        "square", ("square_is_mul",), 1, "({0} * {0})",
    ),
    Op.TANH: OpRow(
        Kind.UNARY, (1, 1), None, _unary(Op.TANH, True), k.unary(np.tanh), "tanh", "tanh", (), 14,
        "tanh({0})",
    ),
    Op.SIGMOID: OpRow(
        Kind.UNARY, (1, 1), None, _unary(Op.SIGMOID, True), k.unary(k.sigmoid), "sigmoid",
        "sigmoid", (), 14, "(1 / (1 + exp(-{0})))",
    ),
    Op.ERF: OpRow(
        Kind.UNARY, (1, 1), None, _unary(Op.ERF, True), k.unary(k.erf), "erf", "erf", (), 20,
        "erf({0})",
    ),
    Op.LESS: OpRow(
        Kind.BINARY, (2, 2), None, _less, k.binary(np.less), "less", "less", (), 1, "({0} < {1})",
    ),
    Op.WHERE: OpRow(
        Kind.TERNARY, (3, 3), None, _where, k.where, "where", "where", (), 1, "({0} ? {1} : {2})",
    ),
    Op.CAST: OpRow(
        Kind.UNARY, (1, 1), CastAttrs, _cast, k.unary(lambda x: x), "cast", "cast", (), 0, "{0}",
    ),
    Op.SUM: OpRow(
        Kind.REDUCE, (1, 1), ReduceAttrs, _reduce, k.reduce(np.sum), "sum", "sum",
        ("linear", "sum_splits"), 1, "",
    ),
    Op.REDUCE_MAX: OpRow(
        Kind.REDUCE, (1, 1), ReduceAttrs, _reduce, k.reduce(k.max_or_neginf), "reduce_max",
        "reduce_max", ("max_splits",), 1, "",
    ),
    Op.MATMUL: OpRow(
        Kind.CONTRACT, (2, 2), MatmulAttrs, _matmul, k.matmul, "matmul", "matmul",
        ("bilinear", "associative", "sum_splits"), 2, "",
    ),
    Op.RESHAPE: OpRow(
        Kind.STRUCTURE, (1, 1), ReshapeAttrs, _reshape, k.reshape, "structural", "reshape", (), 0,
        "",
    ),
    Op.TRANSPOSE: OpRow(
        Kind.STRUCTURE, (1, 1), TransposeAttrs, _transpose, k.transpose, "structural",
        "transpose", ("involutive",), 0, "",
    ),
    Op.BROADCAST: OpRow(
        Kind.STRUCTURE, (1, 1), BroadcastAttrs, _broadcast, k.broadcast, "structural",
        "broadcast", ("elementwise_transparent",), 0, "",
    ),
    Op.SLICE: OpRow(
        Kind.STRUCTURE, (1, 1), SliceAttrs, _slice, k.slice_, "structural", "slice",
        ("elementwise_transparent",), 0, "",
    ),
    Op.CONCAT: OpRow(
        Kind.STRUCTURE, (1, 64), ConcatAttrs, _concat, k.concat, "structural", "concat",
        ("concat_matmul",), 0, "",
    ),
    Op.ACCUM_SUM: OpRow(
        Kind.LOOP, (1, 1), None, _accum, None, "add", "accum_sum", ("linear", "sum_splits"), 1,
        "",
    ),
    Op.ACCUM_MAX: OpRow(
        Kind.LOOP, (1, 1), None, _accum, None, "max", "accum_max", ("max_splits",), 1, "",
    ),
    Op.RUNNING_MAX: OpRow(Kind.LOOP, (1, 1), None, _accum, None, "max", "running_max", (), 1, ""),
    Op.ACCUM_RESCALE: OpRow(
        Kind.LOOP, (2, 2), None, _rescale, None, "rescale", "accum_rescale",
        ("shift_invariance",), 3, "",
    ),
    Op.BLOCK: OpRow(
        Kind.GRAPH, (1, 64), BlockAttrs, _block, None, "structural", "block", (), 0, "",
    ),
    Op.THREAD: OpRow(
        Kind.GRAPH, (1, 64), ThreadAttrs, _thread, None, "structural", "thread", (), 0, "",
    ),
}  # fmt: skip


def infer(op: Op, inputs: tuple[Node, ...], attrs: Attrs) -> tuple[Shape, DType]:
    """Shape and dtype of an operator's result; raises the error that names what does not fit."""
    row = TABLE[op]
    low, high = row.arity
    if not low <= len(inputs) <= high:
        raise MalformedGraph(f"{op.value} takes {low} to {high} operands, got {len(inputs)}")
    if row.attrs is None:
        if attrs is not None:
            raise MalformedGraph(f"{op.value} has no attributes, got {attrs}")
    elif not isinstance(attrs, row.attrs):
        raise MalformedGraph(f"{op.value} needs {row.attrs.__name__}, got {attrs}")
    return row.infer(inputs, attrs)


_INFER.append(infer)
