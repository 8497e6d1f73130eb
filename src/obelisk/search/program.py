"""A segment prepared for synthesis: normal forms and tiny field values of all that it computes."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from obelisk.ir import Node, Op
from obelisk.search import field as F
from obelisk.search.axes import Axis, Segment, reduced_axis
from obelisk.search.terms import Goal, Leaf, Poly, Size, Terms
from obelisk.search.value import TINY, Mode


class Program:
    """A segment prepared for synthesis: normal forms and tiny field values of its leaves, nodes and
    targets.
    """

    def __init__(self, segment: Segment, seed: int) -> None:
        self.segment = segment
        self.terms = Terms()
        self._combined: dict[tuple[Any, ...], tuple[Poly, str]] = {}
        self.poly: dict[Node, Poly] = {}
        self.tiny: dict[Node, F.Pair] = {}
        self.raw_exponents: set[int] = set()  # what the program exponentiates, as it stands
        self.exponents: dict[int, Poly] = {}  # the same without its shifts by maxima
        rng = np.random.default_rng(seed)
        for i, leaf in enumerate(segment.leaves):
            dims = segment.dims[leaf]
            shape = tuple(1 if a is None else TINY for a in dims)
            self.tiny[leaf] = (rng.integers(1, F.P, shape), rng.integers(1, F.Q, shape))
            self.poly[leaf] = self.terms.atom(Leaf(i), frozenset(a for a in dims if a is not None))
        for node in segment.nodes:
            self._node(node)
        # The program's own values are useful by definition: they keep its own derivation alive.
        goals = [self.poly[n] for n in segment.nodes]
        for argument in self.exponents.values():
            goals.append(argument)
            goals += [self.terms.peak(argument, a) for a in sorted(argument.axes & segment.reduced)]
        self.goal = Goal(self.terms, goals)

    def modes(self, online: bool) -> list[Mode]:
        """The forms worth deriving apart: shifted exponentials, and products over joined
        operands.
        """
        out = [Mode()]
        ops = self.segment.ops
        if online and Op.EXP in ops:
            out.append(Mode(raw=False))
        products = [n for n in self.segment.nodes if n.op is Op.ADD]
        if any(all(i.op is Op.MATMUL for i in n.inputs) for n in products):
            out.append(Mode(joined=True))
        return out

    def combined(self, op: Op, polys: tuple[Poly, ...], axis: Axis | None) -> tuple[Poly, str]:
        """The normal form of an operator's result, and the rule that drops it: "cancellation",
        "goal" or "".
        """
        key = (op, axis, *(p.id for p in polys))
        found = self._combined.get(key)
        if found is None:
            found = self._combined[key] = self._combine(op, polys, axis)
        return found

    def _combine(self, op: Op, polys: tuple[Poly, ...], axis: Axis | None) -> tuple[Poly, str]:
        t = self.terms
        poly = apply_poly(t, op, list(polys), axis)
        if op in (Op.MUL, Op.DIV, Op.MATMUL) and t.cancels(poly, *polys):
            return poly, "cancellation"
        if op in (Op.ADD, Op.SUB) and t.drops(poly, polys[0], polys[1]):
            return poly, "cancellation"
        return poly, "" if self.goal.useful(poly) else "goal"

    def size_axis(self, node: Node) -> Axis | None:
        """The axis whose extent a size node stands for (None: extent 1)."""
        axis: int = node.attrs.axis
        return self.segment.dims[node.inputs[0]][axis]

    def _node(self, node: Node) -> None:
        t = self.terms
        if node.op is Op.CONST:
            value = node.attrs.value
            self.poly[node], self.tiny[node] = t.constant(value), F.scalar(value)
            return
        if node.op is Op.SIZE:
            axis = self.size_axis(node)
            self.poly[node] = t.constant(1.0) if axis is None else t.atom(Size(axis))
            # Sizes stay symbols: axes of one extent today must not be confused.
            self.tiny[node] = F.scalar(1.0 if axis is None else float(1_000_003 + 7919 * axis))
            return
        polys = [self.poly[i] for i in node.inputs]
        if node.op is Op.EXP:
            self.raw_exponents.add(polys[0].id)
            bare = t.without_peaks(polys[0])
            self.exponents[bare.id] = bare
        if node.op is Op.TRANSPOSE:
            (x,) = node.inputs
            p, q = self.tiny[x]
            perm = node.attrs.perm
            self.poly[node] = self.poly[x]
            self.tiny[node] = (p.transpose(perm), None if q is None else q.transpose(perm))
            return
        axis = reduced_axis(node, self.segment.dims)
        self.poly[node] = apply_poly(t, node.op, polys, axis)
        args = [aligned(self.tiny[i], 0, node.rank) for i in node.inputs]
        at = node.attrs.axis if node.op in (Op.SUM, Op.REDUCE_MAX) else 0
        self.tiny[node] = apply_field(node.op, args, at)


def aligned(x: F.Pair, lead: int, rank: int) -> F.Pair:
    def one(a: Any) -> Any:
        own = a.ndim - lead
        return (
            a if own >= rank else a.reshape(a.shape[:lead] + (1,) * (rank - own) + a.shape[lead:])
        )

    return one(x[0]), None if x[1] is None else one(x[1])


def apply_poly(t: Terms, op: Op, a: list[Poly], axis: Axis | None) -> Poly:
    """The normal form of one operator's result."""
    match op:
        case Op.ADD:
            return t.add(a[0], a[1])
        case Op.SUB:
            return t.add(a[0], a[1], -1)
        case Op.NEG:
            return t.mul(t.constant(-1.0), a[0])
        case Op.MUL:
            return t.mul(a[0], a[1])
        case Op.SQUARE:
            return t.mul(a[0], a[0])
        case Op.DIV:
            return t.mul(a[0], t.inverse(a[1]))
        case Op.RSQRT:
            return t.inverse(t.function("sqrt", a[0]))
        case Op.EXP:
            return t.exp(a[0])
        case Op.SUM:
            return a[0] if axis is None else t.sum(a[0], axis)
        case Op.REDUCE_MAX:
            return a[0] if axis is None else t.peak(a[0], axis)
        case Op.MATMUL:
            product = t.mul(a[0], a[1])
            return product if axis is None else t.sum(product, axis)
        case Op.CAST:
            return a[0]
        case Op.MAX | Op.MIN:
            return t.function(op.value, *sorted(a, key=lambda p: p.id))
        case _:
            return t.function(op.value, *a)


