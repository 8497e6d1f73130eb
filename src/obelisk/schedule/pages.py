"""The page plan: values that are never alive together share memory.

Takes a `StepShape` and a kind of synchronisation; gives a `PagePlan`. Lifetimes are counted in
operators of one layer, from the first that writes to the last that reads; pages are placed largest
first at the lowest free offset. Operators that counters let cores pass at different times (from the
rotation to the end of attention, by head group) count as one moment.
"""

from __future__ import annotations

from obelisk.schedule.types import Page, PagePlan, Sync
from obelisk.tasks.dag import operators
from obelisk.tasks.kinds import TABLE, TaskKind, value_width
from obelisk.tasks.shape import StepShape

_KEPT = frozenset({"token", "x", "logits", "best"})  # outlive a layer, or a step


_LOOSE = frozenset({TaskKind.QKV, TaskKind.ROPE, TaskKind.ATTEND, TaskKind.COMBINE})


def lifetimes(s: StepShape, sync: Sync) -> dict[str, tuple[int, int]]:
    """For each value that lives within a layer: its first writer and last reader, as moments in
    the layer's operators.
    """
    ops = [op for op in operators(s) if op.layer == 0]
    out: dict[str, tuple[int, int]] = {}
    i, loose = -1, False
    for op in ops:
        joined = sync is Sync.COUNTER and loose and op.kind in _LOOSE
        i, loose = i if joined else i + 1, op.kind in _LOOSE
        for task in op.tasks:
            row = TABLE[task.kind]
            for region in (*row.reads(s, task), *row.writes(s, task)):
                first, _ = out.get(region.value, (i, i))
                out[region.value] = (first, i)
    return out


def plan_pages(s: StepShape, sync: Sync) -> PagePlan:
    """Offsets for every value, in fp32 elements."""
    widths = value_width(s)
    lives = lifetimes(s, sync)
    placed: list[tuple[str, Page]] = []
    at = 0
    always = [v for v in widths if v in _KEPT or v not in lives or v.startswith("h")]
    for value in always:  # norms are written more than once in a layer: they keep their page
        placed.append((value, Page(at, widths[value], widths[value])))
        at += widths[value] * s.batch
    base, end = at, at
    shared: list[tuple[str, Page]] = []
    for value in sorted((v for v in widths if v not in always), key=lambda v: (-widths[v], v)):
        size, (first, last) = widths[value] * s.batch, lives[value]
        taken = sorted(
            (p.offset, p.offset + p.width * s.batch)
            for v, p in shared
            if lives[v][0] <= last and first <= lives[v][1]
        )
        offset = base
        for low, high in taken:
            if offset + size <= low:
                break
            offset = max(offset, high)
        shared.append((value, Page(offset, widths[value], widths[value])))
        end = max(end, offset + size)
    return PagePlan((*placed, *shared), end)
