"""Sizes: block dims are chosen for the machine, and the account says so."""

from __future__ import annotations

from obelisk.app.loading import load_program
from obelisk.machine import find
from obelisk.search import search
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
