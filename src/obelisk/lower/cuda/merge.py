"""Groups of warps that shared a loop's iterations join their accumulators through shared memory.

Takes the accumulators that `values` printed; appends CUDA C++ that leaves the joined ones in the
groups that do what comes after the loop, each for its part of the columns.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from obelisk.ir.block import Phase
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.lower.cuda.layout import Layout
from obelisk.lower.cuda.remade import Remade
from obelisk.lower.cuda.values import ACCUMULATORS, State, Text, Value, base_of


class Joined(Remade):
    """Prints what joins the groups.

    Attributes:
        fixed: bytes of shared memory in front of what the groups exchange.
        sharers: groups that do what comes after the loop; `after`: the layout they do it in.
    """

    fixed: int
    after: Layout
    sharers: int

    def exchange_elements(self) -> int:
        return sum(
            prod(self.layouts_of(s).dim(a).registers for a in s.value.axes) for s in self.states
        )

    def layouts_of(self, s: State) -> Layout:
        return self.layouts.get(s.value.name, self.c)

    def share(self) -> None:
        """How many groups do what comes after the loop, each for its part of the columns; 1 where a
        product or a fold needs whole rows there.
        """
        self.after, self.sharers = self.c, 1
        if self.groups == 1:
            return
        post = [n for n in self.block.body if self.when(n) is Phase.POST]
        if any(n.op in (Op.MATMUL, Op.SUM, Op.REDUCE_MAX) for n in post):
            return
        if any(n in self.operands for n in self._stored_late()):
            return  # fragments of a tile come in whole rows
        columns = {
            a for n in post if n.op in ACCUMULATORS for a in self.axes.known(n) if a != self.m
        }
        columns |= {
            a
            for s in self.block.stores
            if self.when(base_of(s.value)) is Phase.POST
            for a in self.axes.known(s.value)
            if a != self.m
        }
        n = self.groups
        while n > 1 and any(self.c.dim(a).registers % (2 * n) for a in columns):
            n -= 1
        if n == 1 or not columns:
            return
        dims = dict(self.c.dims)
        for a in dims:
            if a == self.m:
                continue
            d = dims[a] = replace(dims[a], lead=f"{dims[a].lead} && group == 0")
            if a in columns:
                part = d.registers // n
                index = d.index.replace("{r}", f"({{r}} + group * {part})")
                dims[a] = replace(d, registers=part, index=index)
        self.sharers = n
        self.after = Layout("after", dims, self.c.order)

    def _stored_late(self) -> set[Node]:
        """What stores after the loop are made of, down to loads and accumulators."""
        stack = [s.value for s in self.block.stores if self.when(base_of(s.value)) is Phase.POST]
        seen: set[Node] = set()
        while stack:
            node = base_of(stack.pop())
            if node not in seen:
                seen.add(node)
                stack += () if node.op in ACCUMULATORS else node.inputs
        return seen

    def accumulator(self, node: Node, layout: Layout) -> Value:
        """After the loop each sharing group has its part of an accumulator, joined by `merge`."""
        if layout is self.c or self.sharers == 1:
            return super().accumulator(node, layout)
        self.value(node, self.c)
        axes = layout.sorted(self.axes.known(node))
        return Value(self.name("all"), axes, "f")

    def merge(self, text: Text) -> None:
        """Join the groups' accumulators in the sharing groups."""
        total, gt, groups = self.exchange_elements(), self.group_threads, self.groups
        text.line("__syncthreads();")
        text.line(f"float *const exchange = (float *)(base + {self.fixed});")
        places: dict[str, int] = {}
        at = 0
        for s in self.states:
            places[s.value.name] = at
            at += prod(self.layouts_of(s).dim(a).registers for a in s.value.axes)

        def cell(s: State, group: str, layout: Layout) -> str:
            flat, size = [], 1
            for a in reversed(s.value.axes):
                r = f"r{a}"
                if layout.dim(a).registers != self.layouts_of(s).dim(a).registers:
                    r = f"(r{a} + group * {layout.dim(a).registers})"
                flat.append(f"{r} * {size}" if size > 1 else r)
                size *= self.layouts_of(s).dim(a).registers
            index = " + ".join([str(places[s.value.name]), *flat])
            return f"exchange[(({group}) * {total} + {index}) * {gt} + member]"

        for s in self.states:
            self.nest(text, s.value.axes, self.layouts_of(s))
            text.line(f"{cell(s, 'group', self.layouts_of(s))} = {self.at(s.value)};")
            self.unnest(text, s.value.axes)
        text.line("__syncthreads();")
        if self.sharers == 1:
            text.open("if (group == 0)")
        for s in self.states:
            if s.op is not Op.RUNNING_MAX:
                continue
            self.nest(text, s.value.axes, self.c)
            text.line("#pragma unroll")
            text.line(
                f"for (int other = 0; other < {groups}; other++) {self.at(s.value)} = "
                f"fmaxf({self.at(s.value)}, {cell(s, 'other', self.c)});"
            )
            self.unnest(text, s.value.axes)
        for s in self.states:
            if s.op is Op.RUNNING_MAX:
                continue
            layout = self.after if self.layouts_of(s) is self.c else self.layouts_of(s)
            made = self.known.get((self.owners[s.value.name], layout))
            if made is None:
                continue
            if made.name != s.value.name:
                self.declare(text, made, layout)
            op = Op.ACCUM_MAX if s.op is Op.ACCUM_MAX else Op.ACCUM_SUM
            self.nest(text, made.axes, layout)
            text.line(f"float all = {self.neutral(op, 'f')};")
            text.line("#pragma unroll")
            text.open(f"for (int other = 0; other < {groups}; other++)")
            item = cell(s, "other", layout)
            if s.peak is not None:
                peak = next(t for t in self.states if t.value.name == s.peak.name)
                item += f" * ob_decay({cell(peak, 'other', self.c)}, {self.at(s.peak)})"
            text.line(f"all = {self.join(op, 'f', 'all', item)};")
            text.close()
            text.line(f"{self.at(made)} = all;")
            self.unnest(text, made.axes)
        if self.sharers == 1:
            text.close()
