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
from obelisk.machine.description import Machine, MachineKind
from obelisk.machine.traffic import INPUT_SHARE
from obelisk.machine.work import arithmetic, work


def roofline(graph: Graph, machine: Machine) -> float:
    """Floor seconds of `graph`: the larger of bytes over bandwidth and of flops over peak.

    A CPU's inputs that stay in the last cache between calls (see `estimate`) move at its rate.
    """
    used = set(topological(graph.outputs))
    size = sum(n.nbytes for n in graph.inputs)
    moved = sum(n.nbytes for n in graph.inputs if n in used)
    moved += sum(o.nbytes for o in dict.fromkeys(graph.outputs))
    rate = machine.nominal_bandwidth
    if machine.kind is MachineKind.CPU and size <= machine.last_cache * INPUT_SHARE:
        rate = max(rate, machine.caches[-1].bandwidth * machine.cores)
    busy = 0.0
    for launch in graph.launches():
        busy += _busy(launch.node, machine)
    return max(moved / rate, busy)


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
