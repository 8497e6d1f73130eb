"""From what the stages of one run said to its report: a row for every candidate.

Takes candidates, verdicts, failures and measurements; gives `CandidateRow`s and `BaselineRow`s. It
promises one row per candidate in the search's order and exactly one chosen row.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from obelisk.app.doctor import obelisk_version
from obelisk.app.report import BaselineRow, CandidateRow
from obelisk.machine import Machine
from obelisk.search import Candidate
from obelisk.tune import Measured, Status
from obelisk.verify import Verdict

MICRO = 1e6
OP_BY_OP = "op_by_op"


def describe(options: Any) -> str:
    """A lowering in words: what differs from the default of the options' kind (a dataclass)."""
    usual = type(options)()
    changed = [
        f"{f.name} {getattr(options, f.name)}"
        for f in fields(options)
        if getattr(options, f.name) != getattr(usual, f.name)
    ]
    return ", ".join(changed) or "default"


class Tried(NamedTuple):
    """A lowering: its choices in words, what came of it, its launches (0: as the graph's), and its
    target where the device has several.
    """

    variant: str
    measured: Measured | None
    launches: int = 0
    target: str = ""


def candidate_rows(
    candidates: Sequence[Candidate],
    verdicts: Mapping[int, Verdict],
    fallen: Mapping[int, tuple[str, str]],
    measured: Mapping[int, Sequence[Tried]],
    chosen: int,
) -> tuple[CandidateRow, ...]:
    """`measured[i]` are the lowerings of candidate i."""
    rows: list[CandidateRow] = []
    for i, candidate in enumerate(candidates):
        verdict = verdicts.get(i)
        tried = measured.get(i, ())
        best = _best([t for t in tried if t.measured is not None])
        found = best.measured if best is not None else None
        status, reason = fallen.get(i, ("not tried", ""))
        if found is not None:
            status, reason = found.status.value, found.detail
        rows.append(
            CandidateRow(
                index=i,
                kernels=(best.launches if best else 0) or candidate.cost.launches,
                bytes=int(candidate.cost.bytes),
                predicted_us=candidate.cost.seconds * MICRO,
                time_us=_micro(found.seconds) if found else None,
                spread_us=_micro(found.spread) if found else None,
                verdict=verdict.kind.value if verdict else "",
                bound=verdict.bound if verdict else "",
                status=status,
                reason=reason,
                variant=best.variant if best else "",
                variants=len(tried),
                chosen=i == chosen,
                note=candidate.note,
                relative_error=found.relative if found else None,
                target=best.target if best else "",
            )
        )
    return tuple(rows)


def _best(tried: Sequence[Tried]) -> Tried | None:
    """The fastest lowering that is right, else the first that is not."""
    right = [
        (t.measured.seconds, i)
        for i, t in enumerate(tried)
        if t.measured is not None
        and t.measured.status is Status.OK
        and t.measured.seconds is not None
    ]
    if right:
        return tried[min(right)[1]]
    return tried[0] if tried else None


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * MICRO


def fastest_form(forms: Sequence[Measured]) -> Measured | None:
    """Of the program's own kernels, which a back end may print in several forms: the fastest that
    is right, else the first. The slowest form is no yardstick.
    """
    right = [m for m in forms if m.status is Status.OK and m.seconds is not None]
    return min(right, key=lambda m: m.seconds or 0.0) if right else next(iter(forms), None)


def choice_text(reason: str, winner: Measured, forms: Sequence[Measured]) -> str:
    """The tuner's reason, which compares with the first form of the program's own kernels; and what
    is left of it beside their fastest.
    """
    best = fastest_form(forms)
    if best is None or best is forms[0] or best.seconds is None or winner in forms:
        return reason
    if forms[0].seconds is None or winner.seconds is None:
        return reason
    times = best.seconds / winner.seconds
    return f"{reason}; {times:.2f} times as fast as their fastest form ({best.name})"


def baseline_rows(
    own: Measured | None, why: str, others: Sequence[Measured], absent: Mapping[str, str]
) -> tuple[BaselineRow, ...]:
    """`own` are the program's op-by-op kernels in their fastest form (or `why` there are none),
    then the libraries.
    """
    first = (
        BaselineRow(OP_BY_OP, None, None, why or "not measured")
        if own is None
        else _row(OP_BY_OP, own)
    )
    rows = [first, *(_row(m.name, m) for m in others)]
    rows += [BaselineRow(name, None, None, reason) for name, reason in absent.items()]
    return tuple(rows)


def _row(name: str, measured: Measured) -> BaselineRow:
    if measured.status is not Status.OK or measured.seconds is None:
        reason = f"{measured.status.value}: {measured.detail}".removesuffix(": ")
        return BaselineRow(name, None, None, reason)
    return BaselineRow(
        name, _micro(measured.seconds), _micro(measured.spread),
        ratio=measured.ratio, ratio_spread=measured.ratio_spread,
    )  # fmt: skip


def environment(machine: Machine, threads: int, more: Mapping[str, str]) -> dict[str, str]:
    """What the times depend on, in words; `more` is what the back end adds."""
    caches = ", ".join(f"L{c.level} {c.size // 1024} KiB" for c in machine.caches)
    return {
        "obelisk": obelisk_version(),
        "machine": f"{machine.title} ({machine.arch}), {machine.cores} cores, {caches}",
        "threads": str(threads),
        "load average before": f"{os.getloadavg()[0]:.1f}",
        **more,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.platform(),
    }
