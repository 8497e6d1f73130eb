"""`obelisk search`: the search alone, with its account, checkpoints and candidate files.

Takes a program and limits; prints candidates with their predicted cost, neither judged nor
measured, and with `--stats` every count by level and what the judges say. The functions here are
what the command line and the bench share.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from obelisk.app.display import Display, candidate_table, rows_table, stdout
from obelisk.app.loading import load_program, target_dtype
from obelisk.app.report import CandidateRow, show_bytes
from obelisk.app.search_stats import Levels, by_level, judged, level_rows
from obelisk.ir.jsonform import to_json
from obelisk.ir.text import to_text
from obelisk.machine import find
from obelisk.search import Budget, SearchResult, SearchStats, Space, search, write_candidates

_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str | int) -> int:
    """`2G`, `1.5GiB`, `800M`, `1073741824` in bytes, powers of 1024; `typer.BadParameter` for
    anything else.
    """
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if found is None or float(found[1]) <= 0:
        raise typer.BadParameter(f"{text!r} is no amount of memory; write 2G, 800M or bytes")
    return int(float(found[1]) * _BYTES[found[2]])


MemoryOpt = Annotated[
    int,
    typer.Option(
        "--memory", parser=parse_bytes, metavar="BYTES", help="Bound of each process: 2G, 800M."
    ),
]
WorkersOpt = Annotated[
    str | None,
    typer.Option(
        "--workers", metavar="N", help="Processes (all usable cores), or ray, or ray://HOST:PORT."
    ),
]


def stats_json(stats: SearchStats) -> dict[str, Any]:
    """The account as JSON values."""
    return {
        "seconds": stats.seconds,
        "found_seconds": stats.found_seconds,
        "states": stats.states,
        "pruned": dict(stats.pruned),
        "bank_hits": stats.bank_hits,
        "skeletons": stats.skeletons,
        "instances": stats.instances,
        "intervals": stats.intervals,
        "segments": stats.segments,
        "reused": stats.reused,
        "units": stats.units,
        "resumed": stats.resumed,
        "retried": stats.retried,
        "dropped": stats.dropped,
        "workers": stats.workers,
        "stopped": stats.stopped,
        "stage_seconds": dict(stats.stage_seconds),
        "peak_memory": stats.peak_memory,
        "levels": stats.levels,
    }


def _print_stats(stats: SearchStats, levels: Levels) -> None:
    console = stdout()
    console.print(rows_table(("level", "count", "number"), level_rows(levels), left=2))
    stages = ", ".join(f"{name} {s:.2f} s" for name, s in stats.stage_seconds.items())
    console.print(
        f"processor time: {stages}; the best candidate was there after {stats.found_seconds:.2f} s"
    )
    console.print(
        f"{stats.units} units, {stats.resumed} from the checkpoint, {stats.retried} retried, "
        f"{stats.dropped} dropped; {stats.workers} worker processes; "
        f"at most {show_bytes(stats.peak_memory)} a process"
    )


def run_search(
    program: str,
    *,
    batch: int,
    dtype: str | None,
    target: str,
    space: Space,
    budget: float,
    seed: int,
    memory: int,
    workers: str | None,
    checkpoint: Path | None,
    resume: Path | None,
    output: Path | None,
    stats: bool,
    text: bool,
    write: Callable[[Any], None],
) -> SearchResult:
    """Search, print, write; the body of `obelisk search`. `write` takes the JSON form."""
    graph = load_program(program, batch, target_dtype(program, target, dtype))
    machine = find(target)
    with Display() as progress:
        found = search(
            graph,
            machine,
            space=space,
            budget=Budget(seconds=budget, memory=memory),
            seed=seed,
            progress=progress,
            workers=workers,
            checkpoint=checkpoint,
            resume=resume,
        )
    rows = [
        CandidateRow(i, c.cost.launches, int(c.cost.bytes), c.cost.seconds * 1e6, note=c.note)
        for i, c in enumerate(found.candidates)
    ]
    console = stdout()
    console.print(candidate_table(rows))
    if text:
        for i, candidate in enumerate(found.candidates):
            console.print(Text(f"\n# candidate {i}\n{to_text(candidate.graph)}"), soft_wrap=True)
    account = found.stats
    pruned = ", ".join(f"{n:,} {rule}" for rule, n in account.pruned.items())
    console.print(
        f"{account.states:,} states in {account.seconds:.1f} s ({account.stopped}); "
        f"pruned {pruned or 'none'}"
    )
    levels = by_level(found, machine)
    if stats:
        with Display() as progress:
            levels = by_level(found, machine, judged(found, seed, budget, progress))
        _print_stats(account, levels)
    if output is not None:
        write_candidates(output, found, machine.name)
        console.print(f"{len(found.candidates)} candidates in {output}")
    write(
        {
            "program": graph.name,
            "machine": machine.name,
            "search": {**stats_json(account), "levels": levels},
            "candidates": [
                {
                    "index": r.index,
                    "kernels": r.kernels,
                    "bytes": r.bytes,
                    "predicted_us": r.predicted_us,
                    "note": r.note,
                    "graph": to_json(c.graph),
                }
                for r, c in zip(rows, found.candidates, strict=True)
            ],
        }
    )
    return found
