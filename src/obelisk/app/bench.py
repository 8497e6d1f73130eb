"""`obelisk bench`: named programs, ours beside numpy, torch and the program's own kernels.

Takes names and a device; gives one row per program with medians and spreads of one run, in which
all contenders of a program were measured in the same rounds, and the geometric mean of the ratios.
It promises that ratios are against the best of the baselines that ran and were right, and that
those that did not or were not are named.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

from obelisk.app.account import OP_BY_OP
from obelisk.app.backends import backend_of, on_gpu
from obelisk.app.pipeline import optimize_given
from obelisk.app.programs import PROGRAMS, PUBLISHED, find_program
from obelisk.app.report import BaselineRow, Report
from obelisk.app.request import Wanted
from obelisk.base.errors import ObeliskError, UserError
from obelisk.base.progress import Progress
from obelisk.ir import DType
from obelisk.search import read_candidates

SCHEMA = 1
# What a CUDA device is measured on where no names are given: the published programs, with a second
# batch size where more rows or heads change what is best.
CUDA_NAMES = (
    "gqa", "gqa:8", "mqa", "mha", "qknorm", "qknorm:8", "rmsnorm", "rmsnorm:8", "gated_mlp", "lora",
    "ntrans", "ntrans:8", "moe",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One program's figures, in microseconds of one call.

    Attributes:
        program, batch, dtype: what was run.
        report: the account of its optimization; None when it failed.
        error: why it failed.
    """

    program: str
    batch: int
    dtype: str
    report: Report | None
    error: str = ""

    @property
    def time_us(self) -> float | None:
        """Our time."""
        return self.report.chosen.time_us if self.report else None

    def baseline(self, name: str) -> float | None:
        """A baseline's time, or None where it has none."""
        if self.report is None:
            return None
        return next((b.time_us for b in self.report.baselines if b.name == name), None)

    @property
    def over_own(self) -> float | None:
        """How many times as fast as the program's own kernels."""
        rows = self.report.baselines if self.report else ()
        return next((b.over(self.time_us) for b in rows if b.name == OP_BY_OP), None)

    @property
    def name(self) -> str:
        """The program, and its batch where that is not 1."""
        return self.program if self.batch == 1 else f"{self.program}:{self.batch}"

    @property
    def others(self) -> dict[str, float]:
        """Times of all baselines that ran, but for the program's own kernels."""
        return {b.name: b.time_us for b in self._raced() if b.time_us is not None}

    def _raced(self) -> list[BaselineRow]:
        rows = self.report.baselines if self.report else ()
        return [b for b in rows if b.time_us is not None and b.name != OP_BY_OP]

    @property
    def best(self) -> BaselineRow | None:
        """The fastest of the others, by its ratio to ours; None when none ran."""

        def key(row: BaselineRow) -> tuple[float, str]:
            return row.over(self.time_us) or row.time_us or 0.0, row.name

        return min(self._raced(), key=key, default=None)

    @property
    def best_other(self) -> tuple[str, float] | None:
        """Its name and time."""
        found = self.best
        return (found.name, found.time_us) if found and found.time_us is not None else None

    @property
    def ratio(self) -> float | None:
        """Its time over ours, paired by round where they raced: above 1, ours is faster."""
        found, own = self.best, self.time_us
        return found.over(own) if found and own else None

    @property
    def ratio_spread(self) -> float | None:
        """The interquartile range of that ratio over rounds."""
        found = self.best
        return found.ratio_spread if found else None


def run_bench(
    names: Sequence[str] = (),
    *,
    batch: int = 1,
    dtype: str | DType | None = None,
    budget: float = 60.0,
    seed: int = 0,
    cache: bool = False,
    device: str = "cpu",
    candidates: Path | None = None,
    progress: Progress | None = None,
    each: Callable[[BenchRow], None] = lambda row: None,
) -> list[BenchRow]:
    """Optimize and time each program; `each` is called with a row as soon as it is known.

    A name is that of a program, or `NAME:BATCH`; all by default. `dtype` is the device's own unless
    given. A folder of `candidates` (NAME_BATCH.json, by `obelisk search -o`) takes the search's
    place. A program that fails is a row with its error. Raises `UnknownName` for a name that is not
    known and `UserError` for a batch that is none.
    """
    backend = backend_of(device)
    usual = CUDA_NAMES if on_gpu(device) else tuple(PROGRAMS)
    asked = [_split(name, batch) for name in names or usual]
    programs = [(find_program(name), n) for name, n in asked]
    rows: list[BenchRow] = []
    for program, n in programs:
        graph = program.graph(n, dtype or backend.dtype)
        kind = graph.inputs[0].dtype.value
        try:
            stored = candidates / f"{program.name}_{n}.json" if candidates else None
            found = read_candidates(stored) if stored else None
            wanted = Wanted(device, budget, seed, cache, baselines=backend.rivals)
            best = optimize_given(graph, found, wanted, progress)
            row = BenchRow(program.name, n, kind, best.report)
        except ObeliskError as error:
            row = BenchRow(program.name, n, kind, None, f"{type(error).__name__}: {error}")
        rows.append(row)
        each(row)
    return rows


def _split(name: str, batch: int) -> tuple[str, int]:
    """`gqa:8` as a name and a batch; `batch` where it names none."""
    word, colon, number = name.partition(":")
    if not colon:
        return word, batch
    if not number.isdigit() or int(number) < 1:
        raise UserError(f"{name!r}: expected NAME or NAME:BATCH, a batch of 1 or more")
    return word, int(number)


def geomean(values: Sequence[float]) -> float | None:
    """Geometric mean of positive numbers; None of none."""
    return exp(sum(map(log, values)) / len(values)) if values else None


def summarise(rows: Sequence[BenchRow]) -> dict[str, Any]:
    """Geometric means over all programs and over the published nine, and the worst ratio."""
    ratios = {r.name: r.ratio for r in rows if r.ratio is not None}
    nine = [r.ratio for r in rows if r.ratio is not None and r.program in PUBLISHED]
    own = [t for r in rows if (t := r.over_own) is not None]
    return {
        "geomean_all": geomean(list(ratios.values())),
        "geomean_published": geomean(nine),
        "worst": min(ratios.values(), default=None),
        "geomean_over_op_by_op": geomean(own),
    }


def bench_json(rows: Sequence[BenchRow]) -> dict[str, Any]:
    """The JSON form: what was run, when, with which command on which machine, and all reports."""
    first = next((r.report for r in rows if r.report), None)
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(sys.argv[1:]),
        "commit": commit(),
        "environment": dict(first.environment) if first else {},
        "rows": [
            {
                "program": r.program,
                "batch": r.batch,
                "dtype": r.dtype,
                "time_us": r.time_us,
                "spread_us": r.report.chosen.spread_us if r.report else None,
                "floor_us": r.report.floor_us if r.report else None,
                "best_other": r.best_other[0] if r.best_other else None,
                "best_other_us": r.best_other[1] if r.best_other else None,
                "ratio": r.ratio,
                "ratio_spread": r.ratio_spread,
                "error": r.error,
                "report": r.report.to_json() if r.report else None,
            }
            for r in rows
        ],
        "summary": summarise(rows),
    }


def command(words: Sequence[str]) -> str:
    """The command line as anybody would type it again: where its output went plays no part."""
    outputs = ("--json", "--chart")
    kept = [
        w
        for i, w in enumerate(words)
        if w not in outputs and (i == 0 or words[i - 1] not in outputs)
    ]
    return " ".join(["obelisk", *kept])


def commit() -> str | None:
    """The source tree's commit, with "+" when it was changed since; None outside a checkout."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(folder.parent))
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
