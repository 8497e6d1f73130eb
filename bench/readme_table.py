"""The README's table of measurements, from the results of `obelisk bench`.

    python bench/readme_table.py [bench/results/cpu.json]

Writes the table into the README between its two marks; a test checks that it holds exactly this
text, so no figure was typed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "cpu.json"
README = Path(__file__).parents[1] / "README.md"
MARKS = ("<!-- measured: written by `make bench` -->\n", "<!-- end -->\n")
BUSY = 0.5  # load average above which a measurement is not worth a claim
COLUMNS = ("op_by_op", "numpy", "torch", "torch.compile", "torch.sdpa")


def milliseconds(us: float | None) -> str:
    """A time in ms, three digits."""
    if us is None:
        return "-"
    ms = us / 1000
    return f"{ms:.0f}" if ms >= 99.5 else f"{ms:.3g}"


def table(data: dict[str, Any]) -> str:
    """One row per program, then the geometric means, then what was run where."""
    lines = [
        "| program | obelisk | kernels | verdict | "
        + " | ".join(COLUMNS)
        + " | best library / ours |",
        "|---|" + "---|" * (len(COLUMNS) + 4),
    ]
    for row in data["rows"]:
        report = row["report"]
        if report is None:
            lines.append(
                f"| {row['program']} | failed: {row['error']} |" + " |" * (len(COLUMNS) + 3)
            )
            continue
        chosen, others = report["chosen"], report["baselines"]
        cells = [milliseconds(others.get(name)) for name in COLUMNS]
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        lines.append(
            f"| {row['program']} | {milliseconds(row['time_us'])} | {chosen['kernels']} | "
            f"{chosen['verdict']} | {' | '.join(cells)} | {ratio} |"
        )
    summary, where = data["summary"], data["environment"]

    def mean(key: str) -> str:
        return "-" if summary[key] is None else f"{summary[key]:.2f}"

    first = data["rows"][0]
    text = (
        f"Milliseconds of one call, median of a race in one process, batch {first['batch']}, "
        f"{first['dtype']}, {where.get('threads')} threads. Geometric mean of the last column: "
        f"{mean('geomean_all')} over all, {mean('geomean_published')} over the nine published "
        f"programs, least {mean('worst')}; over the programs' own op-by-op kernels "
        f"{mean('geomean_over_op_by_op')}. `{data['command']}`, commit {data['commit']}, "
        f"{data['date'][:10]}, {where.get('machine')}, load average "
        f"{where.get('load average before')} before the first; {where.get('compiler')}, "
        f"numpy {where.get('numpy')}."
    )
    if float(where.get("load average before", 0)) > BUSY:
        text += (
            " **The machine was busy with other work: these ratios are no claim** (libraries that "
            "wait for all their threads suffer more from it than the generated kernels do)."
        )
    return "\n".join([*lines, "", text, ""])


if __name__ == "__main__":
    source = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    text = README.read_text(encoding="utf-8")
    head, mark, rest = text.partition(MARKS[0])
    _, end, tail = rest.partition(MARKS[1])
    README.write_text(head + mark + table(json.loads(source.read_text())) + end + tail, "utf-8")
