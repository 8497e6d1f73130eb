"""The same structure at neighbouring sizes: what a device ranks better than a cost model does.

Takes a graph whose kernels have grids and loops, and a machine; gives the graph at grids and loop
counts halved, doubled and quartered, where these fit the machine. It promises that each is the same
structure (a kernel that combines another's parts follows it), and the cheapest predicted first.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator

from obelisk.base.errors import UserError
from obelisk.ir import Graph, Op
from obelisk.ir.resize import blocks_of, resize
from obelisk.machine import Machine, capacity, estimate

FACTORS = (1.0, 0.5, 2.0, 0.25, 4.0)
LEAST_FILL, MOST_FILL = 0.4, 5.0  # blocks of the first kernel, in multiples of the cores
MOST = 24  # siblings of one graph


def shared_axes(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many leading grid axes a kernel and its combining kernel cut alike."""
    n = 0
    while n < min(len(first), len(second)) and first[n] == second[n]:
        n += 1
    return n


def structure(graph: Graph) -> Hashable:
    """What graphs have in common that differ in sizes alone: operators, maps, and which cuts there
    are.
    """
    return tuple(
        (
            len(b.grid),
            b.loop > 1,
            tuple(
                (n.op, (n.attrs.index, n.attrs.imap, n.attrs.fmap) if n.op is Op.LOAD else None)
                for n in b.body
            ),
            tuple(s.omap for s in b.stores),
        )
        for b in blocks_of(graph)
    )


def neighbours(graph: Graph, machine: Machine, most: int = MOST) -> list[Graph]:
    """Siblings of a graph, at most `most`: every grid with its best loop count by the cost model,
    the cheapest first, then every grid's second, and so on. The graph itself is not among them.
    """
    seen = {graph.digest}
    by_grid: dict[tuple[int, ...], list[tuple[float, str, Graph]]] = {}
    for other in _resized(graph, machine):
        if other.digest in seen:
            continue
        seen.add(other.digest)
        blocks = blocks_of(other)
        if all(capacity(b, machine) is None for b in blocks):
            row = (estimate(other, machine).seconds, other.digest, other)
            by_grid.setdefault(blocks[0].grid, []).append(row)
    ranked: list[tuple[int, float, str, Graph]] = []
    for rows in by_grid.values():
        rows.sort(key=lambda r: r[:2])
        ranked += [(turn, *row) for turn, row in enumerate(rows)]
    return [r[3] for r in sorted(ranked, key=lambda r: r[:3])[:most]]


def _resized(graph: Graph, machine: Machine) -> Iterator[Graph]:
    blocks = blocks_of(graph)
    if not blocks:
        return
    shapes, results = [x.shape for x in graph.inputs], [o.shape for o in graph.outputs]
    first = blocks[0]
    tried: set[tuple[tuple[int, ...], int]] = set()  # small cuts round to the same
    for factors in itertools.product(FACTORS, repeat=len(first.grid)):
        grid = tuple(max(1, round(n * f)) for n, f in zip(first.grid, factors, strict=True))
        total = 1
        for n in grid:
            total *= n
        if not LEAST_FILL * machine.cores <= total <= MOST_FILL * machine.cores:
            continue
        grids = {first: grid}
        for other in blocks[1:]:
            n = shared_axes(first.grid, other.grid)
            grids[other] = (*grid[:n], *other.grid[n:])
        for factor in FACTORS if first.loop > 1 else (1.0,):
            loops = {first: max(2, round(first.loop * factor))} if first.loop > 1 else {}
            if (grid, loops.get(first, 1)) in tried:
                continue
            tried.add((grid, loops.get(first, 1)))
            try:
                found = resize(graph, shapes, grids=grids, loops=loops)
            except UserError:  # sizes that leave gaps or do not divide
                continue
            if [o.shape for o in found.outputs] == results:
                yield found
