"""The thread level: chains of elementwise operators and row reductions become thread graphs.

A value that only its chain reads then lives in registers, not in shared memory. Chains are trees
(every inner value has one reader, in the same phase), so fusing can never make a cycle. A chain is
left alone where its estimated registers exceed what a thread of the machine has.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from math import gcd

from obelisk.ir import (
    BlockGraph,
    Graph,
    Kind,
    Node,
    Op,
    ThreadGraph,
    make_graph,
    thread_graph,
    topological,
)
from obelisk.ir import build as b
from obelisk.ir.block import Store, block_graph, ceil_div
from obelisk.ir.node import make
from obelisk.ir.op import BlockAttrs
from obelisk.ir.table import TABLE
from obelisk.machine import Machine

_KINDS = (Kind.UNARY, Kind.BINARY, Kind.TERNARY, Kind.REDUCE)
OVERHEAD = 24  # registers for addresses, loop counters and predicates
VECTOR_BYTES = 16  # one thread's widest access


class Residence(enum.Enum):
    """Where a value lives while a candidate runs."""

    REGISTER = "register"
    SHARED = "shared"
    DEVICE = "device"


def registers(graph: ThreadGraph, threads: int) -> int:
    """Estimated 32-bit registers of one thread: elements it holds times values alive at once, plus
    overhead.
    """
    body = graph.body
    last = {i: n for n, node in enumerate(body) for i in node.inputs}
    for r in graph.results:
        last[r] = len(body)
    alive, most = 0, 0
    held: dict[Node, int] = {}
    for at, node in enumerate(body):
        held[node] = ceil_div(node.elements, threads) if node.rank else 1
        alive += held[node]
        most = max(most, alive)
        for i in set(node.inputs):
            if last.get(i) == at:
                alive -= held[i]
    return most + OVERHEAD


def _fusable(node: Node) -> bool:
    if any(i.op is Op.SIZE and i.dtype is not node.dtype for i in node.inputs):
        return False  # a size adapts to the other operand, an element of a thread would not
    return TABLE[node.op].kind in _KINDS and (
        TABLE[node.op].kind is not Kind.REDUCE or node.attrs.axis == node.inputs[0].rank - 1
    )


def _inner(block: BlockGraph) -> dict[Node, Node]:
    """Values that are kept in registers: each with the one node that reads it."""
    readers: dict[Node, list[Node]] = {}
    for node in block.body:
        for i in node.inputs:
            readers.setdefault(i, []).append(node)
    stored = {s.value for s in block.stores}
    phase = block.info.phase
    out: dict[Node, Node] = {}
    for node, used in readers.items():
        reader = used[0]
        if (
            len(used) == 1
            and node not in stored
            and _fusable(node)
            and _fusable(reader)
            and phase[node] is phase[reader]
        ):
            out[node] = reader
    return out


def with_threads(block: BlockGraph, machine: Machine) -> BlockGraph:
    """The block graph with its chains as thread graphs (the same object where there are none)."""
    inner = _inner(block)
    done: dict[Node, Node] = {}
    for node in block.body:
        if node in inner:
            continue
        tree = _tree(node, inner)
        fused = _fuse(node, tree, done, block.threads, machine) if len(tree) > 1 else None
        if fused is None:
            for n in tree:  # operands before users
                done[n] = _over(n, done)
        else:
            done[node] = fused
    stores = tuple(Store(done[s.value], s.omap, s.fmap, s.reduce, s.dtype) for s in block.stores)
    return block_graph(block.grid, block.loop, block.threads, stores)


def _over(node: Node, done: dict[Node, Node]) -> Node:
    inputs = tuple(done[i] for i in node.inputs)
    return node if inputs == node.inputs else make(node.op, inputs, node.attrs)


def _tree(root: Node, inner: dict[Node, Node]) -> list[Node]:
    """The chain that ends in `root`, operands first."""
    members = {root}
    stack = [root]
    while stack:
        node = stack.pop()
        for i in node.inputs:
            if inner.get(i) is node and i not in members:
                members.add(i)
                stack.append(i)
    return [n for n in topological([root]) if n in members]


def _fuse(
    root: Node, tree: list[Node], done: dict[Node, Node], threads: int, machine: Machine
) -> Node | None:
    """The chain as one thread graph's result, or None where it would need too many registers."""
    operands: list[Node] = []
    local: dict[Node, Node] = {}
    for node in tree:
        args = []
        for i in node.inputs:
            if i not in local:
                if i.op is Op.CONST:
                    local[i] = i
                else:
                    local[i] = b.elem(len(operands), i)
                    operands.append(i)
            args.append(local[i])
        local[node] = make(node.op, tuple(args), node.attrs)
    width = gcd(root.shape[-1], max(1, VECTOR_BYTES * 8 // root.dtype.bits)) if root.rank else 1
    graph = thread_graph((local[root],), width)
    limit = machine.registers_per_thread
    if limit and registers(graph, threads) > limit:
        return None
    return b.run_thread(graph, [done[i] for i in operands])[0]


def fuse_graph(graph: Graph, machine: Machine) -> Graph:
    """A candidate with thread graphs in all its kernels."""
    done: dict[Node, Node] = {}
    for node in topological([*graph.inputs, *graph.outputs]):
        inputs = tuple(done[i] for i in node.inputs)
        attrs = node.attrs
        if node.op is Op.BLOCK:
            attrs = BlockAttrs(with_threads(attrs.block, machine), attrs.result)
        same = inputs == node.inputs and attrs == node.attrs
        done[node] = node if same else make(node.op, inputs, attrs)
    return make_graph(
        graph.inputs,
        [done[o] for o in graph.outputs],
        graph.input_names,
        graph.output_names,
        graph.name,
    )


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """A block's chains: how many are thread graphs, how many were left apart because they need more
    registers than a thread has, and the most registers that a thread graph is estimated to take.
    """

    fused: int
    apart: int
    registers: int


def thread_counts(block: BlockGraph, machine: Machine) -> ThreadCounts:
    """The account of `with_threads` on its own result."""
    graphs = {n.attrs.thread for n in block.body if n.op is Op.THREAD}
    inner = _inner(block)
    apart = 0
    if machine.registers_per_thread:
        apart = sum(n not in inner and len(_tree(n, inner)) > 1 for n in block.body)
    most = max((registers(g, block.threads) for g in graphs), default=0)
    return ThreadCounts(len(graphs), apart, most)


def residences(graph: Graph) -> dict[Node, Residence]:
    """Where every value of a candidate lives: kernels' results in device memory, block values in
    shared memory, values inside thread graphs (and accumulators, which no other block reads) in
    registers.
    """
    out: dict[Node, Residence] = {}
    for node in graph.nodes:
        out[node] = Residence.DEVICE
        if node.op is not Op.BLOCK:
            continue
        for inner in node.attrs.block.body:
            register = inner.op in (Op.ACCUM_SUM, Op.ACCUM_MAX, Op.ACCUM_RESCALE, Op.RUNNING_MAX)
            out[inner] = Residence.REGISTER if register else Residence.SHARED
            if inner.op is Op.THREAD:
                for deep in inner.attrs.thread.body:
                    out[deep] = Residence.REGISTER
    return out
