"""Lowered graphs on a GPU, by either target: build, run on memory that was filled beforehand, and
bring the outputs back.

Takes graphs and arrays of numpy; needs torch for device memory only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from obelisk.base.errors import BuildFailed
from obelisk.build.cuda import Cubin, compile_cuda_many
from obelisk.build.device import CudaLibrary
from obelisk.build.triton import TritonCubin, compile_triton_many, launchable
from obelisk.ir import Graph
from obelisk.lower.cuda import CudaModule, CudaOptions, lower_cuda
from obelisk.lower.triton import TritonModule, TritonOptions, lower_triton
from obelisk.machine import find

MACHINE = find("h200")
GUARD = 64  # bytes behind each output that must stay as they were
TARGETS = ("cuda", "triton")
Module = CudaModule | TritonModule


def lowered(graph: Graph, target: str, options: Any = None) -> Module:
    """The module of a target."""
    if target == "cuda":
        return lower_cuda(graph, MACHINE, options or CudaOptions())
    return lower_triton(graph, MACHINE, options or TritonOptions())


def compile_all(modules: Sequence[Module]) -> None:
    """Compile the kernels of many modules at a time, so that each is found when it is needed."""
    cuda = [k.source for m in modules if isinstance(m, CudaModule) for k in m.kernels]
    triton = [k for m in modules if isinstance(m, TritonModule) for k in m.kernels]
    if cuda:
        compile_cuda_many(cuda, MACHINE.arch)
    if triton:
        compile_triton_many(triton, MACHINE)


def library_of(module: Module) -> CudaLibrary:
    """A module on the device; a kernel that does not compile fails the test."""
    if isinstance(module, CudaModule):
        cubins = compile_cuda_many([k.source for k in module.kernels], MACHINE.arch)
        for c in cubins:
            assert isinstance(c, Cubin), f"{c} {c.log}"
        return CudaLibrary(module, [c.path for c in cubins if isinstance(c, Cubin)])
    built = compile_triton_many(module.kernels, MACHINE)
    for b in built:
        assert not isinstance(b, BuildFailed), f"{b} {b.log}"
    good = [b for b in built if isinstance(b, TritonCubin)]
    return CudaLibrary(launchable(module, good), [b.path for b in good])


def memory_of(array: Any) -> Any:
    """Device bytes of an array as it lies, gaps between rows included."""
    import torch

    size = array.dtype.itemsize
    span = 1 + sum((n - 1) * (s // size) for n, s in zip(array.shape, array.strides, strict=True))
    flat = np.lib.stride_tricks.as_strided(array, (span,), (size,))
    return torch.from_numpy(flat.copy().view(np.uint8)).cuda()


@dataclass
class Loaded:
    """A module with its memory on the device."""

    library: CudaLibrary
    inputs: list[Any]
    outputs: list[Any]
    scratch: Any

    @property
    def pointers(self) -> tuple[list[int], list[int], int]:
        """What a launch takes."""
        return (
            [x.data_ptr() for x in self.inputs],
            [o.data_ptr() for o in self.outputs],
            self.scratch.data_ptr(),
        )


def loaded(module: Module, graph: Graph, arrays: Sequence[Any]) -> Loaded:
    """Memory in which everything but the inputs is NaN."""
    import torch

    library = library_of(module)
    scratch = torch.full((library.scratch_bytes + 256,), 255, dtype=torch.uint8, device="cuda")
    library.prepare(scratch.data_ptr(), torch.cuda.current_stream().cuda_stream)
    outputs = [
        torch.full((int(n.elements * n.dtype.nbytes) + GUARD,), 255, dtype=torch.uint8).cuda()
        for n in graph.outputs
    ]
    return Loaded(library, [memory_of(a) for a in arrays], outputs, scratch)


def results(there: Loaded, graph: Graph) -> list[Any]:
    """The outputs as numpy arrays; checks what lies behind them."""
    got = []
    for node, o in zip(graph.outputs, there.outputs, strict=True):
        host = o.cpu().numpy()
        assert (host[-GUARD:] == 255).all(), "wrote beyond an output"
        got.append(host[:-GUARD].view(node.dtype.numpy).reshape(node.shape))
    return got


def run_module(module: Module, graph: Graph, arrays: Sequence[Any], times: int = 2) -> list[Any]:
    """The outputs of the last of several calls."""
    import torch

    there = loaded(module, graph, arrays)
    for _ in range(times):
        for o in there.outputs:
            o.fill_(255)
        there.library.launch(*there.pointers, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
    got = results(there, graph)
    there.library.close()
    return got


def whole_error(got: Any, want: Any) -> float:
    """The relative error of an output vector; infinite where an element is not finite."""
    g = np.asarray(got, np.float64)
    if not np.isfinite(g).all():
        return float("inf")
    return float(np.linalg.norm(g - want) / np.linalg.norm(want))
