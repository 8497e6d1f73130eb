"""Thread graphs: chains that stay in the registers of a block's threads, as an interned value.

A thread graph reads elements of block values (`elem`), applies elementwise operators and
reductions, and gives results that become block values again. `vector` says how many neighbouring
elements of the last dim one thread holds; the threads themselves are laid out over the remaining
elements in row-major order.
"""

from __future__ import annotations

import weakref
from functools import cached_property

from obelisk.base.digest import digest
from obelisk.base.errors import MalformedGraph
from obelisk.ir.node import Node, topological
from obelisk.ir.op import Op

REGISTER_OPS = frozenset(
    {
        Op.ELEM, Op.CONST, Op.SIZE, Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MAX, Op.MIN, Op.NEG, Op.EXP,
        Op.LOG, Op.SQRT, Op.RSQRT, Op.SQUARE, Op.TANH, Op.SIGMOID, Op.ERF, Op.LESS, Op.WHERE,
        Op.CAST, Op.SUM, Op.REDUCE_MAX,
    }
)  # fmt: skip


class ThreadGraph:
    """An interned thread graph; made by `thread_graph`.

    Attributes:
        results: the values handed back to the block level, in order.
        vector: neighbouring elements of the last dim that one thread holds.
    """

    results: tuple[Node, ...]
    vector: int

    @cached_property
    def body(self) -> tuple[Node, ...]:
        """All nodes, operands first."""
        return tuple(topological(self.results))

    @cached_property
    def digest(self) -> str:
        """Content digest."""
        return digest("thread", str(self.vector), *(r.digest for r in self.results))

    @property
    def arity(self) -> int:
        """How many block values it reads."""
        return 1 + max((n.attrs.index for n in self.body if n.op is Op.ELEM), default=-1)

    def __repr__(self) -> str:
        return f"<thread vector={self.vector} nodes={len(self.body)}>"


_THREADS: weakref.WeakValueDictionary[object, ThreadGraph] = weakref.WeakValueDictionary()


def thread_graph(results: tuple[Node, ...], vector: int = 1) -> ThreadGraph:
    """The interned thread graph; raises `MalformedGraph` for an operator that cannot live in
    registers.
    """
    key = (results, vector)
    found = _THREADS.get(key)
    if found is not None:
        return found
    if not results or vector < 1:
        raise MalformedGraph("a thread graph needs results and a vector width of at least 1")
    for node in topological(results):
        if node.op not in REGISTER_OPS:
            raise MalformedGraph(f"{node.op.value} cannot occur inside a thread graph")
    graph = ThreadGraph.__new__(ThreadGraph)
    graph.results, graph.vector = results, vector
    indices = sorted({n.attrs.index for n in graph.body if n.op is Op.ELEM})
    if indices != list(range(len(indices))):
        raise MalformedGraph(f"elements must number the operands 0..n-1, found {indices}")
    _THREADS[key] = graph
    return graph
