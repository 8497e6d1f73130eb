"""Sizes: block dims are chosen for the machine, and the account says so."""

from __future__ import annotations

import pytest

from obelisk.app.loading import load_program
from obelisk.ir import DType, Op
from obelisk.ir.block import BlockGraph
from obelisk.machine import find
from obelisk.search import Space, search
from obelisk.search.sizes import thread_choices

H200, CPU = find("h200"), find("cpu")


def test_threads_are_whole_warps_up_to_what_a_block_may_have() -> None:
    """By doublings on a GPU; no choice on a CPU."""
    assert thread_choices(H200) == [32, 64, 128, 256, 512, 1024]
    assert len(thread_choices(CPU)) == 1


def test_block_dims_are_chosen_per_kernel_on_a_gpu() -> None:
    """Several numbers were tried, the candidates differ in them, and a kernel and its combining
    kernel need not agree.
    """
    result = search(load_program("gqa", dtype="f16"), H200, workers=1)
    blocks = [
        [x.block.threads for x in c.graph.launches() if x.block is not None]
        for c in result.candidates[1:]
    ]
    assert len({n for kernels in blocks for n in kernels}) > 1
    assert any(len(set(kernels)) > 1 for kernels in blocks)
    assert all(32 <= n <= 1024 and n % 32 == 0 for kernels in blocks for n in kernels)
    assert sum(result.stats.threads.values()) == result.stats.instances
    assert result.stats.levels["sizes"]["with 256 threads"] == result.stats.threads["256"] > 0


def test_block_dims_do_not_multiply_the_space_of_a_cpu() -> None:
    """One number of threads, and no count of it."""
    result = search(load_program("rmsnorm"), CPU, workers=1)
    assert result.stats.threads == {}
    assert {
        x.block.threads
        for c in result.candidates
        for x in c.graph.launches()
        if x.block is not None
    } == {128}


def test_the_account_says_when_the_best_was_found() -> None:
    """Within the processor time of the stages, and before the end of a space with more in it."""
    stats = search(load_program("rmsnorm"), CPU, workers=1).stats
    assert 0 < stats.found_seconds < sum(stats.stage_seconds.values())


# Program, batch, and the grids (of the first kernel) that were best on an H200, with the number of
# their launches: bench/results/cuda_h200.json and LOG.md.
MEASURED = [
    ("gqa", 1, (2, 8, 8), 2),
    ("gqa", 8, (16, 2, 4), 2),
    ("mqa", 1, (16, 8), 2),
    ("mha", 1, (32, 4), 2),
    ("qknorm", 1, (2, 8, 8), 2),
    ("rmsnorm", 8, (64, 2), 2),
    ("rmsnorm", 1, (128,), 1),
    ("gated_mlp", 1, (64,), 1),
    ("lora", 1, (128,), 1),
]


@pytest.mark.parametrize(("name", "batch", "grid", "launches"), MEASURED)
def test_what_was_best_on_a_gpu_is_among_the_first(
    name: str, batch: int, grid: tuple[int, ...], launches: int
) -> None:
    """The structure and grid that won on the device are within the first 24 candidates."""
    program = load_program(name, batch, "f16")
    result = search(program, H200, space=Space(keep=25), workers=1)
    found = []
    for c in result.candidates[1:]:
        blocks: list[BlockGraph | None] = [x.block for x in c.graph.launches()]
        first = blocks[0]
        found.append((first.grid if first is not None else None, len(blocks)))
    assert (grid, launches) in found, found


def test_a_thread_graph_keeps_the_dtype_of_its_chain() -> None:
    """A mean in f16: the size that it divides by adapts to the sum, not the reverse."""
    result = search(load_program("rmsnorm", dtype="f16"), H200, workers=1)
    whole = [c.graph.launches() for c in result.candidates if len(c.graph.launches()) == 1]
    blocks = [launch.block for (launch,) in whole if launch.block is not None]
    chains = [n for b in blocks for n in b.body if n.op is Op.THREAD]
    assert chains
    assert all(n.dtype is DType.F16 for n in chains)
