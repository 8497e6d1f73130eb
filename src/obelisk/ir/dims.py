"""Which input extents of a graph must move together, which are fixed, and smaller shapes to test
at.

`dim_classes` runs a union-find over the dims of every value: elementwise operands and contractions
tie dims together; reshapes that split, slices, concatenations and partly kept reductions freeze
them. Inside block graphs the dims of tiles are tied the same way and led back to the kernel tensors
through the maps of loads and stores. `InputDims` tells which input dims a dim anywhere is.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from obelisk.ir.graph import Graph
from obelisk.ir.node import Node, Shape
from obelisk.ir.op import LoadAttrs, Op

Key = Any  # a value's dim: (scope, node, dim); the scope tells levels and launches apart


@dataclass(frozen=True, slots=True)
class DimClass:
    """Input dims whose extents must stay equal.

    Attributes:
        members: (input, dim) pairs, sorted; never empty.
        extent: their common extent.
        frozen: an attribute ties the extent to others (a split, slice, join); do not change it.
        named: an attribute (iota, broadcast) holds the extent; change it only with an entry in
            `sizes`.
    """

    members: tuple[tuple[int, int], ...]
    extent: int
    frozen: bool
    named: bool


def reshape_groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Dims of a row-major reshape, cut into the smallest runs with equal products, in order.

    Each group is (dims of `old`, dims of `new`). Extents of 1 join the group before them, or open
    one.
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        ins: list[int] = []
        outs: list[int] = []
        a = c = 1
        while True:
            if a == c and ins and outs:
                break
            if i < len(old) and (a < c or (a == c and not ins) or j >= len(new)):
                a *= old[i]
                ins.append(i)
                i += 1
            elif j < len(new):
                c *= new[j]
                outs.append(j)
                j += 1
            else:
                break
        if groups and not (ins and outs):  # trailing ones on one side
            groups[-1] = (groups[-1][0] + ins, groups[-1][1] + outs)
        else:
            groups.append((ins, outs))
    return groups


class _Union:
    """Union-find with two flags per class."""

    def __init__(self) -> None:
        self.parent: dict[Key, Key] = {}
        self.frozen: set[Key] = set()
        self.named: set[Key] = set()

    def find(self, key: Key) -> Key:
        self.parent.setdefault(key, key)
        root = key
        while self.parent[root] is not root:
            root = self.parent[root]
        while self.parent[key] is not root:
            self.parent[key], key = root, self.parent[key]
        return root

    def tie(self, a: Key, b: Key) -> None:
        ra, rb = self.find(a), self.find(b)
        if ra is not rb:
            self.parent[rb] = ra
            for flags in (self.frozen, self.named):
                if rb in flags:
                    flags.add(ra)

    def freeze(self, key: Key) -> None:
        self.frozen.add(self.find(key))

    def name(self, key: Key) -> None:
        self.named.add(self.find(key))


class _Walker:
    """Ties the dims of all levels."""

    def __init__(self) -> None:
        self.dims = _Union()
        self.keys: dict[tuple[Any, Node, int], Key] = {}
        self.origins: list[tuple[Key, Key, tuple[int | None, bool]]] = []

    def key(self, scope: Any, node: Node, dim: int) -> Key:
        return self.keys.setdefault((scope, node, dim), (scope, node, dim))

    def same(self, scope: Any, a: Node, da: int, b: Node, db: int) -> None:
        """Tie two dims unless one is broadcast (extent 1 against more)."""
        if a.shape[da] == b.shape[db]:
            self.dims.tie(self.key(scope, a, da), self.key(scope, b, db))

    def align(self, scope: Any, node: Node, operand: Node, skip: int = 0) -> None:
        """Tie dims aligned at the right, except the last `skip`."""
        for d in range(1 + skip, 1 + min(node.rank, operand.rank)):
            self.same(scope, node, node.rank - d, operand, operand.rank - d)

    def freeze(self, scope: Any, node: Node, dim: int) -> None:
        self.dims.freeze(self.key(scope, node, dim))

    def visit(self, scope: Any, node: Node) -> None:
        """The ties of one operator."""
        match node.op:
            case Op.MATMUL:
                x, y = node.inputs
                self.same(scope, x, x.rank - 1, y, y.rank - 2)
                self.same(scope, node, node.rank - 2, x, x.rank - 2)
                self.same(scope, node, node.rank - 1, y, y.rank - 1)
                for operand in (x, y):
                    self.align(scope, node, operand, skip=2)
            case Op.SUM | Op.REDUCE_MAX:
                (x,) = node.inputs
                for d in range(node.rank):
                    if d != node.attrs.axis:
                        self.same(scope, node, d, x, d)
                    elif node.attrs.keep > 1:
                        self.freeze(scope, node, d)
                        self.freeze(scope, x, d)
            case Op.TRANSPOSE:
                for d, p in enumerate(node.attrs.perm):
                    self.same(scope, node, d, node.inputs[0], p)
            case Op.RESHAPE:
                self.reshape(scope, node)
            case Op.SLICE | Op.CONCAT:
                for x in node.inputs:
                    for d in range(node.rank):
                        if d != node.attrs.axis:
                            self.same(scope, node, d, x, d)
                        else:
                            self.freeze(scope, node, d)
                            self.freeze(scope, x, d)
            case Op.IOTA | Op.BROADCAST:
                for x in node.inputs:
                    self.align(scope, node, x)
                for d in range(node.rank):
                    pad = node.rank - node.inputs[0].rank if node.inputs else node.rank
                    kept = d >= pad and node.inputs[0].shape[d - pad] == node.shape[d]
                    if node.shape[d] != 1 and not kept:
                        self.dims.name(self.key(scope, node, d))
            case Op.BLOCK:
                self.block(scope, node)
            case Op.THREAD:
                self.thread(scope, node)
            case Op.SIZE | Op.INPUT | Op.CONST | Op.LOAD | Op.ELEM:
                pass
            case _:
                for x in node.inputs:
                    self.align(scope, node, x)

    def reshape(self, scope: Any, node: Node) -> None:
        (x,) = node.inputs
        for ins, outs in reshape_groups(x.shape, node.shape):
            wide_in = [d for d in ins if x.shape[d] != 1]
            wide_out = [d for d in outs if node.shape[d] != 1]
            if len(wide_in) == 1 and len(wide_out) == 1:
                self.same(scope, node, wide_out[0], x, wide_in[0])
                continue
            for d in ins:
                self.freeze(scope, x, d)
            for d in outs:
                self.freeze(scope, node, d)

    def thread(self, scope: Any, node: Node) -> None:
        graph = node.attrs.thread
        inner = inner_scope(scope, graph, node.inputs)
        for n in graph.body:
            if n.op is Op.ELEM:
                operand = node.inputs[n.attrs.index]
                for d in range(n.rank):
                    self.dims.tie(self.key(inner, n, d), self.key(scope, operand, d))
            else:
                self.visit(inner, n)
        result = graph.results[node.attrs.result]
        for d in range(node.rank):
            self.dims.tie(self.key(scope, node, d), self.key(inner, result, d))

    def block(self, scope: Any, node: Node) -> None:
        graph = node.attrs.block
        inner = inner_scope(scope, graph, node.inputs)
        for n in graph.body:
            self.visit(inner, n)
            if n.op is not Op.LOAD:
                continue
            at: LoadAttrs = n.attrs
            for d in range(n.rank):
                cut = (next((a for a, m in enumerate(at.imap) if m == d), None), at.fmap == d)
                outer = self.key(scope, node.inputs[at.index], d)
                if cut == (None, False):
                    self.dims.tie(outer, self.key(inner, n, d))
                else:
                    self.origins.append((self.key(inner, n, d), outer, cut))
        store = graph.stores[node.attrs.result]
        for d in range(node.rank):
            cut = (next((a for a, m in enumerate(store.omap) if m == d), None), store.fmap == d)
            outer = self.key(scope, node, d)
            if cut == (None, False):
                self.dims.tie(outer, self.key(inner, store.value, d))
            else:
                self.origins.append((self.key(inner, store.value, d), outer, cut))

    def settle(self) -> None:
        """Tiles that meet and were cut alike tie the tensors they were cut from; others freeze
        them.
        """
        changed = True
        while changed:  # tying kernel dims may tie uncut tiles of other blocks
            changed = False
            first: dict[Key, tuple[Key, tuple[int | None, bool]]] = {}
            for tile, outer, cut in self.origins:
                root = self.dims.find(tile)
                if root not in first:
                    first[root] = (outer, cut)
                    continue
                other, seen = first[root]
                if seen == cut:
                    if self.dims.find(other) is not self.dims.find(outer):
                        self.dims.tie(other, outer)
                        changed = True
                else:
                    self.dims.freeze(other)
                    self.dims.freeze(outer)
                if root in self.dims.frozen:
                    self.dims.freeze(outer)


def _walked(graph: Graph) -> tuple[_Walker, dict[Key, list[tuple[int, int]]]]:
    """All ties, and the input dims of each class that has some."""
    walker = _Walker()
    for node in graph.nodes:
        walker.visit(None, node)
    walker.settle()
    members: dict[Key, list[tuple[int, int]]] = {}
    for i, node in enumerate(graph.inputs):
        for d in range(node.rank):
            members.setdefault(walker.dims.find(walker.key(None, node, d)), []).append((i, d))
    return walker, members


class InputDims:
    """Which input dims a dim of any value of `graph` is tied to, whatever else has its extent."""

    def __init__(self, graph: Graph) -> None:
        self._walker, self._members = _walked(graph)

    def of(self, scope: Any, node: Node, dim: int) -> Sequence[tuple[int, int]]:
        """(input, dim) pairs; none for a dim that is computed, or a tile's. `scope` is None at
        kernel level, else what `inner_scope` gives.
        """
        walker = self._walker
        return self._members.get(walker.dims.find(walker.key(scope, node, dim)), ())


def inner_scope(scope: Any, graph: Any, inputs: tuple[Node, ...]) -> Any:
    """The scope of a block or thread graph's values in one of its launches."""
    return (scope, graph, inputs)


