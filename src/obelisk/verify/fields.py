"""Finite-field meaning of the operators: an interpreter algebra over Z_P and Z_Q at once.

A value is a pair of residues per element. `exp` takes the part modulo Q to omega**x modulo P, and
its result has no part modulo Q: the exponent state is a type, and a second exponential is not
guessed but becomes an uninterpreted function, which can only make equal graphs look different.
Maxima, comparisons, log and erf are likewise arbitrary but fixed functions (a random total order,
keyed hashes); what was used is recorded in `assumed`, so that the judge never takes such a mismatch
for a refutation. Masks follow undefined elements and roots of non-squares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf
from typing import Any

import numpy as np

from obelisk.base.errors import ObeliskError
from obelisk.ir.block import Reduce
from obelisk.ir.dtype import DType
from obelisk.ir.kernels import align
from obelisk.ir.node import Node, Shape
from obelisk.ir.op import Op
from obelisk.ir.table import TABLE, Kind
from obelisk.verify import modular as m
from obelisk.verify.constants import meant
from obelisk.verify.growth import CONSTANT, INPUT, Growth
from obelisk.verify.modular import P, Q

Array = Any

UNDEFINED, NEG_INF, ROOT_P, ROOT_Q = 1, 2, 4, 8  # ROOT_x: went through the root of a non-square


class Undecidable(ObeliskError):
    """The fields have no meaning for this operation; the text says which."""


@dataclass(frozen=True, slots=True)
class Residues:
    """A field value: arrays of one shape.

    Attributes:
        p: residues modulo P; for integers and booleans (`plain`) the numbers themselves.
        q: residues modulo Q, or None once an exponential took part.
        marks: bits per element (UNDEFINED, ...), or None when no element has any.
        growth: bound on the formulas behind the elements.
        real: the number itself, for scalar constants.
        plain: integers or booleans instead of residues.
    """

    p: Array
    q: Array | None
    marks: Array | None
    growth: Growth
    real: float | None = None
    plain: bool = False

    @property
    def bits(self) -> Array:
        """The marks as an array."""
        return np.zeros(np.shape(self.p), np.uint8) if self.marks is None else self.marks


def _both(a: Residues, b: Residues) -> Array | None:
    if a.marks is None and b.marks is None:
        return None
    return a.bits | b.bits


def _any(marks: Array, axis: int, keepdims: bool) -> Array:
    folded = np.bitwise_or.reduce(marks, axis=axis, keepdims=True)
    return folded if keepdims else np.squeeze(folded, axis=axis)


def _undefine(marks: Array | None) -> Array | None:
    """-inf where an operation has no rule for it: undefined."""
    if marks is None:
        return None
    return np.where(marks & NEG_INF, (marks | UNDEFINED) & ~np.uint8(NEG_INF), marks)


class FieldAlgebra:
    """One draw: a random root of unity and random keys for the uninterpreted functions.

    Args:
        rng: source of omega and keys.
        nested: give results of exp a hashed part modulo Q, so that a second exponential keeps its
            laws; needed only
            for graphs in which exponentials nest.
    """

    def __init__(self, rng: np.random.Generator, nested: bool = False) -> None:
        self.power = m.Exponential(rng)
        self.keys = {
            name: int(rng.integers(1 << 62)) for name in ("order", "log", "erf", "exp", "q")
        }
        self.nested = nested
        self.assumed: set[str] = set()

    # leaves

    def draw(self, node: Node, rng: np.random.Generator) -> Residues:
        """An independent uniform value for an input node (integers: small numbers)."""
        if node.dtype is DType.BOOL:
            return Residues(rng.integers(0, 2, node.shape), None, None, CONSTANT, plain=True)
        if not node.dtype.is_float:
            return Residues(rng.integers(-4, 5, node.shape), None, None, CONSTANT, plain=True)
        return Residues(rng.integers(0, P, node.shape), rng.integers(0, Q, node.shape), None, INPUT)

    def lift(self, array: Array, dtype: DType) -> Residues:
        """Given numbers as a value: floats are exact dyadic rationals."""
        if not dtype.is_float:
            return Residues(np.asarray(array).astype(np.int64), None, None, CONSTANT, plain=True)
        flat = np.asarray(array, dtype=np.float64)
        parts = [
            np.array([m.rational(Fraction(x), prime) for x in flat.reshape(-1).tolist()], np.int64)
            for prime in (P, Q)
        ]
        p, q = (x.reshape(flat.shape) for x in parts)
        return Residues(p, q, None, CONSTANT)

    def const(self, value: float) -> Residues:
        """A scalar constant, exactly the number that is meant; -inf is a mark."""
        if value == -inf:
            zero = np.zeros((), np.int64)
            return Residues(zero, zero, np.asarray(NEG_INF, np.uint8), CONSTANT, value)
        number = meant(value)
        p, q = (np.asarray(m.rational(number, prime), np.int64) for prime in (P, Q))
        return Residues(p, q, None, CONSTANT, value)

    def integer(self, value: int) -> Residues:
        """An extent."""
        return self.const(float(value))

    def iota(self, shape: Shape, axis: int) -> Residues:
        """Counts along an axis, plain integers."""
        n = shape[axis]
        line = np.arange(n, dtype=np.int64).reshape(
            [n if d == axis else 1 for d in range(len(shape))]
        )
        return Residues(np.broadcast_to(line, shape), None, None, CONSTANT, plain=True)

    # what the interpreter asks for

    def apply(self, node: Node, args: Sequence[Residues], lead: int) -> Residues:
        """The meaning of a node, found by the operator table's `field` cell."""
        row = TABLE[node.op]
        method = getattr(self, row.field)
        match row.kind:
            case Kind.BINARY | Kind.TERNARY:
                args = self._aligned(node, args, lead)
                if any(a.plain for a in args[-2:]):
                    args = [*args[:-2], *(self._plain(a) for a in args[-2:])]
            case Kind.CONTRACT:
                args = self._aligned(node, args, lead)
            case Kind.REDUCE:
                axis = node.attrs.axis - node.inputs[0].rank
                result: Residues = method(args[0], axis, node.attrs.keep)
                return result
        if node.op is Op.CAST:
            return self.cast(args[0], node.dtype)
        out: Residues = method(*args)
        return out

    def _aligned(self, node: Node, args: Sequence[Residues], lead: int) -> list[Residues]:
        """Operands with dims of extent 1 put in, so that all have the node's rank."""
        return [
            a
            if i.rank == node.rank or np.ndim(a.p) == 0
            else self.structural(lambda x, i=i: align(x, lead, i.rank, node.rank), a)
            for a, i in zip(args, node.inputs, strict=True)
        ]

    def structural(self, fn: Callable[..., Array], *values: Residues) -> Residues:
        """Move elements of every component array."""
        if len(values) == 1:
            (v,) = values
            return Residues(
                fn(v.p),
                None if v.q is None else fn(v.q),
                None if v.marks is None else fn(v.marks),
                v.growth,
                v.real,
                v.plain,
            )
        plain = values[0].plain
        if any(v.plain is not plain for v in values):
            raise Undecidable("integers and floats are joined without a cast")
        growth = values[0].growth
        for v in values[1:]:
            growth = growth.joined(v.growth)
        qs = [v.q for v in values]
        lost = any(q is None for q in qs)
        marked = any(v.marks is not None for v in values)
        return Residues(
            fn(*(v.p for v in values)),
            None if lost else fn(*qs),
            fn(*(v.bits for v in values)) if marked else None,
            growth,
            None,
            plain,
        )

    def settle(self, value: Residues, dtype: DType, block: bool) -> Residues:
        """Rounding does not exist here; integers wrap."""
        if not value.plain or dtype is DType.BOOL or dtype.is_float:
            return value
        kind = np.int32 if dtype is DType.I32 else np.int8
        return replace(value, p=value.p.astype(kind).astype(np.int64))

    def shape(self, value: Residues) -> Shape:
        """Shape, batch axes included."""
        return tuple(np.shape(value.p))

    def maximum(self, a: Residues, b: Residues) -> Residues:
        """Accumulators' maximum."""
        return self.max(a, b)

    def fold(self, value: Residues, axis: int, reduce: Reduce) -> Residues:
        """Sum or maximum along an axis, which disappears."""
        axis -= np.ndim(value.p)
        folded = (self.sum if reduce is Reduce.SUM else self.reduce_max)(value, axis, 1)
        return self.structural(lambda x: np.squeeze(x, axis=axis), folded)

    def rescale(self, acc: Residues, old: Residues, new: Residues) -> Residues:
        """acc * exp(old - new); nothing was accumulated where the old maximum is -inf."""
        out = self.mul(acc, self.exp(self.sub(old, new)))
        if old.marks is None:
            return out
        fresh = (old.bits & NEG_INF) != 0
        keep = np.broadcast_to(fresh, np.shape(out.p))
        return Residues(
            np.where(keep, 0, out.p),
            None if out.q is None else np.where(keep, 0, out.q),
            np.where(keep, np.uint8(0), out.bits),
            out.growth,
        )

    # elementwise

    def _plain(self, x: Residues) -> Residues:
        """A constant among integers is an integer."""
        if x.plain:
            return x
        if x.real is None or x.real != int(x.real):
            raise Undecidable("an integer operation on a value that is no whole number")
        return Residues(np.asarray(int(x.real), np.int64), None, None, CONSTANT, x.real, plain=True)

    def _ring(
        self,
        a: Residues,
        b: Residues,
        fn: Callable[[Array, Array], Array],
        growth: Growth,
        marks: Array | None,
    ) -> Residues:
        if a.plain:
            return Residues(fn(a.p, b.p), None, _both(a, b), CONSTANT, plain=True)
        q = None if a.q is None or b.q is None else fn(a.q, b.q) % Q
        p = fn(a.p, b.p) % P
        if marks is not None:
            void = (marks & (UNDEFINED | NEG_INF)) != 0
            p = np.where(void, 0, p)
            q = None if q is None else np.where(void, 0, q)
        return Residues(p, q, marks, growth)

    def add(self, a: Residues, b: Residues) -> Residues:
        """a + b; -inf absorbs."""
        return self._ring(a, b, np.add, a.growth.plus(b.growth), _both(a, b))

    def sub(self, a: Residues, b: Residues) -> Residues:
        """a - b."""
        marks = _both(a, replace(b, marks=_undefine(b.marks)))
        return self._ring(a, b, np.subtract, a.growth.plus(b.growth), marks)

    def _scaled_marks(self, a: Residues, b: Residues) -> Array | None:
        """Marks of a product: -inf survives a positive constant only."""
        marks = _both(a, b)
        if marks is None or any(x.real is not None and 0 < x.real < inf for x in (a, b)):
            return marks
        return _undefine(marks)

    def mul(self, a: Residues, b: Residues) -> Residues:
        """a * b."""
        return self._ring(a, b, np.multiply, a.growth.times(b.growth), self._scaled_marks(a, b))

    def square(self, x: Residues) -> Residues:
        """x * x."""
        return self.mul(x, x)

    def neg(self, x: Residues) -> Residues:
        """-x."""
        if x.plain:
            return replace(x, p=-x.p, real=None)
        real = None if x.real is None or x.real == -inf else -x.real
        q = None if x.q is None else -x.q % Q
        return Residues(-x.p % P, q, _undefine(x.marks), x.growth, real)

    def _inverse(self, x: Residues) -> Residues:
        zero = x.p == 0
        if x.q is not None:
            zero = zero | (x.q == 0)
        marks = _undefine(x.marks)
        if zero.any():
            marks = (np.uint8(0) if marks is None else marks) | np.where(
                zero, np.uint8(UNDEFINED), np.uint8(0)
            )
        q = None if x.q is None else m.inverse(x.q, Q)
        return Residues(m.inverse(x.p, P), q, marks, x.growth.inverse())

    def div(self, a: Residues, b: Residues) -> Residues:
        """a / b; undefined where b is 0."""
        real = None if b.real is None or b.real == 0 else 1 / b.real
        return self.mul(a, replace(self._inverse(b), real=real))

    def _pick(self, a: Residues, b: Residues, first: Array) -> Residues:
        """Elements of `a` where `first`, else of `b`; doubts about either stay."""
        marks = _both(a, b)
        if marks is not None:
            own = np.where(first, a.bits & NEG_INF, b.bits & NEG_INF)
            marks = (marks & ~np.uint8(NEG_INF)) | own
        q = None if a.q is None or b.q is None else np.where(first, a.q, b.q)
        return Residues(
            np.where(first, a.p, b.p), q, marks, a.growth.joined(b.growth), None, a.plain
        )

    def _order(self, x: Residues) -> Array:
        """The random total order's key of each element; -inf is the least."""
        if x.plain:
            return x.p
        keys = m.scramble(x.p, self.keys["order"])
        return keys if x.marks is None else np.where(x.marks & NEG_INF, -1, keys)

    def max(self, a: Residues, b: Residues) -> Residues:
        """The larger by a random total order: commutative, associative, idempotent, and nothing
        else.
        """
        if not a.plain:
            self.assumed.add("max")
        return self._pick(a, b, self._order(a) >= self._order(b))

    def min(self, a: Residues, b: Residues) -> Residues:
        """The smaller by the same order."""
        if not a.plain:
            self.assumed.add("min")
        return self._pick(a, b, self._order(a) <= self._order(b))

    def less(self, a: Residues, b: Residues) -> Residues:
        """a < b by the same order (integers: really)."""
        if not a.plain:
            self.assumed.add("less")
        marks = _both(a, b)
        kept = None if marks is None else marks & ~np.uint8(NEG_INF)
        return Residues(self._order(a) < self._order(b), None, kept, CONSTANT, plain=True)

    def where(self, cond: Residues, a: Residues, b: Residues) -> Residues:
        """Elements of `a` where `cond`."""
        marks: Array | None = None
        if a.marks is not None or b.marks is not None or cond.marks is not None:
            marks = np.where(cond.p, a.bits, b.bits) | (cond.bits & ~np.uint8(NEG_INF))
        q = None if a.q is None or b.q is None else np.where(cond.p, a.q, b.q)
        return Residues(
            np.where(cond.p, a.p, b.p), q, marks, a.growth.joined(b.growth), None, a.plain
        )

    def cast(self, x: Residues, dtype: DType) -> Residues:
        """Floats keep their value; integers become residues; floats become integers only where they
        are constants.
        """
        if dtype.is_float:
            return Residues(x.p % P, x.p % Q, x.marks, CONSTANT) if x.plain else x
        if dtype is DType.BOOL and not x.plain:
            raise Undecidable("a cast of floats to bool")
        return self._plain(x)

    # functions

    def exp(self, x: Residues) -> Residues:
        """omega to the part modulo Q; exp(-inf) is 0. Without that part: an arbitrary function of
        the value.
        """
        if x.growth.exponent:
            self.assumed.add("second exp")
        p = m.scramble(x.p, self.keys["exp"]) % P if x.q is None else self.power(x.q)
        marks = x.marks
        if marks is not None:
            p = np.where(marks & (NEG_INF | UNDEFINED), 0, p)
            doubt = ROOT_P if x.q is None else ROOT_Q
            marks = (marks & UNDEFINED) | np.where(marks & doubt, np.uint8(ROOT_P), np.uint8(0))
        q = m.scramble(p, self.keys["q"]) % Q if self.nested else None
        return Residues(p, q, marks, x.growth.exponential())

    def _odd(self, x: Residues) -> Residues:
        positive = x.p <= P // 2
        base = np.where(positive, x.p, P - x.p)
        key = self.keys["erf"]
        p, q = m.scramble(base, key) % P, m.scramble(base, key + 1) % Q
        p, q = np.where(x.p == 0, 0, p), np.where(x.p == 0, 0, q)
        return Residues(
            np.where(positive, p, -p % P), np.where(positive, q, -q % Q), _undefine(x.marks), INPUT
        )

    def erf(self, x: Residues) -> Residues:
        """An arbitrary odd function."""
        self.assumed.add("erf")
        return self._odd(x)

    def log(self, x: Residues) -> Residues:
        """An arbitrary function."""
        self.assumed.add("log")
        key = self.keys["log"]
        p, q = m.scramble(x.p, key) % P, m.scramble(x.p, key + 1) % Q
        return Residues(p, q, _undefine(x.marks), INPUT)

    def sigmoid(self, x: Residues) -> Residues:
        """1 / (1 + exp(-x))."""
        low = None if x.marks is None else (x.marks & NEG_INF) != 0
        y = x if low is None else replace(x, marks=x.bits & ~np.uint8(NEG_INF))
        out = self._inverse(self.add(self.const(1.0), self.exp(self.neg(y))))
        if low is None:
            return out
        return replace(
            out, p=np.where(low, 0, out.p), q=None if out.q is None else np.where(low, 0, out.q)
        )

    def tanh(self, x: Residues) -> Residues:
        """2 sigmoid(2 x) - 1."""
        two = self.const(2.0)
        return self.sub(self.mul(two, self.sigmoid(self.mul(two, x))), self.const(1.0))

    def sqrt(self, x: Residues) -> Residues:
        """The root that is itself a square; where x is none, a multiplicative stand-in, marked."""
        p, square = m.sqrt(x.p, P)
        doubt = np.where(square, np.uint8(0), np.uint8(ROOT_P))
        q = None
        if x.q is not None:
            q, square = m.sqrt(x.q, Q)
            doubt = doubt | np.where(square, np.uint8(0), np.uint8(ROOT_Q))
        marks = _undefine(x.marks)
        if doubt.any():
            marks = doubt if marks is None else marks | doubt
        return Residues(p, q, marks, x.growth.root())

    def rsqrt(self, x: Residues) -> Residues:
        """1 / sqrt(x)."""
        return self._inverse(self.sqrt(x))

    # reductions and products (axes count from the back)

    def _columns(self, x: Residues, axis: int, keep: int) -> tuple[Residues, int]:
        """With `keep` columns the axis becomes (n / keep, keep); the first part is folded."""
        if keep == 1:
            return x, axis
        at = np.ndim(x.p) + axis

        def split(a: Array) -> Array:
            return a.reshape((*a.shape[:at], a.shape[at] // keep, keep, *a.shape[at + 1 :]))

        return self.structural(split, x), axis - 1

    def sum(self, x: Residues, axis: int, keep: int) -> Residues:
        """Sum along an axis."""
        x, axis = self._columns(x, axis, keep)
        kept = keep == 1
        marks = None if x.marks is None else _any(x.marks, axis, kept)
        p = np.sum(x.p, axis=axis, keepdims=kept)
        if x.plain:
            return Residues(p, None, marks, CONSTANT, plain=True)
        q = None if x.q is None else np.sum(x.q, axis=axis, keepdims=kept)
        zero = Residues(np.zeros((), np.int64), np.zeros((), np.int64), None, CONSTANT)
        out = Residues(p, q, marks, x.growth.summed(np.shape(x.p)[axis]))
        return self._ring(out, zero, np.add, out.growth, marks)

    def reduce_max(self, x: Residues, axis: int, keep: int) -> Residues:
        """The largest element along an axis by the random order; -inf over none."""
        x, axis = self._columns(x, axis, keep)
        if not x.plain:
            self.assumed.add("max")
        if np.shape(x.p)[axis] == 0:
            shape = list(np.shape(x.p))
            shape[axis] = 1
            zero = np.zeros(shape, np.int64)
            out = Residues(zero, zero, np.full(shape, NEG_INF, np.uint8), CONSTANT)
        else:
            best = np.argmax(self._order(x), axis=axis)
            at = np.expand_dims(best, axis)
            out = self.structural(
                lambda a: np.take_along_axis(a, at, axis=axis), replace(x, real=None)
            )
            if x.marks is not None:
                others = np.bitwise_or.reduce(x.marks, axis=axis, keepdims=True) & ~np.uint8(
                    NEG_INF
                )
                out = replace(out, marks=out.bits | others)
        return out if keep == 1 else self.structural(lambda a: np.squeeze(a, axis=axis), out)

    def matmul(self, a: Residues, b: Residues) -> Residues:
        """Batched product."""
        if a.plain or b.plain:
            a, b = self._plain(a), self._plain(b)
            return Residues(np.matmul(a.p, b.p), None, None, CONSTANT, plain=True)
        marks: Array | None = None
        if a.marks is not None or b.marks is not None:
            rows = np.bitwise_or.reduce(a.bits, axis=-1, keepdims=True)
            marks = _undefine(rows | np.bitwise_or.reduce(b.bits, axis=-2, keepdims=True))
        q = None if a.q is None or b.q is None else m.matmul(a.q, b.q, Q)
        growth = a.growth.times(b.growth).summed(np.shape(a.p)[-1])
        return Residues(m.matmul(a.p, b.p, P), q, marks, growth)
