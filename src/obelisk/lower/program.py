"""Kernel graph -> `TileProgram`: every launch scheduled, views folded into strides, intermediates
placed in scratch.

Takes a `Graph` and the target's `Rules`; gives the whole program in execution order. Predefined
operators run as their default block graphs; a result that is a graph output is written in place;
views move no element unless they have no strides (then one copy). Launches of one block on tensors
that lie the same way share one kernel.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from obelisk.base.digest import digest
from obelisk.ir.block import BlockGraph, Reduce
from obelisk.ir.dtype import DType
from obelisk.ir.graph import VIEWS, Graph, Launch
from obelisk.ir.node import Node, Shape
from obelisk.ir.op import Op
from obelisk.ir.table import size_value
from obelisk.lower import default
from obelisk.lower.memory import Life, plan
from obelisk.lower.schedule import Operand, Rules, compute_type, schedule, with_plan
from obelisk.lower.tile import (
    Access,
    Binding,
    Buffer,
    BufferKind,
    Call,
    Chain,
    Extent,
    Kernel,
    Scalar,
    Tensor,
    TensorKind,
    TileProgram,
    View,
    Write,
    private,
)
from obelisk.lower.views import row_major, structural


class _Program:
    """Builds the program of one graph."""

    def __init__(self, graph: Graph, rules: Rules, cores: int) -> None:
        self.graph, self.rules, self.cores = graph, rules, cores
        self.tensors: list[Tensor] = []
        self.kernels: list[Kernel] = []
        self.numbers: dict[object, int] = {}
        self.calls: list[Call] = []
        self.views: dict[Node, View] = {}
        self.output_of: dict[Node, int] = {}

    def tensor(self, kind: TensorKind, dtype: DType, elements: int, index: int = 0) -> int:
        compute_type(dtype)  # refuses what cannot be addressed
        self.tensors.append(Tensor(kind, dtype, elements, index))
        return len(self.tensors) - 1

    def dense(self, number: int, shape: Shape) -> View:
        return View(number, tuple(Extent(n) for n in shape), row_major(shape))

    def result(self, node: Node) -> View:
        """Memory for a launch's result: the output's own where it is one."""
        if node in self.output_of:
            number = self.tensor(TensorKind.OUTPUT, node.dtype, node.elements, self.output_of[node])
        else:
            number = self.tensor(TensorKind.SCRATCH, node.dtype, node.elements)
        return self.dense(number, node.shape)

    def operand(self, node: Node) -> View:
        """Where a kernel-level value lies; views are resolved, constants and counts are written out
        once.
        """
        if node in self.views:
            return self.views[node]
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self.views:
                stack.pop()
            elif top.op in VIEWS:
                source = top.inputs[0]
                if source not in self.views:
                    stack.append(source)
                    continue
                view = structural(self.views[source], top.attrs)
                if view is None:
                    view = structural(self.copied(source), top.attrs)
                assert view is not None
                self.views[top] = view
            else:
                assert top.op in (Op.CONST, Op.SIZE, Op.IOTA), top
                self.views[top] = self.fill(top)
        return self.views[node]

    def fill(self, node: Node) -> View:
        """A constant, a size or counts, as a tensor."""
        target = self.dense(self.tensor(TensorKind.SCRATCH, node.dtype, node.elements), node.shape)
        dims = target.shape or (Extent(1),)
        strides = target.strides or (0,)
        match node.op:
            case Op.IOTA:
                scalar = Scalar(Op.IOTA, (), node.dtype, node.attrs.axis)
            case Op.SIZE:
                scalar = Scalar(Op.CONST, (), node.dtype, 0, float(size_value(node)))
            case _:
                scalar = Scalar(Op.CONST, (), node.dtype, 0, node.attrs.value)
        write = Write(0, Access(0, strides, 0, (0, 0)))
        chain = Chain(dims, (), (scalar,), (write,), None, len(dims) - 1)
        buffer = Buffer("r0", BufferKind.RESULT, node.dtype)
        kernel = with_plan(Kernel((1,), 1, (buffer,), (), (chain,), ()), self.rules.arena_limit)
        self.call(kernel, (), (Binding(target.buffer),), node.op.value)
        return target

    def copied(self, node: Node, target: View | None = None) -> View:
        """A dense copy of a value."""
        to = target or self.dense(
            self.tensor(TensorKind.SCRATCH, node.dtype, node.elements), node.shape
        )
        made = default.copy(node, self.cores)
        self.launch(made.block, made.inputs, [to], "copy")
        return to

    def call(
        self, kernel: Kernel, params: tuple[Binding, ...], results: tuple[Binding, ...], origin: str
    ) -> None:
        if kernel not in self.numbers:
            self.numbers[kernel] = len(self.kernels)
            self.kernels.append(kernel)
        self.calls.append(Call(self.numbers[kernel], params, results, origin))

    def launch(
        self, block: BlockGraph, inputs: tuple[Node, ...], results: list[View], origin: str
    ) -> None:
        """Schedule a block graph and call it; stores that reduce get a second kernel."""
        views = [self.operand(x) for x in inputs]
        params = tuple(Operand(x.dtype, v.strides) for x, v in zip(inputs, views, strict=True))
        targets: list[View] = []
        lay: list[Operand] = []
        folds: list[tuple[int, View, View]] = []
        for j, (store, shape) in enumerate(zip(block.stores, block.info.shapes, strict=True)):
            parts = prod(g for g, d in zip(block.grid, store.omap, strict=True) if d is None)
            if store.reduce is Reduce.NONE or parts == 1:
                targets.append(results[j])
                lay.append(Operand(store.dtype, row_major(shape)))
                continue
            wide = store.value.dtype.accumulator if store.dtype.is_float else DType.I32
            number = self.tensor(TensorKind.SCRATCH, wide, parts * prod(shape))
            partial = self.dense(number, (parts, *shape))
            targets.append(partial)
            lay.append(Operand(wide, row_major(shape)))
            folds.append((j, partial, results[j]))
        key = (block, params, tuple(lay))
        if key not in self.numbers:
            kernel = schedule(block, params, lay, self.rules)
            self.numbers.setdefault(kernel, len(self.kernels))
            self.numbers[key] = self.numbers[kernel]
            if self.numbers[kernel] == len(self.kernels):
                self.kernels.append(kernel)
        self.calls.append(
            Call(
                self.numbers[key],
                tuple(Binding(v.buffer, v.offset) for v in views),
                tuple(Binding(t.buffer) for t in targets),
                origin,
            )
        )
        for j, partial, target in folds:
            self.combine(block.stores[j].reduce, partial, target)

    def combine(self, reduce: Reduce, partial: View, target: View) -> None:
        """target = sum or maximum of the parts along the first dim of `partial`."""
        from obelisk.ir import build

        wide = self.tensors[partial.buffer].dtype
        x = build.input_node(0, partial.sizes, wide)
        fold = build.sum(x, 0) if reduce is Reduce.SUM else build.reduce_max(x, 0)
        made = default.reduction(fold, self.cores)
        strides = (0, *target.strides)
        lay = (Operand(self.tensors[target.buffer].dtype, strides),)
        key = (made.block, (Operand(wide, partial.strides),), lay)
        if key not in self.numbers:
            kernel = schedule(made.block, key[1], lay, self.rules)
            self.numbers.setdefault(kernel, len(self.kernels))
            self.numbers[key] = self.numbers[kernel]
            if self.numbers[kernel] == len(self.kernels):
                self.kernels.append(kernel)
        self.calls.append(
            Call(
                self.numbers[key], (Binding(partial.buffer),), (Binding(target.buffer),), "combine"
            )
        )

    def run_launch(self, launch: Launch) -> None:
        if launch.block is not None:
            results: dict[int, View] = {}
            for node in launch.results:
                self.views[node] = results[node.attrs.result] = self.result(node)
            for j, (store, shape) in enumerate(
                zip(launch.block.stores, launch.block.info.shapes, strict=True)
            ):
                if j not in results:  # computed, but nobody asked for it
                    number = self.tensor(TensorKind.SCRATCH, store.dtype, prod(shape))
                    results[j] = self.dense(number, shape)
            block, inputs = launch.block, launch.inputs
            origin = f"block {block.digest[:8]}"
            self.launch(block, inputs, [results[j] for j in range(len(block.stores))], origin)
            return
        made = default.default_block(launch.node, self.cores)
        view = self.views[launch.node] = self.result(launch.node)
        self.launch(made.block, made.inputs, [view], launch.node.op.value)

    def run(self) -> TileProgram:
        graph = self.graph
        for j, node in enumerate(graph.outputs):
            if node.op not in VIEWS and node.op not in (Op.INPUT, Op.CONST, Op.SIZE, Op.IOTA):
                self.output_of.setdefault(node, j)
        for node in graph.inputs:
            number = self.tensor(TensorKind.INPUT, node.dtype, node.elements, node.attrs.index)
            strides = node.attrs.strides or row_major(node.shape)
            self.views[node] = replace(self.dense(number, node.shape), strides=strides)
        for launch in graph.launches():
            self.run_launch(launch)
        for j, node in enumerate(graph.outputs):
            if self.output_of.get(node) != j:
                self.operand(node)
                number = self.tensor(TensorKind.OUTPUT, node.dtype, node.elements, j)
                self.copied(node, self.dense(number, node.shape))
        return self.finish()

    def finish(self) -> TileProgram:
        """Place scratch tensors by lifetime."""
        program = TileProgram(
            self.graph.name, "", tuple(self.tensors), tuple(self.kernels), tuple(self.calls), 0, 0
        )
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for t, call in enumerate(self.calls):
            for binding in (*call.params, *call.results):
                first.setdefault(binding.tensor, t)
                last[binding.tensor] = max(last.get(binding.tensor, t), t)
            if self.rules.pairs and t + 1 < len(self.calls) and private(program, t):
                for binding in call.params:
                    last[binding.tensor] = t + 1
        scratch = [
            i for i, t in enumerate(self.tensors) if t.kind is TensorKind.SCRATCH and i in first
        ]
        packed = plan([Life(self.tensors[i].nbytes, first[i], last[i]) for i in scratch])
        tensors = list(self.tensors)
        for i, offset in zip(scratch, packed.offsets, strict=True):
            tensors[i] = replace(tensors[i], offset=offset)
        program = replace(
            program, tensors=tuple(tensors), scratch=packed.total, scratch_bound=packed.bound
        )
        return replace(program, digest=digest("tile", repr(replace(program, name=""))))


def tile_program(graph: Graph, rules: Rules, cores: int) -> TileProgram:
    """The scheduled program of a graph. Raises `Infeasible` naming the limit broken."""
    return _Program(graph, rules, cores).run()
