"""From an operator graph to the tile tasks of one decode step, in the order that defines them.

Takes a `StepShape`; gives operators (`Operator`) and tasks (`Task`). Executed one after the other
in this order, the tasks *are* the step: a schedule may only reorder what this order does not tie.
`edges` derives the ties from the table's reads and writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from obelisk.tasks.kinds import TABLE, Region, Task, TaskKind
from obelisk.tasks.shape import StepShape


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the step and the tiles that it is cut into."""

    kind: TaskKind
    layer: int
    tasks: tuple[Task, ...]


def _norm(s: StepShape, kind: TaskKind, layer: int) -> list[Task]:
    if not s.tiling.replicate_norm:
        return [Task(kind, layer, 0, s.batch)]
    return [Task(kind, layer, 0, s.batch, core=c, index=c) for c in range(s.tiling.cores)]


def _groups(s: StepShape, kind: TaskKind, layer: int, count: int) -> list[Task]:
    """Head groups cut into `count` (0: one a core) nearly equal runs."""
    groups = s.model.kv_heads
    parts = min(groups, count or s.tiling.cores)
    edges = [groups * i // parts for i in range(parts + 1)]
    return [Task(kind, layer, a, b, index=i) for i, (a, b) in enumerate(pairwise(edges))]


def _rows(s: StepShape, kind: TaskKind, layer: int, rows: int, count: int) -> list[Task]:
    return [Task(kind, layer, a, b, index=i) for i, (a, b) in enumerate(s.cuts(rows, count))]


def _attention(s: StepShape, kind: TaskKind, layer: int, splits: int) -> list[Task]:
    cells = [
        (b, g, p) for b in range(s.batch) for g in range(s.model.kv_heads) for p in range(splits)
    ]
    return [Task(kind, layer, g, g + 1, b, p, index=i) for i, (b, g, p) in enumerate(cells)]


def layer_operators(s: StepShape, layer: int) -> list[Operator]:
    """The operators of one decoder layer."""
    t, k = s.tiling, TaskKind
    parts: list[list[Task]] = [_norm(s, k.NORM_IN, layer)]
    if t.fuse_rope:
        parts.append(_groups(s, k.QKV, layer, t.qkv))
    else:
        parts.append(_rows(s, k.QKV_ROWS, layer, s.qkv_rows, t.qkv))
        parts.append(_groups(s, k.ROPE, layer, 0))
    parts.append(_attention(s, k.ATTEND, layer, t.kv_splits))
    if t.kv_splits > 1:
        parts.append(_attention(s, k.COMBINE, layer, 1))
    parts += [
        _rows(s, k.O, layer, s.hidden_rows, t.o),
        _norm(s, k.NORM_MID, layer),
        _rows(s, k.UP, layer, s.ffn_rows, t.up),
        _rows(s, k.DOWN, layer, s.hidden_rows, t.down),
    ]
    return [Operator(p[0].kind, layer, tuple(p)) for p in parts]


def operators(s: StepShape) -> list[Operator]:
    """All operators of one step, in order."""
    k = TaskKind
    first = [Operator(k.EMBED, -1, (Task(k.EMBED, -1, 0, s.batch),))]
    inner = [op for layer in range(s.model.layers) for op in layer_operators(s, layer)]
    last = [
        _norm(s, k.NORM_FINAL, -1),
        _rows(s, k.HEAD, -1, s.vocab_rows, s.tiling.head),
        [Task(k.SAMPLE, -1, 0, s.batch)],
    ]
    return [*first, *inner, *(Operator(p[0].kind, -1, tuple(p)) for p in last)]


def task_reads(s: StepShape, task: Task, reader: int) -> tuple[Region, ...]:
    """What `task` reads when core `reader` runs it: with copied norms, the copy is the core's."""
    out = TABLE[task.kind].reads(s, task)
    if s.tiling.replicate_norm:
        out = tuple(
            Region(f"h{reader}", r.lo, r.hi, r.slot, r.layer) if r.value == "h" else r for r in out
        )
    return out


def sequence(s: StepShape) -> list[Task]:
    """The step as one list of tasks: the order that defines what each of them reads."""
    return [t for op in operators(s) for t in op.tasks]


def overlap(a: Region, b: Region) -> bool:
    """Whether two regions share an element."""
    return (
        a.value == b.value
        and a.layer == b.layer
        and (a.slot < 0 or b.slot < 0 or a.slot == b.slot)
        and a.lo < b.hi
        and b.lo < a.hi
    )


def edges(s: StepShape, tasks: Sequence[Task]) -> list[tuple[int, int]]:
    """Data dependencies (writer, reader) between positions of `tasks`, as their order defines them.

    Copied norms have no fixed reader, so this takes the shared form (`replicate_norm` False).
    """
    writes = [TABLE[t.kind].writes(s, t) for t in tasks]
    out: set[tuple[int, int]] = set()
    last: dict[tuple[str, int], list[int]] = {}
    for i, task in enumerate(tasks):
        for need in TABLE[task.kind].reads(s, task):
            for j in last.get((need.value, need.layer), ()):
                if any(overlap(need, w) for w in writes[j]):
                    out.add((j, i))
        for made in writes[i]:
            key = (made.value, made.layer)
            before = last.get(key, [])
            kept = [j for j in before if not _covered(writes[j], made)]
            last[key] = [*kept, i]
    return sorted(out)


def _covered(old: Sequence[Region], new: Region) -> bool:
    """Whether `new` overwrites all that a task left in its value."""
    mine = [r for r in old if r.value == new.value and r.layer == new.layer]
    return all(
        new.lo <= r.lo and r.hi <= new.hi and (new.slot < 0 or new.slot == r.slot) for r in mine
    )
