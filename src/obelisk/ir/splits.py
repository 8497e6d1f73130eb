"""How the dims of block-level values inherit the cut of the tiles they come from, one rule per kind
of
operator.

A cut matters only where a tile is short (an extent that the grid and the loop do not divide):
values whose short tiles disagree may not meet. Where everything divides, any two tiles of one shape
may meet, as in published graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from obelisk.base.errors import MalformedGraph
from obelisk.ir.block import Phase, Split, is_ragged
from obelisk.ir.node import Node, common_ends
from obelisk.ir.op import LoadAttrs, Op

if TYPE_CHECKING:
    from obelisk.ir.thread import ThreadGraph

Splits = tuple[Split | None, ...]
_LOOP_OPS = (Op.ACCUM_SUM, Op.ACCUM_MAX, Op.RUNNING_MAX, Op.ACCUM_RESCALE)


class _Rules:
    """The rules for one grid and loop."""

    def __init__(self, grid: tuple[int, ...], loop: int) -> None:
        self.grid, self.loop = grid, loop

    def ragged(self, split: Split | None, tile: int) -> bool:
        return is_ragged(split, tile, self.grid, self.loop)

    def meet(self, what: str, dims: Sequence[tuple[int, Split | None]]) -> Split | None:
        """The cut of a dim in which several operand dims (extent, cut) meet."""
        # A dim of tile extent 1 broadcasts, but where its last tile is empty there is nothing to.
        widest = max(d[0] for d in dims)
        if widest > 1 and any(t == 1 and self.ragged(s, t) for t, s in dims):
            raise MalformedGraph(
                f"{what}: a dim of extent 1, of which some blocks or iterations have none, would "
                f"be broadcast to {widest}: choose a grid and loop that divide it"
            )
        wide = [d for d in dims if d[0] != 1] or [d for d in dims if d[1] is not None] or list(dims)
        first = wide[0][1]
        if all(s == first for _, s in wide):
            return first
        if any(self.ragged(s, t) for t, s in wide):
            cuts = ", ".join(str(s) for _, s in wide)
            raise MalformedGraph(
                f"{what}: operands with short last tiles are cut differently ({cuts})"
            )
        return None

    def equal(self, what: str, dims: Sequence[tuple[int, Split | None]]) -> Split | None:
        """The cut of a dim in which operands meet without broadcasting: 1 is no exception."""
        if len({s for _, s in dims}) > 1 and any(self.ragged(s, t) for t, s in dims):
            cuts = ", ".join(str(s) for _, s in dims)
            raise MalformedGraph(
                f"{what}: operands with short last tiles are cut differently ({cuts})"
            )
        return self.meet(what, dims)

    def broadcast(
        self, what: str, rank: int, operands: Sequence[tuple[tuple[int, ...], Splits]]
    ) -> Splits:
        """The cuts of an elementwise result, dims aligned at the right."""
        out: list[Split | None] = []
        for d in range(rank):
            dims = [(sh[k], sp[k]) for sh, sp in operands if (k := d - rank + len(sh)) >= 0]
            out.append(self.meet(what, dims) if dims else None)
        return tuple(out)

    def whole(self, node: Node, operand: Node, cut: Splits, axes: Sequence[int]) -> None:
        """Raise unless the given axes of an operand have no short tile."""
        for axis in axes:
            if self.ragged(cut[axis], operand.shape[axis]):
                raise MalformedGraph(
                    f"{node.op.value} along dim {axis}, whose tiles are not all full "
                    f"({cut[axis]}): choose a grid and loop that divide it"
                )

    def reshape(self, node: Node, operand: Node, cut: Splits) -> Splits:
        a, b = operand.shape, node.shape
        front, back = common_ends(a, b)
        self.whole(node, operand, cut, range(front, len(a) - back))
        middle: Splits = (None,) * (len(b) - front - back)
        return cut[:front] + middle + cut[len(a) - back :]

    def after_loop(self, node: Node, cuts: Splits) -> Splits:
        """Folding over iterations: a dim that the loop cut has no single origin any more."""
        out: list[Split | None] = []
        for s, t in zip(cuts, node.shape, strict=True):
            if s is not None and s.loop:
                if self.ragged(s, t):
                    raise MalformedGraph(
                        f"{node.op.value} folds tiles of different extents over the loop ({s})"
                    )
                out.append(None)
            else:
                out.append(s)
        return tuple(out)


def load_splits(attrs: LoadAttrs) -> Splits:
    """The cut of each dim of a load."""
    out: list[Split | None] = []
    for d, full in enumerate(attrs.full):
        axis = next((a for a, m in enumerate(attrs.imap) if m == d), None)
        in_loop = attrs.fmap == d
        out.append(Split(full, axis, in_loop) if axis is not None or in_loop else None)
    return tuple(out)


def propagate(
    node: Node,
    known: Mapping[Node, Splits],
    phase: Mapping[Node, Phase],
    grid: tuple[int, ...],
    loop: int,
) -> Splits:
    """The cuts of `node`'s dims; raises `MalformedGraph` where unlike short tiles would meet."""
    rules = _Rules(grid, loop)
    cuts = [known[i] for i in node.inputs]
    match node.op:
        case Op.LOAD:
            return load_splits(node.attrs)
        case Op.CONST | Op.IOTA:
            return (None,) * node.rank
        case Op.SIZE:
            if node.attrs.scope.value != "full":
                rules.whole(node, node.inputs[0], cuts[0], [node.attrs.axis])
            return ()
        case Op.SUM | Op.REDUCE_MAX:
            axis = node.attrs.axis
            if node.attrs.keep > 1:
                rules.whole(node, node.inputs[0], cuts[0], [axis])
            return (*cuts[0][:axis], None, *cuts[0][axis + 1 :])
        case Op.MATMUL:
            return _matmul(rules, node, cuts)
        case Op.RESHAPE:
            return rules.reshape(node, node.inputs[0], cuts[0])
        case Op.TRANSPOSE:
            return tuple(cuts[0][p] for p in node.attrs.perm)
        case Op.BROADCAST:
            pad = node.rank - node.inputs[0].rank
            grown = [d for d, n in enumerate(node.inputs[0].shape) if n != node.shape[d + pad]]
            rules.whole(node, node.inputs[0], cuts[0], grown)
            return (None,) * pad + tuple(
                s if node.inputs[0].shape[d] == node.shape[d + pad] else None
                for d, s in enumerate(cuts[0])
            )
        case Op.SLICE:
            axis = node.attrs.axis
            if node.shape == node.inputs[0].shape:
                return cuts[0]
            rules.whole(node, node.inputs[0], cuts[0], [axis])
            return (*cuts[0][:axis], None, *cuts[0][axis + 1 :])
        case Op.CONCAT:
            return _concat(rules, node, cuts)
        case Op.THREAD:
            return _thread(node.attrs.thread, node.attrs.result, cuts, phase, grid, loop)
    operands = [(i.shape, c) for i, c in zip(node.inputs, cuts, strict=True)]
    met = rules.broadcast(node.op.value, node.rank, operands)
    return rules.after_loop(node, met) if node.op in _LOOP_OPS else met


