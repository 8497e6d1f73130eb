"""The search against plain enumeration on tiny spaces: pruning and the bank lose nothing.

`search_brute` forms every kernel up to a number of operators and finds by running them which ones
compute the program. For each schedule in which it finds any, the search must have found one, too,
of no more weight. Nothing is left out: not kernels that cancel (multiply by what they divide by),
nor reciprocals, nor accumulators of tiles that are summed after the loop.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.search_brute import INVARIANT, LOOP, Enumerator, Kernel

from obelisk.ir import Graph, KernelGraph, Node, Op
from obelisk.machine import find
from obelisk.search.axes import Segment
from obelisk.search.partition import Partition
from obelisk.search.program import Program
from obelisk.search.skeleton import extract
from obelisk.search.synth import Synthesis
from obelisk.search.value import Counts, Mode, Schedule, Stage

M, K, N, J = 2, 4, 6, 8


def build(make: Callable[[KernelGraph], Node]) -> Graph:
    g = KernelGraph()
    g.output(make(g))
    return g.freeze()


def chain(g: KernelGraph) -> Node:
    x, a, b = g.input((M, K)), g.input((K, J)), g.input((J, N))
    return g.matmul(g.matmul(x, a), b)


def row_norm(g: KernelGraph) -> Node:
    x, w = g.input((M, K)), g.input((K, N))
    return g.matmul(g.div(x, g.sum(x, 1)), w)


def softmax(g: KernelGraph) -> Node:
    e = g.exp(g.input((M, K)))
    return g.div(e, g.sum(e, 1))


def attention(g: KernelGraph) -> Node:
    s, v = g.input((M, K)), g.input((K, N))
    e = g.exp(s)
    return g.matmul(g.div(e, g.sum(e, 1)), v)


def low_rank(g: KernelGraph) -> Node:
    x, a, b, w = g.input((M, K)), g.input((K, J)), g.input((J, N)), g.input((K, N))
    return g.add(g.matmul(g.matmul(x, a), b), g.matmul(x, w))


def relu(g: KernelGraph) -> Node:
    x, w = g.input((M, K)), g.input((K, N))
    return g.maximum(g.matmul(x, w), 0.0)


def length(g: KernelGraph) -> Node:
    return g.sqrt(g.sum(g.square(g.input((M, K))), 1))


def difference(g: KernelGraph) -> Node:
    x, y, w = g.input((M, K)), g.input((M, K)), g.input((K, N))
    return g.matmul(g.sub(x, y), w)


def scaled(g: KernelGraph) -> Node:
    x, c, w = g.input((M, K)), g.input((1, K)), g.input((K, N))
    return g.matmul(g.mul(x, c), w)


def row_scaled(g: KernelGraph) -> Node:
    x, r, w = g.input((M, K)), g.input((M, 1)), g.input((K, N))
    return g.mul(g.matmul(x, w), r)


def total(g: KernelGraph) -> Node:
    x, y = g.input((M, K)), g.input((M, K))
    return g.sum(g.add(x, y), 1)


# (program, operators under most schedules, operators where the loop cuts a reduced axis)
CASES: list[tuple[Callable[[KernelGraph], Node], int, int]] = [
    (chain, 4, 4),
    (row_norm, 4, 5),
    (softmax, 4, 4),
    (attention, 4, 4),
    (low_rank, 4, 4),
    (relu, 3, 3),
    (length, 4, 5),
    (difference, 3, 4),
    (scaled, 4, 4),
    (row_scaled, 4, 4),
    (total, 4, 4),
]


def segment_of(program: Graph) -> Segment:
    partition = Partition(program, find("cpu"), 16)
    whole = partition.interval(0, len(partition.order))
    assert whole is not None
    assert whole.segment is not None
    return whole.segment


def weight(kernel: Kernel, synthesis: Synthesis) -> float:
    """The search's own measure of a kernel: elements touched, dearer operators counted more, loads
    half, a division by a value of fewer axes as a reciprocal and a product.
    """
    stages = {INVARIANT: Stage.INVARIANT, LOOP: Stage.LOOP}
    total = 0.0
    used = {i for t in kernel.steps[kernel.leaves :] for i in _operands(t.step)}
    for i, tile in enumerate(kernel.steps):
        stage = stages.get(tile.stage, Stage.POST)
        name = tile.step[0]
        if name == "load":
            total += 0.5 * synthesis.weigher.work(tile.dims, None, stage) if i in used else 0.0
        elif name is Op.SUM or name == "accum_sum":
            before = kernel.steps[tile.step[1]]
            total += synthesis.weigher.work(before.dims, None, stages.get(before.stage, Stage.POST))
        elif name not in ("const", "one"):
            last = kernel.steps[tile.step[-1]].dims
            axis = kernel.steps[tile.step[1]].dims[-1] if name is Op.MATMUL else None
            total += synthesis.weigher.weight(name, tile.dims, last, axis, stage)
    return total


def _operands(step: tuple[object, ...]) -> tuple[object, ...]:
    return step[1:2] if step[0] is Op.SUM else step[1:]


def compare(
    make: Callable[[KernelGraph], Node], plain: int, reduced: int, values: int = 600
) -> int:
    """Check every loop axis and none; how many schedules have a kernel."""
    program = build(make)
    segment = segment_of(program)
    matched = 0
    for loop in (None, *range(len(segment.extents))):
        synthesis = Synthesis(
            Program(segment, 0),
            Schedule(loop),
            Counts(),
            most_values=values,
            most_ops=40,
            online=False,
            mode=Mode(),
            stop=lambda: False,
        )
        synthesis.run()
        skeleton = extract(synthesis)
        enumerator = Enumerator(program, segment, loop)
        most = reduced if loop in segment.reduced else plain
        weights = (weight(k, synthesis) for k in enumerator.kernels(most))
        cheapest = min(weights, default=float("inf"))
        if cheapest < float("inf"):
            assert skeleton is not None, f"loop {loop}: a kernel of weight {cheapest} is missed"
            assert skeleton.cost <= cheapest * (1 + 1e-9), f"loop {loop}"
            matched += 1
    return matched


@pytest.mark.parametrize(("make", "plain", "reduced"), CASES, ids=[c[0].__name__ for c in CASES])
def test_every_kernel_of_plain_enumeration_is_matched_at_no_more_weight(
    make: Callable[[KernelGraph], Node], plain: int, reduced: int
) -> None:
    """For every loop axis and for none."""
    assert compare(make, plain, reduced) >= 2


def test_the_comparison_notices_a_search_that_loses_kernels() -> None:
    """With a bank of seven values the search misses what enumeration finds, and is told so."""
    with pytest.raises(AssertionError, match="loop"):
        compare(low_rank, 4, 4, values=7)
