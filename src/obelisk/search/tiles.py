"""What tiles of a block are to each other: when two may meet, how their dims broadcast, and how
values run through the iterations of a loop. Pure functions on axes and tiny arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from obelisk.search import field as F
from obelisk.search.axes import Axis, Dims
from obelisk.search.program import aligned
from obelisk.search.value import LEAD, Stage, Value


def led(x: Any) -> Any:
    """The blocks' axis as the tile's first dim."""
    return x.reshape((1, 1, x.shape[0], *x.shape[LEAD:]))


def turned(x: F.Pair, axes: Sequence[int]) -> F.Pair:
    """Array axes permuted."""
    return x[0].transpose(axes), None if x[1] is None else x[1].transpose(axes)


def given(data: F.Pair) -> Callable[[], F.Pair]:
    """Values that are known already."""
    return lambda: data


def meet(a: Value, b: Value) -> bool:
    """True if two values exist at one time. Scalars (constants, sizes) exist everywhere."""
    if a.phase is b.phase:
        return True
    first, last = sorted((a, b), key=lambda v: v.phase)
    if last.phase is Stage.COMBINE:
        return first.phase is Stage.INVARIANT and first.dims == ()
    return first.phase is Stage.INVARIANT


def both(a: Value, b: Value) -> tuple[F.Pair, F.Pair]:
    rank = max(len(a.dims), len(b.dims))
    return aligned(a.data, LEAD, rank), aligned(b.data, LEAD, rank)


@lru_cache(maxsize=65536)
def broadcast(a: Dims, b: Dims) -> Dims | None:
    """Axes of an elementwise result, aligned at the right; None where two different axes meet."""
    if a == b:
        return a
    rank = max(len(a), len(b))
    out: list[Axis | None] = []
    for x, y in zip((None,) * (rank - len(a)) + a, (None,) * (rank - len(b)) + b, strict=True):
        if x is not None and y is not None and x != y:
            return None
        out.append(x if x is not None else y)
    named = [x for x in out if x is not None]
    return tuple(out) if len(set(named)) == len(named) else None


def iterations(x: F.Pair, axis: int) -> list[F.Pair]:
    n = x[0].shape[axis]
    return [
        (np.take(x[0], [i], axis), None if x[1] is None else np.take(x[1], [i], axis))
        for i in range(n)
    ]


def running(x: F.Pair, axis: int) -> F.Pair:
    """Prefix maxima along the loop's axis."""
    out: list[F.Pair] = []
    for step in iterations(x, axis):
        out.append(step if not out else F.larger(out[-1], step))
    q = None if out[0][1] is None else np.concatenate([o[1] for o in out], axis)
    return np.concatenate([o[0] for o in out], axis), q


def rescaled(x: F.Pair, m: F.Pair, axis: int) -> F.Pair:
    """sum over i of x_i * exp(m_i - m_last)."""
    xs, ms = iterations(x, axis), iterations(m, axis)
    total: F.Pair | None = None
    for xi, mi in zip(xs, ms * (len(xs) // len(ms)), strict=True):
        term = F.mul(xi, F.exp(F.linear(mi, ms[-1], -1)))
        total = term if total is None else F.linear(total, term, 1)
    assert total is not None
    return total
