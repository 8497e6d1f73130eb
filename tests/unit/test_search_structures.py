"""The search finds the best known structures from the plain programs, unaided, and what it returns
is right.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from obelisk.app.loading import load_program
from obelisk.ir import Graph, KernelGraph, Op, random_inputs, run
from obelisk.ir.block import BlockGraph, Phase
from obelisk.lower.schedule import flatten
from obelisk.machine import Machine, find
from obelisk.search import Budget, Candidate, Space, search
from obelisk.search.threads import Residence, registers, residences
from obelisk.verify import verify

CPU = find("cpu")


def blocks(graph: Graph) -> list[BlockGraph]:
    """The kernels' block graphs, thread graphs expanded."""
    return [flatten(launch.block) for launch in graph.launches() if launch.block is not None]


def ops(block: BlockGraph, *kinds: Op) -> int:
    return sum(n.op in kinds for n in block.body)


def only_kernel(c: Candidate) -> BlockGraph | None:
    """The block of a candidate that is one launch."""
    found = blocks(c.graph)
    return found[0] if len(found) == 1 and len(c.graph.launches()) == 1 else None


def found(
    program: Graph, test: Callable[[Candidate], bool], machine: Machine = CPU, **space: int
) -> Candidate:
    result = search(program, machine, space=Space(keep=40, **space), budget=Budget(seconds=60))
    assert result.candidates[0].graph is program
    fitting = [c for c in result.candidates if test(c)]
    assert fitting, [c.note for c in result.candidates]
    return fitting[0]


