"""A program's operators as plain numpy or torch calls, one library call per operator.

Takes a kernel graph without graph-defined kernels and gives a function of the library's own arrays:
the baseline for programs that have no hand-written form. It promises the graph's meaning in the
library's own arithmetic, with no checks in between; `MalformedGraph` for a graph-defined kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from obelisk.app.calls import TORCH_NAMES
from obelisk.base.errors import MalformedGraph
from obelisk.ir import TABLE, DType, Graph, Node, Op
from obelisk.ir.table import size_value

Value = Any  # an array of whichever library
Step = Callable[[Sequence[Value]], Value]
_SCALARS = (Op.CONST, Op.SIZE)


def _plan(graph: Graph, step_of: Callable[[Node, list[int]], Step]) -> Callable[..., Value]:
    """A function that runs the operators in order; `step_of` gets a node and operands' places."""
    steps: list[Step] = []
    place = {node: i for i, node in enumerate(graph.inputs)}
    for node in graph.nodes:
        if node.op in (Op.BLOCK, Op.THREAD):
            raise MalformedGraph(f"{graph.name} has graph-defined kernels, not plain operators")
        if node.op is Op.INPUT or node.op in _SCALARS:
            continue
        steps.append(step_of(node, [place.get(i, -1) for i in node.inputs]))
        place[node] = len(place)
    outputs = [place[o] for o in graph.outputs]

    def call(*arrays: Value) -> Value:
        values = list(arrays)
        for step in steps:
            values.append(step(values))
        return values[outputs[0]] if len(outputs) == 1 else tuple(values[o] for o in outputs)

    return call


def _scalar(node: Node) -> float:
    return float(node.attrs.value if node.op is Op.CONST else size_value(node))


def _working_dtype(node: Node) -> DType:
    """The dtype in which a node's scalar operands take part."""
    wide = [i.dtype for i in node.inputs if i.op not in _SCALARS and i.dtype is not DType.BOOL]
    return wide[0] if wide else node.dtype


def _converted(node: Node, args: Sequence[Value], lead: int) -> Value:
    """The table's cast only rounds what the interpreter holds; here the array changes its type."""
    return args[0].astype(node.dtype.numpy)


def as_numpy(graph: Graph) -> Callable[..., Value]:
    """A function of numpy arrays, one per input; gives an array, or a tuple for several outputs."""

    def step_of(node: Node, places: list[int]) -> Step:
        row = TABLE[node.op]
        if node.op is Op.IOTA:
            n = node.shape[node.attrs.axis]
            at = [n if d == node.attrs.axis else 1 for d in range(node.rank)]
            counts = np.broadcast_to(np.arange(n, dtype=np.int32).reshape(at), node.shape)
            return lambda values: counts
        meaning = _converted if node.op is Op.CAST else row.numpy
        if meaning is None:
            raise MalformedGraph(f"{node.op.value} has no numpy form")
        dtype = _working_dtype(node).numpy
        fixed = [np.asarray(_scalar(i), dtype) if i.op in _SCALARS else None for i in node.inputs]

        def step(values: Sequence[Value]) -> Value:
            args = [values[p] if f is None else f for p, f in zip(places, fixed, strict=True)]
            return meaning(node, args, 0)

        return step

    return _plan(graph, step_of)


def as_torch(graph: Graph, torch: Any) -> Callable[..., Value]:
    """A function of torch tensors, one per input; gives a tensor, or a tuple if several outputs."""
    elementwise: dict[Op, Callable[..., Value]] = {
        Op.ADD: operator.add, Op.SUB: operator.sub, Op.MUL: operator.mul, Op.DIV: operator.truediv,
        Op.MAX: torch.maximum, Op.MIN: torch.minimum, Op.NEG: operator.neg, Op.EXP: torch.exp,
        Op.LOG: torch.log, Op.SQRT: torch.sqrt, Op.RSQRT: torch.rsqrt, Op.SQUARE: torch.square,
        Op.TANH: torch.tanh, Op.SIGMOID: torch.sigmoid, Op.ERF: torch.erf, Op.LESS: operator.lt,
        Op.WHERE: torch.where, Op.MATMUL: torch.matmul,
    }  # fmt: skip

    def kind(dtype: DType) -> Any:
        return getattr(torch, TORCH_NAMES[dtype])

    def structural(node: Node) -> Callable[..., Value]:
        at = node.attrs
        match node.op:
            case Op.CAST:
                target = kind(node.dtype)
                return lambda x: x.to(target)
            case Op.SUM | Op.REDUCE_MAX:
                fold = torch.sum if node.op is Op.SUM else torch.amax
                if at.keep == 1:
                    return lambda x: fold(x, at.axis, keepdim=True)
                return lambda x: fold(x.unflatten(at.axis, (-1, at.keep)), at.axis)
            case Op.RESHAPE:
                return lambda x: x.reshape(at.shape)
            case Op.TRANSPOSE:
                return lambda x: x.permute(at.perm)
            case Op.BROADCAST:
                return lambda x: x.expand(at.shape)
            case Op.SLICE:
                return lambda x: x.narrow(at.axis, at.start, at.stop - at.start)
            case Op.CONCAT:
                return lambda *xs: torch.cat(xs, at.axis)
            case Op.IOTA:
                n = at.shape[at.axis]
                line = torch.arange(n, dtype=torch.int32)
                spread = line.reshape([n if d == at.axis else 1 for d in range(node.rank)])
                return lambda: spread.expand(at.shape)
        raise MalformedGraph(f"{node.op.value} has no torch form")

    def step_of(node: Node, places: list[int]) -> Step:
        call = elementwise.get(node.op) or structural(node)
        dtype = kind(_working_dtype(node))
        fixed = [
            torch.tensor(_scalar(i), dtype=dtype) if i.op in _SCALARS else None for i in node.inputs
        ]
        return lambda values: call(
            *(values[p] if f is None else f for p, f in zip(places, fixed, strict=True))
        )

    return _plan(graph, step_of)
