"""Values of a block graph in registers: elementwise operators, folds, loads and stores.

Takes nodes of a flattened block graph and layouts; appends CUDA C++ to the list of a phase. Every
value is an array with one dim per axis it has, indexed only by constants once loops are unrolled.
Products are printed by `fragment`, which builds on this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from obelisk.base.errors import Infeasible
from obelisk.ir.block import BlockGraph, Phase
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node
from obelisk.ir.op import LoadAttrs, Op
from obelisk.ir.table import size_value
from obelisk.lower.chains import ELEMENTWISE
from obelisk.lower.cuda.axes import Axes
from obelisk.lower.cuda.layout import REGISTER_LIMIT, WARP, Layout
from obelisk.lower.cuda.names import (
    CTYPE,
    KIND_TYPE,
    convert,
    kind_of,
    literal,
    meeting_kind,
    operator,
    split_line,
    split_name,
)
from obelisk.lower.moves import load_moves, store_moves
from obelisk.lower.schedule import Operand

VIEWS = (Op.RESHAPE, Op.TRANSPOSE, Op.BROADCAST)
ACCUMULATORS = (Op.ACCUM_SUM, Op.ACCUM_MAX, Op.ACCUM_RESCALE)
FAST = {
    Op.SQRT: "ob_fast_sqrt",
    Op.EXP: "ob_fast_exp",
    Op.SIGMOID: "ob_fast_sigmoid",
    Op.MAX: "ob_fast_max",
}
VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class Value:
    """An array in registers: its name, the axes of its dims, and the kind of its elements."""

    name: str
    axes: tuple[int, ...]
    kind: str


@dataclass
class Text:
    """Lines under construction, with their indentation."""

    lines: list[str] = field(default_factory=list)
    depth: int = 0

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def open(self, text: str = "") -> None:
        self.line(f"{text} {{" if text else "{")
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1
        self.line("}")


def base_of(node: Node) -> Node:
    """The value behind views."""
    while node.op in VIEWS:
        node = node.inputs[0]
    return node


@dataclass(frozen=True, slots=True)
class State:
    """An accumulator, or the peak of a running maximum, as it is joined across groups."""

    op: Op
    value: Value
    peak: Value | None = None


class Values:
    """Prints the values of one block graph.

    Attributes:
        register_limit: elements of a value in a thread.
        tag: prefix of every name, so that two block graphs can share a kernel.
        pointers: the C expression of each param's and result's address.
        threads: threads that run the text (a power of two where a layout spreads folds over warps).
        early, late: products of a loop whose iterations overlap (`ahead`): those that begin an
            iteration, and those that end it beside the next one's beginning.
        carried, later, finish: what late products need outside the loop, the products, and what
            must wait for those of the iteration before; `kept`: their left operands' values.
    """

    register_limit = REGISTER_LIMIT

    def __init__(
        self,
        block: BlockGraph,
        params: Sequence[Operand],
        results: Sequence[Operand],
        tag: str,
        pointers: tuple[Sequence[str], Sequence[str]],
        threads: int,
    ) -> None:
        self.block, self.params, self.results, self.tag = block, params, results, tag
        self.param_names, self.result_names = pointers
        self.threads = threads
        self.axes = Axes(block)
        self.phase = block.info.phase
        self.out = {p: Text() for p in Phase}
        self.known: dict[tuple[Node, Layout], Value] = {}
        self.users: dict[Node, list[Node]] = {n: [] for n in block.body}
        for node in block.body:
            for child in node.inputs:
                self.users[child].append(node)
        self.stored = {s.value for s in block.stores}
        self.loop_needs = self._loop_needs()
        self.count = 0
        self.made: dict[tuple[Node, Layout, str], Value] = {}
        self.looped = any(p is not Phase.INVARIANT for p in self.phase.values())
        self.states: list[State] = []
        self.pending: list[tuple[Op, Value, int, Layout]] = []
        self.layouts: dict[str, Layout] = {}
        self.owners: dict[str, Node] = {}
        self.decay: dict[Node, Value] = {}
        self.peak: dict[Node, Value] = {}
        self.exchange = 0  # bytes of shared memory for folds across warps
        self.early: tuple[Node, ...] = ()
        self.late: tuple[Node, ...] = ()
        self.carried, self.later, self.finish = Text(), Text(), Text()
        self.kept: list[str] = []

    # ---- names and phases

    def _loop_needs(self) -> set[Node]:
        """Values from before the loop that iterations read."""
        need: set[Node] = set()
        stack = [n for n in self.block.body if self.phase[n] is Phase.LOOP or n.op in ACCUMULATORS]
        while stack:
            for i in stack.pop().inputs:
                if i not in need:
                    need.add(i)
                    stack.append(i)
        return need

    def when(self, node: Node) -> Phase:
        """The phase whose text computes a value."""
        phase = self.phase[node]
        if phase is Phase.INVARIANT and self.looped and node not in self.loop_needs:
            return Phase.POST
        return phase

    def name(self, stem: str = "v") -> str:
        self.count += 1
        return f"{self.tag}{stem}{self.count}"

    def part(self, axis: int) -> str:
        """How much of an axis is there, as text."""
        a = self.axes.axes[axis]
        return str(a.extent) if a.split is None else self.tag + split_name(a.split)

    def guard(self, axis: int, layout: Layout) -> str:
        """True at elements that exist; "" where all do."""
        dim = layout.dim(axis)
        if dim.exact and self.axes.axes[axis].split is None:
            return ""
        return f"{self.index(axis, layout)} < {self.part(axis)}"

    def index(self, axis: int, layout: Layout) -> str:
        """The element index along an axis at the current register."""
        return layout.dim(axis).index.format(r=f"r{axis}")

    def declare(self, text: Text, value: Value, layout: Layout, start: str = "") -> None:
        sizes = [layout.dim(a).registers for a in value.axes]
        if prod(sizes) > self.register_limit:
            raise Infeasible(f"{prod(sizes)} registers of a thread for one tile")
        dims = "".join(f"[{n}]" for n in sizes)
        text.line(f"{KIND_TYPE[value.kind]} {value.name}{dims};")
        if start:
            self.nest(text, value.axes, layout)
            text.line(f"{self.at(value)} = {start};")
            self.unnest(text, value.axes)

    def nest(self, text: Text, axes: Sequence[int], layout: Layout) -> None:
        """Open unrolled loops over the registers along axes."""
        for a in axes:
            text.line("#pragma unroll")
            text.open(f"for (int r{a} = 0; r{a} < {layout.dim(a).registers}; r{a}++)")

    def unnest(self, text: Text, axes: Sequence[int]) -> None:
        for _ in axes:
            text.close()

    def at(self, value: Value) -> str:
        """The element of a value at the current registers."""
        return value.name + "".join(f"[r{a}]" for a in value.axes)

    # ---- values

    def value(self, node: Node, layout: Layout) -> Value:
        """The array that holds `node` in `layout`, computed on first demand."""
        node = base_of(node)
        key = (node, layout)
        if key in self.known:
            return self.known[key]
        text = self.out[self.when(node)]
        match node.op:
            case Op.LOAD:
                found = self.load(node, layout, text)
            case Op.SUM | Op.REDUCE_MAX:
                found = self.fold(node, layout, text)
            case Op.MATMUL:
                found = self.product(node, layout, text)
            case Op.RUNNING_MAX:
                found = self.running(node, layout)
            case op if op in ACCUMULATORS:
                found = self.accumulator(node, layout)
            case op if op in ELEMENTWISE or op is Op.IOTA:
                found = self.elementwise(node, layout, text)
            case _:
                raise Infeasible(f"{node.op.value} has no place in registers")
        self.known[key] = found
        return found

    def product(self, node: Node, layout: Layout, text: Text) -> Value:
        raise Infeasible("a product has no place in this layout")

    def multiply(self, node: Node, value: Value, text: Text, fresh: bool) -> None:
        """value (+)= the product `node`."""
        raise Infeasible("a product has no place in this layout")

    def by_two(self, node: Node) -> bool:
        """Whether a value is held in units of log 2, for the power of two that it is raised to."""
        return False

    # ---- the loop's values

    def running(self, node: Node, layout: Layout) -> Value:
        x = self.value(node.inputs[0], layout)
        before, text = self.out[Phase.INVARIANT], self.out[Phase.LOOP]
        state = Value(self.name("peak"), x.axes, "f")
        self.declare(before, state, layout, self.neutral(Op.REDUCE_MAX, "f"))
        now, decay = (Value(self.name(s), x.axes, "f") for s in ("now", "decay"))
        self.declare(text, now, layout)
        self.declare(text, decay, layout)
        self.nest(text, x.axes, layout)
        text.line(f"{self.at(now)} = fmaxf({self.at(state)}, {self.at(x)});")
        text.line(f"{self.at(decay)} = ob_decay({self.at(state)}, {self.at(now)});")
        text.line(f"{self.at(state)} = {self.at(now)};")
        self.unnest(text, x.axes)
        self.decay[node], self.peak[node] = decay, state
        self.layouts[state.name] = layout
        self.states.append(State(Op.RUNNING_MAX, state))
        return now

    def accumulator(self, node: Node, layout: Layout) -> Value:
        x = base_of(node.inputs[0])
        before, text = self.out[Phase.INVARIANT], self.out[Phase.LOOP]
        axes = layout.sorted(self.axes.known(node))
        kind = kind_of(node.dtype)
        if kind != "f":
            raise Infeasible("an accumulator of integers")
        state = Value(self.name("sum" if node.op is not Op.ACCUM_MAX else "max"), axes, kind)
        self.declare(
            before,
            state,
            layout,
            self.neutral(node.op if node.op is Op.ACCUM_MAX else Op.SUM, kind),
        )
        peak = None
        if node.op is Op.ACCUM_RESCALE:
            self.value(node.inputs[1], layout)
            peak = self.peak[node.inputs[1]]
        alone = len(self.users[x]) == 1 and x not in self.stored
        deferred = None
        part: Value | None = None
        if x.op is Op.MATMUL and alone and node.op is not Op.ACCUM_MAX:
            pass
        elif x.op in (Op.SUM, Op.REDUCE_MAX) and alone and self.fold_op(node) is x.op:
            axis = self.axes.of[x.inputs[0]][x.attrs.axis]
            part = self.fold(x, layout, text, across=False)
            deferred = axis
        else:
            part = self.value(x, layout)
        if peak is not None:
            decay = self.decay[node.inputs[1]]
            home = self.finish if x in self.late else text
            self.nest(home, axes, layout)
            home.line(f"{self.at(state)} *= {self.at(decay)};")
            self.unnest(home, axes)
        if part is None:
            self.multiply(x, state, text, False)
        else:
            self.nest(text, axes, layout)
            joined = self.join(self.fold_op(node), kind, self.at(state), self.at(part))
            text.line(f"{self.at(state)} = {joined};")
            self.unnest(text, axes)
        if deferred is not None:
            self.pending.append((self.fold_op(node), state, deferred, layout))
        self.layouts[state.name] = layout
        self.owners[state.name] = node
        self.states.append(State(node.op, state, peak))
        return state

    def fold_op(self, node: Node) -> Op:
        return Op.REDUCE_MAX if node.op is Op.ACCUM_MAX else Op.SUM

    def finish_folds(self, text: Text) -> None:
        """Folds that each thread kept its part of through the loop."""
        for op, value, axis, layout in self.pending:
            self.fold_across(op, value, axis, layout, text)

    def split_lines(self, loop: bool) -> list[str]:
        found = {a.split for a in self.axes.axes if a.split is not None}
        ordered = sorted(found, key=lambda s: (s.full, -1 if s.axis is None else s.axis, s.loop))
        return [
            split_line(s, self.block.grid, self.block.loop, "it", self.tag)
            for s in ordered
            if s.loop == loop
        ]

    def narrow(self, node: Node) -> bool:
        """Whether fast approximations are exact enough: results of 16 bits or fewer."""
        return all(
            s.dtype in (DType.F16, DType.BF16, DType.F8E4M3) for s in self.block.stores
        ) or node.dtype in (DType.F16, DType.BF16, DType.F8E4M3)

    def scalar(self, node: Node, layout: Layout, want: str, inside: frozenset[int]) -> str:
        """`node` at the current registers as an expression of a kind; `inside`: axes of the loops
        around it. Expressions of one use are written in place.
        """
        node = base_of(node)
        if node.op is Op.CONST:
            return literal(node.attrs.value, want)
        if node.op is Op.SIZE:
            return literal(float(size_value(node)), want)
        single = len(self.users[node]) == 1 and node not in self.stored
        same = frozenset(self.axes.known(node)) == inside
        if (
            node.op in ELEMENTWISE
            and single
            and same
            and (node, layout) not in self.known
            and self.when(node) is self.when(self.users[node][0])
        ):
            return f"({self.expression(node, layout, want, inside)})"
        v = self.value(node, layout)
        return convert(self.at(v), v.kind, want)

    def expression(self, node: Node, layout: Layout, want: str, inside: frozenset[int]) -> str:
        """An elementwise operator at the current registers."""
        kind_here = kind_of(node.dtype)
        if node.op is Op.IOTA:
            axis = self.axes.of[node][node.attrs.axis]
            return convert("0" if axis is None else f"({self.index(axis, layout)})", "i", want)
        if node.op is Op.CAST:
            text = self.scalar(node.inputs[0], layout, kind_here, inside)
        else:
            picked = node.inputs[1:] if node.op is Op.WHERE else node.inputs
            operands = [
                (
                    b.dtype,
                    b.attrs.value
                    if b.op is Op.CONST
                    else float(size_value(b))
                    if b.op is Op.SIZE
                    else None,
                )
                for b in map(base_of, picked)
            ]
            kind = meeting_kind(operands, "f" if node.op is Op.LESS else kind_here)
            below = self.below(node, layout, inside) if kind == "f" else ""
            args = [] if below else [self.scalar(picked[0], layout, kind, inside)]
            inverse = self.inverse(node, layout, inside) if kind == "f" else ""
            if not below and not inverse:
                args += [self.scalar(x, layout, kind, inside) for x in picked[1:]]
            if node.op is Op.WHERE:
                args.insert(0, self.scalar(node.inputs[0], layout, "m", inside))
            have = "m" if node.op is Op.LESS else kind
            if below:
                text = below
            elif inverse:
                text = f"{args[0]} * {inverse}"
            elif node.op is Op.EXP and self.by_two(base_of(node.inputs[0])):
                text = f"ob_exp2({args[0]})"
            elif kind == "f" and self.narrow(node) and node.op in FAST:
                text = f"{FAST[node.op]}({', '.join(args)})"
            elif kind == "f" and self.narrow(node) and node.op is Op.DIV:
                text = f"__fdividef({args[0]}, {args[1]})"
            else:
                text = operator(node.op, args)
            text = convert(f"({text})" if node.op is Op.WHERE else text, have, kind_here)
        if node.dtype is DType.I8:
            text = f"ob_wrap8({text})"
        return convert(text, kind_here, want)

    def derived(self, node: Node, layout: Layout, stem: str, form: str) -> str:
        """An array made once from a value of few axes, at the current registers; `form` is an
        expression over {0}.
        """
        key = (node, layout, stem)
        if key not in self.made:
            v = self.value(node, layout)
            text = self.out[self.when(node)]
            made = Value(self.name(stem), v.axes, "f")
            self.declare(text, made, layout)
            self.nest(text, v.axes, layout)
            text.line(f"{self.at(made)} = {form.format(self.at(v))};")
            self.unnest(text, v.axes)
            self.made[key] = made
        return self.at(self.made[key])

    def few(self, node: Node, inside: frozenset[int]) -> bool:
        """Whether a value is shared by many elements of the tile around it."""
        base = base_of(node)
        return base.op not in (Op.CONST, Op.SIZE) and frozenset(self.axes.known(base)) < inside

    def below(self, node: Node, layout: Layout, inside: frozenset[int]) -> str:
        """exp(a - peak of a row) as one multiply-add and one power of two; "" for other forms."""
        if node.op is not Op.EXP or not self.narrow(node):
            return ""
        gap = base_of(node.inputs[0])
        if gap.op is not Op.SUB or len(self.users[gap]) != 1 or gap in self.stored:
            return ""
        if frozenset(self.axes.known(gap)) != inside or not self.few(gap.inputs[1], inside):
            return ""
        if kind_of(gap.inputs[1].dtype) != "f" or (gap, layout) in self.known:
            return ""
        a = self.scalar(gap.inputs[0], layout, "f", inside)
        peak = self.derived(base_of(gap.inputs[1]), layout, "log", "{0} * OB_LOG2E")
        return f"ob_exp_below({a}, {peak})"

    def inverse(self, node: Node, layout: Layout, inside: frozenset[int]) -> str:
        """The reciprocal of a divisor that many elements share; "" for other forms."""
        if node.op is not Op.DIV or not self.narrow(node) or not self.few(node.inputs[1], inside):
            return ""
        if kind_of(node.inputs[1].dtype) != "f":
            return ""
        return self.reciprocal(base_of(node.inputs[1]), layout)

    def reciprocal(self, node: Node, layout: Layout) -> str:
        """1 / value at the current registers, made once; of a root, in one step."""
        alone = len(self.users[node]) == 1 and node not in self.stored
        if node.op is Op.SQRT and alone and (node, layout) not in self.known:
            root = base_of(node.inputs[0])
            return self.derived(root, layout, "root", "ob_fast_inverse_root({0})")
        return self.derived(node, layout, "inv", "ob_fast_inverse({0})")

    def elementwise(self, node: Node, layout: Layout, text: Text) -> Value:
        axes = layout.sorted(self.axes.known(node))
        kind = kind_of(node.dtype)
        value = Value(self.name(), axes, kind)
        body = self.expression(node, layout, kind, frozenset(axes))  # operands are declared first
        self.declare(text, value, layout)
        self.nest(text, axes, layout)
        text.line(f"{self.at(value)} = {body};")
        self.unnest(text, axes)
        return value

    def neutral(self, op: Op, kind: str) -> str:
        if op in (Op.SUM, Op.ACCUM_SUM):
            return literal(0.0, kind)
        return literal(float("-inf") if kind in "fd" else -(2.0**31), kind)

    def join(self, op: Op, kind: str, a: str, b: str) -> str:
        if op in (Op.SUM, Op.ACCUM_SUM):
            return f"{a} + {b}"
        return f"ob_fast_max({a}, {b})" if kind == "f" else f"ob_max({a}, {b})"

    def fold(self, node: Node, layout: Layout, text: Text, across: bool = True) -> Value:
        """A sum or maximum along an axis; `across` False leaves each thread with its own part."""
        operand = node.inputs[0]
        axis = self.axes.of[operand][node.attrs.axis]
        kind = kind_of(node.dtype)
        if axis is None:
            return self.value(operand, layout)
        inner = layout.sorted(self.axes.known(operand))
        if axis not in self.axes.known(base_of(operand)):
            raise Infeasible("a fold along a broadcast axis")
        axes = tuple(a for a in inner if a != axis)
        value = Value(self.name("s" if node.op is Op.SUM else "m"), axes, kind)
        body = self.scalar(operand, layout, kind, frozenset(inner))
        parts = self.fold_parts(axes, axis, layout)
        start = self.neutral(node.op, kind)
        self.declare(text, value, layout, start if parts == 1 else "")
        into = self.at(value)
        if parts > 1:  # sums that do not wait for each other
            name = self.name("part")
            sizes = "".join(f"[{layout.dim(a).registers}]" for a in axes)
            text.line(f"{KIND_TYPE[kind]} {name}{sizes}[{parts}];")
            places = "".join(f"[r{a}]" for a in axes)
            self.nest(text, axes, layout)
            text.line("#pragma unroll")
            text.line(f"for (int i = 0; i < {parts}; i++) {name}{places}[i] = {start};")
            self.unnest(text, axes)
            into = f"{name}{places}[r{axis} % {parts}]"
        self.nest(text, inner, layout)
        guard = self.guard(axis, layout)
        if guard:
            body = f"({guard}) ? {body} : {start}"
        joined = self.join(node.op, kind, into, f"({body})" if guard else body)
        text.line(f"{into} = {joined};")
        self.unnest(text, inner)
        if parts > 1:
            one, two = (
                self.join(node.op, kind, f"{name}{places}[{i}]", f"{name}{places}[{i + 1}]")
                for i in (0, 2)
            )
            self.nest(text, axes, layout)
            text.line(f"{self.at(value)} = {self.join(node.op, kind, f'({one})', f'({two})')};")
            self.unnest(text, axes)
        if across:
            self.fold_across(node.op, value, axis, layout, text)
        return value

    def fold_parts(self, kept: Sequence[int], axis: int, layout: Layout) -> int:
        """In how many partial results a thread folds its registers: an addition takes four cycles,
        and those into one result follow each other. Where a thread has one result of many elements.
        """
        alone = prod(layout.dim(a).registers for a in kept) == 1
        count = layout.dim(axis).registers
        return 4 if layout.apart and alone and count >= 16 and count % 4 == 0 else 1

    def fold_across(self, op: Op, value: Value, axis: int, layout: Layout, text: Text) -> None:
        """Join the parts of a fold that the threads hold."""
        dim = layout.dim(axis)
        first, last = dim.lanes
        fold = "ob_sum_fold" if op in (Op.SUM, Op.ACCUM_SUM) else "ob_max_fold"
        if first:
            self.nest(text, value.axes, layout)
            text.line(
                f"{self.at(value)} = ob_lane_fold<{fold}, {first}, {last}>({self.at(value)});"
            )
            self.unnest(text, value.axes)
        warps, step = dim.warps
        if warps == 1:
            return
        regs = prod(layout.dim(a).registers for a in value.axes)
        self.exchange = max(self.exchange, 4 * regs * self.threads)
        if value.kind != "f":
            raise Infeasible("a fold of integers across warps")
        flat, size = "0", 1
        for a in reversed(value.axes):
            flat = f"r{a} * {size} + {flat}" if size > 1 else f"r{a}"
            size *= layout.dim(a).registers
        text.line("__syncthreads();")
        self.nest(text, value.axes, layout)
        text.line(f"{self.tag}exchange[({flat}) * {self.threads} + thread] = {self.at(value)};")
        self.unnest(text, value.axes)
        text.line("__syncthreads();")
        text.open()
        self.nest(text, value.axes, layout)
        low = WARP * step
        text.line(f"const int home = thread & ~{(warps - 1) * low};")
        text.line(f"float all = {self.neutral(op, 'f')};")
        text.line("#pragma unroll")
        text.line(
            f"for (int w = 0; w < {warps}; w++) all = "
            + self.join(
                op, "f", "all", f"{self.tag}exchange[({flat}) * {self.threads} + home + w * {low}]"
            )
            + ";"
        )
        text.line(f"{self.at(value)} = all;")
        self.unnest(text, value.axes)
        text.close()

    # ---- device memory

    def steps(self, moves: Sequence[int]) -> str:
        """The offset of the current block and iteration."""
        parts = []
        for a, step in enumerate(moves[:-1]):
            if step and self.block.grid[a] > 1:
                parts.append(f"{self.tag}g{a} * {step}ll")
        if moves[-1] and self.block.loop > 1:
            parts.append(f"it * {moves[-1]}ll")
        return " + ".join(parts)

    def load_moves(self, node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Strides of a load's dims, and elements per step of each grid axis and iteration."""
        at: LoadAttrs = node.attrs
        strides = self.params[at.index].strides
        return strides, load_moves(node, strides)

    def store_moves(self, j: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The same for a store. Partial results have the number of the folded block in front."""
        strides = self.results[j].strides
        return strides, store_moves(self.block, j, strides)

    def vector(
        self, node: Node, dtype: DType, strides: Sequence[int], moves: Sequence[int], layout: Layout
    ) -> int:
        """Elements that can be read or written at once along the layout's last axis."""
        axes = self.axes.of[node]
        known = layout.sorted(self.axes.known(node))
        if not known:
            return 1
        axis = known[-1]
        dim = layout.dim(axis)
        d = axes.index(axis)
        if strides[d] != 1 or dim.axis.split is not None:
            return 1
        others = [s for e, s in enumerate(strides) if e != d and axes[e] is not None] + [*moves]
        size = int(dtype.nbytes)
        n = dim.vector
        while n > 1:
            if (
                n * size in (4, 8, VECTOR_BYTES)
                and dim.axis.extent % n == 0
                and all(s % n == 0 for s in others)
            ):
                return n
            n //= 2
        return 1

    def address(self, node: Node, strides: Sequence[int], layout: Layout) -> str:
        """The element offset at the current registers."""
        parts = []
        for d, a in enumerate(self.axes.of[node]):
            if a is None or strides[d] == 0:
                continue
            text = f"({self.index(a, layout)})"
            parts.append(text if strides[d] == 1 else f"{text} * {strides[d]}ll")
        return " + ".join(parts) or "0"

    def load_start(self, moves: Sequence[int]) -> str:
        """Where the current block's and iteration's part of a param begins."""
        return self.steps(moves)

    def store_start(self, j: int, moves: Sequence[int]) -> str:
        """Where the current block's and iteration's part of a result begins."""
        return self.steps(moves)

    def nested(self, j: int, text: Text) -> int:
        """Opens loops around the writing of an element of a result; how many."""
        return 0

    def target(self, j: int, base: str, strides: Sequence[int], layout: Layout) -> str:
        """The address of a result's element at the current registers."""
        return f"{base} + {self.address(self.block.stores[j].value, strides, layout)}"

    def element(self, node: Node, base: str, strides: Sequence[int], layout: Layout) -> str:
        """The address of a load's element at the current registers."""
        return f"{base} + {self.address(node, strides, layout)}"

    def load(self, node: Node, layout: Layout, text: Text) -> Value:
        """A tile from device memory straight to registers; what does not exist is 0."""
        axes = layout.sorted(self.axes.known(node))
        dtype = node.attrs.dtype
        kind = kind_of(dtype)
        value = Value(self.name("x"), axes, kind)
        strides, moves = self.load_moves(node)
        n = self.vector(node, dtype, strides, moves, layout) if kind == "f" else 1
        while self.params[node.attrs.index].start % n:
            n //= 2
        self.declare(text, value, layout)
        base = self.name("p")
        start = self.load_start(moves)
        pointer = self.param_names[node.attrs.index]
        text.line(f"const {CTYPE[dtype]} *{base} = {pointer}{' + ' + start if start else ''};")
        guards = [g for a in axes if (g := self.guard(a, layout))]
        self.loops(text, axes, layout, n)
        at = self.element(node, base, strides, layout)
        read = f"ob_read<{n}>(&{self.at(value)}, {at});" if n > 1 else ""
        if not read:
            read = f"{self.at(value)} = ob_{kind}(*({at}));"
        if guards:
            text.open(f"if ({' && '.join(guards)})")
            text.line(read)
            text.close()
            text.open("else")
            for i in range(n):
                last = f" + {i}" if i else ""
                ref = value.name + "".join(f"[r{a}]" for a in axes[:-1])
                ref += f"[r{axes[-1]}{last}]" if axes else ""
                text.line(f"{ref} = {literal(0.0, kind)};")
            text.close()
        else:
            text.line(read)
        self.unnest(text, axes)
        return value

    def loops(self, text: Text, axes: Sequence[int], layout: Layout, n: int) -> None:
        """`nest`, with `n` registers at a step along the last axis."""
        if n == 1:
            self.nest(text, axes, layout)
            return
        self.nest(text, axes[:-1], layout)
        a = axes[-1]
        text.line("#pragma unroll")
        text.open(f"for (int r{a} = 0; r{a} < {layout.dim(a).registers}; r{a} += {n})")

    def store(self, j: int, layout: Layout) -> None:
        """Write a result."""
        store = self.block.stores[j]
        node, dtype = store.value, self.results[j].dtype
        phase = self.when(base_of(node))
        if self.looped and phase is Phase.INVARIANT:
            phase = Phase.POST
        text = self.out[phase]
        base = base_of(node)
        axes = layout.sorted(self.axes.known(node))
        kind = kind_of(dtype)
        strides, moves = self.store_moves(j)
        plain = base.op not in (Op.CONST, Op.SIZE)
        value = self.value(base, layout) if plain else None
        n = 1
        if value is not None and value.kind == kind == "f" and value.axes == axes:
            n = self.vector(node, dtype, strides, moves, layout)
        pointer, start = self.result_names[j], self.store_start(j, moves)
        name = self.name("y")
        text.line(f"{CTYPE[dtype]} *{name} = {pointer}{' + ' + start if start else ''};")
        # One thread writes an element: the first of those that hold it.
        spread = {layout.dim(a).lead for a in axes}
        leads = dict.fromkeys(layout.dim(a).lead for a in layout.order)
        guards = [lead for lead in leads if lead and lead not in spread]
        guards += [g for a in axes if (g := self.guard(a, layout))]
        self.loops(text, axes, layout, n)
        if guards:
            text.open(f"if ({' && '.join(guards)})")
        nested = self.nested(j, text)
        at = self.target(j, name, strides, layout)
        if n > 1 and value is not None:
            text.line(f"ob_write<{n}>({at}, &{self.at(value)});")
        else:
            item = (
                convert(self.at(value), value.kind, kind)
                if value is not None
                else self.scalar(base, layout, kind, frozenset())
            )
            text.line(f"ob_put({at}, {item});")
        for _ in range(nested + bool(guards)):
            text.close()
        self.unnest(text, axes)
