"""What one run of `optimize` found, as frozen data, as JSON with stable keys, and as one HTML file.

Takes the accounts of the stages; gives `Report`. It promises that every candidate that was looked
at is in it with what became of it, and that nothing in it was computed twice: the command line,
the JSON form and the page show the same figures.
"""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jinja2

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """One candidate and what became of it.

    Attributes:
        index: its rank in the search; 0 is the program itself, operator by operator.
        kernels: launches per call, of the lowering that was measured fastest.
        bytes: device-memory traffic per call that the cost model counts.
        predicted_us: the cost model's time.
        time_us, spread_us: measured median and half the interquartile range; None if not measured.
        relative_error: norm of its worst output's error over the norm of the output, against
            float64; None if it never ran to the end.
        verdict, bound: the judges' answer (proved, tested, refuted, unknown; "" if not judged).
        status: ok, or why it was left: refuted, unknown, infeasible, build failed, crash, hang,
            wrong, not tried, ...
        reason: the status in full.
        variant: the lowering that was measured fastest.
        variants: how many lowerings were built.
        chosen: whether it is the answer.
        note: where the search found it.
        target: what that lowering is for, where a device has several (CUDA C++, Triton).
    """

    index: int
    kernels: int
    bytes: int
    predicted_us: float
    time_us: float | None = None
    spread_us: float | None = None
    verdict: str = ""
    bound: str = ""
    status: str = "not tried"
    reason: str = ""
    variant: str = ""
    variants: int = 0
    chosen: bool = False
    note: str = ""
    relative_error: float | None = None
    target: str = ""


@dataclass(frozen=True, slots=True)
class BaselineRow:
    """What a candidate is compared with in the same run; `reason` says why there is no time.

    `ratio` is how many times slower than the answer it is: the median over rounds of the ratio
    within each, which is what decides the race, and `ratio_spread` its interquartile range. None
    where they shared no round.
    """

    name: str
    time_us: float | None
    spread_us: float | None = None
    reason: str = ""
    ratio: float | None = None
    ratio_spread: float | None = None

    def over(self, time_us: float | None) -> float | None:
        """The ratio to the answer, whose time is `time_us`: of medians where it was not raced."""
        if self.ratio is not None or self.time_us is None or not time_us:
            return self.ratio
        return self.time_us / time_us


