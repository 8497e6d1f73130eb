"""Choosing a token: the meaning of the `sample` task, in float64.

Takes logits and a slot's parameters; gives a token id. The C body (mega/cpu/runtime/sample.h) says
the same, so the tests compare the two id by id.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any
_MASK = (1 << 64) - 1


def hash64(x: int) -> int:
    """splitmix64 of a 64-bit integer (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014).
    """
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the seed and the position alone."""
    return (hash64((seed ^ hash64(position)) & _MASK) >> 11) * 2.0**-53


def choose(
    logits: Array, position: int, temperature: float, top_k: int = 0, top_p: float = 1.0,
    seed: int = 0,
) -> int:  # fmt: skip
    """A token id from logits (vocab,).

    Temperature 0 takes the first of the largest. Otherwise tokens are ranked (of equals, the
    smaller id first) and weighed by exp((logit - largest) / temperature); `top_k` (0: off) keeps
    the first k, then `top_p` the fewest whose mass reaches that share; the uniform number of
    (seed, position) picks along the ranks.
    """
    if temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-np.asarray(logits, np.float64), kind="stable")
    if top_k:
        order = order[:top_k]
    value = np.asarray(logits, np.float64)[order]
    weight = np.exp((value - value[0]) / temperature)
    mass = np.cumsum(weight)
    kept = int(np.searchsorted(mass, top_p * weight.sum())) + 1
    mass = mass[:kept]
    at = int(np.searchsorted(mass, uniform(seed, position) * mass[-1], side="right"))
    return int(order[min(at, len(mass) - 1)])
