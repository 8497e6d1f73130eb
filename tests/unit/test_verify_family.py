"""One verdict for all sizes: what it covers, what it refutes, and that forms never say too much."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn

import pytest

from obelisk.ir import BlockBuilder, Graph, KernelGraph, make_graph
from obelisk.ir import build as b
from obelisk.ir.family import Dim, FamilyGraph, Linear, trace
from obelisk.ir.op import SizeScope
from obelisk.machine import find
from obelisk.search import Plan, replan, replan_one, search
from obelisk.verify import Case, VerdictKind, form_of, verify_family
from obelisk.verify.prove import Prover, pose
from obelisk.verify.terms import Unprovable

CPU = find("cpu")
WIDTH, COLUMNS = 40, 24


def program(rows: int) -> Graph:
    g = KernelGraph("normed")
    x, w = g.input((rows, WIDTH)), g.input((WIDTH, COLUMNS))
    g.output(g.matmul(g.rms_norm(x), w))
    return g.freeze()


def fused(rows: int, parts: int, divide_by: float | None = None) -> Graph:
    """The norm inside the product's kernel, `parts` blocks along the rows; `divide_by` instead of
    the width is a planted fault.
    """
    x, w = b.input_node(0, (rows, WIDTH)), b.input_node(1, (WIDTH, COLUMNS))
    block = BlockBuilder(grid=(parts,), loop=4)
    tx, tw = block.load(x, (0,), fmap=1), block.load(w, (None,), fmap=0)
    power = b.accum_sum(b.sum(b.square(tx), 1))
    width = b.size(tx, 1, SizeScope.FULL) if divide_by is None else b.const(divide_by)
    total = b.accum_sum(b.matmul(tx, tw))
    block.store(b.div(total, b.sqrt(b.div(power, width))), (0,))
    return make_graph([x, w], block.launch())


def cases(sizes: Iterable[int], candidate: Callable[[int], Graph]) -> list[Case]:
    return [Case(n, program(n), candidate(n)) for n in sizes]


DIM = Dim("rows", 1, 17)
ROWS = trace(program, DIM)


def blocks_of_four(rows: int) -> Graph:
    return fused(rows, -(-rows // 4))


def test_every_size_of_a_range_is_proved_once() -> None:
    """Seventeen sizes, among them overhanging ones, of a few forms; the bound says all sizes."""
    found = verify_family(DIM, ROWS.extents, cases(range(1, 18), blocks_of_four))
    assert found.verdict.kind is VerdictKind.PROVED
    assert "for all sizes of rows=1..17" in found.verdict.bound
    proofs = [j for j in found.verdict.judges if j.judge == "proof" and j.detail.startswith("form")]
    assert len(proofs) == len(found.forms) < 6
    assert {1, 17} <= set(found.tested)
    varying = ROWS.extents
    for n in range(1, 18):
        assert found.covers(program(n), blocks_of_four(n), varying)


def test_a_size_that_nobody_looked_at_is_covered_by_its_form_alone() -> None:
    """The same cuts at another size are; other cuts are not; a wrong candidate never is."""
    wide = Dim("rows", 1, 4096)
    family = trace(program, wide)
    varying = family.extents
    found = verify_family(wide, family.extents, cases((8, 13, 64), lambda n: fused(n, 4)))
    assert found.verdict.kind is VerdictKind.PROVED
    assert "as all 3 sizes that were looked at are" in found.verdict.bound
    for n in (12, 15, 1000, 4095, 4096):
        assert found.covers(program(n), fused(n, 4), varying)
        assert not found.covers(program(n), fused(n, 4, float(WIDTH + 1)), varying)
    assert not found.covers(program(64), fused(64, 1), varying)


def test_what_is_wrong_at_one_size_is_refuted_and_named() -> None:
    """The fault is planted at sizes above twelve: the constant is the width of none of them."""
    faulty = cases(range(1, 18), lambda n: fused(n, 1, None if n < 12 else 48.0))
    found = verify_family(DIM, ROWS.extents, faulty)
    assert found.verdict.kind is VerdictKind.REFUTED
    assert found.verdict.bound.startswith("at rows 12")
    assert found.forms == frozenset()
    assert not found.covers(program(3), fused(3, 1), ROWS.extents)


def test_a_number_that_fits_one_size_does_not_serve_another() -> None:
    """A mean over the symbolic dim that divides by the number it had at one size."""

    def mean(n: int) -> Graph:
        g = KernelGraph("mean")
        x = g.input((n, 6))
        g.output(g.mean(x, 0))
        return g.freeze()

    def candidate(n: int, by: float) -> Graph:
        x = b.input_node(0, (n, 6))
        block = BlockBuilder((1,), loop=2)
        total = b.accum_sum(b.sum(block.load(x, (None,), fmap=0), 0))
        block.store(b.div(total, b.const(by)), (None,))
        return make_graph([x], block.launch())

    dim = Dim("n", 2, 64)
    varying = trace(mean, dim).extents
    right = verify_family(dim, varying, [Case(8, mean(8), candidate(8, 8.0))])
    assert right.verdict.accepted
    assert not right.covers(mean(10), candidate(10, 8.0), varying)
    both = [Case(n, mean(n), candidate(n, 8.0)) for n in (8, 10)]
    assert verify_family(dim, varying, both).verdict.kind is VerdictKind.REFUTED


def test_forms_are_equal_only_where_the_obligations_are() -> None:
    """Equal forms, equal texts; and the text holds no extent of the symbolic dim."""
    varying = ROWS.extents
    a, c = pose(program(8), fused(8, 2), varying), pose(program(12), fused(12, 2), varying)
    assert a.text == c.text
    assert form_of(program(8), fused(8, 2), varying) == form_of(program(12), fused(12, 2), varying)
    others = [fused(9, 2), fused(8, 1), fused(8, 2, 41.0)]
    forms = {form_of(program(o.inputs[0].shape[0]), o, varying) for o in others}
    assert form_of(program(8), fused(8, 2), varying) not in forms
    assert len(forms) == 3
    assert Prover().settle(lambda: a).joined


def test_extents_of_the_symbolic_dim_stay_out_of_the_obligation() -> None:
    """A sum over it: with extents the texts of two sizes differ, and only with them."""

    def pair(n: int) -> tuple[Graph, Graph]:
        x = b.input_node(0, (n, 6))
        block = BlockBuilder((1,), loop=2)
        block.store(b.accum_sum(b.sum(block.load(x, (None,), fmap=0), 0)), (None,))
        return make_graph([x], [b.sum(x, 0)]), make_graph([x], block.launch())

    varying = {(0, 0): Linear(1, 0)}
    assert pose(*pair(8)).text != pose(*pair(12)).text
    assert pose(*pair(8), varying).text == pose(*pair(12), varying).text
    assert "(Filled" in pose(*pair(8), varying).text
    assert Prover().settle(lambda: pose(*pair(8), varying)).joined


def mean(n: int) -> Graph:
    """Of each column, over the symbolic dim: its size is a number of the formula."""
    g = KernelGraph("mean")
    x, w = g.input((n, 6)), g.input((4, n))
    g.output(g.matmul(w, g.div(x, g.sqrt(g.mean(g.square(x), 0)))))
    return g.freeze()


def mean_in_loop(n: int, through: int = 0) -> Graph:
    """The same in one kernel; the size asked of x, or (`through` 1) of w: it is one dim."""
    x, w = b.input_node(0, (n, 6)), b.input_node(1, (4, n))
    block = BlockBuilder((2,), loop=2)
    tx, tw = block.load(x, (1,), fmap=0), block.load(w, (None,), fmap=1)
    power = b.accum_sum(b.sum(b.square(tx), 0))
    size = b.size((tx, tw)[through], through, SizeScope.FULL)
    block.store(b.div(b.accum_sum(b.matmul(tw, tx)), b.sqrt(b.div(power, size))), (1,))
    return make_graph([x, w], block.launch())


@pytest.mark.parametrize("through", [0, 1])
def test_sizes_of_the_symbolic_dim_stay_symbols(through: int) -> None:
    """One form for many sizes, though the size itself is a number of the formula; a wrong one is
    not joined.
    """
    dim = Dim("n", 2, 4096)
    family = trace(mean, dim)
    sizes = (4, 6, 100, 4096)
    own = [Case(n, mean(n), mean_in_loop(n, through)) for n in sizes]
    found = verify_family(dim, family.extents, own)
    assert found.verdict.kind is VerdictKind.PROVED
    assert len(found.forms) == 1
    assert found.covers(mean(1000), mean_in_loop(1000, through), family.extents)
    x, w = mean(8).inputs
    columns = b.matmul(w, b.div(x, b.sqrt(b.div(b.sum(b.square(x), 0), b.size(x, 1)))))
    wrong = make_graph([x, w], [columns])
    assert not Prover().settle(lambda: pose(mean(8), wrong, family.extents)).joined
    assert form_of(mean(8), wrong, family.extents) not in found.forms


def test_an_obligation_that_cannot_be_posed_is_no_proof() -> None:
    def refuse() -> NoReturn:
        raise Unprovable("cuts of one dim do not nest")

    proof = Prover().settle(refuse)
    assert not proof.joined
    assert "do not nest" in proof.detail


def attention(keys: int) -> Graph:
    g = KernelGraph("attention")
    q, k, v = g.input((2, 32, 16)), g.input((2, 16, keys)), g.input((2, keys, 16))
    g.output(g.matmul(g.softmax(g.matmul(q, k)), v))
    return g.freeze()


def shape_of(plan: Plan, family: FamilyGraph, n: int) -> Graph:
    if n == 1:
        return replan_one(plan, family.beyond(13), 13, family.at(1), CPU)
    return replan(plan, family.at(n), CPU)


def test_online_softmax_is_proved_for_every_context_length() -> None:
    """Both what the search finds with a running maximum and what splits the keys; from one key."""
    dim = Dim("context", 1, 32768)
    family = trace(attention, dim)
    found = search(family.at(512), CPU, workers=1)
    chosen = [c for c in found.candidates[1:] if "loop" in c.note or "split" in c.note]
    sizes = (1, 2, 3, 16, 77, 512, 32768)
    for candidate in chosen[:2]:
        assert candidate.plan is not None
        own = [Case(n, family.at(n), shape_of(candidate.plan, family, n)) for n in sizes]
        result = verify_family(dim, family.extents, own)
        assert result.verdict.kind is VerdictKind.PROVED, result.verdict
        assert len(result.forms) <= 6
    assert len(chosen) >= 2


@pytest.mark.parametrize("sizes", [(5,), (2, 3, 5)])
def test_what_the_prover_cannot_join_is_tested_at_named_sizes(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the verdict says tested, and only those sizes are covered."""
    monkeypatch.setattr(
        "obelisk.verify.family.pose", lambda *_: (_ for _ in ()).throw(Unprovable("not today"))
    )
    found = verify_family(DIM, ROWS.extents, cases(sizes, lambda n: fused(n, 1)))
    assert found.verdict.kind is VerdictKind.TESTED
    assert found.tested == sizes
    assert found.verdict.bound == f"fields and floats at rows {', '.join(map(str, sizes))}"
    varying = ROWS.extents
    assert found.covers(program(5), fused(5, 1), varying)
    assert not found.covers(program(9), fused(9, 1), varying)
