"""Mirage checkpoint files: lists of kernel graphs as JSON, read into Obelisk graphs and written
back.

Takes a path or decoded JSON; gives one `MirageEntry` per graph, holding a `Graph` or the error that
says what is wrong with it, so that one malformed graph never stops the others. Composite words
(rms_norm, silu, accumulators that also reduce) become graphs of primitives, and `save_mirage` finds
them again: nodes are interned, so a word matches exactly when building it from its operand gives
the same object. Recorded shapes are checked against the derived ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from obelisk.base.errors import MalformedGraph, ParseError, UnknownName, UserError
from obelisk.ir import build as b
from obelisk.ir import composite as c
from obelisk.ir.block import GRID_AXES
from obelisk.ir.dtype import DType, parse_dtype
from obelisk.ir.graph import Graph, make_graph
from obelisk.ir.node import Node, Shape
from obelisk.ir.op import Op, SizeScope

Json = Any  # decoded JSON; every access is checked by `_Record`
AXES = ("x", "y", "z")
MAX_DIMS = 4  # Mirage pads every shape to this rank
DEFAULT_DIMX = 64

# Mirage renumbered its dtypes once: the published checkpoints say 921 for fp16, later versions 941.
# Numbers that mean different types before and after (930) are refused rather than guessed.
DTYPE_NUMBERS: Mapping[int, DType] = {
    921: DType.F16, 941: DType.F16, 940: DType.BF16, 950: DType.F32, 960: DType.F64,
}  # fmt: skip
DTYPE_TO_NUMBER: Mapping[DType, int] = {
    DType.F16: 921, DType.BF16: 940, DType.F32: 950, DType.F64: 960,
}  # fmt: skip

UNARY: Mapping[str, Callable[[Node], Node]] = {
    "exp": b.exp, "square": b.square, "sqrt": b.sqrt, "log": b.log, "sigmoid": b.sigmoid,
    "silu": c.silu, "gelu": c.gelu, "relu": c.relu, "rms_norm": c.rms_norm,
}  # fmt: skip
BINARY: Mapping[str, Callable[[Node, Node], Node]] = {
    "add": b.add, "sub": b.sub, "mul": b.mul, "div": b.div, "matmul": b.matmul,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MirageEntry:
    """Graph number `index` of a checkpoint: exactly one of `graph` and `error` is set."""

    index: int
    graph: Graph | None
    error: ParseError | MalformedGraph | None


def load_mirage(source: str | Path | Sequence[Json], name: str | None = None) -> list[MirageEntry]:
    """Read a checkpoint: a path, or the decoded JSON (a list of graphs, or one graph's list of
    operators).

    Graphs are called `<name>_<index>`, `name` being the file's stem by default. Raises `ParseError`
    only when the whole is no checkpoint; a graph that does not read or is malformed is an entry
    with its error.
    """
    if isinstance(source, (str, Path)):
        path = Path(source)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
            raise ParseError(f"{path}: not a Mirage checkpoint: {e}") from None
        stem = name or path.stem
    else:
        data, stem = source, name or "mirage"
    if not isinstance(data, list):
        raise ParseError(
            f"a Mirage checkpoint is a list of graphs, got a JSON {type(data).__name__}"
        )
    graphs = [data] if data and isinstance(data[0], dict) else data
    out: list[MirageEntry] = []
    for i, graph in enumerate(graphs):
        try:
            out.append(MirageEntry(i, _read_graph(graph, f"{stem}_{i}"), None))
        except ParseError as e:
            out.append(MirageEntry(i, None, e))
        except UserError as e:
            out.append(MirageEntry(i, None, MalformedGraph(str(e))))
    return out


def is_mirage(data: Json) -> bool:
    """True when decoded JSON has the outer form of a checkpoint."""
    first = data[0] if isinstance(data, list) and data else None
    op = first[0] if isinstance(first, list) and first else first
    return isinstance(op, dict) and "op_type" in op


# --- reading --------------------------------------------------------------------------------------


class _Record:
    """One JSON object with the place it stands at; its accessors raise `ParseError` naming the
    field.
    """

    def __init__(self, data: Json, place: str) -> None:
        if not isinstance(data, dict):
            raise ParseError(f"{place}: expected an object, got {_brief(data)}")
        self.data, self.place = data, place

    def get(self, field: str) -> Json:
        if field not in self.data:
            raise ParseError(
                f"{self.place}: field {field!r} is missing; it has {', '.join(sorted(self.data))}"
            )
        return self.data[field]

    def integer(self, field: str) -> int:
        value = self.get(field)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ParseError(f"{self.place}: {field!r} must be an integer, got {_brief(value)}")
        return value

    def number(self, field: str) -> float:
        value = self.get(field)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ParseError(f"{self.place}: {field!r} must be a number, got {_brief(value)}")
        return float(value)

    def records(self, field: str) -> list[_Record]:
        value = self.get(field)
        if not isinstance(value, list):
            raise ParseError(f"{self.place}: {field!r} must be a list, got {_brief(value)}")
        return [_Record(v, f"{self.place} {field}[{i}]") for i, v in enumerate(value)]

    def child(self, field: str) -> _Record:
        return _Record(self.get(field), f"{self.place} {field}")

    def axes(self, field: str) -> tuple[int, ...]:
        """The x, y and z entries."""
        inner = self.child(field)
        return tuple(inner.integer(a) for a in AXES)

    def shape(self) -> Shape:
        """Shape of a recorded tensor."""
        dims, rank = self.get("dim"), self.integer("num_dims")
        if not isinstance(dims, list) or not 0 <= rank <= len(dims):
            raise ParseError(f"{self.place}: {rank} dims of {_brief(dims)}")
        if not all(isinstance(d, int) and d >= 1 for d in dims[:rank]):
            raise ParseError(f"{self.place}: extents must be positive, got {dims[:rank]}")
        return tuple(dims[:rank])

    def dtype(self) -> DType:
        value = self.get("data_type")
        if isinstance(value, int) and value in DTYPE_NUMBERS:
            return DTYPE_NUMBERS[value]
        if isinstance(value, str):
            try:
                return parse_dtype(value)
            except UnknownName as e:
                raise ParseError(f"{self.place}: {e}") from None
        known = ", ".join(f"{n} ({d})" for n, d in DTYPE_NUMBERS.items())
        raise ParseError(
            f"{self.place}: unknown dtype number {value!r}; Mirage renumbered its dtypes between "
            f"versions, known are {known}, and names such as fp16"
        )


def _brief(value: Json) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Scope:
    """Tensors of one level by guid, with the check of every recorded shape."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.read: set[int] = set()

    def define(self, tensor: _Record, node: Node) -> None:
        guid = tensor.integer("guid")
        if guid in self.nodes:
            raise MalformedGraph(f"{tensor.place}: guid {guid} is defined twice")
        if tensor.shape() != node.shape:
            raise MalformedGraph(
                f"{tensor.place}: recorded shape {tensor.shape()}, "
                f"but {node.op.value} gives {node.shape}"
            )
        if tensor.dtype() is not node.dtype:
            raise MalformedGraph(
                f"{tensor.place}: recorded dtype {tensor.dtype()}, but the value is {node.dtype}"
            )
        self.nodes[guid] = node

    def use(self, tensor: _Record) -> Node:
        guid = tensor.integer("guid")
        if guid not in self.nodes:
            raise MalformedGraph(f"{tensor.place}: no operator before it defines guid {guid}")
        node = self.nodes[guid]
        if tensor.shape() != node.shape:
            raise MalformedGraph(
                f"{tensor.place}: guid {guid} is read with shape {tensor.shape()}, "
                f"it has {node.shape}"
            )
        self.read.add(guid)
        return node


