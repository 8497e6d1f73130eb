"""Proofs kernel by kernel: what is too large as a whole is joined, what is wrong never is."""

from __future__ import annotations

from math import inf

import pytest

from obelisk.ir import BlockBuilder, Graph, KernelGraph, Node, Op, make_graph
from obelisk.ir import build as b
from obelisk.ir.family import Dim, trace
from obelisk.ir.op import SizeScope
from obelisk.verify import Case, VerdictKind, verify, verify_family
from obelisk.verify.pieces import Cut, find_cuts, pose_pieces, prove_pieces
from obelisk.verify.prove import Prover, pose
from obelisk.verify.terms import Unprovable

LAYERS, WIDTH = 5, 8


def deep(rows: int) -> Graph:
    """Norm and product, five times over."""
    g = KernelGraph("deep")
    x = g.input((rows, WIDTH))
    for _ in range(LAYERS):
        x = g.matmul(g.rms_norm(x), g.input((WIDTH, WIDTH)))
    g.output(x)
    return g.freeze()


def layer(x: Node, w: Node, wrong: bool) -> Node:
    """One kernel: the norm inside the product; the planted fault adds an eighth to its results."""
    block = BlockBuilder(grid=(2,), loop=2)
    tx, tw = block.load(x, (None,), fmap=1), block.load(w, (1,), fmap=0)
    power = b.accum_sum(b.sum(b.square(tx), 1))
    size = b.size(tx, 1, SizeScope.FULL)
    total = b.div(b.accum_sum(b.matmul(tx, tw)), b.sqrt(b.div(power, size)))
    block.store(b.add(total, b.const(0.125)) if wrong else total, (1,))
    return block.launch()[0]


def fused(rows: int, wrong: int | None = None) -> Graph:
    """Five kernels, the one number `wrong` with a fault."""
    xs = [b.input_node(0, (rows, WIDTH))]
    xs += [b.input_node(k + 1, (WIDTH, WIDTH)) for k in range(LAYERS)]
    x = xs[0]
    for k in range(LAYERS):
        x = layer(x, xs[k + 1], k == wrong)
    return make_graph(xs, [x])


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caps that one kernel meets and five do not, as a decoder layer does with the usual ones."""
    monkeypatch.setattr("obelisk.verify.prove._MOST_ROWS", 400)


def test_what_is_too_large_as_a_whole_is_proved_in_pieces(tight: None) -> None:
    """Five obligations of one kernel each, and the verdict says proved."""
    program, candidate = deep(4), fused(4)
    whole = Prover().prove(program, candidate)
    cuts = find_cuts(program, candidate, 0)
    assert len(cuts) == LAYERS - 1
    assert [program.nodes[c.program].op for c in cuts] == [Op.MATMUL] * (LAYERS - 1)
    assert prove_pieces(Prover(), program, candidate, cuts).joined
    assert not whole.joined
    verdict = verify(program, candidate)
    assert verdict.kind is VerdictKind.PROVED
    assert f"joined in {LAYERS} pieces" in [j.detail for j in verdict.judges]


@pytest.mark.parametrize("wrong", range(LAYERS))
def test_a_fault_in_any_kernel_is_not_joined(wrong: int) -> None:
    """With the cuts that the right candidate has, and with those that are found."""
    program, candidate = deep(4), fused(4, wrong)
    cuts = find_cuts(program, fused(4), 0)
    found = prove_pieces(Prover(), program, candidate, cuts)
    assert not found.joined
    assert f"piece {wrong + 1} of {LAYERS}" in found.detail
    own = prove_pieces(Prover(), program, candidate, find_cuts(program, candidate, 0))
    assert not own.joined
    assert not verify(program, candidate).accepted


def test_values_that_may_be_infinite_stay_so_in_later_pieces() -> None:
    """Scores that a mask makes -inf lie between two kernels: s - s is 0 only where s is finite, so
    the second kernel, which leaves s out, must not be joined.
    """
    x, w = b.input_node(0, (4, 6)), b.input_node(1, (4, 6))

    def scores(v: Node) -> Node:
        return b.where(b.less(v, b.const(0.0)), b.const(-inf), v)

    s = scores(x)
    program = make_graph([x, w], [b.add(b.sub(s, s), w)])
    first = BlockBuilder((2,))
    first.store(scores(first.load(x, (0,))), (0,))
    kept = first.launch()[0]
    second = BlockBuilder((2,))
    ts, tw = second.load(kept, (0,)), second.load(w, (0,))
    second.store(b.add(b.mul(b.sub(ts, ts), b.const(2.0)), tw), (0,))
    candidate = make_graph([x, w], second.launch())
    cut = Cut(program.nodes.index(s), candidate.nodes.index(kept))
    pieces = pose_pieces(program, candidate, [cut])
    assert [p.infinite for p in pieces] == [True, True]
    assert Prover().settle(lambda: pieces[0]).joined
    assert not Prover().settle(lambda: pieces[1]).joined
    y = b.input_node(2, (4, 6))  # the same without knowing what the scores may be
    block = BlockBuilder((2,))
    ty, tv = block.load(y, (0,)), block.load(w, (0,))
    block.store(b.add(b.mul(b.sub(ty, ty), b.const(2.0)), tv), (0,))
    sides = [make_graph([x, w, y], o) for o in ([b.add(b.sub(y, y), w)], block.launch())]
    assert Prover().settle(lambda: pose(sides[0], sides[1])).joined
    assert not Prover().settle(lambda: pose(sides[0], sides[1], infinite=True)).joined


@pytest.mark.parametrize("cuts", [(), (Cut(99, 1),), (Cut(1, 99),), (Cut(1, 6),)])
def test_cuts_that_do_not_fit_are_no_proof(cuts: tuple[Cut, ...]) -> None:
    program, candidate = deep(4), fused(4)
    with pytest.raises(Unprovable):
        pose_pieces(program, candidate, cuts)
    assert not prove_pieces(Prover(), program, candidate, cuts).joined
    assert not prove_pieces(Prover(), program, candidate, (Cut(0, 6),)).joined  # x is no result


def test_a_family_is_proved_in_pieces_for_all_sizes(tight: None) -> None:
    """A few forms for sixteen sizes, and a size beyond them is covered; a wrong one is not."""
    dim = Dim("rows", 1, 400)
    family = trace(deep, dim)
    cases = [Case(n, deep(n), fused(n)) for n in range(1, 17)]
    found = verify_family(dim, family.extents, cases)
    assert found.verdict.kind is VerdictKind.PROVED
    assert len(found.cuts) == LAYERS - 1
    assert len(found.forms) <= 3
    assert found.covers(deep(300), fused(300), family.extents)
    assert not found.covers(deep(300), fused(300, 2), family.extents)
