"""How far each dim of a block graph's values is padded: Triton's tiles are powers of two.

Takes a flattened block graph; gives, for every dim of more than one element, a power of two that is
the same for all dims that meet (elementwise operators, products, folds and views identify dims).
Dims of products that run on matrix units have at least 16.
"""

from __future__ import annotations

from collections.abc import Sequence

from obelisk.ir.block import BlockGraph
from obelisk.ir.dtype import DType
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.lower.dims import Dim, DimSets
from obelisk.lower.triton.names import power

LEAST_PRODUCT = 16  # rows, columns and depth of a product on matrix units


def on_matrix_units(node: Node) -> bool:
    """Whether a product is one of matrices in floats of at most 32 bits (or of bytes, which floats
    hold exactly); all others are multiplied and summed elementwise.
    """
    a, b = node.inputs
    if 1 in (a.shape[-2], a.shape[-1], b.shape[-1]):
        return False
    return all(x.dtype not in (DType.F64, DType.I32, DType.BOOL) for x in (a, b, node))


class Padding:
    """Padded extents of one block graph."""

    def __init__(self, block: BlockGraph) -> None:
        self._dims = DimSets(block.body)
        self._least: dict[Dim, int] = {}
        for node in block.body:
            self._join(node)
        for node in block.body:
            if node.op is Op.MATMUL and on_matrix_units(node):
                a = node.inputs[0]
                for key in ((node, node.rank - 2), (node, node.rank - 1), (a, a.rank - 1)):
                    self._least[self._dims.find(key)] = LEAST_PRODUCT

    def of(self, node: Node, dim: int) -> int:
        """The padded extent of a dim (1 where it has one element)."""
        n = node.shape[dim]
        if n == 1:
            return 1
        return max(power(n), self._least.get(self._dims.find((node, dim)), 1))

    def _join(self, node: Node) -> None:
        args = node.inputs
        match node.op:
            case Op.SUM | Op.REDUCE_MAX | Op.SLICE | Op.CONCAT:
                for x in args:
                    for d in range(node.rank):
                        if d != node.attrs.axis:
                            self._dims.unite(x, d, node, d)
            case Op.MATMUL:
                a, b = args
                self._dims.unite(a, a.rank - 2, node, node.rank - 2)
                self._dims.unite(b, b.rank - 1, node, node.rank - 1)
                self._dims.unite(a, a.rank - 1, b, b.rank - 2)
                for x in args:
                    for d in range(x.rank - 2):
                        self._dims.unite(x, d, node, d + node.rank - x.rank)
            case Op.TRANSPOSE:
                for d, p in enumerate(node.attrs.perm):
                    self._dims.unite(args[0], p, node, d)
            case Op.RESHAPE:
                for old, new in kept_dims(args[0].shape, node.shape):
                    self._dims.unite(args[0], old, node, new)
            case Op.SIZE:
                pass
            case _:
                for x in args:
                    for d in range(x.rank):
                        self._dims.unite(x, d, node, d + node.rank - x.rank)


def kept_dims(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of dims that a row-major reshape leaves as they are, ones aside: the same dims at both
    ends, up to the first pair that differs.
    """
    a = [d for d, n in enumerate(old) if n > 1]
    b = [d for d, n in enumerate(new) if n > 1]
    front = 0
    while front < min(len(a), len(b)) and old[a[front]] == new[b[front]]:
        front += 1
    back = 0
    while back < min(len(a), len(b)) - front and old[a[-1 - back]] == new[b[-1 - back]]:
        back += 1
    pairs = list(zip(a[:front], b[:front], strict=True))
    if back:
        pairs += list(zip(a[-back:], b[-back:], strict=True))
    return pairs
