"""Plans: the structure of a candidate without its sizes, so that one search serves other extents.

A plan says how a program's operators are cut into intervals and which skeleton computes each.
`replan` applies it to the same program at another batch or context length: only sizes are chosen
again, from two proposals (the same tiles, or the same numbers of blocks), so it costs milliseconds,
not a search. What a proof of the candidate says of the result is for `verify.family` to decide.
Plans have a plain form for files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from obelisk.base.errors import Infeasible, ParseError, UserError
from obelisk.ir import Graph, Node, make_graph
from obelisk.ir.block import ceil_div
from obelisk.ir.resize import collapse
from obelisk.machine import Machine
from obelisk.search.axes import Axis, Dims, Segment
from obelisk.search.partition import Choice, Cover, Partition
from obelisk.search.sizes import Instance, Sizer
from obelisk.search.skeleton import Sizes, Skeleton
from obelisk.search.threads import fuse_graph
from obelisk.search.units import read_sizes, read_skeleton, sizes_plain, skeleton_plain


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


def replan(plan: Plan, graph: Graph, machine: Machine, *, descend: bool = False) -> Graph:
    """The plan's structure for the same program at other extents.

    With `descend` all sizes are chosen anew by the cost model, as for a plan that was made for
    another machine; that takes some tenths of a second.

    Raises `Infeasible` where the program is not the same but for extents (other operators, or an
    extent that became 1 or ceased to be 1: see `replan_one`), or where no proposed size fits the
    machine: search again then.
    """
    found = _assemble(plan, graph, machine, descend)
    return fuse_graph(found, machine) if plan.thread_graphs else found


def replan_one(plan: Plan, wide: Graph, extent: int, graph: Graph, machine: Machine) -> Graph:
    """The plan's structure where extents became 1, so that `graph` alone no longer says which axes
    there were.

    `wide` is the same program with `extent` in their place, a number that is no other extent of it.
    Raises `Infeasible` like `replan`, and where the structure does not exist at 1.
    """
    try:
        found = collapse(
            _assemble(plan, wide, machine), extent, [node.shape for node in graph.inputs]
        )
    except UserError as e:
        raise Infeasible(f"the plan has no form at extent 1: {e}; search again") from None
    if [o.shape for o in found.outputs] != [o.shape for o in graph.outputs]:
        raise Infeasible("the plan has no form at extent 1: its results differ; search again")
    found = make_graph(
        graph.inputs, _over(found, graph), graph.input_names, graph.output_names, graph.name
    )
    return fuse_graph(found, machine) if plan.thread_graphs else found


def _over(found: Graph, graph: Graph) -> tuple[Node, ...]:
    """Outputs of `found`, if they read the inputs of `graph`."""
    if found.inputs != graph.inputs:
        raise Infeasible("the plan has no form at extent 1: its inputs' strides differ")
    return found.outputs


def _assemble(plan: Plan, graph: Graph, machine: Machine, descend: bool = False) -> Graph:
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
            chosen[id(interval)] = _resize(piece, interval.segment, machine, descend)
    cover = Cover(tuple(intervals), 0.0)
    outputs = partition.assemble(cover, lambda i: chosen.get(id(i)))
    return make_graph(graph.inputs, outputs, graph.input_names, graph.output_names, graph.name)


def _resize(piece: Piece, segment: Segment | None, machine: Machine, descend: bool) -> Instance:
    assert piece.skeleton is not None
    assert piece.sizes is not None
    if segment is None or len(segment.extents) != len(piece.extents):
        raise Infeasible("an extent became 1 or ceased to be 1: the axes differ; search again")
    if tuple(segment.dims[leaf] for leaf in segment.leaves) != piece.leaf_dims:
        raise Infeasible("the plan was made for another program: its tensors differ; search again")
    sizer = Sizer(piece.skeleton, segment, machine, lambda: False)
    proposals = [] if descend else [piece.sizes, _same_tiles(piece, segment)]
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
        sizes.combine_threads,
    )


def plan_plain(plan: Plan) -> Any:
    """A plan as a JSON value; `read_plan` reads it back to an equal one."""
    pieces = []
    for p in plan.pieces:
        row: dict[str, Any] = {"first": p.first, "last": p.last}
        if p.skeleton is not None and p.sizes is not None:
            row |= {
                "skeleton": skeleton_plain(p.skeleton),
                "extents": list(p.extents),
                "leaf_dims": [list(d) for d in p.leaf_dims],
                "sizes": sizes_plain(p.sizes),
            }
        pieces.append(row)
    return {"pieces": pieces, "window": plan.window, "thread_graphs": plan.thread_graphs}


def read_plan(data: Any) -> Plan:
    """From `plan_plain`; raises `ParseError` for anything else."""
    try:
        pieces = tuple(_read_piece(row) for row in data["pieces"])
        return Plan(pieces, int(data["window"]), bool(data["thread_graphs"]))
    except (KeyError, TypeError, ValueError) as e:
        raise ParseError(f"not a plan: {e!r}") from None


def _read_piece(row: Mapping[str, Any]) -> Piece:
    if "skeleton" not in row:
        return Piece(row["first"], row["last"], None)
    return Piece(
        row["first"],
        row["last"],
        read_skeleton(row["skeleton"]),
        tuple(row["extents"]),
        tuple(tuple(d) for d in row["leaf_dims"]),
        read_sizes(row["sizes"]),
    )
