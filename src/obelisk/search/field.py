"""Small exact arithmetic for the search's bank: arrays over two prime fields, so that equal tensors
look equal.

A value is a pair of residue arrays (mod p, mod q) with q | p - 1, as in Mirage (OSDI'25, section
5): exp maps the q-part to a power of an element of order q. Functions without laws are keyed mixing
functions: equal arguments give equal results, and nothing else does but by chance (about 2^-30 an
element). Only the search uses this; the judges have an algebra of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any

_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _is_prime(n: int) -> bool:
    """Deterministic Miller-Rabin for n < 3.3e24."""
    if n < 2 or any(n % p == 0 for p in (2, 3, 5, 7, 11, 13) if n != p):
        return n in (2, 3, 5, 7, 11, 13)
    d, r = n - 1, 0
    while d % 2 == 0:
        d, r = d // 2, r + 1
    for a in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        x = pow(a, d, n)
        if x in (1, n - 1):
            continue
        if not any((x := x * x % n) == n - 1 for _ in range(r - 1)):
            return False
    return True


def _fields() -> tuple[int, int, int]:
    """(p, q, an element of order q mod p): the largest safe prime p = 2q + 1 below 2^31."""
    q = (1 << 30) - 1
    while not (_is_prime(q) and _is_prime(2 * q + 1)):
        q -= 2
    return 2 * q + 1, q, 4  # 2^2 has order q in the group of order 2q


P, Q, OMEGA = _fields()
Pair = tuple[Array, Array | None]


def power(base: Array, exponent: Array, modulus: int) -> Array:
    """base ** exponent mod modulus, elementwise (all below 2^31)."""
    base, exponent = np.broadcast_arrays(np.asarray(base, np.int64), np.asarray(exponent, np.int64))
    out = np.ones(base.shape, np.int64)
    b, e = base % modulus, exponent.copy()
    while e.any():
        out = np.where(e & 1, out * b % modulus, out)
        b = b * b % modulus
        e >>= 1
    return out


def inverse(x: Array, modulus: int) -> Array:
    """1 / x mod a prime; 0 for 0."""
    return power(x, np.int64(modulus - 2), modulus)


def mix(key: int, *parts: Array) -> Array:
    """A keyed mixing function of residues, to residues below 2^31."""
    shape = np.broadcast_shapes(*(x.shape for x in parts))
    h = np.full(shape, (key * _MIX[0] + _MIX[1]) & 0xFFFFFFFFFFFFFFFF, np.uint64)
    with np.errstate(over="ignore"):
        for x in parts:
            h = (h ^ x.astype(np.uint64)) * np.uint64(_MIX[1])
            h ^= h >> np.uint64(29)
            h = h * np.uint64(_MIX[2])
            h ^= h >> np.uint64(32)
    return (h >> np.uint64(33)).astype(np.int64)


def function(key: int, *args: Pair) -> Pair:
    """An uninterpreted elementwise function of p-parts; it has both parts."""
    parts = [a[0] for a in args]
    return mix(2 * key, *parts) % P, mix(2 * key + 1, *parts) % Q


def exp(x: Pair) -> Pair:
    """omega ** (q-part); a second exponentiation is an uninterpreted function."""
    if x[1] is None:
        return function(991, x)[0], None
    return power(np.int64(OMEGA), x[1], P), None


def linear(a: Pair, b: Pair, sign: int) -> Pair:
    """a + sign * b."""
    q = None if a[1] is None or b[1] is None else (a[1] + sign * b[1]) % Q
    return (a[0] + sign * b[0]) % P, q


def mul(a: Pair, b: Pair) -> Pair:
    """a * b."""
    return a[0] * b[0] % P, None if a[1] is None or b[1] is None else a[1] * b[1] % Q


def div(a: Pair, b: Pair) -> Pair:
    """a / b."""
    q = None if a[1] is None or b[1] is None else a[1] * inverse(b[1], Q) % Q
    return a[0] * inverse(b[0], P) % P, q


def total(a: Pair, axis: int) -> Pair:
    """Sum along an axis that stays with extent 1."""
    q = None if a[1] is None else a[1].sum(axis, keepdims=True) % Q
    return a[0].sum(axis, keepdims=True) % P, q


def matmul(a: Pair, b: Pair) -> Pair:
    """Matrix product over the last two dims; contraction extents here are tiny."""

    def one(x: Array, y: Array, m: int) -> Array:
        return (x[..., :, :, None] * y[..., None, :, :] % m).sum(-2) % m

    return one(a[0], b[0], P), None if a[1] is None or b[1] is None else one(a[1], b[1], Q)


def _order(a: Pair) -> Array:
    """Keys of a total order in which no constant stands out (0 would be the least of all
    residues).
    """
    return mix(5, a[0] if a[1] is None else a[1])


def peak(a: Pair, axis: int) -> Pair:
    """Maximum along an axis that stays: whole elements are picked by a fixed total order (a
    semilattice).
    """
    at = np.argmax(_order(a), axis=axis, keepdims=True)
    q = None if a[1] is None else np.take_along_axis(a[1], at, axis)
    return np.take_along_axis(a[0], at, axis), q


def larger(a: Pair, b: Pair) -> Pair:
    """Elementwise maximum by the same order."""
    first = _order(a) >= _order(b)
    q = None if a[1] is None or b[1] is None else np.where(first, a[1], b[1])
    return np.where(first, a[0], b[0]), q


def scalar(value: float) -> Pair:
    """A constant: exact for dyadic rationals, as every float is."""
    if value == float("-inf"):
        return function(7, (np.asarray(3, np.int64), None))
    n, d = value.as_integer_ratio()
    p, q = (np.asarray(n % m * pow(d % m, -1, m) % m, np.int64) for m in (P, Q))
    return p, q
