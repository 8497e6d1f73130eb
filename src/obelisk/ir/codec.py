"""Attribute records as plain values (numbers, strings, lists), shared by the text form and the JSON
form.

One table says, per record, which fields are written, their kind and default, and which follow from
what stands around them (the node's own shape and dtype, the block's grid and loop). `decode` raises
`ParseError` naming the field.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from obelisk.base.errors import ParseError, UnknownName
from obelisk.ir.block import BlockGraph
from obelisk.ir.dtype import DType, parse_dtype
from obelisk.ir.node import Node, Shape
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
)
from obelisk.ir.table import TABLE
from obelisk.ir.thread import ThreadGraph

Plain = int | float | str | None | list[int | None]
_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Context:
    """What an attribute record may take from its surroundings.

    Attributes:
        operands: the node's operands.
        shape, dtype: the node's own, if written.
        grid, loop: of the enclosing block graph (empty and 1 outside).
        blocks, threads: the graphs defined so far, by name.
    """

    operands: tuple[Node, ...] = ()
    shape: Shape | None = None
    dtype: DType | None = None
    grid: tuple[int, ...] = ()
    loop: int = 1
    blocks: Mapping[str, BlockGraph] | None = None
    threads: Mapping[str, ThreadGraph] | None = None


class Kind(enum.Enum):
    """How a field is written."""

    INT = "an integer"
    OPT_INT = "an integer or none"
    INTS = "a list of integers"
    OPT_INTS = "a list of integers and nones"
    MAYBE_INTS = "a list of integers or none"
    FLOAT = "a number"
    DTYPE = "a dtype"
    SCOPE = "tile, loop or full"
    BLOCK = "the name of a block graph defined above"
    THREAD = "the name of a thread graph defined above"


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its kind, its default (`_REQUIRED`: must be written), or what implies it."""

    name: str
    kind: Kind
    default: Any = _REQUIRED
    implied: Callable[[Context], Any] | None = None


def _shape(c: Context) -> Any:
    if c.shape is None:
        raise ParseError("the result's type is missing; write it, for example `: f32[2, 3]`")
    return c.shape


def _dtype(c: Context) -> Any:
    if c.dtype is None:
        raise ParseError("the result's type is missing; write it, for example `: f32[2, 3]`")
    return c.dtype


def _accum(c: Context) -> Any:
    return c.operands[0].dtype.accumulator if c.operands else DType.F32


_SHAPE = Field("shape", Kind.INTS, implied=_shape)
_DTYPE = Field("dtype", Kind.DTYPE, implied=_dtype)
FIELDS: Mapping[type, tuple[Field, ...]] = {
    InputAttrs: (
        Field("index", Kind.INT), _SHAPE, _DTYPE, Field("strides", Kind.MAYBE_INTS, None),
    ),
    ConstAttrs: (Field("value", Kind.FLOAT),),
    IotaAttrs: (_SHAPE, Field("axis", Kind.INT)),
    SizeAttrs: (
        Field("axis", Kind.INT), Field("scope", Kind.SCOPE, SizeScope.TILE),
        Field("loop", Kind.INT, 1),
    ),
    LoadAttrs: (
        Field("index", Kind.INT), Field("full", Kind.INTS), _DTYPE, Field("imap", Kind.OPT_INTS),
        Field("fmap", Kind.OPT_INT, None),
        Field("grid", Kind.INTS, implied=lambda c: c.grid),
        Field("loop", Kind.INT, implied=lambda c: c.loop),
    ),
    ElemAttrs: (Field("index", Kind.INT), _SHAPE, _DTYPE),
    ReduceAttrs: (Field("axis", Kind.INT), Field("keep", Kind.INT, 1)),
    MatmulAttrs: (Field("accum", Kind.DTYPE, _accum),),
    ReshapeAttrs: (_SHAPE,),
    TransposeAttrs: (Field("perm", Kind.INTS),),
    BroadcastAttrs: (_SHAPE,),
    SliceAttrs: (Field("axis", Kind.INT), Field("start", Kind.INT), Field("stop", Kind.INT)),
    ConcatAttrs: (Field("axis", Kind.INT),),
    CastAttrs: (_DTYPE,),
    BlockAttrs: (Field("block", Kind.BLOCK), Field("result", Kind.INT, 0)),
    ThreadAttrs: (Field("thread", Kind.THREAD), Field("result", Kind.INT, 0)),
}  # fmt: skip


