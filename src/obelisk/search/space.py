"""What a search is asked for and what it answers: spaces, budgets, candidates and counts, all
frozen values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from obelisk.ir import Graph
from obelisk.machine import Cost

if TYPE_CHECKING:
    from obelisk.search.plan import Plan

SIZE_RULES = ("malformed", "capacity")  # rules that drop sized instances, not values


@dataclass(frozen=True, slots=True)
class Space:
    """The declared space.

    Attributes:
        block_ops: most operators in one kernel and its combining kernel (loads, stores not
            counted).
        grid_axes: most grid axes of a kernel.
        window: most program operators that one kernel may cover.
        online_softmax: offer running maxima where the program exponentiates.
        split_reductions: offer grids that split a reduced axis, with a second kernel that combines.
        thread_graphs: make chains of elementwise operators and row reductions thread graphs.
        values: most values kept in the bank of one skeleton.
        descents: skeletons of a segment whose sizes are refined.
        keep: most candidates returned, the input graph included.
    """

    block_ops: int = 40
    grid_axes: int = 3
    window: int = 24
    online_softmax: bool = True
    split_reductions: bool = True
    thread_graphs: bool = True
    values: int = 600
    descents: int = 8
    keep: int = 12

    @property
    def key(self) -> str:
        """A stable text of every field (part of cache keys)."""
        return repr(self)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one search: wall seconds, states (values tried), resident bytes of each process."""

    seconds: float = 60.0
    states: int = 50_000_000
    memory: int = 2 << 30


@dataclass(frozen=True, slots=True)
class Candidate:
    """A graph that the search believes equals the program.

    Attributes:
        graph, cost, note: the graph, its predicted cost, and how it was found.
        plan: its structure for other extents, see `replan` (None for the program itself).
    """

    graph: Graph
    cost: Cost
    note: str
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class SearchStats:
    """The account of a search.

    Attributes:
        seconds: wall time.
        found_seconds: processor seconds, over all processes, after which the last part of the
            candidate that ends up best had been found.
        states: values tried at block level.
        pruned: values and instances dropped, by rule.
        bank_hits: values that equal one already in the bank (states saved by observational
            equivalence: none of them is expanded again).
        skeletons: schedules (grid and loop choices over axes) in which a kernel was found.
        segments: different program segments searched.
        instances: sized skeletons that were built and costed.
        threads: how many of them had so many threads a block (empty for a CPU).
        stopped: why it ended ("exhausted", "time", "states", "memory", "interrupted").
        intervals: intervals of the program that the partition asked for.
        reused: intervals answered by an equal segment searched before.
        units: units of work finished, `resumed` of which came from a checkpoint.
        retried: units run again because their worker died; `dropped`: those whose worker died
            twice.
        workers: processes that units ran in, the parent apart (0: all in the parent).
        stage_seconds: processor seconds by stage, over all processes.
        peak_memory: most resident bytes of any one process.
    """

    seconds: float = 0.0
    found_seconds: float = 0.0
    states: int = 0
    pruned: Mapping[str, int] = field(default_factory=dict)
    bank_hits: int = 0
    skeletons: int = 0
    segments: int = 0
    instances: int = 0
    threads: Mapping[str, int] = field(default_factory=dict)
    stopped: str = "exhausted"
    intervals: int = 0
    reused: int = 0
    units: int = 0
    resumed: int = 0
    retried: int = 0
    dropped: int = 0
    workers: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    peak_memory: int = 0

    @property
    def levels(self) -> dict[str, dict[str, int]]:
        """The same counts by level: program (partition), block (synthesis), sizes."""
        sizes = {k: n for k, n in self.pruned.items() if k in SIZE_RULES}
        return {
            "program": {
                "intervals": self.intervals, "segments": self.segments, "reused": self.reused,
            },
            "block": {
                "states": self.states, "bank hits": self.bank_hits, "skeletons": self.skeletons,
                **{f"pruned: {k}": n for k, n in self.pruned.items() if k not in SIZE_RULES},
            },
            "sizes": {
                "instances": self.instances,
                **{f"with {k} threads": n for k, n in self.threads.items()},
                **{f"pruned: {k}": n for k, n in sizes.items()},
            },
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Candidates, best predicted first after the input graph (always number 0), and the account."""

    candidates: tuple[Candidate, ...]
    stats: SearchStats
