"""Large programs: cut, searched part by part, put together again, and right as a whole."""

from __future__ import annotations

from tests.search_programs import Shape, attention_block, decoder

from obelisk.ir import DType, Graph, Op
from obelisk.lower.schedule import flatten
from obelisk.machine import find
from obelisk.search import Budget, Space, search
from obelisk.search.partition import Partition
from obelisk.verify import verify

CPU = find("cpu")


def operators(program: Graph) -> int:
    return len(Partition(program, CPU, 1).order)


def test_a_decoder_layer_is_searched_in_seconds_and_verified_whole() -> None:
    """Norms, projections, rope, grouped causal attention, residuals and a gated MLP at the extents
    of a model of a billion weights, on a GPU: a third of the launches, the norm with all three
    projections in one, and accepted by the judges as one program.
    """
    program = decoder(1, Shape(24, 2048, 32, 8, 64, 8192, DType.F16))
    assert operators(program) > 60
    space = Space(window=12)
    result = search(program, find("h200"), workers=1, space=space, budget=Budget(seconds=200))
    assert result.stats.stopped == "exhausted"
    best = result.candidates[1]
    assert best.cost.seconds < result.candidates[0].cost.seconds
    assert best.cost.launches * 3 < result.candidates[0].cost.launches
    blocks = [flatten(x.block) for x in best.graph.launches() if x.block is not None]
    projections = [b for b in blocks if sum(n.op is Op.MATMUL for n in b.body) == 3]
    assert any(len(b.stores) >= 3 and b.blocks > 1 for b in projections)
    assert verify(program, best.graph).accepted


def test_an_attention_block_with_rope_and_residual() -> None:
    """Rope, mask and residual around online attention: cut, reassembled, accepted."""
    program = attention_block()
    result = search(program, CPU, workers=1, space=Space(window=6), budget=Budget(seconds=200))
    best = result.candidates[1]
    # The fastest, by this host's caches: 16 of 33 launches on one, 17 on another.
    assert best.cost.launches * 5 < 3 * result.candidates[0].cost.launches
    assert verify(program, best.graph).accepted


def test_three_hundred_operators() -> None:
    """Five layers: equal segments are searched once, and the whole is accepted."""
    program = decoder(5)
    assert operators(program) >= 300
    result = search(program, CPU, workers=1, space=Space(window=6), budget=Budget(seconds=120))
    assert result.stats.stopped == "exhausted"
    assert result.stats.reused > result.stats.segments
    best = result.candidates[1]
    assert best.cost.launches * 2 < result.candidates[0].cost.launches
    assert verify(program, best.graph).accepted


def test_a_large_program_has_an_answer_within_any_budget() -> None:
    """Stopped long before its end: fewer launches than the program, and right."""
    program = decoder(5)
    result = search(program, CPU, workers=1, budget=Budget(states=30000, seconds=200))
    assert result.stats.stopped == "states"
    best = result.candidates[1]
    assert best.cost.launches < result.candidates[0].cost.launches
    assert verify(program, best.graph).accepted


def test_the_order_keeps_products_of_one_operand_together() -> None:
    """q, k and v of a layer stand side by side, so that one interval holds all three."""
    order = Partition(decoder(1), CPU, 1).order
    products = [i for i, n in enumerate(order) if n.op is Op.MATMUL]
    assert products[1] == products[0] + 1
    assert products[2] == products[0] + 2
    assert len(set(order)) == len(order)
    position = {n: i for i, n in enumerate(order)}
    assert all(position.get(x, -1) < i for i, n in enumerate(order) for x in n.inputs)
