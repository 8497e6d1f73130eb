"""Order statistics for timings: medians, their intervals, and a paired test. No assumption of a
distribution.

Takes lists of seconds; gives numbers. Timings are skewed and drift, so means, variances and t-tests
are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median

__all__ = ["interval", "median", "quartile_range", "slower_p"]


def quartile_range(values: Sequence[float]) -> float:
    """Interquartile range by linear interpolation; 0 for one value."""
    ordered = sorted(values)

    def at(q: float) -> float:
        place = q * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.75) - at(0.25)


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Confidence interval of the median from order statistics (binomial); the whole range when
    values are few.
    """
    ordered, n = sorted(values), len(values)
    tail, reach = 0.0, 0
    for k in range(n // 2):
        tail += comb(n, k) / 2**n
        if 2 * tail > 1 - confidence:
            break
        reach = k + 1
    first = max(reach - 1, 0)
    return ordered[first], ordered[n - 1 - first]


def slower_p(ours: Sequence[float], leaders: Sequence[float]) -> float:
    """One-sided sign test on paired rounds: how likely so many losses are if both were equally
    fast.

    Small means `ours` is slower. Rounds are paired by position, so drift that hits both cancels;
    ties are dropped.
    """
    pairs = [(a, b) for a, b in zip(ours, leaders, strict=False) if a != b]
    n, losses = len(pairs), sum(a > b for a, b in pairs)
    if n == 0:
        return 1.0
    return sum(comb(n, k) for k in range(losses, n + 1)) / 2.0**n
