"""Graphs as scalar terms over named indices, the form in which the prover joins them.

A value becomes a formula for one of its elements: inputs at index expressions, sums and maxima over
index digits. The maps of block graphs become digits of those indices: a dim that a grid axis and
the loop cut is position = grid * chunk + loop * tile + place, a reading of the whole dim by three
digits, so that "partition, then reduce over blocks and iterations" is a sum over digits, and what
one side cuts the other side's sum is cut by as well. Sizes enter only as these alignments and as
the numbers that `size` nodes stand for. What has no such form raises `Unprovable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import inf

from obelisk.ir.block import BlockGraph, Reduce, Store, ceil_div, is_ragged, tile_extent
from obelisk.ir.dims import reshape_groups
from obelisk.ir.family import Linear
from obelisk.ir.graph import Graph
from obelisk.ir.node import Node
from obelisk.ir.op import LoadAttrs, Op, SizeScope
from obelisk.ir.table import size_value
from obelisk.verify.constants import meant

_MOST_TERMS = 6000


class Unprovable(Exception):
    """The graphs have no form in which the prover could join them; not a fault of theirs."""


class Var:
    """An index digit running over 0..extent-1.

    Attributes:
        extent: how many values it takes, at most.
        number: for a fixed order.
        clipped: it counts through tiles of which the last are short, so that its range depends on
            the other digits of its place.
        parts: once it was split: (stride, digit) pairs that make it up.
    """

    __slots__ = ("clipped", "extent", "number", "parts")

    def __init__(self, extent: int, number: int, clipped: bool) -> None:
        self.extent, self.number, self.clipped = extent, number, clipped
        self.parts: tuple[tuple[int, Var], ...] | None = None

    def leaves(self) -> list[tuple[int, Var]]:
        """The digits that it was split into, with strides; digits of extent 1 are left out."""
        if self.parts is None:
            return [(1, self)] if self.extent > 1 else []
        return [(s * below, v) for s, part in self.parts for below, v in part.leaves()]


Digit = tuple[int, Var]  # stride and digit


@dataclass(frozen=True, slots=True)
class Index:
    """The position offset + sum of stride * digit in a dim."""

    offset: int = 0
    digits: tuple[Digit, ...] = ()

    def scaled(self, stride: int) -> Index:
        """stride * self."""
        return Index(self.offset * stride, tuple((s * stride, v) for s, v in self.digits))

    def plus(self, other: Index) -> Index:
        """self + other."""
        return Index(self.offset + other.offset, self.digits + other.digits)

    def resolved(self) -> Index:
        """With every split digit replaced by its parts, largest stride first."""
        out = [(s * below, v) for s, var in self.digits for below, v in var.leaves()]
        return Index(self.offset, tuple(sorted(out, key=lambda d: (-d[0], d[1].number))))


ZERO = Index()


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A formula; equality is identity.

    Attributes:
        op: num, size, neg_inf, in, pos, add, mul, max, inv, exp, sqrt, sum, rmax, prefix_max or fn.
        args: operands.
        number: of a num.
        name: of a fn, or what a size is.
        source: number of the input of an in.
        at: where an in, pos or prefix_max reads, one index per dim.
        bound: digits that a sum or rmax runs over.
    """

    op: str
    args: tuple[Term, ...] = ()
    number: Fraction = Fraction(0)
    name: str = ""
    source: int = 0
    at: tuple[Index, ...] = ()
    bound: tuple[Var, ...] = ()


class NeedPieces(Exception):
    """A digit runs over the join of a concatenation: its binder must cut it at `cuts`."""

    def __init__(self, var: Var, cuts: tuple[int, ...]) -> None:
        super().__init__()
        self.var, self.cuts = var, cuts


def num(value: float) -> Term:
    """The number that a constant stands for; -inf is a constant without arithmetic."""
    if value == -inf:
        return Term("neg_inf")
    return Term("num", number=meant(float(value)))


ONE, MINUS = num(1), num(-1)

