"""The `obelisk` command: each command is a few lines around a function that Python can call, too.

Takes words; prints results on standard output, progress and errors on standard error, and with
`--json` writes the documented form (docs/cli.md). Exit codes are those of `__main__`.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from obelisk.app import bench as benching
from obelisk.app import cli_family, search_bench
from obelisk.app.account import OP_BY_OP
from obelisk.app.backends import backend_of
from obelisk.app.chart import chart
from obelisk.app.cli_device import (
    NoCountersOpt,
    ablations,
    build_command,
    run_profile,
    tune_command,
)
from obelisk.app.cli_mega import register as register_mega
from obelisk.app.cli_search import MemoryOpt, WorkersOpt, run_search
from obelisk.app.display import (
    Display,
    print_report,
    rows_table,
    stdout,
    verdict_text,
)
from obelisk.app.doctor import examine, obelisk_version
from obelisk.app.judging import judge_entries, judgements_json, summary_line
from obelisk.app.loading import graph_of, load_entries, load_for, target_dtype
from obelisk.app.lowered import lowered_text
from obelisk.app.pipeline import SPACE, optimize
from obelisk.app.report import show_bytes, show_ratio, show_us
from obelisk.base.errors import UserError
from obelisk.base.settings import settings
from obelisk.cache import Store
from obelisk.ir.jsonform import to_json
from obelisk.ir.text import to_text

app = typer.Typer(
    name="obelisk",
    help="Superoptimizes tensor programs and proves what it returns.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
cache_app = typer.Typer(help="What is stored, and whether it can be trusted.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")
register_mega(app)

_UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_seconds(text: str | float) -> float:
    """`60s`, `90`, `1.5m`, `2h`, `500ms` in seconds; `typer.BadParameter` for anything else.

    A number stays: defaults pass through here, too.
    """
    if isinstance(text, float):
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|min|h|)\s*", text)
    if found is None or float(found[1]) <= 0:
        raise typer.BadParameter(f"{text!r} is no time; write 60s, 2m or 500ms")
    return float(found[1]) * _UNITS[found[2]]


ProgramArg = Annotated[
    str,
    typer.Argument(
        metavar="PROGRAM", help="A name, FILE.py[:FUNCTION], or a stored graph FILE[#N]."
    ),
]
BatchOpt = Annotated[int, typer.Option("--batch", min=1, help="Batch size of a named program.")]
DTypeOpt = Annotated[
    str | None, typer.Option("--dtype", help="f32 (default on a CPU), f16 (on a GPU), bf16 or f64.")
]
DeviceOpt = Annotated[
    str, typer.Option("--device", help="cpu: this machine; cuda, triton or gpu (both): its GPU.")
]
MORE = {"allow_extra_args": True, "ignore_unknown_options": True}  # for --no-NAME
BudgetOpt = Annotated[
    float,
    typer.Option("--budget", parser=parse_seconds, metavar="TIME", help="60s, 2m, 500ms, ..."),
]
SeedOpt = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same search.")]
JsonOpt = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")
]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"obelisk {obelisk_version()}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Superoptimizes tensor programs and proves what it returns."""


def _write_json(path: Path | None, data: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


@app.command("optimize", context_settings=MORE)
def optimize_command(
    context: typer.Context,
    program: ProgramArg,
    batch: BatchOpt = 1,
    dtype: DTypeOpt = None,
    device: DeviceOpt = "cpu",
    budget: BudgetOpt = 60.0,
    seed: SeedOpt = 0,
    json_file: JsonOpt = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE.html", help="Write a page.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Export the compiled program.")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Neither ask nor tell the cache.")
    ] = False,
    family: Annotated[
        str | None,
        typer.Option(
            "--family",
            metavar="DIM=LOW..HIGH",
            help="One search and one proof for a range: batch=1..64, or INPUT.AXIS=1..4096.",
        ),
    ] = None,
) -> None:
    """Find the fastest kernels for a program, prove them right, and measure them.

    --no-NAME leaves a decision of the lowering out, to see what it brings (docs/cli.md).
    """
    without = ablations(context.args)
    symbolic = cli_family.asked(program, family, batch, dtype, device, report, save)
    if symbolic is not None:
        cli_family.run_family(
            symbolic,
            budget=budget,
            seed=seed,
            cache=not no_cache,
            write=lambda data: _write_json(json_file, data),
        )
        return
    graph = load_for(program, device, batch, dtype)
    with Display() as progress:
        best = optimize(
            graph,
            device=device,
            budget=budget,
            seed=seed,
            cache=not no_cache,
            without=without,
            progress=progress,
        )
    print_report(best.report, to_text(best.graph), stdout())
    _write_json(json_file, best.report.to_json())
    if report is not None:
        report.write_text(best.html(), encoding="utf-8")
    if save is not None:
        best.save(save)


