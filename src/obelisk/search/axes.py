"""Named axes of a program segment: which dims of which tensors must be cut together.

A segment is a set of kernel-level operators between *leaves* (tensors that already lie in device
memory, and views of them) and *targets*. Union-find over the operators' dims gives each dim an
axis, or None where its extent is 1. Maps then need no enumeration per tensor: cutting an axis cuts
every tensor that has it, consistently.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from obelisk.ir import Node, Op
from obelisk.ir.table import TABLE, Kind

Axis = int
Dims = tuple[Axis | None, ...]
_FREE = (Op.CONST, Op.SIZE)
_STRUCTURE = (Op.RESHAPE, Op.BROADCAST, Op.SLICE, Op.CONCAT, Op.BLOCK)


@dataclass(frozen=True)
class Segment:
    """A searchable part of a program.

    Attributes:
        targets: the nodes to compute.
        leaves: tensors in device memory that it reads.
        nodes: its operators, operands first (targets included; constants and sizes too).
        dims: the axes of every leaf and node.
        extents: extent of each axis.
        reduced: axes that some operator sums over or takes a maximum over.
        inner: axes that no target has.
    """

    targets: tuple[Node, ...]
    leaves: tuple[Node, ...]
    nodes: tuple[Node, ...]
    dims: dict[Node, Dims]
    extents: tuple[int, ...]
    reduced: frozenset[Axis]
    inner: frozenset[Axis]

    @property
    def ops(self) -> frozenset[Op]:
        """The operators that occur."""
        return frozenset(n.op for n in self.nodes)

    def key(self) -> str:
        """A text that is equal for segments that differ only in which tensors they read."""
        number = {leaf: i for i, leaf in enumerate(self.leaves)}
        lines = [f"leaf{i}:{x.shape}:{x.dtype}:{self.dims[x]}" for i, x in enumerate(self.leaves)]
        for node in self.nodes:
            number[node] = len(number)
            reads = ",".join(str(number[i]) for i in node.inputs)
            lines.append(f"{number[node]}={node.op.value}({reads}){node.attrs}:{node.shape}")
        return ";".join(lines) + "->" + ",".join(str(number[t]) for t in self.targets)


def _between(targets: Sequence[Node], leaves: Container[Node]) -> tuple[list[Node], list[Node]]:
    """Operators and leaves below the targets."""
    nodes: list[Node] = []
    found: list[Node] = []
    done: set[Node] = set()

    def visit(node: Node) -> None:
        stack: list[tuple[Node, int]] = [(node, 0)]
        while stack:
            n, i = stack.pop()
            if i == 0:
                if n in done:
                    continue
                if n in leaves or n.op is Op.IOTA:
                    done.add(n)
                    found.append(n)
                    continue
            below = () if n.op is Op.SIZE else n.inputs
            if i < len(below):
                stack.append((n, i + 1))
                if below[i] not in done:
                    stack.append((below[i], 0))
            elif n not in done:
                done.add(n)
                nodes.append(n)

    for t in targets:
        visit(t)
    return nodes, found


class _Union:
    def __init__(self) -> None:
        self.parent: dict[object, object] = {}

    def find(self, x: object) -> object:
        self.parent.setdefault(x, x)
        while self.parent[x] is not x:
            self.parent[x] = self.parent[self.parent[x]]
            x = self.parent[x]
        return x

    def join(self, a: object, b: object) -> None:
        ra, rb = self.find(a), self.find(b)
        if ra is not rb:
            self.parent[rb] = ra


def make_segment(targets: Sequence[Node], leaves: Container[Node]) -> Segment | str:
    """The segment between leaves (what `in` says) and targets, or the reason why it cannot be
    searched as one kernel.
    """
    nodes, found = _between(targets, leaves)
    for node in nodes:
        if node.op in _STRUCTURE or node.op is Op.INPUT:
            return f"{node.op.value} of a value that is not in device memory"
        if node.op in (Op.SUM, Op.REDUCE_MAX) and node.attrs.keep != 1:
            return f"{node.op.value} to {node.attrs.keep} columns"
        if node.op is Op.CAST and not (node.dtype.is_float and node.inputs[0].dtype.is_float):
            return "cast between integers and floats"
    for node in nodes:
        if node.op is Op.SIZE and node.inputs[0] not in {*found, *nodes}:
            return "the size of a tensor outside the segment"
    named = _name(found, nodes, _ties(targets, frozenset(found)))
    if isinstance(named, str):
        named = _name(found, nodes, [])
    if isinstance(named, str):
        return named
    dims, extents = named
    kept = {a for t in targets for a in dims[t] if a is not None}
    inner = frozenset(range(len(extents))) - kept
    reduced = frozenset(a for n in nodes if (a := reduced_axis(n, dims)) is not None)
    return Segment(tuple(targets), tuple(found), tuple(nodes), dims, tuple(extents), reduced, inner)


Place = tuple[Node, int]  # a dim of a tensor


def _name(
    leaves: Sequence[Node], nodes: Sequence[Node], ties: Sequence[tuple[Place, Place]]
) -> tuple[dict[Node, Dims], list[int]] | str:
    """The axes of every tensor and their extents, with some dims tied; or why there are none."""
    union = _Union()
    for node in nodes:
        _unify(union, node)
    for a, b in ties:
        union.join(a, b)
    names: dict[object, Axis] = {}
    extents: list[int] = []
    unequal: set[Axis] = set()
    dims: dict[Node, Dims] = {}
    for node in [*leaves, *nodes]:
        out: list[Axis | None] = []
        for d, n in enumerate(node.shape):
            if n == 1:
                out.append(None)
                continue
            root = union.find((node, d))
            axis = names.setdefault(root, len(extents))
            if axis == len(extents):
                extents.append(n)
            if n != extents[axis]:
                unequal.add(axis)
                extents[axis] = max(extents[axis], n)
            out.append(axis)
        mapped = [a for a in out if a is not None]
        if len(set(mapped)) != len(mapped):
            return f"two dims of {node!r} would have to be cut together"
        dims[node] = tuple(out)
    for node in nodes:
        if node.op is Op.SIZE and dims[node.inputs[0]][node.attrs.axis] in unequal:
            return "the size of an axis of two extents"
        if reduced_axis(node, dims) in unequal:
            return "a sum over an axis of two extents"
    return dims, extents


def _ties(targets: Sequence[Node], leaves: frozenset[Node]) -> list[tuple[Place, Place]]:
    """Dims of several targets, and of what they are made of, that may be cut alike though no
    operator forces it: those at the same place of equal operators. So products side by side share a
    grid and a loop.
    """
    out: list[tuple[Place, Place]] = []
    seen: set[tuple[Node, Node]] = set()
    stack = [(targets[0], other) for other in targets[1:]]
    while stack:
        a, b = stack.pop()
        if a is b or a.rank != b.rank or (a, b) in seen:
            continue
        seen.add((a, b))
        out += [((a, d), (b, d)) for d in range(a.rank) if 1 not in (a.shape[d], b.shape[d])]
        if a.op is b.op and not {a, b} & leaves and len(a.inputs) == len(b.inputs):
            stack += zip(a.inputs, b.inputs, strict=True)
    return out


def reduced_axis(node: Node, dims: dict[Node, Dims]) -> Axis | None:
    """The axis that an operator sums over or takes a maximum over."""
    if node.op in (Op.SUM, Op.REDUCE_MAX):
        axis: int = node.attrs.axis
        return dims[node.inputs[0]][axis]
    if node.op is Op.MATMUL:
        return dims[node.inputs[0]][-1]
    return None


def _unify(union: _Union, node: Node) -> None:
    """Join the dims that an operator forces to be cut together."""
    if node.op in _FREE:
        return
    if node.op is Op.TRANSPOSE:  # the same axes in another order
        for d, p in enumerate(node.attrs.perm):
            union.join((node, d), (node.inputs[0], p))
        return
    if node.op is Op.MATMUL:
        a, b = node.inputs
        union.join((a, a.rank - 1), (b, b.rank - 2))
        union.join((node, node.rank - 2), (a, a.rank - 2))
        union.join((node, node.rank - 1), (b, b.rank - 1))
        for x in (a, b):
            for d in range(x.rank - 2):
                if x.shape[d] != 1:
                    union.join((node, node.rank - x.rank + d), (x, d))
        return
    skip = node.attrs.axis if TABLE[node.op].kind is Kind.REDUCE else None
    for x in node.inputs:
        for d in range(x.rank):
            if x.shape[d] != 1 and d != skip:
                union.join((node, node.rank - x.rank + d), (x, d))