_LOWERED: dict[Op, Callable[..., Term]] = {
    Op.ADD: lambda a, b: Term("add", (a, b)),
    Op.SUB: lambda a, b: Term("add", (a, _negated(b))),
    Op.MUL: lambda a, b: Term("mul", (a, b)),
    Op.DIV: lambda a, b: Term("mul", (a, Term("inv", (b,)))),
    Op.MAX: lambda a, b: Term("max", (a, b)),
    Op.MIN: lambda a, b: _negated(Term("max", (_negated(a), _negated(b)))),
    Op.NEG: lambda a: _negated(a),
    Op.EXP: lambda a: Term("exp", (a,)),
    Op.SQRT: lambda a: Term("sqrt", (a,)),
    Op.RSQRT: lambda a: Term("inv", (Term("sqrt", (a,)),)),
    Op.SQUARE: lambda a: Term("mul", (a, a)),
    Op.SIGMOID: lambda a: _sigmoid(a),
    Op.TANH: lambda a: Term(
        "add", (Term("mul", (num(2), _sigmoid(Term("mul", (num(2), a))))), MINUS)
    ),
    Op.LOG: lambda a: Term("fn", (a,), name="log"),
    Op.ERF: lambda a: Term("fn", (a,), name="erf"),
    Op.LESS: lambda a, b: Term("fn", (a, b), name="less"),
    Op.WHERE: lambda c, a, b: Term("fn", (c, a, b), name="where"),
}


def _negated(a: Term) -> Term:
    return Term("mul", (MINUS, a))


def _sigmoid(a: Term) -> Term:
    return Term("inv", (Term("add", (ONE, Term("exp", (Term("mul", (MINUS, a)),)))),))


Indices = tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class _Scope:
    """Where a block-level value is read: the launch's operands, grid coordinates, iteration."""

    block: BlockGraph
    inputs: tuple[Node, ...]
    grid: tuple[Index, ...]
    loop: Index


