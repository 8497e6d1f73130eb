"""Plans: the structure of a candidate without its sizes, so that one search serves other extents.

A plan says how a program's operators are cut into intervals and which skeleton computes each.
`replan` applies it to the same program at another batch or context length: only sizes are chosen
again, from two proposals (the same tiles, or the same numbers of blocks), so it costs milliseconds,
not a search. A proof of the candidate keeps sizes symbolic and covers the result; what was only
tested is to be tested again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from obelisk.base.errors import Infeasible
from obelisk.ir import Graph, make_graph
from obelisk.ir.block import ceil_div
from obelisk.machine import Machine
from obelisk.search.axes import Axis, Dims, Segment
from obelisk.search.partition import Choice, Cover, Partition
from obelisk.search.sizes import Instance, Sizer
from obelisk.search.skeleton import Sizes, Skeleton
from obelisk.search.threads import fuse_graph


@dataclass(frozen=True, slots=True)
class Piece:
    """Operators first..last-1 of the partition's order as one skeleton (None: left as they are).

    Attributes:
        extents, leaf_dims: the axes that the skeleton was made for; another program must have the
            same.
        sizes: what was chosen for `extents`.
    """

    first: int
    last: int
    skeleton: Skeleton | None
    extents: tuple[int, ...] = ()
    leaf_dims: tuple[Dims, ...] = ()
    sizes: Sizes | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A candidate's structure: its pieces in order, the window of the partition that made it, and
    whether its kernels' chains are thread graphs.
    """

    pieces: tuple[Piece, ...]
    window: int
    thread_graphs: bool


def make_plan(
    cover: Cover, choices: Mapping[int, Choice], window: int, thread_graphs: bool
) -> Plan:
    """The plan of a cover; `choices` maps `id(interval)` to what was chosen for it."""
    pieces = []
    for interval in cover.intervals:
        picked, segment = choices.get(id(interval)), interval.segment
        if picked is None or segment is None:
            pieces.append(Piece(interval.start, interval.stop, None))
        else:
            dims = tuple(segment.dims[leaf] for leaf in segment.leaves)
            pieces.append(
                Piece(
                    interval.start,
                    interval.stop,
                    picked.skeleton,
                    segment.extents,
                    dims,
                    picked.sizes,
                )
            )
    return Plan(tuple(pieces), window, thread_graphs)


def replan(plan: Plan, graph: Graph, machine: Machine) -> Graph:
    """The plan's structure for the same program at other extents.

    Raises `Infeasible` where the program is not the same but for extents (other operators, or an
    extent that became 1 or ceased to be 1), or where no proposed size fits the machine: search
    again then.
    """
    partition = Partition(graph, machine, plan.window)
    if not plan.pieces or plan.pieces[-1].last != len(partition.order):
        raise Infeasible("the plan is of another program: its operators differ; search again")
    intervals = []
    chosen: dict[int, Instance] = {}
    for piece in plan.pieces:
        interval = partition.interval(piece.first, piece.last)
        if interval is None:
            raise Infeasible("the plan is of another program: a part of it is no kernel here")
        intervals.append(interval)
        if piece.skeleton is not None:
            chosen[id(interval)] = _resize(piece, interval.segment, machine)
    cover = Cover(tuple(intervals), 0.0)
    outputs = partition.assemble(cover, lambda i: chosen.get(id(i)))
    found = make_graph(graph.inputs, outputs, graph.input_names, graph.output_names, graph.name)
    return fuse_graph(found, machine) if plan.thread_graphs else found


def _resize(piece: Piece, segment: Segment | None, machine: Machine) -> Instance:
    assert piece.skeleton is not None
    assert piece.sizes is not None
    if segment is None or len(segment.extents) != len(piece.extents):
        raise Infeasible("an extent became 1 or ceased to be 1: the axes differ; search again")
    if tuple(segment.dims[leaf] for leaf in segment.leaves) != piece.leaf_dims:
        raise Infeasible("the plan was made for another program: its tensors differ; search again")
    sizer = Sizer(piece.skeleton, segment, machine, lambda: False)
    proposals = [piece.sizes, _same_tiles(piece, segment)]
    found = [i for sizes in proposals if (i := sizer.evaluate(sizes)) is not None]
    best = min(found, key=lambda i: i.cost.seconds, default=None) or next(iter(sizer.best(1)), None)
    if best is None:
        raise Infeasible(f"no sizes of the plan fit {machine.name} at extents {segment.extents}")
    return best


def _same_tiles(piece: Piece, segment: Segment) -> Sizes:
    """As many blocks, iterations and parts as the new extents need with the old tiles."""
    sizes, skeleton = piece.sizes, piece.skeleton
    assert sizes is not None
    assert skeleton is not None

    def scaled(axis: Axis, n: int) -> int:
        return ceil_div(segment.extents[axis], ceil_div(piece.extents[axis], n))

    def all_scaled(parts: Iterable[tuple[Axis, int]]) -> tuple[tuple[Axis, int], ...]:
        return tuple((a, scaled(a, n)) for a, n in parts)

    loop, split = skeleton.schedule.loop, skeleton.schedule.split
    return Sizes(
        all_scaled(sizes.parts),
        1 if loop is None else max(2, scaled(loop, sizes.loop)),
        1 if split is None else max(2, scaled(split, sizes.split)),
        all_scaled(sizes.combine),
        sizes.threads,
    )
