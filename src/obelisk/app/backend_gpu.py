"""Every target of a CUDA device in one race: CUDA C++ and, where it is installed, Triton.

The first candidates are lowered for all targets; `optimize` gives further choices to what is
fastest then. Artifacts are the CUDA C++ back end's, whichever target won.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from itertools import zip_longest
from typing import Any

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

    name = "cuda"
    most_items, grow_items = 84, 72

    def toolchain(self) -> str:
        """That of every target."""
        ours = super().toolchain()
        return f"{ours}, {TRITON.toolchain()}" if has_triton() else ours

    def environment(self, device: str) -> dict[str, str]:
        """Compilers, driver and device."""
        return {**super().environment(device), "compiler": self.toolchain()}

    def options(self, graph: Graph, machine: Machine) -> Sequence[Any]:
        """The choices of all targets in turns, the defaults first, then two of ours for each of
        Triton's: its kernels take longer to compile and win less often.
        """
        ours: Sequence[Any] = super().options(graph, machine)
        try:
            theirs = TRITON.options(graph, machine) if has_triton() else []
        except Infeasible:  # a reason to leave Triton out, not the graph
            theirs = []
        pairs = (ours[:1], *(ours[i : i + 2] for i in range(1, len(ours), 2)))
        turns = zip_longest(pairs, theirs)
        return [o for mine, other in turns for o in (*(mine or ()), other) if o is not None]

    def lower(self, graph: Graph, machine: Machine, options: Any) -> Lowering:
        """By the target whose options they are."""
        if isinstance(options, TritonOptions):
            return TRITON.lower(graph, machine, options)
        return super().lower(graph, machine, options)

    def builder(self, machine: Machine, pool: Executor) -> Callable[[Lowering], Future[Any]]:
        """Each target's own, on one pool."""
        ours, theirs = super().builder(machine, pool), TRITON.builder(machine, pool)
        return lambda made: (theirs if isinstance(made.module, TritonModule) else ours)(made)

    def files(self, lowering: Lowering, built: Any) -> dict[str, bytes]:
        """The launches and cubins."""
        if isinstance(lowering.module, TritonModule):
            return TRITON.files(lowering, built)
        return super().files(lowering, built)


BACKEND = GpuBackend()