class Translator:
    """Reads elements of graph values as terms; shared by program and candidate."""

    def __init__(self, varying: Mapping[tuple[int, int], Linear] | None = None) -> None:
        """`varying`: the (input, dim) whose extents are functions of a symbol: their sizes stay
        symbols.
        """
        self.varying = varying or {}
        self.count = 0
        self.memo: dict[object, Term] = {}
        self.extents: dict[tuple[int, int], int] = {}  # of input dims that are read
        self.families: list[tuple[Var, ...]] = []  # digits that share one clipped range
        self.symbols: dict[str, Term] = {}  # sizes that vary

    def var(self, extent: int, clipped: bool = False) -> Var:
        """A fresh digit."""
        self.count += 1
        return Var(extent, self.count, clipped)

    def cut(self, var: Var, strides: Sequence[tuple[int, int]]) -> None:
        """Split a whole dim's digit into clipped ones of the given (stride, extent)."""
        var.parts = tuple((s, self.var(n, clipped=True)) for s, n in strides)
        self.families.append(tuple(v for _, v in var.leaves()))

    def whole(self, extent: int) -> Index:
        """A fresh index over a dim."""
        return ZERO if extent == 1 else Index(0, ((1, self.var(extent)),))

    def halve(self, var: Var, low: int) -> tuple[Var, Var]:
        """Split a digit into high and low, the low one of extent `low`, which divides."""
        upper = self.var(var.extent // low, var.clipped)
        lower = self.var(low, var.clipped)
        var.parts = ((low, upper), (1, lower))
        return upper, lower

    def split(self, index: Index, boundary: int) -> tuple[Index, Index]:
        """index = high * boundary + low with low < boundary; splits digits where they straddle."""
        high: list[Digit] = []
        low: list[Digit] = []
        todo = list(index.resolved().digits)
        while todo:
            stride, var = todo.pop()
            if stride % boundary == 0:
                high.append((stride // boundary, var))
            elif stride * var.extent <= boundary:
                low.append((stride, var))
            else:
                inner = boundary // stride
                if boundary % stride or var.extent % inner:
                    raise Unprovable("cuts of one dim do not nest")
                upper, lower = self.halve(var, inner)
                todo += [(stride * inner, upper), (stride, lower)]
        rest = index.offset % boundary
        if rest + sum(s * (v.extent - 1) for s, v in low) >= boundary:
            raise Unprovable("a slice crosses a cut")
        return Index(index.offset // boundary, tuple(high)), Index(rest, tuple(low))

    # kernel level

    def value(self, node: Node, at: Indices, scope: _Scope | None = None) -> Term:
        """The element of `node` at indices `at` (one per dim; a dim of extent 1 is read at 0)."""
        at = tuple(ZERO if n == 1 else i.resolved() for n, i in zip(node.shape, at, strict=True))
        key = (node, at, scope)
        if key not in self.memo:
            if len(self.memo) > _MOST_TERMS:
                raise Unprovable("the formulas grow too large")
            self.memo[key] = self._value(node, at, scope)
        return self.memo[key]

    def _value(self, node: Node, at: Indices, scope: _Scope | None) -> Term:
        match node.op:
            case Op.INPUT:
                for d, n in enumerate(node.shape):
                    self.extents[(node.attrs.index, d)] = n
                return Term("in", source=node.attrs.index, at=at)
            case Op.CONST:
                return num(node.attrs.value)
            case Op.SIZE:
                return self._size(node, scope)
            case Op.IOTA:
                return Term("pos", at=(at[node.attrs.axis],))
            case Op.CAST:
                return self._cast(node, self.value(node.inputs[0], at, scope))
            case Op.SUM | Op.REDUCE_MAX:
                return self._reduce(node, at, scope)
            case Op.MATMUL:
                return self._matmul(node, at, scope)
            case Op.TRANSPOSE:
                source = [ZERO] * node.rank
                for d, p in enumerate(node.attrs.perm):
                    source[p] = at[d]
                return self.value(node.inputs[0], tuple(source), scope)
            case Op.BROADCAST:
                return self.value(node.inputs[0], self._aligned(node.inputs[0], at), scope)
            case Op.RESHAPE:
                return self._reshape(node, at, scope)
            case Op.SLICE:
                axis = node.attrs.axis
                moved = at[axis].plus(Index(node.attrs.start))
                return self.value(node.inputs[0], (*at[:axis], moved, *at[axis + 1 :]), scope)
            case Op.CONCAT:
                return self._concat(node, at, scope)
            case Op.BLOCK:
                return self._block(node, at)
            case Op.THREAD:
                return self._thread(node, at, scope)
            case Op.LOAD | Op.ACCUM_SUM | Op.ACCUM_MAX | Op.RUNNING_MAX | Op.ACCUM_RESCALE:
                assert scope is not None
                return self._looped(node, at, scope)
        operands = [self.value(i, self._aligned(i, at), scope) for i in node.inputs]
        return _LOWERED[node.op](*operands)

    def _size(self, node: Node, scope: _Scope | None) -> Term:
        """The number that a size node stands for; a symbol where it is the extent of a dim that
        varies.
        """
        number = size_value(node)
        (x,), axis = node.inputs, node.attrs.axis
        place: tuple[int, int] | None = None
        if scope is None:
            place = _origin(x, axis)
        elif node.attrs.scope is SizeScope.FULL and x.op is Op.LOAD:
            place = _origin(scope.inputs[x.attrs.index], axis)
        if place is None or place not in self.varying:
            return num(number)
        name = self.varying[place].spell("n")
        if name not in self.symbols:
            self.symbols[name] = Term("size", name=name)
        return self.symbols[name]

    @staticmethod
    def _aligned(operand: Node, at: Indices) -> Indices:
        """Indices of a broadcast operand: its dims are the last ones."""
        return at[len(at) - operand.rank :]

    @staticmethod
    def _cast(node: Node, value: Term) -> Term:
        if node.inputs[0].dtype.is_float and node.dtype.is_float:
            return value
        return Term("fn", (value,), name=f"cast_{node.inputs[0].dtype}_{node.dtype}")

    def fold(
        self, kind: str, extent: int, body: Callable[[Index], Term], clipped: bool = False
    ) -> Term:
        """The sum or maximum of `body` over a fresh index of `extent`."""
        if extent == 1:
            return body(ZERO)
        var = self.var(extent, clipped)
        try:
            return Term(kind, (body(Index(0, ((1, var),))),), bound=(var,))
        except NeedPieces as need:
            if need.var is not var or clipped:
                raise
            cuts = need.cuts
        parts: list[Term] = []
        ends = [0, *cuts, extent]
        for start, stop in pairwise(ends):
            piece = Index(start).plus(self.whole(stop - start))
            inner = body(piece)
            parts.append(Term(kind, (inner,), bound=tuple(v for _, v in piece.digits)))
        join = "add" if kind == "sum" else "max"
        out = parts[0]
        for part in parts[1:]:
            out = Term(join, (out, part))
        return out

    def _reduce(self, node: Node, at: Indices, scope: _Scope | None) -> Term:
        (x,) = node.inputs
        axis, keep = node.attrs.axis, node.attrs.keep
        kind = "sum" if node.op is Op.SUM else "rmax"

        def body(i: Index) -> Term:
            column = i.scaled(keep).plus(at[axis])
            return self.value(x, (*at[:axis], column, *at[axis + 1 :]), scope)

        return self.fold(kind, x.shape[axis] // keep, body, _short(x, axis, scope))

    def _matmul(self, node: Node, at: Indices, scope: _Scope | None) -> Term:
        a, b = node.inputs
        batch, row, column = at[:-2], at[-2], at[-1]

        def body(k: Index) -> Term:
            left = (*batch[len(batch) - a.rank + 2 :], row, k)
            right = (*batch[len(batch) - b.rank + 2 :], k, column)
            return Term("mul", (self.value(a, left, scope), self.value(b, right, scope)))

        clipped = _short(a, a.rank - 1, scope) or _short(b, b.rank - 2, scope)
        return self.fold("sum", a.shape[-1], body, clipped)

    def _reshape(self, node: Node, at: Indices, scope: _Scope | None) -> Term:
        (x,) = node.inputs
        source = [ZERO] * x.rank
        for ins, outs in reshape_groups(x.shape, node.shape):
            flat = ZERO
            for d in outs:
                flat = flat.scaled(node.shape[d]).plus(at[d])
            for d in reversed(ins[1:]):
                flat, source[d] = self.split(flat, x.shape[d])
            if ins:
                source[ins[0]] = flat
        return self.value(x, tuple(source), scope)

    def _concat(self, node: Node, at: Indices, scope: _Scope | None) -> Term:
        axis = node.attrs.axis
        index = at[axis]
        last = index.offset + sum(s * (v.extent - 1) for s, v in index.digits)
        start = 0
        for x in node.inputs:
            stop = start + x.shape[axis]
            if start <= index.offset and last < stop:
                moved = Index(index.offset - start, index.digits)
                return self.value(x, (*at[:axis], moved, *at[axis + 1 :]), scope)
            start = stop
        if len(index.digits) == 1 and index.digits[0][0] == 1:
            ends: list[int] = []
            total = 0
            for x in node.inputs[:-1]:
                total += x.shape[axis]
                if index.offset < total <= last:
                    ends.append(total - index.offset)
            raise NeedPieces(index.digits[0][1], tuple(ends))
        raise Unprovable("a concatenation is read through cuts that do not fit it")

    # block and thread level

    def _block(self, node: Node, at: Indices) -> Term:
        block: BlockGraph = node.attrs.block
        store: Store = block.stores[node.attrs.result]
        grid: list[Index | None] = [None] * len(block.grid)
        loop = ZERO
        inner: list[Index] = []
        for d, index in enumerate(at):
            tile = store.value.shape[d]
            axis = next((a for a, k in enumerate(store.omap) if k == d), None)
            parts = block.grid[axis] if axis is not None else 1
            turns = block.loop if store.fmap == d else 1
            high, turn, low = self._laid(index, node.shape[d], tile, parts, turns)
            if store.fmap == d:
                loop = turn
            if axis is not None:
                grid[axis] = high
            inner.append(low)
        return self._over_grid(block, store, node.inputs, grid, loop, tuple(inner))

    def _laid(
        self, index: Index, full: int, tile: int, parts: int, turns: int
    ) -> tuple[Index, Index, Index]:
        """Block, iteration and place of a position in a dim that blocks and iterations lay out."""
        if full == 1:
            return ZERO, ZERO, ZERO  # the first place of the first block, whatever the cut
        if parts * turns == 1:
            return ZERO, ZERO, index
        if tile * parts * turns == full:
            high, low = self.split(index, tile)
            block, turn = self.split(high, turns)
            return block, turn, low
        chunk = ceil_div(full, parts)
        wanted = [(chunk, parts), (tile, turns), (1, tile)]
        if len({w for w in wanted if w[1] > 1}) < sum(n > 1 for _, n in wanted):
            raise Unprovable("two digits of short tiles look alike")
        digits = index.resolved().digits
        if len(digits) == 1 and index.offset == 0:
            (stride, var) = digits[0]
            if stride == 1 and var.extent == full and not var.clipped:
                self.cut(var, wanted)
                digits = index.resolved().digits
        found = {(s, v.extent): Index(0, ((1, v),)) for s, v in digits if v.clipped}
        if (
            index.offset
            or len(found) < len(digits)
            or set(found) != {w for w in wanted if w[1] > 1}
        ):
            raise Unprovable("short tiles are read through another cut")
        block, turn, low = (found.get(w, ZERO) for w in wanted)
        return block, turn, low

    def _over_grid(
        self,
        block: BlockGraph,
        store: Store,
        inputs: tuple[Node, ...],
        grid: Sequence[Index | None],
        loop: Index,
        inner: Indices,
    ) -> Term:
        """Fold over the grid axes that the store does not lay out, then read the tile."""
        axis = next((a for a, coordinate in enumerate(grid) if coordinate is None), None)
        if axis is None:
            full = tuple(g for g in grid if g is not None)
            return self.value(store.value, inner, _Scope(block, inputs, full, loop))
        before, after = grid[:axis], grid[axis + 1 :]

        def at(g: Index) -> Term:
            return self._over_grid(block, store, inputs, [*before, g, *after], loop, inner)

        if block.grid[axis] == 1 or store.reduce is Reduce.NONE:
            return at(ZERO)
        kind = "sum" if store.reduce is Reduce.SUM else "rmax"
        return self.fold(kind, block.grid[axis], at)

    def _looped(self, node: Node, at: Indices, scope: _Scope) -> Term:
        block = scope.block
        if node.op is Op.LOAD:
            return self._load(node.attrs, at, scope)

        def each(x: Node, i: Index) -> Term:
            inside = _Scope(block, scope.inputs, scope.grid, i)
            return self.value(x, self._aligned(x, at), inside)

        match node.op:
            case Op.ACCUM_SUM:
                return self.fold("sum", block.loop, lambda i: each(node.inputs[0], i))
            case Op.ACCUM_MAX:
                return self.fold("rmax", block.loop, lambda i: each(node.inputs[0], i))
            case Op.RUNNING_MAX:
                if not scope.loop.digits:
                    return each(node.inputs[0], scope.loop)
                return Term("prefix_max", (each(node.inputs[0], scope.loop),), at=(scope.loop,))
        x, peak = node.inputs  # online softmax: sum over i of x_i * exp(peak_i - last peak)
        last = self.fold("rmax", block.loop, lambda i: each(peak.inputs[0], i))

        def rescaled(i: Index) -> Term:
            gap = Term("add", (each(peak, i), Term("mul", (MINUS, last))))
            return Term("mul", (each(x, i), Term("exp", (gap,))))

        return self.fold("sum", block.loop, rescaled)

    def _load(self, attrs: LoadAttrs, at: Indices, scope: _Scope) -> Term:
        source: list[Index] = []
        for d, (index, full) in enumerate(zip(at, attrs.full, strict=True)):
            axis = next((a for a, k in enumerate(attrs.imap) if k == d), None)
            loop = attrs.loop if attrs.fmap == d else 1
            parts = attrs.grid[axis] if axis is not None else 1
            tile, chunk = tile_extent(full, parts, loop), ceil_div(full, parts)
            if attrs.fmap == d:
                index = index.plus(scope.loop.scaled(tile))
            if axis is not None:
                index = index.plus(scope.grid[axis].scaled(chunk))
            if tile * loop * parts != full:
                digits = tuple(v for _, v in index.resolved().digits)
                for v in digits:
                    v.clipped = True
                self.families.append(digits)
            source.append(index)
        return self.value(scope.inputs[attrs.index], tuple(source))

    def _thread(self, node: Node, at: Indices, scope: _Scope | None) -> Term:
        graph = node.attrs.thread
        result = graph.results[node.attrs.result]
        return self._inside(result, at, node, scope)

    def _inside(self, inner: Node, at: Indices, launch: Node, scope: _Scope | None) -> Term:
        """A thread-level value: like a block-level one, but elements are the operands."""
        if inner.op is Op.ELEM:
            return self.value(launch.inputs[inner.attrs.index], at, scope)
        at = tuple(ZERO if n == 1 else i for n, i in zip(inner.shape, at, strict=True))
        match inner.op:
            case Op.CONST:
                return num(inner.attrs.value)
            case Op.SIZE:
                return num(size_value(inner))
            case Op.CAST:
                return self._cast(inner, self._inside(inner.inputs[0], at, launch, scope))
            case Op.SUM | Op.REDUCE_MAX:
                (x,) = inner.inputs
                axis, keep = inner.attrs.axis, inner.attrs.keep
                kind = "sum" if inner.op is Op.SUM else "rmax"

                def body(i: Index) -> Term:
                    column = i.scaled(keep).plus(at[axis])
                    whole = (*at[:axis], column, *at[axis + 1 :])
                    return self._inside(x, whole, launch, scope)

                from_end = axis - x.rank
                clipped = any(
                    _short(i, i.rank + from_end, scope)
                    for i in launch.inputs
                    if i.rank + from_end >= 0
                )
                return self.fold(kind, x.shape[axis] // keep, body, clipped)
        operands = [self._inside(i, self._aligned(i, at), launch, scope) for i in inner.inputs]
        return _LOWERED[inner.op](*operands)


def _origin(x: Node, axis: int) -> tuple[int, int] | None:
    """The input dim that an axis of a kernel-level value is, through operators that keep it."""
    while x.op is not Op.INPUT:
        if x.op is Op.TRANSPOSE:
            x, axis = x.inputs[0], x.attrs.perm[axis]
            continue
        if x.op is Op.MATMUL:
            a, c = x.inputs
            if axis == x.rank - 1:
                x, axis = c, c.rank - 1
            elif axis == x.rank - 2:
                x, axis = a, a.rank - 2
            else:
                return None
            continue
        reduced = x.op in (Op.SUM, Op.REDUCE_MAX)
        if (reduced and x.attrs.axis == axis) or not (
            reduced or x.op in _LOWERED or x.op is Op.CAST
        ):
            return None
        from_end = axis - x.rank
        wide = [
            i for i in x.inputs if i.rank + from_end >= 0 and i.shape[from_end] == x.shape[axis]
        ]
        if not wide:
            return None
        x, axis = wide[0], wide[0].rank + from_end
    return x.attrs.index, axis


def _short(x: Node, axis: int, scope: _Scope | None) -> bool:
    """Whether tiles of a block-level value are short along an axis."""
    if scope is None:
        return False
    block = scope.block
    return is_ragged(block.info.splits[x][axis], x.shape[axis], block.grid, block.loop)


@dataclass(frozen=True, slots=True)
class Goal:
    """Two terms for the output elements at `at`, over all values of its digits."""

    at: Indices
    program: Term
    candidate: Term


def goals(program: Graph, candidate: Graph, translator: Translator) -> list[Goal]:
    """What must be shown for the outputs to be equal: one goal per output, or per piece of an
    output where a concatenation cuts one of its dims.
    """
    out: list[Goal] = []
    for mine, theirs in zip(program.outputs, candidate.outputs, strict=True):
        todo = [tuple(translator.whole(n) for n in mine.shape)]
        while todo:
            at = todo.pop()
            try:
                out.append(Goal(at, translator.value(mine, at), translator.value(theirs, at)))
            except NeedPieces as need:
                todo += _pieces(at, need, translator)
    return out


def _pieces(at: Indices, need: NeedPieces, translator: Translator) -> list[Indices]:
    for d, index in enumerate(at):
        if any(v is need.var for _, v in index.digits):
            ends = [0, *need.cuts, need.var.extent]
            return [
                (
                    *at[:d],
                    Index(index.offset + start).plus(translator.whole(stop - start)),
                    *at[d + 1 :],
                )
                for start, stop in pairwise(ends)
            ]
    raise Unprovable("a concatenation is read through a sum that cannot be cut")
