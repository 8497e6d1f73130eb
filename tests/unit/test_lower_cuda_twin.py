"""Kernels of the CUDA target executed on a CPU, copies and products as early and as late as may be.

Needs g++ on x86-64; skipped loudly elsewhere.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cuda_graphs import attention, fused
from tests.lower_cuda_twin import Stuck, run_twin
from tests.mega_cuda_twin import SUPPORTED
from tests.unit.test_lower_cuda_hopper import unsafe

from obelisk.base.errors import Infeasible
from obelisk.ir import DType, Graph, KernelGraph, random_inputs, run
from obelisk.lower.cuda import CudaModule, CudaOptions, lower_cuda, variants
from obelisk.machine import find

if not SUPPORTED or shutil.which("g++") is None:
    pytest.skip("the CPU twin of CUDA kernels needs g++ on x86-64", allow_module_level=True)

H200, A100 = find("h200"), find("a100")
FUSED = fused()
MANY = FUSED["attention many keys"]
WHOLE = attention(1, 64, 512, 64, row_tile=64, split=1, key_tile=64)
SHORT = attention(1, 16, 512, 64, row_tile=16, split=1, key_tile=64)
EVERY = bool(os.environ.get("OBELISK_TEST_VARIANTS"))  # eight minutes
SOME = ("attention many keys", "attention many keys short")
EARLY, LATE = {"order": 0, "lazy": False}, {"order": 1, "lazy": True}
MODES: list[dict[str, Any]] = [
    EARLY, LATE, {"order": 1, "lazy": False}, {"order": 0, "lazy": True},
]  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("twins")


def errors(module: CudaModule, graph: Graph, folder: Path, arch: int = 900) -> list[float]:
    """The relative error of a module's output in each mode; infinite where it does not end."""
    arrays = random_inputs(graph, 5, 0.5)
    # Exponentials without a peak stay finite in f16.
    arrays[0] = (arrays[0].astype(np.float32) / 4).astype(arrays[0].dtype)
    want = run(graph, arrays)[0]
    found = []
    for mode in MODES:
        try:
            got = run_twin(module, graph, arrays, folder, arch=arch, **mode)[0].astype(np.float64)
        except Stuck:
            got = np.full_like(want, np.inf)
        error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
        found.append(error if np.isfinite(error) else float("inf"))
    return found


def right(module: CudaModule, graph: Graph, folder: Path, arch: int = 900) -> bool:
    limit = 8e-3 if graph.outputs[0].dtype is DType.BF16 else 2e-3
    return max(errors(module, graph, folder, arch)) < limit


@pytest.mark.parametrize("name", FUSED)
def test_fused_graphs_are_right(name: str, folder: Path) -> None:
    assert right(lower_cuda(FUSED[name], H200), FUSED[name], folder)


def chain() -> Graph:
    """An intermediate, a product that reads it, and more that the product's last blocks do."""
    g = KernelGraph("chain")
    q = g.input((2, 64, 64), "f16", name="q")
    k = g.input((2, 64, 256), "f16", name="k")
    g.output(g.exp(q * 0.5 @ k) * 3.0, name="out")
    return g.freeze()


def test_what_a_joined_kernel_reads_outlives_it(folder: Path) -> None:
    """Blocks that end early write what the second of two joined launches makes, while others still
    read what the first one reads: neither lies in the other's memory.
    """
    graph = chain()
    module = lower_cuda(graph, H200)
    assert len(module.launches) == 3  # of four operators: exp is done by the product's last blocks
    assert right(module, graph, folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("machine", "arch"), [(H200, 900), (A100, 800)], ids=["h200", "a100"])
@pytest.mark.parametrize("name", FUSED if EVERY else SOME)
def test_fused_graphs_are_right_in_every_variant(
    name: str, machine: Any, arch: int, folder: Path
) -> None:
    for options in variants(FUSED[name], machine):
        try:
            module = lower_cuda(FUSED[name], machine, options)
        except Infeasible:
            continue
        assert right(module, FUSED[name], folder, arch), options


@pytest.mark.parametrize(
    ("graph", "options"),
    [
        (MANY, CudaOptions(groups=2)),
        (MANY, CudaOptions(groups=2, bulk=False)),
        (WHOLE, CudaOptions(groups=3)),
        (WHOLE, CudaOptions(groups=1, stages=3)),
        (WHOLE, CudaOptions(groups=1, stages=3, bulk=False)),
        (WHOLE, CudaOptions(groups=2, wgmma=False, row_warps=4)),
        (FUSED["attention many keys norm"], CudaOptions(groups=2)),
        (FUSED["attention many keys norm"], CudaOptions(groups=1, bulk=False, remake=False)),
        (FUSED["attention many keys short"], CudaOptions(groups=4)),
        (unsafe(norm_keys=True), CudaOptions(groups=1)),
        (unsafe(norm_keys=True), CudaOptions(groups=2, bulk=False)),
    ],
    ids=[
        "cluster", "copies in a cluster", "three groups", "one group", "one group copies", "mma",
        "scales", "own scales", "short tiles", "operands in tiles", "operands in copied tiles",
    ],
)  # fmt: skip
def test_iterations_that_overlap_are_right(
    graph: Graph, options: CudaOptions, folder: Path
) -> None:
    module = lower_cuda(graph, H200, replace(options, ahead=True))
    assert module != lower_cuda(graph, H200, options)
    assert right(module, graph, folder)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_iterations_overlap_on_older_architectures(groups: int, folder: Path) -> None:
    options = CudaOptions(groups=groups, ahead=True)
    module = lower_cuda(SHORT, A100, options)
    assert module != lower_cuda(SHORT, A100, replace(options, ahead=False))
    assert right(module, SHORT, folder, 800)


BULK = CudaOptions(groups=1, stages=3, ahead=True)
COPIES = CudaOptions(groups=1, stages=3, bulk=False, ahead=True)


@pytest.mark.parametrize(
    ("options", "old", "new"),
    [
        # A wait that leaves the scores under way.
        (BULK, "ob_wgmma_wait_but<1>();", "ob_wgmma_wait_but<2>();"),
        # A left operand that changes while its product runs.
        (BULK, "ob_wgmma_wait();\n    ob_wgmma_settle(sum", "ob_wgmma_settle(sum"),
        # A tile that is not waited for; one that is given back too early; the wrong one.
        (BULK, "ob_barrier_wait(full + group * 24 + 8 * following, parity);\n    const", "const"),
        (BULK, "const unsigned at = group * 24 + 8 * slot;",
         "const unsigned at = group * 24 + 8 * following;"),
        (BULK, "tiles + following * 16384", "tiles + slot * 16384"),
        # Copies: one tile fewer has landed; into a slot that is still read.
        (COPIES, "ob_copy_wait<0>();\n    ob_operand", "ob_copy_wait<1>();\n    ob_operand"),
        (COPIES, "(slot == 0 ? 2 : slot - 1)", "slot"),
    ],
    ids=["scores", "operand", "wait", "release", "tile", "copies", "slot"],
)  # fmt: skip
def test_a_fault_in_the_order_is_found(
    options: CudaOptions, old: str, new: str, folder: Path
) -> None:
    module = lower_cuda(WHOLE, H200, options)
    (kernel,) = module.kernels
    assert kernel.source.count(old) == 1, old
    wrong = replace(module, kernels=(replace(kernel, source=kernel.source.replace(old, new)),))
    assert right(module, WHOLE, folder)
    assert not right(wrong, WHOLE, folder)
