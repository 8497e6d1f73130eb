"""Results that the blocks of a cluster combine: each sends every other its share of its part.

Takes how the blocks of a split share the combining (`combine.Gathering`); says where a result's
elements lie. A block writes each element of its part straight into the shared memory of the block
whose share it is, so that after one barrier of the cluster everybody combines what lies in its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from obelisk.base.errors import Infeasible
from obelisk.ir.dtype import DType
from obelisk.lower.cuda.combine import Gathering
from obelisk.lower.cuda.layout import Layout, up
from obelisk.lower.cuda.merge import Joined
from obelisk.lower.cuda.product import VECTOR
from obelisk.lower.cuda.values import Text
from obelisk.lower.schedule import Operand


@dataclass(frozen=True, slots=True)
class Share:
    """What a block of a cluster receives of a result.

    Attributes:
        dim: of the result, along which the blocks share it (None: each receives all of it).
        extent: elements of a share along that dim.
        slot: elements from one block's part to the next; `size`: bytes of all parts.
    """

    dim: int | None
    extent: int
    slot: int
    size: int


class Clustered(Joined):
    """Prints what leaves the block for the other blocks of its cluster.

    Attributes:
        local: by result, what each block receives of it; empty where results go to device memory.
        split: the grid axis along which the blocks of a cluster lie; `parts`: how many there are.
    """

    local: dict[int, Share]
    split: int
    parts: int
    shared_limit: int

    def keep(self, ending: Gathering, places: Sequence[int]) -> None:
        """Send the results `places` (of the params of the combining launch) to their sharers."""
        self.split, self.parts = ending.split, ending.block.grid[0]
        results, names = list(self.results), list(self.result_names)
        for load in ending.block.loads:
            j, shape = places[load.attrs.index], load.shape[1:]
            if results[j].dtype is not DType.F32 or j in self.local:
                raise Infeasible("parts that are not f32, or read twice")
            pitch = shape[-1] + (8 if shape[-1] % 16 == 0 else 0)  # rows in different banks
            strides = [1]
            for n in (pitch, *reversed(shape[:-1])):
                strides.insert(0, strides[0] * n)
            slot = up(strides.pop(0), 4)
            (dim,) = load.attrs.imap
            if dim == load.rank - 1 and shape[-1] % VECTOR:
                raise Infeasible(f"shares of {shape[-1]} columns")
            extent = 0 if dim is None else load.shape[dim]
            self.local[j] = Share(dim, extent, slot, 4 * slot * self.parts)
            results[j] = Operand(DType.F32, (slot, *strides))
            names[j] = f"part{j}"
        self.results, self.result_names = results, names
        self.shared_limit -= self.received()

    def received(self) -> int:
        """Bytes of the parts that a block receives."""
        return sum(share.size for share in self.local.values())

    def store_moves(self, j: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if j in self.local:
            moves = [0] * (len(self.block.grid) + 1)
            moves[self.split] = self.local[j].slot
            return self.results[j].strides, tuple(moves)
        return super().store_moves(j)

    def target(self, j: int, base: str, strides: Sequence[int], layout: Layout) -> str:
        """An element of a part goes to the block whose share it is, or to all of them in turn."""
        if j not in self.local:
            return super().target(j, base, strides, layout)
        node, share = self.block.stores[j].value, self.local[j]
        if share.dim is None:
            return f"ob_remote({base}, to) + {self.address(node, strides, layout)}"
        axis = self.axes.of[node][share.dim]
        assert axis is not None
        others = tuple(0 if d == share.dim else s for d, s in enumerate(strides))
        index = f"({self.index(axis, layout)})"
        inside = f"{index} % {share.extent} * {strides[share.dim]}"
        return (
            f"ob_remote({base}, {index} / {share.extent}) + {inside} + "
            f"{self.address(node, others, layout)}"
        )

    def nested(self, j: int, text: Text) -> int:
        """Loops around the writing of an element: over the blocks that all receive it."""
        if j not in self.local or self.local[j].dim is not None:
            return 0
        text.open(f"for (int to = 0; to < {self.parts}; to++)")
        return 1

    def inbox(self, place: int) -> list[str]:
        """Where parts lie, from byte `place` on; and the wait for blocks that have not begun."""
        out = []
        for j, share in self.local.items():
            out.append(f"float *const part{j} = (float *)(base + {place});")
            place += share.size
        return [*out, *(["ob_cluster_wait();  // the others have begun"] if out else [])]
