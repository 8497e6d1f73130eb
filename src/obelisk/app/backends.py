"""The back ends that `optimize` can use: one package that lowers, one module here, one line below.

A `Backend` is everything that the stages need to know of a target: which machine a device is, how a
graph is lowered and built, on which rig it is measured, and how the result is called. The stages
themselves know no target. It promises that a back end is imported only when its device is asked
for, so that a missing compiler or driver of one never hinders another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from obelisk.base.errors import UnknownName
from obelisk.ir import DType, Graph
from obelisk.machine import Machine
from obelisk.tune import Contender, Rig

# Device names and the module that serves them; `NAME:N` is device number N of a kind that counts.
_REGISTRY: Mapping[str, str] = {
    "cpu": "obelisk.app.backend_cpu",
    "host": "obelisk.app.backend_cpu",
    "cuda": "obelisk.app.backend_gpu",  # every target below that is installed, in one race
    "cuda-c": "obelisk.app.backend_cuda",  # CUDA C++ alone
    "triton": "obelisk.app.backend_triton",
}
_COUNTED = ("cuda", "cuda-c", "triton")


@dataclass(frozen=True, slots=True)
class Lowering:
    """One lowering of one graph.

    Attributes:
        graph: what was lowered.
        label: the choices in words; empty for the default ones.
        digest: of the text; equal texts are built once.
        source: all text, for people.
        scratch_bytes: scratch memory of a call.
        slow: the emitter had to take a form that is there to be right, not fast.
        module: the emitter's own record.
        launches: kernels of a call; 0 where that is the graph's own number.
        target: which of a device's targets it is for; empty where there is one.
    """

    graph: Graph
    label: str
    digest: str
    source: str
    scratch_bytes: int
    slow: bool
    module: Any
    launches: int = 0
    target: str = ""


class Runner(Protocol):
    """Calls a compiled program on tensors."""

    def call(self, tensors: Sequence[Any], out: Any) -> Any:
        """Run; raises `CallError` for tensors that do not match."""

    @property
    def text(self) -> str:
        """The signature in words."""


class Built(Protocol):
    """What a builder made."""

    @property
    def path(self) -> Path:
        """The file that a tuner's worker loads."""


class Backend(Protocol):
    """A target.

    Attributes:
        name: what artifacts and reports call it.
        dtype: of named programs, unless one is asked for.
        most_items: lowerings that are built before anything is measured; `grow_items` those that
            may follow once times are known.
        start_seconds: what the tuner's worker needs to start, twice.
        quick, rivals: baselines of `optimize` and of `bench`.
        ablations: decisions of the lowering that can be left out, by the name that the command line
            has for them, and the options that do so.
    """

    name: str
    dtype: DType
    most_items: int
    grow_items: int
    start_seconds: float
    quick: tuple[str, ...]
    rivals: tuple[str, ...]
    ablations: Mapping[str, Mapping[str, Any]]

    def machine(self, device: str) -> Machine:
        """The device at hand; raises `UserError` or `MissingDependency` where there is none."""

    def toolchain(self) -> str:
        """What builds, with versions and flags; raises `MissingDependency` where nothing does."""

    def environment(self, device: str) -> dict[str, str]:
        """What times depend on besides the machine: compilers, drivers."""

    def siblings(self, graph: Graph, machine: Machine) -> Sequence[Graph]:
        """The same structure at other sizes that are worth measuring."""

    def options(self, graph: Graph, machine: Machine) -> Sequence[Any]:
        """Lowering choices worth racing, the default first."""

    def lower(self, graph: Graph, machine: Machine, options: Any) -> Lowering:
        """Text; raises `Infeasible`."""

    def builder(self, machine: Machine, pool: Executor) -> Callable[[Lowering], Future[Any]]:
        """Starts builds on a pool; the futures give `Built`, or raise `BuildFailed`."""

    def rig(self, device: str) -> Rig:
        """Where candidates are measured."""

    def contenders(
        self, graph: Graph, names: Sequence[str], limit: float
    ) -> tuple[list[Contender], dict[str, str]]:
        """The baselines called `names`, and why others cannot be."""

    def starts_slowly(self, name: str) -> bool:
        """Whether a baseline takes seconds to start."""

    def files(self, lowering: Lowering, built: Any) -> dict[str, bytes]:
        """The binary parts of an artifact, by file name."""

    def target(self, machine: Machine) -> dict[str, Any]:
        """What a machine needs to run the artifact, as JSON values; `admit` reads it."""

    def admit(self, target: Mapping[str, Any], where: str) -> None:
        """Raises `UserError` where this machine can never run what was built for `target`."""

    def runner(self, artifact: Any, path_of: Callable[[str], Path]) -> Runner:
        """What calls an artifact whose binary parts `path_of` gives files for."""


def known_devices() -> str:
    """All device names, for messages."""
    return ", ".join(f"{n}, {n}:N" if n in _COUNTED else n for n in _REGISTRY)


def ordinal_of(device: str) -> int:
    """Device number of `cuda` (0) or `cuda:N`; raises `UnknownName` for another form."""
    name, colon, number = device.partition(":")
    if colon and (name not in _COUNTED or not number.isdigit()):
        raise UnknownName(f"device {device!r}: known are {known_devices()}")
    return int(number or 0)


def on_gpu(device: str) -> bool:
    """Whether a device's name is one of a CUDA device."""
    return device.partition(":")[0] in _COUNTED


@cache
def _load(module: str) -> Backend:
    found: Backend = import_module(module).BACKEND
    return found


def backend_of(device: str) -> Backend:
    """The back end that serves a device; raises `UnknownName` with the known ones."""
    ordinal_of(device)
    module = _REGISTRY.get(device.partition(":")[0])
    if module is None:
        raise UnknownName(
            f"device {device!r}: code is emitted for {known_devices()} so far; "
            "`obelisk search --target` knows more machines"
        )
    return _load(module)
