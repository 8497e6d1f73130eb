"""`obelisk bench --search`: what the search finds in each named program, how fast, in what memory.

Takes names; gives one row per program with its account and with the best known structures that were
among the candidates, each found or not, and the bars that a search should meet. Every program is
searched in an interpreter of its own, so that peak memory is its own. It promises that the load of
the machine is in the file: seconds of a busy machine are not those of a quiet one.
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
from obelisk.app.search_stats import by_level
from obelisk.base.errors import InternalError
from obelisk.base.settings import usable_cores
from obelisk.ir import Graph, KernelGraph, Op
from obelisk.ir.block import BlockGraph, Phase
from obelisk.machine import find
from obelisk.search import Budget, SearchResult, Space, search

SCHEMA = 2
KEEP = 40  # candidates looked at for structures
REPEATS = 3  # of each search where numbers of workers are compared
LAYER = "layer"  # the name of `decoder_layer` here
SMALL, SMALL_OPS = "rmsnorm", 11  # searched once more, in this smaller space
LONG_SECONDS = 2.0  # searches by one worker that take less say little about two
# Seconds within which the best known structures of a program should be found.
FOUND_WITHIN: Mapping[str, float] = {
    **dict.fromkeys(("gqa", "qknorm", "lora", "gated_mlp", "ntrans", "mha", "mqa", "moe"), 10.0),
    "mlp": 60.0,
}
ALL = (*PROGRAMS, LAYER)
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


def decoder_layer(dtype: str = "f32") -> Graph:
    """A whole decoder layer, 16 new tokens on 512 cached ones, for searches that take a while:
    norm, attention with rope over the cache, residual, norm, gated MLP, residual.
    """
    rows, keys, heads, head, inner = 16, 512, 16, 64, 2048
    g, width = KernelGraph(LAYER), heads * head
    x = g.input((rows, width), dtype, name="x")
    cos, sin = (g.input((rows, head), dtype, name=n) for n in ("cos", "sin"))
    k, v = (g.input((heads, keys, head), dtype, name=n) for n in ("k", "v"))
    wq, wo = (g.input((width, width), dtype, name=n) for n in ("wq", "wo"))
    gate, up = (g.input((width, inner), dtype, name=n) for n in ("gate", "up"))
    down = g.input((inner, width), dtype, name="down")
    q = g.reshape(g.matmul(g.rms_norm(x, None, 1e-6), wq), (rows, heads, head))
    o = g.attention(g.rope(g.transpose(q, (1, 0, 2)), cos, sin), k, v)
    y = g.add(x, g.matmul(g.reshape(g.transpose(o, (1, 0, 2)), (rows, width)), wo))
    h = g.rms_norm(y, None, 1e-6)
    m = g.matmul(g.mul(g.silu(g.matmul(h, gate)), g.matmul(h, up)), down)
    g.output(g.add(y, m), name="out")
    return g.freeze()


def search_row(
    name: str,
    batch: int,
    dtype: str,
    budget: float,
    seed: int,
    workers: str | None,
    block_ops: int | None = None,
) -> Row:
    """Search one program here; `block_ops` bounds the operators of a kernel."""
    graph = decoder_layer(dtype) if name == LAYER else find_program(name).graph(batch, dtype)
    machine = find("cpu")
    space = Space(keep=KEEP) if block_ops is None else Space(keep=KEEP, block_ops=block_ops)
    result = search(
        graph,
        machine,
        space=space,
        budget=Budget(seconds=budget),
        seed=seed,
        workers=workers,
    )
    stats = result.stats
    best = result.candidates[min(1, len(result.candidates) - 1)]
    stage = stats.seconds - stats.stage_seconds.get("assembly", 0.0)
    return {
        "program": graph.name,
        "batch": batch,
        "dtype": dtype,
        "machine": machine.name,
        "block_ops": space.block_ops,
        **stats_json(stats),
        "levels": by_level(result, machine),
        "search_seconds": stage,
        "states_per_second": stats.states / max(stage, 1e-9),
        "structures": _found(graph.name, result),
        "best": {
            "kernels": best.cost.launches,
            "predicted_us": best.cost.seconds * 1e6,
            "program_us": result.candidates[0].cost.seconds * 1e6,
            "launches": describe(best.graph),
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
    """Search each program in processes of its own; `each` gets a row as soon as it is known.

    With `workers` above 1 every program is searched by one worker and by so many in turn, `REPEATS`
    times; the row is that of the fastest search with `workers`, and its `scaling` holds the states
    per second of all. `layer` (a decoder layer) may stand among the names, and does by default.
    Raises `UnknownName` for a name that is not known, `InternalError` if a search fails.
    """
    rows = []
    many = workers is not None and workers != "1"
    asked = [(n if n == LAYER else find_program(n).name, None) for n in names or ALL]
    for name, ops in (*asked, *((n, SMALL_OPS) for n, _ in asked if n == SMALL)):
        runs: dict[str, list[Row]] = {}
        load = os.getloadavg()[0]
        for _ in range(REPEATS if many and ops is None else 1):
            for count in ("1", workers) if many and ops is None else (workers,):
                row = _child(name, batch, dtype, budget, seed, count, ops)
                runs.setdefault(count or "", []).append(row)
        best = max(runs[workers or ""], key=lambda r: r["states_per_second"])
        row = {**best, "load_average": load}
        if many and ops is None:
            row["scaling"] = _scaling(runs, workers or "")
        rows.append(row)
        each(row)
    return rows


def _child(*asked: Any) -> Row:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(asked), json.dumps([p for p in sys.path if p])],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InternalError(f"the search of {asked[0]} failed:\n{done.stderr[-2000:]}")
    row: Row = json.loads(done.stdout)
    return row


def _scaling(runs: Mapping[str, Sequence[Row]], workers: str) -> dict[str, Any]:
    """States per second of one worker and of many: all runs, the best of each, and their ratio."""
    out: dict[str, Any] = {}
    for count, rows in runs.items():
        rates = [r["states_per_second"] for r in rows]
        out[count] = {
            "states_per_second": max(rates),
            "all_states_per_second": rates,
            "search_seconds": min(r["search_seconds"] for r in rows),
        }
    out["ratio"] = out[workers]["states_per_second"] / out["1"]["states_per_second"]
    return out


def bars(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """What is asked of a search on two cores, each with the value that was measured, the limit, and
    whether it was met.

    Structures count as found when the search ended: an upper bound of when they were.
    """
    out: list[dict[str, Any]] = []

    def bar(program: str, what: str, value: float, limit: float, met: bool) -> None:
        out.append({"program": program, "bar": what, "value": value, "limit": limit, "passed": met})

    for row in rows:
        name, seconds, found = _label(row), row["seconds"], row["structures"]
        whole = row["stopped"] == "exhausted"
        if row["block_ops"] == SMALL_OPS:
            first = row["found_seconds"]
            bar(name, f"best of {SMALL_OPS} operators found, s", first, 2.0, first <= 2.0)
            bar(name, f"{SMALL_OPS} operators exhausted, s", seconds, 30.0,
                whole and seconds <= 30.0)  # fmt: skip
        elif name in FOUND_WITHIN:
            limit = FOUND_WITHIN[name]
            there = bool(found) and all(found.values())
            bar(name, "best known structures found, s", seconds, limit, there and seconds <= limit)
        peak = row["peak_memory"] / (1 << 30)
        bar(name, "peak memory of a process, GiB", peak, 2.0, peak < 2.0)
        scaling = row.get("scaling")
        if scaling and scaling["1"]["search_seconds"] > LONG_SECONDS:
            ratio = scaling["ratio"]
            bar(name, "states a second, two workers over one", ratio, 1.7, ratio >= 1.7)
    return out


def _label(row: Row) -> str:
    """The program, and the smaller space where it was searched in that."""
    return str(row["program"]) + (f"/{SMALL_OPS}" if row["block_ops"] == SMALL_OPS else "")


def bar_lines(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """The bars in words, the missed ones first."""
    lines = [
        f"{'met   ' if b['passed'] else 'MISSED'}  {b['program']}: {b['bar']}: {b['value']:.3g} "
        f"(limit {b['limit']:g})"
        for b in found
    ]
    return sorted(lines)


def line_of(row: Row) -> str:
    """One row in words."""
    found = row["structures"]
    missing = [title for title, where in found.items() if where is None]
    ratio = f"  x{row['scaling']['ratio']:.2f}" if "scaling" in row else ""
    return (
        f"{_label(row):10s} {row['states']:8,d} states  {row['seconds']:6.1f} s{ratio}  "
        f"{row['peak_memory'] >> 20:5d} MiB  {row['stopped']:10s} "
        f"{len(found) - len(missing)} of {len(found)} structures"
        + (f"; missing: {', '.join(missing)}" if missing else "")
    )


def search_json(rows: Iterable[Row]) -> dict[str, Any]:
    """The JSON form: when, with which command, on which machine under which load, the rows, and the
    bars.
    """
    rows = list(rows)
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
        "rows": rows,
        "bars": bars(rows),
    }
