"""The Triton back end: Triton kernels, its compiler in child processes, the CUDA launcher."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
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
TARGET = "Triton"
SHARE = 6  # modules that one child process compiles at most: its start counts for some of them


@dataclass(frozen=True, slots=True)
class TritonBuilt:
    """A module whose kernels are compiled: the bundle that a worker loads, each cubin, and the
    launches with the compiler's own arguments.
    """

    path: Path
    cubins: tuple[TritonCubin, ...]
    module: CudaModule


def joined(module: TritonModule, cubins: Sequence[TritonCubin | BuildFailed]) -> TritonBuilt:
    """A module and its cubins as one bundle; raises the first `BuildFailed` among them."""
    good: list[TritonCubin] = []
    for answer in cubins:
        if isinstance(answer, BuildFailed):
            raise answer
        good.append(answer)
    whole = launchable(module, good)
    path = write_bundle(whole, [c.path for c in good], settings().cache_dir / "build" / "bundles")
    return TritonBuilt(path, tuple(good), whole)


class TritonBuilder:
    """Compiles modules, several in a child process: it takes longer to start than to compile one.

    Each task of the pool takes its share of what waits when it begins, so that all threads of the
    pool work and few children start.
    """

    def __init__(self, machine: Machine, pool: Executor) -> None:
        self.machine, self.pool = machine, pool
        self.waiting: deque[tuple[TritonModule, Future[TritonBuilt]]] = deque()
        self.lock = Lock()

    def __call__(self, made: Lowering) -> Future[TritonBuilt]:
        """Put a module in line."""
        future: Future[TritonBuilt] = Future()
        with self.lock:
            self.waiting.append((made.module, future))
        self.pool.submit(self._work)
        return future

    def _work(self) -> None:
        """Build a share of what waits; nothing where others have taken it."""
        with self.lock:
            count = min(SHARE, -(-len(self.waiting) // max(1, settings().threads)))
            taken = [self.waiting.popleft() for _ in range(count)]
        todo = [(m, f) for m, f in taken if f.set_running_or_notify_cancel()]
        if not todo:
            return
        try:
            kernels = [k for m, _ in todo for k in m.kernels]
            answers = compile_triton_many(kernels, self.machine, workers=1, timeout=BUILD_SECONDS)
        except BaseException as error:  # whoever waits must hear of it
            for _, future in todo:
                future.set_exception(error)
            return
        found = dict(zip(kernels, answers, strict=True))
        for module, future in todo:
            try:
                future.set_result(joined(module, [found[k] for k in module.kernels]))
            except BaseException as error:
                future.set_exception(error)


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
            f"{TARGET}, {describe(options)}",
            module.digest,
            "\n".join(k.source for k in module.kernels),
            module.scratch_bytes + COUNTER_BYTES,
            False,
            module,
            len(module.launches),
            TARGET,
        )

    def builder(self, machine: Machine, pool: Executor) -> Callable[[Lowering], Future[Any]]:
        """Child processes, each for a share of the modules."""
        return TritonBuilder(machine, pool)

    def files(self, lowering: Lowering, built: Any) -> dict[str, bytes]:
        """The launches, and a cubin for each kernel."""
        out = {MODULE: json.dumps(module_json(built.module), sort_keys=True).encode()}
        for i, cubin in enumerate(built.cubins):
            out[cubin_name(i)] = cubin.path.read_bytes()
        return out


BACKEND = TritonBackend()
