"""What runs as one phase on a GPU, beside what `GpuTiling` says about sizes.

Gives `Fusion`. The kernel that is emitted knows one of these (`EMITTED`): norm before the product,
rotation and append in attention, pieces joined by the output projection, gate in the product, best
in the head. The others are ranked too, so that an account can say what they would cost.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Fusion:
    """Which operators share a phase.

    Attributes:
        rope_apart: head norms, rotation and append are a phase of their own, before attention.
        combine_apart: pieces of attention are joined by a phase of their own.
        o_behind_attend: the output projection is split along K by head group and runs behind
            attention in the same phase; its sums are added in device memory.
        down_behind_up: the same for the down projection behind gate and up.
    """

    rope_apart: bool = False
    combine_apart: bool = False
    o_behind_attend: bool = False
    down_behind_up: bool = False

    def to_json(self) -> dict[str, Any]:
        """A JSON object of the fields."""
        return asdict(self)

    def __str__(self) -> str:
        said = [name.replace("_", " ") for name, on in asdict(self).items() if on]
        return ", ".join(said) or "as emitted"


EMITTED = Fusion()
