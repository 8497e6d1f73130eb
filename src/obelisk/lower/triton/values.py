"""Values of a block graph as Triton tensors: loads, elementwise operators, folds, the loop, stores.

Takes a flattened block graph and how its tensors lie; gives the statements of one kernel. A value
is one variable whose dims are those of its node that hold more than one element and are not the
same throughout: dims that only broadcast are left out and inserted where they are met. Views of
loads cost nothing (they change the address); other moves of elements are printed by `moves`,
products by `products`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from obelisk.base.errors import Infeasible
from obelisk.ir.block import BlockGraph, Phase, Reduce, is_ragged
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node
from obelisk.ir.op import LoadAttrs, Op
from obelisk.ir.table import size_value
from obelisk.lower.chains import ELEMENTWISE
from obelisk.lower.cuda.names import kind_of, meeting_kind, split_name
from obelisk.lower.moves import load_moves, store_moves
from obelisk.lower.schedule import Operand
from obelisk.lower.tile import Extent, View
from obelisk.lower.triton.names import (
    KIND_TYPE,
    call_text,
    convert,
    grid_lines,
    indented,
    literal,
    lowest,
    operator,
    part_line,
    scalar,
    stored,
)
from obelisk.lower.triton.padding import Padding
from obelisk.lower.views import structural

MOST_ELEMENTS = 1 << 20  # of a tile, padded: Triton's own limit
ACCUMULATORS = (Op.ACCUM_SUM, Op.ACCUM_MAX, Op.ACCUM_RESCALE)
VIEWS = (Op.RESHAPE, Op.TRANSPOSE, Op.SLICE, Op.BROADCAST)
FAR = 1 << 31  # elements from which on 32 bits do not hold an offset
PLAIN = (DType.F32, DType.F64, DType.I32)  # element types that are computed in as they are


@dataclass(frozen=True, slots=True)
class Value:
    """A variable, or a number.

    Attributes:
        text: its name.
        dims: the node's dims that it has, in order.
        kind: f, d, i or m.
        raw: its element type where it was loaded and not yet converted to its kind.
        number: the constant that it is.
    """

    text: str
    dims: tuple[int, ...]
    kind: str
    raw: DType | None = None
    number: float | None = None


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim of a tile: elements, padded elements, and the text of how many are there where that is
    fewer ("" where none is missing).
    """

    size: int
    pad: int
    limit: str = ""

    @property
    def guard(self) -> str:
        """True at elements that are there; "" where all are."""
        if not self.limit:
            return ""
        return f"(r{self.pad} < {self.limit})" if self.size > 1 else f"({self.limit} > 0)"


@dataclass
class Text:
    """The statements of a kernel by phase."""

    lines: dict[Phase, list[str]] = field(default_factory=lambda: {p: [] for p in Phase})
    late: list[str] = field(default_factory=list)  # at the end of each iteration


def subscript(text: str, have: Sequence[int], want: Sequence[int]) -> str:
    """A tensor of dims `have` with axes inserted where `want` has more."""
    if not have or tuple(have) == tuple(want):
        return text
    return f"{text}[{', '.join(':' if d in have else 'None' for d in want)}]"


