"""Loops whose iterations overlap: one's first product comes in front of the last one's final one.

Takes what `fragment` takes; gives the same kernel with another loop, where the loop is a chain:
from products of loads alone (scores) through other operators (a softmax) to products that are
summed (of the values). Before the loop come the first product of iteration 0 and the operators.
Iteration i then begins the first product of i + 1, makes the final product of i from what is kept
in registers, and computes the operators of i + 1 while that runs. Behind the loop comes the last
final product. Where a graph has no such chain, the kernel is that of `fragment`.
"""

from __future__ import annotations

from collections.abc import Sequence

from obelisk.ir.block import Phase
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.lower.chains import ELEMENTWISE
from obelisk.lower.cuda.fragment import Fragments
from obelisk.lower.cuda.product import Stage
from obelisk.lower.cuda.values import VIEWS, Text, base_of

BEGINS = (*ELEMENTWISE, *VIEWS, Op.LOAD, Op.SUM, Op.REDUCE_MAX, Op.SIZE, Op.CONST, Op.IOTA)
SUMS = (Op.ACCUM_SUM, Op.ACCUM_RESCALE)
LEAST_SLOTS = 3  # two tiles are read at a time, a third is on its way
SPARE = 32  # registers of a thread for addresses, peaks, sums and what the compiler needs
MOST_REGISTERS = 255
WARPGROUP = 128  # threads