@app.command(context_settings=MORE)
def show(
    context: typer.Context,
    program: ProgramArg,
    batch: BatchOpt = 1,
    dtype: DTypeOpt = None,
    lowered: Annotated[
        bool, typer.Option("--lowered", help="Show the scheduled tile program.")
    ] = False,
    code: Annotated[bool, typer.Option("--code", help="Show the generated text.")] = False,
    target: Annotated[
        str, typer.Option("--target", "--device", help="cpu, or a machine: h200, sm_90a, ...")
    ] = "cpu",
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Write a picture.")
    ] = None,
    index: Annotated[
        int | None, typer.Option("--index", min=0, help="Which graph of a file.")
    ] = None,
    json_file: JsonOpt = None,
) -> None:
    """Show graphs as text, as scheduled tile programs, as generated code, or as a picture."""
    without = ablations(context.args)
    entries = load_entries(program, batch, target_dtype(program, target, dtype))
    if index is not None:
        if index >= len(entries):
            raise UserError(f"{program} has graphs 0 to {len(entries) - 1}, got --index {index}")
        entries = [entries[index]]
    if (svg or lowered or code) and len(entries) != 1:
        raise UserError(f"{program} holds {len(entries)} graphs: choose one with --index")
    if svg is not None:
        from obelisk.ir.svg import to_svg  # only here: it needs a layout library

        svg.write_text(to_svg(graph_of(entries[0])), encoding="utf-8")
    if lowered or code:
        typer.echo(lowered_text(graph_of(entries[0]), target, without, lowered, code))
    elif svg is None or json_file is not None:
        for entry in entries:
            if entry.graph is None:
                typer.echo(f"# graph {entry.index} is malformed: {entry.error}")
            else:
                typer.echo(to_text(entry.graph))
    _write_json(
        json_file,
        {
            "graphs": [
                {
                    "index": e.index,
                    "graph": to_json(e.graph) if e.graph else None,
                    "error": str(e.error) if e.error else None,
                }
                for e in entries
            ]
        },
    )


@app.command("verify")
def verify_command(
    candidates: Annotated[
        str, typer.Argument(metavar="A", help="What to judge: a file of graphs, or a program.")
    ],
    program: Annotated[
        str | None, typer.Argument(metavar="[B]", help="What it must equal.")
    ] = None,
    against: Annotated[
        str | None, typer.Option("--against", metavar="PROGRAM", help="The same as B.")
    ] = None,
    batch: BatchOpt = 1,
    dtype: DTypeOpt = None,
    seed: SeedOpt = 0,
    json_file: JsonOpt = None,
) -> None:
    """Judge whether graphs equal a program; exit 1 if one is refuted or unknown."""
    target = program or against
    if target is None or (program and against):
        raise UserError("verify needs one program to compare with: verify A B, or A --against B")
    console = stdout()
    rows = []
    with Display() as progress:
        for row in judge_entries(candidates, target, batch, dtype, seed, progress):
            rows.append(row)
            line = Text.assemble(
                f"{row.index:4d}  ",
                verdict_text(row.verdict),
                f"  {row.seconds:.2f} s  {row.bound}",
            )
            if row.witness:
                line.append(f"  witness: {row.witness}")
            progress.print(console, line)
    console.print(summary_line(rows))
    _write_json(json_file, judgements_json(rows))
    if any(r.verdict not in ("proved", "tested") for r in rows):
        raise typer.Exit(1)


@app.command("search")
def search_command(
    program: ProgramArg,
    batch: BatchOpt = 1,
    dtype: DTypeOpt = None,
    target: Annotated[
        str,
        typer.Option("--target", "--device", help="cpu, or a machine by name: h200, sm_90a, ..."),
    ] = "cpu",
    budget: BudgetOpt = 60.0,
    seed: SeedOpt = 0,
    workers: WorkersOpt = None,
    memory: MemoryOpt = 2 << 30,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", metavar="FILE", help="Keep finished work there."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="FILE", help="Go on from a checkpoint, and keep it."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the candidates.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print every count by level.")] = False,
    json_file: JsonOpt = None,
    text: Annotated[bool, typer.Option("--text", help="Show every candidate's text form.")] = False,
) -> None:
    """Only search: candidates with their predicted cost, neither verified nor measured."""
    run_search(
        program,
        batch=batch,
        dtype=dtype,
        target=target,
        space=SPACE,
        budget=budget,
        seed=seed,
        memory=memory,
        workers=workers,
        checkpoint=checkpoint,
        resume=resume,
        output=output,
        stats=stats,
        text=text,
        write=lambda data: _write_json(json_file, data),
    )


