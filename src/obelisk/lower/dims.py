"""Dims of a block graph's values that are one and the same, as disjoint sets.

Takes the nodes of a flattened block graph; the operators decide which dims meet (`unite`). Dims
of one element meet nothing: they broadcast.
"""

from __future__ import annotations

from collections.abc import Iterable

from obelisk.ir.node import Node

Dim = tuple[Node, int]


class DimSets:
    """Disjoint sets of dims (Tarjan's union-find with path halving)."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._parent: dict[Dim, Dim] = {(n, d): (n, d) for n in nodes for d in range(n.rank)}

    def find(self, dim: Dim) -> Dim:
        """The representative of a dim's set."""
        while self._parent[dim] != dim:
            self._parent[dim] = self._parent[self._parent[dim]]
            dim = self._parent[dim]
        return dim

    def unite(self, a: Node, da: int, b: Node, db: int) -> None:
        """Dims that hold the same index, where both have the same extent and more than one
        element.
        """
        if a.shape[da] > 1 and a.shape[da] == b.shape[db]:
            x, y = self.find((a, da)), self.find((b, db))
            if x != y:
                self._parent[y] = x
