"""CUDA C++ for block graphs without products: tiles in registers, dealt to threads in vectors.

Takes a flattened block graph and how its tensors lie; gives the text of a kernel's body. It serves
as a kernel of its own (elementwise, folds, norms) and as the end of a kernel whose last block
combines the parts of a split fold. Raises `Infeasible` where a graph does not have this form.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from obelisk.base.errors import Infeasible
from obelisk.ir.block import BlockGraph, Phase
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.lower.cuda.combine import Gathering
from obelisk.lower.cuda.layout import WARP, Layout, dealt
from obelisk.lower.cuda.values import VECTOR_BYTES, Text, Values
from obelisk.lower.schedule import Operand

MOST_THREADS = 512
STATIC_SHARED = 32 * 1024


class Dealt(Values):
    """Prints one block graph without products."""

    # A fold consumes its operand element by element, so that not all of it is alive at once.
    register_limit = 128

    def __init__(
        self,
        block: BlockGraph,
        params: Sequence[Operand],
        results: Sequence[Operand],
        tag: str,
        pointers: tuple[Sequence[str], Sequence[str]],
        threads: int = 0,
    ) -> None:
        super().__init__(block, params, results, tag, pointers, threads)
        if any(n.op is Op.MATMUL for n in block.body):
            raise Infeasible("a product")
        inner, vector = self.contiguous()
        total = prod(a.extent for a in self.axes.axes)
        if not self.threads:
            self.threads = 32
            while self.threads < MOST_THREADS and self.threads * vector < total:
                self.threads *= 2
        self.present = self.threads
        self.threads = 1 << (self.threads.bit_length() - 1)  # layouts halve; the rest idle
        folded = {
            a
            for n in block.body
            if n.op in (Op.SUM, Op.REDUCE_MAX)
            and (a := self.axes.of[n.inputs[0]][n.attrs.axis]) is not None
        }
        order = sorted(folded)
        self.layout: Layout = dealt(self.axes.axes, inner, order, self.threads, vector)
        # Threads without elements of their own would read what others read.
        while self.threads > WARP and self.layout.idle and self.alone(folded):
            self.threads //= 2
            self.layout = dealt(self.axes.axes, inner, order, self.threads, vector)
        if not threads:
            self.present = self.threads

    def alone(self, folded: set[int]) -> bool:
        """Whether no fold crosses warps, so that threads of a block may stay away."""
        return all(self.layout.dim(a).warps[0] == 1 for a in folded)

    def contiguous(self) -> tuple[int | None, int]:
        """The axis that most bytes are contiguous along, and elements of a 16-byte vector."""
        weight: dict[int, float] = {}
        widest = 1
        for j, s in enumerate(self.block.stores):
            for d, a in enumerate(self.axes.of[s.value]):
                if a is not None and self.results[j].strides[d] == 1:
                    size = float(self.results[j].dtype.nbytes)
                    weight[a] = weight.get(a, 0.0) + 2 * s.value.elements * size
                    widest = max(widest, int(size))
        for n in self.block.loads:
            strides, _ = self.load_moves(n)
            for d, a in enumerate(self.axes.of[n]):
                if a is not None and strides[d] == 1:
                    size = float(n.attrs.dtype.nbytes)
                    weight[a] = weight.get(a, 0.0) + n.elements * size
                    widest = max(widest, int(size))
        if not weight:
            return None, 1
        inner = max(weight, key=lambda a: (weight[a], -a))
        vector = VECTOR_BYTES // widest
        while vector > 1 and self.axes.axes[inner].extent % vector:
            vector //= 2
        return inner, vector

    def body(self) -> list[str]:
        """The text between a kernel's braces, grid coordinates aside."""
        for j in range(len(self.block.stores)):
            self.store(j, self.layout)
        t = Text()
        for line in self.split_lines(False):
            t.line(line)
        t.lines += self.out[Phase.INVARIANT].lines
        if self.looped:
            t.line("#pragma unroll 1")
            t.open(f"for (int it = 0; it < {self.block.loop}; it++)")
            for line in self.split_lines(True):
                t.line(line)
            t.lines += ["  " * t.depth + x for x in self.out[Phase.LOOP].lines]
            t.close()
            self.finish_folds(t)
            t.lines += self.out[Phase.POST].lines
        if self.exchange:
            if self.exchange > STATIC_SHARED:
                raise Infeasible(f"{self.exchange} bytes for a fold across warps")
            if self.present != self.threads:
                raise Infeasible(f"a fold across warps of {self.present} threads")
            t.lines.insert(0, f"__shared__ float {self.tag}exchange[{self.exchange // 4}];")
        if self.present != self.threads:
            return [f"if (thread < {self.threads}) {{", *("  " + x for x in t.lines), "}"]
        return t.lines


class Gathered(Dealt):
    """Prints a block graph that combines the parts which a block of a cluster received from all of
    them: its share of the result.
    """

    def __init__(
        self,
        ending: Gathering,
        params: Sequence[Operand],
        results: Sequence[Operand],
        pointers: tuple[Sequence[str], Sequence[str]],
        threads: int,
    ) -> None:
        self.ending, self.rank = ending, f"g{ending.split}"
        super().__init__(ending.block, params, results, "z", pointers, threads)

    def load_moves(self, node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Strides of what this block received; all of it is this block's share."""
        return self.params[node.attrs.index].strides, (0, 0)

    def store_start(self, j: int, moves: Sequence[int]) -> str:
        """The group's part of the result, and this block's share of it."""
        value, strides = self.block.stores[j].value, self.results[j].strides
        (shared,) = self.block.stores[j].omap
        parts = [f"{self.rank} * {moves[0]}ll"]
        for a, d in self.ending.places[j]:
            extent = value.shape[d] * (self.block.grid[0] if d == shared else 1)
            parts.append(f"g{a} * {extent * strides[d]}ll")
        return " + ".join(parts)
