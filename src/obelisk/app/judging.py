"""`obelisk verify`: every graph of a file judged against a program, one verdict each.

Takes what the user named; gives `Judgement`s in the file's order and their documented JSON form. It
promises one answer per graph: a graph that is malformed is refuted and says why, and a judge that
fails is unknown, not an end of the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from obelisk.app.loading import load_entries, load_program
from obelisk.base.progress import Progress
from obelisk.ir import DType
from obelisk.ir.files import Entry
from obelisk.verify import VerdictKind, Verifier

KINDS = tuple(kind.value for kind in VerdictKind)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The answer for one graph; the fields are the JSON form's keys.

    Attributes:
        index: its place in the file.
        verdict: proved, tested, refuted or unknown.
        bound: what the verdict covers.
        seconds: wall time of the judges.
        witness: for a refuted graph, what shows it; else None.
    """

    index: int
    verdict: str
    bound: str
    seconds: float
    witness: str | None


def judge_entries(
    candidates: str,
    program: str,
    batch: int,
    dtype: str | DType | None,
    seed: int,
    progress: Progress,
) -> Iterator[Judgement]:
    """Judge each graph that `candidates` names against `program`, as soon as it is asked for.

    What is left open of a named program (batch, dtype) is taken from the first graph that reads.
    Raises what loading raises; never for a graph of the file.
    """
    entries = load_entries(candidates, batch, dtype)
    first = next((e.graph for e in entries if e.graph is not None), None)
    target = load_program(program, batch, dtype, like=first)
    verifier = Verifier(target, seed=seed)
    for done, entry in enumerate(entries):
        progress.update("verify", {"judged": done, "of": len(entries)})
        yield judge(entry, verifier)


def judge(entry: Entry, verifier: Verifier) -> Judgement:
    """One graph's answer."""
    if entry.graph is None:
        return Judgement(entry.index, "refuted", "not a graph", 0.0, f"malformed: {entry.error}")
    begin = time.monotonic()
    try:
        verdict = verifier.verify(entry.graph)
    except Exception as error:  # the contract says never; one graph must not cost the others
        seconds = time.monotonic() - begin
        text = f"the judge failed: {type(error).__name__}: {error}"
        return Judgement(entry.index, "unknown", text, seconds, None)
    return Judgement(
        entry.index, verdict.kind.value, verdict.bound, verdict.seconds, verdict.witness
    )


def _counts(rows: Sequence[Judgement]) -> dict[str, int]:
    return {kind: sum(r.verdict == kind for r in rows) for kind in KINDS}


def summary_line(rows: Sequence[Judgement]) -> str:
    """`N graphs: P proved, T tested, R refuted, U unknown`."""
    n = _counts(rows)
    return (
        f"{len(rows)} graphs: {n['proved']} proved, {n['tested']} tested, "
        f"{n['refuted']} refuted, {n['unknown']} unknown"
    )


def judgements_json(rows: Sequence[Judgement]) -> dict[str, Any]:
    """`{"graphs": [...], "summary": {"graphs": N, "proved": P, ...}}`."""
    return {
        "graphs": [asdict(r) for r in rows],
        "summary": {
            "graphs": len(rows),
            **_counts(rows),
            "seconds": sum(r.seconds for r in rows),
        },
    }
