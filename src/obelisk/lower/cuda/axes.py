"""Which dims of a block graph's values are the same axis.

Takes a flattened block graph; gives, for every dim of more than one element, the number of its
axis: dims that elementwise operators, products, folds and views identify share one. Raises
`Infeasible` where a value's dims are no axes of their own (a reshape that merges, a slice).
"""

from __future__ import annotations

from dataclasses import dataclass

from obelisk.base.errors import Infeasible
from obelisk.ir.block import BlockGraph, Split, is_ragged
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.lower.dims import DimSets

_SUPPORTED_VIEWS = (Op.RESHAPE, Op.TRANSPOSE, Op.BROADCAST)
_REFUSED = (Op.SLICE, Op.CONCAT, Op.THREAD)


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a block: extent of a full tile, and how it was cut where tiles may be short."""

    number: int
    extent: int
    split: Split | None


class Axes:
    """The axes of a block graph.

    Attributes:
        axes: by number.
        of: per node, the axis of each dim (None: one element).
    """

    def __init__(self, block: BlockGraph) -> None:
        self.block = block
        self._dims = DimSets(block.body)
        for node in block.body:
            self._join(node)
        self.axes: list[Axis] = []
        self.of: dict[Node, tuple[int | None, ...]] = {}
        self._number()

    def _join(self, node: Node) -> None:
        args = node.inputs
        match node.op:
            case Op.SUM | Op.REDUCE_MAX:
                if node.attrs.keep > 1:
                    raise Infeasible("a fold that keeps columns")
                for d in range(node.rank):
                    if d != node.attrs.axis:
                        self._dims.unite(args[0], d, node, d)
            case Op.MATMUL:
                a, b = args
                self._dims.unite(a, a.rank - 2, node, node.rank - 2)
                self._dims.unite(b, b.rank - 1, node, node.rank - 1)
                self._dims.unite(a, a.rank - 1, b, b.rank - 2)
                for x in args:
                    pad = node.rank - x.rank
                    for d in range(x.rank - 2):
                        self._dims.unite(x, d, node, d + pad)
            case Op.TRANSPOSE:
                for d, p in enumerate(node.attrs.perm):
                    self._dims.unite(args[0], p, node, d)
            case Op.RESHAPE:
                old = [d for d, n in enumerate(args[0].shape) if n > 1]
                new = [d for d, n in enumerate(node.shape) if n > 1]
                if [args[0].shape[d] for d in old] != [node.shape[d] for d in new]:
                    raise Infeasible("a reshape that splits or merges dims")
                for p, d in zip(old, new, strict=True):
                    self._dims.unite(args[0], p, node, d)
            case op if op in _REFUSED:
                raise Infeasible(f"{op.value} has no place in registers")
            case Op.SIZE:
                pass
            case _:
                for x in args:
                    pad = node.rank - x.rank
                    for d in range(x.rank):
                        self._dims.unite(x, d, node, d + pad)

    def _number(self) -> None:
        block, info = self.block, self.block.info
        numbers: dict[tuple[Node, int], int] = {}
        cuts: list[set[Split]] = []
        extents: list[int] = []
        for node in block.body:
            dims: list[int | None] = []
            for d, n in enumerate(node.shape):
                split = info.splits[node][d]
                ragged = is_ragged(split, n, block.grid, block.loop)
                if n == 1:
                    if ragged:
                        raise Infeasible("tiles of one element of which some blocks have none")
                    dims.append(None)
                    continue
                root = self._dims.find((node, d))
                if root not in numbers:
                    numbers[root] = len(extents)
                    extents.append(n)
                    cuts.append(set())
                number = numbers[root]
                if ragged and split is not None:
                    cuts[number].add(split)
                dims.append(number)
            known = [a for a in dims if a is not None]
            if len(set(known)) != len(known):
                raise Infeasible(f"a value of {node.op.value} has one axis twice")
            self.of[node] = tuple(dims)
        for number, (n, found) in enumerate(zip(extents, cuts, strict=True)):
            if len(found) > 1:
                raise Infeasible("an axis with short tiles of two kinds")
            self.axes.append(Axis(number, n, next(iter(found), None)))

    def known(self, node: Node) -> tuple[int, ...]:
        """The axes of a value, in the order of its dims."""
        return tuple(a for a in self.of[node] if a is not None)
