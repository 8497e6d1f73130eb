"""The Triton back end: Triton kernels, its compiler in child processes, the CUDA launcher."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from obelisk.app.account import describe
from obelisk.app.backend_cuda import MODULE, CudaBackend, cubin_name
from obelisk.app.backends import Lowering, ordinal_of
from obelisk.base.errors import BuildFailed
from obelisk.base.settings import settings
from obelisk.build.device import COUNTER_BYTES, module_json, write_bundle
from obelisk.build.probe import device_facts
from obelisk.build.triton import TritonCubin, compile_triton_many, launchable, version
from obelisk.ir import Graph
from obelisk.lower.cuda import CudaModule
from obelisk.lower.triton import TritonModule, lower_triton, variants
from obelisk.machine import Machine

BUILD_SECONDS = 120.0  # time limit of one kernel


@dataclass(frozen=True, slots=True)
class TritonBuilt:
    """A module whose kernels are compiled: the bundle that a worker loads, each cubin, and the
    launches with the compiler's own arguments.
    """

    path: Path
    cubins: tuple[TritonCubin, ...]
    module: CudaModule


def build(module: TritonModule, machine: Machine) -> TritonBuilt:
    """Compile a module's kernels, one after the other; raises the first `BuildFailed`."""
    cubins = []
    for answer in compile_triton_many(module.kernels, machine, workers=1, timeout=BUILD_SECONDS):
        if isinstance(answer, BuildFailed):
            raise answer
        cubins.append(answer)
    whole = launchable(module, cubins)
    path = write_bundle(whole, [c.path for c in cubins], settings().cache_dir / "build" / "bundles")
    return TritonBuilt(path, tuple(cubins), whole)


class TritonBackend(CudaBackend):
    """See `backends.Backend`; device, rig, rivals and calls are the CUDA back end's."""

    name = "triton"
    most_items, grow_items = 24, 24  # its compiler is slower
    ablations: ClassVar[Mapping[str, Mapping[str, Any]]] = {"pipeline": {"stages": 1}}

    def toolchain(self) -> str:
        """Triton's version."""
        return f"triton {version()}"

    def environment(self, device: str) -> dict[str, str]:
        """Compiler, driver and device."""
        facts = device_facts(ordinal_of(device))
        return {
            "compiler": self.toolchain(), "driver": f"CUDA {facts.driver}", "device": facts.name
        }  # fmt: skip

    def options(self, graph: Graph, machine: Machine) -> Sequence[Any]:
        """Warps and stages."""
        return variants(graph, machine)

    def lower(self, graph: Graph, machine: Machine, options: Any) -> Lowering:
        """Kernels and launches."""
        module = lower_triton(graph, machine, options)
        return Lowering(
            graph,
            f"Triton, {describe(options)}",
            module.digest,
            "\n".join(k.source for k in module.kernels),
            module.scratch_bytes + COUNTER_BYTES,
            False,
            module,
        )

    def builder(self, machine: Machine, pool: Executor) -> Callable[[Lowering], Future[Any]]:
        """A child process for each module."""
        return lambda made: pool.submit(build, made.module, machine)

    def files(self, lowering: Lowering, built: Any) -> dict[str, bytes]:
        """The launches, and a cubin for each kernel."""
        out = {MODULE: json.dumps(module_json(built.module), sort_keys=True).encode()}
        for i, cubin in enumerate(built.cubins):
            out[cubin_name(i)] = cubin.path.read_bytes()
        return out


BACKEND = TritonBackend()