def _read_graph(data: Json, name: str) -> Graph:
    """One kernel graph."""
    if not isinstance(data, list):
        raise ParseError(f"{name}: a graph is a list of operators, got {_brief(data)}")
    scope = _Scope()
    inputs: list[Node] = []
    outputs: list[Node] = []
    for i, item in enumerate(data):
        op = _Record(item, f"{name} operator {i}")
        kind = op.get("op_type")
        op.place += f" ({kind})"
        if kind == "kn_input_op":
            (tensor,) = _exactly(op, "output_tensors", 1)
            strides = op.get("input_strides") if "input_strides" in op.data else None
            if strides is not None and not (
                isinstance(strides, list) and all(isinstance(s, int) for s in strides)
            ):
                raise ParseError(f"{op.place}: input_strides must be a list of integers")
            node = b.input_node(
                len(inputs), tensor.shape(), tensor.dtype(), tuple(strides) if strides else None
            )
            inputs.append(node)
            scope.define(tensor, node)
        elif kind == "kn_output_op":
            outputs.append(_read_output(op, scope))
        elif kind == "kn_customized_op":
            _read_customized(op, scope)
        else:
            _define_all(op, scope, _read_word(op, kind, "kn_", scope, DEFAULT_DIMX, 1))
    if not outputs:  # older files leave the outputs implicit
        outputs = [n for g, n in scope.nodes.items() if g not in scope.read and n not in inputs]
    return make_graph(inputs, outputs, name=name)


def _read_output(op: _Record, scope: _Scope) -> Node:
    node = scope.use(_exactly(op, "input_tensors", 1)[0])
    strides = op.data.get("output_strides")
    if strides and tuple(strides) != b.row_major(node.shape):
        raise MalformedGraph(
            f"{op.place}: strides {strides} of the result; Obelisk writes results row-major"
        )
    return node


