"""Rotary tables: inverse frequencies in float64, cosines and sines in float32.

Takes a `Rope` and a head's width; gives arrays. Angles are formed in float64 from integer
positions, so that tables are right at any position. Formulas: Su et al., "RoFormer"; the llama3
scaling follows the description that Meta published with Llama 3.1 (frequencies above `high` stay,
below `low` are divided by `factor`, between them the two are blended linearly).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from obelisk.tasks.config import Rope, RopeType

Array = Any


def inverse_frequencies(rope: Rope, head_dim: int) -> Array:
    """float64 (head_dim / 2,): radians per position."""
    freq = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind is RopeType.DEFAULT:
        return freq
    if rope.kind is RopeType.LINEAR:
        return freq / rope.factor
    turns = rope.original * freq / (2 * np.pi)  # full turns within the original context
    blend = np.clip((turns - rope.low) / (rope.high - rope.low), 0.0, 1.0)
    return freq * blend + freq / rope.factor * (1 - blend)


def rope_table(rope: Rope, head_dim: int, positions: Sequence[int] | Array) -> tuple[Array, Array]:
    """float32 cos and sin, each (len(positions), head_dim / 2), rotating halves."""
    angle = np.outer(np.asarray(positions, np.float64), inverse_frequencies(rope, head_dim))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
