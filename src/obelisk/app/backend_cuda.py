"""CUDA C++ for a CUDA device: NVRTC (or nvcc), cubins, rivals, calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

from obelisk.app.account import describe
from obelisk.app.backends import Lowering, ordinal_of
from obelisk.app.contenders_cuda import QUICK, RIVALS, contenders
from obelisk.app.cuda_calls import CudaRunner
from obelisk.app.sizing import neighbours
from obelisk.base.settings import settings
from obelisk.build.cuda import Cubin, compile_cuda, toolchain
from obelisk.build.device import COUNTER_BYTES, module_json, write_bundle
from obelisk.build.probe import device_facts, machine_of
from obelisk.ir import DType, Graph
from obelisk.lower.cuda import CudaModule, CudaOptions, lower_cuda, variants
from obelisk.machine import Machine
from obelisk.tune import Contender, Rig, cuda_rig

BUILD_SECONDS = 120.0  # time limit of one compiler run
MODULE = "module.json"
TARGET = "CUDA C++"
_SHARED_FORM = "in shared memory"


def cubin_name(number: int) -> str:
    """The file of kernel `number` in an artifact."""
    return f"kernel{number}.cubin"


def scratch_of(module: CudaModule) -> int:
    """Scratch memory of a call, its counters included."""
    return module.scratch_bytes + COUNTER_BYTES * max(1, module.counters)


@dataclass(frozen=True, slots=True)
class CudaBuilt:
    """A module whose kernels are compiled: the bundle that a worker loads, and each cubin."""

    path: Path
    cubins: tuple[Cubin, ...]


class CudaBuilder:
    """Compiles modules: each distinct kernel text once, however many modules share it."""

    def __init__(self, machine: Machine, pool: Executor) -> None:
        self.arch, self.pool = machine.arch, pool
        self.kernels: dict[str, Future[Cubin]] = {}
        self.lock = Lock()

    def __call__(self, made: Lowering) -> Future[CudaBuilt]:
        """Start what is not yet being compiled; the future ends when all kernels are there."""
        module: CudaModule = made.module
        parts = [self._kernel(k.source) for k in module.kernels]
        whole: Future[CudaBuilt] = Future()
        left = len(parts)

        def arrived(_: Future[Cubin]) -> None:
            nonlocal left
            with self.lock:
                left -= 1
                last = left == 0
            if last and whole.set_running_or_notify_cancel():
                self._join(whole, module, parts)

        for part in parts:
            part.add_done_callback(arrived)
        if not parts and whole.set_running_or_notify_cancel():
            self._join(whole, module, parts)
        return whole

    def _kernel(self, source: str) -> Future[Cubin]:
        if source not in self.kernels:
            self.kernels[source] = self.pool.submit(
                compile_cuda, source, self.arch, timeout=BUILD_SECONDS
            )
        return self.kernels[source]

    def _join(
        self, whole: Future[CudaBuilt], module: CudaModule, parts: Sequence[Future[Cubin]]
    ) -> None:
        try:
            cubins = tuple(p.result() for p in parts)
            folder = settings().cache_dir / "build" / "bundles"
            path = write_bundle(module, [c.path for c in cubins], folder)
            whole.set_result(CudaBuilt(path, cubins))
        except BaseException as error:  # also a build that was called off: the waiter must hear
            whole.set_exception(error)


class CudaBackend:
    """See `backends.Backend`."""

    name, dtype = "cuda-c", DType.F16
    most_items, grow_items, start_seconds = 72, 64, 2.5
    quick, rivals = QUICK, RIVALS
    ablations: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "layout": {"fragments": False},
        "fusion": {"fuse_combine": False},
        "pipeline": {"stages": 1, "bulk": False},
        "groups": {"groups": 1},
        "wgmma": {"wgmma": False},
        "bulk": {"bulk": False},
        "ahead": {"ahead": False},
        "clusters": {"clusters": False},
        "scales": {"share_scales": False, "remake": False},
        "sizes": {"row_tile": 0, "column_tile": 0, "splits": 0},
    }

    def machine(self, device: str) -> Machine:
        """The device's own limits, read off it."""
        return machine_of(device_facts(ordinal_of(device)))

    def toolchain(self) -> str:
        """NVRTC's version, or nvcc's."""
        return toolchain()

    def environment(self, device: str) -> dict[str, str]:
        """Compiler, driver and device."""
        facts = device_facts(ordinal_of(device))
        return {"compiler": toolchain(), "driver": f"CUDA {facts.driver}", "device": facts.name}

    def siblings(self, graph: Graph, machine: Machine) -> Sequence[Graph]:
        """Neighbouring grids and loop counts: the device ranks them, not the model."""
        return neighbours(graph, machine)

    def options(self, graph: Graph, machine: Machine) -> Sequence[CudaOptions]:
        """Up to a dozen."""
        return variants(graph, machine)

    def lower(self, graph: Graph, machine: Machine, options: CudaOptions) -> Lowering:
        """Kernels and launches."""
        module = lower_cuda(graph, machine, options)
        return Lowering(
            graph,
            describe(options),
            module.digest,
            "\n".join(k.source for k in module.kernels),
            scratch_of(module),
            any(_SHARED_FORM in n for n in module.notes),
            module,
            len(module.launches),
            TARGET,
        )

    def builder(self, machine: Machine, pool: Executor) -> Callable[[Lowering], Future[CudaBuilt]]:
        """Kernels in parallel, none twice."""
        return CudaBuilder(machine, pool)

    def rig(self, device: str) -> Rig:
        """The device."""
        return cuda_rig(ordinal_of(device))

    def contenders(
        self, graph: Graph, names: Sequence[str], limit: float
    ) -> tuple[list[Contender], dict[str, str]]:
        """torch in its ways, and kernel libraries."""
        return contenders(graph, names, limit)

    def starts_slowly(self, name: str) -> bool:
        """All need torch."""
        return True

    def files(self, lowering: Lowering, built: CudaBuilt) -> dict[str, bytes]:
        """The launches, and a cubin for each kernel."""
        module: CudaModule = lowering.module
        out = {MODULE: json.dumps(module_json(module), sort_keys=True).encode()}
        for i, cubin in enumerate(built.cubins):
            out[cubin_name(i)] = cubin.path.read_bytes()
        return out

    def target(self, machine: Machine) -> dict[str, Any]:
        """The exact architecture and the shared memory that was planned with."""
        return {
            "arch": machine.arch,
            "capability": list(machine.capability or ()),
            "shared_bytes": machine.shared_bytes,
        }

    def admit(self, target: Mapping[str, Any], where: str) -> None:
        """Anywhere: an artifact is looked at without a device; its first call finds out."""

    def runner(self, artifact: Any, path_of: Callable[[str], Path]) -> CudaRunner:
        """Loads kernels when they are first called."""
        return CudaRunner(artifact, MODULE, cubin_name)


BACKEND = CudaBackend()
