"""The judge of a block's ring of weights: loader and consumer warps, slots, copies in flight.

Takes a `GpuSchedule`; gives `Fault`s. For every block:

1. its streaming tasks are those of its items, in order, with the units and chunks of the table;
2. every chunk is copied once and multiplied once, from the slot that it was copied to, by one warp,
   between the joins of the task before and of its own;
3. a slot is written again only after it was released as often as it was filled before (rule of
   reuse), a warp waits for just the copy that it takes, and releases it;
4. at no time are more copies under way than the tiling allows, nor, where they may come in another
   order than they were asked for, so many that a warp, which tells a slot's copies apart by parity,
   finds a slot that still waits for the copy before its own;
5. loader and warps together come to their ends (waits are monotone: one execution decides).

Rule 3 decides safety: each copy has one take, which waits for that copy and releases its slot, so j
releases before copy j of a slot can only be those of its first j copies.

Where keys and values go through the ring, a cell's are judged at the whole context: a shorter one
has fewer chunks, in the same order. Warps that share one of these chunks count as one.

Blocks whose rings are one object are judged once; there are as many different rings as ways to have
one unit more or less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from obelisk.schedule.check import Fault
from obelisk.schedule.gpu_tasks import GpuStep
from obelisk.schedule.gpu_types import (
    Chunk,
    Compute,
    Copy,
    GpuProgram,
    GpuSchedule,
    Join,
    Ring,
    Take,
)

_MOST = 8


def streams(step: GpuStep, program: GpuProgram) -> tuple[tuple[int, int], ...]:
    """Units, and chunks of a unit, of a program's tasks that go through the ring."""
    return tuple(
        (i.task.hi - i.task.lo, step.chunks(i.task.kind))
        for i in program if isinstance(i, Compute) and step.chunks(i.task.kind)
    )  # fmt: skip


def _wanted(ring: Ring) -> Counter[Chunk]:
    return Counter(
        Chunk(task, unit, part)
        for task, (units, chunks) in enumerate(ring.tasks)
        for unit in range(units) for part in range(chunks)
    )  # fmt: skip


def _copies(
    ring: Ring, stages: int, flight: int
) -> tuple[list[Fault], dict[Chunk, tuple[int, int]]]:
    """Rules 3 and 4 for the loader; gives slot and number within the slot of every chunk."""
    out: list[Fault] = []
    uses = [0] * stages
    where: dict[Chunk, tuple[int, int]] = {}
    k = 0
    for item in ring.loader:
        if not isinstance(item, Copy):
            out.append(Fault("role", f"the loader meets at {item.name}: it must never stop there"))
            continue
        if not 0 <= item.slot < stages:
            out.append(Fault("ring", f"copy {k} goes to slot {item.slot} of {stages}"))
            break
        if item.freed < uses[item.slot]:
            out.append(
                Fault("ring", f"copy {k} overwrites slot {item.slot} after {item.freed} releases, "
                      f"{uses[item.slot]} copies lie before it")
            )  # fmt: skip
        if k + 1 - item.landed > flight:
            out.append(
                Fault("flight", f"copy {k} may be the {k + 1 - item.landed}th under way, "
                      f"{flight} may be")
            )  # fmt: skip
        where[item.chunk] = (item.slot, uses[item.slot])
        uses[item.slot] += 1
        k += 1
    return out, where


def _takes(ring: Ring, where: dict[Chunk, tuple[int, int]]) -> list[Fault]:
    """Rules 2 and 3 for the warps."""
    out: list[Fault] = []
    for warp, items in enumerate(ring.warps):
        task = 0
        for item in items:
            if isinstance(item, Join):
                if item.task != task:
                    out.append(Fault("join", f"warp {warp} joins task {item.task}, not {task}"))
                task = item.task + 1
                continue
            if item.chunk.task != task:
                out.append(Fault("join", f"warp {warp} takes {item.chunk} before the join of the "
                                 "task before"))  # fmt: skip
            slot, number = where.get(item.chunk, (-1, -1))
            if item.slot != slot or item.filled != number + 1:
                out.append(
                    Fault("ring", f"warp {warp} takes {item.chunk} from slot {item.slot} after "
                          f"{item.filled} copies: it is copy {number} of slot {slot}")
                )  # fmt: skip
            if not item.releases:
                out.append(Fault("ring", f"warp {warp} never releases slot {item.slot}"))
        if task != len(ring.tasks):
            out.append(Fault("join", f"warp {warp} joins {task} of {len(ring.tasks)} tasks"))
        if len(out) > _MOST:
            break
    return out


