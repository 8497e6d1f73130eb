"""Normal forms of tensor expressions, and the test whether one can still become part of a goal.

A value is a polynomial: a sum of monomials with rational coefficients. A monomial is a product of
powers of factors; a factor is an atom (an input, a function of a polynomial) or a *sum component*,
the sum over some axes of a product of factors that those axes connect. Pulling out what an axis
does not touch makes the form unique for the laws that matter here: associativity, commutativity,
distributivity, motion of factors and divisors through sums, splitting of sums, exp of a sum as a
product. Which part of an axis (tile, loop, grid) was summed is not recorded.

The form only steers the search; what the search returns is judged elsewhere. The pruning rule
follows the abstract expressions of Mirage (OSDI'25, section 4.2), made index-aware, so that it also
rejects sums that come too early; there is no cancellation, so a prefix survives only if it can be
part of the goal as it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, assert_never

Axis = int
Number = Any  # an int, almost always, or a Fraction: they have no common type with arithmetic
Mono = tuple[tuple[int, Number], ...]  # (factor, exponent), sorted by factor
ONE: Mono = ()


class Poly:
    """An interned polynomial; made by `Terms` only. `terms` maps monomials to coefficients."""

    __slots__ = ("axes", "id", "terms")

    def __init__(
        self, ident: int, terms: tuple[tuple[Mono, Number], ...], axes: frozenset[Axis]
    ) -> None:
        self.id, self.terms, self.axes = ident, terms, axes


@dataclass(frozen=True, slots=True)
class Leaf:
    """An input of the segment, by its number or name."""

    name: int | str


@dataclass(frozen=True, slots=True)
class Const:
    """A number other than 0, 1 and -1."""

    value: float


@dataclass(frozen=True, slots=True)
class Size:
    """The extent of an axis."""

    axis: Axis


@dataclass(frozen=True, slots=True)
class Product:
    """Two sums that are not multiplied out."""

    first: Poly
    second: Poly


@dataclass(frozen=True, slots=True)
class Inverse:
    """1 over a sum."""

    of: Poly


@dataclass(frozen=True, slots=True)
class Exp:
    """exp of one monomial; its exponent in a product is the monomial's coefficient."""

    of: Mono


@dataclass(frozen=True, slots=True)
class Function:
    """An uninterpreted elementwise function."""

    name: str
    args: tuple[Poly, ...]


@dataclass(frozen=True, slots=True)
class Peak:
    """The maximum over axes."""

    axes: frozenset[Axis]
    of: Poly


@dataclass(frozen=True, slots=True)
class Component:
    """The sum over `axes` of a product that these axes connect."""

    axes: frozenset[Axis]
    body: Mono


@dataclass(frozen=True, slots=True)
class Renamed:
    """A factor with a bound axis under a fresh name."""

    axis: Axis
    fresh: Axis
    factor: int


Factor = Leaf | Const | Size | Product | Inverse | Exp | Function | Peak | Component | Renamed


