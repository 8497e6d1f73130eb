"""What a block does, counted once for all machines: which values are computed how often, and how
much
arithmetic.

Takes a block graph; gives a `Work`. Nothing here knows a machine: the models in `cpu.py` and
`gpu.py` weigh it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from obelisk.ir.block import BlockGraph, Phase
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.ir.table import TABLE, Kind
from obelisk.machine.footprint import CLOSING, ELEMENTWISE, SCALARS, lifetimes

_TAKES_REGISTERS = ELEMENTWISE | {Kind.REDUCE, Kind.LOOP}
SPECIAL = frozenset({Op.EXP, Op.LOG, Op.SQRT, Op.RSQRT, Op.TANH, Op.SIGMOID, Op.ERF, Op.DIV})


@dataclass(frozen=True, slots=True)
class Step:
    """One value of a block.

    Attributes:
        node: the value.
        times: how often a block computes it.
        fused: its single reader takes it from registers, so it costs no storage traffic.
    """

    node: Node
    times: int
    fused: bool


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one block.

    Attributes:
        steps: values that cost something, operands first.
        iterations: loop iterations.
        barriers: values of the loop that are stored in fast memory (each costs a synchronisation of
            the threads).
        matmul_flops, vector_flops, special_ops: arithmetic of one block, tiles counted full.
        tile_bytes: bytes that one iteration loads.
    """

    steps: tuple[Step, ...]
    iterations: int
    barriers: int
    matmul_flops: float
    vector_flops: float
    special_ops: float
    tile_bytes: int


def matmul_shape(node: Node) -> tuple[int, int, int, int]:
    """Batch, m, n and k of a product."""
    shape = node.shape
    return prod(shape[:-2]), shape[-2], shape[-1], node.inputs[0].shape[-1]


def arithmetic(node: Node) -> tuple[float, float, float]:
    """Products' flops, other flops, and special functions of one evaluation of a node."""
    op = node.op
    if op is Op.MATMUL:
        b, m, n, k = matmul_shape(node)
        return 2.0 * b * m * n * k, 0.0, 0.0
    if op is Op.THREAD:
        if node.attrs.result:
            return 0.0, 0.0, 0.0  # the graph's first result carries its cost
        inner = [arithmetic(n) for n in node.attrs.thread.body]
        return sum(i[0] for i in inner), sum(i[1] for i in inner), sum(i[2] for i in inner)
    row = TABLE[op]
    elements = node.inputs[0].elements if row.kind is Kind.REDUCE else node.elements
    special = float(elements) if op in SPECIAL else 0.0
    if op is Op.ACCUM_RESCALE:
        special = float(node.inputs[1].elements)
    return 0.0, row.flops * elements, special


def _consumed(node: Node, readers: list[Node]) -> bool:
    """Whether a value can go from registers into its one reader."""
    if len(readers) != 1:
        return False
    reader = readers[0].op
    if node.op is Op.MATMUL:
        return reader is Op.ACCUM_SUM
    if TABLE[node.op].kind not in ELEMENTWISE:
        return False
    return TABLE[reader].kind in _TAKES_REGISTERS or reader is Op.THREAD


@lru_cache(maxsize=8192)
def work(block: BlockGraph) -> Work:
    """Count a block's work (bounded cache by block)."""
    phase, life = block.info.phase, lifetimes(block)
    steps = []
    barriers = tile_bytes = 0
    products = vectors = specials = 0.0
    for node, readers in life.readers.items():
        op = node.op
        if op is Op.LOAD:
            tile_bytes += node.nbytes
            continue
        if op in SCALARS:
            continue
        closes = op in CLOSING
        looped = phase[node] is Phase.LOOP or closes
        times = block.loop if looped else 1
        fused = node not in life.stored and _consumed(node, readers)
        steps.append(Step(node, times, fused))
        if looped and not fused and not closes:
            barriers += 1
        product, vector, special = arithmetic(node)
        products += product * times
        vectors += vector * times
        specials += special * times
    return Work(tuple(steps), block.loop, barriers, products, vectors, specials, tile_bytes)
