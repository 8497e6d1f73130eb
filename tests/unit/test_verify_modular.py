"""The modular arithmetic of the field judge is exact: compared with Python's integers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from obelisk.verify import modular as m
from obelisk.verify.constants import meant


def _prime(n: int) -> bool:
    """Miller-Rabin with the bases that are enough below 3.3e24."""
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        x = pow(base, odd, n)
        if x not in (1, n - 1) and not any(pow(x, 2**k, n) == n - 1 for k in range(1, twos)):
            return False
    return True


def test_primes_have_the_properties_that_the_judge_relies_on() -> None:
    assert _prime(m.P)
    assert _prime(m.Q)
    assert (m.P - 1) % m.Q == 0
    assert m.P % 4 == 3
    assert m.Q % 4 == 3
    assert m.Q.bit_length() >= 31
    assert m.P**2 < 2**63


@pytest.mark.parametrize("prime", [m.P, m.Q])
@pytest.mark.parametrize("shape", [(2, 3, 4), (7, 300, 9), (33, 513, 17), (1, 1, 1)])
def test_matmul_is_exact_on_random_and_extreme_residues(
    prime: int, shape: tuple[int, int, int]
) -> None:
    rows, k, cols = shape
    rng = np.random.default_rng(0)
    for a, b in (
        (rng.integers(0, prime, (rows, k)), rng.integers(0, prime, (k, cols))),
        (np.full((rows, k), prime - 1), np.full((k, cols), prime - 1)),
        (np.full((rows, k), prime // 2), np.full((k, cols), prime // 2 + 1)),
    ):
        want = [
            [sum(int(x) * int(y) for x, y in zip(r, c, strict=True)) % prime for c in b.T]
            for r in a
        ]
        assert m.matmul(a, b, prime).tolist() == want


def test_matmul_broadcasts_batches() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, m.P, (2, 1, 5, 40)), rng.integers(0, m.P, (3, 40, 6))
    got = m.matmul(a, b, m.P)
    assert got.shape == (2, 3, 5, 6)
    for i in range(2):
        for j in range(3):
            assert (got[i, j] == m.matmul(a[i, 0], b[j], m.P)).all()


@pytest.mark.parametrize("prime", [m.P, m.Q])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 64, 101])
def test_inverse_times_itself_is_one_and_zero_stays_zero(prime: int, size: int) -> None:
    x = np.random.default_rng(size).integers(0, prime, size)
    x[1::7] = 0
    assert (m.inverse(x, prime) * x % prime == (x != 0)).all()


@pytest.mark.parametrize("prime", [m.P, m.Q])
def test_sqrt_is_multiplicative_and_a_root_of_every_square(prime: int) -> None:
    rng = np.random.default_rng(2)
    x, y = rng.integers(1, prime, 500), rng.integers(1, prime, 500)
    root, square = m.sqrt(x, prime)
    assert (root * root % prime == np.where(square, x, -x % prime)).all()
    assert 150 < square.sum() < 350
    other, _ = m.sqrt(y, prime)
    both, _ = m.sqrt(x * y % prime, prime)
    assert (both == root * other % prime).all()
    of_square, always = m.sqrt(x * x % prime, prime)
    assert always.all()
    assert (of_square == np.where(square, x, -x % prime)).all()  # |x|, not x


def test_exponential_is_a_homomorphism_onto_squares() -> None:
    rng = np.random.default_rng(3)
    power = m.Exponential(rng)
    x, y = rng.integers(0, m.Q, 200), rng.integers(0, m.Q, 200)
    assert [int(v) for v in power(x)] == [pow(power.base, int(v), m.P) for v in x]
    assert (power((x + y) % m.Q) == power(x) * power(y) % m.P).all()
    assert m.sqrt(power(x), m.P)[1].all()


def test_rational_is_the_fraction() -> None:
    for prime in (m.P, m.Q):
        assert m.rational(Fraction(3, 4), prime) * 4 % prime == 3
        assert m.rational(Fraction(-2), prime) == prime - 2
        assert m.rational(Fraction(1, 10), prime) * 10 % prime == 1


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0.1, Fraction(1, 10)), (float(np.float32(0.1)), Fraction(1, 10)), (1 / 3, Fraction(1, 3)),
        (1e-5, Fraction(1, 10**5)), (1e30, Fraction(10**30)), (-2.5, Fraction(-5, 2)),
        (2.0**-20, Fraction(1, 2**20)), (0.0, Fraction(0)), (100.0, Fraction(100)),
    ],
)  # fmt: skip
def test_constants_stand_for_the_number_that_was_meant(value: float, number: Fraction) -> None:
    assert meant(value) == number


def test_constants_that_float32_tells_apart_stay_apart() -> None:
    """And spellings that differ in float64's last bit are one number."""
    assert meant(1 / 7**0.5) == meant(7**-0.5) == meant(np.nextafter(7**-0.5, 1))
    for value in (0.3, 1 / 3, 7**-0.5, 1e-6, 12345.678):
        near = float(np.float32(value))
        assert meant(near) != meant(float(np.nextafter(np.float32(value), np.float32(np.inf))))
        assert abs(meant(value) / Fraction(value) - 1) <= Fraction(1, 2**24)


def test_scramble_depends_on_value_and_key_and_is_never_negative() -> None:
    x = np.arange(1000)
    a, b = m.scramble(x, 5), m.scramble(x, 6)
    assert (a >= 0).all()
    assert len(set(a.tolist())) == 1000
    assert not (a == b).any()
