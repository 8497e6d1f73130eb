"""`obelisk bench --search`: what the search finds in each named program, how fast, in what memory.

Takes names; gives one row per program with its account and with the best known structures that were
among the candidates, each found or not. Every program is searched in an interpreter of its own, so
that peak memory is its own. It promises that the load of the machine is in the file: seconds of a
busy machine are not those of a quiet one.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from obelisk.app.bench import commit
from obelisk.app.cli_search import stats_json
from obelisk.app.programs import PROGRAMS, find_program
from obelisk.base.errors import InternalError
from obelisk.base.settings import usable_cores
from obelisk.ir import Graph, Op
from obelisk.ir.block import BlockGraph, Phase
from obelisk.machine import find
from obelisk.search import Budget, SearchResult, Space, search

SCHEMA = 1
KEEP = 40  # candidates looked at for structures
Row = dict[str, Any]
Test = Callable[[list[BlockGraph], int], bool]


def _ops(block: BlockGraph, *kinds: Op) -> int:
    return sum(n.op in kinds for n in block.body)


def _one_loop(sums: int, products: int) -> Test:
    """One kernel, one loop that feeds so many accumulators."""

    def test(blocks: list[BlockGraph], launches: int) -> bool:
        if len(blocks) != 1 or launches != 1:
            return False
        b = blocks[0]
        return b.loop > 1 and _ops(b, Op.ACCUM_SUM) == sums and _ops(b, Op.MATMUL) == products

    return test


def _division_after(blocks: list[BlockGraph], launches: int) -> bool:
    if not _one_loop(2, 1)(blocks, launches):
        return False
    b = blocks[0]
    return all(b.info.phase[n] is Phase.POST for n in b.body if n.op is Op.DIV)


def _online(blocks: list[BlockGraph], launches: int) -> bool:
    return (
        len(blocks) == 1 == launches
        and _ops(blocks[0], Op.RUNNING_MAX) == 1
        and _ops(blocks[0], Op.ACCUM_RESCALE) == 2
    )


def _split_keys(blocks: list[BlockGraph], launches: int) -> bool:
    return len(blocks) == 2 == launches and len(blocks[0].stores) == 3


def _at_most(most: int) -> Test:
    return lambda blocks, launches: launches <= most


_ATTENTION: Mapping[str, Test] = {
    "one kernel, online softmax over the keys": _online,
    "keys split over the grid, safe combining kernel": _split_keys,
}
STRUCTURES: Mapping[str, Mapping[str, Test]] = {
    "gqa": _ATTENTION,
    "mha": _ATTENTION,
    "mqa": _ATTENTION,
    "qknorm": _ATTENTION,
    "attention": _ATTENTION,
    "qknorm_k": _ATTENTION,
    "rmsnorm": {"one kernel, two sums in one loop, division after it": _division_after},
    "lora": {
        "one kernel": _at_most(1),
        "one product over concatenated operands": lambda blocks, launches: (
            launches == 1 and _ops(blocks[0], Op.CONCAT) >= 1
        ),
    },
    "gated_mlp": {"one kernel, two products in one loop": _one_loop(2, 2)},
    "ntrans": {"one kernel": _at_most(1)},
    "mlp": {"two kernels or one": _at_most(2)},
    "moe": {"two kernels or one": _at_most(2)},
}


def structures_of(graph: Graph) -> tuple[list[BlockGraph], int]:
    """The block graphs of a candidate, in order, and how many launches it has."""
    launches = graph.launches()
    return [x.block for x in launches if x.block is not None], len(launches)


def describe(graph: Graph) -> list[str]:
    """Each launch in words: grid, loop, accumulators and results of a block; else the operator."""
    out = []
    for launch in graph.launches():
        b = launch.block
        if b is None:
            out.append(launch.node.op.value)
            continue
        kinds = (Op.ACCUM_SUM, Op.ACCUM_RESCALE, Op.ACCUM_MAX, Op.RUNNING_MAX)
        sums = [f"{n} {k.value}" for k in kinds if (n := _ops(b, k))]
        words = [f"grid {'x'.join(map(str, b.grid))}", f"loop {b.loop}", *sums]
        words.append(f"{_ops(b, Op.MATMUL)} matmul, {len(b.stores)} results")
        out.append(", ".join(words))
    return out


def search_row(
    name: str, batch: int, dtype: str, budget: float, seed: int, workers: str | None
) -> Row:
    """Search one program here."""
    program = find_program(name)
    graph = program.graph(batch, dtype)
    machine = find("cpu")
    result = search(
        graph,
        machine,
        space=Space(keep=KEEP),
        budget=Budget(seconds=budget),
        seed=seed,
        workers=workers,
    )
    return {
        "program": program.name,
        "batch": batch,
        "dtype": dtype,
        "machine": machine.name,
        **stats_json(result.stats),
        "states_per_second": result.stats.states / max(result.stats.seconds, 1e-9),
        "structures": _found(program.name, result),
        "best": {
            "kernels": result.candidates[min(1, len(result.candidates) - 1)].cost.launches,
            "predicted_us": result.candidates[min(1, len(result.candidates) - 1)].cost.seconds
            * 1e6,
            "program_us": result.candidates[0].cost.seconds * 1e6,
            "launches": describe(result.candidates[min(1, len(result.candidates) - 1)].graph),
        },
        "candidates": len(result.candidates),
    }


def _found(name: str, result: SearchResult) -> dict[str, Any]:
    """For each known structure the rank and launches of its first candidate, or None."""
    out: dict[str, Any] = {}
    for title, test in STRUCTURES.get(name, {}).items():
        out[title] = None
        for rank, candidate in enumerate(result.candidates):
            blocks, launches = structures_of(candidate.graph)
            if rank > 0 and blocks and test(blocks, launches):
                out[title] = {"rank": rank, "launches": describe(candidate.graph)}
                break
    return out


_CHILD = (
    "import json,sys;sys.path[:]=json.loads(sys.argv[2]);"
    "from obelisk.app.search_bench import search_row;"
    "print(json.dumps(search_row(*json.loads(sys.argv[1]))))"
)


def run_search_bench(
    names: Sequence[str] = (),
    *,
    batch: int = 1,
    dtype: str = "f32",
    budget: float = 60.0,
    seed: int = 0,
    workers: str | None = None,
    each: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Search each program in a process of its own; `each` gets a row as soon as it is known.

    Raises `UnknownName` for a name that is not known, `InternalError` if a search fails.
    """
    rows = []
    for program in [find_program(name) for name in names or PROGRAMS]:
        load = os.getloadavg()[0]
        asked = json.dumps([program.name, batch, dtype, budget, seed, workers])
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, asked, json.dumps([p for p in sys.path if p])],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise InternalError(f"the search of {program.name} failed:\n{done.stderr[-2000:]}")
        row: Row = {**json.loads(done.stdout), "load_average": load}
        rows.append(row)
        each(row)
    return rows


def line_of(row: Row) -> str:
    """One row in words."""
    found = row["structures"]
    missing = [title for title, where in found.items() if where is None]
    return (
        f"{row['program']:10s} {row['states']:8,d} states  {row['seconds']:6.1f} s  "
        f"{row['peak_memory'] >> 20:5d} MiB  {row['stopped']:10s} "
        f"{len(found) - len(missing)} of {len(found)} structures"
        + (f"; missing: {', '.join(missing)}" if missing else "")
    )


def search_json(rows: Iterable[Row]) -> dict[str, Any]:
    """The JSON form: when, with which command, on which machine under which load, and the rows."""
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "environment": {
            "cores": usable_cores(),
            "processor": find("cpu").title,
            "python": platform.python_version(),
            "load_average": list(os.getloadavg()),
        },
        "rows": list(rows),
    }
