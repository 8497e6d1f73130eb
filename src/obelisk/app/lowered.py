"""`obelisk show --lowered` and `--code`: what a graph becomes for a machine, as text."""

from __future__ import annotations

from collections.abc import Sequence

from obelisk.app.backends import backend_of
from obelisk.app.request import restricted
from obelisk.ir import Graph
from obelisk.lower import describe
from obelisk.lower.cpu import cpu_program
from obelisk.machine import MachineKind, find


def lowered_text(graph: Graph, target: str, without: Sequence[str], tiles: bool, code: bool) -> str:
    """The scheduled tile program (`tiles`) and the generated text (`code`) of the default lowering.

    `target` is a device or a machine's name; `without` leaves decisions out. Raises `Infeasible`
    naming the limit.
    """
    word = target.partition(":")[0]
    machine = backend_of(target).machine(target) if word == "cuda" else find(target)
    backend = backend_of("cpu" if machine.kind is MachineKind.CPU else "cuda-c")
    options = restricted(backend, backend.options(graph, machine), without)[0]
    parts: list[str] = []
    if tiles:
        if machine.kind is MachineKind.CPU:
            parts.append(describe(cpu_program(graph, machine, options)))
        else:
            from obelisk.lower.cuda.describe import describe as describe_cuda

            parts.append(describe_cuda(backend.lower(graph, machine, options).module))
    if code:
        parts.append(backend.lower(graph, machine, options).source)
    return "\n".join(parts)
