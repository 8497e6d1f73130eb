"""The dimensions of one decode step and how it is cut into tiles: what every task kind works from.

Takes a model, a workload, a tiling and a vector width; gives a frozen `StepShape` whose properties
name every extent once. Extents that vectors run along are rounded up to whole vectors; the padding
is zero and stays zero.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from obelisk.plan.layout import WORD, align
from obelisk.tasks.config import ModelConfig
from obelisk.tasks.workload import WeightFormat, Workload

LINE = 16  # fp32 elements of a cache line


@dataclass(frozen=True, slots=True)
class Tiling:
    """The choices that decide which tasks there are.

    Attributes:
        panel: rows of a weight panel (the rows that one stream of weights serves).
        fuse_rope: the product of q, k and v also normalises, rotates and appends, by head groups;
            else it is cut by rows, and `rope` tasks follow.
        replicate_norm: every core normalises for itself; else one task does it for all.
        qkv, o, up, down, head: tasks that each product is cut into (0: one for each core).
        kv_splits: pieces that a slot's context is attended in.
        cores: cores in use.
    """

    panel: int = 4
    fuse_rope: bool = True
    replicate_norm: bool = True
    qkv: int = 0
    o: int = 0
    up: int = 0
    down: int = 0
    head: int = 0
    kv_splits: int = 1
    cores: int = 1

    def to_json(self) -> dict[str, Any]:
        """A JSON object of the fields."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StepShape:
    """A decode step's extents, in elements unless said otherwise."""

    model: ModelConfig
    work: Workload
    tiling: Tiling
    lanes: int = 8

    @property
    def batch(self) -> int:
        """Slots."""
        return self.work.batch

    def _padded(self, width: int) -> int:
        """Whole vectors (of 4-bit weights: whole words of them) and whole panels, which are powers
        of two, and whole cache lines.
        """
        four = self.work.weights is WeightFormat.W4A16
        vector = self.lanes * WORD if four else self.lanes
        return align(width, max(vector, self.tiling.panel, LINE))

    @property
    def hidden_padded(self) -> int:
        """Width of a row of the residual stream as stored."""
        return self._padded(self.model.hidden)

    @property
    def q_padded(self) -> int:
        """Width of a row of queries as stored."""
        return self._padded(self.model.q_width)

    @property
    def ffn_padded(self) -> int:
        """Width of a row of the MLP as stored."""
        return self._padded(self.model.ffn)

    @property
    def part_width(self) -> int:
        """Elements of one piece of attention: sums of values, then maxima and sums of weights."""
        return self._padded(self.model.group * (self.model.head_dim + 2))

    @property
    def group_rows(self) -> int:
        """Packed rows of one head group: its query heads, its key head, its value head."""
        return align((self.model.group + 2) * self.model.head_dim, self.tiling.panel)

    @property
    def qkv_rows(self) -> int:
        """Packed rows of the q, k, v product."""
        return self.group_rows * self.model.kv_heads

    @property
    def hidden_rows(self) -> int:
        """Packed rows of the products that end in the residual stream."""
        return align(self.model.hidden, self.tiling.panel)

    @property
    def ffn_rows(self) -> int:
        """Rows of gate (and of up), in whole panels."""
        return align(self.model.ffn, self.tiling.panel)

    @property
    def vocab_rows(self) -> int:
        """Packed rows of the head."""
        return align(self.model.vocab, self.tiling.panel)

    def cuts(self, rows: int, count: int) -> list[tuple[int, int]]:
        """`rows` cut into at most `count` (0: one a core) nearly equal runs of whole panels.

        Gives (first row, end row) pairs; none is empty.
        """
        panels = -(-rows // self.tiling.panel)
        parts = max(1, min(panels, count or self.tiling.cores))
        edges = [panels * i // parts * self.tiling.panel for i in range(parts + 1)]
        return [(a, min(b, rows)) for a, b in pairwise(edges)]