class Terms:
    """An arena of factors and polynomials. All arithmetic is memoised; nothing is shared between
    arenas.
    """

    MOST_TERMS = (
        48  # a larger polynomial becomes an opaque atom: it can still be matched as a whole
    )

    def __init__(self) -> None:
        self._factors: dict[Factor, int] = {}
        self.kind: list[Factor] = []
        self.free: list[frozenset[Axis]] = []
        self._components: dict[tuple[frozenset[Axis], Mono], int] = {}
        self._polys: dict[object, Poly] = {}
        self._memo: dict[object, Poly] = {}
        self._masses: dict[int, Number] = {}
        self._weights: dict[int, Number] = {}
        self._fresh = 1_000_000  # renamed bound axes

    # -- factors ---------------------------------------------------------------------------------
    def factor(self, kind: Factor, free: frozenset[Axis]) -> int:
        """The id of a factor."""
        found = self._factors.get(kind)
        if found is None:
            found = self._factors[kind] = len(self.kind)
            self.kind.append(kind)
            self.free.append(free)
        return found

    def poly(self, terms: dict[Mono, Number]) -> Poly:
        """The interned polynomial with these terms."""
        items = tuple(sorted((m, c) for m, c in terms.items() if c))
        found = self._polys.get(items)
        if found is None:
            axes: frozenset[Axis] = frozenset().union(
                *(self.free[f] for m, _ in items for f, _ in m)
            )
            found = self._polys[items] = Poly(len(self._polys), items, axes)
        return found

    def atom(self, kind: Factor, free: frozenset[Axis] = frozenset()) -> Poly:
        """A polynomial that is one atom."""
        return self.poly({((self.factor(kind, free), 1),): 1})

    def constant(self, value: float) -> Poly:
        """A constant; 0 and 1 are the field's, others are atoms (so that powers of them stay
        bounded).
        """
        if value in (0.0, 1.0, -1.0):
            return self.poly({ONE: int(value)})
        return self.atom(Const(value))

    # -- arithmetic ------------------------------------------------------------------------------
    def add(self, a: Poly, b: Poly, sign: int = 1) -> Poly:
        """a + sign * b."""
        key = ("+", a.id, b.id, sign)
        if key not in self._memo:
            terms = dict(a.terms)
            for m, c in b.terms:
                terms[m] = terms.get(m, 0) + sign * c
            self._memo[key] = self.poly(terms)
        return self._memo[key]

    def mul(self, a: Poly, b: Poly) -> Poly:
        """a * b."""
        key = ("*", min(a.id, b.id), max(a.id, b.id))
        if key not in self._memo:
            if (len(a.terms) > 1 and len(b.terms) > 1) or len(a.terms) * len(
                b.terms
            ) > self.MOST_TERMS:
                # Two sums are not multiplied out: the expansion has many parts that no kernel
                # wants.
                first, second = sorted((a, b), key=lambda x: x.id)
                self._memo[key] = self.atom(Product(first, second), a.axes | b.axes)
            else:
                terms: dict[Mono, Number] = {}
                for m, c in a.terms:
                    for n, d in b.terms:
                        p = _product(m, n)
                        terms[p] = terms.get(p, 0) + c * d
                self._memo[key] = self.poly(terms)
        return self._memo[key]

    def inverse(self, a: Poly) -> Poly:
        """1 / a."""
        if len(a.terms) == 1:
            ((mono, c),) = a.terms
            return self.poly({tuple((f, -e) for f, e in mono): _reciprocal(c)})
        return self.atom(Inverse(a), a.axes)

    def sum(self, a: Poly, axis: Axis) -> Poly:
        """The sum over an axis."""
        key = ("sum", a.id, axis)
        if key not in self._memo:
            terms: dict[Mono, Number] = {}
            for m, c in a.terms:
                p = self._sum_mono(m, axis)
                terms[p] = terms.get(p, 0) + c
            self._memo[key] = self.poly(terms)
        return self._memo[key]

    def _sum_mono(self, mono: Mono, axis: Axis) -> Mono:
        inside = [(f, e) for f, e in mono if axis in self.free[f]]
        outside = tuple((f, e) for f, e in mono if axis not in self.free[f])
        if not inside:
            size = self.factor(Size(axis), frozenset())
            return _product(outside, ((size, 1),))
        axes, body = {axis}, ONE
        for f, e in inside:
            kind = self.kind[f]
            if isinstance(kind, Component) and e == 1:
                bound, inner = kind.axes, kind.body
                clash = bound & axes
                if clash:  # two sums over one axis: rename one, bound names are local
                    bound, inner = self._rename(bound, inner, clash)
                axes |= bound
                body = _product(body, inner)
            else:
                body = _product(body, ((f, e),))
        return _product(outside, ((self._component(frozenset(axes), body), 1),))

    def _component(self, axes: frozenset[Axis], body: Mono) -> int:
        found = self._components.get((axes, body))
        if found is None:
            free = frozenset().union(*(self.free[f] for f, _ in body)) - axes
            found = self._components[axes, body] = self.factor(Component(axes, body), free)
        return found

    def _rename(
        self, bound: frozenset[Axis], inner: Mono, clash: frozenset[Axis]
    ) -> tuple[frozenset[Axis], Mono]:
        for axis in sorted(clash):
            self._fresh += 1
            fresh = self._fresh
            bound = (bound - {axis}) | {fresh}
            renamed = []
            for f, e in inner:
                if axis in self.free[f]:
                    g = self.factor(Renamed(axis, fresh, f), (self.free[f] - {axis}) | {fresh})
                    renamed.append((g, e))
                else:
                    renamed.append((f, e))
            inner = tuple(sorted(renamed))
        return bound, inner

    def exp(self, a: Poly) -> Poly:
        """exp(a) as a product over the terms of a."""
        mono: dict[int, Number] = {}
        for m, c in a.terms:
            free: frozenset[Axis] = frozenset().union(*(self.free[f] for f, _ in m))
            mono[self.factor(Exp(m), free)] = c
        return self.poly({tuple(sorted(mono.items())): 1})

    def function(self, name: str, *args: Poly) -> Poly:
        """An uninterpreted elementwise function."""
        free: frozenset[Axis] = frozenset().union(*(a.axes for a in args))
        return self.atom(Function(name, args), free)

    def peak(self, a: Poly, axis: Axis) -> Poly:
        """The maximum over an axis; a maximum of a maximum over one axis is itself."""
        if len(a.terms) == 1 and len(a.terms[0][0]) == 1:
            kind = self.kind[a.terms[0][0][0][0]]
            if isinstance(kind, Peak) and axis in kind.axes:
                return a
        return self.atom(Peak(frozenset({axis}), a), a.axes - {axis})

    def mass(self, a: Poly) -> Number | None:
        """How many atoms a monomial is made of, powers counted, gauge aside; None for a longer
        polynomial.
        """
        if len(a.terms) != 1:
            return None
        found = self._masses.get(a.id)
        if found is None:
            found = self._masses[a.id] = sum(abs(e) * self._weight_of(f) for f, e in a.terms[0][0])
        return found

    def _total(self, mono: Mono) -> Number:
        total: Number = 0
        for f, e in mono:
            total += abs(e) * self._weight_of(f)
        return total

    def _weight_of(self, factor: int) -> Number:
        """Atoms in one factor."""
        found = self._weights.get(factor)
        if found is None:
            kind = self.kind[factor]
            if self.is_gauge(factor):
                found = 0
            elif isinstance(kind, Component):
                found = self._total(kind.body)
            else:
                found = 1
            self._weights[factor] = found
        return found

    def cancels(self, result: Poly, *operands: Poly) -> bool:
        """True if a product, quotient or sum of monomials undid a factor: its mass is not that of
        its operands.
        """
        masses = [self.mass(a) for a in operands]
        got = self.mass(result)
        if got is None or any(m is None for m in masses):
            return False
        return bool(got != sum(m for m in masses if m is not None))

    def drops(self, result: Poly, a: Poly, b: Poly) -> bool:
        """True if a sum or difference lost a term of its operands."""
        return len(result.terms) < len({m for m, _ in a.terms} | {m for m, _ in b.terms})

    def without_peaks(self, a: Poly) -> Poly:
        """The polynomial without the terms that are a maximum (a shift of an exponent)."""
        return self.poly({m: c for m, c in a.terms if not self._is_peak(m)})

    def _is_peak(self, mono: Mono) -> bool:
        return len(mono) == 1 and isinstance(self.kind[mono[0][0]], Peak)

    # -- gauge -----------------------------------------------------------------------------------
    def is_gauge(self, factor: int) -> bool:
        """True for exp of a maximum: softmax may be multiplied and divided by it at will."""
        kind = self.kind[factor]
        return isinstance(kind, Exp) and self._is_peak(kind.of)

    def strip(self, mono: Mono) -> Mono:
        """The monomial without gauge factors."""
        return tuple((f, e) for f, e in mono if not self.is_gauge(f))


