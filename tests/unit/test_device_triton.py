"""On a GPU: Triton's kernels through our own launcher give what float64 gives.

Every variant, every operator and dtype, random programs, and inside a CUDA graph. Skipped loudly
where there is no GPU or no Triton.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from tests.cuda_graphs import fused
from tests.device_modules import compile_all, loaded, lowered, results, run_module, whole_error
from tests.e2e import test_lower_operators as ops
from tests.e2e.test_lower_blocks import cases
from tests.fuzz_graphs import arrays_for, random_program, worst_error
from tests.triton_interpreter import error_of, inputs_of, repeated

from obelisk.base.errors import Infeasible
from obelisk.ir import DType, Graph, KernelGraph, Precision, random_inputs, run
from obelisk.lower.triton import TritonModule, lower_triton, variants
from obelisk.machine import find

torch: Any = pytest.importorskip("torch", reason="the GPU tests move data with torch")
pytest.importorskip("triton", reason="NOT RUN: Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

pytestmark = pytest.mark.device
MACHINE = find("h200")
COUNT = int(os.environ.get("OBELISK_TEST_GRAPHS", "60"))


@pytest.mark.parametrize("name", fused())
def test_fused_graphs_with_every_variant(name: str) -> None:
    graph = fused()[name]
    arrays = random_inputs(graph, 5, 0.5)
    want = run(graph, arrays)[0]
    modules = {o: lower_triton(graph, MACHINE, o) for o in variants(graph, MACHINE)}
    compile_all(list(modules.values()))
    for options, module in modules.items():
        error = whole_error(run_module(module, graph, arrays)[0], want)
        limit = 8e-3 if graph.outputs[0].dtype is DType.BF16 else 2e-3
        assert error < limit, f"{options}: {error}"


def everything() -> list[Graph]:
    """Every operator in every dtype, every feature of the block level."""
    out = [make((3, 77)) for make in (ops.elementwise, ops.reductions, ops.structure)]
    out += [ops.narrow(d) for d in ("f64", "f16", "bf16", "f8e4m3")]
    out += [ops.integers(d) for d in ("i8", "i32")]
    return [*out, ops.composites(), repeated(), *ops.products(), *cases()]


def test_every_operator_dtype_and_block_feature() -> None:
    graphs = everything()
    modules = [lower_triton(g, MACHINE) for g in graphs]
    compile_all(modules)
    wrong = []
    for graph, module in zip(graphs, modules, strict=True):
        (arrays,) = inputs_of("operators", graph)
        laid = _laid(graph, arrays)
        error = error_of(run_module(module, graph, laid), graph, arrays)
        if not error <= 1.0:
            wrong.append((graph.name, error))
    assert not wrong


def _laid(graph: Graph, arrays: list[Any]) -> list[Any]:
    """Arrays in the strides that the graph declares."""
    from tests.lowering import strided

    return [strided(a, n.attrs.strides) for a, n in zip(arrays, graph.inputs, strict=True)]


def test_random_programs() -> None:
    graphs = [random_program(seed) for seed in range(COUNT)]
    modules: list[TritonModule | None] = []
    for graph in graphs:
        try:
            modules.append(lower_triton(graph, MACHINE))
        except Infeasible:
            modules.append(None)
    assert sum(m is None for m in modules) <= COUNT // 20
    compile_all([m for m in modules if m is not None])
    wrong = []
    for seed, (graph, module) in enumerate(zip(graphs, modules, strict=True)):
        if module is None:
            continue
        arrays = arrays_for(graph, seed)
        got = run_module(module, graph, arrays)
        exact, working = run(graph, arrays), run(graph, arrays, Precision.WORKING)
        for g, e, w, node in zip(got, exact, working, graph.outputs, strict=True):
            error = worst_error(g, e, w, node.dtype)
            if not error < 1.0:
                wrong.append((seed, str(node), error))
    assert not wrong


def test_a_recorded_graph_gives_the_same() -> None:
    """Two kernels of which the second reads the first's results, replayed many times."""
    graph = fused()["attention split"]
    module = lowered(graph, "triton")
    assert len(module.launches) == 2
    arrays = random_inputs(graph, 1, 0.5)
    there = loaded(module, graph, arrays)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    recorded = there.library.capture(*there.pointers, stream.cuda_stream)
    assert (there.outputs[0] == 255).all()  # recording runs nothing
    for _ in range(20):
        recorded.replay(stream.cuda_stream)
    torch.cuda.synchronize()
    assert whole_error(results(there, graph)[0], run(graph, arrays)[0]) < 2e-3
    recorded.close()
    there.library.close()


def test_edge_values() -> None:
    """Infinities and NaN come out as numpy gives them."""
    values = [np.inf, -np.inf, np.nan, 0.0, -0.0, 89.0, -104.0, 3e38, -3e38, -1.0]
    x = np.array([values], np.float32)
    g = KernelGraph("edges")
    n = g.input(x.shape)
    for op in (g.exp, g.tanh, g.sigmoid, g.erf, g.relu, g.neg, g.square):
        g.output(op(n))
    g.output(g.maximum(n, 0.5), g.minimum(n, 0.5), g.less(n, 0.5), g.div(1.0, n))
    g.output(g.reduce_max(n, 1), g.reduce_max(g.slice(n, 1, 3, 6), 1), g.mul(n, 2.0))
    graph = g.freeze()
    got = run_module(lowered(graph, "triton"), graph, [x])
    for have, want, node in zip(got, run(graph, [x]), graph.outputs, strict=True):
        with np.errstate(over="ignore"):
            want = want.astype(node.dtype.numpy).astype(np.float64)
        np.testing.assert_allclose(have.astype(np.float64), want, rtol=2e-6, err_msg=str(node))
