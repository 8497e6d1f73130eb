"""What a plan is made for: batch, context and the form of the weights.

Takes numbers; gives a frozen `Workload`. Limits are checked here, once, and again at every call.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from obelisk.base.errors import UnknownName, UserError
from obelisk.tasks.config import ModelConfig

MAX_BATCH = 8
MAX_CONTEXT = 32768


class WeightFormat(enum.StrEnum):
    """How matrices are stored. Norm gains and biases stay fp32, sums are fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"  # symmetric, one scale for each output row

    @property
    def nbytes(self) -> int:
        """Bytes of one weight."""
        return {WeightFormat.FP32: 4, WeightFormat.BF16: 2, WeightFormat.INT8: 1}[self]


def parse_format(name: str) -> WeightFormat:
    """The format called `name`; raises `UnknownName` with the known ones."""
    try:
        return WeightFormat(name.lower())
    except ValueError:
        raise UnknownName(
            f"unknown weight format {name!r}: known are {', '.join(WeightFormat)}"
        ) from None


@dataclass(frozen=True, slots=True)
class Workload:
    """Slots decoded together, positions of a slot, and the weights' form."""

    batch: int = 1
    context: int = 512
    weights: WeightFormat = WeightFormat.FP32

    def check(self, model: ModelConfig) -> None:
        """Raise `UserError`, naming the limit, when this cannot be served."""
        if not 1 <= self.batch <= MAX_BATCH:
            raise UserError(f"batch is {self.batch}: a plan serves 1 to {MAX_BATCH} slots")
        limit = min(MAX_CONTEXT, model.max_positions)
        if not 1 <= self.context <= limit:
            why = "the model's own limit" if limit < MAX_CONTEXT else "the limit of a plan"
            raise UserError(f"context is {self.context}: expected 1 to {limit} ({why})")
