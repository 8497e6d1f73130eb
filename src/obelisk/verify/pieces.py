"""Proofs of candidates of several kernels, one kernel after the other.

A candidate keeps values in device memory between its kernels. Where the program computes the same
values, they cut both graphs into pieces: each such pair is shown to be equal as functions of the
pairs before it, and at last the outputs. Every piece is a proof obligation of its own, small enough
for the e-graph where the whole is not. Which values are pairs is guessed from one evaluation in
float64; a wrong guess only makes a piece unprovable, never a proof wrong.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from obelisk.base.errors import UserError
from obelisk.ir.build import input_node
from obelisk.ir.family import Linear
from obelisk.ir.graph import VIEWS, Graph, make_graph
from obelisk.ir.interp import evaluate
from obelisk.ir.node import Node, make, topological
from obelisk.ir.numeric import NumpyAlgebra, bind, random_inputs
from obelisk.ir.op import Op
from obelisk.verify.instances import work_of
from obelisk.verify.prove import Obligation, Proof, Prover, pose
from obelisk.verify.terms import Unprovable

_WORK = 200_000_000  # of one evaluation of both graphs
_MOST_CUTS = 40
_LEAVES = frozenset({Op.INPUT, Op.CONST, Op.SIZE, Op.IOTA})
Dims = Mapping[tuple[int, int], Linear]


@dataclass(frozen=True, slots=True)
class Cut:
    """A pair of values that should be equal: positions in `program.nodes` and `candidate.nodes`,
    and for a family the axes whose extents vary, each with its rule.
    """

    program: int
    candidate: int
    rules: tuple[tuple[int, Linear], ...] = ()


def find_cuts(program: Graph, candidate: Graph, seed: int) -> tuple[Cut, ...]:
    """Pairs of values that agree on one random input, in the candidate's order; none where an
    evaluation is too dear.
    """
    if work_of(program) + work_of(candidate) > _WORK:
        return ()
    inputs = random_inputs(program, seed, 0.5)
    mine, theirs = _values(program, inputs), _values(candidate, inputs)
    by_shape: dict[object, list[int]] = {}
    own = set(program.outputs)
    for i, node in enumerate(program.nodes):
        if node.op not in _LEAVES and node not in own and node.dtype.is_float:
            by_shape.setdefault((node.shape, node.dtype), []).append(i)
    ends = set(candidate.outputs)
    out: list[Cut] = []
    used: set[int] = set()
    for j, node in enumerate(candidate.nodes):
        if node.op in _LEAVES or node.op in VIEWS or node in ends:
            continue
        for i in by_shape.get((node.shape, node.dtype), ()):
            if i not in used and np.allclose(mine[i], theirs[j], rtol=1e-8, atol=1e-11):
                used.add(i)
                out.append(Cut(i, j))
                break
    return tuple(out[:_MOST_CUTS])


def _values(graph: Graph, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    algebra = NumpyAlgebra()
    with np.errstate(all="ignore"):
        return [np.asarray(v) for v in evaluate(graph.nodes, bind(graph, inputs, algebra), algebra)]


def with_rules(
    cuts: Sequence[Cut], small: Graph, large: Graph, sizes: tuple[int, int]
) -> tuple[Cut, ...]:
    """The cuts with the rules of their extents, from the program at two sizes of a family."""
    out = []
    low, high = sizes
    for cut in cuts:
        a, b = small.nodes[cut.program].shape, large.nodes[cut.program].shape
        rules = []
        for axis, (m, n) in enumerate(zip(a, b, strict=True)):
            factor, rest = divmod(n - m, high - low)
            if factor and not rest:
                rules.append((axis, Linear(factor, m - factor * low)))
        out.append(Cut(cut.program, cut.candidate, tuple(rules)))
    return tuple(out)


def same_structure(small: Graph, large: Graph) -> bool:
    """Whether equal positions hold the same operators, so that cuts of one are the other's."""
    return [n.op for n in small.nodes] == [n.op for n in large.nodes]


def prove_pieces(prover: Prover, program: Graph, candidate: Graph, cuts: Sequence[Cut]) -> Proof:
    """Try to show piece by piece that the graphs are equal; joined only if every piece is."""
    begun = time.perf_counter()
    try:
        pieces = pose_pieces(program, candidate, cuts)
    except (Unprovable, RecursionError) as e:
        return Proof(False, f"pieces: {e}", time.perf_counter() - begun)
    for k, piece in enumerate(pieces):
        found = prover.discharge(piece)
        if not found.joined:
            why = f"piece {k + 1} of {len(pieces)}: {found.detail}"
            return Proof(False, why, time.perf_counter() - begun)
    return Proof(True, f"joined in {len(pieces)} pieces", time.perf_counter() - begun)


def pose_pieces(
    program: Graph, candidate: Graph, cuts: Sequence[Cut], varying: Dims | None = None
) -> list[Obligation]:
    """One obligation for each pair, then one for the outputs; all together they say that the graphs
    are equal.

    Raises `Unprovable` where there is nothing to cut, the cuts do not fit these graphs, or a piece
    has no form.
    """
    mine, theirs = program.nodes, candidate.nodes
    if not cuts:
        raise Unprovable("no value between kernels is one of the program's")
    if max(c.program for c in cuts) >= len(mine) or max(c.candidate for c in cuts) >= len(theirs):
        raise Unprovable("the cuts are another structure's")
    extents = dict(varying or {})
    shared = list(program.inputs)
    left: dict[Node, Node] = {}  # a value of the program: the input that stands for it
    right: dict[Node, Node] = {}
    out: list[Obligation] = []
    infinite = False  # once -inf occurs, the values of later pieces may hold it
    for cut in cuts:
        a, b = mine[cut.program], theirs[cut.candidate]
        if (a.shape, a.dtype) != (b.shape, b.dtype) or a in left or b in right:
            raise Unprovable("the cuts are another structure's")
        out.append(_piece(shared, [a], [b], left, right, extents, infinite))
        infinite = infinite or out[-1].infinite
        stand = input_node(len(shared), a.shape, a.dtype)
        extents.update({(len(shared), axis): rule for axis, rule in cut.rules})
        shared.append(stand)
        left[a] = right[b] = stand
    ends = list(program.outputs), list(candidate.outputs)
    out.append(_piece(shared, *ends, left, right, extents, infinite))
    return out


def _piece(
    shared: Sequence[Node],
    mine: Sequence[Node],
    theirs: Sequence[Node],
    left: Mapping[Node, Node],
    right: Mapping[Node, Node],
    extents: Dims,
    infinite: bool,
) -> Obligation:
    try:
        sides = [
            make_graph(shared, [_over(n, dict(known)) for n in ends])
            for ends, known in ((mine, left), (theirs, right))
        ]
    except UserError as e:
        raise Unprovable(f"a piece is no graph: {e}") from None
    return pose(sides[0], sides[1], extents, infinite)


def _over(node: Node, known: dict[Node, Node]) -> Node:
    """`node` with known values below it replaced."""
    for n in topological([node]):
        if n not in known:
            inputs = tuple(known[i] for i in n.inputs)
            known[n] = n if inputs == n.inputs else make(n.op, inputs, n.attrs)
    return known[node]