class Ahead(Fragments):
    """Prints one block graph with products, the iterations of its loop overlapped where they can
    be.

    Attributes:
        cut: lines of an iteration that are its early products.
    """

    cut = 0

    def begin(self) -> None:
        early, late = self._chain()
        if not late or not self._has_slots() or not self._has_registers(early, late):
            return
        self.early, self.late = early, late
        for node in early:
            self.value(node, self.c)
        self.cut = len(self.out[Phase.LOOP].lines)

    # ---- where it applies

    def _chain(self) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
        """The products that begin an iteration and those that end it; none where there are others,
        or either kind is missing.
        """
        inside = [p for p in self.products if self.when(p) is Phase.LOOP]
        early = tuple(p for p in inside if self._begins(p))
        late = tuple(p for p in inside if p not in early and self._ends(p, early))
        if not early or not late or len(early) + len(late) < len(inside):
            return (), ()
        return early, late

    def _summed(self, product: Node) -> bool:
        """Whether nothing but an accumulator reads a product, so that it is added in place."""
        readers = self.reads(product)
        if len(self.users[product]) != 1 or product in self.stored or len(readers) != 1:
            return False
        return next(iter(readers)).op in SUMS

    def _inside(self, product: Node) -> set[Node]:
        """All that a product's operands are computed from in an iteration."""
        found: set[Node] = set()
        stack = list(product.inputs)
        while stack:
            node = stack.pop()
            if node not in found and self.when(node) is Phase.LOOP:
                found.add(node)
                stack.extend(node.inputs)
        return found

    def _begins(self, product: Node) -> bool:
        """Whether a product needs loads alone, and what lies before the loop."""
        if self._summed(product) or any(n.op not in BEGINS for n in self._inside(product)):
            return False
        a, b = product.inputs
        k, n = self.axes.of[a][-1], self.axes.of[b][-1]
        return k is not None and n is not None and self.scaled(a, b, k, n) is None

    def _ends(self, product: Node, early: Sequence[Node]) -> bool:
        """Whether a product is summed, of a left operand that comes from an early product and a
        right operand that lies in its tile.
        """
        a, b = product.inputs
        k, n = self.axes.of[a][-1], self.axes.of[b][-1]
        if not self._summed(product) or k is None or n is None:
            return False
        left = base_of(a)
        if left in self.operands or not any(p in self._inside(product) for p in early):
            return False
        if any(p in self._inside(product) for p in self.products if p not in early):
            return False
        found, made = self.scaled(a, b, k, n), self.in_tile(product, self.wide)
        if made is not None:
            return made in self.stages
        if found is not None:
            return self.bounded(a) and base_of(found[0]) in self.stages
        return base_of(b) in self.stages

    def _has_slots(self) -> bool:
        """Whether every group has two iterations at least, and its pipeline a slot to spare."""
        each = -(-self.block.loop // self.groups)
        if each < 2 or not any(s.loop for s in self.stages.values()):
            return False
        return self.buffers >= min(LEAST_SLOTS, each)

    def _has_registers(self, early: Sequence[Node], late: Sequence[Node]) -> bool:
        """Whether results, left operands and sums fit into a thread's registers."""

        def count(node: Node) -> int:
            total = 1
            for a in self.axes.known(node):
                total *= self.c.dim(a).registers
            return total

        need = sum(count(p) + count(p.inputs[0]) // 2 for p in (*early, *late))
        for p in late:  # a scale for each step of depth
            a, b = p.inputs
            k, n = self.axes.of[a][-1], self.axes.of[b][-1]
            if k is not None and n is not None and self.scaled(a, b, k, n) is not None:
                need += self.c.dim(k).registers
        # Registers are given out to whole groups of four warps.
        threads = -(-self.launch_threads() * self.resident // WARPGROUP) * WARPGROUP
        return need + SPARE <= min(self.machine.registers // threads, MOST_REGISTERS)

    # ---- the loop

    def loop(self, t: Text, moving: Sequence[Stage]) -> None:
        """The pipelined loop of a group, its iterations overlapped."""
        if not self.late:
            super().loop(t, moving)
            return
        groups, loop, last = self.groups, self.block.loop, self.buffers - 1
        ring = self._ring()
        t.lines += self.carried.lines
        t.line("int slot = 0, parity = 0;" if self.bulk else "int slot = 0;")
        t.open()
        self._landed(t, f"full + {ring}", "0", self.ahead - 1)
        t.line("const int it = group;")
        self._iteration(t, "0", first=True)
        t.close()
        t.line("#pragma unroll 1")
        t.open(f"for (int now = group; now + {groups} < {loop}; now += {groups})")
        t.line(f"const int following = slot == {last} ? 0 : slot + 1;")
        if self.bulk:
            t.line(f"const unsigned at = {ring} + 8 * slot;")
            t.line("parity ^= following == 0;")
        self._landed(t, f"full + {ring} + 8 * following", "parity", self.ahead - 2)
        if not self.bulk:
            self.refill(t, moving, "now")
        t.line(f"const int it = now + {groups};")
        self._iteration(t, "following", first=False)
        if self.bulk:
            t.line("ob_barrier_leave(empty + at, lane);")
        t.line("slot = following;")
        t.close()
        self._final(t)
        self._settle(t, self.unsettled, 0)

    def _landed(self, t: Text, barrier: str, parity: str, left: int) -> None:
        """Wait for the next tile: at its barrier, or until `left` copies are under way."""
        if self.bulk:
            t.line(f"ob_barrier_wait({barrier}, {parity});")
            return
        t.line(f"ob_copy_wait<{max(0, left)}>();")
        if self.wide:
            t.line("ob_operand_fence();")
        t.line(f"ob_group_barrier<{self.group_threads}>(1 + group);")

    def _iteration(self, t: Text, slot: str, first: bool) -> None:
        """An iteration up to its final product; unless it is the first, around the final product of
        the one before.
        """
        for line in self.split_lines(True):
            t.line(line)
        t.line(f"const unsigned tile = tiles + {slot} * {self.moving};")
        lines = self.out[Phase.LOOP].lines
        inset = "  " * t.depth
        t.lines += [inset + x for x in lines[: self.cut]]
        if not first:
            self._final(t)
        made = [self.known[p, self.c].name for p in self.early]
        self._settle(t, made, 0 if first else len(self.late))
        t.lines += [inset + x for x in lines[self.cut :]]
        if not first:
            self._beside(t)
            self._settle(t, self.unsettled, 0)  # left operands and sums may change from here on
        t.lines += [inset + x for x in self.finish.lines]

    def _final(self, t: Text) -> None:
        """The final products of the iteration whose tile is in the current slot."""
        t.open()
        t.line(f"const unsigned tile = tiles + slot * {self.moving};")
        t.lines += ["  " * t.depth + x for x in self.later.lines]
        t.close()

    def _beside(self, t: Text) -> None:
        """Hold back the wait for the final product until the next one's left operands are made: the
        assembler does not move it up over a branch.
        """
        if not self.wide:
            return
        for name in self.kept:
            t.line(f"ob_wgmma_settle({name});")
        if self.bulk:  # a tile that has landed: this returns at once
            t.line(f"ob_barrier_wait(full + {self._ring()} + 8 * following, parity);")
        else:
            t.line("ob_wgmma_beside();")

    def _ring(self) -> str:
        return f"group * {8 * self.buffers}"

    def _settle(self, t: Text, names: Sequence[str], left: int) -> None:
        """Wait until `left` of the products of four warps are under way; `names` are complete."""
        if not self.wide:
            return
        t.line(f"ob_wgmma_wait_but<{left}>();" if left else "ob_wgmma_wait();")
        for name in names:
            t.line(f"ob_wgmma_settle({name});")
