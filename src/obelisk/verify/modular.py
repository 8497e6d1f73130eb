"""Exact arithmetic on numpy arrays of residues: products, inverses, roots, powers, matrix products.

Takes and gives int64 arrays with entries in [0, modulus). Two primes are fixed: Q, and P = 2 Q + 1.
Both are 3 modulo 4, so -1 has no square root and x -> x**((m+1)/4) is a root of every square; and
the elements of order Q modulo P are exactly the squares, so that exponentials are "positive", as
they are over the reals. P**2 < 2**63, so products fit int64.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

Array = Any  # int64 arrays of residues

Q = 1_073_741_891  # prime, 31 bits, 3 modulo 4
P = 2 * Q + 1  # 2_147_483_783, prime, 32 bits, 7 modulo 8

_FEW = 40
_SMALL_WORK = 20_000  # multiply-adds under which int64 matmul beats the float64 detour
_CHUNK = 256  # terms per float64 product: 2**15 * 2**30 * 2**8 = 2**53


def mulmod(a: Array, b: Array, m: int) -> Array:
    """a * b mod m, elementwise."""
    return (a * b) % m


def _each(fn: Callable[[int], int], x: Array) -> Array:
    """Element by element: for few elements faster than passes over arrays."""
    return np.array([fn(n) for n in x.reshape(-1).tolist()], np.int64).reshape(x.shape)


def powmod(x: Array, e: int, m: int) -> Array:
    """x**e mod m for a fixed exponent, elementwise (about log2(e) products)."""
    if x.size <= _FEW:
        return _each(lambda n: pow(n, e, m), x)
    out = np.ones_like(x)
    first = True
    for bit in bin(e)[2:]:
        if not first:
            out = (out * out) % m
        if bit == "1":
            out = x % m if first else (out * x) % m
        first = False
    return out


def inverse(x: Array, m: int) -> Array:
    """1 / x mod m, elementwise; 0 stays 0. Montgomery's trick as a product tree: three products an
    element.
    """
    if x.size <= _FEW:
        return _each(lambda n: pow(n, -1, m) if n else 0, x)
    levels = [np.where(x == 0, 1, x).reshape(-1)]
    while levels[-1].size > 1:
        top = levels[-1]
        if top.size % 2:
            top = np.append(top, 1)
            levels[-1] = top
        levels.append((top[0::2] * top[1::2]) % m)
    inv = np.array([pow(int(levels[-1][0]), -1, m)], dtype=np.int64)
    for level in reversed(levels[:-1]):
        inv, below = inv[: level.size // 2], np.empty_like(level)
        below[0::2] = (inv * level[1::2]) % m
        below[1::2] = (inv * level[0::2]) % m
        inv = below
    return np.where(x == 0, 0, inv[: x.size].reshape(x.shape))


def sqrt(x: Array, m: int) -> tuple[Array, Array]:
    """x**((m+1)/4) and whether x is a square. The power is multiplicative: of a square it is a root
    that is itself a square, of another number a root of -x.
    """
    root = powmod(x, (m + 1) // 4, m)
    return root, (root * root) % m == x


class Exponential:
    """x -> omega**x from residues mod Q to residues mod P, for one omega of order Q."""

    def __init__(self, rng: np.random.Generator) -> None:
        base = 1
        while base == 1:
            base = pow(int(rng.integers(2, P)), 2, P)
        self.base = base
        self.tables: list[tuple[int, Array]] = []  # filled by the first use

    @staticmethod
    def _table(base: int, width: int) -> Array:
        table = np.ones(1, dtype=np.int64)
        for k in range(width):
            table = np.concatenate([table, (table * pow(base, 1 << k, P)) % P])
        return table

    def __call__(self, x: Array) -> Array:
        if not self.tables:
            for shift, width in ((0, 11), (11, 10), (21, 10)):
                table = self._table(pow(self.base, 1 << shift, P), width)
                self.tables.append((shift, table))
        out: Array | None = None
        for shift, table in self.tables:
            part = table[(x >> shift) & (table.size - 1)]
            out = part if out is None else (out * part) % P
        return out


def _centred(x: Array, m: int) -> Array:
    return np.where(x > m // 2, x - m, x)


def matmul(a: Array, b: Array, m: int) -> Array:
    """a @ b mod m, batch dims broadcast.

    Large products go through float64 BLAS exactly: a is split into 15-bit and 16-bit halves,
    residues are centred, and at most 256 terms are summed before the next reduction, so that every
    partial sum stays below 2**53.
    """
    k = a.shape[-1]
    work = k * int(np.prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), initial=1))
    work *= a.shape[-2] * b.shape[-1]
    if work <= _SMALL_WORK and k <= 1 << 14:
        high, low = a >> 16, a & 0xFFFF
        return (((high @ b) % m << 16) + (low @ b) % m) % m
    a, b = _centred(a, m), _centred(b, m)
    low = ((a + (1 << 15)) & 0xFFFF) - (1 << 15)
    high = ((a - low) >> 16).astype(np.float64)
    low, right = low.astype(np.float64), b.astype(np.float64)
    total: Array = 0
    for start in range(0, k, _CHUNK):
        part = slice(start, start + _CHUNK)
        rows = right[..., part, :]
        upper = (high[..., part] @ rows).astype(np.int64) % m
        lower = (low[..., part] @ rows).astype(np.int64) % m
        total = total + ((upper << 16) + lower) % m
    return total % m


def scramble(x: Array, key: int) -> Array:
    """A keyed pseudo-random 63-bit number per element (splitmix64's finaliser, twice keyed)."""
    with np.errstate(over="ignore"):
        z = x.astype(np.uint64) + np.uint64(key & 0xFFFFFFFFFFFFFFFF)
        for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(multiplier)
        z = (z ^ (z >> np.uint64(31))) + np.uint64((key * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF)
        z = (z ^ (z >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
        z = z ^ (z >> np.uint64(33))
    return (z >> np.uint64(1)).astype(np.int64)


def rational(value: Fraction, m: int) -> int:
    """The residue of a fraction whose denominator m does not divide."""
    return value.numerator % m * pow(value.denominator, -1, m) % m