def dim_classes(graph: Graph) -> list[DimClass]:
    """The classes of input dims of `graph`, ordered by their first member."""
    walker, members = _walked(graph)
    return [
        DimClass(
            tuple(sorted(dims)),
            graph.inputs[dims[0][0]].shape[dims[0][1]],
            root in walker.dims.frozen,
            root in walker.dims.named,
        )
        for root, dims in members.items()
    ]


_ODD = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
_FACTORS = (1, 3, 2, 6, 9, 4, 8)  # so that grids and loops of 2 and 3 find extents that they divide


def shrink_shapes(graph: Graph, seed: int = 0) -> list[tuple[Shape, ...]]:
    """Smaller input shapes to test `graph` at, most telling first; the same for the same seed.

    Extents that may differ get distinct small primes times a common factor. A second series gives
    equal extents to classes that are equal now, for graphs that rely on it. Frozen classes and
    extents of 1 stay. Never empty.
    """
    classes = dim_classes(graph)
    free = [c for c in classes if not c.frozen and c.extent > 1]
    primes = list(_ODD[: max(len(free), 3)])
    random.Random(seed).shuffle(primes)
    out: dict[tuple[Shape, ...], None] = {}
    for shared in (False, True):
        for factor in _FACTORS:
            extents: dict[tuple[int, int], int] = {}
            chosen: dict[int, int] = {}
            for k, c in enumerate(free):
                slot = chosen.setdefault(c.extent, len(chosen)) if shared else k
                small = factor * primes[slot % len(primes)]
                for member in c.members:
                    extents[member] = min(small, c.extent)
            out.setdefault(
                tuple(
                    tuple(extents.get((i, d), n) for d, n in enumerate(node.shape))
                    for i, node in enumerate(graph.inputs)
                )
            )
    return list(out)


def sizes_for(graph: Graph, shapes: Sequence[Shape]) -> dict[int, int]:
    """The map from old to new extents that `shapes` imply, leaving out old extents with two new
    ones.
    """
    found: dict[int, set[int]] = {}
    for node, shape in zip(graph.inputs, shapes, strict=True):
        for old, new in zip(node.shape, shape, strict=True):
            found.setdefault(old, set()).add(new)
    return {old: new.pop() for old, new in found.items() if len(new) == 1 and old != 1}