def _exactly(op: _Record, field: str, count: int) -> list[_Record]:
    found = op.records(field)
    if len(found) != count:
        raise MalformedGraph(f"{op.place}: {count} {field} expected, got {len(found)}")
    return found


def _define_all(op: _Record, scope: _Scope, nodes: Sequence[Node]) -> None:
    for tensor, node in zip(_exactly(op, "output_tensors", len(nodes)), nodes, strict=True):
        scope.define(tensor, node)


def _at(place: str, fn: Callable[[], Node]) -> Node:
    """Run a builder; its error gets the place in front."""
    try:
        return fn()
    except UserError as e:
        raise type(e)(f"{place}: {e}") from None


def _read_word(
    op: _Record, kind: Json, prefix: str, scope: _Scope, dimx: int, loop: int
) -> list[Node]:
    """The values of any operator that has the same form at both levels, and of the accumulators."""
    if not isinstance(kind, str) or not (kind.startswith(prefix) and kind.endswith("_op")):
        raise ParseError(f"{op.place}: unknown operator {kind!r}; known are {_known(prefix)}")
    word = kind[len(prefix) : -len("_op")]
    args = [scope.use(t) for t in op.records("input_tensors")]
    if word in BINARY:
        _arity(op, args, 2)
        return [_at(op.place, lambda: BINARY[word](args[0], args[1]))]
    if word.startswith("concat_") and word[7:].isdigit():
        _arity(op, args, 2)
        return [_at(op.place, lambda: b.concat(args, int(word[7:])))]
    if word == "concat_then_matmul" and prefix == "tb_":
        _arity(op, args, 4)
        return [_at(op.place, lambda: b.matmul(b.concat(args[:2], -1), b.concat(args[2:], -2)))]
    head, _, rest = word.partition("_")
    axis, _, tail = rest.partition("_")
    sized = head in ("split", "reduction") and axis.isdigit()
    accumulates = prefix == "tb_" and word in ACCUMULATORS
    if not (word in UNARY or word in ("mul_scalar", "clamp") or sized or accumulates):
        raise ParseError(f"{op.place}: unknown operator {kind!r}; known are {_known(prefix)}")
    _arity(op, args, 1)
    x = args[0]
    if word in UNARY:
        return [_at(op.place, lambda: UNARY[word](x))]
    if word == "mul_scalar":
        return [b.mul(x, op.number("scalar"))]
    if word == "clamp":
        low, high = op.number("min_val"), op.number("max_val")
        return [_at(op.place, lambda: c.clamp(x, low, high))]
    if accumulates:
        return [_at(op.place, lambda: ACCUMULATORS[word](x, dimx, loop))]
    if head == "split" and not tail:
        return _read_split(op, x, int(axis))
    if head == "reduction" and tail in ("", "to_dimx"):
        keep = dimx if tail else _recorded_keep(op, int(axis), prefix)
        return [_at(op.place, lambda: b.sum(x, int(axis), keep))]
    raise ParseError(f"{op.place}: unknown operator {kind!r}; known are {_known(prefix)}")


def _known(prefix: str) -> str:
    words = [*UNARY, *BINARY, "mul_scalar", "clamp", "concat_N", "split_N", "reduction_N"]
    if prefix == "tb_":
        words += ["input", "output", "concat_then_matmul", "reduction_N_to_dimx", *ACCUMULATORS]
    else:
        words += ["input", "output", "customized"]
    return ", ".join(f"{prefix}{w}_op" for w in sorted(words))


def _arity(op: _Record, args: Sequence[Node], count: int) -> None:
    if len(args) != count:
        raise MalformedGraph(f"{op.place}: takes {count} operands, got {len(args)}")


def _recorded_keep(op: _Record, axis: int, prefix: str) -> int:
    """A kernel-level reduction may keep several columns; only the recorded result says how many."""
    if prefix == "tb_":
        return 1
    shape = _exactly(op, "output_tensors", 1)[0].shape()
    return shape[axis] if axis < len(shape) else 1


def _read_split(op: _Record, x: Node, axis: int) -> list[Node]:
    first, second = (t.shape() for t in _exactly(op, "output_tensors", 2))
    if axis >= x.rank or first[axis] + second[axis] != x.shape[axis]:
        raise MalformedGraph(f"{op.place}: parts {first} and {second} do not make {x.shape}")
    cut = first[axis]
    return [b.slice(x, axis, 0, cut), b.slice(x, axis, cut, x.shape[axis])]