def shape_text(sizes: Sequence[int]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def masked(mask: str, *more: str) -> list[str]:
    """Arguments for a mask, where there is one."""
    return [f"mask={mask}", *more] if mask else []


class Values(ABC):
    """Prints the values of one block graph."""

    def __init__(
        self, block: BlockGraph, params: Sequence[Operand], results: Sequence[Operand]
    ) -> None:
        self.block, self.params, self.results = block, params, results
        self.phase, self.padding = block.info.phase, Padding(block)
        self.text = Text()
        self.views: dict[Node, View] = {}
        self.loaded: dict[Node, Value] = {}
        self.known: dict[Node, Value] = {}
        self.decays: dict[Node, Value] = {}
        self.users: dict[Node, list[Node]] = {n: [] for n in block.body}
        for node in block.body:
            for child in node.inputs:
                self.users[child].append(node)
        self.stored = {s.value for s in block.stores}
        self.looped = any(p is not Phase.INVARIANT for p in self.phase.values())
        self.needed = self._needed()
        self.ranges: set[int] = set()
        self.count = 0
        self.largest = 1  # padded elements of the largest tile
        self.streamed = 0  # bytes that an iteration loads for products
        self.inner = False  # whether a product has a loop of its own
        self.wide = self._wide()

    # ---- geometry and phases

    def _needed(self) -> set[Node]:
        """Values from before the loop that iterations read."""
        need: set[Node] = set()
        stack = [n for n in self.block.body if self.phase[n] is Phase.LOOP or n.op in ACCUMULATORS]
        while stack:
            for i in stack.pop().inputs:
                if i not in need:
                    need.add(i)
                    stack.append(i)
        return need

    def _wide(self) -> bool:
        spans = [0]
        for (shape, _), operand in zip(self.block.info.params, self.params, strict=True):
            spans.append(sum((n - 1) * s for n, s in zip(shape, operand.strides, strict=True)))
        for j, (store, shape) in enumerate(
            zip(self.block.stores, self.block.info.shapes, strict=True)
        ):
            _, moves = self.store_moves(j)
            steps = sum((g - 1) * m for g, m in zip(self.block.grid, moves[:-1], strict=True))
            spans.append(prod(shape) + (steps if store.reduce is not Reduce.NONE else 0))
        # Padded tiles reach past the end: twice the span is a safe bound for masked addresses.
        return 2 * max(spans) >= FAR

    def when(self, node: Node) -> Phase:
        """The phase whose text computes a value."""
        phase = self.phase[node]
        if phase is Phase.INVARIANT and self.looped and node not in self.needed:
            return Phase.POST
        return phase

    def dims(self, node: Node) -> tuple[Dim, ...]:
        """The dims of a value."""
        out = []
        for d, (n, split) in enumerate(zip(node.shape, self.block.info.splits[node], strict=True)):
            pad, limit = self.padding.of(node, d), ""
            if split is not None and is_ragged(split, n, self.block.grid, self.block.loop):
                limit = split_name(split)
            elif pad != n:
                limit = str(n)
            out.append(Dim(n, pad, limit))
        return tuple(out)

    def pads(self, dims: Sequence[Dim], which: Sequence[int]) -> list[int]:
        return [dims[d].pad for d in which]

    def bounded(self, sizes: Sequence[int]) -> None:
        """Note a tile's size; raises `Infeasible` above Triton's limit."""
        n = prod(sizes)
        if n > MOST_ELEMENTS:
            raise Infeasible(
                f"a tile of {n} elements (padded to {'x'.join(map(str, sizes))}): Triton's limit "
                f"is {MOST_ELEMENTS}; a larger grid or loop makes tiles smaller"
            )
        self.largest = max(self.largest, n)

    # ---- text

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def line(self, phase: Phase, text: str) -> None:
        self.text.lines[phase].append(text)

    def let(self, phase: Phase, stem: str, expression: str) -> str:
        """A new variable."""
        name = self.name(stem)
        self.line(phase, f"{name} = {expression}")
        return name

    def index(self, pad: int) -> str:
        """The variable that counts along a padded dim."""
        self.ranges.add(pad)
        return f"r{pad}"

    def mask(self, dims: Sequence[Dim], which: Sequence[int]) -> str:
        """True at elements that are there, over the dims `which`; "" where all are."""
        parts = []
        for d, dim in enumerate(dims):
            if not dim.guard or (dim.size > 1 and d not in which):
                continue
            if dim.size > 1:
                self.index(dim.pad)
            parts.append(subscript(dim.guard, (d,), which) if dim.size > 1 else dim.guard)
        return " & ".join(parts)

    def filled(self, value: Value, dims: Sequence[Dim], want: Sequence[int], phase: Phase) -> Value:
        """The value with all dims of `want`, broadcast where it had none."""
        if value.number is not None:
            value = Value(scalar(value.number, value.kind), (), value.kind)
        if value.dims == tuple(want):
            return value
        sizes = self.pads(dims, want)
        self.bounded(sizes)
        text = subscript(value.text, value.dims, want)
        name = self.let(phase, "wide", f"tl.broadcast_to({text}, {shape_text(sizes)})")
        return replace(value, text=name, dims=tuple(want))

    # ---- values

    def value(self, node: Node) -> Value:
        """The value of a node in its kind."""
        if node in self.known:
            return self.known[node]
        self.known[node] = self.converted(self.raw(node), self.when(node))
        return self.known[node]

    def converted(self, value: Value, phase: Phase) -> Value:
        """A value in its kind, where it may be as it was loaded."""
        if value.raw is None or value.raw in PLAIN:
            return replace(value, raw=None)
        match value.raw:
            case DType.F8E4M3:
                text = f"ob_from_f8({value.text})"
            case DType.BOOL:
                text = f"{value.text} != 0"
            case _:
                text = convert(value.text, "", value.kind)
        return Value(self.let(phase, "v", text), value.dims, value.kind)

    def raw(self, node: Node) -> Value:
        """The value of a node, as it was loaded where it is (a view of) a load."""
        if node in self.views and node not in self.loaded:
            self.loaded[node] = self.load(self.views[node], self.dims(node), self.when(node))
        return self.loaded[node] if node in self.views else self.known[node]

    def load(
        self,
        view: View,
        dims: Sequence[Dim],
        phase: Phase,
        shift: tuple[int, int, int] | None = None,
        further: str = "",
    ) -> Value:
        """A tile from device memory, `further` elements on; what is not there is 0. With `shift`
        (dim, start, size), the tile's elements lie at start <= i < start + size along that dim.
        """
        which = tuple(
            d for d, (dim, s) in enumerate(zip(dims, view.strides, strict=True))
            if dim.size > 1 and (s != 0 or (shift is not None and shift[0] == d))
        )  # fmt: skip
        sizes = self.pads(dims, which)
        self.bounded(sizes)
        base = self.steps(view.moves)
        if view.offset:
            base.append(str(view.offset))
        if further:
            base.append(further)
        parts = [f"x{view.buffer}"]
        if base:
            parts.append(
                base[0] if len(base) == 1 and base[0].isdigit() else f"({' + '.join(base)})"
            )
        for d in which:
            i, step = self.index(dims[d].pad), view.strides[d]
            if shift is not None and shift[0] == d and shift[1]:
                i = f"({i} - {shift[1]})"
            parts.append(subscript(i, (d,), which) + (f" * {step}" if step != 1 else ""))
        mask = self.mask(dims, which)
        if shift is not None:
            d, start, size = shift
            i = self.index(dims[d].pad)
            inside = f"(({i} >= {start}) & ({i} < {start + size}))" if start else f"({i} < {size})"
            inside = subscript(inside, (d,), which)
            mask = f"{mask} & {inside}" if mask else inside
        call = call_text("tl.load", [" + ".join(parts), *masked(mask, "other=0")])
        dtype = self.params[view.buffer].dtype
        return Value(self.let(phase, "t", call), which, kind_of(dtype), dtype)

    def steps(self, moves: Sequence[int]) -> list[str]:
        """The terms of the current block's and iteration's offset."""
        out = []
        for a, step in enumerate(moves[:-1]):
            if step and self.block.grid[a] > 1:
                out.append(f"g{a} * {step}" if step > 1 else f"g{a}")
        if moves and moves[-1] and self.block.loop > 1:
            out.append(f"it * {moves[-1]}" if moves[-1] > 1 else "it")
        return out

    def place(self, node: Node) -> None:
        """Give a node its value, or its view."""
        match node.op:
            case Op.LOAD:
                self.views[node] = self.load_view(node)
            case op if op in VIEWS:
                self.view(node)
            case Op.CONST:
                self.known[node] = Value("", (), kind_of(node.dtype), None, node.attrs.value)
            case Op.SIZE:
                number = float(size_value(node))
                self.known[node] = Value("", (), kind_of(node.dtype), None, number)
            case Op.IOTA:
                self.iota(node)
            case Op.SUM | Op.REDUCE_MAX:
                self.fold(node)
            case Op.MATMUL:
                if not self.closes(node):
                    self.known[node] = self.product(node)
            case Op.CONCAT:
                self.concat(node)
            case Op.RUNNING_MAX:
                self.running(node)
            case op if op in ACCUMULATORS:
                self.accumulate(node)
            case op if op in ELEMENTWISE:
                self.elementwise(node)
            case op:
                raise Infeasible(f"{op.value} has no form in Triton")

    def load_view(self, node: Node) -> View:
        """A load as a view of the kernel tensor."""
        at: LoadAttrs = node.attrs
        strides = self.params[at.index].strides
        dims = tuple(Extent(n) for n in node.shape)
        return View(at.index, dims, strides, 0, load_moves(node, strides))

    def view(self, node: Node) -> None:
        """A node that only moves elements: a view of a load where it is one."""
        operand = node.inputs[0]
        if operand in self.views:
            found = structural(self.views[operand], node.attrs)
            if found is not None:
                self.views[node] = found
                return
        self.known[node] = self.moved(node)

    @abstractmethod
    def moved(self, node: Node) -> Value:
        """A view of a computed value."""

    @abstractmethod
    def concat(self, node: Node) -> None:
        """Give operands side by side their value."""

    @abstractmethod
    def product(self, node: Node) -> Value:
        """A product that no accumulator takes."""

    @abstractmethod
    def multiplied(self, node: Node, state: str) -> str:
        """`state` plus the product `node`, as an expression."""

    @abstractmethod
    def closes(self, node: Node) -> bool:
        """Whether a product adds straight to its accumulator."""

    def iota(self, node: Node) -> None:
        axis = node.attrs.axis
        if node.shape[axis] == 1:
            self.known[node] = Value("", (), "i", None, 0.0)
            return
        text = self.index(self.padding.of(node, axis))
        if self.wide:
            text = self.let(self.when(node), "v", f"{text}.to(tl.int32)")
        self.known[node] = Value(text, (axis,), "i")

    # ---- elementwise operators

    def elementwise(self, node: Node) -> None:
        here = kind_of(node.dtype)
        phase = self.when(node)
        values = [self.value(i) for i in node.inputs]
        if node.op is Op.CAST:
            self.cast(node, values[0], phase)
            return
        picked = values[1:] if node.op is Op.WHERE else values
        nodes = node.inputs[1:] if node.op is Op.WHERE else node.inputs
        kind = meeting_kind(
            [(i.dtype, v.number) for i, v in zip(nodes, picked, strict=True)],
            "f" if node.op is Op.LESS else here,
        )
        dims = sorted(
            {
                d + node.rank - i.rank
                for i, v in zip(node.inputs, values, strict=True)
                for d in v.dims
            }
        )
        # A bare literal takes the type of the tensor that it meets; alone it has none.
        bare = len(picked) > 1 and any(v.number is None for v in picked) and node.op is not Op.LESS
        args: list[str] = []
        for i, v in zip(node.inputs, values, strict=True):
            want = "m" if node.op is Op.WHERE and i is node.inputs[0] and not args else kind
            if v.number is not None:
                args.append(literal(v.number, want) if bare else scalar(v.number, want))
                continue
            have = tuple(d + node.rank - i.rank for d in v.dims)
            args.append(subscript(convert(v.text, v.kind, want), have, dims))
        text = operator(node.op, args, kind)
        given = "m" if node.op is Op.LESS else kind
        if given != here:
            text = convert(f"({text})", given, here)
        if node.dtype is DType.I8:
            text = f"({text}).to(tl.int8).to(tl.int32)"
        self.bounded(self.pads(self.dims(node), dims))
        name = self.let(phase, node.op.value, text)
        self.known[node] = Value(name, tuple(dims), here)

    def cast(self, node: Node, value: Value, phase: Phase) -> None:
        """A conversion; narrow floats stay in f32 until they are stored."""
        here = kind_of(node.dtype)
        text = value.text if value.number is None else scalar(value.number, value.kind)
        text = convert(text, value.kind, here)
        if node.dtype is DType.I8:
            text = f"{text}.to(tl.int8).to(tl.int32)"
        if text == value.text:
            self.known[node] = value
        else:
            self.known[node] = Value(self.let(phase, "cast", text), value.dims, here)

    # ---- folds

    def fold(self, node: Node) -> None:
        """A sum or maximum along an axis."""
        operand, axis, keep = node.inputs[0], node.attrs.axis, node.attrs.keep
        phase, dims = self.when(node), list(self.dims(operand))
        if keep > 1:
            value, dims = self.split_axis(node, operand, dims)
        else:
            value = self.value(operand)
        # What is missing was loaded as 0, unless the dim is but one element repeated.
        exact = keep == 1 and node.op is Op.SUM and operand in self.views and axis in value.dims
        guard = "" if exact else dims[axis].guard
        neutral = 0.0 if node.op is Op.SUM else lowest(node.dtype)
        if dims[axis].size == 1:
            found = value
            if guard:
                if value.number is not None:
                    value = Value(scalar(value.number, value.kind), (), value.kind)
                text = f"tl.where({guard}, {value.text}, {literal(neutral, value.kind)})"
                found = Value(self.let(phase, "part", text), value.dims, value.kind)
        else:
            if axis not in value.dims:
                want = tuple(sorted({*value.dims, axis}))
                value = self.filled(value, dims, want, phase)
            text = value.text
            if guard:
                self.index(dims[axis].pad)
                inside = subscript(guard, (axis,), value.dims)
                text = f"tl.where({inside}, {text}, {literal(neutral, value.kind)})"
            at = value.dims.index(axis)
            if node.op is Op.SUM:
                text = f"tl.sum({text}, {at})"
            elif value.kind == "i":
                text = f"tl.max({text}, {at})"
            else:
                text = f"ob_max({text}, {at})"
            left = tuple(d for d in value.dims if d != axis)
            found = Value(self.let(phase, node.op.value, text), left, value.kind)
        if keep > 1:  # the axis was seen as two, of which the first is folded
            found = replace(found, dims=tuple(d if d < axis else d - 1 for d in found.dims))
        self.known[node] = found

    @abstractmethod
    def split_axis(self, node: Node, operand: Node, dims: list[Dim]) -> tuple[Value, list[Dim]]:
        """The operand with its folded axis as two dims (n / keep, keep)."""

    # ---- the loop

    def state(self, stem: str, dims: Sequence[Dim], which: Sequence[int], kind: str, start: float
              ) -> str:  # fmt: skip
        """A variable that iterations carry on."""
        self.bounded(self.pads(dims, which))
        sizes = shape_text(self.pads(dims, which))
        return self.let(
            Phase.INVARIANT, stem, f"tl.full({sizes}, {literal(start, kind)}, {KIND_TYPE[kind]})"
        )

    def running(self, node: Node) -> None:
        dims = self.dims(node)
        x = self.plain(self.value(node.inputs[0]))
        state = self.state("peak", dims, x.dims, x.kind, lowest(node.dtype))
        now = self.let(Phase.LOOP, "now", operator(Op.MAX, (state, x.text), x.kind))
        self.known[node] = Value(now, x.dims, x.kind)
        if any(u.op is Op.ACCUM_RESCALE and u.inputs[1] is node for u in self.users[node]):
            decay = self.let(Phase.LOOP, "decay", f"ob_decay({state}, {now})")
            self.decays[node] = Value(decay, x.dims, x.kind)
        self.text.late.append(f"{state} = {now}")

    def plain(self, value: Value) -> Value:
        """The value as a variable, where it may be a number."""
        if value.number is None:
            return value
        return Value(scalar(value.number, value.kind), (), value.kind)

    def accumulate(self, node: Node) -> None:
        """The step of an accumulator."""
        x, dims, kind = node.inputs[0], self.dims(node), kind_of(node.dtype)
        fused = x.op is Op.MATMUL and self.closes(x)
        which: tuple[int, ...]
        if fused:
            which = tuple(d for d, dim in enumerate(dims) if dim.size > 1)
            value = Value("", which, kind)
        else:
            value = self.plain(self.value(x))
            which = value.dims
        factor = ""
        if node.op is Op.ACCUM_RESCALE:
            decay = self.decays[node.inputs[1]]
            have = tuple(d + node.rank - node.inputs[1].rank for d in decay.dims)
            which = tuple(sorted({*which, *have}))
            factor = f" * {subscript(decay.text, have, which)}"
        largest = node.op is Op.ACCUM_MAX
        start = lowest(node.dtype) if largest else 0.0
        state = self.state("largest" if largest else "total", dims, which, kind, start)
        if fused:
            update = self.multiplied(x, f"{state}{factor}")
        else:
            term = subscript(convert(value.text, value.kind, kind), value.dims, which)
            if largest:
                update = operator(Op.MAX, (state, term), kind)
            else:
                update = f"{state}{factor} + {term}"
        if node.dtype is DType.I8:
            update = f"({update}).to(tl.int8).to(tl.int32)"
        self.line(Phase.LOOP, f"{state} = {update}")
        self.known[node] = Value(state, which, kind)

    # ---- stores

    def store_moves(self, j: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Strides of a result, and elements per step of each grid axis and iteration. Partial
        results have the number of the folded block in front.
        """
        strides = self.results[j].strides
        return strides, store_moves(self.block, j, strides)

    def store(self, j: int) -> None:
        """Write a result."""
        node, dtype = self.block.stores[j].value, self.results[j].dtype
        phase = self.when(node)
        if self.looped and phase is Phase.INVARIANT:
            phase = Phase.POST
        dims, kind = self.dims(node), kind_of(dtype)
        which = tuple(d for d, dim in enumerate(dims) if dim.size > 1)
        value = self.raw(node)
        if value.raw is not dtype:
            value = self.value(node)
            value = self.filled(value, dims, which, phase)
            text = stored(convert(value.text, value.kind, kind), dtype)
        else:
            text = self.filled(value, dims, which, phase).text
        strides, moves = self.store_moves(j)
        parts, base = [f"y{j}"], self.steps(moves)
        if base:
            parts.append(f"({' + '.join(base)})")
        for d in which:
            i = self.index(dims[d].pad)
            if strides[d]:
                step = f" * {strides[d]}" if strides[d] != 1 else ""
                parts.append(subscript(i, (d,), which) + step)
        mask = self.mask(dims, which)
        self.line(phase, call_text("tl.store", [" + ".join(parts), text, *masked(mask)]))

    # ---- the kernel

    def body(self) -> list[str]:
        """The statements of the kernel, in order."""
        for node in self.block.body:
            self.place(node)
        for j in range(len(self.block.stores)):
            self.store(j)
        grid, loop = self.block.grid, self.block.loop
        splits = {
            s
            for node in self.block.body
            for s, n in zip(self.block.info.splits[node], node.shape, strict=True)
            if s is not None and is_ragged(s, n, grid, loop)
        }
        ordered = sorted(splits, key=lambda s: (s.full, -1 if s.axis is None else s.axis, s.loop))
        out = grid_lines(grid, self.wide)
        wide = ".to(tl.int64)" if self.wide else ""
        out += [f"r{n} = tl.arange(0, {n}){wide}" for n in sorted(self.ranges)]
        out += [part_line(s, grid, loop, "it") for s in ordered if not s.loop]
        out += self.text.lines[Phase.INVARIANT]
        inside = [part_line(s, grid, loop, "it") for s in ordered if s.loop]
        inside += self.text.lines[Phase.LOOP] + self.text.late
        if self.text.lines[Phase.LOOP]:
            if loop > 1 and self.wide:
                inside.insert(0, "it = tl.full([], 0, tl.int64) + step")
            if loop > 1:
                out.append(f"for {'step' if self.wide else 'it'} in range({loop}):")
            out += [indented(x) if loop > 1 else x for x in inside]
        return out + self.text.lines[Phase.POST]
