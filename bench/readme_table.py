"""The README's table of measurements, from the results of `obelisk bench`.

    python bench/readme_table.py [bench/results/cpu.json]
    python bench/readme_table.py bench/results/cuda_bench.json [MORE.json]

Writes the table into the README between its two marks (of the CPU, or of a CUDA device where the
results are of one); a test checks that it holds exactly this text, so no figure was typed. Of
several files of a device, a program's row is that of the newest in which its race was held and no
rival fell for a fault of the run; where there is none, that of the newest, without a ratio. Each
file is named with its commit and its programs. The chart of a device (cuda_bench.svg) is drawn from
the same rows.
"""

from __future__ import annotations

import json
import sys
from math import exp, log
from pathlib import Path
from typing import Any

from obelisk.app.bench import BenchRow
from obelisk.app.chart import chart
from obelisk.app.report import Report

RESULTS = Path(__file__).parent / "results" / "cpu.json"
CUDA_RESULTS = tuple(sorted((Path(__file__).parent / "results").glob("cuda_bench*.json")))
CHART = Path(__file__).parent / "results" / "cuda_bench.svg"
README = Path(__file__).parents[1] / "README.md"
MARKS = ("<!-- measured: written by `make bench` -->\n", "<!-- end -->\n")
CUDA_MARKS = (
    "<!-- measured on a GPU: written by bench/readme_table.py -->\n",
    "<!-- end GPU -->\n",
)
BUSY = 0.5  # load average above which a measurement is not worth a claim
NO_FAULT = ("not installed", "nothing beside", "no call for", "not an attention")  # of a rival
COLUMNS = ("op_by_op", "numpy", "torch", "torch.compile", "torch.sdpa")


def micro(us: float | None) -> str:
    """A time in microseconds, three digits."""
    return "-" if us is None else f"{us:.0f}" if us >= 99.5 else f"{us:.3g}"


def cuda_table(files: list[dict[str, Any]]) -> str:
    """One row per program of a device's bench, then the geometric mean, then what was run where."""
    lines = [
        "| program | obelisk | spread | kernels | verdict | floor | torch | torch.compile | "
        "max-autotune | best SDPA | fastest other | other / ours |",
        "|---|" + "---|" * 11,
    ]
    ratios: list[float] = []
    for name, _, row in newest(files):
        report = row["report"]
        if report is None:
            lines.append(f"| {name} | failed: {row['error']} |" + " |" * 10)
            continue
        chosen, others = report["chosen"], report["baselines"]
        libraries = {n: t for n, t in others.items() if n != "op_by_op"}
        sdpa = {n: t for n, t in libraries.items() if "sdpa" in n}
        best_sdpa = micro(min((t for t in sdpa.values() if t is not None), default=None))
        ratio = "-"
        if row["ratio"] is not None and sound(row):
            ratios.append(row["ratio"])
            ratio = f"{row['ratio']:.2f}"
            if row.get("ratio_spread") is not None:
                ratio += f" ± {row['ratio_spread']:.2f}"
        target = f" {chosen['target']}" if chosen.get("target") else ""
        spread = "-" if row["spread_us"] is None else f"{row['spread_us']:.2f}"
        lines.append(
            f"| {name} | {micro(row['time_us'])} | {spread} | {chosen['kernels']}{target} | "
            f"{chosen['verdict']} | {micro(row['floor_us'])} | {micro(others.get('torch'))} | "
            f"{micro(others.get('torch.compile'))} | "
            f"{micro(others.get('torch.compile max-autotune'))} | {best_sdpa} | "
            f"{row['best_other'] or '-'} | {ratio} |"
        )
    mean = exp(sum(map(log, ratios)) / len(ratios)) if ratios else 0.0
    where = files[0]["environment"]
    sources: list[str] = []
    for data in files:
        mine = [name for name, source, _ in newest(files) if source is data]
        if mine:
            sources.append(
                f"{', '.join(mine)}: `{data['command']}`, commit {data['commit']}, "
                f"{data['date'][:10]}, {data['environment'].get('compiler')}"
            )
    text = (
        f"Microseconds of one call, {files[0]['rows'][0]['dtype']}, medians of a race in one "
        "process: replays "
        "of one CUDA graph with about 400 MB of rotated inputs; spread is the interquartile range; "
        "floor: bytes of inputs and outputs over the copy bandwidth measured in the same run, "
        "which what mostly reads may exceed a little; "
        "kernels: launches of a call. The last column is the median over rounds of the ratio in "
        "each, by which the race is decided, and its interquartile range (without ±: the ratio of "
        "the two medians; -: the race was cut, or a rival did not start). "
        f"Geometric mean of the last column: {mean:.2f} over {len(ratios)} programs, least "
        f"{min(ratios, default=0.0):.2f}. {where.get('device')}, {where.get('driver')}, Python "
        f"{where.get('python')}. {'; '.join(sources)}."
    )
    return "\n".join([*lines, "", text, ""])


def sound(row: dict[str, Any]) -> bool:
    """Whether a row compares: its race was held, and every rival that could answer did."""
    report = row["report"]
    if report is None or row["spread_us"] is None:
        return False
    return all(why.startswith(NO_FAULT) for why in report["unavailable"].values())


def newest(files: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, file and row of each program, sorted; of several rows the newest that is sound, else
    the newest.
    """
    found: dict[tuple[str, int], tuple[dict[str, Any], dict[str, Any]]] = {}
    for data in sorted(files, key=lambda d: str(d["date"])):
        for row in data["rows"]:
            known = found.get((row["program"], row["batch"]))
            if known is None or sound(row) or not sound(known[1]):
                found[row["program"], row["batch"]] = (data, row)
    return [
        (p if b == 1 else f"{p}:{b}", data, row) for (p, b), (data, row) in sorted(found.items())
    ]


def bench_row(row: dict[str, Any]) -> BenchRow:
    """A stored row as the bench has it."""
    report = Report.from_json(row["report"]) if row["report"] is not None else None
    return BenchRow(row["program"], row["batch"], row["dtype"], report, row["error"])


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


def main(sources: list[Path]) -> None:
    """Replace what is between the marks."""
    found = [json.loads(source.read_text(encoding="utf-8")) for source in sources]
    on_gpu = "device" in found[0]["environment"]
    marks = CUDA_MARKS if on_gpu else MARKS
    text = README.read_text(encoding="utf-8")
    head, mark, rest = text.partition(marks[0])
    _, end, tail = rest.partition(marks[1])
    made = cuda_table(found) if on_gpu else table(found[0])
    README.write_text(head + mark + made + end + tail, "utf-8")
    if on_gpu:
        CHART.write_text(chart([bench_row(row) for _, _, row in newest(found)]), "utf-8")


if __name__ == "__main__":
    main([Path(x) for x in sys.argv[1:]] or [RESULTS])
