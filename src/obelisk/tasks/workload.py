"""What a plan is made for: batch, context and the form of the weights.

Takes numbers; gives a frozen `Workload`. Limits are checked here, once, and again at every call.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
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


def parse_head(name: str | None, weights: WeightFormat) -> WeightFormat | None:
    """The head's format by the name that `--head` takes: `int8` beside 4-bit weights; None where it
    is the embedding's, as it is when nothing is said, with `16`, or with that format's own name.

    Raises `UserError` for what a plan of these weights cannot have.
    """
    outer = weights.outer
    if name is None or name.lower() == outer or (name == "16" and _BYTES[outer] == 2):
        return None
    if weights is not WeightFormat.W4A16:
        raise UserError(
            f"head {name} with {weights} weights: only w4a16 has a choice of the head's format; "
            f"a plan of {weights} has it in {outer}"
        )
    if name.lower() != WeightFormat.INT8:
        raise UserError(f"head {name}: expected 16 (fp16, as the checkpoint has it) or int8")
    return WeightFormat.INT8


@dataclass(frozen=True, slots=True)
class Workload:
    """Slots decoded together, positions of a slot, and the weights' form.

    Attributes:
        batch: slots.
        context: positions of a slot.
        weights: the form of the layers' matrices (`weights.outer`: of embedding and head).
        group: w4a16 alone: columns of a row that share a scale.
        zeros: w4a16 alone: whether each group has a zero of its own (else it is 8, the middle).
        head: w4a16 alone: int8, where the head is to be narrower than the embedding; None: as it.
    """

    batch: int = 1
    context: int = 512
    weights: WeightFormat = WeightFormat.FP32
    group: int = 128
    zeros: bool = False
    head: WeightFormat | None = None

    @property
    def weight_bytes(self) -> float:
        """Bytes of one weight of a layer's matrix, its share of scales and zeros included."""
        extra = (2 + self.zeros) / self.group if self.weights is WeightFormat.W4A16 else 0.0
        return _BYTES[self.weights] + extra

    @property
    def outer_bytes(self) -> float:
        """Bytes of one weight of the embedding, and of the head unless it has its own format."""
        return _BYTES[self.weights.outer]

    @property
    def own_head(self) -> bool:
        """Whether the head is stored apart from the embedding, tied or not, in its own format."""
        return self.head is not None and self.head is not self.weights.outer

    @property
    def head_form(self) -> WeightFormat:
        """The format of the head."""
        return self.head or self.weights.outer

    @property
    def said(self) -> str:
        """The formats in words."""
        return f"{self.weights}, head {self.head_form}" if self.own_head else self.weights.value

    @property
    def head_bytes(self) -> float:
        """Bytes of one weight of the head, without its row's share of a scale."""
        return _BYTES[self.head_form]

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
        if self.own_head:
            parse_head(self.head, self.weights)

    def to_json(self) -> dict[str, Any]:
        """What a plan says of it; groups, and a head of its own, only where there are any."""
        out: dict[str, Any] = {
            "batch": self.batch, "context": self.context, "weights": self.weights.value,
        }  # fmt: skip
        if self.weights is WeightFormat.W4A16:
            out |= {"group": self.group, "zeros": self.zeros}
        if self.own_head:
            out["head"] = self.head_form.value
        return out

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Workload:
        """The inverse of `to_json`; a plan from before there was a choice says nothing of it."""
        head = data.get("head")
        return Workload(**{
            **data, "weights": parse_format(data["weights"]),
            "head": None if head is None else parse_format(head),
        })  # fmt: skip
