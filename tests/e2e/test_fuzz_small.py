"""R06: random small graphs end in a right result or a clean refusal, and no process dies.

Also what the fuzzer itself promises: that it notices wrong numbers, deaths and hangs, goes on after
them, and draws all operators.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.fuzz import Job, Outcome, fuzz, graph_seeds, run_batch
from tests.fuzz_graphs import arrays_for, lay_out, random_program, worst_error

from obelisk.ir import DType, Op, Precision, run


def failures(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [o for o in outcomes if not o.good]


@pytest.mark.usefixtures("compiler")
def test_plain_programs_are_right_when_lowered(tmp_path: Path) -> None:
    """Twelve random graphs through lowering and the C compiler, in child processes."""
    done = fuzz(6, 12, Job("lower", "cpu", 1.0, str(tmp_path)), size=6)
    assert len(done) == 12
    assert failures(done) == []
    assert Counter(o.status for o in done)["ok"] >= 10


@pytest.mark.usefixtures("compiler")
def test_optimized_programs_are_right(tmp_path: Path) -> None:
    """Six random graphs through the public `optimize`, search, judges and tuning included."""
    done = fuzz(6, 6, Job("optimize", "cpu", 0.5, str(tmp_path)), size=3)
    assert len(done) == 6
    assert failures(done) == []


def test_interpreter_agrees_with_float64(tmp_path: Path) -> None:
    """Forty graphs: the program's own precision stays within the tolerance of float64."""
    done = fuzz(7, 40, Job("interpret", "cpu", 1.0, str(tmp_path)), size=40)
    assert Counter(o.status for o in done) == {"ok": 40}


def test_seeds_reproduce_and_runs_share_no_graph() -> None:
    """A seed is a program; two runs of 200 have different graphs."""
    assert random_program(17).digest == random_program(17).digest
    first = {random_program(s).digest for s in graph_seeds(0, 200)}
    second = {random_program(s).digest for s in graph_seeds(1, 200)}
    assert len(first) > 190
    assert not first & second


def test_programs_cover_the_operators() -> None:
    """Four hundred programs: every kernel-level operator, odd strides, several outputs, dtypes."""
    seen: Counter[Op] = Counter()
    dtypes: Counter[DType] = Counter()
    strided = several = 0
    for seed in range(400):
        graph = random_program(seed)
        seen.update({n.op for n in graph.nodes})
        dtypes.update({n.dtype for n in graph.inputs})
        strided += any(n.attrs.strides is not None for n in graph.inputs)
        several += len(graph.outputs) > 1
    levels = {Op.LOAD, Op.ELEM, Op.ACCUM_SUM, Op.ACCUM_MAX, Op.RUNNING_MAX, Op.ACCUM_RESCALE,
              Op.BLOCK, Op.THREAD}  # fmt: skip
    assert set(Op) - set(seen) == levels
    assert min(seen.values()) >= 3
    assert {DType.F32, DType.F16, DType.BF16} <= set(dtypes)
    assert strided > 100
    assert several > 60


def test_arrays_lie_as_declared() -> None:
    """Strides are those of the program, gaps are NaN, and values are the given ones."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    padded = lay_out(x, (5, 1))
    assert padded.strides == (20, 4)
    assert (padded == x).all()
    turned = lay_out(x, (1, 2))
    assert turned.strides == (4, 8)
    assert (turned == x).all()
    gaps = lay_out(x, (6, 2))
    assert (gaps == x).all()
    memory = np.lib.stride_tricks.as_strided(gaps, (11,), (4,))
    assert np.isnan(memory[1::2]).all()
    for seed in range(40):
        graph = random_program(seed)
        for node, array in zip(graph.inputs, arrays_for(graph, seed), strict=True):
            assert array.shape == node.shape
            assert array.dtype == node.dtype.numpy
            assert not np.isnan(np.asarray(array, np.float64)).any()


def test_wrong_numbers_are_noticed() -> None:
    """One element off by a hundredth, a NaN, a missing element; rounding is not a fault."""
    for seed in range(30):
        graph = random_program(seed)
        arrays = [np.array(a) for a in arrays_for(graph, seed)]
        exact = run(graph, arrays)[0]
        working = run(graph, arrays, Precision.WORKING)[0]
        dtype = graph.outputs[0].dtype
        assert worst_error(working, exact, working, dtype) <= 1
        if dtype is not DType.F32 or not np.abs(exact).max() > 0:
            continue
        at = np.unravel_index(np.argmax(np.abs(exact)), exact.shape)
        off = working.copy()
        off[at] += 0.01 * np.abs(exact[at])
        assert worst_error(off, exact, working, dtype) > 1
        off[at] = np.nan
        assert worst_error(off, exact, working, dtype) == float("inf")
    exact = np.linspace(-1, 1, 1000)  # every element is as uncertain as those beside it
    working = exact + 0.01 * np.where(np.arange(1000) % 2, 1, 0)
    other = exact + 0.01 * np.where(np.arange(1000) % 2, 0, 1)
    assert worst_error(other, exact, working, DType.F32) <= 1
    assert worst_error(exact + 5 * (other - exact), exact, working, DType.F32) > 1
    counts = np.array([3, 4], np.int32)
    assert worst_error(counts, np.array([3.0, 4.0]), counts, DType.I32) == 0
    assert worst_error(counts, np.array([3.0, 5.0]), counts, DType.I32) == float("inf")


FAULTY = """
import json, os, signal, sys, time
for seed in json.loads(sys.argv[1]):
    print(json.dumps({"begin": seed}), flush=True)
    if seed == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if seed == 4:
        time.sleep(600)
    if seed == 6:
        sys.exit(3)
    end = {"end": seed, "status": "ok", "detail": "", "seconds": 0.0}
    print(json.dumps(end), flush=True)
    print("noise", flush=True)
"""


def test_deaths_and_hangs_are_failures_and_end_nothing(tmp_path: Path) -> None:
    """Of graphs 1 to 7 one child segfaults, one hangs, one exits; the rest still run."""
    job = Job("lower", "cpu", 0.0, str(tmp_path), patience=1.0, starts=30.0)

    def command(seeds: Sequence[int], job: Job) -> list[str]:
        return [sys.executable, "-c", FAULTY, str(list(seeds))]

    done = {o.graph: o for o in run_batch(range(1, 8), job, command)}
    assert [done[i].status for i in range(1, 8)] == [
        "ok", "died", "ok", "hang", "ok", "died", "ok",
    ]  # fmt: skip
    assert "SIGSEGV" in done[2].detail
    assert "exit 3" in done[6].detail