def _reciprocal(c: Number) -> Number:
    """1 / c, an int where it is one."""
    return c if c in (1, -1) else Fraction(1) / c


def _product(a: Mono, b: Mono) -> Mono:
    if not a:
        return b
    if not b:
        return a
    out = dict(a)
    for f, e in b:
        total = out.get(f, 0) + e
        if total:
            out[f] = total
        else:
            del out[f]
    return tuple(sorted(out.items()))


class Goal:
    """What may become part of some goal polynomials: built once, then asked for each new value."""

    def __init__(self, terms: Terms, goals: Iterable[Poly]) -> None:
        self.arena = terms
        self.contexts: list[tuple[tuple[tuple[Mono, Number], ...], frozenset[int]]] = []
        self._seen: set[object] = set()
        self._useful: dict[int, bool] = {}
        for goal in goals:
            self._context(goal)

    def _context(self, poly: Poly) -> None:
        if poly.id in self._seen:
            return
        self._seen.add(poly.id)
        terms = tuple((self.arena.strip(m), c) for m, c in poly.terms)
        self.contexts.append((terms, self._atoms(terms)))
        for mono, _ in poly.terms:
            self._factors(mono)

    def _factors(self, mono: Mono) -> None:
        t = self.arena
        for f, e in mono:
            if ("factor", f, e < 0) in self._seen:
                continue
            self._seen.add(("factor", f, e < 0))
            if e < 0:
                self._context(t.poly({((f, -e),): 1}))
            kind = t.kind[f]
            match kind:
                case Component():
                    self._factors(kind.body)
                case Exp():
                    self._context(t.poly({kind.of: 1}))
                case Function():
                    for arg in kind.args:
                        self._context(arg)
                case Product():
                    self._context(kind.first)
                    self._context(kind.second)
                case Peak():
                    self._context(kind.of)
                    self._context(t.poly({((f, 1),): 1}))
                case Inverse():
                    self._context(kind.of)
                case Renamed():
                    self._factors(((kind.factor, 1),))
                case Leaf() | Const() | Size():
                    pass
                case _:
                    assert_never(kind)

    def useful(self, poly: Poly) -> bool:
        """True if some context contains `poly` times one cofactor (a product, sums over axes
        included).
        """
        known = self._useful.get(poly.id)
        if known is None:
            known = self._useful[poly.id] = self._test(poly)
        return known

    def _test(self, poly: Poly) -> bool:
        terms = [(self.arena.strip(m), c) for m, c in poly.terms]
        atoms = self._atoms(terms)
        return any(a >= atoms and self._within(terms, context) for context, a in self.contexts)

    def _atoms(self, terms: Iterable[tuple[Mono, Number]]) -> frozenset[int]:
        """What the terms are made of, sums opened: a part of a context has no other atoms."""
        out: set[int] = set()
        for mono, _ in terms:
            for f, e in mono:
                kind = self.arena.kind[f]
                if isinstance(kind, Component) and e > 0:
                    out.update(g for g, _ in kind.body)
                else:
                    out.add(f)
        return frozenset(out)

    def _within(
        self, terms: list[tuple[Mono, Number]], context: tuple[tuple[Mono, Number], ...]
    ) -> bool:
        """True if terms * cofactor is part of the context, with one ratio of coefficients."""
        if not terms or len(terms) > len(context):
            return False
        first, c = terms[0]
        for mono, d in context:
            if c != d and (len(terms) > 1 or c != 1):
                continue  # a multiple of what is wanted
            for left in self._leftovers(first, mono):
                if all(
                    any(e == f and left in self._leftovers(v, m) for m, f in context)
                    for v, e in terms[1:]
                ):
                    return True
        return False

    def _leftovers(self, v: Mono, t: Mono) -> Iterator[object]:
        """What is left of t for each way in which v can be completed to it, nothing being
        undone.
        """
        arena = self.arena
        slots: dict[int, Number] = {}
        components: list[tuple[frozenset[Axis], dict[int, Number]]] = []
        for f, e in t:
            kind = arena.kind[f]
            if isinstance(kind, Component) and e > 0:
                for _ in range(int(e)):
                    components.append((kind.axes, dict(kind.body)))
            else:
                slots[f] = e
        items: list[tuple[int, Number]] = []
        for f, e in v:
            if isinstance(arena.kind[f], Component) and e > 0:
                items.extend([(f, 1)] * int(e))
            else:
                items.append((f, e))
        return self._place(items, 0, slots, components)

    def _place(
        self,
        items: list[tuple[int, Number]],
        at: int,
        slots: dict[int, Number],
        components: list[tuple[frozenset[Axis], dict[int, Number]]],
    ) -> Iterator[object]:
        if at == len(items):
            parts = sorted(
                (tuple(sorted(b)), tuple(sorted(i.items()))) for b, i in components if i or b
            )
            yield tuple(sorted(slots.items())), tuple(parts)
            return
        f, e = items[at]
        kind = self.arena.kind[f]
        if isinstance(kind, Component) and e > 0:
            axes = kind.axes
            for i, (bound, inner) in enumerate(components):
                if not axes <= bound or any(not _covers(inner.get(g, 0), x) for g, x in kind.body):
                    continue
                left = _minus(inner, kind.body)
                if any(axes & self.arena.free[g] for g in left):
                    continue  # summed too early: something left depends on the axis
                yield from self._place(
                    items,
                    at + 1,
                    slots,
                    [*components[:i], (bound - axes, left), *components[i + 1 :]],
                )
            return
        if _covers(slots.get(f, 0), e):
            yield from self._place(items, at + 1, _minus(slots, ((f, e),)), components)
        for i, (bound, inner) in enumerate(components):
            if _covers(inner.get(f, 0), e):
                rest = [*components[:i], (bound, _minus(inner, ((f, e),))), *components[i + 1 :]]
                yield from self._place(items, at + 1, slots, rest)


def _covers(have: Number, want: Number) -> bool:
    """True if a power `have` contains a power `want` of the same sign."""
    return bool(have >= want > 0 or have <= want < 0)


def _minus(a: dict[int, Number], b: Mono) -> dict[int, Number]:
    out = dict(a)
    for f, e in b:
        left = out[f] - e
        if left:
            out[f] = left
        else:
            del out[f]
    return out
