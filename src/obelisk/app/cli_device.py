"""Commands for code on another machine, or on a device: `build`, `tune`, `profile`.

Each is a few lines around a function that Python can call, too (`building`, `pipeline`,
`profiling`); docs/cli.md has their JSON forms.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from obelisk.app.backends import backend_of
from obelisk.app.building import BuildRow, build_graphs, cuda_target
from obelisk.app.compiled import Compiled, load
from obelisk.app.display import Display, print_report, rows_table, stdout
from obelisk.app.loading import graph_of, load_entries, load_for, target_dtype
from obelisk.app.pipeline import SPACE, optimize, optimize_given
from obelisk.app.profiling import Profile, profile
from obelisk.app.report import show_bytes, show_us
from obelisk.app.request import Wanted
from obelisk.base.errors import ParseError, UserError
from obelisk.base.progress import Progress
from obelisk.ir import Graph
from obelisk.ir.text import to_text
from obelisk.machine import Machine
from obelisk.search import Budget, CandidateFile, read_candidates, search

BUILD_NAMES = ("graph", "choice", "kernel", "status", "blocks", "threads", "registers", "spills",
               "shared", "limit")  # fmt: skip
_TEXT_COLUMNS = 4
PROFILE_NAMES = ("kernel", "time", "spread", "bytes", "bandwidth", "blocks", "threads",
                 "registers", "occupancy")  # fmt: skip
_SAVED = ".obelisk"


def ablations(words: list[str]) -> tuple[str, ...]:
    """`--no-fusion --no-pipeline` as names; raises `UserError` for any other word.

    Which names there are depends on the device: its back end is asked later.
    """
    out = []
    for word in words:
        name = word.removeprefix("--no-")
        if name == word or not name:
            raise UserError(f"{word!r} is no option here; decisions are left out by --no-NAME")
        out.append(name)
    return tuple(out)


def is_candidates(path: str) -> bool:
    """Whether a path names a file that `search -o` wrote."""
    try:
        with open(path, encoding="utf-8") as file:
            return '"obelisk-candidates"' in file.read(200)
    except (OSError, UnicodeDecodeError):
        return False


def graphs_to_build(
    program: str,
    machine: Machine,
    batch: int,
    dtype: str | None,
    seconds: float | None,
    seed: int,
    progress: Progress,
) -> list[Graph]:
    """The graphs of a file of candidates or graphs; of a program itself and, with `seconds`, what
    a search of that length finds.
    """
    if is_candidates(program):
        return [c.graph for c in read_candidates(program).candidates]
    entries = load_entries(program, batch, target_dtype(program, machine.name, dtype))
    graphs = [graph_of(e) for e in entries]
    if seconds is None:
        return graphs
    if len(graphs) != 1:
        raise UserError(f"{program} holds {len(graphs)} graphs: --budget searches one program")
    found = search(
        graphs[0], machine, space=SPACE, budget=Budget(seconds), seed=seed, progress=progress
    )
    return [c.graph for c in found.candidates]


def _build_table(rows: list[BuildRow], machine: Machine) -> Table:
    return rows_table(
        BUILD_NAMES,
        [
            (
                str(r.graph),
                r.choice or "default",
                f"{r.folder}/kernel{r.kernel}" if r.registers else r.folder or "-",
                r.status if not r.reason else f"{r.status}: {r.reason}",
                f"{r.blocks}" if r.cluster == 1 else f"{r.blocks} in clusters of {r.cluster}",
                str(r.threads),
                str(r.registers),
                show_bytes(r.spills),
                show_bytes(r.shared + r.static_shared),
                show_bytes(machine.shared_bytes),
            )
            for r in rows
        ],
        left=_TEXT_COLUMNS,
    )


def build_command(
    program: str,
    target: str,
    output: Path,
    *,
    batch: int,
    dtype: str | None,
    budget: float | None,
    seed: int,
    every: bool,
    without: tuple[str, ...],
) -> tuple[list[BuildRow], dict[str, Any]]:
    """The body of `obelisk build`; gives the rows and their JSON form."""
    machine = cuda_target(target)
    with Display() as progress:
        graphs = graphs_to_build(program, machine, batch, dtype, budget, seed, progress)
        rows = build_graphs(
            graphs, machine, output, every=every, without=without, progress=progress
        )
    console = stdout()
    console.print(_build_table(rows, machine))
    good = sum(r.status == "ok" for r in rows)
    console.print(f"{good} of {len(rows)} kernels for {machine.arch} are good, in {output}")
    data: dict[str, Any] = json.loads((output / "resources.json").read_text(encoding="utf-8"))
    return rows, data


def tune_command(
    file: str,
    device: str,
    *,
    budget: float,
    seed: int,
    save: Path | None,
    without: tuple[str, ...],
) -> Compiled:
    """The body of `obelisk tune`: judge, build and measure what a search found elsewhere."""
    found: CandidateFile = read_candidates(file)
    with Display() as progress:
        wanted = Wanted(device, budget, seed, without=without)
        best = optimize_given(found.program, found, wanted, progress)
    print_report(best.report, to_text(best.graph), stdout())
    if save is not None:
        best.save(save)
    return best


def compiled_of(
    what: str, device: str, *, batch: int, dtype: str | None, budget: float, seed: int
) -> Compiled:
    """A saved result, or a program compiled now (or taken from the cache)."""
    if Path(what).suffix == _SAVED or (Path(what).is_file() and _is_zip(what)):
        return load(what)
    with Display() as progress:
        graph = load_for(what, device, batch, dtype)
        return optimize(graph, device=device, budget=budget, seed=seed, progress=progress)


def _is_zip(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"PK"
    except OSError as error:
        raise ParseError(f"{path}: {error.strerror}") from error


def print_profile(found: Profile) -> None:
    """The table of `obelisk profile`."""
    console = stdout()
    rows = [
        (
            f"{k.number} {k.what}",
            show_us(k.time_us),
            show_us(k.spread_us),
            show_bytes(k.bytes),
            f"{k.bandwidth / 1e9:,.0f} GB/s",
            str(k.blocks),
            str(k.threads or "-"),
            str(k.registers or "-"),
            "-" if k.occupancy is None else f"{k.occupancy:.0%}",
        )
        for k in found.kernels
    ]
    console.print(rows_table(PROFILE_NAMES, rows))
    for k in found.kernels:
        if k.counters:
            words = ", ".join(f"{n} {v:,.6g}" for n, v in k.counters.items())
            console.print(f"kernel {k.number}, ncu: {words}", soft_wrap=True)
    console.print(f"whole call: {show_us(found.time_us)} ± {show_us(found.spread_us)}")
    for note in found.notes:
        console.print(f"Note: {note}", soft_wrap=True)


def run_profile(
    what: str,
    device: str,
    *,
    batch: int,
    dtype: str | None,
    budget: float,
    seed: int,
    counters: bool,
) -> Profile:
    """The body of `obelisk profile`."""
    backend_of(device).machine(device)  # says first whether there is such a device
    best = compiled_of(what, device, batch=batch, dtype=dtype, budget=budget, seed=seed)
    found = profile(best, device, counters=counters)
    print_profile(found)
    return found


NoCountersOpt = Annotated[
    bool, typer.Option("--no-counters", help="Do not ask ncu for hardware counters.")
]
