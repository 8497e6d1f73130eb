"""Results that the blocks of a cluster combine: each sends every other its share of its part.

Takes how the blocks of a split share the combining (`combine.Gathering`); says where a result's
elements lie and appends CUDA C++ that sends them. A block writes its part into an outbox in its own
shared memory, in the order of the blocks that combine it; one bulk copy a block takes each message
to the inbox there, whose barrier counts the bytes. So nobody waits for single words to cross, and
the combining reads its own shared memory.
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
    """What a message holds of a result.

    Attributes:
        dim: of the result, along which the blocks share it (None: each receives all of it).
        extent: elements of a share along that dim.
        offset: elements from the start of a message.
    """

    dim: int | None
    extent: int
    offset: int


class Clustered(Joined):
    """Prints what leaves the block for the other blocks of its cluster.

    Attributes:
        local: by result, what a message holds of it; empty where results go to device memory.
        split: the grid axis along which the blocks of a cluster lie; `parts`: how many there are.
        message: elements of a message (f32).
    """

    local: dict[int, Share]
    split: int
    parts: int
    message: int
    shared_limit: int

    def keep(self, ending: Gathering, places: Sequence[int]) -> None:
        """Send the results `places` (of the params of the combining launch) to their sharers."""
        self.split, self.parts = ending.split, ending.block.grid[0]
        results, names = list(self.results), list(self.result_names)
        strides_of: dict[int, list[int]] = {}
        for load in ending.block.loads:
            j, shape = places[load.attrs.index], load.shape[1:]
            if results[j].dtype is not DType.F32 or j in self.local:
                raise Infeasible("parts that are not f32, or read twice")
            pitch = shape[-1] + (8 if shape[-1] % 16 == 0 else 0)  # rows in different banks
            strides = [1]
            for n in (pitch, *reversed(shape[:-1])):
                strides.insert(0, strides[0] * n)
            (dim,) = load.attrs.imap
            if dim == load.rank - 1 and shape[-1] % VECTOR:
                raise Infeasible(f"shares of {shape[-1]} columns")
            extent = 0 if dim is None else load.shape[dim]
            self.local[j] = Share(dim, extent, self.message)
            self.message += up(strides.pop(0), 4)
            strides_of[j] = strides
            names[j] = f"send{j}"
        for j, strides in strides_of.items():
            results[j] = Operand(DType.F32, (self.message, *strides))
        self.results, self.result_names = results, names
        self.shared_limit -= self.received()

    def received(self) -> int:
        """Bytes of the messages that a block receives, or sends."""
        return 4 * self.message * self.parts if self.local else 0

    def store_moves(self, j: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if j in self.local:
            return self.results[j].strides, (0,) * (len(self.block.grid) + 1)
        return super().store_moves(j)

    def target(self, j: int, base: str, strides: Sequence[int], layout: Layout) -> str:
        """An element of a part goes into the message for the block whose share it is."""
        if j not in self.local:
            return super().target(j, base, strides, layout)
        node, share = self.block.stores[j].value, self.local[j]
        if share.dim is None:
            return f"{base} + to * {self.message} + {self.address(node, strides, layout)}"
        axis = self.axes.of[node][share.dim]
        assert axis is not None
        others = tuple(0 if d == share.dim else s for d, s in enumerate(strides))
        index = f"({self.index(axis, layout)})"
        return (
            f"{base} + {index} / {share.extent} * {self.message} + "
            f"{index} % {share.extent} * {strides[share.dim]} + "
            f"{self.address(node, others, layout)}"
        )

    def nested(self, j: int, text: Text) -> int:
        """Loops around the writing of an element: over the blocks that all receive it."""
        if j not in self.local or self.local[j].dim is not None:
            return 0
        text.open(f"for (int to = 0; to < {self.parts}; to++)")
        return 1

    def mailbox(self) -> list[str]:
        """What comes before the cluster's blocks meet: the barrier of the inbox."""
        if not self.local:
            return []
        return [
            "__shared__ __align__(8) unsigned long long mail;",
            "if (thread == 0) {",
            "  ob_barrier_init(ob_shared(&mail), 1);",
            "  ob_barrier_ready();",
            f"  ob_barrier_expect(ob_shared(&mail), {self.received()});",
            "}",
            "ob_cluster_arrive();",
        ]

    def boxes(self, outbox: int, inbox: int) -> list[str]:
        """Where messages lie: bytes from the start of the block's shared memory."""
        out = [
            f"float *const outbox = (float *)(base + {outbox});",
            f"float *const inbox = (float *)(base + {inbox});",
        ]
        for j, share in self.local.items():
            out.append(f"float *const send{j} = outbox + {share.offset};")
            out.append(f"const float *const part{j} = inbox + {share.offset};")
        return out

    def sending(self) -> list[str]:
        """Lines that send all messages and wait for those of the others."""
        return [
            "ob_proxy_fence();",
            "__syncthreads();",
            "ob_cluster_wait();  // the others have begun",
            f"if (thread < {self.parts})",
            f"  ob_bulk_send(inbox + g{self.split} * {self.message}, outbox + thread * "
            f"{self.message}, {4 * self.message}, ob_shared(&mail), thread);",
            "ob_barrier_wait(ob_shared(&mail), 0);",
            "ob_cluster_arrive();",
        ]
