"""Candidates for a race on a device: the search's structures at sizes that fill one GPU.

Takes program names (NAME or NAME:BATCH) and a machine; writes one text file a program with the input
graph first, then every structure that covers the whole program in one kernel (or in a kernel and its
combining kernel), at several sizes. The search ranks sizes by a cost model; here they are spread,
so that the device can rank them. `python bench/device_candidates.py DIR gqa lora ...`
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from obelisk.app.loading import load_program
from obelisk.base.errors import UserError
from obelisk.base.progress import Silent
from obelisk.ir import Graph, Op, make_graph, text
from obelisk.ir.block import ceil_div
from obelisk.machine import find
from obelisk.search.axes import Segment
from obelisk.search.driver import _Search
from obelisk.search.partition import Partition
from obelisk.search.sizes import Instance
from obelisk.search.skeleton import Skeleton, Sizes, instantiate
from obelisk.search.space import Budget, Space

SEPARATOR = "\n#----\n"


class _Structures(_Search):
    """The search of one interval, up to its structures."""

    found: list[Skeleton]

    def _sized(self, segment: Segment, skeletons: list[Skeleton]) -> list[Instance]:
        self.found = skeletons
        return []


def sizes(skeleton: Skeleton, segment: Segment, cores: int) -> Iterator[Sizes]:
    """Row tiles of 16 to 128, column tiles of 16 to 64, splits and loops such that the grid fills
    the cores once to four times.
    """
    extents = segment.extents
    loop, split = skeleton.schedule.loop, skeleton.schedule.split
    axes = skeleton.grid_axes()
    second = set(skeleton.combine_axes())
    choices: list[list[int]] = []
    for a in axes:
        n = extents[a]
        tiles = {1} if n <= 64 and n not in (8, 16) else {16, 24, 32, 48, 64, 96, 128}
        choices.append(
            sorted({ceil_div(n, t) for t in tiles if n % t == 0} | ({1} if n <= 64 else set()))
        )

    def parts(i: int) -> Iterator[dict[int, int]]:
        if i == len(axes):
            yield {}
            return
        for rest in parts(i + 1):
            for c in choices[i]:
                yield {axes[i]: c, **rest}

    for cut in parts(0):
        blocks = 1
        for n in cut.values():
            blocks *= n
        for s in (1,) if split is None else (2, 4, 8, 16, 32):
            if not cores // 2 < blocks * s <= 4 * cores + 64 and segment.extents[axes[0]] > 64:
                continue
            depth = 1 if loop is None else extents[loop]
            if loop is not None and loop == split:
                depth = ceil_div(depth, s)
            if loop is not None and loop in cut:
                continue
            loops = {1} if loop is None else {max(2, depth // 64), max(2, depth // 128)}
            for n in sorted(loops):
                yield Sizes(
                    tuple(cut.items()), n, s, tuple((a, c) for a, c in cut.items() if a in second)
                )


def candidates(name: str, batch: int, limit: int = 400) -> list[Graph]:
    """The input graph, then instances."""
    graph = load_program(name, batch=batch, dtype="f16")
    machine = find("h200")
    work = _Structures(graph, machine, Space(), Budget(seconds=1e9), 0, Silent(), None, None)
    partition = Partition(graph, machine, 64)
    whole = partition.interval(0, len(partition.order))
    out = [graph]
    if whole is None or whole.segment is None:
        return out
    segment = whole.segment
    seen = set()
    work.interval(whole)
    for skeleton in work.found:
        if Op.SUM in segment.ops and not skeleton.safe:
            continue
        for size in sizes(skeleton, segment, machine.cores):
            try:
                results = instantiate(skeleton, segment, size)
                made = make_graph(
                    graph.inputs, results, graph.input_names, graph.output_names, graph.name
                )
            except UserError:
                continue
            if made.digest not in seen:
                seen.add(made.digest)
                out.append(made)
    return out[:limit]


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for spec in sys.argv[2:]:
        name, _, batch = spec.partition(":")
        found = candidates(name, int(batch or 1))
        (folder / f"{name}_{batch or 1}.txt").write_text(
            SEPARATOR.join(text.to_text(g) for g in found)
        )
        print(spec, len(found))


if __name__ == "__main__":
    main()