def needs_type(op: Op) -> bool:
    """True when the node's own type must be written, because an attribute is implied by it."""
    return any(f in (_SHAPE, _DTYPE) for f in FIELDS.get(TABLE[op].attrs or type(None), ()))


def encode(
    node: Node, blocks: Mapping[BlockGraph, str], threads: Mapping[ThreadGraph, str]
) -> dict[str, Plain]:
    """The written fields of a node's attributes; defaults and implied fields are left out."""
    out: dict[str, Plain] = {}
    if node.attrs is None:
        return out
    for f in FIELDS[type(node.attrs)]:
        value = getattr(node.attrs, f.name)
        default = f.default(Context(node.inputs)) if callable(f.default) else f.default
        if f.implied is None and value != default:
            out[f.name] = _encode(value, blocks, threads)
    return out


def _encode(
    value: Any, blocks: Mapping[BlockGraph, str], threads: Mapping[ThreadGraph, str]
) -> Plain:
    match value:
        case BlockGraph():
            return blocks[value]
        case ThreadGraph():
            return threads[value]
        case enum.Enum():
            return str(value.value)
        case tuple():
            return list(value)
        case float():
            return "-inf" if value == -inf else value
    assert value is None or isinstance(value, int)
    return value


def decode(op: Op, written: Mapping[str, Any], context: Context) -> Attrs:
    """The attribute record of `op` from its written fields; raises `ParseError` naming field and
    expected kind.
    """
    cls = TABLE[op].attrs
    fields = FIELDS[cls] if cls is not None else ()
    known = [f.name for f in fields if f.implied is None]
    for name in written:
        if name not in known:
            raise ParseError(
                f"{op.value} has no attribute {name!r}; "
                + (f"it has {', '.join(known)}" if known else "it takes none")
            )
    if cls is None:
        return None
    values: dict[str, Any] = {}
    for f in fields:
        if f.implied is not None:
            values[f.name] = f.implied(context)
        elif f.name in written:
            values[f.name] = _decode(op, f, written[f.name], context)
        elif f.default is _REQUIRED:
            raise ParseError(f"{op.value}: attribute {f.name!r} is missing ({f.kind.value})")
        else:
            values[f.name] = f.default(context) if callable(f.default) else f.default
    attrs: Attrs = cls(**values)
    return attrs


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integers(value: Any, optional: bool) -> tuple[int | None, ...] | None:
    """The list as a tuple, or None when it is no list of integers."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return None
    ok = all(_integer(v) or (optional and v is None) for v in value)
    return tuple(value) if ok else None


def _decode(op: Op, f: Field, value: Any, context: Context) -> Any:
    got: Any = None
    match f.kind:
        case Kind.INT:
            got = value if _integer(value) else None
        case Kind.OPT_INT:
            if value is None or _integer(value):
                return value
        case Kind.INTS | Kind.OPT_INTS:
            got = _integers(value, f.kind is Kind.OPT_INTS)
        case Kind.MAYBE_INTS:
            if value is None:
                return None
            got = _integers(value, False)
        case Kind.FLOAT:
            if value == "-inf":
                return -inf
            got = float(value) if _integer(value) or isinstance(value, float) else None
        case Kind.DTYPE:
            try:
                got = parse_dtype(value) if isinstance(value, str) else None
            except UnknownName as e:
                raise ParseError(f"{op.value}: attribute {f.name!r}: {e}") from None
        case Kind.SCOPE:
            got = next((s for s in SizeScope if s.value == value), None)
        case Kind.BLOCK:
            got = (context.blocks or {}).get(value) if isinstance(value, str) else None
        case Kind.THREAD:
            got = (context.threads or {}).get(value) if isinstance(value, str) else None
    if got is None:
        raise ParseError(f"{op.value}: attribute {f.name!r} must be {f.kind.value}, got {value!r}")
    return got


def find_op(name: Any) -> Op:
    """The operator spelled `name`; raises `ParseError` listing the known ones."""
    for op in Op:
        if op.value == name:
            return op
    known = ", ".join(sorted(o.value for o in Op))
    raise ParseError(f"unknown operator {name!r}; known are {known}")
