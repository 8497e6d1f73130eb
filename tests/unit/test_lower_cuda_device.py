"""On a GPU: lowered graphs give what float64 gives. Skipped loudly where there is none."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from tests.cuda_graphs import attention, fused, norm_matmul
from tests.fuzz_graphs import arrays_for, random_program, worst_error

from obelisk.base.errors import Infeasible
from obelisk.build.cuda import Cubin, compile_cuda_many
from obelisk.build.device import CudaLibrary
from obelisk.ir import DType, Graph, Precision, random_inputs, run
from obelisk.lower.cuda import CudaModule, CudaOptions, lower_cuda, variants
from obelisk.machine import find

torch: Any = pytest.importorskip("torch", reason="the GPU tests move data with torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

pytestmark = pytest.mark.device
MACHINE = find("h200")
GUARD = 64  # elements beyond each output that must stay as they were


def memory_of(array: Any) -> Any:
    """Device bytes of an array as it lies, gaps between rows included."""
    size = array.dtype.itemsize
    span = 1 + sum((n - 1) * (s // size) for n, s in zip(array.shape, array.strides, strict=True))
    flat = np.lib.stride_tricks.as_strided(array, (span,), (size,))
    return torch.from_numpy(flat.copy().view(np.uint8)).cuda()


def run_module(module: CudaModule, graph: Graph, arrays: list[Any], times: int = 2) -> list[Any]:
    """The outputs of the last of several calls on NaN-filled memory with guards behind it."""
    built = compile_cuda_many([k.source for k in module.kernels], MACHINE.arch)
    for b in built:
        assert isinstance(b, Cubin), str(b)
    library = CudaLibrary(module, [b.path for b in built if isinstance(b, Cubin)])
    inputs = [memory_of(a) for a in arrays]
    scratch = torch.full((library.scratch_bytes + 256,), 255, dtype=torch.uint8, device="cuda")
    library.prepare(scratch.data_ptr(), torch.cuda.current_stream().cuda_stream)
    outs = []
    for node in graph.outputs:
        size = int(node.elements * node.dtype.nbytes)
        outs.append(torch.full((size + GUARD,), 255, dtype=torch.uint8, device="cuda"))
    for _ in range(times):
        for o in outs:
            o.fill_(255)
        library.launch(
            [x.data_ptr() for x in inputs], [o.data_ptr() for o in outs], scratch.data_ptr(),
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        torch.cuda.synchronize()
    got = []
    for node, o in zip(graph.outputs, outs, strict=True):
        host = o.cpu().numpy()
        assert (host[-GUARD:] == 255).all(), "wrote beyond an output"
        got.append(host[:-GUARD].view(node.dtype.numpy).reshape(node.shape))
    library.close()
    return got


@pytest.mark.parametrize("name", fused())
def test_fused_graphs_with_every_variant(name: str) -> None:
    graph = fused()[name]
    arrays = random_inputs(graph, 5, 0.5)
    want = run(graph, arrays)[0]
    modules: dict[CudaOptions, CudaModule] = {}
    for options in variants(graph, MACHINE):
        try:
            modules[options] = lower_cuda(graph, MACHINE, options)
        except Infeasible:
            continue
    assert modules
    compile_cuda_many([k.source for m in modules.values() for k in m.kernels], MACHINE.arch)
    for options, module in modules.items():
        got = run_module(module, graph, arrays)[0].astype(np.float64)
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        limit = 8e-3 if graph.outputs[0].dtype is DType.BF16 else 2e-3
        assert error < limit, f"{options}: {error}"


@pytest.mark.parametrize(
    "options",
    [CudaOptions(), CudaOptions(groups=1, column_warps=4, column_tile=64, resident=4)],
    ids=["default", "one group"],
)
def test_bits_do_not_move(options: CudaOptions) -> None:
    """Calls one behind the other, their blocks in several waves, a tile that all blocks find in the
    L2 cache: all give the same bits. Without the fence in front of a slot's release 6 of 100 calls
    of such a kernel read a row of the next tile.
    """
    graph = norm_matmul(8, 4096, 32768, parts=512, split=1, tile=64)
    module = lower_cuda(graph, MACHINE, options)
    assert all(k.maps for k in module.kernels)
    built = compile_cuda_many([k.source for k in module.kernels], MACHINE.arch)
    library = CudaLibrary(module, [b.path for b in built if isinstance(b, Cubin)])
    inputs = [torch.randn(n.shape, device="cuda").half() for n in graph.inputs]
    stream = torch.cuda.current_stream().cuda_stream
    scratch = torch.zeros(library.scratch_bytes + 256, dtype=torch.uint8, device="cuda")
    library.prepare(scratch.data_ptr(), stream)
    outs = torch.empty((60, *graph.outputs[0].shape), dtype=torch.float16, device="cuda")
    addresses, first = [x.data_ptr() for x in inputs], None
    for _ in range(10):
        outs.fill_(float("nan"))
        for out in outs:
            library.launch(addresses, [out.data_ptr()], scratch.data_ptr(), stream)
        torch.cuda.synchronize()
        first = outs[0].clone() if first is None else first
        assert torch.equal(outs.view(torch.int16), first.view(torch.int16).expand_as(outs))
    library.close()


@pytest.mark.parametrize("peak", [5.0, 11.0, 12.0, 50.0, 88.0, 100.0, 1000.0])
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16], ids=str)
@pytest.mark.parametrize(
    "options",
    [CudaOptions(), CudaOptions(clusters=False), CudaOptions(row_tile=64, bulk=True)],
    ids=["default", "counter", "tall"],
)
def test_attention_is_finite_and_right_for_large_scores(
    peak: float, dtype: DType, options: CudaOptions
) -> None:
    graph = attention(1, 64, 1024, 64, row_tile=32, split=4, key_tile=64, dtype=dtype)
    q, k, v = random_inputs(graph, 2)
    kind = dtype.numpy
    scores = q.astype(np.float64) @ k.astype(np.float64)
    factor = np.sqrt(peak / np.abs(scores).max())
    q, k = (
        (q.astype(np.float64) * factor).astype(kind),
        (k.astype(np.float64) * factor).astype(kind),
    )
    s = q.astype(np.float64) @ k.astype(np.float64)
    p = np.exp(s - s.max(-1, keepdims=True))
    want = (p / p.sum(-1, keepdims=True)) @ v.astype(np.float64)
    got = run_module(lower_cuda(graph, MACHINE, options), graph, [q, k, v])[0].astype(np.float64)
    assert np.isfinite(got).all()
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < (2e-3 if dtype is DType.F16 else 1.2e-2)


@pytest.mark.parametrize("keys", [17, 63, 64, 65, 1000, 4096])
def test_attention_of_any_length(keys: int) -> None:
    tile = keys if keys < 66 else 64 if keys % 64 == 0 else 50
    graph = attention(2, 16, keys, 64, row_tile=16, split=1, key_tile=tile)
    arrays = random_inputs(graph, keys, 0.5)
    want = run(graph, arrays)[0]
    got = run_module(lower_cuda(graph, MACHINE), graph, arrays)[0].astype(np.float64)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 2e-3


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("rows", "keys", "groups", "tile"), [(64, 512, 1, 64), (128, 1024, 2, 128), (256, 512, 1, 64)]
)
def test_products_of_four_warps(
    rows: int, keys: int, groups: int, tile: int, transposed: bool, norm: bool
) -> None:
    """Tall row tiles, keys first and last, bulk copies and clusters, on inputs of their own."""
    graph = attention(
        2, rows, keys, 64, row_tile=rows, split=2, key_tile=64, norm=norm, transposed=transposed
    )
    options = CudaOptions(bulk=True, groups=groups, loop_tile=tile)
    module = lower_cuda(graph, MACHINE, options)
    assert "ob_wgmma<" in module.kernels[0].source
    assert module.kernels[0].cluster == 2
    arrays = random_inputs(graph, rows, 0.5)
    want = run(graph, arrays)[0]
    got = run_module(module, graph, arrays)[0].astype(np.float64)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 2e-3


def test_a_recorded_graph_gives_the_same() -> None:
    graph = fused()["attention split"]
    module = lower_cuda(graph, MACHINE, CudaOptions(fuse_combine=False))
    arrays = random_inputs(graph, 1, 0.5)
    built = compile_cuda_many([k.source for k in module.kernels], MACHINE.arch)
    library = CudaLibrary(module, [b.path for b in built if isinstance(b, Cubin)])
    inputs = [memory_of(a) for a in arrays]
    out = torch.full((2, 64, 64), float("nan"), dtype=torch.float16, device="cuda")
    scratch = torch.zeros(library.scratch_bytes + 256, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    recorded = library.capture(
        [x.data_ptr() for x in inputs], [out.data_ptr()], scratch.data_ptr(), stream.cuda_stream
    )
    assert torch.isnan(out).all()  # recording runs nothing
    recorded.replay(stream.cuda_stream)
    torch.cuda.synchronize()
    want = run(graph, arrays)[0]
    got = out.cpu().numpy().astype(np.float64)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 2e-3
    recorded.close()
    library.close()


COUNT = int(os.environ.get("OBELISK_TEST_GRAPHS", "60"))


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_programs(seed: int) -> None:
    graph = random_program(seed)
    arrays = arrays_for(graph, seed)
    try:
        module = lower_cuda(graph, MACHINE)
    except Infeasible:
        return
    got = run_module(module, graph, arrays)
    exact, working = run(graph, arrays), run(graph, arrays, Precision.WORKING)
    for g, e, w, node in zip(got, exact, working, graph.outputs, strict=True):
        assert worst_error(g, e, w, node.dtype) < 1.0, f"seed {seed}"
