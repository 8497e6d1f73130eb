"""The published search results as kernels: every graph that is right lowers, compiles and runs.

Proves here that each graph of the published checkpoints lowers for an H200 with either target, and
that the last of several files compiles; on a GPU that all of them give what the program gives.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.device_modules import MACHINE, TARGETS, compile_all, lowered, run_module, whole_error
from tests.strategies import MUGRAPHS
from tests.unit.test_ir_mirage import FILES

from obelisk.base.errors import BuildFailed, MissingDependency
from obelisk.build.cuda import Cubin, compile_cuda_many, toolchain
from obelisk.build.triton import compile_triton_many
from obelisk.ir import Graph, load_mirage
from obelisk.lower.cuda import CudaModule

pytestmark = pytest.mark.skipif(
    not MUGRAPHS.is_dir(), reason=f"NOT RUN: the published checkpoints are not at {MUGRAPHS}"
)
RIGHT = tuple(name for name in FILES if name != "qknorm_gqa_bs1")  # all of that one are refuted


def graphs_of(name: str) -> list[Graph]:
    entries = load_mirage(MUGRAPHS / f"{name}.json")
    assert len(entries) == FILES[name][0]
    return [e.graph for e in entries if e.graph is not None]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", RIGHT)
def test_every_graph_lowers(name: str, target: str) -> None:
    for graph in graphs_of(name):
        module = lowered(graph, target)
        assert module.launches
        if isinstance(module, CudaModule):
            assert all(k.shared <= MACHINE.shared_bytes for k in module.kernels)


def test_the_last_graphs_compile(tmp_path: Path) -> None:
    try:
        toolchain()
    except MissingDependency as missing:
        pytest.skip(f"NOT RUN: no CUDA compiler here: {missing}")
    sources: dict[str, str] = {}
    for name in ("gated_mlp", "gqa_bs1", "lora", "ntrans_bs1", "rmsnorm_bs1"):
        module = lowered(graphs_of(name)[-1], "cuda")
        assert isinstance(module, CudaModule)
        sources |= {k.source: name for k in module.kernels}
    built = compile_cuda_many(list(sources), MACHINE.arch, directory=tmp_path)
    for source, answer in zip(sources, built, strict=True):
        assert isinstance(answer, Cubin), f"{sources[source]}: {answer} {answer.log}"
        assert answer.resources.registers <= MACHINE.registers_per_thread


def unbuilt(module: Any) -> bool:
    """Whether Triton's compiler found that a kernel needs more shared memory than there is, which
    is a limit by name; every other failure fails the test.
    """
    if isinstance(module, CudaModule):
        return False
    failed = [b for b in compile_triton_many(module.kernels, MACHINE) if isinstance(b, BuildFailed)]
    assert all("bytes of shared memory" in b.reason for b in failed), failed
    return bool(failed)


@pytest.mark.device
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", RIGHT)
def test_every_graph_runs_on_a_gpu(name: str, target: str) -> None:
    torch: Any = pytest.importorskip("torch", reason="the GPU tests move data with torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    _, formula, scale = FILES[name]
    graphs = graphs_of(name)
    shapes = [x.shape for x in graphs[0].inputs]
    rng = np.random.default_rng(3)
    arrays = [(rng.standard_normal(s) * scale).astype(np.float16) for s in shapes]
    want = formula(*(a.astype(np.float64) for a in arrays))
    modules = [lowered(g, target) for g in graphs]
    compile_all(modules)
    wrong = []
    for i, (graph, module) in enumerate(zip(graphs, modules, strict=True)):
        assert [x.shape for x in graph.inputs] == shapes
        if unbuilt(module):
            continue
        error = whole_error(run_module(module, graph, arrays)[0].reshape(want.shape), want)
        if not error < 2e-3:
            wrong.append((i, error))
    assert not wrong
