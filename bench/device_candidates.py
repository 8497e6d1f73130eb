"""Candidates for a race on a device: what the search returns for it, at neighbouring sizes too.

Takes a folder and program names (NAME or NAME:BATCH); writes one text file a program with the input
graph first. The search ranks sizes by a cost model; here each structure's grid and loops are also
halved, doubled and quartered, so that the device can rank them (`device_subgraphs.py` races them).

    python bench/device_candidates.py DIR gqa gqa:8 lora ...
"""

from __future__ import annotations

import argparse
from pathlib import Path

from obelisk.app.loading import load_program
from obelisk.app.sizing import neighbours
from obelisk.ir import Graph
from obelisk.ir.text import to_text
from obelisk.machine import Machine, find
from obelisk.search import Budget, search

SEPARATOR = "\n#----\n"
MOST = 120


def candidates(name: str, batch: int, machine: Machine, seconds: float) -> list[Graph]:
    """The input graph, the search's candidates, then their neighbours; each graph once."""
    graph = load_program(name, batch=batch, dtype="f16")
    found = search(graph, machine, budget=Budget(seconds=seconds))
    out = {graph.digest: graph}
    for candidate in found.candidates:
        out.setdefault(candidate.graph.digest, candidate.graph)
    for candidate in found.candidates[1:]:
        for other in neighbours(candidate.graph, machine):
            if len(out) >= MOST:
                return list(out.values())
            out.setdefault(other.digest, other)
    return list(out.values())


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--machine", default="h200")
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for spec in args.programs:
        name, _, batch = spec.partition(":")
        made = candidates(name, int(batch or 1), find(args.machine), args.seconds)
        text = SEPARATOR.join(to_text(g) for g in made)
        (args.folder / f"{name}_{batch or 1}.txt").write_text(text, encoding="utf-8")
        print(spec, len(made), flush=True)


if __name__ == "__main__":
    main()
