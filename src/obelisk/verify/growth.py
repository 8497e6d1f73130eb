"""How large the formulas behind a field value can be: degrees, exponential terms and square roots.

Each field value carries a `Growth`, an upper bound over its elements, from which `bound_text`
states how likely a wrong candidate is to pass. Sums assume that every term has its own denominator:
the worst case, so that a stated bound is never too good.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log2

from obelisk.verify.modular import P, Q

_CAP = 1e300


def _cap(x: float) -> float:
    return min(x, _CAP)


def _power(x: float, n: float) -> float:
    if x <= 1:
        return x
    return _CAP if n * log2(x) > 900 else _cap(x**n)


@dataclass(frozen=True, slots=True)
class Growth:
    """Bound on a value seen as (sum of f_i e^g_i) / (sum of f'_i e^g'_i).

    Attributes:
        top, bottom: degrees of the coefficients in numerator and denominator.
        terms, below: exponential terms in numerator and denominator (1 where there is no
            exponential).
        exponent: degree of the exponents, 0 where there is none.
        roots: square roots that occur.
    """

    top: float = 0
    bottom: float = 0
    terms: float = 1
    below: float = 1
    exponent: float = 0
    roots: float = 0

    def plus(self, other: Growth) -> Growth:
        """Of a sum or difference."""
        exponent = max(self.exponent, other.exponent)
        return Growth(
            _cap(max(self.top + other.bottom, other.top + self.bottom)),
            _cap(self.bottom + other.bottom),
            _cap(self.terms * other.below + other.terms * self.below) if exponent else 1,
            _cap(self.below * other.below),
            exponent,
            _cap(self.roots + other.roots),
        )

    def times(self, other: Growth) -> Growth:
        """Of a product."""
        return Growth(
            _cap(self.top + other.top),
            _cap(self.bottom + other.bottom),
            _cap(self.terms * other.terms),
            _cap(self.below * other.below),
            _cap(self.exponent + other.exponent),
            _cap(self.roots + other.roots),
        )

    def inverse(self) -> Growth:
        """Of the reciprocal."""
        return Growth(self.bottom, self.top, self.below, self.terms, self.exponent, self.roots)

    def summed(self, n: int) -> Growth:
        """Of a sum of `n` such values."""
        if n <= 1:
            return self
        terms, below = 1.0, 1.0
        if self.exponent:
            terms = _cap(n * self.terms * _power(self.below, n - 1))
            below = _power(self.below, n)
        return Growth(
            _cap(self.top + (n - 1) * self.bottom),
            _cap(n * self.bottom),
            terms,
            below,
            self.exponent,
            _cap(n * self.roots),
        )

    def exponential(self) -> Growth:
        """Of e to this value."""
        return Growth(exponent=max(1.0, self.top + self.bottom), roots=self.roots)

    def root(self) -> Growth:
        """Of the square root."""
        return Growth(self.top, self.bottom, self.terms, self.below, self.exponent, self.roots + 1)

    def joined(self, other: Growth) -> Growth:
        """Of elements of either kind side by side."""
        return Growth(
            max(self.top, other.top),
            max(self.bottom, other.bottom),
            max(self.terms, other.terms),
            max(self.below, other.below),
            max(self.exponent, other.exponent),
            max(self.roots, other.roots),
        )


INPUT = Growth(top=1)
CONSTANT = Growth()


def miss_probability(program: Growth, candidate: Growth) -> float:
    """Upper bound on the chance that one draw does not see a difference; `inf` where the theory
    says nothing.

    Without exponentials it is Schwartz-Zippel, D / P, with D the degree of the difference's
    numerator, doubled for each square root (the norm over its conjugates). With exponentials it is
    Theorem 2 of the Mirage paper, 8 d k**4 / Q + Q**(-1 / k**2).
    """
    difference = program.plus(candidate)
    roots = _power(2.0, difference.roots) if difference.roots else 1.0
    degree = max(1.0, difference.top) * roots
    if not difference.exponent:
        chance = degree / P
    else:
        d, k = max(degree, difference.exponent * roots), max(1.0, difference.terms)
        if log2(k) * 4 + log2(d) > 60:
            return inf
        chance = 8 * d * k**4 / Q + Q ** (-1 / k**2)
    return chance if chance < 1 else inf