@dataclass(frozen=True, slots=True)
class SearchRow:
    """The search's account: seconds, states visited, and how many each rule pruned."""

    seconds: float = 0.0
    states: int = 0
    pruned: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Report:
    """The account of one run.

    `floor_us` is the time that the device's measured bandwidth of copies allows for the program's
    inputs and outputs, read and written once (None where it was not measured); what mostly reads
    may be a little faster. `stages` are seconds by stage, `failures` how many candidates or
    lowerings fell, by reason; `choice` says why the answer was chosen, `notes` what else a reader
    of the times must know; `interrupted` is true when the user stopped the run; `environment` is
    what the times depend on.
    """

    program: str
    digest: str
    device: str
    seed: int
    budget_seconds: float
    seconds: float
    candidates: tuple[CandidateRow, ...]
    baselines: tuple[BaselineRow, ...]
    search: SearchRow
    stages: Mapping[str, float]
    failures: Mapping[str, int]
    environment: Mapping[str, str]
    choice: str = ""
    notes: tuple[str, ...] = ()
    cached: bool = False
    interrupted: bool = False
    floor_us: float | None = None

    @property
    def chosen(self) -> CandidateRow:
        """The candidate that is the answer."""
        return next(c for c in self.candidates if c.chosen)

    @property
    def op_by_op_us(self) -> float | None:
        """Median time of the program's own kernels, one per operator."""
        own = self._own()
        return own.time_us if own is not None else None

    def _own(self) -> BaselineRow | None:
        return next((b for b in self.baselines if b.name == "op_by_op"), None)

    def sentence(self) -> str:
        """The result in one sentence, naming what it is compared with."""
        best, own = self.chosen, self._own()
        if best.index == 0:
            return (
                "Nothing that was found, judged right and measured beats the program's own "
                "kernels: the program is the answer."
            )
        kernels = "1 kernel" if best.kernels == 1 else f"{best.kernels} kernels"
        if best.target:
            kernels += f" in {best.target}"
        times = own.over(best.time_us) if own is not None else None
        if times is None or own is None:
            return f"Chosen: {kernels}, {best.verdict}; not measured in this run."
        return (
            f"Chosen: {kernels}, {best.verdict}, {show_us(best.time_us)}: "
            f"{show_ratio(times, own.ratio_spread)} times as fast as its own "
            f"{self.candidates[0].kernels} kernels ({show_us(own.time_us)})."
        )

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form (docs/cli.md); keys are stable within a `schema`."""
        best = self.chosen
        return {
            "schema": SCHEMA,
            "program": self.program,
            "digest": self.digest,
            "device": self.device,
            "chosen": {
                "index": best.index,
                "kernels": best.kernels,
                "time_us": best.time_us,
                "verdict": best.verdict,
                "bound": best.bound,
                "target": best.target,
            },
            "baselines": {b.name: b.time_us for b in self.baselines},
            "candidates": [asdict(c) for c in self.candidates],
            "search": {
                "seconds": self.search.seconds,
                "states": self.search.states,
                "pruned": dict(self.search.pruned),
            },
            "choice": self.choice,
            "notes": list(self.notes),
            "cached": self.cached,
            "interrupted": self.interrupted,
            "floor_us": self.floor_us,
            "seed": self.seed,
            "budget_seconds": self.budget_seconds,
            "seconds": self.seconds,
            "stages": dict(self.stages),
            "failures": dict(self.failures),
            "spread_us": {b.name: b.spread_us for b in self.baselines},
            "ratios": {
                b.name: [b.ratio, b.ratio_spread] for b in self.baselines if b.ratio is not None
            },
            "unavailable": {b.name: b.reason for b in self.baselines if b.time_us is None},
            "environment": dict(self.environment),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Report:
        """Read `to_json` back; raises `KeyError` or `ValueError` for another schema."""
        if data["schema"] != SCHEMA:
            raise ValueError(f"report schema {data['schema']}, this version reads {SCHEMA}")
        return Report(
            program=data["program"],
            digest=data["digest"],
            device=data["device"],
            seed=data["seed"],
            budget_seconds=data["budget_seconds"],
            seconds=data["seconds"],
            candidates=tuple(CandidateRow(**c) for c in data["candidates"]),
            baselines=tuple(
                BaselineRow(
                    name,
                    us,
                    data["spread_us"].get(name),
                    data["unavailable"].get(name, ""),
                    *data.get("ratios", {}).get(name, ()),
                )
                for name, us in data["baselines"].items()
            ),
            search=SearchRow(**data["search"]),
            stages=data["stages"],
            failures=data["failures"],
            environment=data["environment"],
            choice=data["choice"],
            notes=tuple(data["notes"]),
            cached=data["cached"],
            interrupted=data["interrupted"],
            floor_us=data.get("floor_us"),
        )

    def from_cache(self) -> Report:
        """The same account, marked as an answer that was stored."""
        return replace(self, cached=True)


def count_failures(rows: Mapping[str, int] | Counter[str]) -> dict[str, int]:
    """Failure counts, most frequent first, then by name."""
    return dict(sorted(rows.items(), key=lambda item: (-item[1], item[0])))


def show_us(us: float | None) -> str:
    """A time for people: 812 ns, 41.3 us, 7.02 ms, 1.20 s, or a dash."""
    if us is None:
        return "-"
    for unit, size in (("s", 1e6), ("ms", 1e3), ("us", 1.0)):
        if us >= size:
            return f"{_digits(us / size)} {unit}"
    return f"{us * 1e3:.0f} ns"


def show_ratio(times: float, spread: float | None) -> str:
    """How many times as fast, with the interquartile range over rounds where it is known."""
    return f"{times:.2f}" if spread is None else f"{times:.2f} ± {spread:.2f}"


def _digits(value: float) -> str:
    """Three digits, never an exponent."""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"


def show_bytes(count: float) -> str:
    """A size for people: 512 B, 3.2 KB, 40.1 MB, 1.1 GB (powers of 1000)."""
    size = float(count)
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{_digits(size)} {unit}"
        size /= 1000
    return f"{_digits(size)} GB"


def render_html(report: Report, svg: str, text: str) -> str:
    """One self-contained page: no script, font or picture is fetched.

    `svg` is the chosen graph's picture and `text` its text form; the JSON form is embedded.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("obelisk.app"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["us"] = show_us
    environment.filters["size"] = show_bytes

    def ratio(row: BaselineRow) -> str:
        times = row.over(report.chosen.time_us)
        return "" if times is None else show_ratio(times, row.ratio_spread)

    environment.filters["ratio"] = ratio
    longest = max((b.time_us or 0.0 for b in report.baselines), default=0.0)
    longest = max(longest, report.chosen.time_us or 0.0)
    data = html.escape(json.dumps(report.to_json(), indent=1), quote=False)
    template = environment.get_template("report.html.j2")
    return template.render(report=report, svg=svg, text=text, data=data, longest=longest or 1.0)
