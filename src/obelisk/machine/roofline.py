"""The floor of a program: no implementation on this machine can be faster.

Takes a `Graph` and a `Machine`; gives seconds. Every input is read once and every output written
once at the nominal bandwidth, and products run at peak on whole tensors; nothing else costs
anything.
"""

from __future__ import annotations

from obelisk.ir.block import BlockGraph
from obelisk.ir.graph import Graph
from obelisk.ir.node import Node, topological
from obelisk.ir.op import Op
from obelisk.machine.description import Machine
from obelisk.machine.work import arithmetic, work


def roofline(graph: Graph, machine: Machine) -> float:
    """Floor seconds of `graph`: the larger of bytes over bandwidth and of flops over peak."""
    read = {n for n in graph.inputs if n in set(topological(graph.outputs))}
    moved = sum(n.nbytes for n in read) + sum(o.nbytes for o in dict.fromkeys(graph.outputs))
    busy = 0.0
    for launch in graph.launches():
        busy += _busy(launch.node, machine)
    return max(moved / machine.nominal_bandwidth, busy)


def _busy(node: Node, machine: Machine) -> float:
    """Seconds at peak; a block's products count once, on whole tensors."""
    if node.op is not Op.BLOCK:
        product, other, _ = arithmetic(node)
        return product / machine.peak(node.dtype) + other / machine.vector_flops
    block: BlockGraph = node.attrs.block
    busy = 0.0
    for step in work(block).steps:
        product, _, _ = arithmetic(step.node)
        busy += product * step.times * block.blocks / machine.peak(step.node.dtype)
    return busy
