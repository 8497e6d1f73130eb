"""The rules of each level as data, and the check that a graph meets them before a stage takes it.

Takes a `Graph` from anywhere (built, parsed, rewritten by a search); re-derives every shape, dtype
and map and compares them with what the nodes carry. Promises that a graph that passes can be
interpreted and lowered without a further check of its form.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from obelisk.base.errors import MalformedGraph, UserError
from obelisk.ir.block import GRID_AXES, BlockGraph, analyse
from obelisk.ir.graph import Graph
from obelisk.ir.node import Node, topological
from obelisk.ir.op import Op
from obelisk.ir.table import infer
from obelisk.ir.thread import REGISTER_OPS, ThreadGraph


class Level(enum.Enum):
    """Where a node stands."""

    KERNEL = "kernel"
    BLOCK = "block"
    THREAD = "thread"


_LOOP_OPS = frozenset({Op.ACCUM_SUM, Op.ACCUM_MAX, Op.RUNNING_MAX, Op.ACCUM_RESCALE})


@dataclass(frozen=True, slots=True)
class Rules:
    """What a level allows: its operators, and the leaf through which it reads the level above."""

    ops: frozenset[Op]
    leaf: Op


_EVERYWHERE = frozenset(Op) - _LOOP_OPS - {Op.INPUT, Op.LOAD, Op.ELEM, Op.BLOCK, Op.THREAD}
LEVELS: Mapping[Level, Rules] = {
    Level.KERNEL: Rules(_EVERYWHERE | {Op.INPUT, Op.BLOCK}, Op.INPUT),
    Level.BLOCK: Rules(_EVERYWHERE | _LOOP_OPS | {Op.LOAD, Op.THREAD}, Op.LOAD),
    Level.THREAD: Rules(REGISTER_OPS, Op.ELEM),
}


def check_graph(graph: Graph) -> Graph:
    """`graph` itself when it is well formed at all three levels; else raises `MalformedGraph` that
    names level, operator and reason.
    """
    for i, node in enumerate(graph.inputs):
        if node.op is not Op.INPUT or node.attrs.index != i:
            raise MalformedGraph(f"{graph.name}: input {i} is {node!r}, not input node {i}")
    declared = set(graph.inputs)
    body = topological([*graph.inputs, *graph.outputs])
    for node in body:
        if node.op is Op.INPUT and node not in declared:
            raise MalformedGraph(f"{graph.name}: input {node.attrs.index} is read, not declared")
    if not graph.outputs:
        raise MalformedGraph(f"{graph.name}: a graph needs an output")
    if len(graph.input_names) != len(graph.inputs) or len(graph.output_names) != len(graph.outputs):
        raise MalformedGraph(f"{graph.name}: as many names as inputs and outputs are needed")
    _check_nodes(body, Level.KERNEL, graph.name)
    seen: set[BlockGraph] = set()
    for node in body:
        if node.op is Op.BLOCK and node.attrs.block not in seen:
            seen.add(node.attrs.block)
            _check_block(node.attrs.block, f"{graph.name}, block {len(seen) - 1}")
    return graph


def _check_nodes(nodes: Iterable[Node], level: Level, where: str) -> None:
    """Allowed operators, and shapes and dtypes equal to what the operator table derives."""
    for node in nodes:
        if node.op not in LEVELS[level].ops:
            raise MalformedGraph(f"{where}: {node.op.value} cannot occur at {level.value} level")
        try:
            shape, dtype = infer(node.op, node.inputs, node.attrs)
        except UserError as e:
            raise MalformedGraph(f"{where}: {node.op.value}: {e}") from None
        if shape != node.shape or dtype is not node.dtype:
            raise MalformedGraph(
                f"{where}: {node!r} should be {dtype}{list(shape)} by the operator table"
            )


def _check_block(block: BlockGraph, where: str) -> None:
    if not 1 <= len(block.grid) <= GRID_AXES or min(block.grid) < 1:
        raise MalformedGraph(f"{where}: grid {block.grid}; one to three axes of at least 1")
    if block.loop < 1 or block.threads < 1:
        raise MalformedGraph(f"{where}: loop {block.loop} and threads {block.threads}")
    _check_nodes(block.body, Level.BLOCK, where)
    try:
        info = analyse(block.grid, block.loop, block.stores)
    except UserError as e:
        raise MalformedGraph(f"{where}: {e}") from None
    if info.shapes != block.info.shapes or info.params != block.info.params:
        raise MalformedGraph(f"{where}: its recorded analysis does not match its body")
    threads: dict[ThreadGraph, None] = {}
    for node in block.body:
        if node.op is Op.THREAD:
            threads.setdefault(node.attrs.thread)
    for i, thread in enumerate(threads):
        if thread.vector < 1 or not thread.results:
            raise MalformedGraph(f"{where}, thread graph {i}: needs results and a vector width")
        _check_nodes(thread.body, Level.THREAD, f"{where}, thread graph {i}")
