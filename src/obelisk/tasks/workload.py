"""What a plan is made for: batch, context and the form of the weights.

Takes numbers; gives a frozen `Workload`. Limits are checked here, once, and again at every call.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from obelisk.base.errors import UnknownName, UserError
from obelisk.tasks.config import ModelConfig

MAX_BATCH = 8
MAX_CONTEXT = 32768
GROUPS = (32, 64, 128)  # columns that share a scale, of 4-bit weights


class WeightFormat(enum.StrEnum):
    """How matrices are stored. Norm gains and biases stay fp32, sums are fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"  # symmetric, one scale for each output row
    W4A16 = "w4a16"  # 4 bits, a scale (and a zero) for each group of columns of a row

    @property
    def outer(self) -> WeightFormat:
        """The format of the embedding and the head: 4-bit models keep 16 bits there."""
        return WeightFormat.FP16 if self is WeightFormat.W4A16 else self


_BYTES = {
    WeightFormat.FP32: 4.0, WeightFormat.BF16: 2.0, WeightFormat.FP16: 2.0, WeightFormat.INT8: 1.0,
    WeightFormat.W4A16: 0.5,
}  # fmt: skip


def parse_format(name: str) -> WeightFormat:
    """The format called `name`; raises `UnknownName` with the known ones."""
    try:
        return WeightFormat(name.lower())
    except ValueError:
        raise UnknownName(
            f"unknown weight format {name!r}: known are {', '.join(WeightFormat)}"
        ) from None


def parse_weights(name: str) -> tuple[WeightFormat, int | None]:
    """A format and, for `w4a16:64`, the size of its groups (None: not said).

    Raises `UnknownName` for a format that is not known, `UserError` for a size that is none.
    """
    form, colon, size = name.partition(":")
    found = parse_format(form)
    if not colon:
        return found, None
    if found is not WeightFormat.W4A16 or size not in map(str, GROUPS):
        known = ", ".join(f"{WeightFormat.W4A16}:{g}" for g in GROUPS)
        raise UserError(f"weights {name!r}: only 4-bit ones have groups, known are {known}")
    return found, int(size)


@dataclass(frozen=True, slots=True)
class Workload:
    """Slots decoded together, positions of a slot, and the weights' form.

    Attributes:
        batch: slots.
        context: positions of a slot.
        weights: the form of the layers' matrices (`weights.outer`: of embedding and head).
        group: w4a16 alone: columns of a row that share a scale.
        zeros: w4a16 alone: whether each group has a zero of its own (else it is 8, the middle).
    """

    batch: int = 1
    context: int = 512
    weights: WeightFormat = WeightFormat.FP32
    group: int = 128
    zeros: bool = False

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight of a layer's matrix, its share of scales and zeros included."""
        extra = (2 + self.zeros) / self.group if self.weights is WeightFormat.W4A16 else 0.0
        return _BYTES[self.weights] + extra

    @property
    def outer_bytes(self) -> float:
        """Bytes of one weight of the embedding or the head."""
        return _BYTES[self.weights.outer]

    def check(self, model: ModelConfig) -> None:
        """Raise `UserError`, naming the limit, when this cannot be served."""
        if not 1 <= self.batch <= MAX_BATCH:
            raise UserError(f"batch is {self.batch}: a plan serves 1 to {MAX_BATCH} slots")
        limit = min(MAX_CONTEXT, model.max_positions)
        if not 1 <= self.context <= limit:
            why = "the model's own limit" if limit < MAX_CONTEXT else "the limit of a plan"
            raise UserError(f"context is {self.context}: expected 1 to {limit} ({why})")
        if self.weights is WeightFormat.W4A16 and self.group not in GROUPS:
            known = ", ".join(map(str, GROUPS))
            raise UserError(f"4-bit weights in groups of {self.group}: known sizes are {known}")

    def to_json(self) -> dict[str, Any]:
        """What a plan says of it; groups only where there are any."""
        out: dict[str, Any] = {
            "batch": self.batch, "context": self.context, "weights": self.weights.value,
        }  # fmt: skip
        if self.weights is WeightFormat.W4A16:
            out |= {"group": self.group, "zeros": self.zeros}
        return out
