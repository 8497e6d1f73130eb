"""Normal forms of the search: equal expressions are one object, and pruning keeps what can still
help.
"""

from __future__ import annotations

import pytest

from obelisk.search.terms import Goal, Leaf, Poly, Terms

M, K, N, J = range(4)


@pytest.fixture
def arena() -> Terms:
    return Terms()


def leaf(t: Terms, name: str, *axes: int) -> Poly:
    return t.atom(Leaf(name), frozenset(axes))


def matmul(t: Terms, a: Poly, b: Poly, k: int) -> Poly:
    return t.sum(t.mul(a, b), k)


def test_products_of_matrices_reassociate(arena: Terms) -> None:
    """(XA)B and X(AB) are one normal form; XA and AX over the wrong axis are not."""
    t = arena
    x, a, b = leaf(t, "x", M, K), leaf(t, "a", K, J), leaf(t, "b", J, N)
    assert matmul(t, matmul(t, x, a, K), b, J) is matmul(t, x, matmul(t, a, b, J), K)
    assert matmul(t, x, a, K) is not matmul(t, x, b, K)


def test_a_row_divisor_commutes_with_a_product_only_from_the_left(arena: Terms) -> None:
    """(x / r) w == (x w) / r for r over rows; a divisor that varies along the summed axis stays
    inside.
    """
    t = arena
    x, w = leaf(t, "x", M, K), leaf(t, "w", K, N)
    row, inner = leaf(t, "r", M), leaf(t, "c", K)
    moved = t.mul(matmul(t, x, w, K), t.inverse(row))
    assert matmul(t, t.mul(x, t.inverse(row)), w, K) is moved
    stays = matmul(t, t.mul(x, t.inverse(inner)), w, K)
    assert stays is not t.mul(matmul(t, x, w, K), t.inverse(inner))
    assert stays is matmul(t, x, t.mul(w, t.inverse(inner)), K)


def test_distribution_and_like_terms(arena: Terms) -> None:
    """x(w + ab) == xw + xab, x + x == 2x, x - x == 0."""
    t = arena
    x, w = leaf(t, "x", M, K), leaf(t, "w", K, N)
    ab = matmul(t, leaf(t, "a", K, J), leaf(t, "b", J, N), J)
    left = matmul(t, x, t.add(w, ab), K)
    assert left is t.add(matmul(t, x, w, K), matmul(t, x, ab, K))
    assert t.add(x, x).terms[0][1] == 2
    assert t.add(x, x, -1).terms == ()


def test_exp_of_a_sum_is_a_product_and_softmax_is_shift_invariant(arena: Terms) -> None:
    """exp(s - m) / sum exp(s - m) is exp(s) / sum exp(s) whatever m over rows is."""
    t = arena
    s, m = leaf(t, "s", M, N), leaf(t, "m", M)
    shifted, plain = t.exp(t.add(s, m, -1)), t.exp(s)
    assert shifted is not plain
    assert t.mul(shifted, t.inverse(t.sum(shifted, N))) is t.mul(plain, t.inverse(t.sum(plain, N)))


def test_sums_over_one_axis_do_not_merge(arena: Terms) -> None:
    """(sum_k x)(sum_k y) is not sum_k xy, also when it is summed again."""
    t = arena
    x, y = leaf(t, "x", M, K), leaf(t, "y", M, K)
    apart, joint = t.mul(t.sum(x, K), t.sum(y, K)), t.sum(t.mul(x, y), K)
    assert apart is not joint
    assert t.sum(apart, M) is not t.sum(joint, M)


def test_pruning_keeps_parts_and_drops_the_rest(arena: Terms) -> None:
    """Parts of the goal survive; foreign products, early sums and powers beyond the goal do not."""
    t = arena
    x, w, r = leaf(t, "x", M, K), leaf(t, "w", K, N), leaf(t, "r", M)
    goal_form = t.mul(matmul(t, x, w, K), t.inverse(r))
    goal = Goal(t, [goal_form])
    for part in (x, w, r, t.mul(x, w), matmul(t, x, w, K), t.mul(x, t.inverse(r)), goal_form):
        assert goal.useful(part)
    for other in (t.mul(x, x), t.sum(x, K), t.sum(w, K), t.mul(w, r), t.mul(r, r), t.inverse(x)):
        assert not goal.useful(other)


def test_a_sum_is_useful_only_with_one_cofactor(arena: Terms) -> None:
    """w + v can complete xw + xv; w - v, w + x and multiples cannot."""
    t = arena
    x, w, v = leaf(t, "x", M, K), leaf(t, "w", K, N), leaf(t, "v", K, N)
    goal = Goal(t, [t.add(matmul(t, x, w, K), matmul(t, x, v, K))])
    assert goal.useful(t.add(w, v))
    assert goal.useful(t.mul(x, t.add(w, v)))
    assert not goal.useful(t.add(w, v, -1))
    assert not goal.useful(t.add(t.add(w, w), v))
    assert not goal.useful(t.add(w, w))