def _matmul(rules: _Rules, node: Node, cuts: list[Splits]) -> Splits:
    a, b = node.inputs
    rules.equal("matmul contraction", [(a.shape[-1], cuts[0][-1]), (b.shape[-2], cuts[1][-2])])
    batch = rules.broadcast(
        "matmul batch", node.rank - 2, [(a.shape[:-2], cuts[0][:-2]), (b.shape[:-2], cuts[1][:-2])]
    )
    return (*batch, cuts[0][-2], cuts[1][-1])


def _concat(rules: _Rules, node: Node, cuts: list[Splits]) -> Splits:
    axis = node.attrs.axis
    out: list[Split | None] = []
    for d in range(node.rank):
        if d == axis:
            for operand, cut in zip(node.inputs, cuts, strict=True):
                rules.whole(node, operand, cut, [axis])
            out.append(None)
        else:
            out.append(
                rules.equal(
                    "concat", [(i.shape[d], c[d]) for i, c in zip(node.inputs, cuts, strict=True)]
                )
            )
    return tuple(out)


def _thread(
    graph: ThreadGraph,
    result: int,
    cuts: list[Splits],
    phase: Mapping[Node, Phase],
    grid: tuple[int, ...],
    loop: int,
) -> Splits:
    known: dict[Node, Splits] = {}
    for inner in graph.body:
        known[inner] = (
            cuts[inner.attrs.index]
            if inner.op is Op.ELEM
            else propagate(inner, known, phase, grid, loop)
        )
    return known[graph.results[result]]
