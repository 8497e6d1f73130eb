"""The field algebra: laws that must hold, laws that must not, and a meaning for every operator."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from obelisk.ir import DType
from obelisk.ir import build as b
from obelisk.ir.interp import evaluate
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.ir.table import TABLE
from obelisk.verify.fields import (
    NEG_INF,
    ROOT_P,
    ROOT_Q,
    UNDEFINED,
    FieldAlgebra,
    Residues,
    Undecidable,
)
from obelisk.verify.growth import CONSTANT, INPUT, Growth, miss_probability
from obelisk.verify.modular import P, Q


def algebra(seed: int = 0, nested: bool = False) -> FieldAlgebra:
    return FieldAlgebra(np.random.default_rng(seed), nested)


def draw(shape: tuple[int, ...], seed: int = 1) -> Residues:
    node = b.input_node(0, shape, DType.F32)
    return algebra().draw(node, np.random.default_rng(seed))


def same(x: Residues, y: Residues) -> bool:
    """Equal wherever every square root that took part has a root, in both fields."""
    clear_p, clear_q = (((x.bits | y.bits) & bit) == 0 for bit in (ROOT_P, ROOT_Q))
    p = ((x.p == y.p) | ~clear_p).all()
    q = x.q is None or y.q is None or ((x.q == y.q) | ~clear_q).all()
    return bool(p and q and clear_p.any())


def test_every_operator_has_a_meaning_in_the_fields() -> None:
    for op, row in TABLE.items():
        assert callable(getattr(FieldAlgebra, row.field, None)), f"{op.value}: {row.field}"


def test_ring_laws() -> None:
    f, x, y, z = algebra(), draw((4, 5), 1), draw((4, 5), 2), draw((1, 5), 3)
    assert same(f.mul(f.add(x, y), z), f.add(f.mul(x, z), f.mul(y, z)))
    assert same(f.sub(x, y), f.add(x, f.neg(y)))
    assert same(f.div(f.mul(x, y), y), x)
    assert same(f.square(x), f.mul(x, x))
    assert not same(f.sub(x, y), f.sub(y, x))


def test_exponential_laws_and_state() -> None:
    f, x, y = algebra(), draw((4, 5), 1), draw((4, 5), 2)
    assert same(f.exp(f.add(x, y)), f.mul(f.exp(x), f.exp(y)))
    assert same(f.exp(f.neg(x)), f.div(f.const(1.0), f.exp(x)))
    assert f.exp(x).q is None
    assert not f.assumed
    twice = f.exp(f.exp(x))
    assert f.assumed == {"second exp"}
    assert (twice.p == f.exp(f.exp(x)).p).all()
    assert not (twice.p == f.exp(f.exp(y)).p).any()


def test_second_exponential_keeps_its_laws_when_nested() -> None:
    f, x, y = algebra(nested=True), draw((4, 5), 1), draw((4, 5), 2)
    u, v = f.exp(x), f.exp(y)
    assert (f.exp(f.add(u, v)).p == f.mul(f.exp(u), f.exp(v)).p).all()
    assert "second exp" in f.assumed


def test_roots() -> None:
    f, x, y = algebra(), draw((40, 5), 1), draw((40, 5), 2)
    assert same(f.sqrt(f.mul(x, y)), f.mul(f.sqrt(x), f.sqrt(y)))
    assert same(f.square(f.sqrt(x)), x)  # where x is a square
    assert same(f.rsqrt(x), f.div(f.const(1.0), f.sqrt(x)))
    size = f.sqrt(f.square(x))
    assert size.marks is None
    assert not (size.p == x.p).all()  # |x| is not x ...
    assert ((size.p == x.p) | (size.p == P - x.p)).all()  # ... but one of x and -x
    assert same(f.sqrt(f.exp(x)), f.exp(f.mul(x, f.const(0.5))))


def test_maximum_is_a_semilattice_and_nothing_more() -> None:
    f, x, y, z = algebra(), draw((40, 5), 1), draw((40, 5), 2), draw((40, 5), 3)
    assert same(f.max(x, y), f.max(y, x))
    assert same(f.max(x, f.max(y, z)), f.max(f.max(x, y), z))
    assert same(f.max(x, x), x)
    assert same(f.max(x, f.min(x, y)), x)
    assert not same(f.max(f.add(x, z), f.add(y, z)), f.add(f.max(x, y), z))
    assert f.assumed == {"max", "min"}
    whole = f.reduce_max(x, -1, 1)
    halves = [Residues(x.p[:, s], x.q[:, s], None, INPUT) for s in (slice(0, 2), slice(2, 5))]  # type: ignore[index]
    assert same(whole, f.max(*(f.reduce_max(h, -1, 1) for h in halves)))


def test_minus_infinity() -> None:
    f, x = algebra(), draw((3,), 1)
    low = f.const(-inf)
    assert (f.exp(low).p == 0).all()
    assert f.exp(low).bits == 0
    assert same(f.max(x, low), x)
    assert f.add(low, f.const(2.0)).bits == NEG_INF
    assert f.mul(low, f.const(0.5)).bits == NEG_INF
    assert f.mul(low, f.const(-0.5)).bits & UNDEFINED
    assert f.sub(low, low).bits & UNDEFINED
    picked = f.where(Residues(np.array([1, 0, 1]), None, None, CONSTANT, plain=True), x, low)
    assert picked.bits.tolist() == [0, NEG_INF, 0]


def test_division_by_zero_is_undefined_and_stays_so() -> None:
    f, x = algebra(), draw((3,), 1)
    bad = f.div(x, f.sub(x, x))
    assert (bad.bits & UNDEFINED).all()
    assert (f.add(bad, x).bits & UNDEFINED).all()
    assert (f.sum(bad, -1, 1).bits & UNDEFINED).all()


def test_integers_are_numbers_and_floats_do_not_become_them() -> None:
    f = algebra()
    count = f.iota((2, 3), 1)
    assert f.add(count, f._plain(f.const(2.0))).p.tolist() == [[2, 3, 4], [2, 3, 4]]
    assert f.less(count, f._plain(f.const(1.0))).p.tolist() == [[True, False, False]] * 2
    assert f.cast(count, DType.F32).q is not None
    with pytest.raises(Undecidable, match="whole number"):
        f.cast(draw((2,)), DType.I32)


def test_lifted_numbers_are_exact() -> None:
    f = algebra()
    x = f.lift(np.array([0.5, -3.0, 0.1]), DType.F32)
    assert (f.mul(x, f.const(2.0)).p[0], x.p[1]) == (1, P - 3)
    assert x.q is not None
    assert x.q[1] == Q - 3


def test_kept_columns_are_strided_sums() -> None:
    f, x = algebra(), draw((2, 6), 4)
    got = f.sum(x, -1, 3)
    assert (got.p == (x.p[:, :3] + x.p[:, 3:]) % P).all()


def _value(node: Node, seed: int = 0) -> Residues:
    rng = np.random.default_rng(seed)
    f = FieldAlgebra(rng)
    found = [n for n in _leaves(node) if n.op is Op.INPUT]
    return evaluate([node], {n: f.draw(n, rng) for n in found}, f)[0]


def _leaves(node: Node) -> list[Node]:
    from obelisk.ir.node import topological

    return topological([node])


def test_growth_bounds_degrees() -> None:
    """The recorded degrees are those of the formulas."""
    x, w = b.input_node(0, (3, 4), DType.F32), b.input_node(1, (4, 5), DType.F32)
    assert _value(x @ w).growth == Growth(top=2)
    assert _value(b.square(x) * x).growth == Growth(top=3)
    inverse = _value(x / b.sum(x, 1)).growth
    assert (inverse.top, inverse.bottom) == (1, 1)
    e = _value(b.exp(b.square(x))).growth
    assert (e.exponent, e.terms) == (2, 1)
    assert _value(b.sum(b.exp(x), 1)).growth.terms == 4
    assert _value(b.sqrt(x)).growth.roots == 1


def test_miss_probability_is_schwartz_zippel_or_theorem_2_or_nothing() -> None:
    assert miss_probability(Growth(top=3), Growth(top=5)) == 5 / P
    assert miss_probability(Growth(top=3, roots=1), Growth(top=3)) == 6 / P
    one = Growth(top=1, exponent=1)
    assert miss_probability(one, one) == pytest.approx(8 * 2**4 / Q + Q ** (-1 / 4), rel=0.01)
    assert miss_probability(Growth(exponent=1, terms=4096), one) == inf
