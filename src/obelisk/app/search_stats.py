"""The account of a search by level, with what the judges say of its candidates.

Takes a search's result; gives counts for program, block, thread and sizes level, and for the
verdicts, each with its seconds. The thread level is read off the candidates: chains that became
thread graphs, where values live, and chains that were left apart because they need too many
registers. The judges see only what the search kept, within a time limit.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from obelisk.base.progress import Progress, Silent
from obelisk.machine import Machine
from obelisk.search import SearchResult
from obelisk.search.threads import Residence, residences, thread_counts
from obelisk.verify import VerdictKind, Verifier

Levels = dict[str, dict[str, float]]


def judged(
    result: SearchResult, seed: int, limit: float, progress: Progress | None = None
) -> dict[str, float]:
    """How the judges decide on the candidates, in their order, while `limit` seconds last."""
    shown = progress or Silent()
    began = time.monotonic()
    verifier = Verifier(result.candidates[0].graph, seed=seed)
    kinds: Counter[str] = Counter()
    for done, candidate in enumerate(result.candidates[1:]):
        if time.monotonic() - began > limit:
            break
        shown.update("verify", {"judged": done, "of": len(result.candidates) - 1})
        kinds[verifier.verify(candidate.graph).kind.value] += 1
    total = sum(kinds.values())
    return {
        "verified": kinds[VerdictKind.PROVED.value] + kinds[VerdictKind.TESTED.value],
        **{kind.value: kinds[kind.value] for kind in VerdictKind},
        "not judged": len(result.candidates) - 1 - total,
        "seconds": time.monotonic() - began,
    }


def thread_level(result: SearchResult, machine: Machine) -> dict[str, float]:
    """The thread graphs of all candidates, and where their blocks' values live."""
    chains = apart = most = 0
    places: Counter[Residence] = Counter()
    for candidate in result.candidates[1:]:
        for launch in candidate.graph.launches():
            if launch.block is None:
                continue
            found = thread_counts(launch.block, machine)
            chains, apart = chains + found.fused, apart + found.apart
            most = max(most, found.registers)
        places.update(residences(candidate.graph).values())
    limit = {"pruned: registers": apart, "most registers a thread": most}
    return {
        "thread graphs": chains,
        **(limit if machine.registers_per_thread else {}),
        **{f"values in {place.value}": places[place] for place in Residence},
    }


def by_level(
    result: SearchResult, machine: Machine, verdicts: Mapping[str, float] | None = None
) -> Levels:
    """All counts by level; `verdicts` from `judged`. Seconds are processor seconds but for the
    judges'.
    """
    stats = result.stats
    spent = stats.stage_seconds
    out: Levels = {level: dict(counts) for level, counts in stats.levels.items()}
    out["program"]["seconds"] = spent.get("partition", 0.0) + spent.get("assembly", 0.0)
    out["block"]["seconds"] = spent.get("synthesis", 0.0)
    out["sizes"]["seconds"] = spent.get("sizes", 0.0)
    thread = thread_level(result, machine)
    ordered: Levels = {}
    for level, counts in out.items():
        ordered[level] = counts
        if level == "block":
            ordered["thread"] = thread
    if verdicts is not None:
        ordered["verdicts"] = dict(verdicts)
    return ordered


def level_rows(levels: Levels) -> list[tuple[str, str, str]]:
    """The counts as rows of text: level, count, number."""

    def spell(x: Any) -> str:
        return f"{x:,.2f}" if isinstance(x, float) else f"{x:,}"

    return [
        (level, name, spell(n)) for level, counts in levels.items() for name, n in counts.items()
    ]
