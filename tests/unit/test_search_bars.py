"""What the search has to reach for each named program: the best known structures, in seconds of one
process, in little memory.
"""

from __future__ import annotations

import pytest

from obelisk.app.loading import load_program
from obelisk.app.search_bench import STRUCTURES, search_row
from obelisk.ir import DType, Graph, KernelGraph, Op
from obelisk.machine import find
from obelisk.search import Budget, Space, search

MOST_MEMORY = 2 << 30


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_known_structure_is_found_in_time(name: str) -> None:
    """Processor seconds of one process: 10 until the best, 60 for mlp; the space is exhausted."""
    row = search_row(name, 1, "f32", 120.0, 0, "1")
    assert row["stopped"] == "exhausted"
    assert [title for title, where in row["structures"].items() if where is None] == []
    assert 0 < row["found_seconds"] < (60 if name == "mlp" else 10)
    assert row["peak_memory"] < MOST_MEMORY


def test_rmsnorm_with_eleven_operators() -> None:
    """The best structure within 2 s of processor time, the space exhausted within 30."""
    program = load_program("rmsnorm")
    stats = search(program, find("cpu"), space=Space(block_ops=11), workers=1).stats
    assert stats.stopped == "exhausted"
    assert stats.found_seconds < 2
    assert sum(stats.stage_seconds.values()) < 30


def _unsafe_attention(heads: int, rows: int, keys: int) -> Graph:
    g = KernelGraph("attention")
    q, k, v = (g.input(s, "f16") for s in ((heads, rows, 64), (heads, 64, keys), (heads, keys, 64)))
    e = g.exp(g.matmul(q, k))
    g.output(g.matmul(g.div(e, g.sum(e, 2)), v))
    return g.freeze()


@pytest.mark.parametrize("machine", ["cpu", "sm_90a"])
@pytest.mark.parametrize(("heads", "rows", "keys"), [(2, 256, 4096), (8, 4, 1024)])
def test_attention_of_a_prompt_and_of_a_step_is_fused(
    heads: int, rows: int, keys: int, machine: str
) -> None:
    """R09: within half a minute at most there are kernels that keep the scores to themselves: one,
    or two where the keys are split over blocks.
    """
    program = _unsafe_attention(heads, rows, keys)
    found = search(program, find(machine), budget=Budget(seconds=30.0), workers=1)
    assert found.stats.found_seconds < 30
    scores = heads * rows * keys
    fused = [
        c.graph
        for c in found.candidates
        if not any(n.elements == scores for n in c.graph.nodes if n.op is not Op.INPUT)
    ]
    assert fused
    launches = [len({n.attrs.block for n in g.nodes if n.op is Op.BLOCK}) for g in fused]
    assert min(launches) <= 2
    assert all(n.dtype is DType.F16 for g in fused for n in g.outputs)