def apply_field(op: Op, a: list[F.Pair], axis: int) -> F.Pair:
    """The field meaning of one operator; `axis` is the array axis of a reduction."""
    match op:
        case Op.ADD:
            return F.linear(a[0], a[1], 1)
        case Op.SUB:
            return F.linear(a[0], a[1], -1)
        case Op.NEG:
            return F.linear((np.zeros(1, np.int64), np.zeros(1, np.int64)), a[0], -1)
        case Op.MUL:
            return F.mul(a[0], a[1])
        case Op.SQUARE:
            return F.mul(a[0], a[0])
        case Op.DIV:
            return F.div(a[0], a[1])
        case Op.RSQRT:
            return F.div(F.scalar(1.0), F.function(zlib.crc32(b"sqrt"), a[0]))
        case Op.EXP:
            return F.exp(a[0])
        case Op.SUM:
            return F.total(a[0], axis)
        case Op.REDUCE_MAX:
            return F.peak(a[0], axis)
        case Op.MATMUL:
            return F.matmul(a[0], a[1])
        case Op.CAST:
            return a[0]
        case Op.MAX | Op.MIN:
            # Commutative and nothing else: under any one order, two constants in turn (a clamp)
            # would swallow every value half of the time.
            key = zlib.crc32(op.value.encode())
            return F.function(key, F.linear(a[0], a[1], 1), F.mul(a[0], a[1]))
        case _:
            return F.function(zlib.crc32(op.value.encode()), *a)
