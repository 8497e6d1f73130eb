"""What number a constant of a graph stands for.

A constant is stored as a float and used in float32, but it was written as 0.1, 1e-5 or 1 / sqrt(7).
Taken as exact binary fractions, two spellings of one number that differ in the last bit would be
two numbers. So a constant stands for the decimal that it was written as, when that is short, else
for the simplest fraction that float32 cannot tell from it.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

_DIGITS = 7  # significant digits that float32 keeps apart
_WINDOW = Fraction(1, 1 << 25)  # half a unit in float32's last place, relative


@lru_cache(maxsize=4096)
def meant(value: float) -> Fraction:
    """The rational that a finite constant stands for."""
    exact = Fraction(value)
    if exact.denominator == 1 and abs(exact) < 1 << 53:
        return exact
    text = repr(float(value))
    digits = text.lower().split("e")[0].replace(".", "").strip("-0")
    if len(digits) <= _DIGITS:
        return Fraction(text)
    size = abs(exact)
    found = _simplest(size * (1 - _WINDOW), size * (1 + _WINDOW))
    return found if exact > 0 else -found


def _simplest(low: Fraction, high: Fraction) -> Fraction:
    """The fraction with the smallest denominator between two positive ones (Stern-Brocot)."""
    floor = low.numerator // low.denominator
    if floor == low:
        return Fraction(floor)
    if floor + 1 <= high:
        return Fraction(floor + 1)
    return floor + 1 / _simplest(1 / (high - floor), 1 / (low - floor))
