"""Memory plans: offsets for buffers whose lifetimes are known, within as few bytes as possible.

Takes byte sizes and closed lifetimes (first and last step in which a buffer is alive), gives byte
offsets such that no two buffers that are alive together overlap. Greedy best fit in a few orders
comes first; only where the best of them misses the lower bound (the peak of live bytes) a
constraint solver (CP-SAT, 1 s) packs the rest. Deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

ALIGN = 64  # bytes: a cache line, and at least a vector register
SOLVER_WORK = 1.0  # the solver's deterministic time, about a second
SOLVER_LIMIT = 100  # buffers; beyond this the solver does not improve on greedy in its time


@dataclass(frozen=True, slots=True)
class Life:
    """Bytes of a buffer, and the first and last step in which it is alive."""

    size: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Offsets in the order of the request, bytes in all, and the lower bound."""

    offsets: tuple[int, ...]
    total: int
    bound: int


def _rounded(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def live_bound(lives: Sequence[Life]) -> int:
    """Peak of live bytes (sizes rounded to `ALIGN`): no plan can be smaller."""
    change: dict[int, int] = {}
    for b in lives:
        change[b.first] = change.get(b.first, 0) + _rounded(b.size)
        change[b.last + 1] = change.get(b.last + 1, 0) - _rounded(b.size)
    peak = now = 0
    for t in sorted(change):
        now += change[t]
        peak = max(peak, now)
    return peak


def _together(a: Life, b: Life) -> bool:
    return a.first <= b.last and b.first <= a.last


def _greedy(lives: Sequence[Life], order: Sequence[int]) -> list[int]:
    """Place buffers in `order`, each into the smallest gap that holds it, else on top."""
    offsets = [-1] * len(lives)
    placed: list[int] = []
    for i in order:
        size = _rounded(lives[i].size)
        busy = sorted(
            (offsets[j], offsets[j] + _rounded(lives[j].size))
            for j in placed
            if _together(lives[i], lives[j])
        )
        end, best, best_gap = 0, -1, -1
        for start, stop in busy:
            gap = start - end
            if gap >= size and (best < 0 or gap < best_gap):
                best, best_gap = end, gap
            end = max(end, stop)
        offsets[i] = best if best >= 0 else end
        placed.append(i)
    return offsets


def _height(lives: Sequence[Life], offsets: Sequence[int]) -> int:
    return max((o + _rounded(b.size) for o, b in zip(offsets, lives, strict=True)), default=0)


def _solve(lives: Sequence[Life], bound: int) -> list[int] | None:
    """CP-SAT: rectangles (offset x lifetime) that do not overlap within `bound` bytes; None if it
    found none in its time.

    One worker and a limit in the solver's own units of work make the answer a function of the
    input: the text of a kernel must not depend on how busy the machine is. (Eight workers that
    interleave still gave different plans in two runs.)
    """
    try:  # imported here: it costs a second, and is rarely needed
        from ortools.sat.python import cp_model
    except ImportError:  # a machine that only tunes: the greedy plan stays
        return None
    model = cp_model.CpModel()
    top = bound // ALIGN
    offsets, rows, columns = [], [], []
    for i, b in enumerate(lives):
        size = _rounded(b.size) // ALIGN
        offset = model.new_int_var(0, top - size, f"o{i}")
        offsets.append(offset)
        rows.append(model.new_fixed_size_interval_var(offset, size, f"y{i}"))
        columns.append(model.new_fixed_size_interval_var(b.first, b.last - b.first + 1, f"x{i}"))
    model.add_no_overlap_2d(columns, rows)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = SOLVER_WORK
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return [int(solver.value(o)) * ALIGN for o in offsets]


def plan(lives: Sequence[Life]) -> Plan:
    """Offsets for all buffers. Cost: n^2 for greedy; at most `SOLVER_SECONDS` where greedy misses
    the bound.
    """
    bound = live_bound(lives)
    keys: list[Callable[[int], tuple[int, ...]]] = [
        lambda i: (-_rounded(lives[i].size), lives[i].first, i),
        lambda i: (-(lives[i].last - lives[i].first), -lives[i].size, i),
        lambda i: (-_rounded(lives[i].size) * (lives[i].last - lives[i].first + 1), i),
        lambda i: (lives[i].first, -lives[i].size, i),
    ]
    best: list[int] = []
    for key in keys:
        offsets = _greedy(lives, sorted(range(len(lives)), key=key))
        if not best or _height(lives, offsets) < _height(lives, best):
            best = offsets
        if _height(lives, best) == bound:
            break
    height = _height(lives, best)
    if height > bound and len(lives) <= SOLVER_LIMIT:
        solved = _solve(lives, bound)
        if solved is not None:
            best, height = solved, bound
    return Plan(tuple(best), height, bound)
