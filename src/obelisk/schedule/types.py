"""A schedule: for every core, its fixed list of items; and where every value lies.

Gives frozen records. `Run` executes a task; `Signal` adds one to a counter; `Await` stops until a
counter has reached a count; `Barrier` stops until every core is there. Counters are monotone: they
belong to one step, and step s+1 uses fresh ones (in C: the same ones, counted on).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from obelisk.plan.layout import align
from obelisk.tasks.kinds import Task
from obelisk.tasks.shape import StepShape


class Sync(enum.StrEnum):
    """How operators are kept apart."""

    BARRIER = "barrier"  # all cores meet
    COUNTER = "counter"  # a consumer waits for the producers of what it reads


@dataclass(frozen=True, slots=True)
class Run:
    """Execute a task."""

    task: Task


@dataclass(frozen=True, slots=True)
class Signal:
    """Add one to a counter, after everything before it on this core."""

    counter: str


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until a counter has reached `count`."""

    counter: str
    count: int


@dataclass(frozen=True, slots=True)
class Barrier:
    """Wait until every core has arrived at the barrier of this name."""

    name: str


Item = Run | Signal | Await | Barrier
Program = tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """Where a value lies: offset of slot 0 and distance between slots, in fp32 elements."""

    offset: int
    stride: int
    width: int


@dataclass(frozen=True, slots=True)
class PagePlan:
    """The scratch memory: a page for each value, and elements in all."""

    pages: tuple[tuple[str, Page], ...]
    elements: int

    def page(self, value: str) -> Page:
        """The page of a value."""
        for name, page in self.pages:
            if name == value:
                return page
        raise KeyError(value)

    @property
    def nbytes(self) -> int:
        """Bytes of scratch."""
        return align(4 * self.elements)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A whole step, decided: one program for each core."""

    shape: StepShape
    sync: Sync
    programs: tuple[Program, ...]
    pages: PagePlan

    @property
    def cores(self) -> int:
        """Cores in use."""
        return len(self.programs)

    def to_json(self) -> Mapping[str, Any]:
        """What a reader of the plan wants to see: choices, pages, and how many items there are."""
        runs = [sum(isinstance(i, Run) for i in p) for p in self.programs]
        waits = [sum(isinstance(i, Await | Barrier) for i in p) for p in self.programs]
        return {
            "sync": self.sync.value,
            "tiling": self.shape.tiling.to_json(),
            "tasks_per_core": runs,
            "waits_per_core": waits,
            "pages": {n: [p.offset, p.stride, p.width] for n, p in self.pages.pages},
            "scratch_bytes": self.pages.nbytes,
        }