def _folded_size(x: Node, loop: int) -> Node:
    """Number of elements that a sum over the last dim and the loop folds, as a node that resizes
    with the graph.
    """
    at, last = x.attrs, x.rank - 1
    whole = (
        x.op is Op.LOAD
        and last not in [m for a, m in enumerate(at.imap) if at.grid[a] > 1]
        and (loop == 1 or at.fmap == last)
    )
    if whole:
        return b.size(x, last, SizeScope.FULL)
    return b.size(x, last, SizeScope.LOOP, loop)


def _accum_rms(x: Node, dimx: int, loop: int) -> Node:
    total = b.accum_sum(b.sum(b.square(x), -1))
    return b.sqrt(b.div(total, _folded_size(x, loop)))


def _accum_mean(x: Node, dimx: int, loop: int) -> Node:
    return b.div(b.accum_sum(b.sum(x, -1)), _folded_size(x, loop))


# The for-loop accumulators: value, reduction_dimx and loop count to a node.
ACCUMULATORS: Mapping[str, Callable[[Node, int, int], Node]] = {
    "accum_nored": lambda x, dimx, loop: b.accum_sum(x),
    "accum_red_ld_sum": lambda x, dimx, loop: b.accum_sum(b.sum(x, -1)),
    "accum_red_ld_mean": _accum_mean,
    "accum_red_ld_rms": _accum_rms,
    "accum_redtox_ld_sum": lambda x, dimx, loop: b.accum_sum(b.sum(x, -1, dimx)),
}


def _dim_map(values: Sequence[int], grid: Sequence[int]) -> tuple[int | None, ...]:
    """A map over the grid axes in use; an axis of extent 1 cuts nothing, so its entry says
    nothing.
    """
    return tuple(None if v < 0 or n == 1 else v for v, n in zip(values, grid, strict=False))


def _read_customized(op: _Record, scope: _Scope) -> None:
    """A graph-defined operator: its block graph, launched on the kernel tensors that its inputs
    name.
    """
    bg = op.child("bgraph")
    full_grid = bg.axes("grid_dim")
    loop, threads = bg.integer("forloop_range"), prod(bg.axes("block_dim"))
    dimx = bg.integer("reduction_dimx") if "reduction_dimx" in bg.data else DEFAULT_DIMX
    rank = max([1, *(a + 1 for a in range(GRID_AXES) if full_grid[a] != 1)])
    grid = full_grid[:rank]
    if min(full_grid) < 1 or loop < 1 or dimx < 1 or threads < 1:
        raise MalformedGraph(
            f"{bg.place}: grid {full_grid}, loop {loop}, block {threads} and reduction_dimx {dimx} "
            "must be positive"
        )
    builder = b.BlockBuilder(grid, loop, threads)
    declared = {t.integer("guid"): scope.use(t) for t in op.records("input_tensors")}
    inner = _Scope()
    stored: list[int] = []
    for i, item in enumerate(bg.records("operators")):
        kind = item.get("op_type")
        item.place = f"{bg.place} operator {i} ({kind})"
        if kind == "tb_input_op":
            guid = item.child("dtensor").integer("guid")
            if guid not in declared:
                raise MalformedGraph(f"{item.place}: reads guid {guid}, no input of the kernel")
            _read_load(item, builder, declared[guid], grid, loop, inner)
        elif kind == "tb_output_op":
            value = inner.use(_exactly(item, "input_tensors", 1)[0])
            builder.store(value, _dim_map(item.axes("output_map"), grid))
            stored.append(item.child("dtensor").integer("guid"))
        else:
            _define_all(item, inner, _read_word(item, kind, "tb_", inner, dimx, loop))
    try:
        results = dict(zip(stored, builder.launch(), strict=True))
    except UserError as e:
        raise type(e)(f"{bg.place}: {e}") from None
    for tensor in op.records("output_tensors"):
        guid = tensor.integer("guid")
        if guid not in results:
            raise MalformedGraph(f"{tensor.place}: no store of the block graph writes guid {guid}")
        scope.define(tensor, results[guid])


def _read_load(
    item: _Record,
    builder: b.BlockBuilder,
    tensor: Node,
    grid: Sequence[int],
    loop: int,
    inner: _Scope,
) -> None:
    fdim = item.integer("forloop_dim")
    fmap = None if fdim < 0 else fdim
    imap = _dim_map(item.axes("input_map"), grid)
    node = _at(item.place, lambda: builder.load(tensor, imap, fmap))
    for d, n in enumerate(tensor.shape):
        parts = prod(grid[a] for a, m in enumerate(imap) if m == d) * (loop if fmap == d else 1)
        if n % parts:
            raise MalformedGraph(
                f"{item.place}: dim {d} of extent {n} does not divide into {parts} tiles, "
                "as Mirage requires"
            )
    inner.define(_exactly(item, "output_tensors", 1)[0], node)
