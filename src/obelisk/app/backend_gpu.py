"""Both compilers of a CUDA device in one race: CUDA C++ and Triton kernels of the same graphs.

Its artifacts are the CUDA back end's, whichever compiler won. Without Triton it is that back end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, ClassVar

from obelisk.app.backend_cuda import CudaBackend
from obelisk.app.backend_triton import BACKEND as TRITON
from obelisk.app.backends import Lowering
from obelisk.base.errors import Infeasible, MissingDependency
from obelisk.build.triton import version
from obelisk.ir import Graph
from obelisk.lower.triton import TritonModule, TritonOptions
from obelisk.machine import Machine


def has_triton() -> bool:
    """Whether Triton is installed."""
    try:
        version()
    except MissingDependency:
        return False
    return True


class GpuBackend(CudaBackend):
    """See `backends.Backend`."""

    name = "gpu"
    most_items, grow_items = 72, 80
    ablations: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def toolchain(self) -> str:
        """Both compilers'."""
        ours = super().toolchain()
        return f"{ours}, {TRITON.toolchain()}" if has_triton() else ours

    def options(self, graph: Graph, machine: Machine) -> Sequence[Any]:
        """The choices of both, in turns: the defaults first."""
        ours: Sequence[Any] = super().options(graph, machine)
        try:
            theirs = TRITON.options(graph, machine) if has_triton() else []
        except Infeasible:  # a reason to leave Triton out, not the graph
            theirs = []
        turns = itertools.zip_longest(ours, theirs)
        return [o for pair in turns for o in pair if o is not None]

    def lower(self, graph: Graph, machine: Machine, options: Any) -> Lowering:
        """By the target whose options they are."""
        if isinstance(options, TritonOptions):
            return TRITON.lower(graph, machine, options)
        return super().lower(graph, machine, options)

    def builder(self, machine: Machine, pool: Executor) -> Callable[[Lowering], Future[Any]]:
        """Each target's own."""
        ours, theirs = super().builder(machine, pool), TRITON.builder(machine, pool)
        return lambda made: (theirs if isinstance(made.module, TritonModule) else ours)(made)

    def files(self, lowering: Lowering, built: Any) -> dict[str, bytes]:
        """The launches and cubins."""
        if isinstance(lowering.module, TritonModule):
            return TRITON.files(lowering, built)
        return super().files(lowering, built)


BACKEND = GpuBackend()
