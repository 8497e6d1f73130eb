"""The CPU back end: C through the system's compiler, shared libraries, this machine's cores."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, ClassVar

from obelisk.app.account import describe
from obelisk.app.backends import Lowering
from obelisk.app.calls import Signature, Tensor
from obelisk.app.contenders import ALL, NUMPY, QUICK, contenders
from obelisk.base.errors import InternalError, UserError
from obelisk.build import Built, Library, compile_c, compiler_identity
from obelisk.build.compiler import FLAGS
from obelisk.ir import DType, Graph
from obelisk.lower.cpu import CpuOptions, lower_cpu, variants
from obelisk.machine import Machine, find, host
from obelisk.tune import CPU, Contender, Rig

BUILD_SECONDS = 60.0  # time limit of one compiler run
LIBRARY = "library.so"


class CpuBackend:
    """See `backends.Backend`."""

    name, dtype = "cpu", DType.F32
    most_items, grow_items, start_seconds = 24, 0, 1.3
    quick, rivals = QUICK, ALL
    ablations: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "alias": {"alias": False},
        "unrolling": {"unroll": 1},
    }

    def machine(self, device: str) -> Machine:
        """This machine."""
        return find(device)

    def toolchain(self) -> str:
        """The compiler's version and digest, and the flags."""
        identity = compiler_identity()
        return json.dumps([identity.version, identity.digest, FLAGS])

    def environment(self, device: str) -> dict[str, str]:
        """The compiler."""
        return {"compiler": compiler_identity().version}

    def siblings(self, graph: Graph, machine: Machine) -> Sequence[Graph]:
        """None: the search's sizes are measured as they are."""
        return ()

    def options(self, graph: Graph, machine: Machine) -> Sequence[CpuOptions]:
        """At most three."""
        return variants(graph, machine)

    def lower(self, graph: Graph, machine: Machine, options: CpuOptions) -> Lowering:
        """One translation unit."""
        module = lower_cpu(graph, machine, options)
        return Lowering(
            graph, describe(options), module.digest, module.source, module.scratch_bytes, False,
            module,
        )  # fmt: skip

    def builder(self, machine: Machine, pool: Executor) -> Callable[[Lowering], Future[Built]]:
        """A compiler run for each text."""
        return lambda made: pool.submit(compile_c, made.source, timeout=BUILD_SECONDS)

    def rig(self, device: str) -> Rig:
        """The cores."""
        return CPU

    def contenders(
        self, graph: Graph, names: Sequence[str], limit: float
    ) -> tuple[list[Contender], dict[str, str]]:
        """numpy and torch."""
        return contenders(graph, names, limit)

    def starts_slowly(self, name: str) -> bool:
        """All but numpy import torch."""
        return name != NUMPY

    def files(self, lowering: Lowering, built: Built) -> dict[str, bytes]:
        """The shared object."""
        return {LIBRARY: built.path.read_bytes()}

    def target(self, machine: Machine) -> dict[str, Any]:
        """The instruction set."""
        return {"arch": machine.arch, "features": sorted(machine.features)}

    def admit(self, target: Mapping[str, Any], where: str) -> None:
        """The instruction set must be here."""
        here = host()
        lacks = set(target["features"]) - set(here.features)
        if target["arch"] != here.arch or lacks:
            raise UserError(
                f"{where} was built for {target['arch']} with {', '.join(target['features'])}; "
                f"this is {here.arch} without {', '.join(sorted(lacks)) or 'that'}: optimize it "
                "here"
            )

    def runner(self, artifact: Any, path_of: Callable[[str], Path]) -> CpuRunner:
        """Loads the library."""
        return CpuRunner(artifact, path_of(LIBRARY))


class CpuRunner:
    """Calls a library; a call that runs has a library object, and so scratch memory, of its own."""

    def __init__(self, artifact: Any, path: Path) -> None:
        self.signature = Signature(artifact.program)
        self.scratch, self.threads, self.path = artifact.scratch_bytes, artifact.threads, path
        self.idle = [Library(path, artifact.scratch_bytes)]

    @property
    def text(self) -> str:
        """The signature in words."""
        return str(self.signature)

    def call(self, tensors: Sequence[Tensor], out: Tensor | None) -> Any:
        """Run on numpy arrays or CPU tensors of torch."""
        bound = self.signature.bind(tensors, out)
        library = self._take()
        try:
            code = library.call(bound.inputs, bound.outputs, self.threads)
        finally:
            self.idle.append(library)
        if code:
            raise InternalError(f"{self.signature}: the kernel returned {code}")
        return bound.results[0] if len(bound.results) == 1 else bound.results

    def _take(self) -> Library:
        """A library that no other call is using; popping is atomic."""
        try:
            return self.idle.pop()
        except IndexError:
            return Library(self.path, self.scratch)


BACKEND = CpuBackend()