def check(program: Graph, candidate: Graph, scale: float = 0.3) -> None:
    """Equal in float64 up to rounding, on random input."""
    inputs = random_inputs(program, 3, scale)
    for want, got in zip(run(program, inputs), run(candidate, inputs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def small(name: str) -> Graph:
    """The named program's formula at a size that the interpreter runs quickly."""
    g = KernelGraph(name)
    match name:
        case "rmsnorm":
            x, w = g.input((16, 256)), g.input((256, 96))
            g.output(g.matmul(g.rms_norm(x), w))
        case "gated_mlp":
            x, w, v = g.input((8, 256)), g.input((256, 128)), g.input((256, 128))
            g.output(g.mul(g.silu(g.matmul(x, w)), g.matmul(x, v)))
        case "gqa":
            q, k, v = g.input((2, 64, 16)), g.input((2, 16, 256)), g.input((2, 256, 16))
            e = g.exp(g.matmul(q, k))
            g.output(g.matmul(g.div(e, g.sum(e, 2)), v))
        case "safe":
            q, k, v = g.input((2, 64, 16)), g.input((2, 16, 256)), g.input((2, 256, 16))
            g.output(g.matmul(g.softmax(g.mul(g.matmul(q, k), 0.25)), v))
        case "mlp":
            x, w, v, d = (g.input(s) for s in ((8, 256), (256, 512), (256, 512), (512, 256)))
            g.output(g.matmul(g.mul(g.silu(g.matmul(x, w)), g.matmul(x, v)), d))
        case "qknorm":
            q, k, v = g.input((2, 64, 16)), g.input((2, 16, 256)), g.input((2, 256, 16))
            e = g.exp(g.matmul(g.rms_norm(q), k))
            g.output(g.matmul(g.div(e, g.sum(e, 2)), g.rms_norm(v)))
    return g.freeze()


def test_rmsnorm_division_behind_the_product() -> None:
    """One kernel that sums squares and the product in one loop and divides after it."""

    def fits(c: Candidate) -> bool:
        b = only_kernel(c)
        if b is None or b.loop == 1 or ops(b, Op.ACCUM_SUM) != 2:
            return False
        return all(b.info.phase[n] is Phase.POST for n in b.body if n.op is Op.DIV)

    program = small("rmsnorm")
    check(program, found(program, fits).graph)


def test_gated_mlp_with_two_accumulators() -> None:
    """One kernel with both products in one loop."""

    def fits(c: Candidate) -> bool:
        b = only_kernel(c)
        return b is not None and b.loop > 1 and ops(b, Op.ACCUM_SUM) == 2 == ops(b, Op.MATMUL)

    program = small("gated_mlp")
    check(program, found(program, fits).graph)


def test_lora_in_one_kernel() -> None:
    """Both low-rank products and the sum in one kernel."""
    program = load_program("lora")
    check(program, found(program, lambda c: only_kernel(c) is not None).graph)


def test_lora_as_one_product_over_joined_operands_and_as_three() -> None:
    """[x xa] @ [w; b] in one kernel, and the form of three products and a sum."""
    program = load_program("lora")

    def joined(c: Candidate) -> bool:
        b = only_kernel(c)
        return b is not None and ops(b, Op.CONCAT) == 2 == ops(b, Op.MATMUL)

    def three(c: Candidate) -> bool:
        b = only_kernel(c)
        return b is not None and ops(b, Op.MATMUL) == 3 and ops(b, Op.ADD) == 1

    check(program, found(program, joined).graph)
    check(program, found(program, three).graph)


def test_ntrans_in_one_kernel() -> None:
    """Both norms, the scaling and the residual in one kernel."""
    program = load_program("ntrans")
    check(program, found(program, lambda c: only_kernel(c) is not None).graph)


@pytest.mark.parametrize("name", ["gqa", "safe"])
def test_attention_in_one_pass_over_the_keys(name: str) -> None:
    """One kernel, one loop over keys, both sums closed by accumulators."""

    def fits(c: Candidate) -> bool:
        b = only_kernel(c)
        return b is not None and b.loop > 1 and ops(b, Op.ACCUM_SUM, Op.ACCUM_RESCALE) == 2

    program = small(name)
    check(program, found(program, fits).graph)


@pytest.mark.parametrize("name", ["gqa", "safe", "qknorm"])
def test_online_softmax_is_found_also_where_the_program_has_no_maximum(name: str) -> None:
    """A running maximum with rescaled accumulators; right for scores that overflow unshifted."""

    def fits(c: Candidate) -> bool:
        b = only_kernel(c)
        return b is not None and ops(b, Op.RUNNING_MAX) == 1 and ops(b, Op.ACCUM_RESCALE) == 2

    program = small(name)
    best = found(program, fits).graph
    check(program, best)
    q, k, v = random_inputs(program, 1, 1.0)
    got = run(best, [q * 200, k, v])[0]
    assert np.isfinite(got).all()


def test_both_norms_of_queries_and_keys_inside_online_attention() -> None:
    """One kernel that reads q, k and v alone: it norms both, keys tile by tile, and turns the keys
    inside.
    """

    def fits(c: Candidate) -> bool:
        b = only_kernel(c)
        if b is None or ops(b, Op.RUNNING_MAX) != 1 or ops(b, Op.ACCUM_RESCALE) != 2:
            return False
        roots = [n for n in b.body if n.op is Op.SQRT]
        return len(b.loads) == 3 and {b.info.phase[n] for n in roots} >= {Phase.LOOP}

    program = load_program("qknorm_k")
    assert verify(program, found(program, fits).graph).accepted


def test_a_split_norm_and_product_with_copies_of_the_norm() -> None:
    """The depth of rmsnorm and its product split over blocks that also cut the columns: the sums of
    squares have none, so each block stores a copy, and the second kernel divides.
    """

    def fits(c: Candidate) -> bool:
        found_blocks = blocks(c.graph)
        if len(found_blocks) != 2 or len(c.graph.launches()) != 2:
            return False
        first = found_blocks[0]
        return len([n for n in first.grid if n > 1]) == 2 and len(first.stores) == 2

    g = KernelGraph()
    x, w = g.input((4, 2048)), g.input((2048, 1024))
    g.output(g.matmul(g.rms_norm(x), w))
    program = g.freeze()
    best = found(program, fits, find("h200")).graph
    check(program, best)
    assert verify(program, best).accepted


def test_tiles_summed_over_iterations_and_folded_once_after_the_loop() -> None:
    """Where rows are short, one addition an element and iteration is less than a fold of each
    tile.
    """

    def fits(c: Candidate) -> bool:
        b = only_kernel(c)
        return b is not None and any(
            n.op is Op.ACCUM_SUM and n.shape[-1] > 1 and b.info.phase[n] is Phase.POST
            for n in b.body
        )

    g = KernelGraph()
    g.output(g.sqrt(g.sum(g.square(g.input((64, 32))), 1)))
    program = g.freeze()
    best = found(program, fits).graph
    check(program, best)
    assert verify(program, best).accepted


@pytest.mark.parametrize("name", ["gqa", "safe", "qknorm"])
def test_split_keys_with_a_combining_kernel(name: str) -> None:
    """The grid splits the keys; a second kernel brings the parts to one maximum and adds them."""

    def fits(c: Candidate) -> bool:
        found_blocks = blocks(c.graph)
        return (
            len(found_blocks) == 2 == len(c.graph.launches()) and len(found_blocks[0].stores) == 3
        )

    program = small(name)
    check(program, found(program, fits).graph)


def test_a_safe_program_gets_no_unsafe_exponential() -> None:
    """Every exponential of every candidate of a safe program is of a difference with a maximum."""
    result = search(small("safe"), CPU, space=Space(keep=40))
    for c in result.candidates:
        for b in blocks(c.graph):
            for n in b.body:
                assert n.op is not Op.EXP or n.inputs[0].op is Op.SUB


def test_experts_in_two_kernels_though_the_model_promises_little() -> None:
    """moe for a GPU: no kernel does all of it, and two save only a launch by the model. They are
    searched all the same: without them there would be nothing to measure.
    """
    graph = load_program("moe", dtype="f16")
    found = search(graph, find("h200"), budget=Budget(seconds=20), workers=1).candidates
    two = [c for c in found[1:] if c.cost.launches == 2]
    assert two
    assert verify(graph, two[0].graph).accepted


def test_mlp_in_at_most_two_launches() -> None:
    """The gated MLP with its down projection."""
    program = small("mlp")
    check(program, found(program, lambda c: len(c.graph.launches()) <= 2).graph)


@pytest.mark.parametrize("columns", [(48, 48), (96, 48)], ids=["alike", "unlike"])
def test_two_independent_products_side_by_side_in_one_kernel(columns: tuple[int, int]) -> None:
    """Products that share nothing: one launch of several blocks, each of which does a part of both
    in one loop.
    """

    def fits(c: Candidate) -> bool:
        b = only_kernel(c)
        return (
            b is not None
            and b.blocks > 1
            and b.loop > 1
            and len(b.loads) == 4
            and len(b.stores) == 2
            and ops(b, Op.MATMUL) == 2 == ops(b, Op.ACCUM_SUM)
        )

    g = KernelGraph()
    x, w, y, v = (g.input(s) for s in ((8, 64), (64, columns[0]), (8, 64), (64, columns[1])))
    g.output(g.matmul(x, w), g.matmul(y, v))
    program = g.freeze()
    best = found(program, fits, find("h200")).graph
    check(program, best)
    assert verify(program, best).accepted


def test_three_projections_of_one_norm_in_one_kernel() -> None:
    """q, k and v of a layer, of unlike widths, with the norm in front of them."""

    def fits(c: Candidate) -> bool:
        b = only_kernel(c)
        return (
            b is not None
            and b.blocks > 1
            and len(b.loads) == 4
            and len(b.stores) == 3 == ops(b, Op.MATMUL)
        )

    g = KernelGraph()
    x, q, k, v = (g.input(s) for s in ((8, 128), (128, 128), (128, 64), (128, 64)))
    h = g.rms_norm(x, None, 1e-6)
    g.output(*(g.matmul(h, w) for w in (q, k, v)))
    program = g.freeze()
    best = found(program, fits, find("h200")).graph
    check(program, best)
    assert verify(program, best).accepted


def test_chains_become_thread_graphs_that_fit_the_registers() -> None:
    """Elementwise chains and row sums live in registers; a chain too long for them stays apart."""
    program = small("gated_mlp")
    machine = find("h200")
    fused = [
        n.attrs.thread
        for c in search(program, machine).candidates
        for launch in c.graph.launches()
        if launch.block is not None
        for n in launch.block.body
        if n.op is Op.THREAD
    ]
    assert any({Op.SIGMOID, Op.MUL} <= {n.op for n in t.body} for t in fused)
    assert all(registers(t, 128) <= machine.registers_per_thread for t in fused)
    plain = search(program, machine, space=Space(thread_graphs=False))
    assert all(n.op is not Op.THREAD for c in plain.candidates for n in c.graph.nodes)


def test_every_value_of_a_candidate_has_a_place() -> None:
    """Kernels' results in device memory, tiles in shared memory, chains and accumulators in
    registers.
    """
    best = search(small("gated_mlp"), find("h200")).candidates[1].graph
    places = residences(best)
    assert {places[o] for o in best.outputs} == {Residence.DEVICE}
    for launch in best.launches():
        assert launch.block is not None
        for n in launch.block.body:
            held = n.op in (Op.ACCUM_SUM, Op.ACCUM_MAX, Op.RUNNING_MAX, Op.ACCUM_RESCALE)
            assert places[n] is (Residence.REGISTER if held else Residence.SHARED)


def test_the_same_seed_gives_the_same_candidates() -> None:
    """Byte for byte, run after run."""
    program = small("gqa")
    first, second = (search(program, CPU, seed=5) for _ in range(2))
    assert [c.graph.digest for c in first.candidates] == [c.graph.digest for c in second.candidates]
    assert first.stats.states == second.stats.states


def test_no_time_still_returns_the_program() -> None:
    """A budget of nothing ends at once, with candidate 0."""
    program = load_program("gqa")
    result = search(program, CPU, budget=Budget(seconds=0.0))
    assert result.candidates[0].graph is program
    assert result.stats.stopped == "time"
    assert result.stats.seconds < 2.0


def test_candidates_fit_the_machine() -> None:
    """On a GPU no candidate asks for more shared memory than a block may have."""
    from obelisk.machine import capacity

    machine = find("sm_89")
    result = search(small("gqa"), machine)
    assert len(result.candidates) > 1
    for c in result.candidates:
        assert all(capacity(b, machine) is None for b in blocks(c.graph))