def _mistaken(ring: Ring, stages: int) -> list[Fault]:
    """Rule 4 for copies that come in any order: when a warp comes to copy k, the copy before it in
    that slot, k - stages, has come. That is known of copies of earlier tasks, whose joins all warps
    were at; of those that the loader saw before it asked for what the warp took last; and of what
    the warp took itself.
    """
    copies = [c for c in ring.loader if isinstance(c, Copy)]
    number = {c.chunk: k for k, c in enumerate(copies)}
    first: dict[int, int] = {}
    for k, c in enumerate(copies):
        first.setdefault(c.chunk.task, k)
    for warp, items in enumerate(ring.warps):
        known, taken = 0, set[int]()
        for item in items:
            if not isinstance(item, Take):
                continue
            k = number[item.chunk]
            known = max(known, first[item.chunk.task])
            if k - stages >= known and k - stages not in taken:
                what = f"copy {k - stages} of slot {item.slot} for copy {k}"
                why = f"{known} copies have come for sure"
                return [Fault("flight", f"warp {warp} may take {what}: {why}")]
            known = max(known, copies[k].landed)
            taken.add(k)
    return []


def _progress(ring: Ring, stages: int) -> list[Fault]:
    """Rule 5: run loader and warps until nothing moves; copies land at once."""
    copies = [c for c in ring.loader if isinstance(c, Copy)]
    filled, freed = [0] * stages, [0] * stages
    at, k, joins = [0] * len(ring.warps), 0, Counter[int]()
    moved = True
    while moved:
        moved = False
        while (
            k < len(copies) and freed[copies[k].slot] >= copies[k].freed and copies[k].landed <= k
        ):
            filled[copies[k].slot] += 1
            k, moved = k + 1, True
        for w, items in enumerate(ring.warps):
            while at[w] < len(items):
                item = items[at[w]]
                if isinstance(item, Join):
                    if joins[item.task] < len(ring.warps):
                        # Arrive once, and wait for the others.
                        key = -1 - item.task * len(ring.warps) - w
                        if not joins[key]:
                            joins[key] = 1
                            joins[item.task] += 1
                            moved = True
                        if joins[item.task] < len(ring.warps):
                            break
                elif filled[item.slot] < item.filled:
                    break
                else:
                    freed[item.slot] += item.releases
                at[w], moved = at[w] + 1, True
    if k < len(copies):
        return [Fault("progress", f"the loader waits for ever before copy {k}, {copies[k]}")]
    stuck = next((w for w, items in enumerate(ring.warps) if at[w] < len(items)), None)
    if stuck is None:
        return []
    return [Fault("progress", f"warp {stuck} waits for ever at {ring.warps[stuck][at[stuck]]}")]


def judge_ring(
    ring: Ring, stages: int, flight: int, warps: int, ordered: bool = True
) -> list[Fault]:
    """All faults of one ring by itself; `ordered`: copies come as they were asked for."""
    if len(ring.warps) != warps:
        return [Fault("role", f"{len(ring.warps)} warps take chunks, the block has {warps}")]
    out, where = _copies(ring, stages, flight)
    if out:
        return out[:_MOST]
    want = _wanted(ring)
    copied = Counter(c.chunk for c in ring.loader if isinstance(c, Copy))
    taken = Counter(t.chunk for items in ring.warps for t in items if isinstance(t, Take))
    for what, seen in (("copied", copied), ("multiplied", taken)):
        if seen != want:
            for chunk in list((want - seen) + (seen - want))[:2]:
                out.append(Fault("completeness", f"{chunk} is {what} {seen[chunk]} times, not "
                                 f"{want[chunk]}"))  # fmt: skip
    out += _takes(ring, where)
    if not (out or ordered):
        out = _mistaken(ring, stages)
    return out[:_MOST] or _progress(ring, stages)


def ring_faults(schedule: GpuSchedule) -> list[Fault]:
    """Faults of all blocks' rings."""
    t = schedule.step.tiling
    if len(schedule.rings) != schedule.blocks:
        return [Fault("role", f"{len(schedule.rings)} rings for {schedule.blocks} blocks")]
    known: dict[int, Sequence[Fault]] = {}
    out: list[Fault] = []
    for block, (ring, program) in enumerate(zip(schedule.rings, schedule.programs, strict=True)):
        if ring.tasks != streams(schedule.step, program):
            out.append(Fault("completeness", f"the ring of block {block} serves other tasks than "
                             "its items"))  # fmt: skip
            continue
        if id(ring) not in known:
            known[id(ring)] = judge_ring(ring, t.stages, t.in_flight, t.warps, not t.bulk)
        out += [Fault(f.rule, f"block {block}: {f.text}") for f in known[id(ring)]]
        if len(out) >= _MOST:
            break
    return out
