"""What the bank of one schedule holds: stages, schedules, values, and the account of what was
pruned.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from obelisk.search.axes import Axis, Dims
from obelisk.search.field import Pair
from obelisk.search.terms import Poly

TINY = 4  # extent of every axis in the bank; a cut axis has 2 parts
LEAD = 2  # leading array axes of a tile: blocks along the split axis, iterations of the loop
LOOP_AT = 1
COMBINED = -10  # `peak` of a value whose blocks were brought to one maximum


class Stage(enum.IntEnum):
    """When a value exists: before or in every iteration, in the loop, after it, in the second
    kernel.
    """

    INVARIANT = 0
    LOOP = 1
    POST = 2
    COMBINE = 3


@dataclass(frozen=True, slots=True)
class Schedule:
    """The axis that the loop cuts, and the inner axis that the grid splits (a second kernel
    combines its parts).

    Grid axes over axes of the targets need no mention: cutting those changes no derivation, only
    sizes.
    """

    loop: Axis | None
    split: Axis | None = None


@dataclass(frozen=True, slots=True)
class Mode:
    """Which of two equal forms to derive where the bank would keep only the cheaper one.

    Attributes:
        raw: allow exponentials as the program has them; False asks for shifted ones only.
        joined: form a sum of two products as one product over concatenated operands.
    """

    raw: bool = True
    joined: bool = False


@dataclass(slots=True)
class Value:
    """One entry of the bank.

    Attributes:
        step: operator name and operand value ids (leaves: the leaf's number).
        dims: axis of each tile dim (None: extent 1).
        partial: a sum or maximum over this iteration's tile only ("sum", "max"), to be closed by an
            accumulator; or tiles summed over the iterations element by element ("tile"), to be
            closed by a sum of the tile.
        peak: id of the running maximum that it was shifted by, or -1.
        open: "sum" or "max" if blocks along the split axis still have to be combined.
        mask: bit set of the steps it needs; `cost` is their total weight.
    """

    id: int
    step: tuple[Any, ...]
    dims: Dims
    phase: Stage
    partial: str
    peak: int
    open: str
    poly: Poly
    data: Pair
    mask: int
    cost: float
    gauge: bool = False


@dataclass
class Counts:
    """What happened, by rule."""

    states: int = 0
    bank_hits: int = 0
    pruned: dict[str, int] = field(default_factory=dict)

    def prune(self, rule: str) -> None:
        """Count one value dropped by a rule."""
        self.pruned[rule] = self.pruned.get(rule, 0) + 1
