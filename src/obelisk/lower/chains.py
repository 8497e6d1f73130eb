"""Fused elementwise chains: how expressions become one loop nest, and when two nests become one.

`chain` and `reduction` turn a node into a `Chain` by inlining every elementwise operand that has no
memory of its own; `merge` joins chains over the same dims, so that a value is computed once and
used while it is in a register; `sweep` drops writes that nobody reads. Each rule keeps the meaning
exactly: only the order of independent points changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.ir.table import TABLE, Kind, size_value
from obelisk.lower.tile import (
    Access,
    Buffer,
    BufferKind,
    Chain,
    Extent,
    Mode,
    Scalar,
    Statement,
    View,
    Write,
    reads_of,
    writes_of,
)
from obelisk.lower.views import aligned

ELEMENTWISE = frozenset(
    op for op, row in TABLE.items() if row.kind in (Kind.UNARY, Kind.BINARY, Kind.TERNARY)
)
INLINE = ELEMENTWISE | {Op.CONST, Op.SIZE, Op.IOTA, Op.BROADCAST}
COSTLY = frozenset(
    {Op.EXP, Op.LOG, Op.TANH, Op.SIGMOID, Op.ERF, Op.SQRT, Op.RSQRT, Op.DIV}
)  # recomputing one of these for a second user costs more than a load


@dataclass
class Body:
    """Code under construction for one chain: values are shared, so a node met twice is computed
    once.
    """

    dims: tuple[Extent, ...]
    views: Mapping[Node, View]
    reads: list[Access] = field(default_factory=list)
    code: list[Scalar] = field(default_factory=list)
    known: dict[Node, int] = field(default_factory=dict)

    def add(self, scalar: Scalar) -> int:
        """The number of `scalar`, which is appended unless it is there."""
        if scalar in self.code:
            return self.code.index(scalar)
        self.code.append(scalar)
        return len(self.code) - 1

    def read(self, access: Access, node: Node) -> int:
        """The number of an operand read."""
        if access not in self.reads:
            self.reads.append(access)
        return self.add(Scalar(Op.ELEM, (), node.dtype, self.reads.index(access)))

    def value(self, root: Node) -> int:
        """The number of `root`'s value; inlines elementwise operands until it meets values with
        memory.
        """
        stack = [root]
        while stack:
            node = stack[-1]
            if node in self.known:
                stack.pop()
                continue
            if node in self.views:
                self.known[node] = self.read(aligned(self.views[node], self.dims), node)
            elif node.op is Op.CONST:
                self.known[node] = self.add(Scalar(Op.CONST, (), node.dtype, 0, node.attrs.value))
            elif node.op is Op.SIZE:
                self.known[node] = self.add(
                    Scalar(Op.CONST, (), node.dtype, 0, float(size_value(node)))
                )
            elif node.op is Op.IOTA:
                dim = len(self.dims) - node.rank + node.attrs.axis
                self.known[node] = (
                    self.add(Scalar(Op.CONST, (), node.dtype, 0, 0.0))
                    if node.shape[node.attrs.axis] == 1
                    else self.add(Scalar(Op.IOTA, (), node.dtype, dim))
                )
            else:
                missing = [i for i in node.inputs if i not in self.known]
                if missing:
                    stack.extend(missing)
                    continue
                args = tuple(self.known[i] for i in node.inputs)
                self.known[node] = (
                    args[0]
                    if node.op is Op.BROADCAST
                    else self.add(Scalar(node.op, args, node.dtype))
                )
        return self.known[root]


def chain(
    root: Node,
    dims: tuple[Extent, ...],
    views: Mapping[Node, View],
    target: View,
    mode: Mode = Mode.SET,
) -> Chain:
    """target = root (or target += root, ...), over `dims`, the extents of both."""
    dims = dims or (Extent(1),)
    body = Body(dims, views)
    number = body.value(root)
    write = Write(number, aligned(target, dims), None, mode)
    return Chain(dims, tuple(body.reads), tuple(body.code), (write,))


def reduction(
    node: Node,
    dims: tuple[Extent, ...],
    views: Mapping[Node, View],
    target: View,
    mode: Mode = Mode.SET,
) -> Chain:
    """target = sum or maximum of the operand of `node` (over the operand's extents `dims`) along
    its axis.

    With `keep` columns left the axis is seen as two dims (n / keep, keep), of which the first is
    folded.
    """
    axis, keep = node.attrs.axis, node.attrs.keep
    body = Body(dims, views)
    number = body.value(node.inputs[0])
    if keep == 1:
        access = aligned(target, dims)
        strides = tuple(0 if d == axis else s for d, s in enumerate(access.strides))
        write = Write(number, replace(access, strides=strides), node.op, mode)
        return Chain(dims, tuple(body.reads), tuple(body.code), (write,), axis)

    def split(strides: tuple[int, ...], outer: bool) -> tuple[int, ...]:
        s = strides[axis]
        return (*strides[:axis], s * keep if outer else 0, s, *strides[axis + 1 :])

    wide = (*dims[:axis], Extent(dims[axis].size // keep), Extent(keep), *dims[axis + 1 :])
    reads = [replace(r, strides=split(r.strides, True)) for r in body.reads]
    code = []
    for scalar in body.code:
        if scalar.op is Op.IOTA and scalar.place >= axis:
            if scalar.place == axis:  # index i*keep + j along the split axis
                raise AssertionError("an index along a split axis needs memory of its own")
            scalar = replace(scalar, place=scalar.place + 1)
        code.append(scalar)
    strides = split(
        tuple((0 if target.shape[d].size == 1 else target.strides[d]) for d in range(len(dims))),
        False,
    )
    access = Access(target.buffer, strides, target.offset, target.moves)
    return Chain(wide, tuple(reads), tuple(code), (Write(number, access, node.op, mode),), axis)


def merge(first: Chain, second: Chain) -> Chain | None:
    """One chain that does `first`, then `second`; None where a point of `second` needs more than
    its own point.

    `second` may read what `first` writes at the same place (it then takes the value from the
    register), and may overwrite what `first` reads or writes at the same place.
    """
    if first.dims != second.dims or first.skip_first or second.skip_first:
        return None
    if first.axis is not None and second.axis is not None and first.axis != second.axis:
        return None
    axis = first.axis if first.axis is not None else second.axis
    plain = {w.access: w.value for w in first.writes if w.fold is None and w.mode is Mode.SET}
    first_writes = {w.access.buffer for w in first.writes}
    for r in second.reads:
        if r.buffer in first_writes and r not in plain:
            return None
    for w in second.writes:
        touched = [a for a in first.reads if a.buffer == w.access.buffer]
        if any(a != w.access for a in touched) or (touched and w.fold is not None):
            return None
        if w.access.buffer in first_writes:
            return None
        if (
            w.fold is None
            and axis is not None
            and w.access.strides[axis] == 0
            and (first.dims[axis].size > 1)
        ):
            return None
    reads, code = list(first.reads), list(first.code)
    number: list[int] = []
    for scalar in second.code:
        if scalar.op is Op.ELEM:
            access = second.reads[scalar.place]
            if access in plain:
                number.append(plain[access])
                continue
            if access not in reads:
                reads.append(access)
            new = replace(scalar, place=reads.index(access))
        else:
            new = replace(scalar, args=tuple(number[a] for a in scalar.args))
        if new not in code:
            code.append(new)
        number.append(code.index(new))
    writes = [*first.writes, *(replace(w, value=number[w.value]) for w in second.writes)]
    return Chain(first.dims, tuple(reads), tuple(code), tuple(writes), axis)


def _conflict(moved: Statement, passed: Statement) -> bool:
    """Whether `moved` may not run before `passed`."""
    moved_w, passed_w = set(writes_of(moved)), set(writes_of(passed))
    moved_r, passed_r = set(reads_of(moved)), set(reads_of(passed))
    return bool(moved_w & passed_w or moved_w & passed_r or moved_r & passed_w)


def merge_all(statements: Sequence[Statement]) -> list[Statement]:
    """Merge each chain into the nearest earlier chain that takes it, past statements it does not
    depend on.
    """
    out: list[Statement] = []
    for statement in statements:
        placed = False
        if isinstance(statement, Chain):
            for i in range(len(out) - 1, -1, -1):
                earlier = out[i]
                if isinstance(earlier, Chain):
                    joined = merge(earlier, statement)
                    if joined is not None:
                        out[i] = joined
                        placed = True
                        break
                if _conflict(statement, earlier):
                    break
        if not placed:
            out.append(statement)
    return out


def prune(chain: Chain) -> Chain:
    """The chain without values and operands that no write needs, in a canonical numbering."""
    needed: set[int] = set()
    stack = [w.value for w in chain.writes]
    while stack:
        v = stack.pop()
        if v not in needed:
            needed.add(v)
            stack.extend(chain.code[v].args)
    order = sorted(needed)
    number = {v: i for i, v in enumerate(order)}
    places = sorted({chain.code[v].place for v in order if chain.code[v].op is Op.ELEM})
    code = []
    for v in order:
        s = chain.code[v]
        if s.op is Op.ELEM:
            code.append(replace(s, place=places.index(s.place)))
        else:
            code.append(replace(s, args=tuple(number[a] for a in s.args)))
    return replace(
        chain,
        reads=tuple(chain.reads[p] for p in places),
        code=tuple(code),
        writes=tuple(replace(w, value=number[w.value]) for w in chain.writes),
    )


def sweep(buffers: Sequence[Buffer], lists: Sequence[Sequence[Statement]]) -> list[list[Statement]]:
    """Drop writes to tiles that no statement reads, and statements that write nothing, until
    nothing changes.
    """
    current = [list(part) for part in lists]
    while True:
        read: set[int] = set()
        for part in current:
            for s in part:
                if isinstance(s, Chain):
                    read |= {r.buffer for r in s.reads}
                else:
                    read |= {s.a.buffer, s.b.buffer}

        def wanted(buffer: int, read: set[int] = read) -> bool:
            return buffers[buffer].kind is not BufferKind.TILE or buffer in read

        changed = False
        for p, part in enumerate(current):
            kept: list[Statement] = []
            for s in part:
                if isinstance(s, Chain):
                    writes = tuple(w for w in s.writes if wanted(w.access.buffer))
                    changed |= len(writes) != len(s.writes)
                    if writes:
                        kept.append(prune(replace(s, writes=writes)))
                elif wanted(s.c.buffer):
                    kept.append(s)
                else:
                    changed = True
            current[p] = kept
        if not changed:
            return current


def choose_vector(chain: Chain, lanes: int) -> int:
    """The dim that runs along vector lanes: the one with the fewest strided accesses, weighed by
    how full lanes are.

    A write that is strided costs more than a read; dims shorter than a vector waste lanes. Ties go
    to the innermost.
    """
    best, best_cost = len(chain.dims) - 1, float("inf")
    for d in range(len(chain.dims) - 1, -1, -1):
        n = chain.dims[d].size
        cost = 0.0
        for r in chain.reads:
            cost += 0.0 if r.strides[d] in (0, 1) else 4.0
        for w in chain.writes:
            s = w.access.strides[d]
            if w.fold is not None and d == chain.axis:
                cost += 0.5
            else:
                cost += 0.0 if s == 1 else 6.0
        waste = (-(-n // lanes) * lanes) / n  # at least 1: points computed per useful point
        cost = (cost + 1.0 + len(chain.code)) * waste
        if cost < best_cost - 1e-9:
            best, best_cost = d, cost
    return best


def _without(chain: Chain, gone: int, dims: tuple[Extent, ...]) -> Chain:
    """The chain with dim `gone` removed from every access; `dims` are the extents that are left."""

    def cut(a: Access) -> Access:
        return replace(a, strides=a.strides[:gone] + a.strides[gone + 1 :])

    return replace(
        chain,
        dims=dims,
        reads=tuple(cut(r) for r in chain.reads),
        writes=tuple(replace(w, access=cut(w.access)) for w in chain.writes),
        code=tuple(
            replace(s, place=s.place - 1) if s.op is Op.IOTA and s.place > gone else s
            for s in chain.code
        ),
        axis=chain.axis - 1 if chain.axis is not None and chain.axis > gone else chain.axis,
    )


def collapse(chain: Chain) -> Chain:
    """Join neighbouring dims that every access walks as one, so that loops are long and few.

    Dims whose tiles may be short, the folded dim and dims that are counted along stay as they are.
    """
    d = len(chain.dims) - 1
    while d >= 0 and len(chain.dims) > 1:
        fixed = {s.place for s in chain.code if s.op is Op.IOTA} | {chain.axis}
        dims = chain.dims
        if d not in fixed and dims[d] == Extent(1):
            chain = _without(chain, d, dims[:d] + dims[d + 1 :])
            d = min(d, len(chain.dims) - 1)
            continue
        if d > 0 and not fixed & {d, d - 1}:
            outer, inner = dims[d - 1], dims[d]
            accesses = [*chain.reads, *(w.access for w in chain.writes)]
            if (
                outer.split is None
                and inner.split is None
                and all(a.strides[d - 1] == a.strides[d] * inner.size for a in accesses)
            ):
                joined = Extent(outer.size * inner.size)
                chain = _without(chain, d - 1, (*dims[: d - 1], joined, *dims[d + 1 :]))
                d -= 1
                continue
        d -= 1
    return chain
