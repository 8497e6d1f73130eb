"""One search serves other extents: plans keep the structure and choose sizes again, quickly and
rightly.
"""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from obelisk.base.errors import Infeasible, ParseError
from obelisk.ir import Graph, KernelGraph, random_inputs, run
from obelisk.machine import capacity, estimate, find
from obelisk.search import Budget, plan_plain, read_plan, replan, replan_one, search

CPU = find("cpu")


def attention(batch: int, queries: int, keys: int, safe: bool = True) -> Graph:
    g = KernelGraph("attention")
    q, k, v = g.input((batch, queries, 16)), g.input((batch, 16, keys)), g.input((batch, keys, 16))
    s = g.matmul(q, k)
    e = g.softmax(s) if safe else g.div(g.exp(s), g.sum(g.exp(s), 2))
    g.output(g.matmul(e, v))
    return g.freeze()


def normed(rows: int, width: int) -> Graph:
    g = KernelGraph("normed")
    x, w = g.input((rows, width)), g.input((width, 96))
    g.output(g.matmul(g.rms_norm(x, None, 1e-6), w))
    return g.freeze()


@pytest.mark.parametrize(
    ("batch", "queries", "keys"), [(2, 64, 512), (3, 32, 256), (7, 5, 77), (4, 33, 1000)]
)
def test_other_batches_and_contexts_need_no_search(batch: int, queries: int, keys: int) -> None:
    """Every candidate of one search, at extents that it was not made for, is right in float64."""
    plans = [c.plan for c in search(attention(2, 64, 256), CPU).candidates[1:5]]
    program = attention(batch, queries, keys)
    inputs = random_inputs(program, 1, 0.4)
    want = run(program, inputs)[0]
    for plan in plans:
        assert plan is not None
        got = run(replan(plan, program, CPU), inputs)[0]
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_replanning_takes_milliseconds() -> None:
    """Under a tenth of a second of CPU time for a new batch."""
    plan = search(normed(8, 512), CPU).candidates[1].plan
    assert plan is not None
    replan(plan, normed(4, 512), CPU)
    began = time.process_time()
    replan(plan, normed(16, 1024), CPU)
    assert time.process_time() - began < 0.1


def test_another_program_is_refused() -> None:
    """Other operators, and an extent that became 1, are refused with the way out."""
    plan = search(normed(8, 256), CPU, budget=Budget(seconds=30)).candidates[1].plan
    assert plan is not None
    with pytest.raises(Infeasible, match="search again"):
        replan(plan, attention(2, 64, 256), CPU)
    with pytest.raises(Infeasible, match="search again"):
        replan(plan, normed(1, 256), CPU)


@pytest.mark.parametrize("safe", [True, False])
def test_plans_have_a_form_where_an_extent_is_one(safe: bool) -> None:
    """One key, one query, one head: the axes come from another size; all are right in float64."""
    plans = [c.plan for c in search(attention(2, 64, 256, safe), CPU).candidates[1:7]]
    made = 0
    for batch, queries, keys in ((1, 32, 64), (2, 1, 64), (2, 32, 1)):
        program = attention(batch, queries, keys, safe)
        wide = attention(*(13 if n == 1 else n for n in (batch, queries, keys)), safe)
        inputs = random_inputs(program, 1, 0.4)
        want = run(program, inputs)[0]
        for plan in plans:
            assert plan is not None
            found = replan_one(plan, wide, 13, program, CPU)
            assert found.inputs == program.inputs
            np.testing.assert_allclose(run(found, inputs)[0], want, rtol=1e-9, atol=1e-12)
            made += 1
    assert made == 3 * len(plans)


def test_plans_survive_their_plain_form() -> None:
    """As JSON and back: equal, and the same graph."""
    for candidate in search(attention(2, 64, 256), CPU).candidates[1:]:
        assert candidate.plan is not None
        data = json.loads(json.dumps(plan_plain(candidate.plan)))
        assert read_plan(data) == candidate.plan
        program = attention(3, 32, 77)
        assert replan(read_plan(data), program, CPU) == replan(candidate.plan, program, CPU)


def test_one_structure_serves_a_cpu_and_a_gpu() -> None:
    """Found for a CPU, sized for an H200: fits, is right, and is no worse than the CPU's sizes."""
    gpu = find("h200")
    program = attention(4, 64, 512)
    inputs = random_inputs(program, 1, 0.4)
    want = run(program, inputs)[0]
    for candidate in search(program, CPU).candidates[1:4]:
        assert candidate.plan is not None
        there = replan(candidate.plan, program, gpu, descend=True)
        np.testing.assert_allclose(run(there, inputs)[0], want, rtol=1e-9, atol=1e-12)
        for launch in there.launches():
            assert launch.block is not None
            assert capacity(launch.block, gpu) is None
        kept = replan(candidate.plan, program, gpu)
        assert estimate(there, gpu).seconds <= 1.001 * estimate(kept, gpu).seconds
        assert there.digest != candidate.graph.digest


@pytest.mark.parametrize("wrong", [None, {}, {"pieces": [{"first": 0}]}, {"pieces": 3}])
def test_what_is_no_plan_is_refused(wrong: object) -> None:
    with pytest.raises(ParseError, match="not a plan"):
        read_plan(wrong)