@app.command("bench")
def bench_command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAMES]", help="Which; all by default.")
    ] = None,
    batch: BatchOpt = 1,
    dtype: DTypeOpt = None,
    device: DeviceOpt = "cpu",
    budget: BudgetOpt = 60.0,
    seed: SeedOpt = 0,
    json_file: JsonOpt = None,
    chart_file: Annotated[
        Path | None, typer.Option("--chart", metavar="FILE.svg", help="Draw the times.")
    ] = None,
    candidates: Annotated[
        Path | None,
        typer.Option(
            "--candidates", metavar="DIR", help="Take NAME_BATCH.json of `search -o` from there."
        ),
    ] = None,
    search_only: Annotated[
        bool, typer.Option("--search", help="Only search: states, seconds, memory, structures.")
    ] = False,
    workers: WorkersOpt = None,
) -> None:
    """Time the named programs (NAME or NAME:BATCH) beside numpy, torch and kernel libraries."""
    console = stdout()
    if search_only:
        rows_found = search_bench.run_search_bench(
            names or (),
            batch=batch,
            dtype=dtype or "f32",
            budget=budget,
            seed=seed,
            workers=workers,
            each=lambda row: console.print(Text(search_bench.line_of(row)), soft_wrap=True),
        )
        found = search_bench.search_json(rows_found)
        for line in search_bench.bar_lines(found["bars"]):
            console.print(Text(line), soft_wrap=True)
        _write_json(json_file, found)
        return
    columns = (OP_BY_OP, *backend_of(device).rivals)

    def row_of(row: benching.BenchRow) -> list[str]:
        if row.report is None:
            return [row.name, "-", "-", row.error, *[""] * len(columns)]
        ratio = show_ratio(row.ratio, row.ratio_spread) if row.ratio else "-"
        spread = row.report.chosen.spread_us
        return [
            row.name,
            f"{show_us(row.time_us)} ± {show_us(spread)}",
            ratio,
            show_us(row.report.floor_us),
            *(show_us(row.baseline(name)) for name in columns),
        ]

    done: list[benching.BenchRow] = []

    def finished(row: benching.BenchRow) -> None:
        done.append(row)
        progress.print(console, Text("  ".join(row_of(row))))
        _write_json(json_file, benching.bench_json(done))  # what is known, should the run be cut
        if chart_file is not None:
            chart_file.write_text(chart(done), encoding="utf-8")

    with Display() as progress:
        rows = benching.run_bench(
            names or (),
            batch=batch,
            dtype=dtype,
            budget=budget,
            seed=seed,
            device=device,
            candidates=candidates,
            progress=progress,
            each=finished,
        )
    console.print(rows_table(("program", "obelisk", "ratio", "floor", *columns), map(row_of, rows)))
    for name, value in benching.summarise(rows).items():
        console.print(f"{name}: {value:.3f}" if value is not None else f"{name}: -")
    if any(row.report is None for row in rows):
        raise typer.Exit(1)


@app.command("build", context_settings=MORE)
def build(
    context: typer.Context,
    program: ProgramArg,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Where everything is written.")
    ],
    target: Annotated[
        str, typer.Option("--target", help="A CUDA machine or architecture: sm_90a, h200, ...")
    ] = "sm_90a",
    batch: BatchOpt = 1,
    dtype: DTypeOpt = None,
    search_seconds: Annotated[
        str | None, typer.Option("--budget", metavar="TIME", help="Search so long first.")
    ] = None,
    seed: SeedOpt = 0,
    every: Annotated[
        bool, typer.Option("--all", help="Every lowering choice, not only the default.")
    ] = False,
    json_file: JsonOpt = None,
) -> None:
    """Write source, cubins and a table of what they use; needs no GPU.

    PROGRAM may be a file that `search -o` wrote. Exit code 1 if a kernel breaks a limit or fails.
    """
    rows, data = build_command(
        program,
        target,
        output,
        batch=batch,
        dtype=dtype,
        budget=None if search_seconds is None else parse_seconds(search_seconds),
        seed=seed,
        every=every,
        without=ablations(context.args),
    )
    _write_json(json_file, data)
    if any(r.status in ("failed", "over the limit") for r in rows):
        raise typer.Exit(1)


