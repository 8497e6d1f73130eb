"""Interned graph nodes: structurally equal nodes are one object, so equality and hashing are by
identity.

`make` is the only way to a node: it infers shape and dtype by the operator table and returns the
existing object when there is one. A content digest, stable across processes, is kept apart from
identity.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from obelisk.base.digest import digest
from obelisk.ir.dtype import DType
from obelisk.ir.op import Attrs, BlockAttrs, Op, ThreadAttrs

Shape = tuple[int, ...]
Infer = Callable[[Op, "tuple[Node, ...]", Attrs], tuple[Shape, DType]]


class Node:
    """One value of a graph. Never construct it directly: use the builders in `build.py` or `make`.

    Attributes:
        op, inputs, attrs: what computes it.
        shape: extents; a block-level value has the shape of one full tile.
        dtype: element type.
    """

    __slots__ = ("__weakref__", "_digest", "attrs", "dtype", "inputs", "op", "shape")

    op: Op
    inputs: tuple[Node, ...]
    attrs: Any  # the record of `op.py` that goes with `op`; checked by the operator table
    shape: Shape
    dtype: DType
    _digest: str

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def elements(self) -> int:
        """Number of elements."""
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def nbytes(self) -> int:
        """Bytes as stored in device memory, rounded up."""
        return (self.elements * self.dtype.bits + 7) // 8

    @property
    def digest(self) -> str:
        """Content digest: the same for the same structure in every process; names play no part."""
        if not self._digest:
            for node in topological([self]):
                if not node._digest:
                    node._digest = digest(
                        node.op.value,
                        attrs_key(node.attrs),
                        node.dtype.value,
                        *(i._digest for i in node.inputs),
                    )
        return self._digest

    def __repr__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"<{self.op.value} {self.dtype}[{dims}]>"

    # Arithmetic sugar; `build` fills these in, so that this module needs no operator.
    def __add__(self, other: Node | float) -> Node:
        return _SUGAR["add"](self, other)

    def __radd__(self, other: float) -> Node:
        return _SUGAR["add"](other, self)

    def __sub__(self, other: Node | float) -> Node:
        return _SUGAR["sub"](self, other)

    def __rsub__(self, other: float) -> Node:
        return _SUGAR["sub"](other, self)

    def __mul__(self, other: Node | float) -> Node:
        return _SUGAR["mul"](self, other)

    def __rmul__(self, other: float) -> Node:
        return _SUGAR["mul"](other, self)

    def __truediv__(self, other: Node | float) -> Node:
        return _SUGAR["div"](self, other)

    def __rtruediv__(self, other: float) -> Node:
        return _SUGAR["div"](other, self)

    def __neg__(self) -> Node:
        return _SUGAR["neg"](self)

    def __matmul__(self, other: Node) -> Node:
        return _SUGAR["matmul"](self, other)


_SUGAR: dict[str, Callable[..., Node]] = {}  # filled once, by `build`
_TABLE: weakref.WeakValueDictionary[tuple[Op, tuple[Node, ...], Attrs], Node] = (
    weakref.WeakValueDictionary()
)
_INFER: list[Infer] = []  # one entry, set once by `table`


def make(op: Op, inputs: tuple[Node, ...] = (), attrs: Attrs = None) -> Node:
    """The node for `op` of `inputs`; raises `ShapeError`, `DTypeError` or `MalformedGraph` when it
    cannot be.
    """
    key = (op, inputs, attrs)
    found = _TABLE.get(key)
    if found is not None:
        return found
    shape, dtype = _INFER[0](op, inputs, attrs)
    node = Node.__new__(Node)
    node.op, node.inputs, node.attrs, node.shape, node.dtype, node._digest = (
        op,
        inputs,
        attrs,
        shape,
        dtype,
        "",
    )
    _TABLE[key] = node
    return node


def topological(roots: Iterable[Node]) -> list[Node]:
    """All nodes that `roots` depend on, operands before users, in a deterministic order. Iterative:
    any depth.
    """
    order: list[Node] = []
    done: set[Node] = set()
    for root in roots:
        stack: list[tuple[Node, Iterator[Node]]] = []
        if root not in done:
            done.add(root)
            stack.append((root, iter(root.inputs)))
        while stack:
            node, pending = stack[-1]
            for child in pending:
                if child not in done:
                    done.add(child)
                    stack.append((child, iter(child.inputs)))
                    break
            else:
                order.append(node)
                stack.pop()
    return order


def common_ends(a: Shape, b: Shape) -> tuple[int, int]:
    """How many dims two shapes share in front, and how many of the others at the end: what lies
    between is what a reshape of one to the other moves.
    """
    most = min(len(a), len(b))
    front = 0
    while front < most and a[front] == b[front]:
        front += 1
    back = 0
    while back < most - front and a[-1 - back] == b[-1 - back]:
        back += 1
    return front, back


def users(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """For each node below `roots`, the nodes that read it (once per operand position)."""
    out: dict[Node, list[Node]] = {}
    for node in topological(roots):
        out.setdefault(node, [])
        for child in node.inputs:
            out[child].append(node)
    return out


def attrs_key(attrs: Attrs) -> str:
    """A stable text for an attribute record (nested graphs by digest)."""
    match attrs:
        case None:
            return ""
        case BlockAttrs(block, result):
            return f"block:{block.digest}:{result}"
        case ThreadAttrs(thread, result):
            return f"thread:{thread.digest}:{result}"
        case _:
            return repr(attrs)
