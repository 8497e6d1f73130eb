"""What people see in a terminal: tables, sentences, and a line of progress.

Takes reports, verdicts and counts; writes to standard output (results) and standard error
(progress). It promises no progress and no colour where the stream is not a terminal, and no
progress for anything that ends within a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.status import Status
from rich.table import Table
from rich.text import Text

from obelisk.app.report import CandidateRow, Report, show_bytes, show_ratio, show_us

PATIENCE = 1.0  # seconds before progress shows
REDRAW = 0.1  # seconds between two drawings
_COLOURS = {"proved": "green", "tested": "green", "refuted": "red", "unknown": "yellow"}
_SHOWN_REASON = 44  # characters of a reason in a table; the JSON form has all of it


def stdout() -> Console:
    """Standard output, wide enough for whole rows where it is not a terminal."""
    console = Console(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


class Display:
    """A `Progress` that keeps one line at the foot of the terminal. Use it as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.begun = self.drawn = time.monotonic()
        self.status: Status | None = None

    def update(self, stage: str, counts: Mapping[str, float | int | str]) -> None:
        """Show the newest counts of a stage, at most ten times a second."""
        now = time.monotonic()
        if not self.console.is_terminal or now - self.begun < PATIENCE or now - self.drawn < REDRAW:
            return
        self.drawn = now
        line = f"{stage} {now - self.begun:.0f} s  " + "  ".join(
            f"{name} {_count(value)}" for name, value in counts.items()
        )
        if self.status is None:
            self.status = Status(line, console=self.console)
            self.status.start()
        self.status.update(Text(line))

    def print(self, console: Console, *what: RenderableType) -> None:
        """Print a result in the middle of progress: the line at the foot makes way for it."""
        if self.status is not None:
            self.status.stop()
            self.status = None
        console.print(*what, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.status is not None:
            self.status.stop()


def _count(value: float | str) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.1f}" if isinstance(value, float) else value


def verdict_text(verdict: str) -> Text:
    """A verdict in its colour."""
    return Text(verdict or "-", style=_COLOURS.get(verdict, ""))


def candidate_table(rows: Iterable[CandidateRow], title: str = "Candidates") -> Table:
    """One line per candidate, the chosen one marked."""
    table = Table(title=title, title_justify="left", pad_edge=False, box=None)
    table.add_column("")
    for name in ("no.", "kernels", "bytes", "predicted", "measured", "spread"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name in ("outcome", "found by"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=_SHOWN_REASON)
    for row in rows:
        outcome = row.status if not row.reason else f"{row.status}: {_short(row.reason)}"
        table.add_row(
            "*" if row.chosen else "",
            str(row.index),
            str(row.kernels),
            show_bytes(row.bytes),
            show_us(row.predicted_us),
            show_us(row.time_us),
            show_us(row.spread_us),
            verdict_text(row.verdict),
            Text(outcome),
            Text(_short(row.note)),
            style="bold" if row.chosen else "",
        )
    return table


def _short(text: str) -> str:
    first = text.strip().splitlines()[0] if text.strip() else ""
    return first if len(first) <= _SHOWN_REASON else first[: _SHOWN_REASON - 3] + "..."


def times_table(report: Report) -> Table:
    """The answer's time beside the baselines of the same run."""
    table = Table(title="Times, one call", title_justify="left", pad_edge=False, box=None)
    table.add_column("what")
    for name in ("median", "spread", "obelisk is"):
        table.add_column(name, justify="right")
    best = report.chosen
    table.add_row("obelisk", show_us(best.time_us), show_us(best.spread_us), "", style="bold")
    for row in report.baselines:
        if row.time_us is None:
            table.add_row(row.name, "-", "", Text(_short(row.reason)))
            continue
        times = row.over(best.time_us)
        words = f"{show_ratio(times, row.ratio_spread)} times as fast" if times else ""
        table.add_row(row.name, show_us(row.time_us), show_us(row.spread_us), words)
    return table


def print_report(report: Report, text: str, console: Console) -> None:
    """The whole account of `optimize`: graph, candidates, times, search, sentence."""
    console.print(f"Chosen graph of {report.program} on {report.device}:", style="bold")
    console.print(Text(text), soft_wrap=True)
    console.print(candidate_table(report.candidates))
    console.print()
    console.print(times_table(report))
    console.print()
    pruned = ", ".join(f"{n:,} {rule}" for rule, n in report.search.pruned.items())
    console.print(
        f"Search: {report.search.states:,} states in {report.search.seconds:.1f} s"
        + (f"; pruned {pruned}" if pruned else ""),
        soft_wrap=True,
    )
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.stages.items())
    console.print(f"Time: {report.seconds:.1f} s ({spent})", soft_wrap=True)
    for note in report.notes:
        console.print(f"Note: {note}", soft_wrap=True)
    if report.failures:
        fell = ", ".join(f"{n} {reason}" for reason, n in report.failures.items())
        console.print(f"Left out: {fell}", soft_wrap=True)
    if report.interrupted:
        console.print("Stopped by the user; this is the best so far.")
    if report.cached:
        console.print("Answered from the cache; the times are those of the run that stored it.")
    console.print(report.sentence(), style="bold", soft_wrap=True)
    if report.choice:
        console.print(f"Why: {report.choice}.", soft_wrap=True)


def rows_table(header: Sequence[str], rows: Iterable[Sequence[str | Text]], left: int = 1) -> Table:
    """A plain table; the first `left` columns are text, the others numbers."""
    table = Table(pad_edge=False, box=None)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < left else "right")
    for row in rows:
        table.add_row(*row)
    return table