@app.command("tune", context_settings=MORE)
def tune(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="What `search -o` wrote.")],
    device: DeviceOpt = "cpu",
    budget: BudgetOpt = 60.0,
    seed: SeedOpt = 0,
    json_file: JsonOpt = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Export the compiled program.")
    ] = None,
) -> None:
    """Judge, build and measure candidates that were searched elsewhere."""
    best = tune_command(
        file, device, budget=budget, seed=seed, save=save, without=ablations(context.args)
    )
    _write_json(json_file, best.report.to_json())


@app.command("profile")
def profile_command(
    what: Annotated[
        str, typer.Argument(metavar="RESULT|PROGRAM", help="What --save wrote, or a program.")
    ],
    batch: BatchOpt = 1,
    dtype: DTypeOpt = None,
    device: DeviceOpt = "cpu",
    budget: BudgetOpt = 60.0,
    seed: SeedOpt = 0,
    no_counters: NoCountersOpt = False,
    json_file: JsonOpt = None,
) -> None:
    """Show where a call's time goes, kernel by kernel."""
    found = run_profile(
        what,
        device,
        batch=batch,
        dtype=dtype,
        budget=budget,
        seed=seed,
        counters=not no_counters,
    )
    _write_json(json_file, found.to_json())


@app.command()
def doctor(json_file: JsonOpt = None) -> None:
    """Say what this machine has and lacks; exit 1 if something needed is missing."""
    findings = examine()
    console = stdout()
    for f in findings:
        mark = ("ok", "green") if f.ok else ("missing", "red") if f.needed else ("absent", "yellow")
        console.print(Text.assemble((f"{mark[0]:8s}", mark[1]), f"{f.name}: {f.detail}"))
        if not f.ok and f.remedy:
            console.print(Text(f"        to mend it: {f.remedy}"), soft_wrap=True)
    _write_json(
        json_file,
        {
            "version": obelisk_version(),
            "findings": [
                {
                    "name": f.name,
                    "ok": f.ok,
                    "needed": f.needed,
                    "detail": f.detail,
                    "remedy": f.remedy,
                }
                for f in findings
            ],
        },
    )
    if any(f.needed and not f.ok for f in findings):
        raise typer.Exit(1)


@cache_app.command("ls")
def cache_ls(json_file: JsonOpt = None) -> None:
    """List what is stored, newest first."""
    store = Store.open()
    found = store.list()
    rows = [
        (s.digest[:12], s.name, time.strftime("%Y-%m-%d %H:%M", time.localtime(s.created)))
        for s in found
    ]
    stdout().print(
        rows_table(
            ("entry", "program", "made", "size"),
            [(*r, show_bytes(s.nbytes)) for r, s in zip(rows, found, strict=True)],
            left=3,
        )
    )
    typer.echo(f"{len(found)} entries in {store.folder}")
    _write_json(
        json_file,
        [
            {"digest": s.digest, "program": s.name, "created": s.created, "bytes": s.nbytes}
            for s in found
        ],
    )


@cache_app.command("show")
def cache_show(
    entry: Annotated[str, typer.Argument(help="The beginning of an entry's digest.")],
    json_file: JsonOpt = None,
) -> None:
    """Show one entry: what it answers, and with what."""
    found = Store.open().show(entry)
    for name, value in found.key.to_json().items():
        typer.echo(f"{name}: {value}")
    typer.echo(f"program name: {found.name}")
    for name, path in found.artefacts.items():
        typer.echo(f"{name}: {path}")
    typer.echo(str(found.payload.get("chosen.txt", "")))
    _write_json(json_file, {"key": found.key.to_json(), "payload": dict(found.payload)})


@cache_app.command("rm")
def cache_rm(
    entry: Annotated[str | None, typer.Argument(help="The beginning of an entry's digest.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove everything.")] = False,
) -> None:
    """Remove one entry, or all."""
    if (entry is None) != everything:
        raise UserError("cache rm needs the beginning of a digest, or --all")
    typer.echo(f"{Store.open().remove(entry)} removed")


@cache_app.command("verify")
def cache_verify(json_file: JsonOpt = None) -> None:
    """Read everything again; exit 1 if something is damaged."""
    found = Store.open().verify()
    for problem in found.problems:
        typer.echo(problem)
    typer.echo(
        f"{found.entries} entries, {len(found.problems)} problems, {len(found.orphans)} files "
        f"unused in {settings().cache_dir}"
    )
    _write_json(
        json_file,
        {
            "entries": found.entries,
            "problems": list(found.problems),
            "orphans": [str(p) for p in found.orphans],
        },
    )
    if found.problems:
        raise typer.Exit(1)
